"""lm-evaluation-harness: whatever the number of requests at once, every sample gets the same bits."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house import QUIET_ENV, House

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
    """Three tasks over a small set made here: log-likelihoods, greedy text, sampled text."""
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
    for task, kind, rest in (
        ("same_choice", "multiple_choice", CHOICE),
        ("same_text", "generate_until", TEXT % ("0.0", "false")),
        ("same_sampled", "generate_until", TEXT % ("0.9", "true")),
        ("same_rolling", "loglikelihood_rolling", ROLLING),
    ):
        (path / f"{task}.yaml").write_text(COMMON.format(task=task, data=data, kind=kind) + rest)


def test_the_same_at_any_concurrency(house: House, folder: Path, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out.json"
    tasks.mkdir()
    write_tasks(tasks)
    env = os.environ | QUIET_ENV | {"HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "none"}
    script = Path(__file__).parent / "harness.py"
    ran = subprocess.run(
        [sys.executable, str(script), house.url, str(folder), str(tasks), str(out)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=420,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    assert [(run["concurrent"], run["ids"]) for run in runs] == [
        (n, i) for i in (True, False) for n in (1, 4, 16)
    ]
    first = runs[0]
    said = {task: [one["said"] for one in listed] for task, listed in first["samples"].items()}
    assert sorted(said) == ["same_choice", "same_rolling", "same_sampled", "same_text"]
    assert len(said["same_choice"]) == len(said["same_text"]) == NUM
    assert len({json.dumps(one) for one in said["same_choice"]}) == NUM  # they are not all alike
    assert any(text for one in said["same_text"] for text in one[0])
    assert said["same_text"] != said["same_sampled"]
    for run in runs[1:]:
        assert run["samples"] == first["samples"], (run["concurrent"], run["ids"])
        assert run["scores"] == first["scores"]
    house.quiet()
