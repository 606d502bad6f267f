"""Streamed text is final, complete, and ends at its stop string."""

import codecs
from itertools import pairwise, permutations
from typing import Any, cast

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


def byte_level_tokenizer() -> Any:
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


def sentencepiece_tokenizer() -> Any:
    """Spaces as ▁, byte fallback, the first space dropped: Llama-2's decoder."""
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


BYTES, PIECES = byte_level_tokenizer(), sentencepiece_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])


def reference_text(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The tokenizer's own text of the output after the prompt."""
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(prompt, **options)
    text = tokenizer.decode(prompt + output, **options)
    assert text.startswith(before)
    return str(text[len(before) :])


def streamed_pieces(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.push(token) for token in output), stream.flush()]


TEXTS = st.text(st.sampled_from("ab the,.\n  éß中文漢🙂👩\u200d👧�"), max_size=60) | st.text(max_size=40)


@TOKENIZERS
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_pieces_add_up_to_the_tokenizers_text(tokenizer: Any, text: str) -> None:
    assume(text.count("\ufffd") <= 4 or tokenizer is BYTES)  # many U+FFFD look like invalid bytes
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    output = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed_pieces(tokenizer, prompt, output)) == reference_text(tokenizer, prompt, output)


@TOKENIZERS
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_no_piece_ends_inside_a_character(tokenizer: Any, text: str) -> None:
    assume("\ufffd" not in text)
    output = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    emitted = streamed_pieces(tokenizer, prompt, output)
    assert "\ufffd" not in "".join(emitted)
    assert emitted[-1] == ""  # complete text leaves nothing to flush


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=12),
    st.lists(st.integers(0, len(BYTES) - 1), max_size=150),
    st.booleans(),
)
def test_pieces_of_random_tokens_add_up_to_the_tokenizers_text(
    prompt: list[int], output: list[int], skip: bool
) -> None:
    """Incomplete characters and special tokens included."""
    assume(not BYTES.decode(prompt, skip_special_tokens=skip).endswith("\ufffd"))
    assert "".join(streamed_pieces(BYTES, prompt, output, skip=skip)) == reference_text(
        BYTES, prompt, output, skip=skip
    )


TOKEN_BYTES = TokenBytes.of(BYTES)
assert TOKEN_BYTES is not None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) + 5), max_size=150), st.booleans())
def test_byte_stream_equals_the_tokenizers_text(output: list[int], skip: bool) -> None:
    """Incomplete characters, special tokens and ids without a token included."""
    stream = ByteStream(TOKEN_BYTES, skip_special_tokens=skip)
    emitted = [*map(stream.push, output), stream.flush()]
    assert "".join(emitted) == BYTES.decode(output, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_byte_stream_holds_back_at_most_one_incomplete_character(text: str) -> None:
    output = BYTES.encode(text, add_special_tokens=False)
    stream, text_so_far, bytes_so_far = ByteStream(TOKEN_BYTES), "", b""
    for token in output:
        text_so_far += stream.push(token)
        bytes_so_far += TOKEN_BYTES.bytes_of(token)
        complete, replaced = (bytes_so_far.decode("utf-8", how) for how in ("ignore", "replace"))
        assert text_so_far == complete or replaced.startswith(text_so_far)
    assert stream.flush() == ""
    assert text_so_far == text


def test_token_bytes_exist_only_for_byte_level_tokenizers() -> None:
    assert TokenBytes.of(PIECES) is None
    assert TokenBytes.of(None) is None

    class UpperCase(PreTrainedTokenizerFast):
        def _decode(self, *what: Any, **options: Any) -> str:
            return str(super()._decode(*what, **options)).upper()

    assert TokenBytes.of(UpperCase(tokenizer_object=BYTES.backend_tokenizer)) is None
    assert TOKEN_BYTES.bytes_of(BYTES.convert_tokens_to_ids("Ġ")) == b" "
    assert TOKEN_BYTES.bytes_of(10**6) == b""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=100))
def test_random_sentencepiece_tokens_stream_without_error(output: list[int]) -> None:
    """Byte fallback rewrites earlier text when bytes turn out invalid; text that was returned stays."""
    stream = TextStream(PIECES, [5])
    text = "".join(stream.push(token)[0] for token in output) + stream.flush()
    assert text == "".join(streamed_pieces(PIECES, [5], output))


def test_first_space_is_kept_after_a_prompt() -> None:
    ids = PIECES.convert_tokens_to_ids(["▁hello", "</s>", "▁world", "▁the"])
    assert streamed_pieces(PIECES, ids[:1], ids[1:]) == ["", " world", " the", ""]
    assert streamed_pieces(PIECES, ids[:2], ids[2:]) == [" world", " the", ""]
    assert streamed_pieces(PIECES, [], ids[2:]) == ["world", " the", ""]
    many = [ids[0], *[ids[1]] * 40]
    assert streamed_pieces(PIECES, many, ids[2:]) == [" world", " the", ""]


@TOKENIZERS
def test_special_tokens_are_skipped_or_kept(tokenizer: Any) -> None:
    word = tokenizer.encode("the", add_special_tokens=False)
    output = [*word, tokenizer.eos_token_id, *word]
    assert tokenizer.eos_token not in "".join(streamed_pieces(tokenizer, word, output))
    assert tokenizer.eos_token in "".join(streamed_pieces(tokenizer, word, output, skip=False))
    assert "".join(streamed_pieces(tokenizer, word, output, skip=False)) == reference_text(
        tokenizer, word, output, skip=False
    )


class CountingTokenizer:
    """Counts the tokens it decodes."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.all_special_ids, self.num_decoded = inner, inner.all_special_ids, 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return str(self._inner.decode(token_ids, **options))


def costly_outputs() -> list[tuple[str, Any, list[int]]]:
    text = BYTES.encode("the cat 中文 " * 300, add_special_tokens=False)
    lone = BYTES.convert_tokens_to_ids("ÿ")  # byte 255 is never part of a character
    fallback = PIECES.convert_tokens_to_ids("<0xE4>")
    return [
        ("text", BYTES, text[:1500]),
        ("only end-of-text", BYTES, [BYTES.eos_token_id] * 1500),
        ("invalid bytes", BYTES, [lone] * 1500),
        ("invalid byte fallback", PIECES, [fallback] * 1500),
        ("characters by bytes", PIECES, PIECES.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>"]) * 500),
    ]


@pytest.mark.parametrize(
    ("tokenizer", "output"), [case[1:] for case in costly_outputs()], ids=[c[0] for c in costly_outputs()]
)
def test_decoding_cost_per_token_is_bounded(tokenizer: Any, output: list[int]) -> None:
    counting = CountingTokenizer(tokenizer)
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    stream = Detokenizer(counting, prompt)
    text = "".join(map(stream.push, output)) + stream.flush()
    assert text == reference_text(tokenizer, prompt, output)
    assert counting.num_decoded < 40 * len(output)


# ---- stop strings


def reference_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Search every prefix of the complete text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4).map(tuple)


def cut_at(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: tuple[str, ...], include: bool, places: list[int]
) -> None:
    finder, out, match = StopStrings(stops, include), "", None
    expected, stop = reference_stop(text, stops, include)
    for piece in cut_at(text, places):
        released, match = finder.push(piece)
        out += released
        assert expected.startswith(out)
        if match is not None:
            break
    out += finder.flush() if match is None else ""
    assert (out, match) == (expected, stop)


def test_first_complete_stop_string_wins_then_the_longest() -> None:
    assert StopStrings(("abcd", "c"), False).push("abcd") == ("ab", "c")
    assert StopStrings(("c", "bc"), False).push("abcd") == ("a", "bc")
    assert StopStrings(("c", "bc"), True).push("abcd") == ("abc", "bc")


def test_no_text_follows_a_stop_string() -> None:
    finder = StopStrings(("x",), False)
    assert finder.push("axb") == ("a", "x")
    assert finder.push("cd") == ("", "x")
    assert finder.flush() == ""


def test_partial_stop_string_is_held_and_released() -> None:
    finder = StopStrings(("\n\nUser:",), False)
    assert finder.push("hi\n") == ("hi", None)
    assert finder.push("\nUs") == ("", None)
    assert finder.push("ing") == ("\n\nUsing", None)
    assert finder.push("\n") == ("", None)
    assert finder.flush() == "\n"


def test_stop_string_counts_only_if_it_ends_in_active_text() -> None:
    finder = StopStrings(("a", "xab"), False)
    assert finder.push("a xa", active=False) == ("a ", None)
    assert finder.push("b") == ("", "xab")
    finder = StopStrings(("a",), False)
    assert finder.push("aa", active=False) == ("aa", None)
    assert finder.push("ba") == ("b", "a")


# ---- text streams


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.sampled_from([("the",), ("中", "b "), ("🙂", "\n", "a"), ()]), st.booleans())
def test_text_stream_detokenizes_and_stops(text: str, stops: tuple[str, ...], include: bool) -> None:
    prompt = BYTES.encode("hello", add_special_tokens=False)
    output = BYTES.encode(text, add_special_tokens=False)
    stream, out, stop = TextStream(BYTES, prompt, stops=stops, include_stop=include), "", None
    for token in output:
        piece, stop = stream.push(token)
        out += piece
        if stop is not None:
            break
    out += stream.flush()
    assert (out, stop) == reference_stop(reference_text(BYTES, prompt, output), stops, include)


def test_stop_strings_are_active_after_min_tokens() -> None:
    prompt = BYTES.encode("hello", add_special_tokens=False)
    a, b = BYTES.convert_tokens_to_ids(["a", "b"])
    stream = TextStream(BYTES, prompt, stops=("a",), min_tokens=2)
    assert [stream.push(token) for token in (a, a, b, a)] == [
        ("a", None),
        ("a", None),
        ("b", None),
        ("", "a"),
    ]


def test_byte_stream_cuts_text_as_the_standard_decoder_does() -> None:
    """Characters of several tokens, broken ones, and bytes that are no text."""
    pieces = [
        b"a",
        b"\xc3",
        b"\xa9",
        b"",
        b"\xf0\x9f",
        b"\x98\x80!",
        b"\xe2\x82",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xf0",
    ]

    class Bytes:
        def bytes_of(self, token: int) -> bytes:
            return pieces[token]

        text_bytes_of = bytes_of

    for order in permutations(range(len(pieces)), 4):
        stream = ByteStream(cast("TokenBytes", Bytes()))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert [stream.push(token) for token in order] == [decoder.decode(pieces[token]) for token in order]
        assert stream.flush() == decoder.decode(b"", final=True)
