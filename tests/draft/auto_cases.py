"""What tests of `auto` share: a clock set by hand, asks, verdicts and frame costs."""

from array import array

from samewise.draft.auto.auto import Auto
from samewise.draft.base import Drafter
from samewise.draft.cost_model import FrameCosts
from samewise.draft.ngram import Ngram
from samewise.types import Ask, Proposal, Sampling, Verdict

REPEATING = [1, 2, 3, 4] * 6
SHORT_MATCH = [5, 1, 2, 3, 4, *range(20, 40), 1, 2]  # its last two tokens occurred before
NO_MATCH = list(range(100, 120))
NEW_TOKENS = list(range(1000, 3000))  # no token occurs twice


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


class TimedDrafter(Drafter):
    """A drafter whose every pass takes `seconds` on the clock."""

    name = "timed"

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.num_passes = clock, seconds, 0

    def propose(self, asks):
        self.num_passes += 1
        self.clock.now += self.seconds
        return [Proposal(ask.seq_id, (7,), drafter=self.name, more=True) for ask in asks]


def ask(seq_id, tokens, room=16, draft=()):
    return Ask(seq_id, tokens, 4, list(draft), len(tokens) - 1, array("i"), Sampling(), room)


def verdict(seq_id, drafted, accepted, drafter):
    return Verdict(seq_id, (1,) * (accepted + 1), (), (), 9, drafted, accepted, drafter=drafter)


def frame_costs(base=0.03, per_row=0.002, sizes=tuple(range(1, 65))):
    frames = FrameCosts(sizes)
    for rows in sizes:
        frames.observe(rows, base + per_row * rows)
    return frames


def auto_of(frames=None, drafters=(), clock=None, **options):
    return Auto(Ngram(), list(drafters), frames or frame_costs(), clock or Clock(), **options)
