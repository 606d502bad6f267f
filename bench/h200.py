"""Verified decoding on one card, beside unverified, the ceiling, and others. Last line: JSON.

    python bench/h200.py                       # every length, load and mode
    python bench/h200.py --quick               # prompts of 1K, some steps of each load
    python bench/h200.py --rows 100000         # how many rows' bits depend on their company
    python bench/h200.py --peers transformers  # beside them, in the same run
    python bench/h200.py --draw bench-out/h200.json
    python bench/h200.py --device cpu          # a tiny shape: tries the script, measures nothing

8B shape, random bf16 weights made on the card, no speculation, so one token per sequence and step. The
ceiling is the time to read the weights and the live KV once at the bandwidth a copy reaches here. `--steps`
times so many tokens of each sequence, in the middle of its output; 0 times all of it. More in
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import bits  # noqa: E402
import peers  # noqa: E402
import shapes  # noqa: E402
from h200_report import case_line, case_table, median_run, save_picture, shorten_sizes, summary  # noqa: E402
from loads import MODES, Case, measure, streaming  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine  # noqa: E402
from samewise.kernels.attention.base import PAGE  # noqa: E402

Found = dict[str, Any]

LENGTHS = "1K/256,1K/1K,4K/256,8K/32"
LIVE = "1,8,32,64,128,256"
GROWN = 512  # tokens that early sequences may say while later prompts are still being read
PEER_REQUESTS, PEER_OUTPUT = 64, 256


class Bench:
    """One engine, every case on it; what was found so far is always on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.console = args, Console(width=None if sys.stdout.isatty() else 150)
        self.device = torch.device(args.device)
        cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        make = shapes.shape_8b if cuda else shapes.shape_tiny
        self.config = make(args.layers) if args.layers else make()
        self.found: Found = shapes.conditions(self.device) | {
            "shape": f"{'8B' if cuda else 'tiny'}, {self.config.num_hidden_layers} layers",
            "dtype": str(self.dtype).removeprefix("torch."), "steps": args.steps, "repeats": args.repeats,
            "cases": [],
        }  # fmt: skip
        self._began = time.perf_counter()

    def run(self) -> Found:
        """All of it, in order of what one would miss first."""
        self._ceiling()
        engine = self._engine()
        if self.args.rows:
            self._rows(engine)
        if self.args.cases:
            self._warm(engine)
            self._cases(engine)
            self._streaming(engine)
        works = {name: self._work() for name in self.args.peers}
        if works:
            self._own_for_peers(engine)
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name, work in works.items():
            self._peer(name, work)
        return self.found

    # ---- the ceiling

    def _ceiling(self) -> None:
        bandwidth = shapes.copy_bandwidth(self.device)
        weights = shapes.weight_bytes(self.config, self.dtype)
        self.found |= {
            "copy_tb_s": bandwidth / 1e12, "weight_gb": weights / 1e9,
            "kv_bytes_per_token": shapes.kv_bytes(self.config, self.dtype),
        }  # fmt: skip
        self.console.print(
            f"{self.found['shape']}, {self.found['dtype']}, {self.found['device']}: weights of "
            f"{weights / 1e9:.2f} GB and {self.found['kv_bytes_per_token']} bytes of KV a token, at "
            f"{bandwidth / 1e12:.2f} TB/s of a copy. No step is shorter than:"
        )
        view = Table("prompt/output", *(f"{live} live" for live in self.args.live))
        for prompt, output in self.args.lengths:
            cases = [Case(prompt, output, live) for live in self.args.live]
            context = prompt + output / 2
            view.add_row(cases[0].name, *(f"{self._least(case.live, context):.2f} ms" for case in cases))
        self.console.print(view)

    def _least(self, live: int, context: float) -> float:
        """Milliseconds to read the weights and the KV of the live sequences."""
        read = self.found["weight_gb"] * 1e9 + live * context * self.found["kv_bytes_per_token"]
        return float(read / self.found["copy_tb_s"] / 1e9)

    # ---- the engine

    def _engine(self) -> Engine:
        args = self.args
        longest = max(prompt + output for prompt, output in args.lengths)
        most = max([*args.live, args.stream_live + args.newcomers, PEER_REQUESTS if args.peers else 1])
        began = time.perf_counter()
        loaded = shapes.random_on(self.config, self.device, self.dtype)
        engine = Engine(
            loaded,
            EngineConfig(
                model=f"random {self.found['shape']}", device=self.device.type, dtype=self.found["dtype"],
                max_model_len=min(longest + 2 * GROWN, self.config.max_position_embeddings),
                max_num_seqs=most, kv_memory=args.kv_memory, proposer="none", enable_prefix_caching=False,
            ),
        )  # fmt: skip
        self.found |= {
            "start_s": time.perf_counter() - began, "contract": engine.contract.id,
            "sizes": list(engine.runner.sizes), "frame_rows": engine.parts.frame_rows,
            "kv_tokens": engine.stats()["pages"] * PAGE,
        }  # fmt: skip
        self.console.print(
            f"start-up {self.found['start_s']:.1f} s; frames of {shorten_sizes(self.found['sizes'])} rows, "
            f"KV for {self.found['kv_tokens']} tokens; contract {engine.contract.id}"
        )
        return engine

    def _warm(self, engine: Engine) -> None:
        """Whatever is captured or compiled at first use is not timed."""
        for live in self.args.live:
            for mode in self.args.modes:
                measure(engine, Case(32, 8, live, mode), 8, seed=0)

    # ---- what is measured

    def _rows(self, engine: Engine) -> None:
        began = time.perf_counter()
        seen = self.found["bits"] = bits.check(engine, self.args.rows)
        self.console.print(
            f"bits: {seen['rows']} rows compared (tokens, log-probabilities, logits) over "
            f"{seen['frames']} frames of {len(seen['by_size'])} sizes: [bold]{seen['differing']} differ[/]; "
            f"{time.perf_counter() - began:.1f} s"
        )
        rows = ", ".join(f"{size}: {one['rows']}" for size, one in seen["by_size"].items())
        self.console.print(f"  rows by size of the frame: {rows}")
        self._save()

    def _cases(self, engine: Engine) -> None:
        for prompt, output in self.args.lengths:
            for live in self.args.live:
                case = Case(prompt, output, live)
                if not self._fits(case):
                    continue
                self.found["cases"].append(self._case(engine, case))
                self._save()
        self.console.print(case_table(self.found))

    def _fits(self, case: Case) -> bool:
        needed = case.live * -(-(case.prompt + case.output + GROWN) // PAGE) * PAGE
        late = self.args.budget and time.perf_counter() - self._began > self.args.budget
        why = f"the budget of {self.args.budget} s is spent" if late else ""
        if needed > self.found["kv_tokens"]:
            why = f"needs KV for {needed} tokens, there is room for {self.found['kv_tokens']}"
        if why:
            self.console.print(f"  {case.name}, {case.live} live: left out, {why}")
            self.found.setdefault("left_out", []).append([case.name, case.live, why])
        return not why

    def _case(self, engine: Engine, case: Case) -> Found:
        """One length and load in every mode, in turns, so that a disturbance hits all alike."""
        modes = [mode for mode in self.args.modes if mode in ("verified", "unverified") or case.live > 1]
        seen: dict[str, list[Found]] = {mode: [] for mode in modes}
        for repeat in range(self.args.repeats):
            for mode in modes:
                one = Case(case.prompt, case.output, case.live, mode)
                seen[mode].append(measure(engine, one, self.args.steps, seed=100 + repeat))
        row: Found = {"lengths": case.name, "prompt": case.prompt, "output": case.output, "live": case.live}
        row["modes"] = {mode: median_run(runs) for mode, runs in seen.items()}
        first = row["modes"][modes[0]]
        row["context"] = first["context"]
        row["ceiling_ms"] = self._least(case.live, row["context"])
        for mode in modes:
            pairs = zip(seen.get("unverified", []), seen[mode], strict=False)
            ratios = [a["ms"] / b["ms"] for a, b in pairs if a["ms"] and b["ms"]]
            row["modes"][mode]["over_unverified"] = statistics.median(ratios) if ratios else None
        self.console.print("  " + case_line(row), highlight=False)
        return row

    def _streaming(self, engine: Engine) -> None:
        args = self.args
        prompt = min(args.lengths[0][0], engine.max_model_len // 2)
        seen = self.found["streaming"] = streaming(engine, args.stream_live, args.newcomers, prompt)
        self.console.print(
            f"{seen['newcomers']} prompts of {prompt} come in while {seen['live']} sequences generate: "
            f"read in {seen['seconds']:.3f} s ({seen['prompt_tok_s']:.0f} tokens/s, {seen['steps']} steps); "
            f"between two tokens of a running sequence {seen['gap_ms']:.1f} ms (median), "
            f"{seen['longest_gap_ms']:.1f} (longest), {seen['quiet_ms']:.1f} before"
        )
        self._save()

    # ---- others

    def _work(self) -> peers.Work:
        prompt, output = self.args.lengths[0]
        small = self.device.type == "cpu"
        num = 4 if small else PEER_REQUESTS
        return peers.Work(self.config, self.device, self.dtype, num, prompt, min(output, PEER_OUTPUT))

    def _own_for_peers(self, engine: Engine) -> None:
        work = self._work()
        case = Case(work.prompt, work.output, work.num)
        seen = self.found["own"] = measure(engine, case, 0, seed=7)
        self.console.print(f"{work.num} requests, {case.name}, verified: {seen['tok_s']:.0f} tokens/s in all")

    def _peer(self, name: str, work: peers.Work) -> None:
        seen = self.found.setdefault("peers", {})[name] = peers.measure(name, work)
        if "absent" in seen:
            self.console.print(f"[yellow]{seen['absent']}; left out[/]")
        else:
            seen["verified_over"] = self.found["own"]["tok_s"] / seen["tok_s"]
            self.console.print(
                f"{name}, the same {work.num} requests: {seen['tok_s']:.0f} tokens/s; verified here "
                f"{seen['verified_over']:.2f} times that"
            )
        self._save()

    def _save(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / "h200.json").write_text(json.dumps(self.found, indent=1))


# ---- options


def _lengths(text: str) -> list[tuple[int, int]]:
    found = []
    for one in text.split(","):
        try:
            prompt, output = (int(part.removesuffix("K")) * (1024 if part.endswith("K") else 1)
                              for part in one.strip().upper().split("/"))  # fmt: skip
        except ValueError:
            raise argparse.ArgumentTypeError(f"{one!r}: give prompt/output, as in 1K/256") from None
        found.append((prompt, output))
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(known)}")
        return found

    return names


def _memory(text: str) -> int | float | str:
    return float(text) if text.replace(".", "", 1).isdigit() and "." in text else text


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", type=_lengths, help=f"prompt/output, several by commas; {LENGTHS}")
    parser.add_argument("--live", type=_numbers, help=f"live sequences; {LIVE}")
    parser.add_argument(
        "--modes", type=_names(MODES), default=list(MODES), help=",".join(MODES).replace("%", "%%")
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="tokens of each sequence to time; 0: all of them"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of every case, modes in turn")
    parser.add_argument("--quick", action="store_true", help="1K/256 alone, 48 steps, once")
    parser.add_argument("--rows", type=int, default=0, help="compare the bits of so many rows")
    parser.add_argument("--no-cases", dest="cases", action="store_false", help="only --rows and --peers")
    parser.add_argument("--peers", type=_names(peers.PEERS), default=[], help=",".join(peers.PEERS))
    parser.add_argument("--stream-live", type=int, help="sequences that generate while others are read; 32")
    parser.add_argument("--newcomers", type=int, help="prompts that come in meanwhile; 8")
    parser.add_argument("--layers", type=int, help="fewer layers, to try things out")
    parser.add_argument("--kv-memory", type=_memory, default=None, help="bytes or share, as in EngineConfig")
    parser.add_argument("--budget", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="draw what an earlier run wrote, and no more"
    )
    args = parser.parse_args(given)
    cuda = args.device == "cuda"
    if cuda and not args.draw and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tries the script with a tiny shape")
    if args.quick:
        args.lengths, args.steps, args.repeats = args.lengths or _lengths("1K/256"), 48, 1
    args.lengths = args.lengths or _lengths(LENGTHS if cuda else "48/16")
    args.live = args.live or _numbers(LIVE if cuda else "1,4")
    args.stream_live = args.stream_live or (32 if cuda else 4)
    args.newcomers = args.newcomers or (8 if cuda else 2)
    args.kv_memory = args.kv_memory or (0.8 if cuda else "256MiB")
    return args


def main() -> None:
    args = arguments()
    if args.draw:
        found = json.loads(args.draw.read_text())
        Console(width=150).print(case_table(found))
        print(save_picture(found, args.draw.parent))
        return
    bench = Bench(args)
    found = bench.run()
    if found["cases"]:
        print(save_picture(found, args.out))
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
