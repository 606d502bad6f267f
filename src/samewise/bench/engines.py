"""This engine under each proposer, measured in turns.

On a CPU engines take turns of a slice of time each, with a clock of their own that stops between turns. So a
disturbance of the machine hits all of them alike, and the ratio of two rates is surer than either rate.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from samewise.bench.measurement import Measurement, Prompts, median
from samewise.config import EngineConfig
from samewise.draft.build import MakeProposer, ProposerParts
from samewise.draft.decode import Decode
from samewise.draft.tuning import Tuning
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.llm.step_loop import StepLoop
from samewise.params import SamplingParams

SLICE_SECONDS = 0.25
"""Length of a turn: many steps of a small model, and short beside the disturbances of a shared machine."""
COUNTERS = (
    "frames", "rows", "padded_rows", "drafts", "guessed", "accepted", "rolled_back", "output_tokens",
)  # fmt: skip
UNVERIFIED = "unverified"
"""Name of the engine whose requests are not verified: the fast path alone."""


class Stopwatch:
    """A clock that only advances inside `running`."""

    def __init__(self) -> None:
        self._elapsed, self._since = 1.0, math.nan

    def __call__(self) -> float:
        """Seconds."""
        return self._elapsed if math.isnan(self._since) else self._elapsed + time.perf_counter() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Advance meanwhile."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._elapsed, self._since = self(), math.nan


class EngineBackend:
    """An engine that uses `clock`. `verified` is the share of its requests that are verified.

    `rate` is the mean number of requests that arrive per second; None: all at once.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        clock: Stopwatch,
        verified: float = 1.0,
        rate: float | None = None,
        *,
        ignore_eos: bool = False,
    ) -> None:
        self.name, self.engine, self._verified, self._rate = name, engine, verified, rate
        self.about, self._ignore_eos = f"contract {engine.contract}", ignore_eos
        self._clock, self._random, self._num_asked = clock, random.Random(0), 0
        # A device goes on working after its turn, and arrivals follow the time that passes for all.
        self._slice = SLICE_SECONDS if engine.device.type == "cpu" and rate is None else math.inf

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """Answer without turns of other engines."""
        return run_in_turns([self], prompts, max_tokens)[0]

    def turns(self, prompts: Prompts, max_tokens: int) -> Generator[None, None, Measurement]:
        """Answer prompts as they arrive; yields after every slice of time."""
        clock, engine = self._clock, self.engine
        loop, before, began = StepLoop(engine, clock), engine.stats(), clock()
        waiting = list(zip(self._arrivals(len(prompts)), prompts, strict=True))
        answers = []
        while waiting or not engine.idle:
            with clock.running():
                turn_ends, now = clock() + self._slice, -math.inf
                while (waiting or not engine.idle) and now < turn_ends:
                    while waiting and waiting[0][0] <= clock() - began:
                        _, prompt = waiting.pop(0)
                        params = SamplingParams(
                            temperature=0, max_tokens=max_tokens, verify=self._verify_next(), share=False,
                            ignore_eos=self._ignore_eos,
                        )  # fmt: skip
                        answers.append(loop.submit(loop.intake.check(list(prompt), params)))
                    loop.step()
                    now = clock()
            yield
        metrics = [answer.output().metrics for answer in answers]
        return Measurement(
            sum(m.num_output_tokens for m in metrics),
            clock() - began,
            median(m.time_to_first_token for m in metrics),
            median(m.time_per_output_token for m in metrics),
            _difference(before, engine.stats()),
        )

    def _verify_next(self) -> bool:
        """Spread verified requests evenly over all runs, so that small batches get their share too."""
        self._num_asked += 1
        return int(self._num_asked * self._verified) > int((self._num_asked - 1) * self._verified)

    def _arrivals(self, num: int) -> list[float]:
        """Seconds from the start, in order."""
        if self._rate is None:
            return [0.0] * num
        times = [0.0]
        for _ in range(num - 1):
            times.append(times[-1] + self._random.expovariate(self._rate))
        return times


def run_in_turns(backends: Sequence[EngineBackend], prompts: Prompts, max_tokens: int) -> list[Measurement]:
    """The same prompts to every engine, in turns of a slice of time each."""
    running = {i: backend.turns(prompts, max_tokens) for i, backend in enumerate(backends)}
    results: dict[int, Measurement] = {}
    while running:
        for i, turns in list(running.items()):
            try:
                next(turns)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
    return [results[i] for i in range(len(backends))]


def engine_backends(
    loaded: Loaded,
    config: EngineConfig,
    names: Sequence[str],
    *,
    verified: float = 1.0,
    rate: float | None = None,
    tuning: Tuning | None = None,
    ignore_eos: bool = False,
) -> list[EngineBackend]:
    """One engine per proposer (or `unverified`) over one model in memory."""
    backends = []
    for name in names:
        proposer = "none" if name == UNVERIFIED else name
        parts = set(proposer.split("+"))
        chosen = replace(
            config,
            proposer=proposer,
            draft_model=config.draft_model if parts & {"model", "auto"} else None,
            draft_weights=config.draft_weights if parts & {"decode", "auto"} else "auto",
        )
        share = 0.0 if name == UNVERIFIED else verified
        backends.append(
            engine_backend(
                name, loaded, chosen, verified=share, rate=rate, tuning=tuning, ignore_eos=ignore_eos
            )
        )
    return backends


def engine_backend(
    name: str,
    loaded: Loaded,
    config: EngineConfig,
    *,
    make_proposer: MakeProposer | None = None,
    verified: float = 1.0,
    rate: float | None = None,
    tuning: Tuning | None = None,
    ignore_eos: bool = False,
) -> EngineBackend:
    """An engine with a clock that only its own turns advance."""
    clock = Stopwatch()
    engine = Engine(loaded, config, tuning=tuning, make_proposer=make_proposer, clock=clock)
    return EngineBackend(name, engine, clock, verified, rate, ignore_eos=ignore_eos)


def decode_with_mismatches(rate: float) -> MakeProposer:
    """The proposer `decode`, with mismatches at this rate."""

    def make(parts: ProposerParts) -> Decode:
        return Decode(parts.runner, parts.sampler, mismatches(rate, parts.runner.device), chain=parts.chain)

    return make


def mismatches(rate: float, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of logits [R, V] that bars the most likely token in this share of the rows."""
    generator = torch.Generator(device).manual_seed(0)

    def bar(logits: torch.Tensor) -> torch.Tensor:
        barred = torch.rand(logits.shape[0], generator=generator, device=logits.device) < rate
        best = logits.argmax(-1, keepdim=True)
        return logits.scatter(1, best, torch.where(barred[:, None], -torch.inf, logits.gather(1, best)))

    return bar


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in COUNTERS}


__all__ = [
    "UNVERIFIED",
    "EngineBackend",
    "Stopwatch",
    "decode_with_mismatches",
    "engine_backend",
    "engine_backends",
    "mismatches",
    "run_in_turns",
]
