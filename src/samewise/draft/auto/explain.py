"""Decisions of `auto`: counted for stats(), and explained on the log `samewise.auto` where that is wanted.

Host only.
"""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("samewise.auto")


class DecisionLog:
    """The current step, how many sequences each drafter was chosen for, and the log of reasons."""

    def __init__(self, *, explain: bool = False) -> None:
        self._explain = explain
        self.step = 0
        self.counts: Counter[str] = Counter()  # by drafter name; "none": no drafter
        if explain:
            _enable_log()

    def explain(self, reason: str, *args: object) -> None:
        """Log why something was decided in this step."""
        if self._explain:
            log.info("step %d: " + reason, self.step, *args)


def _enable_log() -> None:
    """Let INFO through; without any handler in the program, write to stderr."""
    if log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


__all__ = ["DecisionLog"]
