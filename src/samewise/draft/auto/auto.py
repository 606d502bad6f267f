"""Pick who guesses, and how far, so that tokens come as fast as they can; often that is: nobody.

Everything is decided from measurements: what a frame of so many rows takes, what a drafter's pass takes,
how often guesses turned out right. A row is bought when the tokens it can be expected to bring are worth
more than its time at the rate tokens come now; rows that would be padding cost nothing. Output cannot depend
on any of it.

Host only; the clock is handed in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samewise.draft.auto.idle_policy import Rest
from samewise.draft.base import Drafter, Proposer
from samewise.draft.cost_model import Curve, FrameCosts, Luck, Rate, expected
from samewise.draft.ngram import Ngram
from samewise.types import Ask, Proposal, Verdict

log = logging.getLogger("samewise.auto")

MARGIN = 1.05  # a drafter must promise this much more than not drafting
UNLIKELY = 0.05  # no row is free enough for less
SURCHARGE = 1.15  # times its price a match must bring: those that look best are also those that look too good
FAR = 0.75  # of its chance keeps a guess further ahead than twice what matched
LENGTHS = 12  # matches longer than this are believed alike
LIKELY = (0.2, 0.2, 0.35, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9)  # by length, at first
EXPLORE = 400  # steps after which a drafter that does not pay is tried again
UNKNOWN = 8  # and one of which too little is known
TRIAL = 4  # guesses of such a trial
PATIENCE = 32  # steps that a drafter may take to get ready for those it was chosen for
EARLY = 12.0  # trials a sequence's own record must have to count as much as everybody's


@dataclass(slots=True)
class Known:
    """A drafter, and what is known of it."""

    proposer: Drafter
    cost: Curve = field(default_factory=Curve)  # seconds of one pass, by number of sequences
    rate: Rate = field(default_factory=lambda: Rate(3.4, 4.0))
    tried: int = -EXPLORE  # the step of its last draft
    revision: int = 0  # of the drafter when last looked at
    sizes: set[int] = field(default_factory=set)  # numbers of sequences it has drafted for

    def look(self) -> None:
        """Forget what was known of it before it changed its ways."""
        if self.proposer.revision != self.revision:
            self.revision, self.tried = self.proposer.revision, -EXPLORE * 10**6
            self.cost, self.rate, self.sizes = Curve(), Rate(3.4, 4.0), set()

    def observe(self, live: int, seconds: float) -> None:
        """A pass took so long. The first of its size may have had to build something, and says nothing."""
        if live in self.sizes:
            self.cost.observe(live, seconds)
        self.sizes.add(live)


class Choice(NamedTuple):
    """Draft with whom, how far, and why."""

    drafter: Known | None
    guesses: int
    gain: float  # tokens per second over not drafting


NOBODY = Choice(None, 0, 0.0)


class Auto(Proposer):
    """Suffix matches where they pay, a drafter where it pays, nothing where nothing does."""

    name = "auto"

    def __init__(
        self,
        ngram: Ngram,
        drafters: list[Drafter],
        frames: FrameCosts,
        clock: Callable[[], float],
        *,
        most: int = 16,
        restful: bool = False,
        explain: bool = False,
    ) -> None:
        self._rest = Rest(clock) if restful else None  # else nothing is gained by not being asked
        self._ngram, self._frames, self._clock, self._most = ngram, frames, clock, most
        self._drafters = {drafter.name: Known(drafter) for drafter in drafters}
        self._explain = explain
        if explain:
            _be_heard()
        self._by_length = [Rate(10.0 * chance, 10.0) for chance in LIKELY]
        self._by_seq: dict[int, dict[str, Rate]] = {}  # a sequence's own record with each drafter
        self._luck: dict[int, Luck] = {}  # and with suffix matches
        self._matched: dict[int, int] = {}  # length of the match a sequence's draft came from
        self._target: dict[int, tuple[str, int]] = {}  # who drafts for a sequence, and how far
        self._step = 0
        self._waited = 0  # steps in a row in which a drafter was to guess, and nobody did
        self._live: set[int] = set()  # sequences of the last frame
        self._pending: set[int] = set()  # sequences with guesses that were not yet judged
        self._decisions: Counter[str] = Counter()

    @property
    def quiet(self) -> bool:
        """Whether there is so little to guess that asking is put off."""
        return self._rest is not None and self._rest.resting and not self._pending

    # ---- the two verbs, and the farewell

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Guesses where they pay."""
        self._step += 1
        began = self._clock()
        for drafter in self._drafters.values():
            drafter.proposer.on_step(asks)
            drafter.look()
        if self._rest is not None:
            self._rest.apart(self._clock() - began)
        fresh = [ask for ask in asks if not ask.draft]
        proposals = self._match(fresh, len(asks))
        served = {proposal.seq_id for proposal in proposals}
        left = [ask for ask in fresh if ask.seq_id not in served]
        self._start(left, len(asks))
        proposals += self._draft([ask for ask in asks if ask.seq_id not in served])
        self._pending.update(proposal.seq_id for proposal in proposals)
        if self._rest is not None and asks:
            chosen = any(ask.seq_id in self._target for ask in asks)
            self._waited = 0 if proposals else self._waited + chosen
            busy = bool(proposals) or any(ask.draft for ask in asks)
            self._rest.asked(guessed=busy or (chosen and self._waited <= PATIENCE))
            if self._explain and self._rest.resting:
                log.info("step %d: nothing to guess; resting", self._step)
        return proposals

    def meet(self, asks: list[Ask]) -> None:
        """Read prompts, while the device does. Who could draft for them is asked soon."""
        self._ngram.meet(asks)
        if self._rest is not None and any(known.proposer.ready for known in self._drafters.values()):
            self._rest.end()

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn how guesses fared."""
        self._pending.difference_update(verdict.seq_id for verdict in verdicts)
        for verdict in verdicts:
            if not verdict.guessed:
                continue
            fared = (verdict.guessed, verdict.accepted)
            own = self._by_seq.setdefault(verdict.seq_id, {})
            own.setdefault(verdict.drafter, Rate(0.0, 0.0, memory=40.0)).observe(*fared)
            if verdict.drafter == self._ngram.name:
                self._learn(verdict.seq_id, *fared)
            elif verdict.drafter in self._drafters:
                self._drafters[verdict.drafter].rate.observe(*fared)
            self._target.pop(verdict.seq_id, None)
        for drafter in self._drafters.values():
            drafter.proposer.observe(verdicts)
        if self._rest is not None:
            self._rest.landed(len(verdicts), mixed=not all(verdict.tokens for verdict in verdicts))
            self._live = {verdict.seq_id for verdict in verdicts}
            if self._rest.resting:
                self._step += 1
                self._listen(self._rest, verdicts)

    def _listen(self, rest: Rest, verdicts: list[Verdict]) -> None:
        """Read what is said while nobody asks, in case it has been said before."""
        promised = 0.0
        for verdict in verdicts:
            if not verdict.tokens:
                continue
            heard = self._ngram.listen(verdict.seq_id, verdict.tokens, verdict.kv_len + 1)
            if heard.fared is not None:
                length, right = heard.fared
                self._fared(verdict.seq_id, length, right=right)
            if heard.length:
                promised += self._promise(verdict.seq_id, heard.length)
        rest.call(len(verdicts), promised)
        if self._explain and not rest.resting:
            log.info(
                "step %d: awake again; %.2f right guesses expected, asking takes %.2f ms of a frame",
                self._step, promised, rest.price(len(verdicts)) * 1e3,
            )  # fmt: skip

    def _promise(self, seq_id: int, length: int) -> float:
        """Right guesses to expect from a match of this length, one frame from now.

        The next token is on its way already; nothing can be guessed but what comes after it.
        """
        found, chance = 0.0, self._chance(seq_id, length)
        for place in range(1, self._most + 1):
            chance *= self._chance(seq_id, length + place)
            if chance < UNLIKELY:
                break
            found += chance
        return found

    def _learn(self, seq_id: int, guessed: int, accepted: int) -> None:
        """How guesses from a match fared: each right one makes the match longer by one."""
        length = self._matched.get(seq_id, 0)
        for place in range(min(accepted + 1, guessed)):
            self._fared(seq_id, length + place, right=place < accepted)

    def _fared(self, seq_id: int, length: int, *, right: bool) -> None:
        rate, luck = self._by_length[min(length, LENGTHS)], self._luck.setdefault(seq_id, Luck())
        luck.observe(rate.value, right=right)
        rate.observe(1, int(right))

    def forget(self, seq_id: int) -> None:
        """The sequence is gone."""
        for known in (self._by_seq, self._luck, self._matched, self._target):
            known.pop(seq_id, None)
        self._pending.discard(seq_id)
        self._ngram.forget(seq_id)
        self._live.discard(seq_id)
        if self._rest is not None and not self._live:
            self._rest.interrupted()
        for drafter in self._drafters.values():
            drafter.proposer.forget(seq_id)

    def renew(self, contract_id: str) -> None:
        """Pass on to every drafter."""
        for drafter in self._drafters.values():
            drafter.proposer.renew(contract_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What it knows and what it has decided so far, and the reports of its drafters."""
        own = {
            "decisions": dict(self._decisions),
            "frame_seconds": self._frames.curve.table(),
            "drafters": {
                name: {"seconds": d.cost.table(), "acceptance": d.rate.value}
                for name, d in self._drafters.items()
            },
            "match_acceptance": [round(rate.value, 3) for rate in self._by_length],
            "rest": None if self._rest is None else self._rest.stats(max(1, len(self._live))),
        }
        reports = {"auto": own}
        for drafter in self._drafters.values():
            reports |= drafter.proposer.stats()
        return reports

    # ---- suffix matches: rows are bought, the likeliest first

    def _match(self, asks: list[Ask], live: int) -> list[Proposal]:
        found = [(ask, match) for ask in asks if (match := self._ngram.find(ask)) is not None]
        if not found:
            if self._explain and asks:
                log.info("step %d: no ending of %d sequences was seen before", self._step, len(asks))
            return []
        wanted: list[tuple[float, int, int]] = []  # chance that a guess is reached and right, place, sequence
        for ask, match in found:
            chance = 1.0
            for place in range(min(len(match.tokens), ask.room, self._most)):
                chance *= self._chance(ask.seq_id, match.length + place)
                chance *= FAR if place >= 2 * match.length else 1.0
                if chance < UNLIKELY:
                    break
                wanted.append((chance, -place, ask.seq_id))
        wanted.sort(reverse=True)
        now = self._frames.cost(live) or 1e-9
        rows = live + self._worthwhile([chance for chance, _, _ in wanted], live, now)
        bought = Counter(seq_id for _, _, seq_id in wanted[: rows - live])
        proposals = []
        for ask, match in found:
            if bought[ask.seq_id]:
                self._matched[ask.seq_id] = match.length
                tokens = match.tokens[: bought[ask.seq_id]]
                proposals.append(Proposal(ask.seq_id, tokens, drafter=self._ngram.name))
        self._decisions["ngram"] += len(proposals)
        if self._explain:
            log.info(
                "step %d: %d of %d sequences match; %d guesses bought at %.2f ms a frame of %d",
                self._step, len(found), live, rows - live, now * 1e3, live,
            )  # fmt: skip
        return proposals

    def _worthwhile(self, chances: list[float], live: int, now: float) -> int:
        """How many guesses to buy, the likeliest first: as many as bring most over their price, in seconds.

        A frame's worth at a time: where a row makes the frame a larger one, those behind it are free. Beside
        a device any guess makes the next frame wait for its verdict, and must bring that too.
        """
        frames, bought = self._frames, 0
        best = 0.0 if self._rest is None else self._rest.price(live)
        num, brought = 0, 0.0
        while num < len(chances):
            free = frames.padding(live + num) or frames.padding(live + num + 1) + 1
            filled = min(num + free, len(chances))
            brought += sum(chances[num:filled]) * now / live  # a token takes so long without guesses
            num = filled
            gain = brought - SURCHARGE * (frames.cost(live + num) - now)
            if gain >= best:
                bought, best = num, gain
        return bought

    def _chance(self, seq_id: int, length: int) -> float:
        """That the next guess from a match of this length is right, in this sequence."""
        chance, luck = self._by_length[min(length, LENGTHS)].value, self._luck.get(seq_id)
        return chance if luck is None else luck.chance(chance)

    def _own(self, seq_id: int, drafter: str, everybody: float) -> float:
        """A sequence's own record, as far as it has one, else everybody's."""
        own = self._by_seq.get(seq_id, {}).get(drafter)
        if own is None or not own.trials:
            return everybody
        weight = own.trials / (own.trials + EARLY)
        return weight * own.value + (1 - weight) * everybody

    # ---- drafters

    def _start(self, asks: list[Ask], live: int) -> None:
        """Decide whether sequences without a guess get a drafter for their next round."""
        if not asks:
            return
        choice = self._choose(live) if self._frames.known else NOBODY
        if choice.drafter is None:
            self._decisions["none"] += len(asks)
            return
        choice.drafter.tried = self._step
        name, everybody = choice.drafter.proposer.name, choice.drafter.rate.value
        for ask in asks:
            far = choice.guesses
            if choice.gain:  # else it is a trial
                far, _ = self._best_length(choice.drafter, live, self._own(ask.seq_id, name, everybody))
            self._target[ask.seq_id] = (name, min(far, ask.room))
        self._decisions[choice.drafter.proposer.name] += len(asks)

    def _choose(self, live: int) -> Choice:
        plain = live / self._frames.cost(live)
        best = NOBODY
        for drafter in self._drafters.values():
            if not drafter.proposer.ready:
                continue
            if self._worth_a_trial(drafter, live, plain):
                if self._explain:
                    log.info("step %d: %s is tried for %d sequences", self._step, drafter.proposer.name, live)
                return Choice(drafter, min(TRIAL, self._most), 0.0)
            if not drafter.cost.known:
                continue
            guesses, pace = self._best_length(drafter, live, drafter.rate.value)
            if pace > plain * MARGIN and pace - plain > best.gain:
                best = Choice(drafter, guesses, pace - plain)
        if self._explain and self._drafters:
            who = best.drafter.proposer.name if best.drafter else "nobody"
            log.info(
                "step %d: %s drafts %d for %d sequences; %.1f tokens/s without, %.1f more with",
                self._step, who, best.guesses, live, plain, best.gain,
            )  # fmt: skip
        return best

    def _best_length(self, drafter: Known, live: int, rate: float) -> tuple[int, float]:
        step = drafter.cost.at(live)
        paces = [
            (live * expected(rate, k) / (k * step + self._frames.cost(live * (k + 1))), k)
            for k in range(1, self._most + 1)
        ]
        pace, k = max(paces, key=lambda found: found[0])
        return k, pace

    def _worth_a_trial(self, drafter: Known, live: int, plain: float) -> bool:
        """Whether it was not tried for long, and would pay if it were always right."""
        if self._step - drafter.tried < (EXPLORE if drafter.cost.known else UNKNOWN):
            return False
        if not drafter.cost.known:
            return True
        _, pace = self._best_length(drafter, live, 1.0)
        return pace > plain * MARGIN

    def _draft(self, asks: list[Ask]) -> list[Proposal]:
        """One pass of every drafter that has sequences to draft for."""
        proposals: list[Proposal] = []
        for name, drafter in self._drafters.items():
            mine = []
            for ask in asks:
                who, far = self._target.get(ask.seq_id, ("", 0))
                if who == name and len(ask.draft) < far:
                    mine.append(ask._replace(room=min(ask.room, far - len(ask.draft))))
            if not mine:
                continue
            began = self._clock()
            found = drafter.proposer.propose(mine)
            passes = max((len(p.tokens) for p in found), default=0)
            if passes:
                drafter.observe(len(mine), (self._clock() - began) / passes)
            room = {ask.seq_id: ask.room for ask in mine}
            proposals += [p._replace(more=p.more and len(p.tokens) < room[p.seq_id]) for p in found]
        return proposals


def _be_heard() -> None:
    """Decisions are to be seen: where the program keeps no log, on stderr."""
    if log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


__all__ = ["Auto", "Choice", "Known"]
