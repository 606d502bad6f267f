"""bench/attack.py: what it judges, and one attack end to end on a tiny model."""

import asyncio
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def _script_folder_on_path(monkeypatch):
    """The scripts import each other as they do when run from a shell."""
    monkeypatch.syspath_prepend(str(BENCH))


def test_every_line_of_the_table_has_an_attack_and_names_are_unique():
    import attack

    assert {one.line for one in attack.ordered()} == set(attack.LINES)
    names = [one.name for one in attack.ordered()]
    assert len(names) == len(set(names))
    assert [one.name for one in attack.selected("receipt,TLS")] == ["altered-receipts", "tls"]
    with pytest.raises(SystemExit, match="no attack 'fire'"):
        attack.selected("Fire")


def test_the_table_of_the_documentation_has_every_attack():
    import attack

    lines = (BENCH.parent / "docs" / "security.md").read_text().splitlines()
    rows = [line.removeprefix("| ").split(" | ")[:2] for line in lines if line.startswith("| ")][1:]
    listed = sorted([one.line, one.title] for one in attack.ordered())
    assert sorted([line, re.sub(r" \*[a-z]\*$", "", title)] for line, title in rows) == listed


def test_a_bystander_with_errors_or_long_waits_did_not_hold():
    import attack
    from attack_tools import Watched

    quiet = Watched([0.1] * 9, [0.01] * 9, [])
    assert attack.judge_bystander(quiet, Watched([0.25] * 9, [0.05] * 200, [])) == []
    (late,) = attack.judge_bystander(quiet, Watched([0.4] * 9, [0.01], []))
    assert "first token 0.400 s" in late
    (health,) = attack.judge_bystander(quiet, Watched([0.1], [0.01] * 50 + [0.3] * 50, []))
    assert "/health took 0.300 s" in health
    lone = Watched([0.1], [0.01] * 200 + [0.4], [])
    assert attack.judge_bystander(quiet, lone) == []
    (stall,) = attack.judge_bystander(quiet, Watched([0.1], [0.01] * 200 + [5.0], []))
    assert "/health once took 5.000 s" in stall
    assert any("refused" in one for one in attack.judge_bystander(quiet, Watched([0.1], [0.01], ["refused"])))
    assert len(attack.judge_bystander(quiet, Watched([], [], []))) == 2  # nothing was measured


def test_the_table_has_the_worst_answer_of_health(capsys):
    import attack
    from attack_tools import Watched

    summary = attack.summary(Watched([0.1], [0.01], []), Watched([0.2], [0.02] * 200 + [0.3], []))
    row = {"line": "x", "name": "y", "title": "z", "tried": 1, "held": True, "before": "", "now": ""}
    attack.report([row | {"broken": [], "bystander": summary}])
    assert "| 20.0, 300.0 ms |" in capsys.readouterr().out


def refusal(field, status=400):
    """A response of a server that refuses a field."""
    return {"status_code": status, "request_id": "r", "body": {"error": {"message": "m", "param": field}}}


def test_odd_bodies_must_be_refused_by_name(monkeypatch):
    import attack_requests
    from attack_tools import Reply

    answers = {"right": [], "answered": ["200"] * 2, "other field": ["400"] * 2, "failed": ["500"] * 2}

    def outcome(kind):
        async def send(server, method, path, body):
            field = next(name for name in attack_requests.ODD_BODIES if name in body)
            named = refusal("other" if kind == "other field" else field + ".x")["body"]
            status = {"answered": 200, "failed": 500}.get(kind, 400)
            return Reply(status, json.dumps({"choices": []} if status == 200 else named).encode(), 0.1)

        monkeypatch.setattr(attack_requests, "send", send)
        return asyncio.run(attack_requests.odd_fields(SimpleNamespace(server=None)))

    for kind, statuses in answers.items():
        broken = outcome(kind).broken
        assert [one.split(": ")[1].split()[0] for one in broken] == statuses


def test_lines_of_a_batch_are_compared_with_what_they_must_say():
    from attack_requests import ODD_BODIES, wrong_batch_lines

    good = {"status_code": 200, "request_id": "r", "body": {"choices": []}}
    responses = [good, *map(refusal, ODD_BODIES), good]

    def lines(changes):
        return [
            {"custom_id": str(i), "response": changes.get(i, one), "error": None}
            for i, one in enumerate(responses)
        ]

    assert wrong_batch_lines(lines({})) == []
    assert wrong_batch_lines(lines({})[:-1]) == ["answered ['0', '1', '2']"]
    for changes in ({0: refusal("x")}, {1: good}, {2: refusal("another")}, {3: refusal("x", 500)}):
        assert len(wrong_batch_lines(lines(changes))) == 1


def test_a_large_answer_that_is_refused_or_short_did_not_hold(monkeypatch):
    import attack_requests
    from attack_tools import Reply

    async def outcome(reply):
        async def send(*_, **__):
            return reply

        monkeypatch.setattr(attack_requests, "send", send)
        return (await attack_requests.large_answer(SimpleNamespace(server=None))).broken

    whole = Reply(200, b'"top_logprobs"' * 128 * 172, 1.0)
    assert asyncio.run(outcome(whole)) == []
    for other in (Reply(429, b"", 1.0), Reply(400, b"", 1.0), Reply(200, b'"top_logprobs"', 1.0)):
        assert len(asyncio.run(outcome(other))) == 1


def test_chunks_of_a_response_are_joined():
    from attack_tools import parse_reply

    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    reply = parse_reply(data, 1.0)
    assert (reply.status, reply.body) == (200, b"abcde")
    assert parse_reply(b"", 1.0).status == 0


@pytest.mark.slow
def test_attacks_run_against_a_server_process(monkeypatch, capsys, tmp_path):
    options = ("--model", "tiny", "--only", "odd-paths,odd-fields", "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attack.py", *options])
    try:
        runpy.run_path(str(BENCH / "attack.py"), run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert code == int(not all(row["held"] for row in rows))  # the bystander's times are the machine's
    assert [row["name"] for row in rows] == ["odd-fields", "odd-paths"]
    assert all(row["bystander"]["errors"] == 0 for row in rows)
    # Nor does a slow machine break anything: an attack that ran past its bound was cut off.
    timing = ("bystander", "ran past its bound")
    assert [one for row in rows for one in row["broken"] if not any(part in one for part in timing)] == []
    assert (tmp_path / "attack.json").exists()
