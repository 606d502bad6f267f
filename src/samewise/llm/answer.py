"""One request's answer, built from the engine's deltas: text, log-probabilities, finish reasons.

Knows text and token ids; knows nothing of the engine. A stop string found in the text is reported to the
caller (`Update.stop`), which tells the engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from samewise.errors import CallerError
from samewise.llm.intake import CheckedRequest
from samewise.llm.prediction import PredictionFollower
from samewise.outputs import (
    ABORTED,
    Chunk,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WeightSpan,
)
from samewise.text.detokenize import TextStream
from samewise.types import Delta, Finish, Received, TopLogprobs


@dataclass(slots=True)
class Choice:
    """One of a request's n sequences. Owned by its Answer."""

    index: int
    engine_id: int
    stream: TextStream | None
    prediction: PredictionFollower
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # where log-probabilities are shown
    text: str = ""
    finish: str | None = None
    stop_reason: int | str | None = None
    frames: int = 0
    accepted: int = 0
    guessed: int = 0
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # (guessed, accepted) by proposer
    weights: list[WeightSpan] = field(default_factory=list)


class Update(NamedTuple):
    """What a delta changed."""

    changed: bool  # whether tokens, text or a finish reason were added
    stop: bool = False  # a stop string ended the choice: the engine must end its sequence


class _Before(NamedTuple):
    """An answer before a delta: what `undo` goes back to."""

    choice: Choice
    num_tokens: int
    text: str
    num_scores: int
    num_pending: int
    num_weights: int


class _Read(NamedTuple):
    """A delta as text."""

    text: str
    num_tokens: int  # how many of the delta's tokens belong to the answer
    finish: str | None
    stop_reason: int | str | None
    stop: bool = False


class Answer:
    """A request in progress. Owned by the StepLoop that submitted it.

    With `streamed`, every update is also appended to `pending` as a Chunk, for a reader to take. `new_stream`
    makes the TextStream of a choice.
    """

    def __init__(
        self,
        checked: CheckedRequest,
        request_id: str,
        *,
        weights: tuple[str, int],
        decode_token: Callable[[int], str | None],
        new_stream: Callable[[], TextStream | None],
        clock: Callable[[], float],
        streamed: bool,
    ) -> None:
        self.checked, self.request_id, self.streamed = checked, request_id, streamed
        self.choices: list[Choice] = []
        self.pending: deque[Chunk] = deque()
        self.error: CallerError | None = None  # the caller's mistake that ended a choice
        self._weights, self._clock = weights, clock  # contract and version of the engine's weights now
        self._decode_token = decode_token if checked.params.detokenize else _no_text
        self._new_stream = new_stream
        self._before: _Before | None = None  # while a delta is being added
        self._arrival = clock()
        self._first_token: float | None = None
        self._finished: float | None = None
        self._prompt_scores: list[float] = []
        self._prompt_tops: list[TopLogprobs] = []
        self._prompt_ranks: list[int] = []
        self._num_cached = 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return None not in [choice.finish for choice in self.choices]  # at every delta: cheaper than all()

    @property
    def failed(self) -> bool:
        """Whether a choice ended because it failed inside the engine, or with `error`."""
        return any(choice.finish == Finish.ERROR for choice in self.choices)

    def add_choice(self, index: int, engine_id: int) -> Choice:
        """Begin another choice."""
        choice = Choice(index, engine_id, self._new_stream(), PredictionFollower(self.checked.prediction))
        self.choices.append(choice)
        return choice

    def add(self, choice: Choice, delta: Delta, weights: tuple[str, int] | None = None) -> Update:
        """Append a delta to a choice. Where it is cut short, `undo` takes it back.

        `weights`: contract and version of those it was computed with, where they are not the last delta's.
        """
        self._weights = weights or self._weights
        if choice.finish is not None:
            return Update(changed=False)
        self._before = _Before(
            choice, len(choice.token_ids), choice.text, len(self._prompt_scores), len(self.pending),
            len(choice.weights),
        )  # fmt: skip
        update = self._add(choice, delta)
        self._before = None
        return update

    def _add(self, choice: Choice, delta: Delta) -> Update:
        self.error = self.error or delta.error
        if choice.index == 0:
            self._prompt_scores += delta.scores
            self._prompt_tops += delta.score_tops
            self._prompt_ranks += delta.score_ranks
            self._num_cached = delta.num_cached
        read = self._read(choice, delta)
        if read.num_tokens and self._first_token is None:
            self._first_token = self._clock()
        accepted = choice.prediction.accepted
        self._extend(choice, delta, read)
        if read.finish is not None and self.finished:
            self._finished = self._clock()
        changed = bool(read.num_tokens or read.text or read.finish)
        if changed and self.streamed:
            self.pending.append(self._chunk(choice, delta, read, accepted))
        return Update(changed, read.stop)

    def undo(self) -> Choice | None:
        """Take back a delta whose `add` was cut short; returns its choice, None if there is none."""
        if self._before is None:
            return None
        choice, num_tokens, text, num_scores, num_pending, num_weights = self._before
        del choice.weights[num_weights:]
        del choice.token_ids[num_tokens:], choice.logprobs[num_tokens:], choice.top_logprobs[num_tokens:]
        del choice.ranks[num_tokens:]
        del self._prompt_scores[num_scores:], self._prompt_tops[num_scores:], self._prompt_ranks[num_scores:]
        while len(self.pending) > num_pending:
            self.pending.pop()
        choice.text, choice.finish, choice.stop_reason, self._finished = text, None, None, None
        choice.prediction = PredictionFollower(self.checked.prediction)
        choice.prediction.add(choice.token_ids)
        choice.stream = stream = self._new_stream()
        for token in choice.token_ids if stream is not None else ():
            stream.push(token)  # type: ignore[union-attr]
        self._before = None
        return choice

    def restart_prompt(self) -> None:
        """Drop the prompt's log-probabilities unless all are there: they are computed under other weights."""
        if len(self._prompt_scores) < len(self.checked.token_ids) - 1:
            self._prompt_scores, self._prompt_tops, self._prompt_ranks = [], [], []

    def received(self, choice: Choice) -> Received | None:
        """How much of its sequence a choice has; None: it has ended."""
        if choice.finish is not None:
            return None
        return Received(len(choice.token_ids), len(self._prompt_scores) if choice.index == 0 else 0)

    def abort(self, *, told: bool = False) -> list[int]:
        """End every choice that is still running; returns their engine ids.

        `told`: the caller is told, by a last chunk and the stop reason ABORTED.
        """
        running = [choice for choice in self.choices if choice.finish is None]
        for choice in running:
            choice.finish = Finish.ABORT.value
            if told:
                choice.stop_reason = ABORTED
                if self.streamed:
                    self.pending.append(_last_chunk(choice.index, self.checked.seed, self._weights))
        return [choice.engine_id for choice in running]

    def prompt_output(self) -> RequestOutput:
        """What is known of the prompt. Constant once the first choice has a token, so any thread may ask."""
        return self._output([], RequestMetrics(self._arrival, None, None, 0, 0), finished=False)

    def output(self) -> RequestOutput:
        """Everything so far."""
        choices = self.choices
        metrics = RequestMetrics(
            self._arrival,
            self._first_token,
            self._finished,
            sum(len(choice.token_ids) for choice in choices),
            sum(choice.accepted for choice in choices),
            sum(choice.guessed for choice in choices),
            sum(choice.frames for choice in choices),
            self._drafters(),
        )
        return self._output([self._completion(c) for c in choices], metrics, finished=self.finished)

    # ---- inside

    def _read(self, choice: Choice, delta: Delta) -> _Read:
        """Detokenise a delta, up to a stop string."""
        params, stream = self.checked.params, choice.stream
        text = ""
        stopped = delta.finish is Finish.STOP
        for i, token in enumerate(delta.tokens if stream else ()):
            assert stream is not None
            last = stopped and delta.stop_id is not None and i == len(delta.tokens) - 1
            if last and not params.include_stop_str_in_output:
                break  # the token that ends the text is not part of the text
            piece, match = stream.push(token)
            text += piece
            if match is not None:
                return _Read(text, i + 1, Finish.STOP.value, match, stop=True)
        if delta.finish is not None and stream is not None:
            text += stream.flush()
        finish = delta.finish.value if delta.finish is not None else None
        # The model's own end-of-text token is not reported as a stop reason; a caller's stop token is.
        reported = stopped and delta.stop_id in (params.stop_token_ids or ())
        return _Read(text, len(delta.tokens), finish, delta.stop_id if reported else None)

    def _extend(self, choice: Choice, delta: Delta, read: _Read) -> None:
        num = read.num_tokens
        if not choice.weights or (num and choice.weights[-1].version != self._weights[1]):
            choice.weights.append(WeightSpan(len(choice.token_ids), *self._weights))
        choice.token_ids += delta.tokens[:num]
        choice.prediction.add(delta.tokens[:num])
        choice.logprobs += delta.logprobs[:num]
        choice.top_logprobs += delta.tops[:num]
        choice.ranks += delta.ranks[:num]
        choice.text += read.text
        choice.frames += delta.frames
        if delta.guessed:
            choice.accepted += delta.accepted
            choice.guessed += delta.guessed
            guessed, accepted = choice.drafters.get(delta.drafter, (0, 0))
            choice.drafters[delta.drafter] = guessed + delta.guessed, accepted + delta.accepted
        choice.finish, choice.stop_reason = read.finish, read.stop_reason

    def _chunk(self, choice: Choice, delta: Delta, read: _Read, accepted_before: int) -> Chunk:
        num, prediction = read.num_tokens, choice.prediction
        tokens, logprobs = list(delta.tokens[:num]), list(delta.logprobs[:num])
        return Chunk(
            choice.index, read.text, tokens, logprobs,
            self._logprob_dicts(tokens, logprobs, delta.ranks[:num], delta.tops[:num]),
            read.finish, read.stop_reason, delta.accepted, delta.guessed, self.checked.seed,
            prediction.accepted - accepted_before, 0 if read.finish is None else prediction.rejected,
            *self._weights,
        )  # fmt: skip

    def _completion(self, choice: Choice) -> CompletionOutput:
        tokens, logprobs = list(choice.token_ids), list(choice.logprobs)
        return CompletionOutput(
            choice.index, choice.text, tokens, math.fsum(logprobs),
            self._logprob_dicts(tokens, logprobs, choice.ranks, choice.top_logprobs), choice.finish,
            choice.stop_reason, logprobs, self.checked.seed, choice.prediction.accepted,
            choice.prediction.rejected, tuple(choice.weights),
        )  # fmt: skip

    def _output(
        self, completions: list[CompletionOutput], metrics: RequestMetrics, *, finished: bool
    ) -> RequestOutput:
        spans = [choice.weights[-1] for choice in self.choices if choice.weights]
        last = max(spans, key=lambda span: span.version, default=WeightSpan(0, *self._weights))
        return RequestOutput(
            self.request_id, self.checked.text, self.checked.token_ids, self._prompt_logprobs(), completions,
            finished, self._num_cached, last.contract, metrics, last.version,
        )  # fmt: skip

    def _drafters(self) -> dict[str, tuple[int, int]]:
        """(guessed, accepted) by proposer, over all choices, sorted by name."""
        names = sorted({name for choice in self.choices for name in choice.drafters})
        counts = {name: [c.drafters.get(name, (0, 0)) for c in self.choices] for name in names}
        return {name: (sum(g for g, _ in each), sum(a for _, a in each)) for name, each in counts.items()}

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.checked.params.prompt_logprobs is None:
            return None
        tokens = self.checked.token_ids[1 : 1 + len(self._prompt_scores)]
        rows = zip(tokens, self._prompt_scores, self._prompt_ranks, self._prompt_tops, strict=True)
        return [None, *(_alternatives(*row, self._decode_token, named=False) for row in rows)]

    def _logprob_dicts(
        self,
        tokens: list[int],
        logprobs: list[float],
        ranks: Sequence[int],
        tops: Sequence[TopLogprobs],
    ) -> list[dict[int, Logprob]] | None:
        """Log-probabilities in vLLM's shape; None unless they were asked for."""
        params = self.checked.params
        if not params.shows_logprobs:
            return None
        named = bool(params.logprob_token_ids)
        rows = zip(tokens, logprobs, ranks, tops, strict=True)
        return [_alternatives(*row, self._decode_token, named=named) for row in rows]


def _no_text(_: int) -> None:
    """The text of a token where text is not wanted."""


def _last_chunk(index: int, seed: int, weights: tuple[str, int]) -> Chunk:
    """The end of a choice that was aborted."""
    contract, version = weights
    return Chunk(
        index, "", [], [], None, Finish.ABORT.value, ABORTED, seed=seed, contract=contract,
        weights_version=version,
    )  # fmt: skip


def _alternatives(
    token: int,
    logprob: float,
    rank: int,
    top: TopLogprobs,
    decode: Callable[[int], str | None],
    *,
    named: bool,
) -> dict[int, Logprob]:
    """The chosen token first, then the alternatives in order; each token once.

    `named`: the alternatives are tokens that the request named, whose ranks are not known.
    """
    entries = {token: Logprob(logprob, rank, decode(token))}
    for place, (other, value) in enumerate(top, 1):
        if other != token:
            entries[other] = Logprob(value, None if named else place, decode(other))
    return entries


__all__ = ["Answer", "Choice", "Update"]
