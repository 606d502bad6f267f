"""Law 11's runs: engines over one folder, what they answer to a set of requests, and their contracts' ids.

Run as a program it does the same in a process of its own: folder and settings as JSON, results as JSON.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise import machine

machine.pin_environment()  # before torch is imported

import torch  # noqa: E402
from law_helpers import Case, random_prompt, run_cases, sampled  # noqa: E402

from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine, build  # noqa: E402
from samewise.llm import LLM  # noqa: E402
from samewise.params import SamplingParams  # noqa: E402
from samewise.types import Sampling  # noqa: E402

ROUND_DOWN = 0x400
"""C's FE_DOWNWARD on x86-64. Elsewhere the number means another mode, or none."""

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
    Case("min_p", random_prompt(8), Sampling(temperature=3.0, seed=7, min_p=0.25), max_tokens=40),
    Case("scored", random_prompt(25), Sampling(top_logprobs=2), max_tokens=3, prompt_logprobs=2),
)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
PROMPTS: tuple[dict[str, Any], ...] = ({}, {"tools": TOOLS}, {"add_generation_prompt": False})
"""Arguments of the chat template."""


@dataclass(frozen=True)
class Run:
    """One engine's contract, and every bit it answered and every prompt it made, as text."""

    id: str
    facts: tuple[tuple[str, str], ...]
    bits: str


def start(folder: Path, setup: str, **settings: Any) -> Engine:
    """An engine of a setup over a folder."""
    fixed = {"model": str(folder), "device": "cpu", "kv_memory": 2**24, "max_model_len": 256}
    return build(EngineConfig.of(**(fixed | SETUPS[setup] | settings)))


def answer(engine: Engine) -> Run:
    """Run the requests, all at once, and answer one as a user's program does."""
    outputs: list[Any] = [vars(output) for output in run_cases(engine, REQUESTS)]
    outputs += _of_program(LLM.over(engine))
    return Run(engine.contract.id, engine.contract.facts, json.dumps(outputs, sort_keys=True))


def _of_program(llm: LLM) -> list[Any]:
    """Prompts of a conversation, and an answer that ends where the model's settings say."""
    prompts = [llm.chat_prompt([{"role": "user", "content": "Hello!"}], **each) for each in PROMPTS]
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=8)
    (output,) = llm.generate([list(random_prompt(12))], params, use_tqdm=False)
    (completion,) = output.outputs
    return [*prompts, [list(completion.token_ids), completion.finish_reason]]


def answer_with_pool(engine: Engine) -> Run:
    """The same from a new thread, whose pool of OpenMP threads was made under another rounding mode.

    Threads of a pool keep the mode that the thread had which made them.
    """
    libc, runs = ctypes.CDLL(None), []

    def work() -> None:
        libc.fesetround(ROUND_DOWN)
        torch.full((1 << 20,), 1.0).div_(3)
        libc.fesetround(0)
        runs.append(answer(engine))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return runs[0]


def run_in_child(
    folder: Path, setups: list[str], variables: dict[str, str], *, pool: bool = False
) -> dict[str, Run]:
    """The same in a new process, by setup. Variables that pin threads do not come from this process.

    `pool`: see `answer_with_pool`.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "ONEDNN_"))}
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[2] / "src"), str(here.parent)])
    env = inherited | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"} | variables
    how = ["--pool"] if pool else []
    command = [sys.executable, "-W", "ignore", str(here), *how, str(folder), *setups]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])
    return {
        setup: Run(run["id"], tuple(map(tuple, run["facts"])), run["bits"]) for setup, run in runs.items()
    }


def main() -> None:
    """Folder and setups from the command line; one line of JSON to standard output."""
    pool = sys.argv[1] == "--pool"
    folder, *setups = sys.argv[1 + pool :]
    run = answer_with_pool if pool else answer
    print(json.dumps({setup: vars(run(start(Path(folder), setup))) for setup in setups}))


if __name__ == "__main__":
    main()
