"""Grammars: which grammars are refused, and which tokens a mask allows."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise import SamplingParams
from samewise.errors import BadParameter
from samewise.testing import byte_tokenizer
from samewise.text.grammar import BLOCK, PLAIN, GrammarGuide, Grammars, Pace
from samewise.types import Finish, Grammar, Sampling

EOS, VOCAB = 257, 320
END_IDS = frozenset({EOS})
TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCAB, [EOS])


SAMPLES = {
    "object": Grammar.json_object(),
    "schema": Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "xy"]}}},
            "required": ["a"],
        }
    ),
    "regex": Grammar.regex("a+(b|cc)?"),
    "lark": Grammar.lark('start: "<" start ">" | /[xyz]{0,2}/'),
}


def ids(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def allowed_ids(mask):
    return [] if mask is None else [t for t in range(8 * len(mask)) if mask[t >> 3] >> (t & 7) & 1]


def guide_after(grammar, text="", end_ids=END_IDS):
    guide = GRAMMARS.guide(grammar, end_ids)
    for token in ids(text):
        assert guide.take(token) is None
    return guide


# ---- refusal


def test_grammars_of_equal_kind_and_text_are_equal():
    assert Grammar.json_schema({"b": 1, "a": "é"}) == Grammar("json_schema", '{"b":1,"a":"é"}')
    assert hash(Grammar.regex("a")) == hash(Grammar("regex", "a"))
    assert hash(Sampling(grammar=Grammar.json_object())) != hash(Sampling())


def nested_schema(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("gbnf", "x"), "known are json_object"),
        (lambda: Grammar("json_object", "{}"), "takes no text"),
        (lambda: Grammar.regex(""), "needs a text"),
        (lambda: Grammar("regex", 5), "not int"),
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema({"a": object()}), "not JSON"),
        (lambda: Grammar.json_schema(nested_schema(2000)), "not JSON"),
        (lambda: Grammar.json_schema("3"), "an object"),
        (lambda: SamplingParams(grammar="a"), "give a Grammar"),
        (
            lambda: SamplingParams(grammar=Grammar.regex("a"), allowed_token_ids=[1]),
            "combined with a grammar",
        ),
    ],
)
def test_invalid_grammar_is_refused_when_created(make, message):
    with pytest.raises(BadParameter, match=message):
        make()


def test_grammar_without_a_tokenizer_is_refused():
    with pytest.raises(BadParameter, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).check(Grammar.json_object())


def test_missing_llguidance_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(BadParameter, match=r"samewise\[grammar\]"):
        Grammars(TOKENIZER, VOCAB, [EOS]).check(Grammar.json_object())


# ---- masks


def random_path(guide, rng, steps):
    """Random allowed tokens, and the mask before each of them."""
    tokens, masks = [], []
    for _ in range(steps):
        mask = guide.mask(tuple(tokens))
        choices = [token for token in allowed_ids(mask) if token != EOS]
        if not choices:
            break
        masks.append(mask)
        tokens.append(rng.choice(choices))
    return tuple(tokens), masks


@pytest.mark.parametrize("name", SAMPLES)
@given(seed=st.integers(0, 10**6), split=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_mask_is_a_function_of_the_tokens_before(name, seed, split):
    """It does not depend on how many are committed, on earlier guesses or on the order of calls."""
    grammar, rng = SAMPLES[name], random.Random(seed)
    tokens, masks = random_path(GRAMMARS.guide(grammar, END_IDS), rng, 12)
    split = min(split, len(tokens))
    other = GRAMMARS.guide(grammar, END_IDS)
    for token in tokens[:split]:
        assert other.masks(tuple(rng.randrange(VOCAB) for _ in range(3)))[0] is not None
        other.take(token)
    rest = tokens[split:]
    if rng.random() < 0.5:
        other.fits([], tuple(rng.randrange(VOCAB) for _ in range(3)))
    assert other.masks(rest)[: len(rest)] == masks[split:]
    assert [other.mask(rest[:n]) for n in range(len(rest))] == masks[split:]


@pytest.mark.parametrize("name", SAMPLES)
def test_tokens_a_mask_allows_may_be_guessed_and_committed(name):
    rng = random.Random(name)
    tokens, masks = random_path(GRAMMARS.guide(SAMPLES[name], END_IDS), rng, 10)
    for n, mask in enumerate(masks):
        guide = GRAMMARS.guide(SAMPLES[name], END_IDS)
        draft = list(tokens[:n])
        fitting = [token for token in range(VOCAB) if guide.fits(draft, (token,))]
        assert fitting == allowed_ids(mask)
        for token in draft:
            guide.take(token)
        refused = next(token for token in range(256) if token not in fitting)
        assert guide.take(refused) is Finish.ABORT


@pytest.mark.parametrize(
    ("grammar", "text", "accepts"),
    [
        (SAMPLES["regex"], "", False),
        (SAMPLES["regex"], "a", True),
        (SAMPLES["regex"], "aac", False),
        (SAMPLES["lark"], "", True),
        (SAMPLES["lark"], "<x", False),
        (SAMPLES["object"], '{"a": 1', False),
        (Grammar.json_schema({"type": "integer"}), "12", True),
    ],
)
def test_end_of_text_is_allowed_exactly_where_the_grammar_accepts(grammar, text, accepts):
    assert (EOS in allowed_ids(guide_after(grammar, text).mask(()))) is accepts
    assert guide_after(grammar, text).fits([], (EOS,)) == accepts
    assert EOS not in allowed_ids(guide_after(grammar, text, frozenset()).mask(())), (
        "end-of-text is not a stop id"
    )
    assert guide_after(grammar, text).take(EOS) is (Finish.STOP if accepts else Finish.ABORT)


def test_special_token_among_the_stop_ids_ends_the_text():
    (a,) = ids("a")
    guide = GRAMMARS.guide(SAMPLES["regex"], frozenset({256, a}))
    assert allowed_ids(guide.mask(())) == [a]
    assert guide.fits([], (256,)) == 0
    assert guide.take(a) is None
    assert [token for token in allowed_ids(guide.mask(())) if token > 255] == [256]
    assert guide.fits([], (256,)) == 1
    assert guide.take(256) is Finish.STOP


@pytest.mark.parametrize(("name", "text"), [("regex", "aab"), ("object", '{"a":1}'), ("lark", "<xy>")])
def test_complete_text_finishes_the_sequence(name, text):
    *before, last = ids(text)
    guide = GRAMMARS.guide(SAMPLES[name], END_IDS)
    # No guess fits after the end, not even end-of-text.
    assert guide.fits([], (*before, last, EOS)) == len(text)
    assert guide.masks(ids(text))[-1] is None
    assert [guide.take(token) for token in before] == [None] * len(before)
    assert guide.take(last) is Finish.STOP


def test_guesses_outside_the_vocabulary_do_not_fit():
    guide = guide_after(Grammar.regex("a+"))
    (a,) = ids("a")
    for odd in (-1, VOCAB, 2**40, 300, 256):
        assert guide.fits([a], (a, odd, a)) == 1
        assert guide.masks((a, odd, a))[2:] == [None, None]
        assert guide.fits([odd], (a,)) == 0


def test_white_space_in_json_is_bounded():
    for text in ("{", '{"a"', '{"a":', '{"a":1', '{"a":1,'):
        guide = guide_after(SAMPLES["object"], text)
        longest = max(guide.fits([], ids(blank * 40)) for blank in (" ", "\n", "\t"))
        assert longest <= 17, text
        assert guide.fits([], ids("\n" + " " * 40)) <= 17
        assert guide.fits([], ids("\n" * 3)) <= 1
    assert guide_after(SAMPLES["object"]).fits([], ids(" {")) == 0


def test_properties_follow_the_order_of_the_schema():
    schema = {"properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["z", "a"]}
    guide = guide_after(Grammar.json_schema(schema | {"type": "object"}))
    assert guide.fits([], ids('{"z":null,"a":null}')) == 19
    assert guide.fits([], ids('{"a')) == 2


def test_threads_may_share_grammars():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    results = []

    def first_masks():
        for grammar in SAMPLES.values():
            guide = grammars.guide(grammar, END_IDS)
            results.append((grammar, guide.mask(())))

    threads = [threading.Thread(target=first_masks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    assert len(set(results)) == len(SAMPLES)


class FailingMatcher:
    """Fails on the given paths, as llguidance does on text that is too complex."""

    def __init__(self, fails, path=()):
        self.fails, self.path = fails, list(path)

    def deep_copy(self):
        return FailingMatcher(self.fails, self.path)

    def is_error(self):
        return tuple(self.path) in self.fails

    is_stopped = is_error

    def is_accepting(self):
        return False

    def try_consume_tokens(self, tokens):
        self.path += tokens
        return len(tokens)

    consume_tokens = try_consume_tokens

    def rollback(self, num):
        del self.path[len(self.path) - num :]

    def compute_bitmask(self):
        return b"\xff\xff"


def test_failure_on_a_guess_does_not_affect_committed_tokens():
    class Trie:
        eos_tokens = (7,)

        def is_special_token(self, token):
            return False

    guide = GrammarGuide(FailingMatcher({(1, 2)}), Trie(), frozenset({7}))
    assert guide.masks((1, 2, 3)) == [b"\x7f\xff", b"\x7f\xff", None, None]
    assert guide.take(1) is None
    assert guide.mask(()) == b"\x7f\xff"
    assert guide.mask((2,)) is None
    assert guide.mask((3,)) == b"\x7f\xff"
    assert guide.take(2) is Finish.ABORT


EXHAUSTING = Grammar.regex("(a{0,1000}){0,1000}")  # llguidance gives up on it after some hundred letters


def exhaust(guide):
    """Commit tokens until llguidance gives up; returns how many."""
    (a,) = ids("a")
    for num in range(2000):
        if guide.mask(()) is None or guide.take(a) in (Finish.ABORT, Finish.ERROR):
            return num
    raise AssertionError


def masks_until_refused(guide, num, before_each=lambda guide: None):
    """Commit letters until the guide refuses one; the mask before each."""
    masks, (a,) = [], ids("a")
    for _ in range(num):
        before_each(guide)
        mask = guide.mask(())
        if guide.take(a) is not None:
            return masks
        masks.append(mask)
    return masks


def test_where_a_sequence_ends_does_not_depend_on_others_or_on_guesses():
    grammars, (a,) = Grammars(TOKENIZER, VOCAB, [EOS]), ids("a")
    alone = masks_until_refused(grammars.guide(EXHAUSTING, END_IDS), 2000)
    assert BLOCK < len(alone) < 2000

    def new_guide(used):
        """A guide of a lexer that another sequence has used for so many tokens."""
        guide = (compiled := grammars._make(EXHAUSTING, PLAIN)).guide(END_IDS)
        masks_until_refused(compiled.guide(END_IDS), used)
        return guide

    for used in (0, 30, BLOCK + 5, len(alone) - 1, 2000):
        assert masks_until_refused(new_guide(used), 2000) == alone
    guessing = masks_until_refused(new_guide(0), 2000, lambda guide: guide.masks((a,) * 9))
    assert guessing == alone
    compiled = grammars._make(EXHAUSTING, PLAIN)
    beside = compiled.guide(END_IDS)
    assert masks_until_refused(compiled.guide(END_IDS), 2000, lambda _: beside.take(a)) == alone


def test_a_sequence_that_was_restored_ends_where_it_would_have_ended():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    alone = masks_until_refused(grammars.guide(EXHAUSTING, END_IDS), 2000)

    def restored(guide):
        if len(guide._committed) % 50 == 49:
            guide.restore(tuple(guide._committed))

    assert masks_until_refused(grammars._make(EXHAUSTING, PLAIN).guide(END_IDS), 2000, restored) == alone


def test_sequence_that_exhausts_a_grammar_does_not_end_others_of_it():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    other = grammars.guide(EXHAUSTING, END_IDS)
    ended = grammars.guide(EXHAUSTING, END_IDS)
    assert ended.take(ids("a")[0]) is None
    masks = other.masks(ids("aaa"))
    assert 50 < exhaust(grammars.guide(EXHAUSTING, END_IDS)) < 1000
    for text in ("", "a", "aa"):
        assert other.mask(ids(text)) == masks[len(text)]
    assert [other.take(token) for token in ids("aaa")] == [None] * 3
    assert other.mask(()) == masks[3]
    assert ended.take(EOS) is Finish.STOP
    assert grammars.guide(EXHAUSTING, END_IDS).masks(ids("aaa")) == masks


def test_answer_to_an_exhausted_grammar_may_be_resumed():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    other = grammars.guide(EXHAUSTING, END_IDS)
    assert other.take(ids("a")[0]) is None
    expected = other.mask(())
    exhaust(grammars.guide(EXHAUSTING, END_IDS))
    other.restore(ids("a"))
    assert other.mask(()) == expected


def test_guess_that_exhausts_a_grammar_does_not_end_its_sequence():
    guide = Grammars(TOKENIZER, VOCAB, [EOS]).guide(EXHAUSTING, END_IDS)
    first, long = guide.mask(()), ids("a" * 1500)
    for _ in range(3):
        fitting = guide.fits([], long)
        assert fitting < 1500
        assert None not in guide.masks(long[:fitting])
        assert guide.take(long[0]) is None
        assert guide.mask(()) == first
    assert fitting == 0  # guesses made two lexers fail, and are not followed any more


def test_heavy_grammar_that_is_exhausted_is_not_compiled_in_the_engines_thread():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    compiled = grammars.compile(EXHAUSTING)
    compiled.is_heavy = True
    other = compiled.guide(END_IDS)
    exhaust(compiled.guide(END_IDS))
    assert other.mask(()) is None
    assert other.take(ids("a")[0]) is Finish.ERROR  # not an answer: others are to blame
    assert grammars.compile(EXHAUSTING) is not compiled


LETTERS = " | ".join(f'"{letter}"' for letter in "abcdefghijklmnopqrstuvwxyz")
AMBIGUOUS = Grammar.lark(f"start: s\ns: s s s | s s | {LETTERS}")  # a text of it can be read in many ways


def test_where_an_ambiguous_grammar_ends_depends_on_nothing_but_the_tokens():
    """Each token takes longer than the one before, so llguidance's own limit is far too high."""
    grammars, (a,) = Grammars(TOKENIZER, VOCAB, [EOS]), ids("a")
    alone = masks_until_refused(grammars.guide(AMBIGUOUS, END_IDS), 200)
    assert 20 < len(alone) < 100
    for used in (0, 5, 200):
        compiled = grammars._make(AMBIGUOUS, PLAIN)
        guide = compiled.guide(END_IDS)
        masks_until_refused(compiled.guide(END_IDS), used)
        assert masks_until_refused(guide, 200) == alone
    guessing = grammars._make(AMBIGUOUS, PLAIN).guide(END_IDS)
    assert masks_until_refused(guessing, 200, lambda guide: guide.masks((a,) * 9)) == alone


def test_sequence_whose_grammar_takes_too_much_time_ends_with_an_error(caplog):
    grammars, (a,) = Grammars(TOKENIZER, VOCAB, [EOS]), ids("a")
    grammars.pace = Pace(first=0.02, per_token=0.0005)
    guide, num = grammars.guide(Grammar.lark('start: s\ns: s s | "a"'), END_IDS), 0
    while (finish := guide.take(a)) is None:
        num += 1
        assert num < 400
    assert finish is Finish.ERROR  # not an answer: it depends on the machine
    assert f"processor time for {num + 1} tokens" in caplog.text


def test_guesses_of_a_slow_grammar_are_not_followed():
    grammars, (a,) = Grammars(TOKENIZER, VOCAB, [EOS]), ids("a")
    grammar = SAMPLES["regex"]
    assert grammars.guide(grammar, END_IDS).fits([], (a, a)) == 2
    grammars.pace = Pace(first=0.0, per_token=0.0)
    guide = grammars._make(grammar, PLAIN).guide(END_IDS)
    assert guide.fits([], (a, a)) == 0
    assert guide.masks((a, a)) == [GRAMMARS.guide(grammar, END_IDS).mask(()), None, None]


def test_pace_is_for_no_ordinary_grammar():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    unbounded = [guide_after(grammar) for grammar in SAMPLES.values()]
    assert all(guide._origin.pace is None for guide in unbounded)
    grammars.pace = Pace()
    guide = grammars.guide(EXHAUSTING, END_IDS)
    alone = masks_until_refused(GRAMMARS.guide(EXHAUSTING, END_IDS), 2000)
    assert masks_until_refused(guide, 2000) == alone
    assert guide._seconds < Pace().first


def test_text_that_reads_like_a_special_token_is_generated_as_text():
    for grammar in (
        Grammar.regex("a<s>b"),
        Grammar.lark('start: "<pad>" /x/'),
        Grammar.json_schema({"const": "</s>"}),
    ):
        guide, tokens = GRAMMARS.guide(grammar, END_IDS), []
        while (mask := guide.mask(())) is not None:
            tokens.append(allowed_ids(mask)[0])
            guide.take(tokens[-1])
        assert TOKENIZER.decode(tokens) in ("a<s>b", "<pad>x", '"</s>"')
        assert max(tokens) < 256


def test_grammar_that_needs_letters_the_tokenizer_lacks_is_aborted():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    two_letters = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    guide = Grammars(two_letters, 8, [2]).guide(Grammar.regex("abq"), frozenset({2}))
    assert allowed_ids(guide.mask(())) == [0]
    assert [guide.take(token) for token in (0, 1)] == [None, None]
    assert guide.mask(()) is None
    assert guide.take(2) is Finish.ABORT


def test_a_guide_tells_what_its_latest_tokens_took(monkeypatch):
    class Clock:
        now, each = 0.0, 1.0

        def thread_time(self):
            self.now += self.each
            return self.now

    clock = Clock()
    monkeypatch.setattr("samewise.text.grammar.time", clock)
    guide = guide_after(Grammar.regex("[a-z]{200}"))
    assert guide.pace == 0
    paces = []
    for token in ids("a" * 40):
        guide.masks(())
        guide.take(token)
        paces.append(guide.pace)
    assert paces == sorted(paces)
    assert paces[-1] == pytest.approx(2.0, rel=0.01)  # a mask and a token
    clock.each = 0.0
    for token in ids("a" * 40):
        guide.take(token)
    assert guide.pace < 0.01
