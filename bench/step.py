"""Where a step goes: the host's parts by the clock, and the device's kernels. Last line: JSON.

    python bench/step.py                       # 64 live sequences on a card: the host's parts
    python bench/step.py --profile             # and the device's kernels, beside them in one picture
    python bench/step.py --draw bench-out/step.json
    python bench/step.py --device cpu          # a tiny shape: tries the script, measures nothing

8B shape and random bf16 weights, as in bench/h200.py. The engine is watched from outside: its methods are
wrapped while the script looks and put back after. A part's time is its own, without what it calls. The
profile is another run of the same loop, since a profiler slows the host: its shares are of its own steps.
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
from kernels import Kernel, groups, labelled, recorded  # noqa: E402
from loads import Load, replaced  # noqa: E402
from samewise.bench.report import pyplot  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.draft import decode  # noqa: E402
from samewise.engine import Engine  # noqa: E402
from samewise.errors import MachineError  # noqa: E402
from samewise.model import fused_layer as layer  # noqa: E402
from samewise.model.linear import FrameLinear  # noqa: E402
from samewise.verify import verifier as verify  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Found = dict[str, Any]


class Piece(NamedTuple):
    """An uninterrupted stretch of one part, in seconds by the host's clock."""

    part: str
    begin: float
    end: float


class Parts:
    """What the host is doing, moment by moment: whoever was called last, until it returns."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._stack: list[str] = []
        self._since = 0.0

    def turn(self, part: str | None) -> None:
        """Enter a part, or with None leave the one that is on."""
        now = time.perf_counter()
        if self._stack:
            self.pieces.append(Piece(self._stack[-1], self._since, now))
        if part is None:
            self._stack.pop()
        else:
            self._stack.append(part)
        self._since = now

    def wrap(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that is this part."""

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.turn(part)
                try:
                    return method(*args, **kwargs)
                finally:
                    self.turn(None)

            return call

        return make


@contextmanager
def watching(engine: Engine) -> Iterator[Parts]:
    """The loop's parts, told apart for as long as the block lasts."""
    parts, cuda = Parts(), engine.device.type == "cuda"
    scheduler, verifier, runner = type(engine.scheduler), type(engine.verifier), type(engine.runner)
    named: list[tuple[Any, str, str]] = [
        (type(engine), "step", "rest"),
        (scheduler, "admit", "admit"),
        (scheduler, "asks", "asks"),
        (type(engine.proposer), "propose", "propose"),
        (type(engine.proposer), "observe", "propose"),
        (scheduler, "extend", "propose"),
        (scheduler, "spans", "spans"),
        (scheduler, "spans_ahead", "spans"),
        (runner, "stage_frame", "pack"),
        (decode, "pack_fast", "pack"),
        (verifier, "run", "launch"),
        (
            runner,
            "frame",
            "launch" if cuda else "frame",
        ),  # where the device is the host, it is the work itself
        (runner, "fast", "launch" if cuda else "fast pass"),
        (type(engine.parts.sampler), "sample", "launch" if cuda else "sampler"),
        (type(engine.fast), "propose", "fast path"),
        (verify.FrameInFlight, "verdicts", "judge"),
        (torch.cuda.Event, "synchronize", "wait"),
        (scheduler, "commit", "commit"),
        (type(engine), "_publish", "deltas"),
    ]
    with ExitStack() as patches:
        seen = set()
        for owner, name, part in named:
            if (owner, name) not in seen:  # a proposer may be of the fast path's own type
                patches.enter_context(replaced(owner, name, parts.wrap(part)))
            seen.add((owner, name))
        yield parts


def generating(engine: Engine, args: argparse.Namespace) -> Load:
    """So many sequences past their prompts."""
    rng, load = random.Random(0), Load(engine)
    verified = [(i + 1) * args.verified // 100 > i * args.verified // 100 for i in range(args.live)]
    most = engine.max_model_len - args.prompt
    asked = load.ask(
        rng, args.live, args.prompt, most, verified if args.verified < 100 else [True] * args.live
    )
    while load.waiting(asked):
        load.step()
    for _ in range(8):
        load.step()
    return load


def host(engine: Engine, load: Load, steps: int) -> tuple[Found, list[Piece]]:
    """Milliseconds per step of every part."""
    with watching(engine) as parts:
        began, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += load.step()
        wall = time.perf_counter() - began
    spent: dict[str, float] = {}
    for piece in parts.pieces:
        spent[piece.part] = spent.get(piece.part, 0.0) + (piece.end - piece.begin) * 1e3 / steps
    spent["between steps"] = wall * 1e3 / steps - sum(spent.values())
    ms = dict(sorted(spent.items(), key=lambda item: -item[1]))
    found = {"step_ms": wall * 1e3 / steps, "tokens_per_step": tokens / steps, "host_ms": ms}
    return found, parts.pieces


def profile(engine: Engine, load: Load, steps: int) -> tuple[Found, list[Piece], list[Kernel]]:
    """The same loop under the profiler: kernels by group, gaps between them, and the host beside them."""
    with ExitStack() as block:
        if engine.device.type == "cpu":  # native kernels are called past torch, which would not see them
            for owner, name, label in (
                (FrameLinear, "forward", "samewise::linear"),
                (type(engine.runner.kernel), "__call__", "samewise::attention"),
                (layer.FusedForward, "__call__", "samewise::layer"),
                (type(engine.parts.sampler), "sample", "samewise::sampler"),
            ):
                block.enter_context(replaced(owner, name, labelled(label)))
        parts = block.enter_context(watching(engine))
        kernels = block.enter_context(recorded(engine.device))
        for _ in range(steps):
            load.step()
    found = kernels()
    first, last = min(k.begin for k in found), max(k.end for k in found)
    shares = groups(found)
    return (
        {
            "profiled_steps": steps,
            "profiled_step_ms": (last - first) * 1e3 / steps,
            "device_ms": {name: seconds * 1e3 / steps for name, seconds in shares.items()},
            "idle_share": shares.get("idle", 0.0) / (last - first),
        },
        parts.pieces,
        found,
    )


# ---- the picture


def timeline(pieces: list[Any], origin: float, window: float) -> list[list[Any]]:
    """[name, begin, length] in milliseconds from the origin, within the window."""
    inside = [p for p in pieces if p[2] > origin and p[1] < origin + window]
    return [[p[0], (p[1] - origin) * 1e3, (p[2] - p[1]) * 1e3] for p in inside]


def shown(pieces: list[Piece], kernels: list[Kernel], steps: int, shows: int) -> Found:
    """The last few steps, host and device by one clock."""
    begin, end = pieces[0].begin, pieces[-1].end
    window = (end - begin) / steps * min(shows, steps)
    origin = max(begin, end - window)
    lanes = {"host": timeline(pieces, origin, window)}
    if kernels:
        lanes["device"] = timeline([(k.group, k.begin, k.end) for k in kernels], origin, window)
    return {"window_ms": window * 1e3, "lanes": lanes}


def draw(found: Found, path: Path) -> None:
    """Host and device over a few steps; below, what share of a step everything has."""
    plt = pyplot()
    lanes = found["shown"]["lanes"]
    bars = {"host": found["host_ms"]} | ({"device": found["device_ms"]} if "device_ms" in found else {})
    figure, (above, below) = plt.subplots(2, 1, figsize=(13, 6.5), height_ratios=[1, 1.2])
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
    above.set_xlim(0, found["shown"]["window_ms"])
    above.set_xlabel("milliseconds")
    above.set_title(
        f"{found['device']}, {found['shape']}, {found['live']} live, context {found['prompt']}, "
        f"{found['verified']}% verified: {found['step_ms']:.2f} ms a step"
    )
    for row, (lane, bar) in enumerate(reversed(bars.items())):
        left, whole = 0.0, sum(bar.values())
        for name, ms in bar.items():
            below.barh(row, ms, left=left, color=colors[name], edgecolor="#888888", linewidth=0.4, height=0.6)
            if ms > 0.05 * whole:
                label = f"{name}\n{ms:.2f} ms"
                below.text(left + ms / 2, row, label, ha="center", va="center", fontsize="x-small")
            left += ms
        below.text(0, row + 0.34, f"{lane}: {whole:.2f} ms", fontsize="small")
    below.set_yticks([])
    below.set_ylim(-0.5, len(bars) - 0.2)
    below.set_xlabel("milliseconds per step")
    marks = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colors[n], edgecolor="#888888", linewidth=0.4) for n in names
    ]
    figure.legend(marks, names, ncols=8, fontsize="x-small", loc="lower center")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- the script


def build(args: argparse.Namespace) -> tuple[Engine, Found]:
    """The engine, and the conditions."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    make = shapes.shape_8b if cuda else shapes.shape_tiny
    config = make(args.layers) if args.layers else make()
    longest = args.prompt + 8 * (args.steps + args.profile_steps) + 256
    settings = EngineConfig(
        model="random", device=args.device, dtype=str(dtype).removeprefix("torch."), proposer=args.proposer,
        max_model_len=min(longest, config.max_position_embeddings), max_num_seqs=args.live,
        kv_memory=0.7 if cuda else 2**28, enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(shapes.random_on(config, device, dtype), settings)
    told = {
        "shape": f"{'8B' if cuda else 'tiny'}, {config.num_hidden_layers} layers",
        "dtype": settings.dtype,
    }
    asked = {name: getattr(args, name) for name in ("live", "prompt", "steps", "proposer", "verified")}
    return engine, shapes.conditions(device) | told | asked | {"contract": engine.contract.id}


def picture(found: Found, out: Path) -> str:
    """Draw, or say why not."""
    try:
        draw(found, out / "step.png")
    except MachineError as error:
        return f"no picture: {error}; later, --draw {out / 'step.json'}"
    return f"picture: {out / 'step.png'}"


def tell(found: Found) -> None:
    """The parts, the largest first."""
    print(f"{found['live']} live, {found['tokens_per_step']:.1f} tokens a step: {found['step_ms']:.3f} ms")
    for name, ms in found["host_ms"].items():
        print(f"  host    {name:<14}{ms:9.3f} ms  {ms / found['step_ms']:6.1%}")
    whole = found.get("profiled_step_ms", 0.0)
    for name, ms in found.get("device_ms", {}).items():
        print(f"  device  {name:<14}{ms:9.3f} ms  {ms / whole:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--profile", action="store_true", help="the device's kernels too")
    parser.add_argument("--live", type=int, default=64)
    parser.add_argument("--prompt", type=int, help="tokens; 1024 on a card")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile-steps", type=int, default=6)
    parser.add_argument("--shown", type=int, default=4, help="steps in the picture's timeline")
    parser.add_argument("--verified", type=int, default=100, help="per cent of the sequences")
    parser.add_argument("--proposer", default="none")
    parser.add_argument("--layers", type=int, help="fewer layers, to try things out")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="draw what an earlier run wrote, and no more"
    )
    args = parser.parse_args()
    if args.draw:
        print(picture(json.loads(args.draw.read_text()), args.draw.parent))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tries the script with a tiny shape")
    args.prompt = args.prompt or (1024 if args.device == "cuda" else 24)
    engine, found = build(args)
    load = generating(engine, args)
    seen, pieces = host(engine, load, args.steps)
    found |= seen
    kernels: list[Kernel] = []
    steps = args.steps
    if args.profile:
        seen, pieces, kernels = profile(engine, load, args.profile_steps)
        found, steps = found | seen, args.profile_steps
    load.drop()
    found["shown"] = shown(pieces, kernels, steps, args.shown)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(found))
    tell(found)
    print(picture(found, args.out))
    print(json.dumps({name: value for name, value in found.items() if name != "shown"}))


if __name__ == "__main__":
    main()
