"""The bytes of each token, for byte-level tokenizers. Host only.

In a byte-level vocabulary (GPT-2's, and most models since) every token is a fixed run of bytes, whatever its
neighbours. Text can then be built token by token without calling the tokenizer, and a token that is only part
of a character still has exact bytes.
"""

from __future__ import annotations

import codecs
from typing import Any

NUM_CHECKED = 256
"""Tokens, spread evenly over the vocabulary, whose bytes are compared with the tokenizer's own decoding
before the tokenizer is accepted as byte-level. Set by hand."""


class TokenBytes:
    """Bytes of the tokens of one tokenizer, cached on first use. Safe to call from any thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._bytes: dict[int, bytes] = {}
        self._text_bytes: dict[int, bytes] = {}
        self._byte_of_letter = _byte_alphabet()
        added = inner.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """The bytes of a transformers tokenizer; None where its text is not the bytes of its tokens."""
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if type(getattr(inner, "decoder", None)).__name__ != "ByteLevel":
            return None
        token_bytes = cls(inner)
        return token_bytes if token_bytes._agrees(tokenizer) else None

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; empty if the vocabulary has no such token."""
        result = self._bytes.get(token)
        if result is None:
            result = self._bytes[token] = self._from_name(self._inner.id_to_token(token) or "")
        return result

    def text_bytes_of(self, token: int) -> bytes:
        """A token's bytes; empty if it is a special token."""
        result = self._text_bytes.get(token)
        if result is None:
            special = self._inner.id_to_token(token) in self._special
            result = self._text_bytes[token] = b"" if special else self.bytes_of(token)
        return result

    def _from_name(self, name: str) -> bytes:
        try:
            return bytes(self._byte_of_letter[letter] for letter in name)
        except KeyError:  # an added token: its name is its text
            return name.encode("utf-8", "replace")

    def _agrees(self, tokenizer: Any) -> bool:
        """Whether the tokenizer decodes a sample of its vocabulary to the same text."""
        size = len(tokenizer)
        sample = [*range(0, size, max(1, size // NUM_CHECKED)), *tokenizer.all_special_ids]
        for skip in (False, True):
            stream = ByteStream(self, skip_special_tokens=skip)
            text = "".join(map(stream.push, sample)) + stream.flush()
            expected = tokenizer.decode(
                sample, skip_special_tokens=skip, spaces_between_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )  # fmt: skip
            if text != expected:
                return False
        return True


class ByteStream:
    """The text of one sequence's output, piece by piece. A piece never ends inside a character."""

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = token_bytes.text_bytes_of if skip_special_tokens else token_bytes.bytes_of
        self._rest = b""  # the beginning of a character

    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""
        data = self._rest + self._bytes_of(token)
        # At every token: what the standard library's incremental decoder, which is Python, does in C.
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_read:]
        return text

    def flush(self) -> str:
        """Returns the text held back, when no more tokens follow."""
        data, self._rest = self._rest, b""
        return codecs.utf_8_decode(data, "replace", True)[0]


def _byte_alphabet() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table).

    A printable byte is its own Latin-1 letter; the others, in order, are the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


__all__ = ["NUM_CHECKED", "ByteStream", "TokenBytes"]
