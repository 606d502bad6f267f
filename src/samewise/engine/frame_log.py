"""What the last frames were used for, as numbers, for a monitor. Host only.

Written once per frame. It holds no tokens and no request ids, so it keeps no prompt in memory and shows no
user's text to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from samewise.types import Span

KEPT = 256
"""Frames remembered: some seconds of a busy GPU, minutes of a small CPU model. Set by hand."""


class FrameRecord(NamedTuple):
    """How a frame's rows were used, how many tokens it committed, and when it landed (engine's clock).

    `drafts` are the draft trees it verified: (nodes, length of the accepted path) each.
    """

    number: int
    prompt: int
    known: int
    guess: int
    padding: int
    committed: int
    when: float
    drafts: tuple[tuple[int, int], ...] = ()


class FrameLog:
    """The last frames, oldest first. Owned by the Engine."""

    def __init__(self, kept: int = KEPT) -> None:
        self._records: deque[FrameRecord] = deque(maxlen=kept)
        self.number = 0
        """Frames that landed so far: the number of the last one."""

    def landed(
        self,
        spans: Sequence[Span],
        size: int,
        committed: int,
        when: float,
        drafts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Record a frame of `size` rows that ran these spans and committed `committed` tokens."""
        rows = prompt = guess = 0
        for span in spans:
            num = len(span.inputs)
            rows += num
            if num > span.given:
                guess += num - span.given
            if span.start < span.prompt_len:
                prompt += min(num, span.prompt_len - span.start)
        self.number += 1
        known = rows - prompt - guess
        self._records.append(
            FrameRecord(self.number, prompt, known, guess, size - rows, committed, when, tuple(drafts))
        )

    def since(self, number: int) -> list[FrameRecord]:
        """The frames after this number that are still remembered."""
        return [record for record in self._records if record.number > number]


__all__ = ["KEPT", "FrameLog", "FrameRecord"]
