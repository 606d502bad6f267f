"""Text that is given out is final, whole, and ends where it should."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from samewise.text.byte_tokens import ByteStream, TokenBytes
from samewise.text.detokenize import Detokenizer, StopStrings, TextStream

CORPUS = [
    "the cat sat on the mat, the dog did not; naïve café über straße",
    "hello world hello there  two  spaces\n\nnew lines\tand tabs",
    "漢字かな交じり文 中文文本 🙂🎉👩‍👩‍👧 emoji 🙂🙂 and more 中文",
]


def byte_level() -> Any:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<pad>"],
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def sentencepiece_like() -> Any:
    """Spaces as ▁, bytes as a last resort, the first space dropped: Llama-2's decoder."""
    letters = sorted({letter for text in CORPUS[:2] for letter in text.replace(" ", "▁")})
    words = ["▁hello", "▁the", "▁world", "lo", "▁▁", "th"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


BYTES, PIECES = byte_level(), sentencepiece_like()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])


def whole(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """What the tokenizer makes of the output, as it reads after the prompt."""
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(prompt, **options)
    text = tokenizer.decode(prompt + output, **options)
    assert text.startswith(before)
    return str(text[len(before) :])


def pieces(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.push(token) for token in output), stream.flush()]


TEXTS = st.text(st.sampled_from("ab the,.\n  éß中文漢🙂👩\u200d👧�"), max_size=60) | st.text(max_size=40)


@TOKENIZERS
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_pieces_add_up_to_the_text(tokenizer: Any, text: str) -> None:
    assume(text.count("\ufffd") <= 4 or tokenizer is BYTES)  # a run of them by bytes looks like broken bytes
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    output = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, prompt, output)) == whole(tokenizer, prompt, output)


@TOKENIZERS
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_no_half_character_is_given_out(tokenizer: Any, text: str) -> None:
    assume("\ufffd" not in text)
    output = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    given_out = pieces(tokenizer, prompt, output)
    assert "\ufffd" not in "".join(given_out)
    assert given_out[-1] == ""  # nothing is left at the end of whole text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=12),
    st.lists(st.integers(0, len(BYTES) - 1), max_size=150),
    st.booleans(),
)
def test_any_tokens_at_all_add_up(prompt: list[int], output: list[int], skip: bool) -> None:
    """Byte-level, broken characters and special tokens included."""
    assume(not BYTES.decode(prompt, skip_special_tokens=skip).endswith("\ufffd"))
    assert "".join(pieces(BYTES, prompt, output, skip=skip)) == whole(BYTES, prompt, output, skip=skip)


SPELT = TokenBytes.of(BYTES)
assert SPELT is not None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) + 5), max_size=150), st.booleans())
def test_what_is_spelt_is_what_the_tokenizer_says(output: list[int], skip: bool) -> None:
    """Broken characters, special tokens and ids without a token included; and no half character comes out."""
    stream = ByteStream(SPELT, skip_special_tokens=skip)
    given_out = [*map(stream.push, output), stream.flush()]
    assert "".join(given_out) == BYTES.decode(output, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_what_is_spelt_holds_back_no_more_than_half_a_character(text: str) -> None:
    output = BYTES.encode(text, add_special_tokens=False)
    stream, seen, heard = ByteStream(SPELT), "", b""
    for token in output:
        seen += stream.push(token)
        heard += SPELT.bytes_of(token)
        assert seen == heard.decode("utf-8", "ignore") or heard.decode("utf-8", "replace").startswith(seen)
    assert stream.flush() == ""
    assert seen == text


def test_only_tokens_that_are_their_bytes_can_be_spelt() -> None:
    assert TokenBytes.of(PIECES) is None
    assert TokenBytes.of(None) is None

    class Odd(PreTrainedTokenizerFast):
        def _decode(self, *what: Any, **options: Any) -> str:
            return str(super()._decode(*what, **options)).upper()

    assert TokenBytes.of(Odd(tokenizer_object=BYTES.backend_tokenizer)) is None
    assert SPELT.bytes_of(BYTES.convert_tokens_to_ids("Ġ")) == b" "
    assert SPELT.bytes_of(10**6) == b""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=100))
def test_any_pieces_at_all_are_survived(output: list[int]) -> None:
    """Byte fallback rewrites what came before when bytes turn out broken; what is out stays out."""
    stream = TextStream(PIECES, [5])
    text = "".join(stream.push(token)[0] for token in output) + stream.flush()
    assert text == stream.text


def test_the_first_space_is_kept_after_a_prompt() -> None:
    ids = PIECES.convert_tokens_to_ids(["▁hello", "</s>", "▁world", "▁the"])
    assert pieces(PIECES, ids[:1], ids[1:]) == ["", " world", " the", ""]
    assert pieces(PIECES, ids[:2], ids[2:]) == [" world", " the", ""]
    assert pieces(PIECES, [], ids[2:]) == ["world", " the", ""]
    many = [ids[0], *[ids[1]] * 40]
    assert pieces(PIECES, many, ids[2:]) == [" world", " the", ""]


@TOKENIZERS
def test_special_tokens_are_left_out_or_kept(tokenizer: Any) -> None:
    word = tokenizer.encode("the", add_special_tokens=False)
    output = [*word, tokenizer.eos_token_id, *word]
    assert tokenizer.eos_token not in "".join(pieces(tokenizer, word, output))
    assert tokenizer.eos_token in "".join(pieces(tokenizer, word, output, skip=False))
    assert "".join(pieces(tokenizer, word, output, skip=False)) == whole(tokenizer, word, output, skip=False)


class Counting:
    """A tokenizer that counts how many tokens it was asked to decode."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.all_special_ids, self.num_decoded = inner, inner.all_special_ids, 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return str(self._inner.decode(token_ids, **options))


def hostile() -> list[tuple[str, Any, list[int]]]:
    text = BYTES.encode("the cat 中文 " * 300, add_special_tokens=False)
    lone = BYTES.convert_tokens_to_ids("ÿ")  # byte 255: never part of a character
    fallback = PIECES.convert_tokens_to_ids("<0xE4>")
    return [
        ("text", BYTES, text[:1500]),
        ("only end-of-text", BYTES, [BYTES.eos_token_id] * 1500),
        ("broken bytes", BYTES, [lone] * 1500),
        ("broken fallback", PIECES, [fallback] * 1500),
        ("characters by bytes", PIECES, PIECES.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>"]) * 500),
    ]


@pytest.mark.parametrize(
    ("tokenizer", "output"), [case[1:] for case in hostile()], ids=[c[0] for c in hostile()]
)
def test_the_cost_of_a_token_is_bounded(tokenizer: Any, output: list[int]) -> None:
    counting = Counting(tokenizer)
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    stream = Detokenizer(counting, prompt)
    text = "".join(map(stream.push, output)) + stream.flush()
    assert text == whole(tokenizer, prompt, output)
    assert counting.num_decoded < 40 * len(output)


# ── stop strings ─────────────────────────────────────────────────────────────────────────────────


def stopped(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The reference: look at ever longer beginnings of the whole text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4).map(tuple)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_stops_do_not_depend_on_how_text_is_cut(
    text: str, stops: tuple[str, ...], include: bool, places: list[int]
) -> None:
    finder, out, found = StopStrings(stops, include), "", None
    wanted, stop = stopped(text, stops, include)
    for piece in cut(text, places):
        released, found = finder.push(piece)
        out += released
        assert wanted.startswith(out)  # nothing leaks, nothing is taken back
        if found is not None:
            break
    out += finder.flush() if found is None else ""
    assert (out, found) == (wanted, stop)


def test_the_first_complete_stop_wins_and_the_longest_of_those() -> None:
    assert StopStrings(("abcd", "c"), False).push("abcd") == ("ab", "c")
    assert StopStrings(("c", "bc"), False).push("abcd") == ("a", "bc")
    assert StopStrings(("c", "bc"), True).push("abcd") == ("abc", "bc")


def test_nothing_comes_after_a_stop() -> None:
    finder = StopStrings(("x",), False)
    assert finder.push("axb") == ("a", "x")
    assert finder.push("cd") == ("", "x")
    assert finder.flush() == ""


def test_the_beginning_of_a_stop_is_held_and_given_back() -> None:
    finder = StopStrings(("\n\nUser:",), False)
    assert finder.push("hi\n") == ("hi", None)
    assert finder.push("\nUs") == ("", None)
    assert finder.push("ing") == ("\n\nUsing", None)
    assert finder.push("\n") == ("", None)
    assert finder.flush() == "\n"


def test_a_stop_within_inactive_text_does_not_count_but_one_that_ends_later_does() -> None:
    finder = StopStrings(("a", "xab"), False)
    assert finder.push("a xa", active=False) == ("a ", None)
    assert finder.push("b") == ("", "xab")
    finder = StopStrings(("a",), False)
    assert finder.push("aa", active=False) == ("aa", None)
    assert finder.push("ba") == ("b", "a")


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.sampled_from([("the",), ("中", "b "), ("🙂", "\n", "a"), ()]), st.booleans())
def test_a_stream_is_detokenised_then_stopped(text: str, stops: tuple[str, ...], include: bool) -> None:
    prompt = BYTES.encode("hello", add_special_tokens=False)
    output = BYTES.encode(text, add_special_tokens=False)
    stream, out, stop = TextStream(BYTES, prompt, stops=stops, include_stop=include), "", None
    for token in output:
        piece, stop = stream.push(token)
        out += piece
        if stop is not None:
            break
    out += stream.flush()
    assert (out, stop) == stopped(whole(BYTES, prompt, output), stops, include)
    assert stream.text == out


def test_stops_are_active_after_min_tokens() -> None:
    prompt = BYTES.encode("hello", add_special_tokens=False)
    a, b = BYTES.convert_tokens_to_ids(["a", "b"])
    stream = TextStream(BYTES, prompt, stops=("a",), min_tokens=2)
    assert [stream.push(token) for token in (a, a, b, a)] == [
        ("a", None),
        ("a", None),
        ("b", None),
        ("", "a"),
    ]
    assert stream.text == "aab"
