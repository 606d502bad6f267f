"""The class for `map_batches` gives the lines of a batch on one machine."""

import json
from pathlib import Path
from typing import Any

from samewise.jobs.batch import run
from samewise.scale import LineAnswerer
from samewise.scale.batch import CONTRACT, LINE, OUTPUT
from samewise.testing import tiny_engine


def line(number: int, **body: Any) -> str:
    fields = {"prompt": f"say {number}", "max_tokens": 5, "temperature": 0.8} | body
    return json.dumps({"custom_id": f"l{number}", "url": "/v1/completions", "body": fields})


def outcome(output: dict[str, Any]) -> dict[str, Any]:
    body = output["response"]["body"] if output["response"] else {}
    body.pop("created", None)
    return output


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
