"""A model in which most sublayers do nothing: does `skip` find which, and how much faster is it?

    python bench/planted.py --layers 24 --hidden 512 --batch 1,8

Three engines answer the same prompts in turns: `none`, `skip` (which has to find the set) and `known` (`skip`
with the set known by construction). `--share` is the part of the time that the search may take. Beside
throughput stand counts (frames, rows, draft passes), which other processes on the machine cannot disturb.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from samewise.config import EngineConfig
from samewise.draft.build import make_skip
from samewise.draft.tuning import SearchTuning, Tuning
from samewise.engine import Engine
from samewise.testing import planted, planted_best, submit
from samewise.types import Sampling


def known_set(skipped):
    """A maker of `skip` that drafts with this set from the start."""

    def make(parts):
        skip = make_skip(parts)
        skip.fix_set(skipped, 0.99)
        return skip

    return make


def generate(engine, batch, num_tokens, seed, temperature):
    """Answer `batch` random prompts together; tokens per second."""
    rng = random.Random(seed)
    for i in range(batch):
        prompt = [rng.randrange(256) for _ in range(24)]
        submit(engine, prompt, Sampling(temperature=temperature, seed=i), max_tokens=num_tokens)
    began, num_committed = time.perf_counter(), 0
    while not engine.idle:
        num_committed += sum(len(delta.tokens) for delta in engine.step())
    return num_committed / (time.perf_counter() - began)


def warm_up(engine, batch, max_tokens, temperature):
    """Generate some text, and then until the search has ended or `max_tokens` were committed."""
    seed = 1000
    generate(engine, batch, 16, seed, temperature)
    while engine.scheduler.counters.output_tokens < max_tokens and engine.stats()["skip"]["search"]["open"]:
        generate(engine, batch, 64, seed := seed + 1, temperature)


def found_after(report):
    """Tokens committed when the present set was first in use."""
    last = report["timeline"][-1]["set"]
    return next(event["tokens"] for event in report["timeline"] if event["set"] == last)


def counts_of(engine):
    counters, skip = engine.scheduler.counters, engine.stats().get("skip", {})
    return {"tokens": counters.output_tokens, "frames": counters.frames, "rows": counters.rows,
            "passes": skip.get("passes", 0), "guessed": counters.guessed, "accepted": counters.accepted,
            "alternatives": skip.get("alternatives", 0)}  # fmt: skip


def measure(engines, batch, args, best):
    """One row of the results: throughput, the set that was found, and counts."""
    for name, engine in engines.items():
        warm_up(engine, batch, args.warm if name == "skip" else 0, args.temperature)
    rates = {name: [] for name in engines}
    before = {name: counts_of(engine) for name, engine in engines.items()}
    for repeat in range(args.repeats):
        for name, engine in engines.items():
            rates[name].append(generate(engine, batch, args.tokens, repeat + 1, args.temperature))
    report = engines["skip"].stats()["skip"]
    median = {name: statistics.median(values) for name, values in rates.items()}
    missed = len(best.attention ^ set(report["set"]["attention"])) + len(best.mlp ^ set(report["set"]["mlp"]))
    row = {
        "batch": batch, "none": median["none"], "skip": median["skip"], "known": median["known"],
        "skip/none": median["skip"] / median["none"], "skip/known": median["skip"] / median["known"],
        "sublayers off the planted set": missed, "rounds": report["search"]["rounds"],
        "found after": found_after(report), "search share": report["search"]["share"],
        "acceptance": report["first_guess_acceptance"],
    }  # fmt: skip
    row["counts"] = {
        name: {what: num - before[name][what] for what, num in counts_of(engine).items()}
        for name, engine in engines.items()
    }
    return row


def show(row):
    figures = {name: value for name, value in row.items() if name != "counts"}
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))
    for name, counts in row["counts"].items():
        print(f"  {name:>6}: " + "  ".join(f"{what} {num}" for what, num in counts.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=8192, help="most tokens before measuring, to search in")
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    Path("bench-out").mkdir(exist_ok=True)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    loaded = planted(args.layers, args.hidden, dtype=getattr(torch, args.dtype), vocab_size=2048,
                     max_position_embeddings=2048)  # fmt: skip
    best, results = planted_best(args.layers), []
    settings = {"model": "planted", "device": args.device, "dtype": args.dtype, "kv_memory": 2**30,
                "workload": f"bench-{time.time()}"}  # fmt: skip
    tuning = Tuning(search=SearchTuning(share=args.share))
    skipping, plain = (EngineConfig(**settings, proposer=name) for name in ("skip", "none"))
    print(f"{args.layers} layers of {args.hidden}, {args.dtype}, {'cuda' if cuda else 'cpu'}, "
          f"{torch.get_num_threads()} threads; share {args.share:.0%}")  # fmt: skip
    for batch in [int(size) for size in args.batch.split(",")]:
        engines = {
            "none": Engine(loaded, plain),
            "skip": Engine(loaded, skipping, tuning=tuning),
            "known": Engine(loaded, skipping, tuning=tuning, make_proposer=known_set(best)),
        }
        results.append(measure(engines, batch, args, best))
        show(results[-1])
    print(json.dumps({"layers": args.layers, "hidden": args.hidden, "share": args.share, "results": results}))


if __name__ == "__main__":
    main()
