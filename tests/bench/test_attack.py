"""bench/attack.py: what it judges, and one attack end to end on a tiny model."""

import contextlib
import json
import runpy
import sys
from pathlib import Path

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


def test_a_bystander_with_errors_or_long_waits_did_not_hold():
    import attack
    from attack_tools import Watched

    quiet = Watched([0.1] * 9, [0.01] * 9, [])
    assert attack.judge_bystander(quiet, Watched([0.25] * 9, [0.05] * 200, [])) == []
    (late,) = attack.judge_bystander(quiet, Watched([0.4] * 9, [0.01], []))
    assert "first token 0.400 s" in late
    (health,) = attack.judge_bystander(quiet, Watched([0.1], [0.01] * 50 + [0.3] * 50, []))
    assert "/health took 0.300 s" in health
    assert any("refused" in one for one in attack.judge_bystander(quiet, Watched([0.1], [0.01], ["refused"])))
    assert len(attack.judge_bystander(quiet, Watched([], [], []))) == 2  # nothing was measured


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
    with contextlib.suppress(SystemExit):  # the bystander's times are those of a busy machine
        runpy.run_path(str(BENCH / "attack.py"), run_name="__main__")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["odd-fields", "odd-paths"]
    assert all(row["bystander"]["errors"] == 0 for row in rows)
    # Nor does a slow machine break anything: an attack that ran past its bound was cut off.
    timing = ("bystander", "ran past its bound")
    assert [one for row in rows for one in row["broken"] if not any(part in one for part in timing)] == []
    assert (tmp_path / "attack.json").exists()
