"""Run the benchmark: measure, print tables, draw a picture, return the last line's contents."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from samewise.bench import engines, first_token, peers, report, timeline, workload
from samewise.bench.engines import UNVERIFIED, EngineBackend
from samewise.bench.measurement import Backend, Measurement, Prompts, joined
from samewise.bench.options import PEERS, BenchOptions
from samewise.bench.peers import LivePeers
from samewise.bench.report import Cell
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import CallerError, MachineError
from samewise.execute.load import Loaded, load
from samewise.llm.step_loop import StepLoop
from samewise.model.linear import FrameLinear
from samewise.model.resolve import resolve
from samewise.params import SamplingParams
from samewise.types import LayerSet

WARM_UP_TOKENS = 8
"""Tokens per request of the first, unmeasured run, which compiles and reads whatever is used first."""


def bench(console: Console, config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    """Measure, print and draw; returns the contents of the last line."""
    config = replace(config, enable_prefix_caching=False, kv_memory=config.kv_memory or "1GiB")
    loaded = load(config)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inject:
        return _overhead(console, loaded, config, options)
    if options.timeline:
        return _timeline(console, loaded, config, options)
    with ExitStack() as started:
        return _compare(console, loaded, config, options, started)


def _compare(
    console: Console, loaded: Loaded, config: EngineConfig, options: BenchOptions, started: ExitStack
) -> dict[str, Any]:
    """Every proposer beside every peer. `started` closes the peers."""
    with console.status("starting engines and peers …"):
        ours = engines.engine_backends(
            loaded, config, options.proposers, verified=options.verified, rate=options.rate,
            tuning=options.tuning, ignore_eos=options.ignore_eos,
        )  # fmt: skip
        first = ours[0].engine
        prompts = _prompts(first, options)
        peers_started = []
        for peer in _peers(console, first, config, options, prompts):
            started.callback(peer.close)
            peers_started.append(peer)
        others = LivePeers(peers_started, lambda text: console.print(f"[yellow]{text}[/]", highlight=False))
    ceiling = _ceiling(console, config, first)
    for peer in others:
        console.print(f"{peer.name}: {peer.about}", highlight=False)
    cells = _measure(console, ours, others, prompts, options)
    console.print(report.table(cells, next(iter(others), ours[0]).name))
    console.print(report.speculation_table(cells))
    if "auto" in options.proposers and len(options.proposers) > 1:
        console.print(report.auto_table(cells))
    picture, title = options.out / "bench.png", f"{config.model}, {_dtype(first)}, {_machine()}"
    _draw(console, picture, lambda: report.plot(cells, picture, title))
    auto = [
        {"batch": batch, "task": task, "best": best, "auto_over_best": ratio}
        for (batch, task), (best, ratio) in report.auto_ratios(cells).items()
    ]
    first_tokens = _first_tokens(console, ours, others, prompts, options)
    results = {
        "results": [cell.as_json() for cell in cells], "auto": auto, "first_token": first_tokens,
        "peers": {peer.name: peer.about for peer in others},
    }  # fmt: skip
    return _conditions(config, options, ceiling, first) | results


def _measure(
    console: Console,
    ours: Sequence[EngineBackend],
    others: LivePeers,
    prompts: dict[str, list[list[int]]],
    options: BenchOptions,
) -> list[Cell]:
    """Every backend on every task at every batch size; interleaved, so that disturbances hit all alike."""
    backends: list[Backend] = [*ours, *others]
    run_one = _run_with(others)
    runs: dict[tuple[int, str, str], list[Measurement]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        total = options.repeats * len(options.batches) * len(prompts) * len(backends)
        bar = progress.add_task("", total=total)
        for backend in backends:
            progress.update(bar, description=f"warming up {backend.name}")
            run_one(backend, [next(iter(prompts.values()))[0]] * max(options.batches), WARM_UP_TOKENS)
        for _ in range(options.repeats):
            for batch in options.batches:
                for task, questions in prompts.items():
                    show = partial(progress.update, bar)
                    where = f"batch {batch}, {task}"
                    for name, run in _run_groups(
                        ours, others, _groups(questions, batch), options.max_tokens, where, show
                    ).items():
                        runs.setdefault((batch, task, name), []).append(run)
                    progress.advance(bar, len(backends))
    measured = {backend.name for backend in (*ours, *others)}  # without peers that failed meanwhile
    return [
        Cell(name, task, batch, tuple(of_cell))
        for (batch, task, name), of_cell in runs.items()
        if name in measured
    ]


def _run_with(others: LivePeers) -> Callable[[Backend, Prompts, int], Measurement | None]:
    """How a backend is run: a peer may fail, an engine of ours must not."""

    def run(backend: Backend, prompts: Prompts, max_tokens: int) -> Measurement | None:
        if isinstance(backend, peers.Peer):
            return others.run(backend, prompts, max_tokens)
        return backend.run(prompts, max_tokens)

    return run


def _groups(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """All prompts in groups of `batch`, the last one filled up from the start."""
    num = -(-len(prompts) // batch) * batch
    padded = list(islice(cycle(prompts), num))
    return [padded[i : i + batch] for i in range(0, num, batch)]


def _run_groups(
    ours: Sequence[EngineBackend],
    others: LivePeers,
    groups: list[list[list[int]]],
    max_tokens: int,
    where: str,
    show: Callable[..., None],
) -> dict[str, Measurement]:
    """Each group to all engines in turns, then to each peer. A peer that fails has no measurement."""
    runs: dict[str, list[Measurement]] = {backend.name: [] for backend in (*ours, *others)}
    for group in groups:
        show(description=f"{where}: {', '.join(backend.name for backend in ours)}")
        for backend, run in zip(ours, engines.run_in_turns(ours, group, max_tokens), strict=True):
            runs[backend.name].append(run)
        for peer in others:
            show(description=f"{where}: {peer.name}")
            if (measured := others.run(peer, group, max_tokens)) is not None:
                runs[peer.name].append(measured)
    return {name: joined(parts) for name, parts in runs.items() if len(parts) == len(groups)}


def _prompts(engine: Engine, options: BenchOptions) -> dict[str, list[list[int]]]:
    """Token ids by task."""
    if options.synthetic is not None:
        num = max(options.batches) * (options.limit or 1)
        questions = workload.synthetic(num, options.synthetic, engine.loaded.arch.vocab)
        return {"synthetic": [list(question.token_ids) for question in questions]}
    intake, prompts = StepLoop(engine).intake, dict[str, list[list[int]]]()
    for question in workload.read(options.workload, limit=options.limit, tasks=options.tasks):
        prompt = intake.chat_prompt([{"role": "user", "content": question.text}])
        ids = intake.check(prompt, SamplingParams(max_tokens=1)).token_ids
        prompts.setdefault(question.task, []).append(list(ids))
    return prompts


def _peers(
    console: Console,
    engine: Engine,
    config: EngineConfig,
    options: BenchOptions,
    prompts: dict[str, list[list[int]]],
) -> Iterator[peers.Peer]:
    """The peers that were named; otherwise those that are installed, can read the model, and start."""
    source = resolve(config.model, revision=config.revision)
    longest = max(options.first_token, *(len(one) for questions in prompts.values() for one in questions))
    common = peers.Common(
        path=source.path, gguf=source.gguf, dtype=next(engine.runner.model.parameters()).dtype,
        device=engine.device, eos_ids=frozenset(engine.loaded.eos_ids), num_live=max(options.batches),
        max_len=longest + options.max_tokens, ignore_eos=options.ignore_eos,
    )  # fmt: skip
    for name in PEERS if options.peers is None else options.peers:
        if options.peers is None and not peers.can_run(name, common):
            continue
        try:
            yield peers.start(name, common)
        except CallerError:
            raise
        except Exception as error:
            console.print(f"[yellow]{name} is installed but does not start ({error}); left out[/]")


def _first_tokens(
    console: Console,
    ours: Sequence[EngineBackend],
    others: LivePeers,
    prompts: dict[str, list[list[int]]],
    options: BenchOptions,
) -> list[dict[str, Any]]:
    """How long a long prompt takes; nothing where requests arrive at a rate or the context is too short."""
    room = ours[0].engine.max_model_len
    if options.first_token == 0 or options.rate is not None:
        return []
    if options.first_token >= room:
        console.print(f"[yellow]a prompt of {options.first_token} tokens does not fit {room}; not timed[/]")
        return []
    questions = [prompt for of_task in prompts.values() for prompt in of_task]
    backends: list[Backend] = [*others, *ours]  # times are told over the first one's
    results = first_token.measure(
        backends, questions, options.first_token, options.repeats, _run_with(others)
    )
    console.print(first_token.table(results))
    return [one.as_json() for one in results]


def _overhead(
    console: Console, loaded: Loaded, config: EngineConfig, options: BenchOptions
) -> dict[str, Any]:
    """`decode` with mismatches injected at each rate, against unverified decoding."""
    batch = options.batches[0]
    ours = engines.engine_backends(loaded, config, [UNVERIFIED])
    for rate in options.inject:
        make = engines.decode_with_mismatches(rate)
        chosen = replace(config, proposer="decode")
        ours.append(engines.engine_backend(f"{rate:g}", loaded, chosen, make_proposer=make))
    first = ours[0].engine
    ceiling = _ceiling(console, config, first)
    cells = _measure(
        console, ours, LivePeers([], print), _prompts(first, options), replace(options, batches=(batch,))
    )
    base = report.mean_rate(cells, UNVERIFIED, batch)
    points = []
    for rate in options.inject:
        of_rate = [cell for cell in cells if cell.backend == f"{rate:g}"]
        guessed = sum(cell.total("guessed") for cell in of_rate)
        lost = sum(cell.total("rolled_back") for cell in of_rate) / guessed if guessed else 0.0
        points.append((rate, report.mean_rate(cells, f"{rate:g}", batch) / base, lost))
    console.print(report.table(cells, UNVERIFIED))
    picture = options.out / "overhead.png"
    title = f"{config.model}, batch {batch}, N = {config.draft_tokens}"
    _draw(console, picture, lambda: report.plot_overhead(points, picture, title))
    curve = [{"mismatch_rate": r, "relative_throughput": t, "recomputed_share": s} for r, t, s in points]
    return _conditions(config, options, ceiling, first) | {"overhead": curve}


def _timeline(
    console: Console, loaded: Loaded, config: EngineConfig, options: BenchOptions
) -> dict[str, Any]:
    """`skip` alone over the tasks one after the other: its phases, as the SWIFT paper draws them."""
    engine = Engine(loaded, replace(config, proposer="skip"), tuning=options.tuning)
    ceiling = _ceiling(console, config, engine)
    with console.status("answering task after task …"):
        line = timeline.record(engine, _prompts(engine, options), options.batches[0], options.max_tokens)
    for event in line.events:
        layers = LayerSet(frozenset(event["set"]["attention"]), frozenset(event["set"]["mlp"]))
        console.print(
            f"{event['tokens']:6d} tokens  {event['event']:<10}  right {event['rate']:.0%}, "
            f"{event['score']:.1f} tokens/s promised, without {layers}"
        )
    console.print(f"search: {line.search['rounds']} rounds, {line.search['share']:.1%} of the time")
    picture = options.out / "timeline.png"
    title = f"{config.model}, {_dtype(engine)}, {_machine()}, batch {options.batches[0]}"
    _draw(console, picture, lambda: timeline.plot(line, picture, title, len(loaded.arch.layers)))
    return _conditions(config, options, ceiling, engine) | {"timeline": line.as_json()}


def _draw(console: Console, path: Path, draw: Callable[[], None]) -> None:
    """Draw a picture; without matplotlib print what it needs, and keep the numbers."""
    try:
        draw()
        console.print(f"picture: {path}")
    except MachineError as error:
        console.print(f"[yellow]no picture: {error}[/]")


def _ceiling(console: Console, config: EngineConfig, engine: Engine) -> dict[str, float]:
    """Print and return the shortest possible pass: reading the linears' weights once at a copy's speed."""
    linears = [m for m in engine.runner.model.modules() if isinstance(m, FrameLinear)]
    sizes = {id(m.packed or m): m.weight.nbytes if m.packed is None else m.packed.num_bytes for m in linears}
    num_bytes, speed = sum(sizes.values()), _copy_speed(engine.device)
    shortest = 1e3 * num_bytes / speed
    console.print(
        f"{config.model}, {_dtype(engine)}, {engine.device.type}; {engine.parts.linears} linears read "
        f"{num_bytes / 1e6:.0f} MB a pass; at the {speed / 1e9:.1f} GB/s of a copy no pass is shorter than "
        f"{shortest:.1f} ms"
    )
    return {"bytes_per_pass": float(num_bytes), "gb_per_s": speed / 1e9, "ms_per_pass": shortest}


def _copy_speed(device: torch.device) -> float:
    """Bytes per second read and written by the fastest of five copies of 256 MiB."""
    source = torch.ones(64 * 2**20, dtype=torch.float32, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def _conditions(
    config: EngineConfig, options: BenchOptions, ceiling: dict[str, float], engine: Engine
) -> dict[str, Any]:
    parts = engine.parts
    return {
        "model": config.model, "dtype": _dtype(engine), "device": engine.device.type, "machine": _machine(),
        "torch": torch.__version__, "transformers": version("transformers"),
        "threads": torch.get_num_threads(), "contract": engine.contract.id,
        "compile": engine.runner.compiled, "frame_rows": parts.frame_rows, "linears": parts.linears,
        "max_tokens": options.max_tokens, "repeats": options.repeats, "verified": options.verified,
        "ceiling": ceiling,
    }  # fmt: skip


def _dtype(engine: Engine) -> str:
    return str(next(engine.runner.model.parameters()).dtype).removeprefix("torch.")


def _machine() -> str:
    """The name of the GPU, or else of the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def as_line(results: dict[str, Any]) -> str:
    """The last line of the output."""
    return json.dumps(results)


__all__ = ["as_line", "bench"]
