"""The engine's loop: admit, propose, verify, commit.

Two frames overlap. While a frame runs on the device, the host turns the tokens of the frame before it into
text. Where no guesses are made, the next frame is launched before the tokens of the frame in flight have
reached the host: it takes them from the device. Where guesses are made by a proposer that can, the next frame
is started by one call of C++ when the frame in flight lands, and the loop catches up with it (`follow_up`).

An exception may end any call anywhere: the next call first repairs what it left (`recovery`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.counters import Counters
from samewise.draft.build import MakeProposer, ProposerParts, maker_of
from samewise.draft.cost_model import FrameCosts
from samewise.draft.decode import Decode
from samewise.draft.tuning import Tuning
from samewise.engine.assemble import assemble
from samewise.engine.certify import certify, settings_of
from samewise.engine.frame_log import FrameLog
from samewise.engine.recovery import Calls, entry, is_nested, refuse_nested, wait_for_device
from samewise.engine.stats import Times, stats_of
from samewise.engine.weights import (
    CertifiedWeights,
    CheckedUpdate,
    WeightUpdate,
    apply_update,
    read_update,
)
from samewise.errors import CallerError, EngineLost, InvariantBroken
from samewise.execute.load import Loaded, fingerprint, load, model_facts
from samewise.execute.pack import numbers_of
from samewise.follow_up import FollowUp, FollowUpPlan, FrameToFollow
from samewise.schedule.scheduler import Scheduler
from samewise.types import Ask, Delta, Guide, Received, Request, Span, Verdict
from samewise.verify.frame_sizes import recheck_frame_sizes
from samewise.verify.judge import trust
from samewise.verify.verifier import FrameInFlight, StartedFrame

MEET_TOKENS = 2048
"""Tokens of new sequences, with their predictions, of which a proposer is told in one step; the last sequence
may have more. A proposer indexes as many of them in about 1 ms and does the rest in later steps."""


MAX_CONTRACTS = 16
"""Contracts that are remembered: of answers that end and get their receipts after a replacement."""


class _LandedFrame(NamedTuple):
    """A frame whose verdicts are known."""

    flight: FrameInFlight
    verdicts: list[Verdict]
    deltas: list[Delta]


class _FollowUpFrame(NamedTuple):
    """A frame that was started before the loop planned it."""

    frame: FrameToFollow  # the one before it
    follow_up: FollowUp
    started: StartedFrame
    launched: float  # by the engine's clock


class Engine:
    """Owns the parts and runs the loop. Not thread-safe: one thread owns an engine."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        *,
        tuning: Tuning | None = None,
        make_proposer: MakeProposer | None = None,
        ahead: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        tuning = tuning or Tuning()
        self.config, self.loaded, self._clock = config, loaded, clock
        self.parts = parts = assemble(loaded, config, tuning, ahead=ahead)
        self.device, self.runner, self.verifier = parts.device, parts.runner, parts.verifier
        self.limits = parts.limits
        self.frame_costs = FrameCosts(self.runner.sizes, tuning.cost_model)
        self.frame_log = FrameLog()
        counters = Counters()
        proposer_parts = ProposerParts(
            self.runner, parts.sampler, loaded.arch.vocab, config, self.frame_costs, clock, loaded,
            self.limits.max_model_len, ahead=self.verifier.ahead, chain=self.limits.burst,
            scratch_pages=parts.scratch_pages, counters=counters, tuning=tuning,
        )  # fmt: skip
        with parts.process.pinned():
            self.fast = Decode(self.runner, parts.sampler, chain=self.limits.burst)
            self.proposer = (make_proposer or maker_of(config))(proposer_parts)
        self.scheduler = Scheduler(self.limits, counters, frame_seconds=self.frame_costs.cost)
        self._calls = Calls(self, self.scheduler.registry, self._repair)
        self._flight: FrameInFlight | None = None  # the frame in flight
        self._plan: FollowUpPlan | None = None  # for the frame after it
        self._landed_frame: _LandedFrame | None = None  # the frame that landed in this step
        self._landed = 0.0  # when the last frame's verdicts arrived
        self._held: list[Delta] = []  # committed outside of step(), returned by the next one
        self._next_id = 0
        self._times = Times()
        self._weights = CertifiedWeights(loaded.model)
        self._model_facts = model_facts(loaded, self.runner.model)
        self.weights_version = 0
        """How often the weights were replaced."""
        self.contracts: dict[str, Contract] = {}
        """The latest contracts, by id: receipts of answers given before a replacement name them."""
        self.verifier.with_candidates = self.proposer.wants_candidates
        self._certify()

    # ---- the loop

    @entry
    def step(self) -> list[Delta]:
        """Launch the next frame and return what the frame in flight committed.

        If it raises, none of this call's deltas count as received: their tokens are computed again.
        """
        began = time.perf_counter()
        self._weights.check_some()
        with self._calls.delivery, self.parts.process.pinned():
            self._plan_again()
            launched = self._launch_ahead()
            followed = self._start_follow_up() if launched is None else None
            deltas, self._held = self._held + self._land(), []
            if followed is not None:
                launched = self._launch_follow_up(followed)
            elif launched is None:
                self.scheduler.admit()
                unverified = self.scheduler.asks(verified=False)
                proposals = []
                if not self.proposer.quiet:
                    proposals = self.proposer.propose(self.scheduler.asks(verified=True))
                self.scheduler.extend(proposals)
                spans = self.scheduler.spans()
                launched = self._launch(spans) if spans else None
                if unverified:
                    deltas += self._decode_unverified(unverified, in_frame={span.seq_id for span in spans})
            self._flight = launched
            # The device is busy from here on.
            self._account(deltas)
            new_sequences = self.scheduler.new_sequences(MEET_TOKENS)
            if new_sequences:
                self.proposer.meet(new_sequences)
            self.proposer.index_texts()
            self._plan = self._plan_follow_up()
            self._times.stepped += time.perf_counter() - began
            return deltas

    def _plan_again(self) -> None:
        """Plan the frame in flight again, if it has not begun and a request with an owner came since."""
        flight = self._flight
        spans = None if flight is None or flight.begun else self.scheduler.plan_again(flight.spans)
        if spans is not None:
            self._flight = self._launch(spans) if spans else None

    def _launch_ahead(self) -> FrameInFlight | None:
        """Launch the frame behind the one in flight, before its tokens are known; None where impossible."""
        if self._flight is None or not self.verifier.ahead or not self.proposer.quiet:
            return None
        if self.scheduler.testing_suspects:  # admitting the next one may preempt a sequence in flight
            return None
        self.scheduler.admit()
        spans = self.scheduler.spans_ahead(self._flight.spans)
        return self._launch(spans) if spans else None

    def _launch(self, spans: list[Span]) -> FrameInFlight:
        flight = self.verifier.launch(spans)
        flight.launched = self._clock()  # the device has just begun
        return flight

    def _plan_follow_up(self) -> FollowUpPlan | None:
        """While a frame runs: gather what can be known of the next one; None where the loop must plan it."""
        if self._flight is None or not self.verifier.ahead or self.proposer.quiet:
            return None
        if not self.runner.packs_natively:
            return None
        frame = self.scheduler.to_follow(self._flight.spans)
        return None if frame is None else self.proposer.plan_follow_up(frame)

    def _start_follow_up(self) -> _FollowUpFrame | None:
        """Wait for the frame in flight and start the next one by a single call; None where impossible."""
        flight, plan, self._plan = self._flight, self._plan, None
        if flight is None or plan is None or not self.scheduler.still_follows(plan.frame):
            return None
        outputs = flight.outputs()
        flight.landed = self._clock()
        follow_up = plan.run(outputs)
        if follow_up is None:
            return None
        started = self.verifier.start(follow_up)
        return _FollowUpFrame(plan.frame, follow_up, started, self._clock())

    def _launch_follow_up(self, followed: _FollowUpFrame) -> FrameInFlight:
        """Plan the frame that was started, now that the one before it is committed, and sample its rows."""
        self.scheduler.extend(self.proposer.take_follow_up())
        spans = self.scheduler.spans_following(followed.frame)
        moves = self.runner.store.take_moves()
        started, pages = followed.follow_up, b"".join([span.pages for span in spans])
        if numbers_of(spans, moves) != started.numbers.tolist() or pages != started.pages.tobytes():
            raise InvariantBroken(
                "a frame was started that is not the one that follows from the last verdicts"
            )
        flight = self.verifier.launch(spans, followed.started)
        flight.launched = followed.launched
        return flight

    def _land(self) -> list[Delta]:
        """Wait for the frame in flight, judge it and commit its tokens."""
        flight = self._flight
        if flight is None:
            return []
        # A frame launched behind another one began when that one ended.
        began = max(flight.launched, self._landed) if self.verifier.ahead else self._clock()
        verdicts = flight.verdicts()
        self._landed = flight.landed or self._clock()
        self._flight = None
        self.frame_costs.observe(flight.num_rows, self._landed - began, prefill=flight.prefill)
        # Verdicts of sequences that ended meanwhile are dropped.
        self.proposer.observe([v for v in verdicts if self.scheduler.is_running(v.seq_id)])
        deltas = self.scheduler.commit(verdicts)
        self.runner.store.queue_moves(self.scheduler.take_moves())
        self._landed_frame = _LandedFrame(flight, verdicts, deltas)
        return deltas

    def _land_now(self) -> None:
        """Land the frame in flight outside of a step; the next one returns its deltas."""
        deltas = self._land()
        self._account(deltas)
        self._held += deltas

    def _account(self, deltas: list[Delta]) -> None:
        """Take note of the frame that landed, and forget sequences that finished."""
        landed, self._landed_frame = self._landed_frame, None
        if landed is not None:
            flight, verdicts = landed.flight, landed.verdicts
            self._times.waited += flight.waited
            committed = sum(len(delta.tokens) for delta in landed.deltas)
            drafts = [(v.guessed, v.accepted) for v in verdicts if v.guessed]
            size = self.frame_costs.size(flight.num_rows)
            self.frame_log.landed(flight.spans, size, committed, self._landed, drafts)
        for delta in deltas:
            if delta.finish is not None:
                self.proposer.forget(delta.request_id)

    def _decode_unverified(self, asks: list[Ask], in_frame: set[int]) -> list[Delta]:
        """Fast-path tokens for unverified requests that have no row in the frame just launched."""
        kv_lens = {
            ask.seq_id: ask.kv_len
            for ask in asks
            if ask.seq_id not in in_frame and self.scheduler.is_running(ask.seq_id)
        }
        asks = [ask for ask in asks if ask.seq_id in kv_lens]
        if not asks:
            return []
        verdicts = [trust(proposal, kv_lens[proposal.seq_id]) for proposal in self.fast.propose(asks)]
        return self.scheduler.commit(verdicts)

    # ---- requests

    def new_id(self) -> int:
        """An id for the next request. Ids order requests by arrival and are never reused."""
        self._next_id += 1
        return self._next_id - 1

    @entry
    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request that `llm.intake` has checked, with a guide if it has a grammar.

        Raises QueueFull, and nothing else that a caller could have caused.
        """
        self._weights.check()
        self._calls.repair()
        self.scheduler.refuse_if_full()
        with self._calls.change:
            self.scheduler.add(request, guide)

    @entry
    def abort(self, request_id: int) -> Delta | None:
        """Drop a request at any moment. None if it has ended already.

        Inside another call (in a finalizer or a signal handler) it returns None, and the next call drops the
        request before it does anything else.
        """
        if is_nested(self):
            self._calls.queue(partial(self._abort, request_id))
            return None
        with self._calls.change:
            return self._abort(request_id)

    def _abort(self, request_id: int) -> Delta | None:
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self.proposer.forget(request_id)
        return delta

    @entry
    def end(self, request_id: int) -> None:
        """End a request whose text is complete (a stop string was found): no further delta comes of it.

        Inside another call the request is ended as `abort` says.
        """
        if is_nested(self):
            self._calls.queue(partial(self._end, request_id))
            return
        with self._calls.change:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        self.scheduler.end(request_id)
        self.proposer.forget(request_id)

    @entry
    def preempt(self, request_id: int) -> bool:
        """Free a running request's pages; it will prefill its tokens again, to the same bits."""
        with self._calls.change, self.parts.process.pinned():
            self._land_now()  # the frame in flight writes to the pages the request has now
            return self.scheduler.preempt(request_id)

    def wake(self) -> None:
        """End a wait inside `step`. Any thread may call it; here a step waits for the device alone."""

    def close(self) -> None:
        """Nothing to let go of: an engine in this process is freed with its last reference."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return self.scheduler.num_waiting

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        nothing_left = self._flight is None and not self._held and self.scheduler.idle
        return nothing_left and not self._calls.unfinished

    @entry
    def check(self) -> None:
        """Raise InvariantBroken unless every page is accounted for."""
        self._calls.repair()
        self.scheduler.check()

    # ---- failures

    @property
    def lost(self) -> EngineLost | None:
        """Why the engine cannot go on, if it cannot: what every further call raises."""
        return self._calls.lost

    @entry
    def recover(self, received: Mapping[int, Received | None] | None = None, *, blame: bool = False) -> None:
        """Start every request again from what its caller has; done by itself after a call that raised.

        `received` states what callers really have, where that is not all that `step` returned (None: the
        request is not wanted any more). `blame`: the last step failed because of a request in it. Requests
        that were running then run one at a time, and one that fails again ends with finish reason "error".
        """
        refuse_nested(self)
        self._calls.recover(received or {}, blame=blame)

    def _repair(self, received: Mapping[int, Received | None], blame: bool) -> None:
        """Drop everything but the requests and what was received of them. May be cut short and repeated."""
        wait_for_device(self.device)  # a frame in flight still writes to its pages
        self._flight, self._plan, self._landed_frame = None, None, None
        self.runner.store.take_moves()
        self.proposer.recover()
        self.fast.recover()
        self._held = self.scheduler.recover(received, blame=blame)

    # ---- contract and weights

    def read_update(self, update: WeightUpdate) -> CheckedUpdate:
        """Check new weights without using them: see `weights.read_update`. Any thread may call it."""
        return read_update(update, self.runner.model)

    @property
    def certified(self) -> bool:
        """Whether the weights have a contract: False after an update that failed half-way."""
        return self._weights.certified

    @entry
    def update_weights(
        self, update: WeightUpdate, *, received: Mapping[int, Received | None] | None = None
    ) -> Contract:
        """Replace weights in place, drop everything computed with the old ones, and certify again.

        Nothing is changed unless every tensor fits; of tensors that come one by one each is written before
        the next is known, and one that does not fit leaves the engine without certified weights, until an
        update succeeds.

        Without `received` the engine must be idle. With it requests go on from what their callers have (see
        `recover`): their tokens are read again under the new weights.
        """
        self._calls.repair()
        if not self.scheduler.idle and received is None:
            raise CallerError(
                "update_weights while requests are running; finish or abort them first, or give a mode"
            )
        checked = self.read_update(update)
        with self._calls.change, self.parts.process.pinned():
            self._weights.revoke()
            self._restart(received or {})
            apply_update(checked, self.runner.model, native=self.parts.linears == "native")
            self._model_facts["weights"] = fingerprint(self.runner.model)
            recheck_frame_sizes(self.runner, self.max_model_len)
            self._certify()
            self._weights.certify()
            self.weights_version += 1
            return self.contract

    @entry
    def forget_prefixes(self, received: Mapping[int, Received | None] | None = None) -> None:
        """Empty the prefix cache. With `received`, as in `update_weights`, requests lose their KV too."""
        if received is None:
            self.scheduler.index.clear()
            return
        with self._calls.change, self.parts.process.pinned():
            self._restart(received)

    def _restart(self, received: Mapping[int, Received | None]) -> None:
        """Drop the frame in flight, KV and drafts; requests go on from what their callers have."""
        wait_for_device(self.device)
        self._flight, self._plan, self._landed_frame = None, None, None
        self.runner.store.take_moves()
        self.proposer.recover()
        self.fast.recover()
        self.scheduler.restart(received)
        self._held = []

    def _certify(self) -> None:
        with self.parts.process.pinned():
            self.contract, self.report = certify(self.parts, self.loaded, self.config, self._model_facts)
            self.contracts.pop(self.contract.id, None)
            self.contracts[self.contract.id] = self.contract
            if len(self.contracts) > MAX_CONTRACTS:
                del self.contracts[next(iter(self.contracts))]
            self.proposer.renew(self.contract.id)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self.limits.max_model_len

    @property
    def settings(self) -> dict[str, str | int | bool | None]:
        """What another engine must be given to reach this contract, beside the model's name."""
        return settings_of(self.parts, self.config)

    # ---- statistics

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was built, and its state now."""
        return stats_of(self.scheduler, self.proposer, self.frame_costs, self._times, self.contract.id) | {
            "weights_version": self.weights_version
        }

    def live(self, since: int = 0) -> dict[str, Any]:
        """For a monitor: the statistics, and what the frames after number `since` were used for."""
        return {"stats": self.stats(), "frames": self.frame_log.since(since)}


def build(config: EngineConfig, *, make_proposer: MakeProposer | None = None) -> Engine:
    """An engine from a configuration: load the model, assemble, certify, warm up."""
    engine = Engine(load(config), config, make_proposer=make_proposer)
    with engine.parts.process.pinned():
        engine.proposer.warm(config.max_num_seqs)
    return engine


__all__ = ["Engine", "build"]
