"""Who takes part: this engine under any proposer, transformers' generate, and peers if installed.

Engines of ours answer together, on a CPU a slice of time each in turn, by clocks that stand still meanwhile:
so what disturbs the machine disturbs all of them alike, and the ratio of two is much surer than either.
"""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from samewise.config import EngineConfig
from samewise.draft.build import MakeProposer, Parts
from samewise.draft.decode import Decode
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.llm.answers import Desk
from samewise.params import SamplingParams

Prompts = Sequence[Sequence[int]]

SLICE = 0.25  # seconds of a turn


@dataclass(frozen=True, slots=True)
class Sample:
    """One run over some prompts."""

    tokens: int
    seconds: float
    first_token: float | None = None  # seconds, the median over requests
    per_token: float | None = None
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """Answers prompts greedily, all at once, each up to `most` tokens or its end."""

    name: str

    def run(self, prompts: Prompts, most: int) -> Sample:
        """Answer."""
        ...


class Stopwatch:
    """A clock that stands still unless it is made to run."""

    def __init__(self) -> None:
        self._shown, self._since = 1.0, math.nan

    def __call__(self) -> float:
        """Seconds."""
        return self._shown if math.isnan(self._since) else self._shown + time.perf_counter() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time passes inside."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._shown, self._since = self(), math.nan


class Ours:
    """This engine, made with that clock. `verified` is the share of requests that keep the promise."""

    def __init__(
        self, name: str, engine: Engine, clock: Stopwatch, verified: float = 1.0, rate: float | None = None
    ) -> None:
        self.name, self.engine, self._verified, self._rate = name, engine, verified, rate
        self._clock, self._random, self._asked = clock, random.Random(0), 0
        # A device works on when its turn is over, and arrivals are by a clock that does not stop.
        self._slice = SLICE if engine.device.type == "cpu" and rate is None else math.inf

    def run(self, prompts: Prompts, most: int) -> Sample:
        """Answer, with nobody else's turn in between."""
        return together([self], prompts, most)[0]

    def turns(self, prompts: Prompts, most: int) -> Generator[None, None, Sample]:
        """Answer, as requests arrive: all at once, or so many a second. Pauses after every slice of time."""
        clock, engine = self._clock, self.engine
        desk, before, began = Desk(engine, clock), engine.stats(), clock()
        waiting, arrivals = list(enumerate(prompts)), self._arrivals(len(prompts))
        answers = []
        while waiting or not engine.idle:
            with clock.running():
                until, now = clock() + self._slice, -math.inf
                while (waiting or not engine.idle) and now < until:
                    while waiting and arrivals[waiting[0][0]] <= clock() - began:
                        _, prompt = waiting.pop(0)
                        params = SamplingParams(
                            temperature=0, max_tokens=most, verify=self._verify(), share=False
                        )
                        answers.append(desk.submit(desk.ask(list(prompt), params)))
                    desk.step()
                    now = clock()
            yield
        metrics = [answer.output().metrics for answer in answers]
        return Sample(
            sum(m.num_output_tokens for m in metrics),
            clock() - began,
            _median([m.time_to_first_token for m in metrics]),
            _median([m.time_per_output_token for m in metrics]),
            _difference(before, self.engine.stats()),
        )

    def _verify(self) -> bool:
        """Evenly spread over all requests asked so far, so that small batches get their share too."""
        self._asked += 1
        return int(self._asked * self._verified) > int((self._asked - 1) * self._verified)

    def _arrivals(self, num: int) -> list[float]:
        if self._rate is None:
            return [0.0] * num
        clock, found = 0.0, []
        for _ in range(num):
            found.append(clock)
            clock += self._random.expovariate(self._rate)
        return found


def together(some: Sequence[Ours], prompts: Prompts, most: int) -> list[Sample]:
    """The same prompts to each of them, in turns."""
    under_way = {i: one.turns(prompts, most) for i, one in enumerate(some)}
    found: dict[int, Sample] = {}
    while under_way:
        for i, turns in list(under_way.items()):
            try:
                next(turns)
            except StopIteration as end:
                found[i] = end.value
                del under_way[i]
    return [found[i] for i in range(len(some))]


class Transformers:
    """transformers' own generate, with its own attention, on the same weights."""

    name = "transformers"

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, eos: set[int], pad: int) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self._model, self._eos, self._pad = model.to(device).eval(), eos, pad

    @torch.inference_mode()
    def run(self, prompts: Prompts, most: int) -> Sample:
        """Left-padded, greedy."""
        longest = max(map(len, prompts))
        device = self._model.device
        rows = [[self._pad] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(rows, device=device)
        began = time.perf_counter()
        out = self._model.generate(
            input_ids=ids, attention_mask=torch.tensor(mask, device=device), do_sample=False,
            max_new_tokens=most, eos_token_id=sorted(self._eos) or None, pad_token_id=self._pad,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return Sample(sum(self._length(row) for row in out[:, longest:].tolist()), seconds)

    def _length(self, row: list[int]) -> int:
        ends = [i for i, token in enumerate(row) if token in self._eos]
        return ends[0] + 1 if ends else len(row)


class VLLM:
    """vLLM, where it is installed."""

    name = "vllm"

    def __init__(self, path: str, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(path, dtype=dtype, enable_prefix_caching=False)

    def run(self, prompts: Prompts, most: int) -> Sample:
        """Greedy."""
        from vllm import SamplingParams as Params

        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(given, Params(temperature=0, max_tokens=most), use_tqdm=False)
        seconds = time.perf_counter() - began
        return Sample(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, where it is installed and the model is a GGUF file."""

    name = "llama.cpp, one by one"

    def __init__(self, path: str, longest: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(path, n_ctx=longest, n_threads=torch.get_num_threads(), verbose=False)
        self._ends = {self._llama.token_eos()}

    def run(self, prompts: Prompts, most: int) -> Sample:
        """Greedy, one prompt after the other."""
        tokens, began = 0, time.perf_counter()
        for prompt in prompts:
            self._llama.reset()
            for token, _ in zip(self._llama.generate(list(prompt), temp=0.0), range(most), strict=False):
                tokens += 1
                if token in self._ends:
                    break
        return Sample(tokens, time.perf_counter() - began)


def installed(name: str) -> bool:
    """Whether a peer's package is there; says nothing of whether it works."""
    return importlib.util.find_spec(name) is not None


def ours(
    loaded: Loaded, config: EngineConfig, names: Sequence[str], verified: float, rate: float | None
) -> list[Contender]:
    """One engine per proposer over one model in memory; `unverified` is the fast path, no promise."""
    made: list[Contender] = []
    for name in names:
        share = 0.0 if name == "unverified" else verified
        who = {"none" if name == "unverified" else part for part in name.split("+")}
        chosen = replace(
            config,
            proposer="none" if name == "unverified" else name,
            draft_model=config.draft_model if who & {"model", "auto"} else None,
            draft_weights=config.draft_weights if who & {"decode", "auto"} else "auto",
        )
        made.append(timed(name, loaded, chosen, verified=share, rate=rate))
    return made


def timed(
    name: str,
    loaded: Loaded,
    config: EngineConfig,
    make: MakeProposer | None = None,
    *,
    verified: float = 1.0,
    rate: float | None = None,
) -> Ours:
    """An engine with a clock that only its own turns move."""
    clock = Stopwatch()
    return Ours(name, Engine(loaded, config, make_proposer=make, clock=clock), clock, verified, rate)


def injecting(rate: float, seed: int = 0) -> MakeProposer:
    """`decode`, with its guesses spoiled at a rate: what mismatches cost."""

    def make(parts: Parts) -> Decode:
        generator = torch.Generator(parts.runner.device).manual_seed(seed)

        def spoil(logits: torch.Tensor) -> torch.Tensor:
            hit = torch.rand(logits.shape[0], generator=generator, device=logits.device) < rate
            best = logits.argmax(-1, keepdim=True)
            return logits.scatter(1, best, torch.where(hit[:, None], -torch.inf, logits.gather(1, best)))

        return Decode(parts.runner, parts.sampler, spoil, chain=parts.chain)

    return make


def _median(values: list[float | None]) -> float | None:
    found = sorted(value for value in values if value is not None)
    return found[len(found) // 2] if found else None


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    names = ("frames", "rows", "padded_rows", "guessed", "accepted", "rolled_back", "output_tokens")
    return {name: after[name] - before[name] for name in names}


__all__ = [
    "VLLM",
    "Contender",
    "LlamaCpp",
    "Ours",
    "Prompts",
    "Sample",
    "Stopwatch",
    "Transformers",
    "injecting",
    "installed",
    "ours",
    "timed",
    "together",
]
