"""The bytes that tokens stand for, where a tokenizer's text is those bytes and nothing else.

Of byte-level tokenizers (GPT-2's kind, and with it most models of today) every token is a run of bytes,
whatever stands beside it. So text can be made as tokens come, without asking the tokenizer about its
neighbours again and again; and a token that is part of a character can still be told by its bytes.

Host only: this module has never heard of a tensor.
"""

from __future__ import annotations

import codecs
from typing import Any

SAMPLED = 256  # tokens that are tried before a tokenizer is believed to be of this kind

_Decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """Bytes of the tokens of one tokenizer, learned as they are met. Any thread may ask."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: dict[int, bytes] = {}
        self._heard: dict[int, bytes] = {}
        self._letters = _letters()
        added = inner.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """That of a tokenizer of transformers; None where text is more than the bytes of its tokens."""
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if type(getattr(inner, "decoder", None)).__name__ != "ByteLevel":
            return None
        made = cls(inner)
        return made if made._agrees(tokenizer) else None

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; nothing, if there is no such token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(self._inner.id_to_token(token) or "")
        return found

    def heard(self, token: int) -> bytes:
        """The same where special tokens are left out."""
        found = self._heard.get(token)
        if found is None:
            special = self._inner.id_to_token(token) in self._special
            found = self._heard[token] = b"" if special else self.bytes_of(token)
        return found

    def _spell(self, name: str) -> bytes:
        try:
            return bytes(self._letters[letter] for letter in name)
        except KeyError:  # an added token that is written as it reads
            return name.encode("utf-8", "replace")

    def _agrees(self, tokenizer: Any) -> bool:
        """Whether the tokenizer itself says the same, over tokens of all sorts."""
        size = len(tokenizer)
        sample = [*range(0, size, max(1, size // SAMPLED)), *tokenizer.all_special_ids]
        for skip in (False, True):
            stream = ByteStream(self, skip_special_tokens=skip)
            ours = "".join(map(stream.push, sample)) + stream.flush()
            theirs = tokenizer.decode(
                sample, skip_special_tokens=skip, spaces_between_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )  # fmt: skip
            if ours != theirs:
                return False
        return True


class ByteStream:
    """Text of one sequence's output, piece by piece. What is given out is final: no half character."""

    def __init__(self, spelling: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = spelling.heard if skip_special_tokens else spelling.bytes_of
        self._decoder = _Decoder("replace")

    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """No more tokens: returns what was held back."""
        return self._decoder.decode(b"", final=True)


def _letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be seen, else one
    from beyond Latin-1, in order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


__all__ = ["ByteStream", "TokenBytes"]
