"""Submit checked requests, step the engine, and hand each delta to its answer. Shared by LLM and AsyncLLM.

Detokenising and the search for stop strings run while the next frame is on the device. A stop string found in
the text ends its sequence one frame late; the tokens of that frame are dropped.

Requests with an owner (of an API key, in the server) share the engine's places: one that would take more than
its owner's share is queued here, and added to the engine when places are free. See `shares`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from threading import get_ident
from typing import Generic, TypeVar

from samewise.contract import Contract
from samewise.engine.recovery import entry, is_nested, refuse_nested
from samewise.engine.weights import WeightUpdate
from samewise.errors import CallerError
from samewise.llm.answer import Answer, Choice
from samewise.llm.any_engine import AnyEngine
from samewise.llm.intake import CheckedRequest, CheckedScore, Intake
from samewise.outputs import RequestOutput
from samewise.params import SamplingParams
from samewise.receipts import Receipt, make
from samewise.receipts.signing import SigningKey
from samewise.schedule.limits import Limits
from samewise.shares import FairQueue
from samewise.types import Delta, Finish, Guide, Received, Request

EngineT = TypeVar("EngineT", bound=AnyEngine)


@dataclass(slots=True, eq=False)
class Score:
    """A completion being scored. Owned by the StepLoop."""

    checked: CheckedScore
    engine_id: int
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class StepLoop(Generic[EngineT]):
    """Owns the open answers of one engine. Not thread-safe: used by the thread that owns the engine.

    Any call may be cut short by an exception, a signal handler's too. Each marks itself as unfinished first;
    a call that finds the mark tells the engine what every open answer really has, and the engine computes the
    rest again.

    Answers may be aborted at any moment, from inside another call and from another thread too: the garbage
    collector closes a stream that was left. There the abort is queued, and the next call carries it out.
    """

    def __init__(self, engine: EngineT, clock: Callable[[], float] = time.monotonic) -> None:
        config = engine.config
        self.engine = engine
        self.intake = Intake(engine.loaded, engine.limits, seed=config.seed, date=config.date)
        self._clock = clock
        # By engine id. An entry is made before the engine knows the request and taken out after it has ended
        # there, so that the engine has no sequence of this loop that is not here.
        self._open: dict[int, tuple[Answer, Choice]] = {}
        self._scores: dict[int, Score] = {}
        self._shared: FairQueue[tuple[Request, Guide | None]] = FairQueue(num_shared(engine.limits))
        self._num_submitted = 0
        self._dropped: deque[Answer | Score] = deque()  # to be aborted, in order
        self._changed: dict[Answer, None] = {}  # answers that `step` has not returned since they got a delta
        self._unfinished = False  # whether a call has begun that did not come to its end
        self._thread = get_ident()  # of the last call

    # ---- requests

    @entry
    def submit(
        self,
        checked: CheckedRequest,
        *,
        salt: bytes = b"",
        owner: bytes | None = None,
        only: int | None = None,
        streamed: bool = False,
        into: list[Answer] | None = None,
    ) -> Answer:
        """Queue a request as n sequences (all of them or none), or with `only` that choice alone.

        The first sequence reads the prompt; the others wait for its pages where the prefix cache is on. The
        answer is appended to `into` before it is queued, so that a caller that is interrupted can abort it.
        An `owner` has no more of the engine's places than its share; None: the request is added at once.
        """
        self._begin()
        self._num_submitted += 1
        answer = Answer(
            checked,
            str(self._num_submitted),
            weights=self._weights(),
            decode_token=self.intake.decode_token,
            new_stream=lambda: self.intake.text_stream(checked),
            clock=self._clock,
            streamed=streamed,
        )
        if into is not None:
            into.append(answer)
        try:
            for index in range(checked.params.n) if only is None else (only,):
                self._add(answer, index, salt, owner)
            self._admit_shared()
        except CallerError:
            self._drop(answer)  # a full queue may refuse the last of n
            self._unfinished = False
            raise
        except BaseException:
            answer.abort()
            raise
        self._unfinished = False
        return answer

    def _add(self, answer: Answer, index: int, salt: bytes, owner: bytes | None) -> None:
        leader = answer.choices[0].engine_id if answer.choices else None
        request = answer.checked.request(
            self.engine.new_id(), index, salt=salt, leader=leader, owner=owner or b""
        )
        guide = self.intake.guide(answer.checked)
        self._open[request.id] = answer, answer.add_choice(index, request.id)
        if owner is None:
            self.engine.add(request, guide)
        else:
            self._shared.push(owner, request.id, (request, guide), priority=request.priority)

    def _admit_shared(self) -> None:
        """Add to the engine the requests that now fit their owners' shares."""
        while self._has_room() and (next_one := self._shared.pop()) is not None:
            request, guide = next_one
            answer, choice = self._open[request.id]
            if choice.finish is not None:  # aborted by a call that was cut short
                self._shared.forget(request.id)
                del self._open[request.id]
                continue
            try:
                self.engine.add(request, guide)
            except BaseException:
                self._shared.forget(request.id)
                choice.finish = Finish.ERROR.value  # the next recovery tells the engine
                self._changed[answer] = None
                raise

    def _has_room(self) -> bool:
        """Whether the engine would queue a request."""
        max_queued = self.engine.limits.max_queued
        full = max_queued is not None and self.engine.num_waiting >= max_queued
        return self.engine.lost is None and not full

    @property
    def num_held(self) -> int:
        """Requests that wait here for their owner's share."""
        return self._shared.num_waiting

    @entry
    def submit_score(self, checked: CheckedScore, *, into: list[Score]) -> Score:
        """Queue a completion to be scored after its prompt. It is appended to `into` before it is queued."""
        self._begin()
        request = checked.request(self.engine.new_id())
        score = self._scores[request.id] = Score(checked, request.id)
        into.append(score)
        try:
            self.engine.add(request)
        except BaseException as error:
            score.finished = True
            if isinstance(error, CallerError):
                del self._scores[request.id]
                self._unfinished = False
            raise
        self._unfinished = False
        return score

    @entry
    def abort(self, dropped: Answer | Score) -> None:
        """Drop what is still running of an answer or a score: now, or where that is impossible next."""
        self._dropped.append(dropped)
        if get_ident() == self._thread and not is_nested(self):
            self._begin()
            self._unfinished = False

    @entry
    def abort_orphans(self) -> None:
        """Drop all scores and all answers but streamed ones, for a caller that knows none is wanted.

        They belong to a call that was interrupted once more while it aborted them.
        """
        self._begin()
        orphans: list[Answer | Score] = [answer for answer, _ in self._open.values() if not answer.streamed]
        for orphan in (*orphans, *self._scores.values()):
            self._drop(orphan)  # of n choices of one answer the first drops all
        self._unfinished = False

    def _drop(self, dropped: Answer | Score, *, told: bool = False) -> None:
        if isinstance(dropped, Answer):
            running = dropped.abort(told=told)
        else:
            running = [] if dropped.finished else [dropped.engine_id]
            dropped.finished = True
        for engine_id in running:
            waited = self._shared.forget(engine_id)
            if not waited and self.engine.lost is None:  # a lost engine has nothing left to abort
                self.engine.abort(engine_id)
            self._open.pop(engine_id, None)
            self._scores.pop(engine_id, None)

    # ---- results

    @entry
    def step(self) -> list[Answer]:
        """One engine step. Returns the answers that got a delta, in the order of the engine's deltas.

        Every open answer is updated, whichever call steps: a stream left open loses nothing. If it raises,
        the next step, or `recover`, also returns the answers that got a delta in this one.
        """
        self._begin()
        deltas = self.engine.step()
        weights = self._weights()
        for delta in deltas:
            self._dispatch(delta, weights)
        self._admit_shared()
        self._unfinished = False
        return self._take_changed()

    def _take_changed(self) -> list[Answer]:
        changed, self._changed = self._changed, {}
        return list(changed)

    def _dispatch(self, delta: Delta, weights: tuple[str, int]) -> None:
        """Give a delta to its score or answer."""
        score = self._scores.get(delta.request_id)
        if score is not None:
            score.logprobs += delta.scores
            score.finished = delta.finish is not None
            if score.finished:
                del self._scores[delta.request_id]
        if delta.request_id not in self._open:
            return
        answer, choice = self._open[delta.request_id]
        self._changed[answer] = None
        if answer.add(choice, delta, weights).stop:
            self.engine.end(choice.engine_id)
        if choice.finish is not None:
            self._shared.forget(delta.request_id)
            del self._open[delta.request_id]

    # ---- weights

    def _weights(self) -> tuple[str, int]:
        """Contract and version of the weights that the engine has now."""
        return self.engine.contract.id, self.engine.weights_version

    @property
    def idle(self) -> bool:
        """Whether no request is under way or waits."""
        return self.engine.idle and not self._shared.num_waiting

    @entry
    def abort_all(self, only: Collection[Answer] | None = None) -> list[Answer]:
        """End every open answer and score with what they have, or these answers `only`.

        Returns the answers that were open, which say so.
        """
        self._begin()
        answers = list(dict.fromkeys(answer for answer, _ in self._open.values()))
        scores = list(self._scores.values())
        if only is not None:
            answers, scores = [answer for answer in answers if answer in only], []
        opened: list[Answer | Score] = [*answers, *scores]
        for dropped in opened:
            self._drop(dropped, told=True)
        self._changed |= dict.fromkeys(answers)
        self._unfinished = False
        return self._take_changed()

    @entry
    def update_weights(self, update: WeightUpdate) -> Contract:
        """Replace the engine's weights; what is open goes on under the new ones, from the tokens it has.

        Log-probabilities of a prompt, and scores, that are not complete are computed again from the start.
        """
        refuse_nested(self)
        self._begin()
        received: dict[int, Received | None] = {}
        for answer, _ in self._open.values():
            answer.restart_prompt()
        for number, (answer, choice) in self._open.items():
            if not self._shared.waits(number):
                received[number] = answer.received(choice)
        for number, score in self._scores.items():
            score.logprobs.clear()
            received[number] = None if score.finished else Received(0, 0)
        contract = self.engine.update_weights(update, received=received)
        self._unfinished = False
        return contract

    @entry
    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and drop the KV of what is open: it is computed again."""
        refuse_nested(self)
        self._begin()
        if self.idle:
            self.engine.forget_prefixes()
        else:
            self.engine.forget_prefixes(self._received())
        self._unfinished = False

    def _received(self) -> dict[int, Received | None]:
        """What callers have of every request that the engine knows."""
        received = {
            number: answer.received(choice)
            for number, (answer, choice) in self._open.items()
            if not self._shared.waits(number)
        }
        for number, score in self._scores.items():
            received[number] = None if score.finished else Received(0, len(score.logprobs))
        return received

    # ---- failures

    @entry
    def recover(self, *, blame: bool = False) -> list[Answer]:
        """Go on after a call that was cut short; done by itself at the next call.

        With `blame` the exception came out of the work itself, not from a signal handler: an answer that was
        being updated ends with an error, and the engine looks for a request that is to blame (see
        Engine.recover). Returns the answers that ended here or got a delta in the call that was cut short.
        """
        refuse_nested(self)
        self._recover(blame=blame)
        return self._take_changed()

    def _recover(self, *, blame: bool) -> None:
        updated = [(answer, choice) for answer, _ in self._open.values() if (choice := answer.undo())]
        for answer, choice in updated if blame else ():
            self._changed[answer] = None
            choice.finish = Finish.ERROR.value
        received = self._received()
        self.engine.recover(received, blame=blame and not updated)
        for number, has in received.items():
            if has is None:
                self._shared.forget(number)
                self._open.pop(number, None)
                self._scores.pop(number, None)
        self._unfinished = False

    def _begin(self) -> None:
        """Mark a call as unfinished, after repairing what an earlier one left; then abort what was queued."""
        if self._unfinished:
            refuse_nested(self)
            if self.engine.lost is None:
                self._recover(blame=False)
        self._unfinished = True
        self._thread = get_ident()
        while self._dropped:
            self._drop(self._dropped[0])  # may be cut short and repeated
            self._dropped.popleft()
        self._admit_shared()

    def receipts(
        self,
        output: RequestOutput,
        params: SamplingParams,
        *,
        hide_prompt: bool = False,
        key: SigningKey | None = None,
    ) -> list[Receipt]:
        """A receipt for each choice of an answer to a request with these parameters; see receipts.make."""
        engine = self.engine
        contract = engine.contracts.get(output.contract, engine.contract)
        return make(
            output, params, contract=contract, model=engine.config.model, settings=engine.settings,
            hide_prompt=hide_prompt, key=key,
        )  # fmt: skip


def num_shared(limits: Limits) -> int:
    """Sequences of an engine that owners share: as many as run at once, at most a quarter of a frame's rows.

    Where rows are what takes the time, on CPU, more sequences would make frames longer and nothing faster,
    and a newcomer waits for the frame that is running.
    """
    return min(limits.max_num_seqs, max(1, limits.max_rows // 4))


__all__ = ["Score", "StepLoop", "num_shared"]
