"""Law 11's runs: engines over one folder, what they answer to a set of requests, and their contracts' ids.

Run as a program it does the same in a process of its own: folder and settings as JSON, results as JSON.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise import machine

machine.pin_environment()  # before torch is imported

from law_helpers import Case, random_prompt, run_cases, sampled  # noqa: E402

from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine, build  # noqa: E402
from samewise.types import Sampling  # noqa: E402

VOCAB = 70_016
"""torch splits sums of more than 32768 elements over its threads."""

SETUPS: dict[str, dict[str, Any]] = {
    "native": {"dtype": "float32"},  # the contract names no machine where there is a C++ compiler
    "torch": {"dtype": "float32", "linear": "torch"},
    "bfloat16": {"dtype": "bfloat16"},
}

REQUESTS: tuple[Case, ...] = (
    Case("greedy", random_prompt(33), max_tokens=6),
    Case("to the end of a short context", random_prompt(30), max_tokens=30),
    Case("sampled", random_prompt(17), sampled(3, top_logprobs=3), max_tokens=6),
    Case("filters", random_prompt(16), sampled(5, top_k=400, top_p=0.95, min_p=0.001), max_tokens=6),
    Case(
        "penalties", random_prompt(9), sampled(6, presence_penalty=1.0, repetition_penalty=1.2), max_tokens=6
    ),
    Case("scored", random_prompt(25), Sampling(top_logprobs=2), max_tokens=3, prompt_logprobs=2),
)


@dataclass(frozen=True)
class Run:
    """One engine's contract and every bit it answered, as text."""

    id: str
    facts: tuple[tuple[str, str], ...]
    bits: str


def start(folder: Path, setup: str, **settings: Any) -> Engine:
    """An engine of a setup over a folder."""
    fixed = {"model": str(folder), "device": "cpu", "kv_memory": 2**24, "max_model_len": 256}
    return build(EngineConfig.of(**(fixed | SETUPS[setup] | settings)))


def answer(engine: Engine) -> Run:
    """Run the requests, all at once."""
    outputs = [vars(output) for output in run_cases(engine, REQUESTS)]
    return Run(engine.contract.id, engine.contract.facts, json.dumps(outputs, sort_keys=True))


def run_in_child(folder: Path, setups: list[str], variables: dict[str, str]) -> dict[str, Run]:
    """The same in a new process, by setup. Variables that pin threads do not come from this process."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "ONEDNN_"))}
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[2] / "src"), str(here.parent)])
    env = inherited | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"} | variables
    command = [sys.executable, "-W", "ignore", str(here), str(folder), *setups]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])
    return {
        setup: Run(run["id"], tuple(map(tuple, run["facts"])), run["bits"]) for setup, run in runs.items()
    }


def main() -> None:
    """Folder and setups from the command line; one line of JSON to standard output."""
    folder, *setups = sys.argv[1:]
    print(json.dumps({setup: vars(answer(start(Path(folder), setup))) for setup in setups}))


if __name__ == "__main__":
    main()
