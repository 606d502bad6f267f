"""The time of linears on CUDA by shape, rows and tile, against the ceiling and cuBLAS. Last line: JSON.

    python bench/linear.py                              # an 8B model's linears, by the engine's own rule
    python bench/linear.py --shape 1.5b --rows 1 8 64
    python bench/linear.py --rows 8 64 128 --others     # is another tile than the rule's faster?
    python bench/linear.py --columns 16 32 64 --step 64 128 --stages 4 5 --described 0 1

As many calls as need more memory than the cache holds are captured in a graph, each with weights of its own,
and timed together. The ceiling is the longer of two times: to read the weights at the bandwidth of a copy, or
to multiply at 800 TFLOP/s. All tiles' bits are compared at every number of rows. The table before the last
line has the rule's tile, cuBLAS (where gated, with the gate's kernel) and the fastest tile that was tried.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812 - its usual name

from samewise.kernels.graph import CapturedGraph  # noqa: E402
from samewise.kernels.linear.triton import WIDE_TILES, LinearTile, gate, linear, pick_tile  # noqa: E402
from shapes import commit, copy_bandwidth, timed  # noqa: E402

FLOPS = 800e12  # per second: what large bf16 products reach on an H200
CACHE_BYTES = 3 * 50 * 2**20  # weights beyond this are not in the cache when their turn comes again
SHAPES = {
    "8b": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "1.5b": {
        "qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960),
        "head": (151936, 1536),
    },
    "0.5b": {
        "qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864),
        "head": (151936, 896),
    },
}  # fmt: skip
KNOBS = ("tile_rows", "columns", "step", "stages", "warps", "swapped", "described", "group", "ahead")
GATED = "gate_up"  # the product of which silu(gate) * up is taken


def microseconds(call: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor]) -> float:
    """The time of one call, over a graph of a call per weight."""
    device = weights[0].device

    def all_calls() -> list[torch.Tensor]:
        return [call(weight) for weight in weights]

    graph = CapturedGraph(all_calls, device)
    graph()
    return timed(graph, 15, device) * 1e3 / len(weights)


def _field(knob: str) -> str:
    """The knob's name in a LinearTile."""
    return knob.removeprefix("tile_")


def tiles_of(args: argparse.Namespace, base: LinearTile, rows: int) -> list[LinearTile]:
    """The rule's tile, every combination of the given knobs with `base` for the others, and `others`."""
    given = {name: values for name in KNOBS if (values := getattr(args, name))}
    kinds = {name: type(getattr(base, _field(name))) for name in KNOBS}
    tiles = [
        replace(base, **{_field(name): kinds[name](value) for name, value in zip(given, values, strict=True)})
        for values in itertools.product(*given.values())
    ]
    return list(dict.fromkeys([base, *tiles, *(others(base, rows) if args.others else ())]))


def others(base: LinearTile, rows: int) -> list[LinearTile]:
    """Tiles that may be faster than the rule's: a few, as each takes seconds to compile."""
    shallow = [replace(base, stages=stages) for stages in (3, 4, 5)]
    alone = WIDE_TILES if rows > 64 else WIDE_TILES[:2]
    shared = [replace(tile, stages=tile.stages // 2) for tile in alone]
    last = LinearTile(128, 256, 64, 4, 8, swapped=False) if rows > 64 else replace(base, ahead=1024)
    return [*shallow, *alone, *shared, last]


def print_fastest(report: list[dict[str, Any]]) -> None:
    """A line per linear and number of rows; the rule's tile is the first of its lines in the report."""
    by_case: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in report:
        by_case.setdefault((line["linear"], line["rows"]), []).append(line)
    print("linear    rows  ceiling     rule   cuBLAS  fastest  differ  tile (microseconds)")
    for (name, rows), lines in by_case.items():
        rule, best = lines[0], min(lines, key=lambda line: line["us"])
        tile = " ".join(f"{knob}={best[knob]}" for knob in KNOBS if best[knob] != rule[knob])
        print(
            f"{name:8} {rows:5} {rule['floor']:8.1f} {rule['us']:8.1f} {rule['torch'] + rule['gate']:8.1f} "
            f"{best['us']:8.1f} {sum(line['differ'] for line in lines):7}  {tile or 'as the rule'}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements that differ."""
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--linears", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128, 1024])
    parser.add_argument("--others", action="store_true", help="also try tiles that the rule does not name")
    for name in KNOBS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+")
    args = parser.parse_args()
    device, bandwidth = torch.device("cuda"), copy_bandwidth()
    print(f"commit {commit()}, {torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    report: list[dict[str, Any]] = []
    for name, (outputs, inputs) in SHAPES[args.shape].items():
        if args.linears and name not in args.linears:
            continue
        num = max(2, -(-CACHE_BYTES // (outputs * inputs * 2)))
        generator = torch.Generator(device).manual_seed(0)
        floats = {"generator": generator, "device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(outputs, inputs, **floats) for _ in range(num)]
        half = torch.randn(max(args.rows), inputs // 2, **floats)
        all_rows = torch.cat([half, -half], 1) + 1e-2 * torch.randn(max(args.rows), inputs, **floats)
        weights[0][:, inputs // 2 :] = weights[0][:, : inputs // 2]  # large terms cancel: order shows
        for rows in args.rows:
            x = all_rows[:rows].contiguous()
            floor = max(outputs * inputs * 2 / bandwidth, 2 * rows * outputs * inputs / FLOPS) * 1e6
            torch_us = microseconds(lambda w, x=x: F.linear(x, w), weights)
            cublas = same_bits(F.linear(x, weights[0]), linear(x, weights[0]))
            gated = name == GATED
            product = F.linear(x, weights[0])
            gate_us = microseconds(lambda _, y=product: gate(y), weights) if gated else 0.0
            print(
                f"{name:8} {rows:5} rows: ceiling {floor:7.1f}  cuBLAS {torch_us:7.1f} us, differing {cublas}"
                + f", gate {gate_us:.1f} us" * gated, flush=True,
            )  # fmt: skip
            plain = linear(all_rows, weights[0])
            expected = (gate(plain) if gated else plain)[:rows]
            base = pick_tile(rows, outputs // (2 if gated else 1), 2, gated=gated)
            for tile in tiles_of(args, base, rows):
                call = lambda w, x=x, t=tile, g=gated: linear(x, w, tile=t, gated=g)  # noqa: E731
                try:
                    differ, us = same_bits(call(weights[0]), expected), microseconds(call, weights)
                except Exception as error:  # a tile may not fit in shared memory
                    print(f"    {tile}: {type(error).__name__} {str(error)[:80]}", flush=True)
                    continue
                knobs = {knob: getattr(tile, _field(knob)) for knob in KNOBS}
                shown = " ".join(f"{k}={v}" for k, v in knobs.items())
                print(f"    {us:7.1f} us  differ {differ}  {shown}", flush=True)
                report.append({
                    "linear": name, "rows": rows, "us": us, "torch": torch_us, "gate": gate_us,
                    "floor": floor, "differ": differ, "cublas": cublas, **knobs,
                })  # fmt: skip
        del weights
        torch.cuda.empty_cache()
        print_fastest([line for line in report if line["linear"] == name])
    print(json.dumps({"linear": report}))


if __name__ == "__main__":
    main()
