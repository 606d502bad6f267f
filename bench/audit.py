"""Measures the time to audit receipts relative to generating the answers one at a time. Last line: JSON.

    python bench/audit.py                     # 100 receipts of the embedded model
    python bench/audit.py --num 20 --max-tokens 48

Both run over the same weights in one process, in turns of a few receipts each, so that other load of the
machine affects them alike. Generation has default settings: `auto`, prefix cache on. Half of the requests are
greedy, half sampled. Loading the model is not timed. CPU seconds are printed beside seconds: they depend less
on other load.

The ratio depends on the lengths: output tokens are generated one at a time and audited many per frame; prompt
tokens are computed many per frame in both.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time

import samewise
from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

from samewise import LLM, SamplingParams  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine  # noqa: E402
from samewise.execute.load import load  # noqa: E402
from samewise.jobs.audit import MAX_REPLAYS, Auditor, Case, make_recorded_tokens  # noqa: E402

TOPICS = (
    "the sea",
    "a violin",
    "bread",
    "the moon",
    "old maps",
    "rain",
    "a bridge",
    "bees",
    "glass",
    "a king",
)
KINDS = (
    "Tell me about {}.", "Write a short story about {}.", "Why do people like {}?", "What is {} made of?",
    "Explain {} to a child.", "Write a poem about {}.", "List five facts about {}.", "How would you draw {}?",
    "What would change without {}?", "Describe {} to somebody who has never seen it.",
)  # fmt: skip


def questions(num: int) -> list[str]:
    """Short questions; the first hundred are distinct."""
    distinct = [kind.format(topic) for kind in KINDS for topic in TOPICS]
    return [distinct[i % len(distinct)] for i in range(num)]


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


class Clock:
    """Total seconds and CPU seconds spent inside `with`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._began[0]
        self.cpu += time.process_time() - self._began[1]

    def __str__(self) -> str:
        return f"{self.wall:.1f} s (CPU {self.cpu:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turn", type=int, default=20, help="receipts made, then audited, at a time")
    args = parser.parse_args()

    config = EngineConfig(model=args.model, device=args.device)
    loaded = load(config)
    llm = LLM.over(Engine(loaded, config))
    settings = EngineConfig(
        model=args.model, device=args.device, max_num_seqs=MAX_REPLAYS, proposer="none", draft_tokens=4096,
        enable_prefix_caching=False, kv_memory=2**28,
    )  # fmt: skip
    auditor = Auditor(Engine(loaded, settings, make_proposer=make_recorded_tokens))

    num_receipts = tokens = prompt_tokens = 0
    generating, auditing = Clock(), Clock()
    texts = questions(args.num)
    for first in range(0, args.num, args.turn):
        receipts = []
        with generating:
            for i, text in enumerate(texts[first : first + args.turn], first):
                params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=args.max_tokens)
                prompt = llm.chat_prompt([{"role": "user", "content": text}])
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                receipts += llm.receipts(output, params)
        with auditing:
            findings = list(auditor.audit([Case(str(i), receipt) for i, receipt in enumerate(receipts)]))
        assert all(finding.is_same for finding in findings), findings
        num_receipts += len(receipts)
        tokens += sum(len(receipt.token_ids) for receipt in receipts)
        prompt_tokens += sum(receipt.prompt_len for receipt in receipts)
        print(f"{num_receipts} receipts: generated in {generating}, audited in {auditing}", flush=True)
    speed = (prompt_tokens + tokens) / auditing.wall
    ratio, cpu_ratio = generating.wall / auditing.wall, generating.cpu / auditing.cpu
    print(f"audit {ratio:.1f} times as fast ({cpu_ratio:.1f} in CPU time), {speed:.0f} tokens/s")
    result = {
        "receipts": num_receipts, "tokens": tokens, "prompt_tokens": prompt_tokens,
        "generate_s": round(generating.wall, 2), "audit_s": round(auditing.wall, 2),
        "ratio": round(ratio, 2), "cpu_ratio": round(cpu_ratio, 2), "contract": auditor.contract.id,
        "commit": commit(),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.platform(),
        "samewise": samewise.__version__,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
