"""What auditing receipts costs, beside generating the answers one at a time. Last line: JSON.

    python bench/audit.py                     # 100 receipts of the embedded model
    python bench/audit.py --num 20 --max-tokens 48

Both run over the same weights in one process, in turns of a few receipts each, so that a noisy neighbour
disturbs them alike. Generating is as a user would have it: `auto`, prefix cache on. Half of the requests
are greedy, half sampled. Loading the model is in neither.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time

import samewise
from samewise import machine

machine.settle()

import torch  # noqa: E402

from samewise import LLM, SamplingParams  # noqa: E402
from samewise.assemble import load  # noqa: E402
from samewise.audit import TOGETHER, Auditor, Case, reciting  # noqa: E402
from samewise.bench.workload import read  # noqa: E402
from samewise.config import EngineConfig  # noqa: E402
from samewise.engine import Engine  # noqa: E402

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


def questions(num: int) -> list[str]:
    """The project's own, then short ones, no two alike."""
    found = [question.text for question in read() if len(question.text) < 400]
    kinds = ("Tell me about {}.", "Write a line on {}.", "Why do people like {}?", "What is {} made of?")
    short = [kind.format(topic) for kind in kinds for topic in TOPICS]
    more = [f"{text} Answer in {words} words." for words in range(5, 100) for text in short]
    return (found + short + more)[:num]


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turn", type=int, default=25, help="receipts made, then audited, at a time")
    args = parser.parse_args()

    config = EngineConfig(model=args.model, device=args.device)
    loaded = load(config)
    llm = LLM.over(Engine(loaded, config))
    settings = EngineConfig(
        model=args.model, device=args.device, max_num_seqs=TOGETHER, proposer="none", draft_tokens=4096,
        enable_prefix_caching=False, kv_memory=2**28,
    )  # fmt: skip
    auditor = Auditor(Engine(loaded, settings, make_proposer=reciting))

    made = tokens = prompt_tokens = 0
    generating = auditing = 0.0
    asked = questions(args.num)
    for first in range(0, args.num, args.turn):
        receipts = []
        began = time.perf_counter()
        for i, text in enumerate(asked[first : first + args.turn], first):
            params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=args.max_tokens)
            prompt = llm.chat_prompt([{"role": "user", "content": text}])
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            receipts += llm.receipts(output, params)
        generating += time.perf_counter() - began
        began = time.perf_counter()
        findings = list(auditor.audit([Case(str(i), receipt) for i, receipt in enumerate(receipts)]))
        auditing += time.perf_counter() - began
        assert all(finding.good for finding in findings), findings
        made += len(receipts)
        tokens += sum(len(receipt.token_ids) for receipt in receipts)
        prompt_tokens += sum(receipt.prompt_len for receipt in receipts)
        print(f"{made} receipts: generated in {generating:.1f} s, audited in {auditing:.1f} s", flush=True)
    print(
        f"audit {generating / auditing:.1f} times as fast, {(prompt_tokens + tokens) / auditing:.0f} rows/s"
    )
    result = {
        "receipts": made, "tokens": tokens, "prompt_tokens": prompt_tokens,
        "generate_s": round(generating, 2), "audit_s": round(auditing, 2),
        "ratio": round(generating / auditing, 2), "contract": auditor.contract.id, "commit": commit(),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.platform(),
        "samewise": samewise.__version__,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
