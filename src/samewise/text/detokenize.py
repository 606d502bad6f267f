"""Tokens -> text while they come, and where to stop.

What is given out is final: neither half a character nor the beginning of what may become a stop string
leaves here, so nothing streamed is ever taken back.

Host only: this module has never heard of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from samewise.text.byte_tokens import ByteStream, TokenBytes

_CONTEXT = 8  # tokens before the new ones that decoding may look at; more while those give no text
_LONGEST = 32  # tokens a window may reach before it is cut back to its context
_STUCK = 128  # tokens after which a window that cannot be cut cleanly is given out as it is
_DOUBTFUL = 16  # broken characters at the end that may yet become whole
_BROKEN = "\ufffd"  # what decoders put for bytes that are not, or not yet, a character


class Tokenizer(Protocol):
    """As much of transformers' tokenizers as is needed here."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that may be left out of the text."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """The text of these tokens."""


class Detokenizer:
    """Text of one sequence's output, piece by piece, as it reads after its prompt.

    The pieces add up to what `tokenizer.decode` makes of prompt and output, less what it makes of the
    prompt, with no clean-up of spaces. Only a window of the last tokens is decoded at a time. Output that
    is not valid text yields U+FFFD where the decoder puts it.
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
        self._window = self._context(prompt_ids)
        self._given = self._decode(self._window)  # text of the window that is out already
        self._last = self._given  # text of the whole window

    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._last and self._silent(token):
            self._window.pop()  # or a run of them would grow the window without end
            return ""
        self._last = text
        if not text.startswith(self._given):
            return self._give_up() if len(self._window) >= _STUCK else ""
        piece = text[len(self._given) : len(text) - _unsettled(text)]
        self._given += piece
        if len(self._window) >= _LONGEST and len(self._window) % _CONTEXT == 0:
            self._cut()
        return piece

    def flush(self) -> str:
        """No more tokens: returns what was held back."""
        piece = self._last[len(self._given) :]
        self._given = self._last
        return piece

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would rewrite text that is out already.
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip,
            spaces_between_special_tokens=self._spaces,
            clean_up_tokenization_spaces=False,
        )

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last prompt tokens, enough to give some text; none if they end within a character."""
        num = _CONTEXT
        while not (text := self._decode(list(prompt_ids[-num:]))) and num < min(len(prompt_ids), _STUCK):
            num *= 2
        return [] if text.endswith(_BROKEN) else list(prompt_ids[-num:])

    def _silent(self, token: int) -> bool:
        return self._skip and token in self._tokenizer.all_special_ids

    def _cut(self) -> None:
        """Drop the front of the window where text and tokens part cleanly; else leave it for later."""
        text = self._last
        for start in range(len(self._window) - _CONTEXT, 0, -1):
            head, tail = self._decode(self._window[:start]), self._decode(self._window[start:])
            # A decoder may drop a space at the beginning. A cut within a character would add to the text.
            parted = text in (head + tail, head + " " + tail)
            if tail and parted and len(tail) >= len(text) - len(self._given):
                self._given = tail[: len(tail) - (len(text) - len(self._given))]
                self._window, self._last = self._window[start:], tail
                return
        if len(self._window) >= _STUCK:
            self._window = self._window[-_CONTEXT:]
            self._last = self._decode(self._window)
            self._given = self._last[: len(self._last) - _unsettled(self._last)]

    def _give_up(self) -> str:
        """The decoder keeps changing what is out already: give the rest as it reads now, and start afresh."""
        piece = self.flush()
        self._window = self._window[-1:]
        self._given = self._last = self._decode(self._window)
        return piece


class StopStrings:
    """Finds stop strings in a text that comes in pieces; how it is cut does not matter.

    The first stop to be complete wins; of several complete at once, the longest. With `include` the stop
    is part of the text, otherwise the text ends before it. After a match nothing more is given out.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that may go out, the stop that was found or None).

        A stop that is complete within inactive text does not count; one that begins there does.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        seen, text = len(self._held), self._held + text
        if active and (match := self._first(text, seen)) is not None:
            end, stop = match
            self._held, self._matched = "", stop
            return text[: end if self._include else end - len(stop)], stop
        cut = len(text) - self._may_begin(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """No more text: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """(end, stop) of the first match to end after the `seen` characters already looked at."""
        found = [
            (at + len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _may_begin(self, text: str) -> int:
        """Length of the longest ending of `text` that a stop begins with."""
        for size in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            ending = text[-size:]
            if any(len(stop) > size and stop.startswith(ending) for stop in self._stops):
                return size
        return 0


class TextStream:
    """Tokens in, final text out, until a stop string is found.

    A stop counts if it is completed by a token after the first `min_tokens`. With the tokenizer's
    `spelling`, where it has one, a token costs a microsecond or two instead of a hundred.
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
        spelling: TokenBytes | None = None,
    ) -> None:
        self._detokenizer: ByteStream | Detokenizer
        if spelling is not None:  # such text does not depend on what stands before it
            self._detokenizer = ByteStream(spelling, skip_special_tokens=skip_special_tokens)
        else:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_ids,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        self._stops = StopStrings(stops, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token; returns (text that became final, the stop that was found or None)."""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token))

    def flush(self) -> str:
        """Generation ended for another reason: returns what was held back."""
        piece, stop = self._take(self._detokenizer.flush())
        rest = self._stops.flush() if stop is None else ""
        self._pieces.append(rest)
        return piece + rest

    def _take(self, text: str) -> tuple[str, str | None]:
        piece, stop = self._stops.push(text, active=self._num_tokens > self._min_tokens)
        self._pieces.append(piece)
        return piece, stop


def _unsettled(text: str) -> int:
    """How many characters at the end may still become something else.

    A character lacks three bytes at most, but some decoders mark every byte of a run until its last
    character is whole. Where more are marked than that explains, the bytes are simply wrong.
    """
    num = len(text) - len(text.rstrip(_BROKEN))
    return num if num <= _DOUBTFUL else 3


__all__ = ["Detokenizer", "StopStrings", "TextStream", "Tokenizer"]
