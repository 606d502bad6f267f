"""Loads on an engine, timed. A case is a number of sequences with the lengths of prompt and output.

Timing is done from outside: by the host's clock around `Engine.step`, and on CUDA by events around each pass.
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
from samewise.testing import submit
from samewise.types import Sampling

MODES = {"verified": 1.0, "unverified": 0.0, "10%": 0.1}
GREEDY = Sampling()
WINDOW = 8  # tokens per sequence over which one step time is averaged


@dataclass(frozen=True, slots=True)
class Case:
    """`live` sequences at once, each with a random prompt; `mode` sets the share that is verified."""

    prompt: int
    output: int
    live: int
    mode: str = "verified"

    @property
    def name(self) -> str:
        """Lengths of prompt and output, as in 1K/256."""
        return f"{_short(self.prompt)}/{_short(self.output)}"

    def verified(self) -> list[bool]:
        """Which sequences are verified: spread evenly, and at least one if the share is above 0."""
        share = MODES[self.mode]
        num = round(share * self.live) if share in (0.0, 1.0) else max(1, round(share * self.live))
        return [(i + 1) * num // self.live > i * num // self.live for i in range(self.live)]


class Load:
    """Requests that run on one engine, and the times of their tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, int] = {}  # number of tokens by request
        self.num_finished = 0
        self._last: dict[int, float] = {}  # time of the latest token by request
        self.gaps: dict[int, list[float]] = {}  # seconds between deltas by request

    def submit(self, rng: random.Random, prompt_len: int, max_tokens: int, verified: list[bool]) -> list[int]:
        """Queue a random prompt per entry of `verified`; returns the requests' ids."""
        vocab = self.engine.loaded.arch.vocab
        requests = []
        for verify in verified:
            prompt = [rng.randrange(vocab) for _ in range(prompt_len)]
            requests.append(submit(self.engine, prompt, GREEDY, max_tokens=max_tokens, verify=verify))
        self.tokens |= dict.fromkeys(requests, 0)
        return requests

    def step(self) -> int:
        """One step; returns the number of tokens it committed."""
        deltas, now, num = self.engine.step(), time.perf_counter(), 0
        for delta in deltas:
            if delta.request_id not in self.tokens or not delta.tokens:
                continue
            num += len(delta.tokens)
            self.tokens[delta.request_id] += len(delta.tokens)
            if delta.request_id in self._last:
                self.gaps.setdefault(delta.request_id, []).append(now - self._last[delta.request_id])
            self._last[delta.request_id] = now
        self.num_finished += sum(delta.finish is not None for delta in deltas)
        return num

    def prefill(self, requests: list[int]) -> int:
        """Step until each of these requests has a token; returns the number of steps."""
        steps = 0
        while not all(self.tokens[request] for request in requests):
            self.step()
            steps += 1
        return steps

    def abort(self) -> None:
        """Abort all requests."""
        for request in self.tokens:
            self.engine.abort(request)
        while not self.engine.idle:
            self.engine.step()


def measure(engine: Engine, case: Case, steps: int, seed: int) -> dict[str, Any]:
    """Prefill all prompts, then decode: `steps` tokens per sequence, or with 0 the complete output.

    With `steps`, prompts are longer by half of the output that is left out: the timed steps then lie in the
    middle of the output, where the context has its average length.
    """
    rng, load, steps = random.Random(seed), Load(engine), min(steps, case.output)
    prompt_len = case.prompt + ((case.output - steps) // 2 if steps else 0)
    max_tokens = engine.max_model_len - prompt_len if steps else case.output
    preempted = engine.stats()["preempted"]
    began = time.perf_counter()
    load.prefill(load.submit(rng, prompt_len, max_tokens, case.verified()))
    prefill_rate = case.live * prompt_len / (time.perf_counter() - began)
    figures = _decode(load, steps or case.output)
    if steps:
        load.abort()
        seconds = case.live * case.prompt / prefill_rate + case.output * (figures["ms"] or 0.0) / 1e3
    else:
        while not engine.idle:
            load.step()
        seconds = time.perf_counter() - began
    return figures | {
        "context": prompt_len + figures["context"],
        "prompt_tok_s": prefill_rate,
        "tok_s": case.live * case.output / seconds,
        "tok_s_is": "reckoned" if steps else "measured",
        "preempted": engine.stats()["preempted"] - preempted,
    }


def _decode(load: Load, steps: int) -> dict[str, Any]:
    """Decode with all sequences live: milliseconds per token and sequence, the median over windows."""
    engine = load.engine
    for _ in range(min(4, steps)):  # frames launched before the last prompt was complete
        load.step()
    before, num_finished = engine.stats(), load.num_finished
    live = before["running"]  # fewer than submitted where early sequences ended during the prefill
    windows: list[float] = []
    total = in_window = 0
    began = since = time.perf_counter()
    with device_times(engine) as device:
        while total < live * steps and load.num_finished == num_finished:
            num = load.step()
            total, in_window = total + num, in_window + num
            if in_window >= live * min(WINDOW, steps):
                now = time.perf_counter()
                windows.append((now - since) * 1e3 * live / in_window)
                in_window, since = 0, now
        if not windows and total:
            windows.append((time.perf_counter() - began) * 1e3 * live / total)
        idle_share = device.idle_share()
    after = engine.stats()
    stepped, waited = (after[name] - before[name] for name in ("step_seconds", "wait_seconds"))
    each = total / max(1, live)
    return {
        "ms": statistics.median(windows) if windows else None,
        "ms_windows": [round(ms, 4) for ms in windows],
        "live_then": live,
        "context": sum(load.tokens.values()) / len(load.tokens) - each / 2,  # mean output in the middle step
        "host_ms": (stepped - waited) * 1e3 / each if each else None,
        "device_waits": idle_share,
    }


def streaming(engine: Engine, live: int, newcomers: int, prompt_len: int, seed: int = 1) -> dict[str, Any]:
    """The gaps between tokens of running sequences while the prompts of new ones are prefilled."""
    rng, load = random.Random(seed), Load(engine)
    max_tokens = engine.max_model_len - prompt_len
    running = load.submit(rng, prompt_len, max_tokens, [True] * live)
    load.prefill(running)
    for _ in range(8):
        load.step()
    load.gaps.clear()
    for _ in range(24):
        load.step()
    quiet = [gap for request in running for gap in load.gaps[request]]
    load.gaps.clear()
    began = time.perf_counter()
    steps = load.prefill(load.submit(rng, prompt_len, max_tokens, [True] * newcomers))
    seconds = time.perf_counter() - began
    gaps = [gap for request in running for gap in load.gaps.get(request, [seconds])]
    load.abort()
    return {
        "live": live, "newcomers": newcomers, "prompt": prompt_len, "seconds": seconds, "steps": steps,
        "quiet_ms": statistics.median(quiet) * 1e3, "gap_ms": statistics.median(gaps) * 1e3,
        "longest_gap_ms": max(gaps) * 1e3, "tokens_meanwhile": len(gaps),
        "prompt_tok_s": newcomers * prompt_len / seconds,
    }  # fmt: skip


# ---- the device's own clock


class DeviceTimes:
    """CUDA events at the begin and end of every pass."""

    def __init__(self) -> None:
        self._begin: torch.cuda.Event | None = None
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Record before a pass is launched."""
        if self._begin is None:
            self._begin = _now()

    def end(self, _: object = None) -> None:
        """Record after the pass and its sampling were launched."""
        if self._begin is not None:
            self._passes.append((self._begin, _now()))
            self._begin = None

    def idle_share(self) -> float | None:
        """The share of the time between passes; None without events, as on a CPU."""
        if len(self._passes) < 2:
            return None
        torch.cuda.synchronize()
        busy = sum(begin.elapsed_time(end) for begin, end in self._passes)
        return max(0.0, 1.0 - busy / self._passes[0][0].elapsed_time(self._passes[-1][1]))


@contextmanager
def device_times(engine: Engine) -> Iterator[DeviceTimes]:
    """Record events before every pass and after its sampling, on CUDA."""
    device = DeviceTimes()
    with ExitStack() as patches:
        if engine.device.type == "cuda":
            for name in ("frame", "fast"):
                patches.enter_context(before(type(engine.runner), name, device.begin))
            for owner, name in ((type(engine.verifier), "run"), (type(engine.parts.sampler), "sample")):
                patches.enter_context(after(owner, name, device.end))
        yield device


@contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a function of a module or a method of a class, its own or inherited, within the block."""
    method, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, functools.wraps(method)(make(method)))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, method)


def before(owner: Any, name: str, callback: Callable[[], object]) -> AbstractContextManager[None]:
    """Call back before each call of a method."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            callback()
            return method(*args, **kwargs)

        return call

    return replaced(owner, name, make)


def after(owner: Any, name: str, callback: Callable[[Any], object]) -> AbstractContextManager[None]:
    """Call back with each result of a method."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            callback(result)
            return result

        return call

    return replaced(owner, name, make)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
