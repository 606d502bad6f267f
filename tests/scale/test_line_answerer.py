"""The class for `map_batches` gives the lines of a batch on one machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samewise.errors import MachineError
from samewise.jobs.batch import run
from samewise.jobs.batch_file import parse_line
from samewise.scale import LineAnswerer
from samewise.scale.batch import CONTRACT, LINE, OUTPUT, RETRIES, _answer_on
from samewise.testing import tiny_engine

SRC = Path(__file__).parents[2] / "src"


def line(number: int, **body: Any) -> str:
    fields = {"prompt": f"say {number}", "max_tokens": 5, "temperature": 0.8} | body
    return json.dumps({"custom_id": f"l{number}", "url": "/v1/completions", "body": fields})


def outcome(output: dict[str, Any]) -> dict[str, Any]:
    body = output["response"]["body"] if output["response"] else {}
    body.pop("created", None)
    return output


def test_a_worker_whose_engine_is_lost_ends_its_process() -> None:
    program = (
        "import logging\n"
        "from samewise.scale import LineAnswerer\n"
        "from samewise.testing import tiny_engine\n"
        "logging.basicConfig()\n"
        "answerer = LineAnswerer(make_engine=tiny_engine)\n"
        "answerer._engine._calls.lose(RuntimeError('CUDA error: as a device would say'))\n"
        f"answerer({{'line': [{line(0)!r}]}})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(SRC)}, capture_output=True,
        text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "as a device would say" in ran.stderr
    assert "this worker ends: its engine has stopped" in ran.stderr


def test_lines_have_the_output_of_a_batch(tmp_path: Path) -> None:
    lines = [line(0), line(1, n=2, logprobs=1), line(2, temperature="hot"), line(3), "no request"]
    (tmp_path / "in").write_text("\n".join(lines))
    run(tmp_path / "in", tmp_path / "out", tiny_engine)
    wanted = {
        output["custom_id"]: outcome(output)
        for output in map(json.loads, (tmp_path / "out").read_text().splitlines())
    }
    answerer = LineAnswerer(make_engine=tiny_engine)
    for _ in range(2):  # an actor answers many batches
        rows = answerer({LINE: lines, "place": list(range(5))})
        assert rows["place"] == list(range(5))
        outputs = [outcome(json.loads(text)) for text in rows[OUTPUT]]
        assert [output["custom_id"] for output in outputs] == ["l0", "l1", "l2", "l3", None]
        assert [wanted[output["custom_id"]]["response"] for output in outputs] == [
            output["response"] for output in outputs
        ]
        assert "not JSON" in outputs[4]["error"]["message"]
        contract = tiny_engine().contract
        assert {tuple(map(tuple, json.loads(facts))) for facts in rows[CONTRACT]} == {contract.facts}


class StubData:
    """Ray Data whose workers die. Notes what it was told of them."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.data, self.DataContext, self.ActorPoolStrategy = self, self, dict
        self.exceptions, self.RayError = self, RuntimeError
        self.execution_options = self

    def get_current(self) -> "StubData":
        return self

    def from_items(self, rows: list[Any], *, override_num_blocks: int) -> "StubData":
        return self

    def map_batches(self, answerer: type, **options: Any) -> "StubData":
        self.options = options
        return self

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        raise RuntimeError("the actor died")


def test_lines_that_end_worker_after_worker_end_the_batch() -> None:
    stub = StubData()
    lines = [parse_line(0, line(0).encode())]
    with pytest.raises(MachineError, match="the workers cannot go on: the actor died"):
        list(_answer_on(stub, lines, {}, 1, 1.0, 0, lambda _: None))
    assert stub.options["max_task_retries"] == RETRIES
