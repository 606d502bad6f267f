"""Speculation on real questions: tokens per second of proposers beside `none`, by load and by kind.

    python bench/real_text.py --model FOLDER --questions FILE.jsonl [--draft-model FOLDER] [--live 1 8 32]
        [--proposers none auto model skip auto+model] [--per-kind 3] [--max-tokens 256] [--out FILE.json]

A line of the questions' file has `category` and `turns`, as in Spec-Bench; the first turn is asked, greedily.
As many questions as the load says are under way at once. For each load the proposers run one after the other,
`none` before and after them. All but `none` get a fresh engine for each load, without a prefix cache, so that
no answer is seen twice, and after the warm-up a fresh proposer: nothing was learned of other text, but what
frames cost. Layer sets of `skip` are neither read from the user's cache nor saved there. `auto+model` is
`auto` with the draft model. Tokens and log-probabilities of every answer are compared with those of `none` at
the first load. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from samewise.config import EngineConfig
from samewise.draft.base import NoDrafts
from samewise.draft.build import ProposerParts, maker_of
from samewise.engine import Engine
from samewise.execute.load import Loaded, load
from samewise.testing import submit
from samewise.types import Sampling


@dataclass(slots=True)
class Answer:
    """One request's output, and when it began and ended."""

    kind: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    frames: int = 0

    @property
    def bits(self) -> tuple[list[int], list[str]]:
        """What must not depend on proposer or load."""
        return self.tokens, self.logprobs


def read_questions(path: Path, per_kind: int) -> list[tuple[str, str]]:
    """(kind, text) of the first questions of each kind, kinds in turn."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        by_kind[question["category"]].append(question["turns"][0])
    return [(kind, texts[i]) for i in range(per_kind) for kind, texts in by_kind.items() if i < len(texts)]


def answer_all(
    engine: Engine, prompts: list[tuple[str, list[int]]], max_tokens: int, live: int
) -> list[Answer]:
    """Ask all questions, `live` at a time."""
    sampling = Sampling(stop_ids=engine.loaded.eos_ids)
    answers: dict[int, Answer] = {}
    waiting = list(reversed(prompts))
    num_live = 0
    while waiting or not engine.idle:
        while waiting and num_live < live:
            kind, prompt = waiting.pop()
            answers[submit(engine, prompt, sampling, max_tokens=max_tokens)] = Answer(kind)
            num_live += 1
        deltas, now = engine.step(), time.perf_counter()
        for delta in deltas:
            answer = answers[delta.request_id]
            answer.began = answer.began or now
            answer.ended = now
            answer.tokens += delta.tokens
            answer.logprobs += [value.hex() for value in delta.logprobs]
            answer.frames += delta.frames
            num_live -= delta.finish is not None
    return list(answers.values())


def start(loaded: Loaded, settings: dict[str, Any]) -> tuple[Engine, float]:
    """A fresh engine, warmed up on text that is in no question, and the seconds this took."""
    began, parts = time.perf_counter(), list[ProposerParts]()
    config = EngineConfig.of(**settings)

    def without_proposer(given: ProposerParts) -> NoDrafts:
        parts.append(given)
        return NoDrafts()

    engine = Engine(loaded, config, make_proposer=without_proposer)
    give_proposer(engine, parts[0])
    built = time.perf_counter() - began
    vocab = min(1000, loaded.arch.vocab - 1)
    warm_up = [("", [1 + (7 * i + 13 * j) % vocab for j in range(64)]) for i in range(config.max_num_seqs)]
    answer_all(engine, warm_up, 48, config.max_num_seqs)
    give_proposer(engine, parts[0])
    return engine, built


def give_proposer(engine: Engine, parts: ProposerParts) -> None:
    """A new proposer in place of the engine's. It is not told the contract, so it reads and saves nothing."""
    engine.proposer = NoDrafts()
    free_memory()
    with engine.parts.process.pinned():
        engine.proposer = maker_of(engine.config)(parts)
        engine.proposer.warm(engine.config.max_num_seqs)
    engine.verifier.with_candidates = engine.proposer.wants_candidates


def run(engine: Engine, prompts: list[tuple[str, list[int]]], max_tokens: int, live: int) -> Any:
    """Time one load."""
    frames = engine.stats()["frames"]
    began = time.perf_counter()
    answers = answer_all(engine, prompts, max_tokens, live)
    seconds = time.perf_counter() - began
    stats = engine.stats()
    num = sum(len(answer.tokens) for answer in answers)
    per_frame = num / sum(answer.frames for answer in answers)
    result = {
        "tokens": num, "seconds": seconds, "rate": num / seconds, "tokens_per_frame": per_frame,
        "frames": stats["frames"] - frames, "kinds": by_kind(answers), "stats": stats,
    }  # fmt: skip
    return result, answers


def by_kind(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Mean tokens per second after the first token, and tokens per frame, of each kind's requests."""
    rates: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, int] = defaultdict(int)
    frames: dict[str, int] = defaultdict(int)
    for answer in answers:
        if answer.ended > answer.began:
            rates[answer.kind].append((len(answer.tokens) - 1) / (answer.ended - answer.began))
        tokens[answer.kind] += len(answer.tokens)
        frames[answer.kind] += answer.frames
    return {
        kind: {"rate": statistics.mean(rates[kind] or [0.0]), "tokens_per_frame": tokens[kind] / frames[kind]}
        for kind in tokens
    }


def settings_of(args: argparse.Namespace, proposer: str, live: int) -> dict[str, Any]:
    """The engine's settings for one column of the table."""
    name, _, draft = proposer.partition("+")
    settings: dict[str, Any] = {
        "model": str(args.model), "proposer": name, "max_num_seqs": live, "enable_prefix_caching": False,
        "max_model_len": args.max_model_len, "kv_memory": args.kv_memory,
    }  # fmt: skip
    if draft == "model" or name == "model":
        settings["draft_model"] = str(args.draft_model)
    return settings


def print_load(live: int, results: dict[str, Any]) -> None:
    """The table of one load."""
    base = statistics.mean(r["rate"] for name, r in results.items() if name.startswith("none"))
    print(f"\n{live} live" + " " * 22 + "tok/s  ratio  tokens/frame  differ  start s")
    for name, r in results.items():
        print(
            f"  {name:24} {r['rate']:8.0f} {r['rate'] / base:6.3f} {r['tokens_per_frame']:12.3f} "
            f"{r['differ']:6d} {r['built']:8.1f}"
        )
    kinds = results["none"]["kinds"]
    names = [name for name in results if not name.startswith("none")]
    print("  ratio of a request's tokens/s to none's (tokens per frame), by kind: " + ", ".join(names))
    for kind, plain in kinds.items():
        cells = [
            f"{results[n]['kinds'][kind]['rate'] / max(plain['rate'], 1e-9):5.2f} "
            f"({results[n]['kinds'][kind]['tokens_per_frame']:4.2f})"
            for n in names
        ]
        print(f"    {kind:22} " + "  ".join(cells))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--proposers", nargs="+", default=["none", "auto"])
    parser.add_argument("--per-kind", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-memory", default="4GiB")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if any("model" in name for name in args.proposers) and not args.draft_model:
        parser.error("the proposer model needs --draft-model")
    return args


def main() -> None:
    """Run all loads and proposers."""
    args = parse()
    loaded = load(EngineConfig.of(model=str(args.model)))
    prompts = [
        (kind, encode(loaded, text, args.max_model_len - args.max_tokens))
        for kind, text in read_questions(args.questions, args.per_kind)
    ]
    expected: list[Any] | None = None
    report: dict[str, Any] = {}
    plain, plain_start = start(loaded, settings_of(args, "none", max(args.live)))
    for live in args.live:
        results: dict[str, Any] = {}
        for name in ["none", *(name for name in args.proposers if name != "none"), "none again"]:
            print(f"{live} live, {name} ...", flush=True)
            engine, built = plain, plain_start
            if not name.startswith("none"):
                engine, built = start(loaded, settings_of(args, name, live))
            results[name], answers = run(engine, prompts, args.max_tokens, live)
            results[name]["built"] = built
            bits = [answer.bits for answer in answers]
            expected = expected or bits
            results[name]["differ"] = sum(a != b for a, b in zip(bits, expected, strict=True))
            del engine
            free_memory()
        print_load(live, results)
        report[str(live)] = results
        if args.out:
            args.out.write_text(json.dumps(report, default=str))
    short = {
        live: {name: {k: r[k] for k in ("rate", "tokens_per_frame", "differ")} for name, r in results.items()}
        for live, results in report.items()
    }
    print(json.dumps({"real_text": short}))


def free_memory() -> None:
    """Give the memory of engines that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def encode(loaded: Loaded, text: str, max_len: int) -> list[int]:
    """A question as a chat prompt's token ids."""
    messages = [{"role": "user", "content": text}]
    encoded = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])[-max_len:]


if __name__ == "__main__":
    main()
