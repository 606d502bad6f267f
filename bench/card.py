"""Every figure of one CUDA card in one go, the most important first; a short table last.

    python bench/card.py --list                          # the steps and their time limits
    python bench/card.py --out card                      # all of them, for at most 25 minutes
    python bench/card.py --only decode tiles --budget 540
    python bench/card.py --only text serve --model FOLDER --questions FILE.jsonl [--draft-model FOLDER]

Each step is another script of this folder, or tests, in a process of its own with a time limit of its own:
one that fails or takes too long does not stop the others. `--out` gets everything they print in `card.log`,
the table in `card.txt`, the last line of each script in `card.json`, and the pictures of the first two steps.
What a script needs beside the card is in docs/benchmarks.md; kernels are compiled at first use, so the first
start-up is a cold one and the next are warm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
H200 = r"start-up|live: ceiling|arrive while|longest|bits: |left out"
LINEAR = r"^linear  |^\w+ +\d+ +\d+\.\d "
PROFILE = r"tokens a step|^  device "
RL = r"limit: |samewise.rl|GB, |new weights|update_weights|apart at most"
TESTS = r" (PASSED|FAILED|ERROR)\b|^(FAILED|ERROR) |\d+ (passed|failed)"
MIN_SECONDS = 20  # no step is begun with less time than this


class Step(NamedTuple):
    """A command, its time limit, and the lines of its output that are shown in the table."""

    name: str
    seconds: int
    shown: str  # a pattern
    command: tuple[str, ...]  # "OUT": the folder of all output, "TMP": one that is deleted
    about: str


def script(line: str) -> tuple[str, ...]:
    """The command of a script of this folder, with its options."""
    name, *options = line.split()
    return sys.executable, str(BENCH / name), *options


DECODE = "h200.py --quick --out TMP --modes verified"
LONG = "--lengths 1K/256,4K/256,8K/32 --live 8,32,256 --steps 16 --repeats 1"
LINEAR_LAWS = "-m pytest -v -m gpu -p no:cacheprovider tests/kernels/test_linear_triton.py"
RL_LAWS = "-m pytest -v -m gpu -p no:cacheprovider tests/llm/test_update_modes.py tests/rl"
STEPS = (
    Step("decode", 300, H200, script("h200.py --quick --live 1,8,32,64,128 --out OUT"), "8B shape"),
    Step("profile", 90, PROFILE, script("step.py --profile --live 64 --out OUT"), "64 live"),
    Step("tiles", 240, LINEAR, script("linear.py --rows 8 32 64 128 --others"), "8B linears"),
    Step("ahead", 120, H200, script(f"{DECODE} --live 1,8,64 --ahead 1024"), "8B, weights read ahead"),
    Step("profile-128", 90, PROFILE, script("step.py --profile --live 128 --out TMP"), "128 live"),
    Step("bits", 120, H200, script("h200.py --rows 100000 --no-cases --out TMP"), "rows that differ"),
    Step("linear-laws", 480, TESTS, (sys.executable, *LINEAR_LAWS.split()), "the bits of all tiles"),
    Step("trees", 120, "^rows ", script("frame.py --device cuda --trees"), "trees beside chains"),
    Step("tiles-1.5b", 150, LINEAR, script("linear.py --shape 1.5b --rows 1 64 128 --others"), "linears"),
    Step("long", 240, H200, script(f"h200.py {LONG} --modes verified --out TMP"), "other lengths, 256 live"),
    Step("profile-1", 90, PROFILE, script("step.py --profile --live 1 --out TMP"), "1 live"),
    Step("profile-8", 90, PROFILE, script("step.py --profile --live 8 --out TMP"), "8 live"),
    Step("rl-1.5b", 180, RL, script("rl.py --model 1.5b"), "rollout and trainer, gradients, new weights"),
    Step("rl-8b", 300, RL, script("rl.py --model 8b"), "rollout and trainer, gradients, new weights"),
    Step("rl-laws", 480, TESTS, (sys.executable, *RL_LAWS.split()), "rollout and trainer, all families"),
    Step("laws", 560, TESTS, ("make", "test-gpu", f"PYTHON={sys.executable}"), "all tests that need a card"),
)


def text_step(args: argparse.Namespace) -> Step:
    """Speculation on real questions with real weights."""
    proposers = ["none", "auto", *(["auto+model", "model"] if args.draft_model else [])]
    folders = {"--model": args.model, "--questions": args.questions, "--draft-model": args.draft_model}
    options = [part for name, path in folders.items() if path for part in (name, str(path.resolve()))]
    options += ["--proposers", *proposers]
    shown = r"live  .*ratio|^  (none|auto|model)"
    command = (*script("real_text.py"), *options)
    return Step("text", 420, shown, command, "tokens/s of proposers beside `none`")


def serve_step(args: argparse.Namespace) -> Step:
    """The server's pace beside the engine's own, on real weights."""
    options = ["--model", str(args.model.resolve()), "--clients", "64", "--repeats", "3"]
    return Step("serve", 240, r"^median: |did not start", (*script("serve.py"), *options), "64 clients")


def run(step: Step, seconds: float, out: Path, log: Path) -> tuple[str, list[str]]:
    """Run a step for at most this long. Returns how it ended, and its output."""
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, log.open("a+", errors="replace") as file:
        places = {"OUT": str(out.resolve()), "TMP": temporary}
        command = [places.get(part, part) for part in step.command]
        file.write(f"\n== {step.name}: {' '.join(command)}\n")
        file.flush()
        start = file.tell()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | paths, stdout=file, stderr=subprocess.STDOUT,
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            return f"not run: {error}", []
        try:
            end = f"exit {code}" if (code := process.wait(seconds)) else "done"
        except subprocess.TimeoutExpired:
            end = "stopped"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the step's own processes
                process.wait()
        file.seek(start)
        lines = file.read().splitlines()
    return f"{end} after {time.perf_counter() - began:.0f} s", lines


def last_json(lines: list[str]) -> Any:
    """The figures in a script's last line; None where it printed none."""
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None


def measure(steps: list[Step], budget: float, out: Path) -> list[str]:
    """Run the steps one after the other; the table's lines. Files are up to date after each step."""
    out.mkdir(parents=True, exist_ok=True)
    table: list[str] = []
    figures: dict[str, Any] = {}
    deadline = time.perf_counter() + budget
    for step in steps:
        left = min(step.seconds, deadline - time.perf_counter())
        if left < MIN_SECONDS:
            table.append(f"{step.name}: not begun, the budget is spent")
            continue
        end, lines = run(step, left, out, out / "card.log")
        print(f"{step.name}: {end}", flush=True)
        shown = [line.rstrip() for line in lines if re.search(step.shown, line) and line[:1] != "{"]
        table += [f"{step.name} ({step.about}): {end}", *(f"  {line[:180]}" for line in shown)]
        if not end.startswith("done"):
            table += [f"  | {line[:180]}" for line in lines[-4:]]
        figures[step.name] = last_json(lines)
        (out / "card.txt").write_text("\n".join(table) + "\n")
        (out / "card.json").write_text(json.dumps(figures))
    return table


def main() -> None:
    """Choose the steps, run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the steps; run none")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, in this order")
    parser.add_argument("--budget", type=float, default=1500, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=Path("bench-out/card"))
    parser.add_argument("--model", type=Path, help="real weights, for the steps `text` and `serve`")
    parser.add_argument("--draft-model", type=Path, help="a smaller model of the same vocabulary")
    parser.add_argument("--questions", type=Path, help="a file of questions, see bench/real_text.py")
    args = parser.parse_args()
    if bool(args.model) != bool(args.questions):
        parser.error("--model and --questions belong together")
    steps = {step.name: step for step in STEPS}
    if args.model:
        before = ("decode", "profile", "tiles")
        real = {"text": text_step(args), "serve": serve_step(args)}
        steps = {name: steps[name] for name in before} | real | steps
    if unknown := [name for name in args.only or () if name not in steps]:
        parser.error(f"no step {unknown[0]!r}: there are {', '.join(steps)}")
    chosen = [steps[name] for name in args.only or steps]
    if args.list:
        for step in chosen:
            print(f"{step.name:12} {step.seconds:4} s at most  {step.about}: {' '.join(step.command[1:])}")
        return
    print("\n".join(measure(chosen, args.budget, args.out)))


if __name__ == "__main__":
    main()
