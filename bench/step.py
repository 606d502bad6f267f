"""The time of a step by part: of the host by its clock, of the device by kernels. Last line: JSON.

    python bench/step.py                       # 64 live sequences on a GPU: the host's parts
    python bench/step.py --profile             # also the device's kernels, in the same picture
    python bench/step.py --draw bench-out/step.json
    python bench/step.py --device cpu          # a tiny shape, to test the script

8B shape and random bf16 weights, as in bench/h200.py. Methods of the engine are wrapped while it is measured.
A part's time does not include the parts it calls. The profile is another run of the same loop, since a
profiler slows the host: its shares are of its own steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

import shapes  # noqa: E402
from kernel_times import Kernel, labelled, recorded, seconds_by_group  # noqa: E402
from loads import Load, replaced  # noqa: E402
from samewise.bench.report import pyplot  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.draft import fast_passes  # noqa: E402
from samewise.engine import Engine  # noqa: E402
from samewise.errors import MachineError  # noqa: E402
from samewise.model import fused_layer as layer  # noqa: E402
from samewise.model import fused_stack as stack  # noqa: E402
from samewise.model.linear import FrameLinear  # noqa: E402
from samewise.verify import verifier as verify  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Figures = dict[str, Any]


class Piece(NamedTuple):
    """A time during which one part ran, in seconds by the host's clock."""

    part: str
    begin: float
    end: float


class PartTimer:
    """Times parts of the host's work: a part runs until it returns or calls another part."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._stack: list[str] = []
        self._since = 0.0

    def switch(self, part: str | None) -> None:
        """Enter a part, or with None leave the current one."""
        now = time.perf_counter()
        if self._stack:
            self.pieces.append(Piece(self._stack[-1], self._since, now))
        if part is None:
            self._stack.pop()
        else:
            self._stack.append(part)
        self._since = now

    def wrap(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: calls of the function are this part."""

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.switch(part)
                try:
                    return method(*args, **kwargs)
                finally:
                    self.switch(None)

            return call

        return make


@contextmanager
def timed_parts(engine: Engine) -> Iterator[PartTimer]:
    """Time the parts of the engine's loop within the block."""
    timer, cuda = PartTimer(), engine.device.type == "cuda"
    scheduler, verifier, runner = type(engine.scheduler), type(engine.verifier), type(engine.runner)
    methods: list[tuple[Any, str, str]] = [  # owner, name, part
        (type(engine), "step", "rest"),
        (scheduler, "admit", "admit"),
        (scheduler, "asks", "asks"),
        (type(engine.proposer), "propose", "propose"),
        (type(engine.proposer), "observe", "propose"),
        (scheduler, "extend", "propose"),
        (scheduler, "spans", "spans"),
        (scheduler, "spans_ahead", "spans"),
        (runner, "stage_frame", "pack"),
        (fast_passes, "pack_fast", "pack"),
        (verifier, "run", "launch"),
        (runner, "frame", "launch" if cuda else "frame"),  # on a CPU the call computes the frame
        (runner, "fast", "launch" if cuda else "fast pass"),
        (type(engine.parts.sampler), "sample", "launch" if cuda else "sampler"),
        (type(engine.fast), "propose", "fast path"),
        (verify.FrameInFlight, "verdicts", "judge"),
        (torch.cuda.Event, "synchronize", "wait"),
        (scheduler, "commit", "commit"),
        (type(engine), "_account", "deltas"),
    ]
    with ExitStack() as patches:
        wrapped = set()
        for owner, name, part in methods:
            if (owner, name) not in wrapped:  # the proposer may have the type of the fast path
                patches.enter_context(replaced(owner, name, timer.wrap(part)))
            wrapped.add((owner, name))
        yield timer


def decoding(engine: Engine, args: argparse.Namespace) -> Load:
    """A load of `args.live` sequences whose prompts are prefilled."""
    rng, load = random.Random(0), Load(engine)
    verified = [(i + 1) * args.verified // 100 > i * args.verified // 100 for i in range(args.live)]
    load.prefill(load.submit(rng, args.prompt, engine.max_model_len - args.prompt, verified))
    for _ in range(8):
        load.step()
    return load


def measure_host(engine: Engine, load: Load, steps: int) -> tuple[Figures, list[Piece]]:
    """Milliseconds per step of every part."""
    with timed_parts(engine) as timer:
        began, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += load.step()
        wall = time.perf_counter() - began
    ms: dict[str, float] = {}
    for piece in timer.pieces:
        ms[piece.part] = ms.get(piece.part, 0.0) + (piece.end - piece.begin) * 1e3 / steps
    ms["between steps"] = wall * 1e3 / steps - sum(ms.values())
    by_size = dict(sorted(ms.items(), key=lambda item: -item[1]))
    figures = {"step_ms": wall * 1e3 / steps, "tokens_per_step": tokens / steps, "host_ms": by_size}
    return figures, timer.pieces


def profile(engine: Engine, load: Load, steps: int) -> tuple[Figures, list[Piece], list[Kernel]]:
    """The same loop under the profiler: kernels by group, gaps between them, and the host's parts."""
    with ExitStack() as block:
        if engine.device.type == "cpu":  # torch's profiler does not see calls of native kernels
            for owner, name, label in (
                (FrameLinear, "forward", "samewise::linear"),
                (type(engine.runner.kernel), "__call__", "samewise::attention"),
                (layer.FusedForward, "__call__", "samewise::layer"),
                (stack.StackedForward, "__call__", "samewise::layer"),
                (type(engine.parts.sampler), "sample", "samewise::sampler"),
            ):
                block.enter_context(replaced(owner, name, labelled(label)))
        timer = block.enter_context(timed_parts(engine))
        result = block.enter_context(recorded(engine.device))
        for _ in range(steps):
            load.step()
    kernels = result()
    first, last = min(k.begin for k in kernels), max(k.end for k in kernels)
    seconds = seconds_by_group(kernels)
    return (
        {
            "profiled_steps": steps,
            "profiled_step_ms": (last - first) * 1e3 / steps,
            "device_ms": {group: spent * 1e3 / steps for group, spent in seconds.items()},
            "idle_share": seconds.get("idle", 0.0) / (last - first),
        },
        timer.pieces,
        kernels,
    )


# ---- the picture


def timeline(pieces: list[Any], origin: float, window: float) -> list[list[Any]]:
    """[name, begin, length] in milliseconds from the origin, within the window."""
    inside = [p for p in pieces if p[2] > origin and p[1] < origin + window]
    return [[p[0], (p[1] - origin) * 1e3, (p[2] - p[1]) * 1e3] for p in inside]


def last_steps(pieces: list[Piece], kernels: list[Kernel], steps: int, num_shown: int) -> Figures:
    """The last few of `steps` steps, host and device by one clock."""
    begin, end = pieces[0].begin, pieces[-1].end
    window = (end - begin) / steps * min(num_shown, steps)
    origin = max(begin, end - window)
    lanes = {"host": timeline(pieces, origin, window)}
    if kernels:
        lanes["device"] = timeline([(k.group, k.begin, k.end) for k in kernels], origin, window)
    return {"window_ms": window * 1e3, "lanes": lanes}


def draw(figures: Figures, path: Path) -> None:
    """Host and device over a few steps; below, the mean time per step of every part and group."""
    plt = pyplot()
    lanes = figures["shown"]["lanes"]
    bars = {"host": figures["host_ms"]} | ({"device": figures["device_ms"]} if "device_ms" in figures else {})
    picture, (above, below) = plt.subplots(2, 1, figsize=(13, 6.5), height_ratios=[1, 1.2])
    names = list(dict.fromkeys(name for bar in bars.values() for name in bar))
    names += [
        n for n in dict.fromkeys(piece[0] for lane in lanes.values() for piece in lane) if n not in names
    ]
    plain = {"wait": "#d9d9d9", "idle": "white", "between steps": "#f0f0f0", "rest": "#bbbbbb"}
    palette = iter([*plt.get_cmap("tab20").colors, *plt.get_cmap("Set3").colors])
    colors = {name: plain[name] if name in plain else next(palette) for name in names}
    for row, (lane, pieces) in enumerate(reversed(lanes.items())):
        for name in dict.fromkeys(piece[0] for piece in pieces):
            where = [(begin, length) for part, begin, length in pieces if part == name]
            above.broken_barh(where, (row - 0.35, 0.7), facecolors=colors[name], linewidth=0)
        above.text(0, row + 0.38, lane, fontsize="small")
    above.set_yticks([])
    above.set_ylim(-0.5, len(lanes) - 0.3)
    above.set_xlim(0, figures["shown"]["window_ms"])
    above.set_xlabel("milliseconds")
    above.set_title(
        f"{figures['device']}, {figures['shape']}, {figures['live']} live, context {figures['prompt']}, "
        f"{figures['verified']}% verified: {figures['step_ms']:.2f} ms a step"
    )
    for row, (lane, bar) in enumerate(reversed(bars.items())):
        left, total = 0.0, sum(bar.values())
        for name, ms in bar.items():
            below.barh(row, ms, left=left, color=colors[name], edgecolor="#888888", linewidth=0.4, height=0.6)
            if ms > 0.05 * total:
                label = f"{name}\n{ms:.2f} ms"
                below.text(left + ms / 2, row, label, ha="center", va="center", fontsize="x-small")
            left += ms
        below.text(0, row + 0.34, f"{lane}: {total:.2f} ms", fontsize="small")
    below.set_yticks([])
    below.set_ylim(-0.5, len(bars) - 0.2)
    below.set_xlabel("milliseconds per step")
    marks = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colors[n], edgecolor="#888888", linewidth=0.4) for n in names
    ]
    picture.legend(marks, names, ncols=8, fontsize="x-small", loc="lower center")
    picture.tight_layout(rect=(0, 0.08, 1, 1))
    picture.savefig(path, dpi=120)
    plt.close(picture)


# ---- the script


def build(args: argparse.Namespace) -> tuple[Engine, Figures]:
    """The engine and the conditions of the measurement."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    make = shapes.shape_8b if cuda else shapes.shape_tiny
    config = make(args.layers) if args.layers else make()
    max_len = args.prompt + 8 * (args.steps + args.profile_steps) + 256
    settings = EngineConfig(
        model="random", device=args.device, dtype=str(dtype).removeprefix("torch."), proposer=args.proposer,
        max_model_len=min(max_len, config.max_position_embeddings), max_num_seqs=args.live,
        kv_memory=0.7 if cuda else 2**28, enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(shapes.random_on(config, device, dtype), settings)
    model = {
        "shape": f"{'8B' if cuda else 'tiny'}, {config.num_hidden_layers} layers",
        "dtype": settings.dtype,
    }
    load = {name: getattr(args, name) for name in ("live", "prompt", "steps", "proposer", "verified")}
    return engine, shapes.conditions(device) | model | load | {"contract": engine.contract.id}


def save_picture(figures: Figures, out: Path) -> str:
    """Draw to `out`/step.png; returns a line that says where, or why there is none."""
    try:
        draw(figures, out / "step.png")
    except MachineError as error:
        return f"no picture: {error}; later, --draw {out / 'step.json'}"
    return f"picture: {out / 'step.png'}"


def print_parts(figures: Figures) -> None:
    """The parts, the largest first."""
    print(
        f"{figures['live']} live, {figures['tokens_per_step']:.1f} tokens a step: {figures['step_ms']:.3f} ms"
    )
    for name, ms in figures["host_ms"].items():
        print(f"  host    {name:<14}{ms:9.3f} ms  {ms / figures['step_ms']:6.1%}")
    profiled = figures.get("profiled_step_ms", 0.0)
    for name, ms in figures.get("device_ms", {}).items():
        print(f"  device  {name:<14}{ms:9.3f} ms  {ms / profiled:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--profile", action="store_true", help="the device's kernels too")
    parser.add_argument("--live", type=int, default=64)
    parser.add_argument("--prompt", type=int, help="tokens; 1024 on a GPU")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile-steps", type=int, default=6)
    parser.add_argument("--shown", type=int, default=4, help="steps in the picture's timeline")
    parser.add_argument("--verified", type=int, default=100, help="percent of the sequences")
    parser.add_argument("--proposer", default="none")
    parser.add_argument("--layers", type=int, help="fewer layers, to try things out")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw the figures of an earlier run")
    args = parser.parse_args()
    if args.draw:
        print(save_picture(json.loads(args.draw.read_text()), args.draw.parent))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tests the script with a tiny shape")
    args.prompt = args.prompt or (1024 if args.device == "cuda" else 24)
    engine, figures = build(args)
    load = decoding(engine, args)
    of_host, pieces = measure_host(engine, load, args.steps)
    figures |= of_host
    kernels: list[Kernel] = []
    steps = args.steps
    if args.profile:
        of_device, pieces, kernels = profile(engine, load, args.profile_steps)
        figures, steps = figures | of_device, args.profile_steps
    load.abort()
    figures["shown"] = last_steps(pieces, kernels, steps, args.shown)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(figures))
    print_parts(figures)
    print(save_picture(figures, args.out))
    print(json.dumps({name: value for name, value in figures.items() if name != "shown"}))


if __name__ == "__main__":
    main()
