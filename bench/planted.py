"""A model in which most sublayers do nothing: does `skip` find which, and what does it bring?

    python bench/planted.py --layers 24 --hidden 512 --batch 1,8

`none`, `skip` (which has to find the set) and `known` (drafting with the set known by construction), side by
side on the same prompts, in turns. `share` is the part of the time that the search may take. Beside the pace
stand counts, in which nobody else at work on the machine can be seen: frames, their rows, draft passes.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from samewise.config import EngineConfig
from samewise.draft.build import MAKERS
from samewise.engine import Engine
from samewise.testing import planted, planted_best
from samewise.types import Sampling


def known(best):
    def make(parts):
        made = MAKERS["skip"](parts)
        made.settle(best, 0.99)
        return made

    return make


def run(engine, batch, tokens, seed, temperature):
    rng = random.Random(seed)
    for i in range(batch):
        prompt = [rng.randrange(256) for _ in range(24)]
        engine.add(prompt, Sampling(temperature=temperature, seed=i), max_tokens=tokens)
    began, num, said = time.perf_counter(), 0, []
    while not engine.idle:
        for delta in engine.step():
            num += len(delta.tokens)
            said.append((delta.request_id, delta.tokens))
    return num / (time.perf_counter() - began), said


def warm(engine, batch, tokens, temperature):
    """Some text, and as much as the search takes, if that is not too much."""
    seed = 1000
    run(engine, batch, 16, seed, temperature)
    while engine.scheduler.counters.output_tokens < tokens and engine.stats()["skip"]["search"]["open"]:
        run(engine, batch, 64, seed := seed + 1, temperature)


def found_after(report):
    """Tokens before it first had the set it has."""
    having = [
        event["tokens"] for event in report["timeline"] if event["set"] == report["timeline"][-1]["set"]
    ]
    return having[0]


def counted(engine):
    counts, skip = engine.scheduler.counters, engine.stats().get("skip", {})
    return {"tokens": counts.output_tokens, "frames": counts.frames, "rows": counts.rows,
            "passes": skip.get("passes", 0), "guessed": counts.guessed, "accepted": counts.accepted,
            "branches": skip.get("branches", 0)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--warm", type=int, default=8192, help="tokens before measuring, at most, in which it may search"
    )
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    Path("bench-out").mkdir(exist_ok=True)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    loaded = planted(args.layers, args.hidden, dtype=getattr(torch, args.dtype), vocab_size=2048,
                     max_position_embeddings=2048)  # fmt: skip
    best, found = planted_best(args.layers), []
    settings = {"model": "planted", "device": args.device, "dtype": args.dtype, "kv_memory": 2**30,
                "search_share": args.share, "workload": f"bench-{time.time()}"}  # fmt: skip
    print(f"{args.layers} layers of {args.hidden}, {args.dtype}, {'cuda' if cuda else 'cpu'}, "
          f"{torch.get_num_threads()} threads; share {args.share:.0%}")  # fmt: skip
    for batch in [int(one) for one in args.batch.split(",")]:
        engines = {
            "none": Engine(loaded, EngineConfig(**settings, proposer="none")),
            "skip": Engine(loaded, EngineConfig(**settings, proposer="skip")),
            "known": Engine(loaded, EngineConfig(**settings, proposer="skip"), make_proposer=known(best)),
        }
        for name, engine in engines.items():
            warm(engine, batch, args.warm if name == "skip" else 0, args.temperature)
        rates = {name: [] for name in engines}
        before = {name: counted(engine) for name, engine in engines.items()}
        for repeat in range(args.repeats):
            texts = {}
            for name, engine in engines.items():
                pace, texts[name] = run(engine, batch, args.tokens, repeat + 1, args.temperature)
                rates[name].append(pace)
        report = engines["skip"].stats()["skip"]
        middle = {name: statistics.median(values) for name, values in rates.items()}
        missed = len(set(best.attention) ^ set(report["set"]["attention"])) + len(
            set(best.mlp) ^ set(report["set"]["mlp"])
        )
        row = {
            "batch": batch, "none": middle["none"], "skip": middle["skip"], "known": middle["known"],
            "skip/none": middle["skip"] / middle["none"], "skip/known": middle["skip"] / middle["known"],
            "sublayers off the planted set": missed, "rounds": report["search"]["rounds"],
            "found after": found_after(report), "search share": report["search"]["share"],
            "acceptance": report["first_guess_acceptance"],
        }  # fmt: skip
        row["counts"] = {
            name: {what: num - before[name][what] for what, num in counted(engine).items()}
            for name, engine in engines.items()
        }
        found.append(row)
        print(
            "  ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
                if k != "counts"
            )
        )
        for name, counts in row["counts"].items():
            print(f"  {name:>6}: " + "  ".join(f"{what} {num}" for what, num in counts.items()), flush=True)
    print(json.dumps({"layers": args.layers, "hidden": args.hidden, "share": args.share, "results": found}))


if __name__ == "__main__":
    main()
