"""The time of a frame on a CPU, beside the ceiling of this machine; used by frame.py.

The ceiling is the longer of two times: to read weights and KV at the speed of a copy, or to multiply at the
speed of a loop of fused multiply-adds. Both are measured on as many threads as the frame has.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.execute.load import load
from samewise.kernels.native import build
from samewise.model.linear import FrameLinear
from samewise.types import Span

COPIED_BYTES = 256 << 20  # beyond any cache
ROUNDS = 1_000_000  # of the multiply-add loop: a few milliseconds
FLOAT_BYTES = 4


def seconds_of(work: Callable[[], object], repeats: int) -> list[float]:
    """The time of each of several runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs: others' use of the machine only ever adds time."""
    return min(seconds_of(work, repeats))


def copy_speed() -> float:
    """Bytes read and written per second by a copy."""
    source, target = torch.ones(2, COPIED_BYTES // FLOAT_BYTES)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source), 7)


def multiply_speed() -> float:
    """Operations per second of fused multiply-adds in registers, two for each."""
    threads_of_the_kernels = Path(build.__file__).with_name("team.cpp")
    peak = build.library_of(Path(__file__).with_name("peak.cpp"), threads_of_the_kernels).samewise_peak
    peak.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    peak.restype = ctypes.c_double
    threads = torch.get_num_threads()
    sums = torch.zeros(threads)
    arguments = ROUNDS, threads, sums.data_ptr()
    return peak(*arguments) / seconds(lambda: peak(*arguments), 7)


def work_of(engine: Engine, rows: int, sequences: int, context: int) -> tuple[float, float]:
    """Bytes that a frame has to read, and operations that it has to do."""
    linears = [m for m in engine.runner.model.modules() if isinstance(m, FrameLinear)]
    weights = {
        id(m.packed or m): m.weight.nbytes if m.packed is None else m.packed.num_bytes for m in linears
    }
    arch = engine.loaded.arch
    kv_bytes = 2 * engine.runner.store.layers[0].k.itemsize  # of an element of K and of V
    kv = sum(kv_bytes * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * context
    products = sum(m.weight.numel() for m in linears) * rows
    attention = sum(2 * layer.num_heads * layer.head_dim for layer in arch.layers) * context * rows
    return float(sum(weights.values()) + kv * sequences), 2.0 * (products + attention)


def measure(args: Namespace, spans_of: Callable[..., list[Span]]) -> dict:
    """Frames with sampling, of one sequence and of as many as there are rows."""
    config = EngineConfig(model=args.model, device="cpu", dtype=args.dtype, linear=args.linear)
    engine = Engine(load(config), config)
    engine.runner.store.fill(0.0)
    copied, multiplied = copy_speed(), multiply_speed()
    print(f"copy {copied / 1e9:.1f} GB/s  multiply-add {multiplied / 1e9:.0f} GFLOP/s")
    results = []
    for rows in args.rows:
        for sequences in sorted({1, rows}):
            spans = spans_of(sequences, rows // sequences, args.context, engine.loaded.arch.vocab)
            times = seconds_of(lambda spans=spans: engine.verifier.run(spans), args.repeats)
            num_bytes, operations = work_of(engine, rows, sequences, args.context)
            row = {
                "rows": rows,
                "sequences": sequences,
                "ms": statistics.median(times) * 1e3,
                "least_ms": min(times) * 1e3,
                "read_ms": num_bytes / copied * 1e3,
                "multiply_ms": operations / multiplied * 1e3,
            }
            row["over_ceiling"] = row["least_ms"] / max(row["read_ms"], row["multiply_ms"])
            results.append(row)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return {
        "frames": results,
        "context": args.context,
        "threads": torch.get_num_threads(),
        "copy_gb_s": copied / 1e9,
        "multiply_gflop_s": multiplied / 1e9,
    }


__all__ = ["measure"]
