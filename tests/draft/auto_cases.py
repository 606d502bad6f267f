"""What tests of `auto` share: a clock set by hand, asks, verdicts, frame costs and a simulated device."""

from array import array

from samewise.draft.auto.auto import Auto
from samewise.draft.base import Drafter
from samewise.draft.cost_model import FrameCosts
from samewise.draft.tree import DraftTree
from samewise.draft.tree_drafter import TreeDrafter
from samewise.draft.tree_proposer import TreeProposer
from samewise.types import Ask, Proposal, Sampling, Verdict

VOCAB = 4000
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


def ask(seq_id, tokens, room=16, draft=(), prediction=()):
    return Ask(seq_id, tokens, 4, list(draft), len(tokens) - 1, array("i"), Sampling(), room, max_nodes=32,
               prediction=prediction)  # fmt: skip


def verdict(seq_id, drafted, accepted, drafter, kv_len=9):
    return Verdict(seq_id, (1,) * (accepted + 1), (), (), kv_len, drafted, accepted, drafter=drafter)


def frame_costs(base=0.03, per_row=0.002, sizes=tuple(range(1, 65))):
    frames = FrameCosts(sizes)
    for rows in sizes:
        frames.observe(rows, base + per_row * rows)
    return frames


def auto_of(frames=None, drafters=(), clock=None, trees=None, **options):
    trees = trees or TreeProposer(TreeDrafter(VOCAB))
    return Auto(trees, list(drafters), frames or frame_costs(), clock or Clock(), **options)


class SimulatedDevice:
    """Sequences that say a known text: a frame takes 1 ms, and 0.4 ms more where `auto` was asked before it.

    `right`: whether drafts that agree with the text are accepted.
    """

    FRAME, ASKING, ROW = 1e-3, 0.4e-3, 1e-6
    PROMPT_LEN = 8

    def __init__(self, text, *, right=True, live=1, explain=False, row=ROW, trees=None, drafters=()):
        self.clock, self.right, self.live, self.row = Clock(), right, live, row
        self.frames = frame_costs(self.FRAME, row, sizes=tuple(range(1, 257)))
        self.auto = auto_of(self.frames, drafters, self.clock, trees, ahead=True, explain=explain)
        self.text, self.num_committed = text, self.PROMPT_LEN
        self.num_asked = self.num_frames = self.num_nodes = 0
        self.auto.meet([ask(i, text[: self.PROMPT_LEN]) for i in range(live)])

    def run(self, until):
        """Commit the text up to this length."""
        tree = DraftTree()  # in the frame in flight
        while self.num_committed < until:
            self.num_frames += 1
            self.num_nodes += len(tree)
            seconds = self.FRAME + self.row * (self.live + self.live * len(tree))
            self.clock.now += seconds
            self.frames.last_seconds = seconds
            path = tree.path(self.text[self.num_committed :]) if self.right else []
            tokens = self.text[self.num_committed : self.num_committed + 1 + len(path)]
            self.num_committed += len(tokens)
            verdicts = [
                Verdict(i, tuple(tokens), (), (), self.num_committed - 1, len(tree), len(path),
                        drafter="tree", path=tuple(path))
                for i in range(self.live)
            ]  # fmt: skip
            was_quiet = self.auto.quiet
            self.auto.observe(verdicts)
            tree = DraftTree()
            if was_quiet:
                continue  # the next frame was launched ahead
            self.clock.now += self.ASKING
            self.num_asked += 1
            proposals = self.auto.propose([ask(i, self.text[: self.num_committed]) for i in range(self.live)])
            if proposals:
                tree = DraftTree(proposals[0].tokens, proposals[0].parents)

    @property
    def tokens_per_frame_time(self):
        return (self.num_committed - self.PROMPT_LEN) / (self.clock.now / self.FRAME)
