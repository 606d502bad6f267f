"""What the last frames were used for: a short record, for whoever watches. Host only.

Written once per frame by the engine, whether or not anybody looks, so it holds numbers only: no
tokens, no requests, nothing that would keep a prompt in memory or show one customer's text to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from samewise.types import Span

KEPT = 256
"""FrameCosts remembered: some seconds of a busy device, minutes of a small one."""


class FrameRecord(NamedTuple):
    """Who used a frame's rows, how many tokens it made public, and when it landed (the engine's clock)."""

    number: int
    prompt: int
    known: int
    guess: int
    padding: int
    committed: int
    when: float


class FrameLog:
    """The last frames, oldest first. Owned by the Engine."""

    def __init__(self, kept: int = KEPT) -> None:
        self._uses: deque[FrameRecord] = deque(maxlen=kept)
        self.number = 0
        """FrameCosts that landed so far; the last one's number."""

    def landed(self, spans: Sequence[Span], size: int, committed: int, when: float) -> None:
        """A frame of `size` rows, filled with these spans, has made `committed` tokens public."""
        rows = prompt = guess = 0
        for span in spans:
            num = len(span.inputs)
            rows += num
            if num > span.given:
                guess += num - span.given
            if span.start < span.prompt_len:
                prompt += min(num, span.prompt_len - span.start)
        self.number += 1
        self._uses.append(
            FrameRecord(self.number, prompt, rows - prompt - guess, guess, size - rows, committed, when)
        )

    def since(self, number: int) -> list[FrameRecord]:
        """FrameCosts after this number, as far back as they are remembered."""
        return [use for use in self._uses if use.number > number]


__all__ = ["KEPT", "FrameLog", "FrameRecord"]
