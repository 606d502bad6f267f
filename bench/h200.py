"""Verified decoding on one GPU, beside unverified decoding, the ceiling and peers. Last line: JSON.

    python bench/h200.py                       # all lengths, loads and modes
    python bench/h200.py --quick               # prompts of 1K, 48 steps of each load: a few minutes
    python bench/h200.py --rows 100000         # also count rows whose bits depend on the other rows
    python bench/h200.py --peers transformers  # also measure a peer
    python bench/h200.py --draw bench-out/h200.json
    python bench/h200.py --device cpu          # a tiny shape, to test the script

8B shape, random bf16 weights made on the GPU, no speculation: one token per sequence and step. The ceiling is
the time to read the weights and the live KV once at the bandwidth of a copy. `--steps` times that many tokens
of each sequence, in the middle of its output; 0 times the complete output. More in docs/benchmarks.md.
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

Figures = dict[str, Any]

LENGTHS = "1K/256,1K/1K,4K/256,8K/32"
LIVE = "1,8,32,64,128,256"
EARLY_OUTPUT = 512  # tokens that early sequences may generate while later prompts are prefilled
PEER_REQUESTS, PEER_OUTPUT = 64, 256  # requests at once, tokens of each output


class Bench:
    """Every case on one engine. The figures so far are written to disk after each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.console = args, Console(width=None if sys.stdout.isatty() else 150)
        self.device = torch.device(args.device)
        cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        make = shapes.shape_8b if cuda else shapes.shape_tiny
        self.config = make(args.layers) if args.layers else make()
        self.figures: Figures = shapes.conditions(self.device) | {
            "shape": f"{'8B' if cuda else 'tiny'}, {self.config.num_hidden_layers} layers",
            "dtype": str(self.dtype).removeprefix("torch."), "steps": args.steps, "repeats": args.repeats,
            "cases": [],
        }  # fmt: skip
        self._began = time.perf_counter()

    def run(self) -> Figures:
        """Measure everything, the most important first: a run may be cut short."""
        self._ceiling()
        engine = self._engine()
        if self.args.rows:
            self._compare_bits(engine)
        if self.args.cases:
            self._warm_up(engine)
            self._cases(engine)
            self._streaming(engine)
        if self.args.peers:
            self._measure_own(engine)
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name in self.args.peers:
            self._measure_peer(name)
        return self.figures

    # ---- the ceiling

    def _ceiling(self) -> None:
        bandwidth = shapes.copy_bandwidth(self.device)
        weights = shapes.weight_bytes(self.config, self.dtype)
        self.figures |= {
            "copy_tb_s": bandwidth / 1e12, "weight_gb": weights / 1e9,
            "kv_bytes_per_token": shapes.kv_bytes(self.config, self.dtype),
        }  # fmt: skip
        self.console.print(
            f"{self.figures['shape']}, {self.figures['dtype']}, {self.figures['device']}: weights of "
            f"{weights / 1e9:.2f} GB and {self.figures['kv_bytes_per_token']} bytes of KV a token, at "
            f"{bandwidth / 1e12:.2f} TB/s of a copy. No step is shorter than:"
        )
        view = Table("prompt/output", *(f"{live} live" for live in self.args.live))
        for prompt, output in self.args.lengths:
            cases = [Case(prompt, output, live) for live in self.args.live]
            context = prompt + output / 2
            view.add_row(cases[0].name, *(f"{self._ceiling_ms(case.live, context):.2f} ms" for case in cases))
        self.console.print(view)

    def _ceiling_ms(self, live: int, context: float) -> float:
        """Milliseconds to read the weights and the KV of the live sequences once."""
        num_bytes = self.figures["weight_gb"] * 1e9 + live * context * self.figures["kv_bytes_per_token"]
        return float(num_bytes / self.figures["copy_tb_s"] / 1e9)

    # ---- the engine

    def _engine(self) -> Engine:
        args = self.args
        max_len = max(prompt + output for prompt, output in args.lengths)
        max_num_seqs = max(
            [*args.live, args.stream_live + args.newcomers, PEER_REQUESTS if args.peers else 1]
        )
        began = time.perf_counter()
        loaded = shapes.random_on(self.config, self.device, self.dtype)
        engine = Engine(
            loaded,
            EngineConfig(
                model=f"random {self.figures['shape']}", device=self.device.type, dtype=self.figures["dtype"],
                max_model_len=min(max_len + 2 * EARLY_OUTPUT, self.config.max_position_embeddings),
                max_num_seqs=max_num_seqs, kv_memory=args.kv_memory, proposer="none",
                enable_prefix_caching=False,
            ),
        )  # fmt: skip
        self.figures |= {
            "start_s": time.perf_counter() - began, "contract": engine.contract.id,
            "sizes": list(engine.runner.sizes), "frame_rows": engine.parts.frame_rows,
            "kv_tokens": engine.stats()["pages"] * PAGE,
        }  # fmt: skip
        self.console.print(
            f"start-up {self.figures['start_s']:.1f} s; "
            f"frames of {shorten_sizes(self.figures['sizes'])} rows, "
            f"KV for {self.figures['kv_tokens']} tokens; contract {engine.contract.id}"
        )
        return engine

    def _warm_up(self, engine: Engine) -> None:
        """Run every load once untimed: graphs are captured and code is compiled at first use."""
        for live in self.args.live:
            for mode in self.args.modes:
                measure(engine, Case(32, 8, live, mode), 8, seed=0)

    # ---- measurements

    def _compare_bits(self, engine: Engine) -> None:
        began = time.perf_counter()
        counts = self.figures["bits"] = bits.check(engine, self.args.rows)
        self.console.print(
            f"bits: {counts['rows']} rows compared (tokens, log-probabilities, logits) over "
            f"{counts['frames']} frames of {len(counts['by_size'])} sizes: "
            f"[bold]{counts['differing']} differ[/]; "
            f"{time.perf_counter() - began:.1f} s"
        )
        rows = ", ".join(f"{size}: {of_size['rows']}" for size, of_size in counts["by_size"].items())
        self.console.print(f"  rows by size of the frame: {rows}")
        self._save()

    def _cases(self, engine: Engine) -> None:
        for prompt, output in self.args.lengths:
            for live in self.args.live:
                case = Case(prompt, output, live)
                if not self._fits(case):
                    continue
                self.figures["cases"].append(self._case(engine, case))
                self._save()
        self.console.print(case_table(self.figures))

    def _fits(self, case: Case) -> bool:
        needed = case.live * -(-(case.prompt + case.output + EARLY_OUTPUT) // PAGE) * PAGE
        late = self.args.budget and time.perf_counter() - self._began > self.args.budget
        reason = f"the budget of {self.args.budget} s is spent" if late else ""
        if needed > self.figures["kv_tokens"]:
            reason = f"needs KV for {needed} tokens, there is room for {self.figures['kv_tokens']}"
        if reason:
            self.console.print(f"  {case.name}, {case.live} live: left out, {reason}")
            self.figures.setdefault("left_out", []).append([case.name, case.live, reason])
        return not reason

    def _case(self, engine: Engine, case: Case) -> Figures:
        """One length and load in every mode, in turns, so that a disturbance hits all modes alike."""
        modes = [mode for mode in self.args.modes if mode in ("verified", "unverified") or case.live > 1]
        runs: dict[str, list[Figures]] = {mode: [] for mode in modes}
        for repeat in range(self.args.repeats):
            for mode in modes:
                in_mode = Case(case.prompt, case.output, case.live, mode)
                runs[mode].append(measure(engine, in_mode, self.args.steps, seed=100 + repeat))
        row: Figures = {"lengths": case.name, "prompt": case.prompt, "output": case.output, "live": case.live}
        row["modes"] = {mode: median_run(of_mode) for mode, of_mode in runs.items()}
        first = row["modes"][modes[0]]
        row["context"] = first["context"]
        row["ceiling_ms"] = self._ceiling_ms(case.live, row["context"])
        for mode in modes:
            pairs = zip(runs.get("unverified", []), runs[mode], strict=False)
            ratios = [a["ms"] / b["ms"] for a, b in pairs if a["ms"] and b["ms"]]
            row["modes"][mode]["over_unverified"] = statistics.median(ratios) if ratios else None
        self.console.print("  " + case_line(row), highlight=False)
        return row

    def _streaming(self, engine: Engine) -> None:
        args = self.args
        prompt = min(args.lengths[0][0], engine.max_model_len // 2)
        gaps = self.figures["streaming"] = streaming(engine, args.stream_live, args.newcomers, prompt)
        self.console.print(
            f"{gaps['newcomers']} prompts of {prompt} arrive while {gaps['live']} sequences decode: "
            f"prefilled in {gaps['seconds']:.3f} s ({gaps['prompt_tok_s']:.0f} tokens/s, "
            f"{gaps['steps']} steps); "
            f"between two tokens of a running sequence {gaps['gap_ms']:.1f} ms (median), "
            f"{gaps['longest_gap_ms']:.1f} (longest), {gaps['quiet_ms']:.1f} before"
        )
        self._save()

    # ---- peers

    def _work(self) -> peers.Work:
        prompt, output = self.args.lengths[0]
        num = 4 if self.device.type == "cpu" else PEER_REQUESTS
        return peers.Work(self.config, self.device, self.dtype, num, prompt, min(output, PEER_OUTPUT))

    def _measure_own(self, engine: Engine) -> None:
        """The load of the peers, on this engine."""
        work = self._work()
        case = Case(work.prompt, work.output, work.num)
        own = self.figures["own"] = measure(engine, case, 0, seed=7)
        self.console.print(f"{work.num} requests, {case.name}, verified: {own['tok_s']:.0f} tokens/s in all")

    def _measure_peer(self, name: str) -> None:
        work = self._work()
        peer = self.figures.setdefault("peers", {})[name] = peers.measure(name, work)
        if "absent" in peer:
            self.console.print(f"[yellow]{peer['absent']}; left out[/]")
        else:
            peer["verified_over"] = self.figures["own"]["tok_s"] / peer["tok_s"]
            self.console.print(
                f"{name}, the same {work.num} requests: {peer['tok_s']:.0f} tokens/s; verified here "
                f"{peer['verified_over']:.2f} times that"
            )
        self._save()

    def _save(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / "h200.json").write_text(json.dumps(self.figures, indent=1))


# ---- options


def _lengths(text: str) -> list[tuple[int, int]]:
    lengths = []
    for pair in text.split(","):
        try:
            prompt, output = (int(part.removesuffix("K")) * (1024 if part.endswith("K") else 1)
                              for part in pair.strip().upper().split("/"))  # fmt: skip
        except ValueError:
            raise argparse.ArgumentTypeError(f"{pair!r}: give prompt/output, as in 1K/256") from None
        lengths.append((prompt, output))
    return lengths


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        chosen = [part for part in text.split(",") if part]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(known)}")
        return chosen

    return names


def _memory(text: str) -> int | float | str:
    return float(text) if text.replace(".", "", 1).isdigit() and "." in text else text


def arguments() -> argparse.Namespace:
    """The options of the command line."""
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
    parser.add_argument("--rows", type=int, default=0, help="compare the bits of this many rows")
    parser.add_argument("--no-cases", dest="cases", action="store_false", help="only --rows and --peers")
    parser.add_argument("--peers", type=_names(peers.PEERS), default=[], help=",".join(peers.PEERS))
    parser.add_argument(
        "--stream-live", type=int, help="sequences that decode while prompts are prefilled; 32"
    )
    parser.add_argument("--newcomers", type=int, help="prompts that arrive meanwhile; 8")
    parser.add_argument("--layers", type=int, help="fewer layers, to try things out")
    parser.add_argument("--kv-memory", type=_memory, default=None, help="bytes or share, as in EngineConfig")
    parser.add_argument(
        "--ahead", type=int, help="inputs of a weight that the cache reads before a linear starts: try 1024"
    )
    parser.add_argument("--budget", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw the figures of an earlier run")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not args.draw and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tests the script with a tiny shape")
    if args.quick:
        args.lengths, args.steps, args.repeats = args.lengths or _lengths("1K/256"), 48, 1
    args.lengths = args.lengths or _lengths(LENGTHS if cuda else "48/16")
    args.live = args.live or _numbers(LIVE if cuda else "1,4")
    args.stream_live = args.stream_live or (32 if cuda else 4)
    args.newcomers = args.newcomers or (8 if cuda else 2)
    args.kv_memory = args.kv_memory or (0.8 if cuda else "256MiB")
    if args.ahead is not None:
        from samewise.kernels.linear import triton as linears  # imports Triton

        linears.AHEAD = args.ahead
    return args


def main() -> None:
    args = arguments()
    if args.draw:
        figures = json.loads(args.draw.read_text())
        Console(width=150).print(case_table(figures))
        print(save_picture(figures, args.draw.parent))
        return
    figures = Bench(args).run()
    if figures["cases"]:
        print(save_picture(figures, args.out))
    print(json.dumps(summary(figures)))


if __name__ == "__main__":
    main()
