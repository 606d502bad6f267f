"""lm-evaluation-harness: every sample gets the same bits at any number of concurrent requests."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import CLIENT_ENV, ServerProcess

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; see make test-clients")

NUM = 24  # documents of each task
COMMON = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
num_fewshot: 0
metadata: {{version: 1}}
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "zz"], max_gen_toks: 40, temperature: %s, do_sample: %s}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


def write_tasks(path: Path) -> None:
    """Four tasks over a small generated set: choices, greedy text, sampled text, rolling log-likelihoods."""
    rng = random.Random(0)
    words = ["frame", "span", "row", "page", "truth", "guess", "replay", "bit", "crowd", "alone", "ß", "日本"]
    docs = [
        {
            "question": " ".join(rng.choices(words, k=rng.randint(1, 24))),
            "choices": [" " + " ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(4)],
            "answer": rng.randrange(4),
        }
        for _ in range(NUM)
    ]
    data = path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for task, kind, options in (
        ("same_choice", "multiple_choice", CHOICE),
        ("same_text", "generate_until", TEXT % ("0.0", "false")),
        ("same_sampled", "generate_until", TEXT % ("0.9", "true")),
        ("same_rolling", "loglikelihood_rolling", ROLLING),
    ):
        (path / f"{task}.yaml").write_text(COMMON.format(task=task, data=data, kind=kind) + options)


def test_samples_are_equal_at_any_concurrency(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out.json"
    tasks.mkdir()
    write_tasks(tasks)
    env = os.environ | CLIENT_ENV | {"HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "none"}
    script = Path(__file__).parent / "harness.py"
    ran = subprocess.run(
        [sys.executable, str(script), server.url, str(folder), str(tasks), str(out)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=420,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    assert [(run["concurrent"], run["ids"]) for run in runs] == [
        (n, i) for i in (True, False) for n in (1, 4, 16)
    ]
    first = runs[0]
    replies = {task: [one["replies"] for one in listed] for task, listed in first["samples"].items()}
    assert sorted(replies) == ["same_choice", "same_rolling", "same_sampled", "same_text"]
    assert len(replies["same_choice"]) == len(replies["same_text"]) == NUM
    assert len({json.dumps(one) for one in replies["same_choice"]}) == NUM  # the documents differ
    assert any(text for one in replies["same_text"] for text in one[0])
    assert replies["same_text"] != replies["same_sampled"]
    for run in runs[1:]:
        assert run["samples"] == first["samples"], (run["concurrent"], run["ids"])
        assert run["scores"] == first["scores"]
    server.check_idle()
