"""`samewise bench`: the same questions to everybody, interleaved, in one run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from samewise.bench import contend, report, timeline, workload
from samewise.bench.contend import Contender, Ours, Sample
from samewise.bench.report import Cell
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import MachineError
from samewise.execute.load import Loaded, load
from samewise.llm.step_loop import StepLoop
from samewise.model.linear import FrameLinear
from samewise.model.resolve import resolve
from samewise.params import SamplingParams
from samewise.types import LayerSet


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `batches` are how many requests are asked at once."""

    proposers: tuple[str, ...] = ("none", "auto")
    batches: tuple[int, ...] = (1, 8)
    repeats: int = 3
    max_tokens: int = 96
    verified: float = 1.0
    workload: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = 2  # questions per task
    synthetic: int | None = None  # length of random prompts instead
    rate: float | None = None  # requests per second; None: all at once
    peers: bool = True
    inject: tuple[float, ...] = ()
    timeline: bool = False
    out: Path = field(default_factory=lambda: Path("bench-out"))


def bench(console: Console, config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """Measure, show, draw; returns what the last line says."""
    config = replace(config, enable_prefix_caching=False, kv_memory=config.kv_memory or "1GiB")
    loaded = load(config)
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.inject:
        return _overhead(console, loaded, config, plan)
    if plan.timeline:
        return _timeline(console, loaded, config, plan)
    with console.status("starting engines and peers …"):
        contenders = contend.ours(loaded, config, plan.proposers, plan.verified, plan.rate)
        contenders += list(_peers(console, contenders, config)) if plan.peers else []
    first = next(c.engine for c in contenders if isinstance(c, Ours))
    asked = _prompts(first, plan)
    ceiling = _ceiling(console, config, first)
    cells = _measure(console, contenders, asked, plan)
    baseline = "transformers" if plan.peers else plan.proposers[0]
    console.print(report.table(cells, baseline))
    console.print(report.speculation(cells))
    if "auto" in plan.proposers and len(plan.proposers) > 1:
        console.print(report.auto_over_best(cells))
    picture = plan.out / "bench.png"
    _draw(console, picture, lambda: report.plot(cells, picture, f"{config.model}, {_dtype(first)}, {_cpu()}"))
    compared = [
        {"batch": batch, "task": task, "best": best, "auto_over_best": ratio}
        for (batch, task), (best, ratio) in report.over_best(cells).items()
    ]
    found = {"results": [cell.as_json() for cell in cells], "auto": compared}
    return _last(config, plan, ceiling, first) | found


def _measure(
    console: Console, contenders: Sequence[Contender], asked: dict[str, list[list[int]]], plan: Plan
) -> list[Cell]:
    """Every contender on every task at every batch size; interleaved, so noise hits all alike."""
    found: dict[tuple[int, str, str], list[Sample]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=plan.repeats * len(plan.batches) * len(asked) * len(contenders))
        for contender in contenders:  # whatever is compiled or read at first use is not measured
            progress.update(bar, description=f"warming up {contender.name}")
            contender.run([next(iter(asked.values()))[0]] * max(plan.batches), 8)
        for _ in range(plan.repeats):
            for batch in plan.batches:
                for task, prompts in asked.items():
                    told = partial(progress.update, bar)
                    samples = _groups(
                        contenders, prompts, batch, plan.max_tokens, f"batch {batch}, {task}", told
                    )
                    for name, sample in samples.items():
                        found.setdefault((batch, task, name), []).append(sample)
                    progress.advance(bar, len(contenders))
    return [Cell(name, task, batch, tuple(s)) for (batch, task, name), s in found.items()]


def _groups(
    contenders: Sequence[Contender],
    prompts: list[list[int]],
    batch: int,
    most: int,
    where: str,
    told: Callable[..., None],
) -> dict[str, Sample]:
    """All prompts in groups of `batch`, the last filled up from the start; ours together, then each peer."""
    num = -(-len(prompts) // batch) * batch
    padded = list(islice(cycle(prompts), num))
    mine = [one for one in contenders if isinstance(one, Ours)]
    peers = [one for one in contenders if not isinstance(one, Ours)]
    found: dict[str, list[Sample]] = {one.name: [] for one in contenders}
    for i in range(0, num, batch):
        group = padded[i : i + batch]
        told(description=f"{where}: {', '.join(one.name for one in mine)}")
        for own, sample in zip(mine, contend.together(mine, group, most), strict=True):
            found[own.name].append(sample)
        for peer in peers:
            told(description=f"{where}: {peer.name}")
            found[peer.name].append(peer.run(group, most))
    return {name: _joined(samples) for name, samples in found.items()}


def _joined(samples: list[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    counters: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    return Sample(
        sum(s.tokens for s in samples), sum(s.seconds for s in samples),
        report.middle(s.first_token for s in samples), report.middle(s.per_token for s in samples), counters,
    )  # fmt: skip


def _prompts(engine: Engine, plan: Plan) -> dict[str, list[list[int]]]:
    """Token ids by task."""
    if plan.synthetic is not None:
        num = max(plan.batches) * (plan.limit or 1)
        made = workload.synthetic(num, plan.synthetic, engine.loaded.arch.vocab)
        return {"synthetic": [list(question.token_ids) for question in made]}
    intake, found = StepLoop(engine).intake, dict[str, list[list[int]]]()
    for question in workload.read(plan.workload, limit=plan.limit, tasks=plan.tasks):
        prompt = intake.chat_prompt([{"role": "user", "content": question.text}])
        ids = intake.check(prompt, SamplingParams(max_tokens=1)).token_ids
        found.setdefault(question.task, []).append(list(ids))
    return found


def _peers(console: Console, mine: Sequence[Contender], config: EngineConfig) -> Iterator[Contender]:
    engine = next(c.engine for c in mine if isinstance(c, Ours))
    source = resolve(config.model, revision=config.revision)
    dtype = next(engine.runner.model.parameters()).dtype
    eos = set(engine.loaded.eos_ids)
    yield contend.Transformers(str(source.path), dtype, engine.device, eos, min(eos, default=0))
    others: list[tuple[str, Callable[[], Contender]]] = [
        ("vllm", lambda: contend.VLLM(str(source.path), str(dtype).removeprefix("torch.")))
    ]
    if source.gguf is not None and engine.device.type == "cpu":
        others.append(("llama_cpp", lambda: contend.LlamaCpp(str(source.gguf), engine.max_model_len)))
    for name, make in others:
        if contend.installed(name):
            try:
                yield make()
            except Exception as error:
                console.print(f"[yellow]{name} is installed but does not start ({error}); left out[/]")


def _overhead(console: Console, loaded: Loaded, config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """`decode` with mismatches injected at each rate, against unverified decoding."""
    batch = plan.batches[0]
    contenders: list[Contender] = [*contend.ours(loaded, config, ["unverified"], 0.0, None)]
    for rate in plan.inject:
        chosen, make = replace(config, proposer="decode"), contend.injecting(rate)
        contenders.append(contend.timed(f"{rate:g}", loaded, chosen, make))
    first = next(c.engine for c in contenders if isinstance(c, Ours))
    ceiling = _ceiling(console, config, first)
    cells = _measure(console, contenders, _prompts(first, plan), replace(plan, batches=(batch,)))
    base = report.mean_rate(cells, "unverified", batch)
    points = []
    for rate in plan.inject:
        mine = [cell for cell in cells if cell.contender == f"{rate:g}"]
        guessed = sum(cell.total("guessed") for cell in mine)
        lost = sum(cell.total("rolled_back") for cell in mine) / guessed if guessed else 0.0
        points.append((rate, report.mean_rate(cells, f"{rate:g}", batch) / base, lost))
    console.print(report.table(cells, "unverified"))
    picture = plan.out / "overhead.png"
    title = f"{config.model}, batch {batch}, N = {config.draft_tokens}"
    _draw(console, picture, lambda: report.plot_overhead(points, picture, title))
    curve = [{"mismatch_rate": r, "relative_throughput": t, "recomputed_share": s} for r, t, s in points]
    return _last(config, plan, ceiling, first) | {"overhead": curve}


def _timeline(console: Console, loaded: Loaded, config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """`skip` by itself over the tasks one after the other: its phases, as SWIFT draws them."""
    engine = Engine(loaded, replace(config, proposer="skip"))
    ceiling = _ceiling(console, config, engine)
    with console.status("answering task after task …"):
        line = timeline.record(engine, _prompts(engine, plan), plan.batches[0], plan.max_tokens)
    for event in line.events:
        chosen = LayerSet(frozenset(event["set"]["attention"]), frozenset(event["set"]["mlp"]))
        console.print(
            f"{event['tokens']:6d} tokens  {event['event']:<10}  right {event['rate']:.0%}, "
            f"{event['score']:.1f} tokens/s promised, without {chosen}"
        )
    console.print(f"search: {line.search['rounds']} rounds, {line.search['share']:.1%} of the time")
    picture = plan.out / "timeline.png"
    layers = len(loaded.arch.layers)
    title = f"{config.model}, {_dtype(engine)}, {_cpu()}, batch {plan.batches[0]}"
    _draw(console, picture, lambda: timeline.plot(line, picture, title, layers))
    return _last(config, plan, ceiling, engine) | {"timeline": line.as_json()}


def _draw(console: Console, path: Path, draw: Callable[[], None]) -> None:
    """A picture, or a line that says what it needs: the numbers are not lost for want of it."""
    try:
        draw()
        console.print(f"picture: {path}")
    except MachineError as error:
        console.print(f"[yellow]no picture: {error}[/]")


def _ceiling(console: Console, config: EngineConfig, engine: Engine) -> dict[str, float]:
    """What no pass can be shorter than, told first.

    Reading the weights once, at the speed of a copy on this machine now.
    """
    linears = [m for m in engine.runner.model.modules() if isinstance(m, FrameLinear)]
    sizes = {id(m.packed or m): m.weight.nbytes if m.packed is None else m.packed.num_bytes for m in linears}
    size = sum(sizes.values())
    source = torch.ones(64 * 2**20, dtype=torch.float32, device=engine.device)
    target, best = torch.empty_like(source), 1e9
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    speed = 2 * source.nbytes / best
    shortest = 1e3 * size / speed
    console.print(
        f"{config.model}, {_dtype(engine)}, {engine.device.type}; {engine.linears} linears read "
        f"{size / 1e6:.0f} MB a pass; at the {speed / 1e9:.1f} GB/s of a copy no pass is shorter than "
        f"{shortest:.1f} ms"
    )
    return {"bytes_per_pass": float(size), "gb_per_s": speed / 1e9, "ms_per_pass": shortest}


def _last(config: EngineConfig, plan: Plan, ceiling: dict[str, float], engine: Engine) -> dict[str, Any]:
    return {
        "model": config.model, "dtype": _dtype(engine), "device": engine.device.type, "machine": _cpu(),
        "torch": torch.__version__, "transformers": version("transformers"),
        "threads": torch.get_num_threads(), "contract": engine.contract.id,
        "compile": engine.runner.compiled, "frame_rows": engine.frame_rows, "linears": engine.linears,
        "max_tokens": plan.max_tokens, "repeats": plan.repeats, "verified": plan.verified,
        "ceiling": ceiling,
    }  # fmt: skip


def _dtype(engine: Engine) -> str:
    return str(next(engine.runner.model.parameters()).dtype).removeprefix("torch.")


def _cpu() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def as_line(found: dict[str, Any]) -> str:
    """The last line."""
    return json.dumps(found)


__all__ = ["Plan", "as_line", "bench"]
