"""Runs lm-evaluation-harness in a process of its own, because of its warnings, event loops and threads.

    python harness.py URL FOLDER TASKS OUT

For every number of concurrent requests, and for prompts as token ids and as text, writes all samples of all
tasks to OUT as JSON: the arguments, and every log-probability and text of the replies.
"""

import json
import sys
from pathlib import Path
from typing import Any

CONCURRENT = (1, 4, 16)


def evaluate(url: str, folder: str, tasks: str, concurrent: int, *, ids: bool) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny", "base_url": f"{url}/v1/completions", "num_concurrent": concurrent,
            "tokenizer": folder, "tokenizer_backend": "huggingface", "tokenized_requests": ids,
            "max_length": 512, "max_retries": 1, "eos_string": "</s>", "timeout": 120,
        },
        tasks=["same_choice", "same_text", "same_sampled", "same_rolling"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        log_samples=True, bootstrap_iters=0, verbosity="WARNING",
    )  # fmt: skip
    samples = {
        task: [{"args": one["arguments"], "replies": one["resps"]} for one in listed]
        for task, listed in sorted(results["samples"].items())
    }
    return {"samples": samples, "scores": {task: results["results"][task] for task in samples}}


def main() -> None:
    url, folder, tasks, out = sys.argv[1:]
    runs = [
        {"concurrent": concurrent, "ids": ids} | evaluate(url, folder, tasks, concurrent, ids=ids)
        for ids in (True, False)
        for concurrent in CONCURRENT
    ]
    Path(out).write_text(json.dumps(runs, default=str))


if __name__ == "__main__":
    main()
