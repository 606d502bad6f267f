"""The time of a frame, against the ceiling. Last line: JSON.

    python bench/frame.py                 # CPU, embedded model: ms per frame of 1 to 32 rows, with sampling
    python bench/frame.py --device cuda   # 8B shape, random weights made on the GPU: ms per frame
    python bench/frame.py --device cuda --trees     # frames of one draft tree beside chains of as many rows

The ceiling is the time to read weights and KV once at the bandwidth of a copy; on CPU, where that is longer,
the time to multiply as fast as a loop of multiply-adds does (frame_cpu.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from array import array

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

import frame_cpu  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine  # noqa: E402
from samewise.execute.load import load  # noqa: E402
from samewise.kernels.attention.base import PAGE  # noqa: E402
from samewise.testing import submit  # noqa: E402
from samewise.types import Sampling, Span  # noqa: E402
from shapes import commit, copy_bandwidth, random_on_card, shape_8b, timed  # noqa: E402
from tree_shapes import best_first_tree  # noqa: E402

GREEDY = Sampling()


def spans_of(sequences: int, rows_each: int, context: int, vocab: int, first_page: int = 1) -> list[Span]:
    """`sequences` spans of `rows_each` rows that end at `context`, each on pages of its own."""
    num_pages = -(-context // PAGE)
    spans = []
    for i in range(sequences):
        start = context - rows_each
        tokens = [(7 * i + 13 * j + 1) % vocab for j in range(rows_each)]
        pages = array("i", range(first_page + i * num_pages, first_page + (i + 1) * num_pages))
        spans.append(Span(i, start, tuple(tokens), rows_each, pages, GREEDY, tokens, rows_each))
    return spans


# ---- CUDA


def engine_8b(max_len: int) -> Engine:
    """An engine over random weights of an 8B shape."""
    config = EngineConfig(
        model="8b-random", dtype="bfloat16", device="cuda", max_model_len=max_len, kv_memory=40 * 2**30,
        max_num_seqs=128,
    )  # fmt: skip
    return Engine(random_on_card(shape_8b()), config)


def frame_ms(engine: Engine, sequences: int, each: int, context: int, repeats: int = 40) -> float:
    """Milliseconds of a frame on the device, with sampling and copies; the median over several rounds.

    Frames are launched back to back, as the engine does, so the host's work is hidden unless it takes longer.
    """
    spans = spans_of(sequences, each, context, engine.loaded.arch.vocab)
    verifier = engine.verifier

    def work() -> None:
        for _ in range(10):  # equal spans, so a buffer may be refilled before the device has read it
            verifier.run(spans)

    work()
    return timed(work, repeats // 10, engine.device) / 10


def cuda(args: argparse.Namespace) -> dict:
    bandwidth = copy_bandwidth()
    results, host = [], {}
    cases = [(1, 1), (1, 16), (8, 1), (8, 16), (32, 1), (32, 4), (64, 1), (64, 2), (128, 1), (1, 128)]
    for number, max_len in enumerate(args.max_model_len):
        began = time.perf_counter()
        engine = engine_8b(max_len)
        started = time.perf_counter() - began
        model = engine.loaded.model
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        weights -= model.get_input_embeddings().weight.numel() * 2
        for sequences, each in cases if number == 0 else cases[:1]:
            kv = sequences * args.context * 2 * 8 * 128 * 2 * 32
            row = {
                "max_model_len": max_len,
                "sequences": sequences,
                "rows_each": each,
                "ms": frame_ms(engine, sequences, each, args.context),
                "ceiling_ms": (weights + kv) / bandwidth * 1e3,
            }
            results.append(row)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        print(f"start-up, max_model_len {max_len}: {started:.1f} s, probe {engine.report.seconds:.2f} s")
        if number == 0:
            host = host_time(engine, args.context)
            print(host, flush=True)
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    return {"results": results, "copy_tb_s": bandwidth / 1e12, "host": host,
            "device": torch.cuda.get_device_name()}  # fmt: skip


# ---- trees


def trees(args: argparse.Namespace) -> dict:
    """Frames of one sequence whose draft is a tree, in turns with frames whose draft is a chain."""
    if args.device == "cuda":
        engine = engine_8b(2048)
    else:
        config = EngineConfig(model=args.model, device="cpu", dtype=args.dtype)
        engine = Engine(load(config), config)
    engine.runner.store.fill(0.0)
    results = []
    for rows in [rows for rows in (1, 8, 16, 32, 64) if rows <= engine.runner.frame_rows]:
        (plain,) = spans_of(1, rows, args.context, engine.loaded.arch.vocab)
        chain = plain._replace(given=1)
        times: dict[str, list[float]] = {"chain": [], "tree": []}
        for seed in range(args.repeats):
            tree = chain._replace(parents=best_first_tree(rows - 1, seed))
            for name, span in (("chain", chain), ("tree", tree)):
                times[name].append(frames_ms(engine, [span], 10))
        ratio = statistics.median(a / b for a, b in zip(times["tree"], times["chain"], strict=True))
        row = {
            "rows": rows,
            **{f"{name}_ms": statistics.median(ms) for name, ms in times.items()},
            "ratio": ratio,
        }
        results.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return {"trees": results, "context": args.context}


def frames_ms(engine: Engine, spans: list[Span], num_frames: int) -> float:
    """Milliseconds of one of several frames that are launched back to back, after one that is not timed."""

    def work() -> None:
        for _ in range(num_frames):
            engine.verifier.run(spans)

    engine.verifier.run(spans)
    return timed(work, 1, engine.device) / num_frames


# ---- the host


def host_time(engine: Engine, context: int, sequences: int = 128, steps: int = 64) -> dict:
    """The host's time per step with this many sequences decoding, at about this context."""
    began = time.perf_counter()
    for i in range(sequences):
        prompt = [(i * 31 + 7 * j) % 1000 + 1 for j in range(context - steps)]
        submit(engine, prompt, GREEDY, max_tokens=steps * 2 + 40)
    while engine.scheduler.counters.output_tokens < sequences * 8:
        engine.step()
    prefill_seconds = time.perf_counter() - began
    before = engine.stats()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall = time.perf_counter() - began
    after = engine.stats()
    spent = after["step_seconds"] - before["step_seconds"] - (after["wait_seconds"] - before["wait_seconds"])
    for request in engine.scheduler.running_ids():
        engine.abort(request)
    engine.step()
    device = frame_ms(engine, sequences, 1, context)
    return {
        "sequences": sequences,
        "host_ms_per_step": spent / steps * 1e3,  # while the device runs the next frame
        "step_ms": wall / steps * 1e3,
        "critical_ms_per_step": wall / steps * 1e3 - device,
        "prompt_tok_s": sequences * (context - steps) / prefill_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--linear", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--trees", action="store_true", help="a draft tree's rows beside a chain's")
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-model-len", type=int, nargs="+", default=[2048, 32768])
    args = parser.parse_args()
    args.context = args.context or (512 if args.device == "cpu" else 1024)
    if args.trees:
        figures = trees(args)
    elif args.device == "cpu":
        figures = frame_cpu.measure(args, spans_of)
    else:
        figures = cuda(args)
    conditions = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": args.device,
        "cpu": machine.cpu_facts().get("cpu", platform.processor()),
    }
    print(json.dumps(conditions | figures))


if __name__ == "__main__":
    main()
