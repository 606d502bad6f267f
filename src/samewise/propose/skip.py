"""Self-speculation: the model guesses for itself with some of its sublayers left out.

Drafts read canonical KV and write scratch; there is no second model, no second cache and no copy of either.
Which sublayers are left out is found while answering (phase 1: accumulate some text, then optimise the set on
it, a pass now and then, within a bounded share of time). Then the set is used with an eye on its confidence
(phase 2: accelerate): a draft goes on while its next guess can be expected to pay, and where it is unsure its
alternatives are offered as branches. When its first guesses are right clearly less often than they
were when it was chosen, the search is opened again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from samewise.costs import Curve, Frames, Rate, Trust
from samewise.propose.decode import Decode
from samewise.propose.rehearse import Piece, Rehearsal
from samewise.propose.search import Best, Prices, Search
from samewise.run.frame import pack_fast
from samewise.run.runner import Runner
from samewise.sampling import Draw, Sampler
from samewise.types import Ask, Branch, LayerSet, Proposal, Verdict

log = logging.getLogger("samewise.skip")

LEAST = 24  # tokens a set must be scored on
RIVALS = 3  # alternatives looked at where a guess is unsure
BRANCHES = 4  # of which a draft may have at once
UNSURE = 0.8  # below this chance a guess has alternatives worth a thought
FAITH = 0.9  # a draft is broken off for want of chance above this at the latest
FALL = 0.15  # how much less often first guesses may be right before the search is opened again
SETTLED = 24.0  # first guesses that must have been seen for that
EVENTS = 256
IDLE = 1.0  # longer pauses are nobody's time


class Memory(Protocol):
    """Where found sets are kept over the end of a process."""

    def recall(self) -> LayerSet | None:
        """What was found before, if anything."""
        ...

    def remember(self, skipped: LayerSet, rate: float) -> None:
        """Keep this one."""
        ...


class Event(NamedTuple):
    """What happened to the set, and when, counted in committed tokens."""

    event: str  # accumulate, optimise, accelerate
    tokens: int
    score: float  # tokens per second it promises
    rate: float  # how often it is right on known text
    skipped: LayerSet

    def plain(self) -> dict[str, Any]:
        """For reading."""
        sets = {"attention": sorted(self.skipped.attention), "mlp": sorted(self.skipped.mlp)}
        return {
            "event": self.event,
            "tokens": self.tokens,
            "score": self.score,
            "rate": self.rate,
            "set": sets,
        }


@dataclass(slots=True)
class _Draft:
    """What is known of the guesses a sequence has outstanding."""

    changes: int  # the set they were made with
    confidences: list[float] = field(default_factory=list)
    reach: float = 1.0  # the chance that all of them are right
    rivals: list[tuple[float, int, int, float]] = field(default_factory=list)  # gain, place, token, share
    branches: tuple[tuple[Branch, float], ...] = ()  # and how sure each alternative looked
    sampled: bool = False


class Skip(Decode):
    """Guesses by decoding with a layer set that finds itself.

    `think` does the searching; asked for guesses by itself (`alone`) it thinks first.
    """

    name = "skip"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        rehearsal: Rehearsal,
        search: Search,
        frames: Frames,
        clock: Callable[[], float],
        weights: list[tuple[float, float]],
        rest: float,
        *,
        memory: Memory | None = None,
        every: int = 32,
        share: float = 0.02,
        most: int = 16,
        chain: int = 1,
        alone: bool = True,
    ) -> None:
        super().__init__(runner, sampler, chain=chain)
        self._rehearsal, self._search, self._frames, self._clock = rehearsal, search, frames, clock
        self._memory, self._every, self._share, self._most, self._alone = memory, every, share, most, alone
        self._weights, self._rest = weights, rest  # bytes read by each sublayer, and by all else
        self._full = Curve()  # seconds of a pass with nothing left out, by number of sequences
        self._seen: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []  # rivals of the passes under way
        self._drafts: dict[int, _Draft] = {}
        self._texts: dict[int, tuple[list[int], int]] = {}
        self._trust = {False: Trust(), True: Trust()}  # greedy guesses, sampled ones
        self._rival = Trust()
        self._first = Rate(0.0, 0.0, memory=64.0)  # of first guesses, since the set is in use
        self.changes = 0  # how often the set was changed
        self._tokens = self._scored_at = 0
        self._spent = self._active = self._last = 0.0
        self._step_cost = 0.0
        self._informed = False
        self._branched = 0
        self._context = 0.0  # bytes of KV that each attention read when prices were last looked at
        self._events: list[Event] = []
        self._note("accumulate")

    # ---- guessing

    @property
    def ready(self) -> bool:
        """Whether there is a set to draft with."""
        return len(self._search.best.skipped) > 0

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next guess of every ask, or the next few, while they can be expected to pay."""
        if self._alone:
            self.think(asks)
        if not asks or not self.ready:
            return []
        for ask in asks:
            if not ask.draft:
                self._drafts[ask.seq_id] = _Draft(self.changes, sampled=ask.sampling.temperature > 0)
        # What another set left out of the KV, this one must not look for: such drafts end where they are.
        asks = [
            a for a in asks if (d := self._drafts.get(a.seq_id)) is not None and d.changes == self.changes
        ]
        if not asks:
            return []
        self._seen.clear()
        began = self._clock()
        found = super().propose(asks)
        passes = max(len(proposal.tokens) for proposal in found)
        self._book(len(asks), (self._clock() - began) / passes)
        return self._paced(asks, found)

    def _look(self, asks: list[Ask], logits: torch.Tensor, draws: list[Draw]) -> None:
        ids, shares = self._sampler.rivals(logits, draws, RIVALS + 1)
        self._seen.append(([ask.seq_id for ask in asks], ids, shares))

    def _paced(self, asks: list[Ask], found: list[Proposal]) -> list[Proposal]:
        """Keep each draft as far as it pays, and offer alternatives where it is unsure."""
        looks: dict[int, list[tuple[list[int], list[float]]]] = {}
        for seq_ids, choices, surely in self._seen:
            for seq_id, tokens, values in zip(seq_ids, choices.tolist(), surely.tolist(), strict=True):
                looks.setdefault(seq_id, []).append((tokens, values))
        live = len(asks)
        pace = live / max(self._frames.cost(live), 1e-9)
        rows = live + sum(len(ask.draft) + 1 for ask in asks)
        a_pass = self._full.at(live) * self._left(self._search.best.skipped) / live
        bar = min(FAITH, (a_pass + self._frames.cost(rows + 1) - self._frames.cost(rows)) * pace)
        proposals = []
        for ask, proposal in zip(asks, found, strict=True):
            draft, trust = self._drafts[ask.seq_id], self._trust[self._drafts[ask.seq_id].sampled]
            kept, goes_on = 0, True
            for token, (ids, shares) in zip(proposal.tokens, looks[ask.seq_id], strict=True):
                sure = dict(zip(ids, shares, strict=True)).get(token, 0.0)
                chance, before = trust.chance(sure), draft.reach
                place = len(draft.confidences)
                draft.confidences.append(sure)
                draft.reach *= chance
                kept += 1
                if chance < UNSURE:
                    others = [(t, s) for t, s in zip(ids, shares, strict=True) if t != token][:RIVALS]
                    draft.rivals += [(before * self._rival.chance(s), -place, t, s) for t, s in others]
                if draft.reach * self._typical < bar:
                    goes_on = False
                    break
            draft.branches = self._alternatives(draft, rows, pace)
            rows += sum(branch.at + 2 for branch, _ in draft.branches)
            proposals.append(
                proposal._replace(
                    tokens=proposal.tokens[:kept],
                    logprobs=proposal.logprobs[:kept],
                    tops=proposal.tops[:kept],
                    more=goes_on,
                    branches=tuple(branch for branch, _ in draft.branches),
                )
            )
        return proposals

    def _alternatives(self, draft: _Draft, rows: int, pace: float) -> tuple[tuple[Branch, float], ...]:
        """Branches whose rows cost less than the token they may bring is worth, the likeliest first."""
        chosen: list[tuple[Branch, float]] = []
        for gain, back, token, share in sorted(draft.rivals, reverse=True)[:BRANCHES]:
            price = self._frames.cost(rows - back + 2) - self._frames.cost(rows)
            if gain < max(0.02, price * pace):
                continue
            chosen.append((Branch(-back, (token,)), share))
            rows += 2 - back
        return tuple(chosen)

    @property
    def _typical(self) -> float:
        """The chance of a guess of which nothing is known yet."""
        if self._first.trials < SETTLED:
            return max(0.5, self._search.best.rate)
        return self._first.value

    # ---- learning

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn how guesses fared, and notice a change of topic."""
        for verdict in verdicts:
            self._tokens += len(verdict.tokens)
            draft = self._drafts.pop(verdict.seq_id, None) if verdict.drafter == self.name else None
            if draft is None or not verdict.guessed:
                continue
            won = verdict.branch
            self._branched += len(draft.branches)
            held = draft.branches[won - 1][0].at if 0 < won <= len(draft.branches) else verdict.accepted
            for place, sure in enumerate(draft.confidences[: held + 1]):
                self._trust[draft.sampled].observe(sure, right=place < held)
            for number, (branch, share) in enumerate(draft.branches, 1):
                if branch.at == held:
                    self._rival.observe(share, right=number == won)
            self._first.observe(1, int(held > 0))
        norm = self._search.best.rate
        fallen = self._first.trials >= SETTLED and self._first.value < norm - FALL
        if fallen and not self._search.open and self.ready:
            self._search.best.rate = self._first.value
            self._search.reopen()
            self._informed = False
            self._note("optimise")

    def forget(self, seq_id: int) -> None:
        """The sequence is gone; its text may be rehearsed."""
        self._drafts.pop(seq_id, None)
        known = self._texts.pop(seq_id, None)
        if known is not None and self._search.open:
            self._rehearsal.remember(*known)

    def stats(self) -> dict[str, Any]:
        """Where it stands, and how it got there."""
        best = self._search.best
        return {
            "phase": self._events[-1].event,
            "set": self._events[-1].plain()["set"] | {"skipped": len(best.skipped)},
            "matchness": best.rate,
            "first_guess_acceptance": self._first.value if self._first.trials else None,
            "threshold": self._trust[False].least(0.5),
            "branches": self._branched,
            "search": {
                "rounds": self._search.round,
                "open": self._search.open,
                "seconds": self._spent,
                "share": self._spent / self._active if self._active else 0.0,
            },
            "timeline": [event.plain() for event in self._events],
        }

    @property
    def possible(self) -> bool:
        """Whether the model has sublayers that could be left out at all."""
        return self._search.open

    def renew(self) -> None:
        """The weights were replaced: what was found is of the past, and the incumbent has to prove itself."""
        self._informed = False
        self._first = Rate(0.0, 0.0, memory=64.0)
        if self._events[-1].event != "accumulate":
            self._search.reopen()
            self._note("accumulate")

    def settle(self, skipped: LayerSet, rate: float) -> None:
        """Draft with this set, which somebody knows to be good; search only if it proves otherwise."""
        self._search.best, self._search.open = Best(skipped, rate), False
        self._use(skipped)
        self._note("accelerate")

    # ---- searching

    def think(self, asks: list[Ask]) -> None:
        """One step of the search, if one is due and affordable."""
        now = self._clock()
        self._active += min(now - self._last, IDLE) if self._last else 0.0
        self._last = now
        if self._search.open:
            for ask in asks:
                self._texts[ask.seq_id] = (ask.tokens, ask.prompt_len)
        due = self._search.open and asks and self._tokens - self._scored_at >= self._every
        if not due or not self._frames.curve.known or self._too_dear(len(asks)):
            return
        pieces = self._rehearsal.gather(asks)
        if sum(len(piece.targets) for piece in pieces) < LEAST:
            return
        began = self._clock()
        self._scored_at = self._tokens
        self._round(asks, pieces)
        self._step_cost = self._clock() - began
        self._spent += self._step_cost
        self._last = self._clock()
        self._active += self._step_cost

    def _too_dear(self, live: int) -> bool:
        """Whether a step would take more than the share of time that searching may have."""
        expected = self._step_cost or 2 * self._frames.cost(64)
        return self._spent + expected > self._share * self._active and live > 0

    def _round(self, asks: list[Ask], pieces: list[Piece]) -> None:
        search = self._search
        if not self._informed:
            self._inform(pieces)
        prices = self._prices(asks)
        candidate = search.suggest(prices)
        rate, trials = self._rate(pieces, candidate)
        own, _ = self._rate(pieces, search.best.skipped)
        if self._events[-1].event == "accumulate":
            self._note("optimise")
        if search.score(candidate, rate, own, trials, prices):
            log.info("layer set: skip %s (%d of %d right)", candidate, round(rate * trials), trials)
            self._use(candidate)
            self._note("optimise")
        if not search.open:
            self._note("accelerate")
            if self._memory is not None and self.ready:
                self._memory.remember(search.best.skipped, search.best.rate)

    def _inform(self, pieces: list[Piece]) -> None:
        """What one look at the hidden states tells, and what an earlier process found."""
        self._informed = True
        self._search.inform(self._rehearsal.shares(pieces))
        found = self._memory.recall() if self._memory is not None and not self.ready else None
        if found is not None and self._search.start_from(found):
            self._use(found)

    def _rate(self, pieces: list[Piece], skipped: LayerSet) -> tuple[float, int]:
        if not skipped:
            return 1.0, sum(len(piece.targets) for piece in pieces)
        right, asked = self._rehearsal.agreement(pieces, skipped)
        return right / asked, asked

    def _use(self, skipped: LayerSet) -> None:
        self._path = self._rehearsal.path(skipped)
        self._first = Rate(0.0, 0.0, memory=64.0)
        self.changes += 1

    def _note(self, event: str) -> None:
        best = self._search.best
        self._events.append(Event(event, self._tokens, best.pace, best.rate, best.skipped))
        del self._events[1 : len(self._events) - EVENTS]

    # ---- what things cost

    def _prices(self, asks: list[Ask]) -> Prices:
        live = len(asks)
        if not self._full.known:
            self._time_whole(asks)
        whole = self._full.at(live)
        attention, mlp, total = self._parts(asks)
        frames = tuple(self._frames.cost(live * (k + 1)) for k in range(self._most + 1))
        rest = whole * self._rest / total
        return Prices(live, rest, whole * attention / total, whole * mlp / total, frames)

    def _parts(self, asks: list[Ask]) -> tuple[float, float, float]:
        """Bytes a pass reads: of an average attention with its KV as long as it is now, of an MLP, of all."""
        layers = len(self._weights)
        kv = sum(len(ask.tokens) for ask in asks) * self._runner.kv_bytes
        attention = sum(a for a, _ in self._weights) / layers + kv
        mlp = sum(m for _, m in self._weights) / layers
        self._context = kv
        return attention, mlp, self._rest + layers * (attention + mlp)

    def _time_whole(self, asks: list[Ask]) -> None:
        """A fast pass with nothing left out, on what is live: it writes scratch like any guess."""
        if (
            self._runner.device.type != "cpu"
        ):  # it would have to be captured first; a frame is dearer by little
            self._full.observe(len(asks), self._frames.cost(len(asks)))
            return
        for _ in range(2):  # the first may have to build something
            began = self._clock()
            batch = pack_fast(asks, self._runner.fast_tray(len(asks)))
            self._runner.fast(batch)[:1].sum().item()
            seconds = self._clock() - began
        self._full.observe(len(asks), max(seconds, 1e-9))

    def _left(self, skipped: LayerSet) -> float:
        """The share of a whole pass that is left."""
        kv = self._context
        out = sum(self._weights[i][0] + kv for i in skipped.attention)
        out += sum(self._weights[i][1] for i in skipped.mlp)
        total = self._rest + sum(a + m + kv for a, m in self._weights)
        return max(1e-3, 1.0 - out / total)

    def _book(self, live: int, seconds: float) -> None:
        """A pass without some sublayers tells what the whole would take."""
        self._full.observe(live, seconds / self._left(self._search.best.skipped))


__all__ = ["Event", "Memory", "Skip"]
