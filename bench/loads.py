"""Loads on an engine, and what they took. A case: so many sequences, so long a prompt, so many tokens out.

Timing is done from outside: by the clock around `Engine.step`, and on CUDA by events around what is
launched. The engine does not know that it is being timed.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from samewise.engine import Engine
from samewise.types import Sampling

MODES = {"verified": 1.0, "unverified": 0.0, "10%": 0.1}
GREEDY = Sampling()
WINDOW = 8  # tokens per sequence that one measurement of a step is taken over


@dataclass(frozen=True, slots=True)
class Case:
    """`live` sequences at once, each a random prompt of its own; `mode` says how many are verified."""

    prompt: int
    output: int
    live: int
    mode: str = "verified"

    @property
    def name(self) -> str:
        """Prompt and output, as people write them."""
        return f"{_short(self.prompt)}/{_short(self.output)}"

    def verified(self) -> list[bool]:
        """Which of the sequences keep the promise: spread evenly, and at least one where any should."""
        share = MODES[self.mode]
        num = round(share * self.live) if share in (0.0, 1.0) else max(1, round(share * self.live))
        return [(i + 1) * num // self.live > i * num // self.live for i in range(self.live)]


class Load:
    """Requests under way on one engine, and when their tokens came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, int] = {}  # by request: how many came
        self.ended = 0
        self._last: dict[int, float] = {}  # when the latest came
        self.gaps: dict[int, list[float]] = {}

    def ask(self, rng: random.Random, num: int, prompt: int, most: int, verified: list[bool]) -> list[int]:
        """Queue `num` random prompts."""
        vocab = self.engine.loaded.arch.vocab
        asked = []
        for verify in verified[:num]:
            text = [rng.randrange(vocab) for _ in range(prompt)]
            asked.append(self.engine.add(text, GREEDY, max_tokens=most, verify=verify))
        self.tokens |= dict.fromkeys(asked, 0)
        return asked

    def step(self) -> int:
        """One step. How many tokens it brought."""
        deltas, now, num = self.engine.step(), time.perf_counter(), 0
        for delta in deltas:
            if delta.request_id not in self.tokens or not delta.tokens:
                continue
            num += len(delta.tokens)
            self.tokens[delta.request_id] += len(delta.tokens)
            if delta.request_id in self._last:
                self.gaps.setdefault(delta.request_id, []).append(now - self._last[delta.request_id])
            self._last[delta.request_id] = now
        self.ended += sum(delta.finish is not None for delta in deltas)
        return num

    def waiting(self, asked: list[int]) -> bool:
        """Whether any of them has yet to say its first token."""
        return not all(self.tokens[request] for request in asked)

    def drop(self) -> None:
        """Abort what is left."""
        for request in self.tokens:
            self.engine.abort(request)
        while not self.engine.idle:
            self.engine.step()


def measure(engine: Engine, case: Case, steps: int, seed: int) -> dict[str, Any]:
    """Read all prompts at once, then decode: `steps` tokens per sequence, or with 0 the whole output.

    Some steps stand for all: then prompts are longer by half of what is left out, so that the steps that are
    timed lie in the middle of the output, where the context is what it is on average.
    """
    rng, load, steps = random.Random(seed), Load(engine), min(steps, case.output)
    longer = (case.output - steps) // 2 if steps else 0
    prompt = case.prompt + longer
    most = engine.max_model_len - prompt if steps else case.output
    preempted = engine.stats()["preempted"]
    began = time.perf_counter()
    asked = load.ask(rng, case.live, prompt, most, case.verified())
    while load.waiting(asked):
        load.step()
    read = time.perf_counter() - began
    found = _decode(load, steps or case.output)
    if steps:
        load.drop()
        pace = case.live * prompt / read
        whole = case.live * case.prompt / pace + case.output * (found["ms"] or 0.0) / 1e3
    else:
        while not engine.idle:
            load.step()
        whole = time.perf_counter() - began
    return found | {
        "context": prompt + found["context"],
        "prompt_tok_s": case.live * prompt / read,
        "tok_s": case.live * case.output / whole,
        "tok_s_is": "reckoned" if steps else "measured",
        "preempted": engine.stats()["preempted"] - preempted,
    }


def _decode(load: Load, steps: int) -> dict[str, Any]:
    """Decode with all of them live: milliseconds per token and sequence, the median over windows."""
    engine = load.engine
    for _ in range(min(4, steps)):  # what was still on its way from the prompts
        load.step()
    first, ended = engine.stats(), load.ended
    live = first["running"]  # fewer where early ones were through before the last had been read
    windows: list[float] = []
    total = fresh = 0
    began = since = time.perf_counter()
    with watched(engine) as device:
        while total < live * steps and load.ended == ended:
            num = load.step()
            total, fresh = total + num, fresh + num
            if fresh >= live * min(WINDOW, steps):
                now = time.perf_counter()
                windows.append((now - since) * 1e3 * live / fresh)
                fresh, since = 0, now
        if not windows and total:
            windows.append((time.perf_counter() - began) * 1e3 * live / total)
        waits = device.waits()
    last = engine.stats()
    stepped, waited = (last[name] - first[name] for name in ("step_seconds", "wait_seconds"))
    each = total / max(1, live)
    return {
        "ms": statistics.median(windows) if windows else None,
        "ms_windows": [round(ms, 4) for ms in windows],
        "live_then": live,
        "context": sum(load.tokens.values()) / len(load.tokens) - each / 2,  # in the middle, less the prompt
        "host_ms": (stepped - waited) * 1e3 / each if each else None,
        "device_waits": waits,
    }


def streaming(engine: Engine, live: int, newcomers: int, prompt: int, seed: int = 1) -> dict[str, Any]:
    """Do decodes go on while prompts are read? The gaps between a running sequence's tokens."""
    rng, load = random.Random(seed), Load(engine)
    most = engine.max_model_len - prompt
    old = load.ask(rng, live, prompt, most, [True] * live)
    while load.waiting(old):
        load.step()
    for _ in range(8):
        load.step()
    load.gaps.clear()
    for _ in range(24):
        load.step()
    quiet = [gap for request in old for gap in load.gaps[request]]
    load.gaps.clear()
    began, steps = time.perf_counter(), 0
    new = load.ask(rng, newcomers, prompt, most, [True] * newcomers)
    while load.waiting(new):
        load.step()
        steps += 1
    seconds = time.perf_counter() - began
    gaps = [gap for request in old for gap in load.gaps.get(request, [seconds])]
    load.drop()
    return {
        "live": live, "newcomers": newcomers, "prompt": prompt, "seconds": seconds, "steps": steps,
        "quiet_ms": statistics.median(quiet) * 1e3, "gap_ms": statistics.median(gaps) * 1e3,
        "longest_gap_ms": max(gaps) * 1e3, "tokens_meanwhile": len(gaps),
        "prompt_tok_s": newcomers * prompt / seconds,
    }  # fmt: skip


# ---- the device's own clock


class Device:
    """When the device began and ended what it was given."""

    def __init__(self) -> None:
        self._begun: torch.cuda.Event | None = None
        self._done: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """A pass is about to be launched."""
        if self._begun is None:
            self._begun = _now()

    def end(self, _: object = None) -> None:
        """All of it was launched."""
        if self._begun is not None:
            self._done.append((self._begun, _now()))
            self._begun = None

    def waits(self) -> float | None:
        """The share of the time in which the device had nothing to do. None where there is no such clock."""
        if len(self._done) < 2:
            return None
        torch.cuda.synchronize()
        busy = sum(begin.elapsed_time(end) for begin, end in self._done)
        return max(0.0, 1.0 - busy / self._done[0][0].elapsed_time(self._done[-1][1]))


@contextmanager
def watched(engine: Engine) -> Iterator[Device]:
    """Events before every pass and after its choices, on CUDA; elsewhere nothing."""
    device = Device()
    with ExitStack() as patches:
        if engine.device.type == "cuda":
            for name in ("frame", "fast"):
                patches.enter_context(before(type(engine.runner), name, device.begin))
            for owner, name in ((type(engine.verifier), "run"), (type(engine.sampler), "pick")):
                patches.enter_context(after(owner, name, device.end))
        yield device


@contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """A function or method exchanged for as long as the block lasts. Where there is none, nothing."""
    method = vars(owner).get(name)
    if not callable(method):
        yield
        return
    setattr(owner, name, functools.wraps(method)(make(method)))
    try:
        yield
    finally:
        setattr(owner, name, method)


def before(owner: Any, name: str, told: Callable[[], object]) -> AbstractContextManager[None]:
    """Say when a method is about to be called."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            told()
            return method(*args, **kwargs)

        return call

    return replaced(owner, name, make)


def after(owner: Any, name: str, told: Callable[[Any], object]) -> AbstractContextManager[None]:
    """Say what a method returned."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            told(result)
            return result

        return call

    return replaced(owner, name, make)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
