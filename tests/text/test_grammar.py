"""Grammars: what is refused, what a mask says, and how a sequence ends."""

import json
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise import LLM, SamplingParams
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.testing import byte_tokenizer, run, tiny_engine
from samewise.text.grammar import KEPT, Grammars, version
from samewise.types import Finish, Grammar, Sampling

EOS, VOCAB = 257, 320
ENDS = frozenset({EOS})
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


def allowed(mask):
    return [] if mask is None else [t for t in range(8 * len(mask)) if mask[t >> 3] >> (t & 7) & 1]


def walk(grammar, text="", ends=ENDS):
    found = GRAMMARS.guide(grammar, ends)
    for token in ids(text):
        assert found.take(token) is None
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True, proposer="none")


@pytest.fixture(scope="module")
def llm(engine):
    return LLM.over(engine)


def answer(llm, grammar, **params):
    settings = {"temperature": 0.8, "seed": 5, "max_tokens": 40, "grammar": grammar} | params
    return llm.generate("go", SamplingParams(**settings), use_tqdm=False)[0].outputs[0]


# ---- what is refused, and how


def test_a_grammar_is_a_kind_and_a_text():
    assert Grammar.json_schema({"b": 1, "a": "é"}) == Grammar("json_schema", '{"b":1,"a":"é"}')
    assert hash(Grammar.regex("a")) == hash(Grammar("regex", "a"))
    assert hash(Sampling(grammar=Grammar.json_object())) != hash(Sampling())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar("gbnf", "x"), "known are json_object"),
        (lambda: Grammar("json_object", "{}"), "takes no text"),
        (lambda: Grammar.regex(""), "needs a text"),
        (lambda: Grammar("regex", 5), "not int"),
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema({"a": object()}), "not JSON"),
        (lambda: Grammar.json_schema("3"), "an object"),
        (lambda: SamplingParams(grammar="a"), "give a Grammar"),
        (lambda: SamplingParams(grammar=Grammar.regex("a"), allowed_token_ids=[1]), "beside a grammar"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_when_made(make, says):
    with pytest.raises(BadParameter, match=says):
        make()


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 1}), "minLength"),
        (Grammar.json_schema({"type": "string", "format": "weird"}), "weird"),
        (Grammar.json_schema({"type": "object", "x-guidance": {"lenient": True}}), "x-guidance"),
        (Grammar.json_schema({"$ref": "http://elsewhere/schema.json"}), "elsewhere"),
        (Grammar.regex("[a"), "unclosed"),
        (Grammar.regex("()"), "only the empty text"),
        (Grammar.lark("start: nowhere"), "nowhere"),
        (Grammar.lark("start: <|no_such_token|>"), "no_such_token"),
    ],
)
def test_what_cannot_be_compiled_is_refused_when_asked(llm, grammar, says):
    with pytest.raises(BadParameter, match=says):
        answer(llm, grammar)
    assert llm.engine.idle


def test_a_model_without_a_tokenizer_has_no_grammars():
    with pytest.raises(BadParameter, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).check(Grammar.json_object())


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(BadParameter, match=r"samewise\[grammar\]"):
        Grammars(TOKENIZER, VOCAB, [EOS]).check(Grammar.json_object())


def test_the_contract_names_what_masks_come_from(engine):
    assert dict(engine.contract.facts)["grammar"] == version()
    assert version().startswith("llguidance ")


# ---- what a mask says


def wander(found, rng, steps):
    """A random way through a grammar: (tokens, masks before each of them)."""
    tokens, masks = [], []
    for _ in range(steps):
        mask = found.mask(tuple(tokens))
        choices = [token for token in allowed(mask) if token != EOS]
        if not choices:
            break
        masks.append(mask)
        tokens.append(rng.choice(choices))
    return tuple(tokens), masks


@pytest.mark.parametrize("name", SAMPLES)
@given(seed=st.integers(0, 10**6), split=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_a_mask_is_a_function_of_the_tokens_before(name, seed, split):
    """However many of them are committed, guessed before, or asked about in what order."""
    grammar, rng = SAMPLES[name], random.Random(seed)
    tokens, masks = wander(GRAMMARS.guide(grammar, ENDS), rng, 12)
    split = min(split, len(tokens))
    other = GRAMMARS.guide(grammar, ENDS)
    for token in tokens[:split]:
        assert other.masks(tuple(rng.randrange(VOCAB) for _ in range(3)))[0] is not None
        other.take(token)
    rest = tokens[split:]
    if rng.random() < 0.5:
        other.fits([], tuple(rng.randrange(VOCAB) for _ in range(3)))
    assert other.masks(rest)[: len(rest)] == masks[split:]
    assert [other.mask(rest[:n]) for n in range(len(rest))] == masks[split:]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_mask_lets_through_is_what_may_be_guessed_and_committed(name):
    rng = random.Random(name)
    tokens, masks = wander(GRAMMARS.guide(SAMPLES[name], ENDS), rng, 10)
    for n, mask in enumerate(masks):
        here = GRAMMARS.guide(SAMPLES[name], ENDS)
        draft = list(tokens[:n])
        fitting = [token for token in range(VOCAB) if here.fits(draft, (token,))]
        assert fitting == allowed(mask)
        for token in draft:
            here.take(token)
        refused = next(token for token in range(256) if token not in fitting)
        assert here.take(refused) is Finish.ABORT


@pytest.mark.parametrize(
    ("grammar", "text", "ends"),
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
def test_end_of_text_is_let_through_exactly_where_the_grammar_accepts(grammar, text, ends):
    assert (EOS in allowed(walk(grammar, text).mask(()))) is ends
    assert walk(grammar, text).fits([], (EOS,)) == ends
    assert EOS not in allowed(walk(grammar, text, frozenset()).mask(())), "ends nobody asked for"
    assert walk(grammar, text).take(EOS) is (Finish.STOP if ends else Finish.ABORT)


def test_a_special_token_that_was_told_to_stop_is_an_end_of_text():
    (a,) = ids("a")
    here = GRAMMARS.guide(SAMPLES["regex"], frozenset({256, a}))
    assert allowed(here.mask(())) == [a]
    assert here.fits([], (256,)) == 0
    assert here.take(a) is None
    assert [token for token in allowed(here.mask(())) if token > 255] == [256]
    assert here.fits([], (256,)) == 1
    assert here.take(256) is Finish.STOP


@pytest.mark.parametrize(("name", "text"), [("regex", "aab"), ("object", '{"a":1}'), ("lark", "<xy>")])
def test_nothing_more_to_say_ends_it(name, text):
    *before, last = ids(text)
    here = GRAMMARS.guide(SAMPLES[name], ENDS)
    # Guesses beyond the end are of no use, not even the end of text itself.
    assert here.fits([], (*before, last, EOS)) == len(text)
    assert here.masks(ids(text))[-1] is None
    assert [here.take(token) for token in before] == [None] * len(before)
    assert here.take(last) is Finish.STOP


def test_guesses_that_are_no_tokens_do_not_fit():
    here = walk(Grammar.regex("a+"))
    (a,) = ids("a")
    for odd in (-1, VOCAB, 2**40, 300, 256):
        assert here.fits([a], (a, odd, a)) == 1
        assert here.masks((a, odd, a))[2:] == [None, None]
        assert here.fits([odd], (a,)) == 0


def test_json_never_idles_in_white_space():
    for text in ("{", '{"a"', '{"a":', '{"a":1', '{"a":1,'):
        here = walk(SAMPLES["object"], text)
        far = max(here.fits([], ids(blank * 40)) for blank in (" ", "\n", "\t"))
        assert far <= 17, text
        assert here.fits([], ids("\n" + " " * 40)) <= 17
        assert here.fits([], ids("\n" * 3)) <= 1
    assert walk(SAMPLES["object"]).fits([], ids(" {")) == 0


def test_properties_come_in_the_order_of_the_schema():
    schema = {"properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["z", "a"]}
    here = walk(Grammar.json_schema(schema | {"type": "object"}))
    assert here.fits([], ids('{"z":null,"a":null}')) == 19
    assert here.fits([], ids('{"a')) == 2


def test_compiled_once_and_not_for_ever():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    for number in range(KEPT + 5):
        grammars.check(Grammar.regex(f"a{{1,{number + 1}}}"))
    assert len(grammars._compiled) == KEPT
    first = next(iter(grammars._compiled))
    grammars.check(first)
    assert next(iter(grammars._compiled)) != first


def test_any_thread_may_ask():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    found = []

    def ask():
        for grammar in SAMPLES.values():
            here = grammars.guide(grammar, ENDS)
            found.append((grammar, here.mask(())))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == len(SAMPLES)


def test_a_grammar_that_is_known_waits_for_no_other():
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    grammars.check(SAMPLES["regex"])
    with grammars._compiling:  # another thread is busy with something large
        assert grammars.guide(SAMPLES["regex"], ENDS).mask(()) is not None


class Faulty:
    """A matcher that gives up on some texts, as llguidance does on ones that are too complex."""

    def __init__(self, fails, path=()):
        self.fails, self.path = fails, list(path)

    def deep_copy(self):
        return Faulty(self.fails, self.path)

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


def test_a_guess_that_is_too_much_leaves_no_trace():
    from samewise.text.grammar import Walk

    class Trie:
        eos_tokens = (7,)

        def is_special_token(self, token):
            return False

    here = Walk(Faulty({(1, 2)}), Trie(), frozenset({7}))
    assert here.masks((1, 2, 3)) == [b"\x7f\xff", b"\x7f\xff", None, None]
    assert here.take(1) is None
    assert here.mask(()) == b"\x7f\xff"
    assert here.mask((2,)) is None
    assert here.mask((3,)) == b"\x7f\xff"
    assert here.take(2) is Finish.ABORT


def test_text_that_reads_like_a_special_token_is_spelt():
    for grammar in (
        Grammar.regex("a<s>b"),
        Grammar.lark('start: "<pad>" /x/'),
        Grammar.json_schema({"const": "</s>"}),
    ):
        here, spelt = GRAMMARS.guide(grammar, ENDS), []
        while (mask := here.mask(())) is not None:
            spelt.append(allowed(mask)[0])
            here.take(spelt[-1])
        assert TOKENIZER.decode(spelt) in ("a<s>b", "<pad>x", '"</s>"')
        assert max(spelt) < 256


# ---- the sampler


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter mentions what a card does not
@pytest.mark.parametrize("vocab", [20, 33, 320])
def test_a_masked_row_gets_the_best_token_let_through(vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, :] = -torch.inf
    rng = random.Random(vocab)
    by_row, by_block = (Sampler(vocab, torch.device("cpu"), by_row=how) for how in (True, False))
    for temperature in (0.0, 0.7):
        for row in range(4):
            kept = sorted(rng.sample(range(vocab), 3))
            mask = sum(1 << token for token in kept).to_bytes(-(-vocab // 8), "little")
            sampling = Sampling(temperature=temperature, grammar=Grammar.regex("a"), top_p=0.9)
            draw = SamplingRow(row, sampling, (), (), 5, mask)
            one, other = (sampler.sample(logits, [draw]) for sampler in (by_row, by_block))
            assert one.tokens.tolist() == other.tokens.tolist()
            assert int(one.tokens[row]) in kept
            if temperature == 0.0:
                assert int(one.tokens[row]) == max(kept, key=lambda token: float(logits[row, token]))
            others = [r for r in range(4) if r != row]
            assert one.tokens[others].tolist() == logits[others].argmax(-1).tolist()
            # The other widths a tokenizer may have.
            for odd in (mask.rstrip(b"\0"), mask + b"\xff"):
                again = by_row.sample(logits, [draw._replace(mask=odd)])
                assert torch.equal(again.tokens, one.tokens)


def test_bad_words_and_min_tokens_give_way_to_the_grammar():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    grammar = Grammar.regex("a")
    for how in (True, False):
        sampler = Sampler(4, torch.device("cpu"), by_row=how)
        bars = {"bad_words": ((0,), (1,)), "stop_ids": frozenset({2}), "min_tokens": 3}
        for mask, wanted in ((0b1111, 3), (0b0111, 2), (0b0011, 0), (0b0100, 2)):
            draw = SamplingRow(0, Sampling(grammar=grammar, **bars), (), (), 5, bytes([mask]))
            assert sampler.sample(logits, [draw]).tokens.tolist() == [wanted]


# ---- whole answers


def test_an_answer_ends_where_its_grammar_does(llm):
    found = answer(llm, Grammar.regex("(yes|no)!"))
    assert found.text in ("yes!", "no!")
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    assert len(found.token_ids) == len(found.text), "no row is spent on an end of text that must come"


def test_an_answer_may_end_where_its_grammar_accepts(llm):
    found = [answer(llm, Grammar.regex("[a-z]{1,39}"), seed=seed) for seed in range(6)]
    assert all(one.finish_reason == "stop" and one.text.isalpha() for one in found)
    assert any(one.token_ids[-1] == EOS for one in found)


def test_ignored_ends_of_text_do_not_come(llm):
    found = answer(llm, Grammar.regex("[a-z]+"), ignore_eos=True, max_tokens=30)
    assert (len(found.text), found.finish_reason) == (30, "length")
    assert answer(llm, Grammar.regex("[a-z]{7}"), ignore_eos=True).finish_reason == "stop"


@pytest.mark.parametrize("least", [0, 4, 12])
def test_min_tokens_holds_as_far_as_the_grammar_goes(llm, least):
    found = answer(llm, Grammar.regex("[a-z]{1,8}"), min_tokens=least, seed=1)
    assert len(found.text) >= min(least, 8)
    assert found.finish_reason == "stop"


def test_max_tokens_cuts(llm):
    found = answer(llm, Grammar.json_object(), max_tokens=3)
    assert (len(found.token_ids), found.finish_reason) == (3, "length")


def test_stop_strings_and_stop_token_ids_still_stop(llm):
    found = answer(llm, Grammar.regex("a{5}b{5}c{5}"), stop="bb")
    assert (found.text, found.finish_reason, found.stop_reason) == ("aaaaa", "stop", "bb")
    (b,) = ids("b")
    found = answer(llm, Grammar.regex("a{5}b{5}c{5}"), stop_token_ids=[b])
    assert (found.text, found.finish_reason, found.stop_reason) == ("aaaaa", "stop", b)


def test_penalties_and_bias_act_within_the_grammar(llm):
    (c,) = ids("c")
    found = answer(llm, Grammar.regex("[abc]{12}"), logit_bias={c: 100}, temperature=0)
    assert found.text == "c" * 12
    found = answer(llm, Grammar.regex("[abc]{12}"), frequency_penalty=2.0, presence_penalty=2.0)
    assert set(found.text) == set("abc")


def test_n_answers_each_go_their_own_way(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=1, max_tokens=30, grammar=Grammar.regex("[a-z]{20}"))
    texts = [one.text for one in llm.generate("go", params, use_tqdm=False)[0].outputs]
    assert len(set(texts)) == 4
    assert all(len(text) == 20 for text in texts)


@pytest.mark.parametrize("verify", [True, False])
def test_streams_say_the_same(llm, verify):
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=60, grammar=SAMPLES["schema"], verify=verify)
    (whole,) = llm.generate("go", params, use_tqdm=False)
    chunks = list(llm.stream("go", params))
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    if whole.outputs[0].finish_reason == "stop":
        json.loads(whole.outputs[0].text)


def test_a_model_without_an_end_of_text():
    found = run(tiny_engine(proposer="none"), [([1, 2], Sampling(grammar=Grammar.regex("[a-z]{4}")), 20)])
    assert (len(found[0].tokens), found[0].finish) == (4, "stop")


def test_what_this_tokenizer_cannot_spell_is_aborted_and_not_called_complete():
    """A tokenizer without some letters: the grammar leads where no token follows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    few = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    here = Grammars(few, 8, [2]).guide(Grammar.regex("abq"), frozenset({2}))
    assert allowed(here.mask(())) == [0]
    assert [here.take(token) for token in (0, 1)] == [None, None]
    assert here.mask(()) is None
    assert here.take(2) is Finish.ABORT
