"""Tokens -> text as they are generated, and the search for stop strings. Host only.

Text that is returned is final: neither part of a character nor a possible beginning of a stop string is
returned early, so nothing streamed is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from samewise.text.byte_tokens import ByteStream, TokenBytes

_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Sizes of the Detokenizer's window of tokens. Set by hand.

    Tests hold that at most 40 tokens are decoded per token pushed, on broken and special tokens too.
    """

    context: int = 8
    """Tokens before the new ones that are decoded with them, since a decoder may look at its neighbours;
    doubled while they give no text."""
    shrink: int = 32
    """Tokens from which the window is cut back to its context; bounds the cost of a token."""
    force: int = 128
    """Tokens from which a window is cut even where text and tokens do not part cleanly."""
    unfinished: int = 16
    """Replacement characters at the end that may still become text. A character lacks at most three bytes,
    but some decoders mark every byte of a run until its last character is complete."""


LIMITS = WindowLimits()


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of special tokens."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """The text of these tokens."""


class Detokenizer:
    """The text of one sequence's output after its prompt, piece by piece.

    The pieces add up to `tokenizer.decode(prompt + output)` less `tokenizer.decode(prompt)`, without clean-up
    of spaces. Only a window of the last tokens is decoded at a time. Bytes that are not valid text give
    U+FFFD where the tokenizer's decoder puts it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._window = self._prompt_context(prompt_ids)
        self._emitted = self._decode(self._window)  # the part of the window's text that was returned
        self._text = self._emitted  # the window's text

    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and self._is_skipped(token):
            self._window.pop()  # a run of skipped tokens would grow the window without limit
            return ""
        self._text = text
        if not text.startswith(self._emitted):
            return self._restart() if len(self._window) >= LIMITS.force else ""
        piece = text[len(self._emitted) : len(text) - _num_unfinished(text)]
        self._emitted += piece
        if len(self._window) >= LIMITS.shrink and len(self._window) % LIMITS.context == 0:
            self._shrink_window()
        return piece

    def flush(self) -> str:
        """Returns the text held back, when no more tokens follow."""
        piece = self._text[len(self._emitted) :]
        self._emitted = self._text
        return piece

    def _decode(self, ids: list[int]) -> str:
        # clean_up_tokenization_spaces would change text that was already returned.
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip,
            spaces_between_special_tokens=self._spaces,
            clean_up_tokenization_spaces=False,
        )

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last prompt tokens, enough of them to give text; none if they end inside a character."""
        num, max_num = LIMITS.context, min(len(prompt_ids), LIMITS.force)
        while not (text := self._decode(list(prompt_ids[-num:]))) and num < max_num:
            num *= 2
        return [] if text.endswith(_REPLACEMENT) else list(prompt_ids[-num:])

    def _is_skipped(self, token: int) -> bool:
        return self._skip and token in self._tokenizer.all_special_ids

    def _shrink_window(self) -> None:
        """Drop the front of the window where both parts decode to the same text, if there is such a place."""
        text = self._text
        num_held = len(text) - len(self._emitted)
        for start in range(len(self._window) - LIMITS.context, 0, -1):
            head, tail = self._decode(self._window[:start]), self._decode(self._window[start:])
            # A decoder may drop a leading space. A cut inside a character would add characters to the text.
            separable = text in (head + tail, head + " " + tail)
            if tail and separable and len(tail) >= num_held:
                self._emitted = tail[: len(tail) - num_held]
                self._window, self._text = self._window[start:], tail
                return
        if len(self._window) >= LIMITS.force:
            self._window = self._window[-LIMITS.context :]
            self._text = self._decode(self._window)
            self._emitted = self._text[: len(self._text) - _num_unfinished(self._text)]

    def _restart(self) -> str:
        """The decoder keeps changing text that was returned: return the rest and begin a new window."""
        piece = self.flush()
        self._window = self._window[-1:]
        self._emitted = self._text = self._decode(self._window)
        return piece


class StopStrings:
    """Finds stop strings in text that arrives in pieces; the result does not depend on the pieces.

    The stop string that is complete first wins; of several complete at the same character, the longest. With
    `include` the stop string is part of the text, otherwise the text ends before it. After a match no more
    text is returned.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that became final, the stop string that was found or None).

        A stop string that ends within inactive text is ignored; one that only begins there is found.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        num_seen, text = len(self._held), self._held + text
        if active and (match := self._first_match(text, num_seen)) is not None:
            end, stop = match
            self._held, self._matched = "", stop
            return text[: end if self._include else end - len(stop)], stop
        cut = len(text) - self._partial_match_len(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Returns the text held back, when no more follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """(end, stop string) of the first match that ends after the first `num_seen` characters."""
        matches = [
            (at + len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, num_seen - len(stop) + 1))) >= 0
        ]
        return min(matches, key=lambda match: (match[0], -len(match[1])), default=None)

    def _partial_match_len(self, text: str) -> int:
        """Length of the longest ending of `text` with which a stop string begins."""
        for size in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            ending = text[-size:]
            if any(len(stop) > size and stop.startswith(ending) for stop in self._stops):
                return size
        return 0


class TextStream:
    """Tokens in, final text out, until a stop string is found.

    A stop string counts if a token after the first `min_tokens` completes it. With `token_bytes` (byte-level
    tokenizers) a token costs one or two microseconds instead of about a hundred.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self._detokenizer: ByteStream | Detokenizer
        if token_bytes is not None:  # byte-level text does not depend on the prompt
            self._detokenizer = ByteStream(token_bytes, skip_special_tokens=skip_special_tokens)
        else:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_ids,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token; returns (text that became final, the stop string that was found or None)."""
        self._num_tokens += 1
        return self._match(self._detokenizer.push(token))

    def flush(self) -> str:
        """Returns the text held back, when generation ended without a stop string."""
        piece, stop = self._match(self._detokenizer.flush())
        return piece + (self._stops.flush() if self._stops is not None and stop is None else "")

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._stops is None:
            return text, None
        return self._stops.push(text, active=self._num_tokens > self._min_tokens)


def _num_unfinished(text: str) -> int:
    """How many characters at the end may still change.

    More replacement characters than `LIMITS.unfinished` are bytes that are not text; then only the last three
    may begin a character.
    """
    num = len(text) - len(text.rstrip(_REPLACEMENT))
    return num if num <= LIMITS.unfinished else 3


__all__ = ["LIMITS", "Detokenizer", "StopStrings", "TextStream", "Tokenizer", "WindowLimits"]
