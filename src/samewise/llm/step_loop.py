"""Submit checked requests, step the engine, and hand each delta to its answer. Shared by LLM and AsyncLLM.

Detokenising and the search for stop strings run while the next frame is on the device. A stop string found in
the text ends its sequence one frame late; the tokens of that frame are dropped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from samewise.engine import Engine
from samewise.llm.answer import Answer, Choice
from samewise.llm.intake import CheckedRequest, CheckedScore, Intake
from samewise.outputs import RequestOutput
from samewise.params import SamplingParams
from samewise.receipts import Receipt, make
from samewise.receipts.signing import SigningKey
from samewise.types import Delta


@dataclass(slots=True)
class Score:
    """A completion being scored. Owned by the StepLoop."""

    checked: CheckedScore
    engine_id: int
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class StepLoop:
    """Owns the open answers of one engine. Not thread-safe: used by the thread that owns the engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        config = engine.config
        self.engine = engine
        self.intake = Intake(engine.loaded, engine.limits, seed=config.seed, date=config.date)
        self._clock = clock
        self._open: dict[int, tuple[Answer, Choice]] = {}  # by engine id
        self._scores: dict[int, Score] = {}  # by engine id
        self._num_submitted = 0

    # ---- requests

    def submit(
        self, checked: CheckedRequest, *, salt: bytes = b"", only: int | None = None, streamed: bool = False
    ) -> Answer:
        """Queue a request as n sequences (all of them or none), or with `only` that choice alone.

        The first sequence reads the prompt; the others wait for its pages where the prefix cache is on.
        """
        self._num_submitted += 1
        answer = Answer(
            checked,
            str(self._num_submitted),
            contract_id=self.engine.contract.id,
            decode_token=self.intake.decode_token,
            clock=self._clock,
            streamed=streamed,
        )
        try:
            for index in range(checked.params.n) if only is None else (only,):
                self._add(answer, index, salt)
        except BaseException:
            self.abort(answer)  # a full queue may refuse the last of n
            raise
        return answer

    def _add(self, answer: Answer, index: int, salt: bytes) -> None:
        leader = answer.choices[0].engine_id if answer.choices else None
        request = answer.checked.request(self.engine.new_id(), index, salt=salt, leader=leader)
        self.engine.add(request, self.intake.guide(request.sampling))
        choice = Choice(index, request.id, self.intake.text_stream(answer.checked))
        answer.choices.append(choice)
        self._open[request.id] = (answer, choice)

    def submit_score(self, checked: CheckedScore) -> Score:
        """Queue a completion to be scored after its prompt."""
        request = checked.request(self.engine.new_id())
        self.engine.add(request)
        score = self._scores[request.id] = Score(checked, request.id)
        return score

    def abort(self, answer: Answer) -> None:
        """Drop what is still running of an answer."""
        for engine_id in answer.abort():
            self.engine.abort(engine_id)
            self._open.pop(engine_id, None)

    def abort_score(self, score: Score) -> None:
        """Drop a score that is still running."""
        if self._scores.pop(score.engine_id, None) is not None:
            self.engine.abort(score.engine_id)

    # ---- results

    def step(self) -> list[Answer]:
        """One engine step. Returns the answers that changed, in the order of the engine's deltas.

        Every open answer is updated, whichever call steps: a stream left open loses nothing.
        """
        with _interrupts_deferred():
            changed: dict[Answer, None] = {}
            for delta in self.engine.step():
                answer = self._dispatch(delta)
                if answer is not None:
                    changed[answer] = None
            return list(changed)

    def _dispatch(self, delta: Delta) -> Answer | None:
        """Give a delta to its score or answer; returns the answer if it changed."""
        score = self._scores.get(delta.request_id)
        if score is not None:
            score.logprobs += delta.scores
            score.finished = delta.finish is not None
            if score.finished:
                del self._scores[delta.request_id]
        if delta.request_id not in self._open:
            return None
        answer, choice = self._open[delta.request_id]
        update = answer.add(choice, delta)
        if update.stop:
            self.engine.end(choice.engine_id)
        if choice.finish is not None:
            del self._open[delta.request_id]
        return answer if update.changed else None

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
        return make(
            output, params, contract=engine.contract, model=engine.config.model, settings=engine.settings,
            hide_prompt=hide_prompt, key=key,
        )  # fmt: skip


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the step is complete, so that no delta is lost. Main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *signalled: caught.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


__all__ = ["Score", "StepLoop"]
