"""Shared by the laws: setups, cases, and ways to run cases that keep their output to the bit.

A law compares a run with the reference: each case alone on an engine without proposer and prefix cache.
"""

import copy
import functools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from law_proposers import PROPOSERS

from samewise.config import EngineConfig
from samewise.draft.build import MakeProposer, ProposerParts
from samewise.draft.tuning import Tuning
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.execute.runner import kv_page_bytes
from samewise.testing import Scripted, Transcript, submit, tiny
from samewise.types import Ask, Delta, Sampling

PAGE = 16
GREEDY = Sampling()


# -- setups -------------------------------------------------------------------------------------------


@functools.cache
def _tiny(family: str, dtype: str, eos: bool, overrides: tuple[tuple[str, Any], ...]) -> Loaded:
    return tiny(family, dtype=getattr(torch, dtype), eos=eos, **dict(overrides))


@dataclass(frozen=True)
class Setup:
    """A model family on a device. `frame_rows` is part of the contract, so part of the setup."""

    family: str
    device: str
    dtype: str
    frame_rows: int
    compile: bool = False
    linear: str = "auto"
    sizes: tuple[int, ...] | None = None  # frame sizes; no bit depends on them
    activation: str | None = None  # another than the family's: layers run as their modules

    def __str__(self) -> str:
        linear = "" if self.linear == "auto" else f"-{self.linear}"
        activation = f"-{self.activation}" if self.activation else ""
        return f"{self.family}-{self.device}-{self.dtype}-{self.frame_rows}{linear}{activation}"

    def engine(
        self,
        make_proposer: MakeProposer | None = None,
        *,
        num_pages: int = 200,
        eos: bool = False,
        ahead: bool | None = None,
        tuning: Tuning | None = None,
        overrides: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ) -> Engine:
        """A new engine over a copy of the setup's model; `num_pages` instead of kv_memory."""
        activation = {"hidden_act": self.activation} if self.activation else {}
        config = {"num_hidden_layers": 2} | activation | (overrides or {})
        loaded = _tiny(self.family, self.dtype, eos, tuple(sorted(config.items())))
        settings = {
            "model": f"tiny-{self.family}",
            "device": self.device,
            "dtype": self.dtype,
            "frame_rows": self.frame_rows,
            "compile": self.compile,
            "linear": self.linear,
            "frame_sizes": self.sizes,
            "max_num_seqs": 2 * self.frame_rows,
            "proposer": "none",
            "kv_memory": num_pages * kv_page_bytes(loaded.arch, getattr(torch, self.dtype)),
        } | settings
        own_copy = replace(loaded, model=copy.deepcopy(loaded.model))
        config_of = EngineConfig.of(**settings)
        return Engine(
            own_copy, config_of, tuning=tuning, make_proposer=make_proposer, ahead=ahead, clock=clock
        )


@dataclass(frozen=True)
class Variant:
    """A setup with a proposer."""

    setup: Setup
    proposer: str
    chained: bool = False  # a frame is launched before the one in flight is read, as on CUDA

    def __str__(self) -> str:
        return f"{self.setup}-{self.proposer}" + ("-chained" if self.chained else "")

    def engine(self, **settings: Any) -> Engine:
        """A new engine."""
        if self.chained:
            settings = {"ahead": True} | settings
        return self.setup.engine(PROPOSERS[self.proposer], **settings)

    @property
    def references(self) -> list["FullTranscript"]:
        """The reference output of each of CASES."""
        return run_references(self.setup, CASES)


# -- cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling = GREEDY
    max_tokens: int = 12
    verify: bool = True
    prompt_logprobs: int | None = None
    score_from: int | None = None
    salt: bytes = b""
    owner: bytes = b""
    priority: int = 0

    def add(self, engine: Engine) -> int:
        """Queue it and return the request's id."""
        return submit(
            engine,
            self.prompt,
            self.sampling,
            max_tokens=self.max_tokens,
            verify=self.verify,
            prompt_logprobs=self.prompt_logprobs,
            score_from=self.score_from,
            salt=self.salt,
            owner=self.owner,
            priority=self.priority,
        )


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(256) for _ in range(length))


def sampled(seed: int, **settings: Any) -> Sampling:
    """Sampling at temperature 0.8."""
    return Sampling(temperature=0.8, seed=seed, **settings)


CASES: tuple[Case, ...] = (
    Case("greedy-1", random_prompt(1)),
    Case("greedy-16", random_prompt(16), max_tokens=20),
    Case("greedy-33", random_prompt(33)),
    Case("sampled-17", random_prompt(17), sampled(3)),
    Case("sampled-100", random_prompt(100), sampled(2**63 + 5), max_tokens=9),
    Case("top-k-16", random_prompt(16, 1), sampled(5, top_k=20)),
    Case("top-p-33", random_prompt(33, 1), sampled(6, top_p=0.7)),
    Case("min-p-1", random_prompt(1, 1), sampled(7, min_p=0.05)),
    Case("all-filters-17", random_prompt(17, 1), sampled(8, top_k=40, top_p=0.9, min_p=0.01)),
    Case("presence-17", random_prompt(17, 2), Sampling(presence_penalty=1.5), max_tokens=16),
    Case("frequency-33", random_prompt(33, 2), sampled(9, frequency_penalty=1.2), max_tokens=16),
    Case("repetition-16", random_prompt(16, 2), Sampling(repetition_penalty=1.4), max_tokens=16),
    Case("top-logprobs-17", random_prompt(17, 3), sampled(10, top_logprobs=4)),
    Case("scored-33", random_prompt(33, 3), max_tokens=5, prompt_logprobs=2),
    Case(
        "processed-17",
        random_prompt(17, 4),
        sampled(11, processed=True, top_k=30, top_logprobs=3, presence_penalty=0.5),
        prompt_logprobs=2,
    ),
)


def other_requests(num: int, *, max_tokens: int = 40, verify: bool = True, seed: int = 77) -> list[Case]:
    """Requests that share the frames with the ones under test."""
    return [
        Case(f"other-{i}", random_prompt(1 + i % 7, seed + i), sampled(i), max_tokens, verify)
        for i in range(num)
    ]


# -- runs ---------------------------------------------------------------------------------------------


class FullTranscript(Transcript):
    """A Transcript with ranks, top log-probabilities and stop id. `num_cached` is kept but not compared."""

    __slots__ = ("num_cached",)  # outside __dict__, which is what a Transcript compares

    def __init__(self) -> None:
        super().__init__()
        self.tops: list[tuple[tuple[int, str], ...]] = []
        self.score_tops: list[tuple[tuple[int, str], ...]] = []
        self.ranks: list[int] = []
        self.score_ranks: list[int] = []
        self.stop_id: int | None = None
        self.num_cached = 0

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        super().take(delta)
        self.tops += [tuple((token, value.hex()) for token, value in top) for top in delta.tops]
        self.score_tops += [tuple((token, value.hex()) for token, value in top) for top in delta.score_tops]
        self.ranks += delta.ranks
        self.score_ranks += delta.score_ranks
        self.stop_id = delta.stop_id
        self.num_cached = delta.num_cached


def run_cases(
    engine: Engine,
    cases: Iterable[Case],
    *,
    step: Callable[[Engine], list[Delta]] = Engine.step,
    arrivals: Iterable[int] | None = None,
    after: Callable[[Engine, int], None] | None = None,
    limit: int = 5000,
) -> list[FullTranscript]:
    """Run cases to their end, each arriving at its step, checking the pages after every step.

    `after(engine, step_index)` is called after every step; more than `limit` steps fail.
    """
    pending = list(cases)
    arrival_steps = [0] * len(pending) if arrivals is None else list(arrivals)
    outputs = [FullTranscript() for _ in pending]
    by_id: dict[int, FullTranscript] = {}
    for step_index in range(limit):
        for i, case in enumerate(pending):
            if arrival_steps[i] == step_index:
                by_id[case.add(engine)] = outputs[i]
        if engine.idle and len(by_id) == len(pending):
            break
        for delta in step(engine):
            if delta.request_id in by_id:
                by_id[delta.request_id].take(delta)
        if after is not None:
            after(engine, step_index)
        engine.check()
    else:
        raise AssertionError(f"not done after {limit} steps: {engine.stats()}")
    assert all_pages_free(engine)
    return outputs


def run_one(engine: Engine, case: Case) -> FullTranscript:
    """Run one case to its end."""
    (output,) = run_cases(engine, [case])
    return output


def run_alone(engine: Engine, cases: Iterable[Case]) -> list[FullTranscript]:
    """Run the cases one after the other."""
    return [run_one(engine, case) for case in cases]


def all_pages_free(engine: Engine) -> bool:
    """Whether every page can be handed out again."""
    engine.check()
    return engine.scheduler.index.num_available == engine.scheduler.limits.num_pages - 1


@functools.cache
def _reference_engine(setup: Setup) -> Engine:
    return setup.engine(enable_prefix_caching=False)


@functools.cache
def run_reference(setup: Setup, case: Case) -> FullTranscript:
    """The output of a case alone, without proposer and prefix cache. Computed once per process."""
    return run_one(_reference_engine(setup), case)


def run_references(setup: Setup, cases: Iterable[Case]) -> list[FullTranscript]:
    """The reference output of each case."""
    return [run_reference(setup, case) for case in cases]


class KnownAnswers:
    """Drafts taken from known continuations, by prompt."""

    def __init__(self, continuations: dict[tuple[int, ...], list[int]]) -> None:
        self._continuations = continuations

    @classmethod
    def of(cls, cases: Iterable[Case], outputs: Iterable[FullTranscript]) -> "KnownAnswers":
        """The outputs of cases."""
        return cls({case.prompt: output.tokens for case, output in zip(cases, outputs, strict=True)})

    def continuation(self, ask: Ask) -> list[int]:
        """All tokens known to follow the sequence and its draft."""
        return self.after(tuple(ask.tokens[: ask.prompt_len]), len(ask.tokens) + len(ask.draft))

    def after(self, prompt: tuple[int, ...], length: int) -> list[int]:
        """All tokens known to follow a sequence of this many tokens, the prompt among them."""
        return self._continuations.get(prompt, [])[length - len(prompt) :]

    def oracle(self, _: ProposerParts) -> Scripted:
        """A proposer that is always right and drafts as much as there is room for."""
        return Scripted(self.continuation)

    def wrong_once(self, place: int, num: int) -> MakeProposer:
        """One draft of `num` tokens for each sequence, of which the one at `place` is wrong."""
        drafted: set[int] = set()

        def draft(ask: Ask) -> list[int]:
            if ask.seq_id in drafted:
                return []
            drafted.add(ask.seq_id)
            tokens = self.continuation(ask)[:num]
            tokens[place] = (tokens[place] + 1) % 256
            return tokens

        return lambda _: Scripted(draft)
