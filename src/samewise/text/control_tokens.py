"""Encode a conversation so that control tokens in its messages stay text.

A chat template puts messages into one text, in which the tokenizer finds its special tokens, wherever they
stand: a message that says `<|im_end|>` would end itself. Here every special token in a message is broken by a
mark before the template is rendered. A copy of the tokenizer reads the mark as a token of its own, which is
then left out: the special token's letters reach the model as ordinary tokens, and the template's own special
tokens as before. Text without special tokens is not changed and is encoded as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from samewise.errors import BadPrompt

MARK = "\ufdd0"
"""A code point that Unicode keeps for marks inside a program: it is no character and in no text."""


SLICE = 1 << 16
"""Characters brought into normal form at once: no other thread runs meanwhile. Set by hand: 10 ms."""

OVERLAP = 1 << 10
"""Characters that two slices share: far more than a special token has in any other letters. Set by hand."""


class ControlTokens:
    """The special tokens of one tokenizer. Safe to call from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted((text for text in special if text), key=lambda text: (-len(text), text))
        self._lock = threading.Lock()
        self._reader: Any = None  # a copy of the tokenizer that knows the mark

    def mark(self, value: Any) -> Any:
        """The value with a mark in every special token of its texts. Raises BadPrompt."""
        try:
            return self._mark(value)
        except RecursionError:
            raise BadPrompt("a message nests too deeply; make it flatter", param="messages") from None

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self._mark(name): self._mark(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(one) for one in value]
        return value

    def encode(self, text: str) -> list[int]:
        """The token ids of a rendered text with marks, without those of the marks."""
        reader = self._marked_reader()
        mark = reader.token_to_id(MARK)
        return [token for token in reader.encode(text, add_special_tokens=False).ids if token != mark]

    def _mark_text(self, text: str) -> str:
        if MARK in text:
            raise BadPrompt(
                "a message holds U+FDD0, which is not a character; leave it out", param="messages"
            )
        for special in self._special:
            if special not in text:
                continue
            if len(special) == 1:
                raise BadPrompt(
                    f"a message holds the control token {special!r}, which cannot be encoded as text; leave "
                    "it out",
                    param="messages",
                )
            text = text.replace(special, special[0] + MARK + special[1:])
        self._refuse_disguised(text)
        return text

    def _refuse_disguised(self, text: str) -> None:
        """Refuse text that is a special token only in the tokenizer's normal form of it."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        if normalizer is None or text.isascii():
            return
        for start in range(0, len(text), SLICE):
            part = text[start : start + SLICE + OVERLAP]
            normal = part if part.isascii() else normalizer.normalize_str(part)
            for special in self._special:
                if special in normal and special not in text:
                    raise BadPrompt(
                        f"a message holds the control token {special!r} in other letters, which cannot be "
                        "encoded as text; leave it out",
                        param="messages",
                    )

    def _marked_reader(self) -> Any:
        with self._lock:
            if self._reader is None:
                self._reader = self._make_reader()
            return self._reader

    def _make_reader(self) -> Any:
        if not getattr(self._tokenizer, "is_fast", False):
            raise BadPrompt(
                "a message holds a control token, and this model's tokenizer cannot encode it as text; "
                "leave it out",
                param="messages",
            )
        from tokenizers import AddedToken, Tokenizer

        reader = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        reader.no_padding()
        reader.no_truncation()
        reader.add_tokens([AddedToken(MARK, normalized=False)])
        return reader


__all__ = ["MARK", "OVERLAP", "SLICE", "ControlTokens"]
