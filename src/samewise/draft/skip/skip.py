"""Self-speculation: the model guesses for itself with some of its sublayers left out.

Drafts read canonical KV and write scratch; there is no second model, no second cache and no copy of either.
Which sublayers are left out is found while answering (phase 1: accumulate some text, then optimise the set on
it, a pass now and then, within a bounded share of time). Then the set is used with an eye on its confidence
(phase 2: accelerate): drafts go on while their next guesses can be expected to pay for the pass they share,
and where one is unsure its alternatives are offered as branches. When first guesses are right clearly less
often than they were when the set was chosen, the search is opened again; and now and then, ever more rarely,
where it had found nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from samewise.counters import Counters
from samewise.draft.cost_model import FrameCosts, Rate, Trust
from samewise.draft.decode import Decode
from samewise.draft.skip.layer_set_store import LayerSetStore
from samewise.draft.skip.pricing import Pricing
from samewise.draft.skip.score_layer_set import Piece, Rehearsal, Told
from samewise.draft.skip.search import Search
from samewise.execute.pack import pack_fast
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels.attention.base import PAGE
from samewise.types import Ask, Branch, LayerSet, Proposal, Verdict

log = logging.getLogger("samewise.skip")

LEAST = 24  # tokens a set must be scored on
RIVALS = 3  # alternatives looked at where a guess is unsure
BRANCHES = 4  # of which a draft may have at once
SURE = 0.95  # and above this probability nobody looks for any
UNSURE = 0.95  # below this chance a guess has alternatives worth a thought
COLLAPSE = 0.5  # of what it promised: a set that is right less often is dropped
LOST = 3  # sets in a row that are dropped before the search is given up for a while
FALL = 0.15  # how much less often first guesses may be right before the search is opened again
LUCK = 2.5  # standard deviations that are no news
SETTLED, LATELY = 24.0, 64.0  # first guesses that make the norm, and those that are compared with it
AGAIN, RARELY = 4096, 2**20  # tokens after which a search that found nothing is tried again; then twice that
EVENTS = 256
IDLE = 1.0  # longer pauses are nobody's time


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


class _Seen(NamedTuple):
    """What some rows of a pass might have said, the likeliest first, and how sure the model is of each."""

    asks: list[Ask]  # of the whole pass
    rows: list[int]
    ids: torch.Tensor  # [rows, num]
    shares: torch.Tensor  # [rows, num]


class _Rival(NamedTuple):
    """Another token that might stand at a place of a draft."""

    gain: float  # the chance that the draft holds up to there and this is what follows
    place: int
    token: int
    rank: int  # among the alternatives at that place


@dataclass(slots=True)
class _Draft:
    """What is known of the guesses a sequence has outstanding."""

    changes: int  # the set they were made with
    sampled: bool
    confidences: list[float] = field(default_factory=list)
    reach: float = 1.0  # the chance that all of them are right
    rivals: list[_Rival] = field(default_factory=list)
    branches: tuple[_Rival, ...] = ()  # those that are offered


class Skip(Decode):
    """Guesses by decoding with a layer set that finds itself.

    `on_step` does the searching; used without `auto` (`alone`), `propose` calls it first.
    """

    name = "skip"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        rehearsal: Rehearsal,
        search: Search,
        pricing: Pricing,
        frames: FrameCosts,
        counters: Counters,
        clock: Callable[[], float],
        *,
        store: LayerSetStore,
        every: int = 16,
        share: float = 0.02,
        chain: int = 1,
        alone: bool = True,
    ) -> None:
        super().__init__(runner, sampler, chain=chain)
        self._rehearsal, self._search, self._pricing = rehearsal, search, pricing
        self._frames, self._counters, self._clock, self._store = frames, counters, clock, store
        self._every, self._share, self._alone = every, share, alone
        self._natural = runner.elastic or runner.device.type != "cpu"
        self._seen: list[_Seen] = []  # of the passes under way
        self._drafts: dict[int, _Draft] = {}
        self._texts: dict[int, tuple[list[int], int]] = {}
        self._greedy, self._sampled = Trust(), Trust()
        self._rivals = [Rate(0.8 / (i + 1), 2.0) for i in range(RIVALS)]  # how often it is the one, by rank
        self._first = Rate(0.0, 0.0, memory=LATELY)  # of first guesses, since the set is in use
        self._norm: float | None = None  # what that was when it had settled
        self._promised = 1.0  # what it was to be when the set was chosen
        self._losses = 0  # sets dropped since one held
        self._changes = 0
        self._bar = 0.0
        self._scored_at = self._branched = self._passes = 0
        self._pause, self._again = AGAIN, math.inf  # tokens until a search that found nothing is tried again
        self._spent = self._active = self._saved = self._last = self._step_cost = 0.0
        self._informed = self._recalled = False
        self._events: list[Event] = []
        self._note("accumulate")

    # ---- guessing

    @property
    def ready(self) -> bool:
        """Whether there is a set to draft with."""
        return len(self._search.best.skipped) > 0

    @property
    def quiet(self) -> bool:
        """Without a set, and no step of the search due, nobody need ask."""
        return not self.ready and not self._drafts and not self._due

    @property
    def revision(self) -> int:
        """How often the set was changed."""
        return self._changes

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next guess of every ask, or the next few, while they can be expected to pay."""
        if self._alone:
            self.on_step(asks)
        if not asks or not self.ready:
            return []
        for ask in asks:
            if not ask.draft:
                self._drafts[ask.seq_id] = _Draft(self._changes, ask.sampling.temperature > 0)
        # What another set left out of the KV, this one must not look for: such drafts end where they are.
        asks = [
            a for a in asks if (d := self._drafts.get(a.seq_id)) is not None and d.changes == self._changes
        ]
        if not asks:
            return []
        self._seen.clear()
        began = self._clock()
        found = super().propose(asks)
        passes = max(len(proposal.tokens) for proposal in found)
        self._passes += passes
        self._pricing.drafted(len(asks), self._search.best.skipped, (self._clock() - began) / passes)
        return self._paced(asks, found)

    def _choose(self, asks: list[Ask], logits: torch.Tensor, draws: list[SamplingRow]) -> SamplerOutput:
        """The guess of every row, how sure it is, and what else it might have been."""
        picks = self._sampler.sample(logits, [])  # what is not greedy follows below, with its alternatives
        rows, drawn = list(range(len(asks))), [draw.row for draw in draws]
        if self._runner.device.type == "cpu":  # a sure greedy guess needs no second look
            shares = picks.logprobs.exp()
            sure = [i for i, share in enumerate(shares.tolist()) if share > SURE and i not in drawn]
            if sure:
                self._seen.append(_Seen(asks, sure, picks.tokens[sure, None], shares[sure, None]))
            rows = [i for i in rows if i not in sure]
        if rows:
            places = {row: i for i, row in enumerate(rows)}
            moved = [draw._replace(row=places[draw.row]) for draw in draws]
            some = logits[rows] if len(rows) < len(asks) else logits
            ids, shares = self._sampler.top_choices(some, moved, RIVALS + 1)
            if drawn:
                picks.tokens[drawn] = ids[[places[row] for row in drawn], 0]
            self._seen.append(_Seen(asks, rows, ids, shares))
        return picks

    def _paced(self, asks: list[Ask], found: list[Proposal]) -> list[Proposal]:
        """Keep each draft as far as it pays, and offer alternatives where it is unsure."""
        looks: dict[int, list[tuple[list[int], list[float]]]] = {}
        for seen in self._seen:
            for row, tokens, values in zip(seen.rows, seen.ids.tolist(), seen.shares.tolist(), strict=True):
                looks.setdefault(seen.asks[row].seq_id, []).append((tokens, values))
        rows = sum(len(draft.confidences) + 1 for draft in self._drafts.values())
        pace = self._pricing.pace(self._search.best.skipped, len(self._drafts), self._typical)
        least = pace * self._pricing.row(rows, sum(len(proposal.tokens) for proposal in found))
        kept: list[Proposal] = []
        for ask, proposal in zip(asks, found, strict=True):
            draft = self._drafts[ask.seq_id]
            num = self._kept(draft, proposal.tokens, looks[ask.seq_id], least)
            rows += num
            kept.append(
                proposal._replace(
                    tokens=proposal.tokens[:num],
                    logprobs=(),  # nobody asks a guess
                    tops=(),
                    more=num == len(proposal.tokens) < ask.room
                    and proposal.tokens[-1] not in ask.sampling.stop_ids,
                )
            )
        going = self._going_on([proposal.seq_id for proposal in kept if proposal.more], rows, pace)
        for i, proposal in enumerate(kept):
            draft = self._drafts[proposal.seq_id]
            draft.branches = self._alternatives(draft, rows, pace)
            rows += sum(rival.place + 2 for rival in draft.branches)
            kept[i] = proposal._replace(
                more=proposal.seq_id in going,
                branches=tuple(Branch(rival.place, (rival.token,)) for rival in draft.branches),
            )
        return kept

    def _going_on(self, seq_ids: list[int], rows: int, pace: float) -> set[int]:
        """Whose drafts are worth another pass: the likeliest, as many as pay for it together."""
        skipped, drafts = self._search.best.skipped, self._drafts
        order = sorted(seq_ids, key=lambda seq_id: -drafts[seq_id].reach)
        reaches = [drafts[seq_id].reach for seq_id in order]
        num = self._pricing.going_on(skipped, reaches, self._typical, rows, pace, self._chain)
        if order:  # what a guess has to bring where all are alike
            a_pass = self._pricing.seconds(skipped, len(order)) / len(order)
            self._bar = pace * (a_pass + self._pricing.row(rows, len(order)))
        return set(order[:num])

    def _kept(
        self,
        draft: _Draft,
        tokens: tuple[int, ...],
        looks: list[tuple[list[int], list[float]]],
        least: float,
    ) -> int:
        """How many of these guesses a draft takes on: as long as it is likely enough to be worth a row.

        The first one always: how often it is right says how good the set is.
        """
        trust = self._sampled if draft.sampled else self._greedy
        for num, (token, (ids, shares)) in enumerate(zip(tokens, looks, strict=True)):
            sure = dict(zip(ids, shares, strict=True)).get(token, 0.0)
            chance, before, place = trust.chance(sure), draft.reach, len(draft.confidences)
            if chance < UNSURE:
                others = [other for other in ids if other != token][:RIVALS]
                for rank, (other, rate) in enumerate(zip(others, self._rivals, strict=False)):
                    gain = before * (1.0 - chance) * rate.value
                    draft.rivals.append(_Rival(gain, place, other, rank))
            if place and before * chance < least:
                return num
            draft.confidences.append(sure)
            draft.reach *= chance
        return len(tokens)

    def _alternatives(self, draft: _Draft, rows: int, pace: float) -> tuple[_Rival, ...]:
        """Branches whose rows cost less than the token they may bring is worth, the likeliest first."""
        chosen: list[_Rival] = []
        for rival in sorted(draft.rivals, key=lambda r: (-r.gain, r.place, r.token))[:BRANCHES]:
            more = rival.place + 2
            price = more * self._pricing.row(rows, more) + self._pricing.copying(PAGE)
            if rival.gain >= max(0.02, price * pace):
                chosen.append(rival)
                rows += more
        return tuple(chosen)

    @property
    def _typical(self) -> float:
        """The chance of a guess of which nothing is known yet."""
        if self._first.trials < SETTLED:
            return max(0.5, self._search.best.rate)
        return self._first.careful

    # ---- learning

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn how guesses fared, and notice a change of topic."""
        self._tick()
        for verdict in verdicts:
            draft = self._drafts.pop(verdict.seq_id, None)
            if draft is not None and verdict.drafter == self.name:
                self._learn(draft, verdict)
        if not self.ready or self._first.trials < SETTLED:
            return
        now = self._first.value
        if self._broken(now, self._first.trials):
            self._lose()
        elif self._norm is not None and now < self._norm - _news(self._norm):
            self._rehearsal.forget()  # what was said before was about something else
            self._reopen()
            self._promised = now
            self._note("optimise")
        else:
            if self._norm is None and not self._search.open:
                self._norm = now
            if self._first.trials >= 2 * SETTLED:
                self._losses = 0  # this one holds

    def _broken(self, rate: float, trials: float) -> bool:
        """Whether the set is right less than half as often as it promised, and that is not luck."""
        promised = self._promised
        spread = math.sqrt(promised * (1.0 - promised) * (1.0 / SETTLED + 1.0 / trials))
        return rate < min(COLLAPSE * promised, promised - LUCK * spread)

    def _lose(self) -> None:
        """Do without the set, which did not keep its promise, and look for another; if that happens again and
        again, not before long."""
        self._rehearsal.forget()
        self._reopen()
        self._search.drop()
        self._use(LayerSet())
        self._losses += 1
        if self._losses < LOST:
            self._note("optimise")
            return
        self._losses = 0
        self._search.close()
        self._note("accelerate")
        self._rethink()

    def _reopen(self) -> None:
        if not self._search.open:
            self._saved = min(self._saved, 0.0)
        self._search.reopen()
        self._informed, self._again = False, math.inf
        self._settle()

    def _learn(self, draft: _Draft, verdict: Verdict) -> None:
        """How sure it was, and how right. A branch that wins is one token longer than the draft was right."""
        self._branched += len(draft.branches)
        if draft.changes != self._changes:  # it was another set that made it
            return
        held = verdict.guessed - 1 if verdict.branch else verdict.accepted
        tested = draft.confidences[: min(held + 1, verdict.guessed)]
        trust = self._sampled if draft.sampled else self._greedy
        for place, sure in enumerate(tested):
            trust.observe(sure, right=place < held)
        for rival in draft.rivals:  # whether it was offered or not
            if rival.place == held < min(len(verdict.tokens), len(draft.confidences)):
                self._rivals[rival.rank].observe(1, int(rival.token == verdict.tokens[held]))
        self._first.observe(1, int(held > 0))

    def _settle(self) -> None:
        """From here on first guesses say how good the set is."""
        self._first, self._norm = Rate(0.0, 0.0, memory=LATELY), None

    def forget(self, seq_id: int) -> None:
        """The sequence is gone; its text may be rehearsed."""
        self._drafts.pop(seq_id, None)
        known = self._texts.pop(seq_id, None)
        if known is not None:
            self._rehearsal.remember(*known)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Where it stands, and how it got there."""
        best = self._search.best
        report = {
            "phase": self._events[-1].event,
            "set": self._events[-1].plain()["set"] | {"skipped": len(best.skipped)},
            "matchness": best.rate,
            "first_guess_acceptance": self._first.value if self._first.trials else None,
            "threshold": self._greedy.least(self._bar / max(self._typical, 1e-9)),
            "passes": self._passes,
            "branches": self._branched,
            "search": {
                "rounds": self._search.round,
                "open": self._search.open,
                "seconds": self._spent,
                "share": self._spent / self._active if self._active else 0.0,
            },
            "timeline": [event.plain() for event in self._events],
        }
        return {self.name: report}

    @property
    def possible(self) -> bool:
        """Whether the model has sublayers that could be left out at all."""
        return self._search.open

    def warm(self, max_num_seqs: int) -> None:
        """Nothing: the set to draft with is yet to be found."""

    def renew(self, contract_id: str) -> None:
        """The weights were replaced: what was found is of the past, and the incumbent has to prove itself."""
        first, self._store.contract_id = self._store.contract_id is None, contract_id
        if first:
            return
        self._informed, self._pause, self._again = False, AGAIN, math.inf
        self._recalled = False
        self._settle()
        if self._events[-1].event != "accumulate":
            self._search.reopen()
            self._rehearsal.forget()
            self._note("accumulate")

    def settle(self, skipped: LayerSet, rate: float) -> None:
        """Draft with this set, which somebody knows to be good; search only if it proves otherwise."""
        self._search.settle(skipped, rate)
        self._use(skipped)
        self._norm = rate
        self._note("accelerate")

    # ---- searching

    def on_step(self, asks: list[Ask]) -> None:
        """One step of the search, if one is due and affordable."""
        self._tick()
        for ask in asks:
            if ask.pool is not None:  # one that is kept to itself is not kept at all
                self._texts[ask.seq_id] = (ask.tokens, ask.prompt_len)
        if self._due and not self._search.open:
            self._reopen()
            self._note("optimise")
        if asks and self._due and self._frames.known:
            self._step(asks, self._last)

    def _tick(self) -> None:
        """Time passes, and with it comes what the search may spend."""
        now = self._clock()
        passed = min(now - self._last, IDLE) if self._last else 0.0
        self._last = now
        self._active += passed
        self._saved += self._share * passed * self._search.open

    @property
    def _due(self) -> bool:
        """Whether a step of the search is due and affordable; or, where it found nothing, another search."""
        tokens = self._counters.output_tokens
        if not self._search.open:
            return tokens >= self._again
        expected = self._step_cost or 1.5 * self._frames.cost(self._rehearsal.window)
        return tokens - self._scored_at >= self._every and self._saved >= expected

    def _step(self, asks: list[Ask], began: float) -> None:
        pieces = self._rehearsal.gather(asks, LEAST)
        self._scored_at = self._counters.output_tokens
        if pieces:
            self._round(asks, pieces)
            taken = self._clock() - began
            self._step_cost = (taken + (self._step_cost or taken)) / 2
        taken = self._clock() - began
        self._spent += taken
        self._active += taken
        self._saved -= taken
        self._last = self._clock()

    def _round(self, asks: list[Ask], pieces: list[Piece]) -> None:
        search, live = self._search, len(asks)
        if not self._informed:
            self._inform(pieces)
        self._pricing.see(sum(len(ask.tokens) for ask in asks))
        if self._natural or not self._pricing.known:
            self._pricing.observe_whole(live, self._whole(asks))
        prices, before = self._pricing.prices(live), search.best.skipped
        candidate = search.suggest(prices)
        trial, own = self._told(pieces, candidate), self._told(pieces, before)
        won = search.score(candidate, trial.rate, own.rate, trial.asked, prices)
        if before and not won and self._broken(own.rate, own.asked):
            self._lose()
            return
        if search.best.skipped != before:
            log.info("layer set: skip %s (%.0f%% right)", search.best.skipped, 100 * search.best.rate)
            self._use(search.best.skipped)
            self._keep()
        for sure, right in trial.sure if won else own.sure:
            self._greedy.observe(sure, right=right)
        self._note("optimise")
        if not search.open:
            self._settle()
            self._promised = search.best.rate
            self._note("accelerate")
            self._keep()
            self._rethink()

    def _rethink(self) -> None:
        """Where nothing was found, something may be in other texts or with fewer sequences."""
        if self.ready:
            self._pause = AGAIN
        else:
            self._again, self._pause = (
                self._counters.output_tokens + self._pause,
                min(2 * self._pause, RARELY),
            )

    def _keep(self) -> None:
        if self.ready:
            self._store.save(self._search.best.skipped, self._search.best.rate)

    def _inform(self, pieces: list[Piece]) -> None:
        """What one look at the hidden states tells, and what an earlier process found."""
        self._informed = True
        self._search.inform(self._rehearsal.shares(pieces[:1]))  # a hint: some rows are as good as many
        if self._recalled or self.ready:
            return
        self._recalled, found = True, self._store.load()
        if found is None:
            return
        if self._search.start_from(*found):
            self._use(found[0])
        else:
            log.warning("ignoring a layer set of another model in the cache: %s", found[0])

    def _told(self, pieces: list[Piece], skipped: LayerSet) -> Told:
        if not skipped:
            asked = sum(len(piece.targets) for piece in pieces)
            return Told(asked, asked, [])
        return self._rehearsal.agreement(pieces, skipped)

    def _use(self, skipped: LayerSet) -> None:
        self._path = self._rehearsal.path(skipped) if skipped else None
        self._settle()
        self._promised = rate = self._search.best.rate  # how sure another set was says nothing of this one
        self._greedy, self._sampled = Trust.after(rate), Trust.after(rate)
        self._changes += 1

    @torch.inference_mode()
    def _whole(self, asks: list[Ask]) -> float:
        """Seconds of a pass over what is live with nothing left out, choices included.

        A frame is such a pass, unless it has more rows than are used; then one is run, which writes scratch
        like any guess.
        """
        runner, seconds = self._runner, 0.0
        if self._natural:
            return self._frames.cost(len(asks))
        for _ in range(2):  # the first may have to build something
            began = self._clock()
            batch = pack_fast(asks, runner.fast_staging(len(asks)))
            logits = runner.fast(batch)[: len(asks)].float()
            self._sampler.sample(logits, []).tokens.tolist()
            seconds = self._clock() - began
        return seconds

    def _note(self, event: str) -> None:
        best = self._search.best
        self._events.append(Event(event, self._counters.output_tokens, best.pace, best.rate, best.skipped))
        del self._events[1 : max(1, len(self._events) - EVENTS)]


def _news(norm: float) -> float:
    """How much less often first guesses must be right to say that something has changed, and not luck."""
    spread = math.sqrt(norm * (1.0 - norm) * (1.0 / SETTLED + 1.0 / LATELY))
    return min(max(FALL, LUCK * spread), norm / 2)


__all__ = ["Event", "Skip"]
