"""bench/drafts.py on small made traces: what it counts, and what it keeps between answers."""

import gzip
import json
import random
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def drafts(monkeypatch, capsys):
    """Run the script; returns the figures of its last line."""
    monkeypatch.syspath_prepend(str(BENCH))

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["drafts.py", *map(str, options)])
        runpy.run_path(str(BENCH / "drafts.py"), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def made_trace(kind, seed, answer):
    rng = random.Random(seed)
    prompt = [rng.randrange(100, 400) for _ in range(12)]

    def rows(tokens):
        return [[token, *(400 + (token + i) % 90 for i in range(7))] for token in tokens]

    return {"kind": kind, "prompt": prompt, "answer": answer, "tops": rows(answer)}


@pytest.fixture
def traces(tmp_path):
    """Two equal answers to different prompts, and one that repeats itself."""
    path, once = tmp_path / "traces.json.gz", list(range(40))
    made = [made_trace("same", 1, once), made_trace("same", 2, once), made_trace("repeats", 3, once[:10] * 4)]
    path.write_bytes(gzip.compress(json.dumps(made).encode()))
    return path


def test_repeated_text_takes_fewer_frames_and_more_nodes_do_not_take_more(drafts, traces):
    tree = drafts("--traces", traces, "--nodes", "4,16")["tree"]
    assert tree["16"]["kinds"]["repeats"] > 3
    assert tree["16"]["all"] > tree["4"]["all"] > 1.5
    assert set(tree["4"]["kinds"]) == {"same", "repeats"}


def test_auto_is_simulated_over_answers_at_once(drafts, traces):
    """One answer repeats itself; frames of up to 3 rows cost alike, larger ones 10 % more."""
    costs, options = "1:1,2:1,3:1,64:1.1", ("--orders", 1, "--gaps", "1:0.1")
    figures = drafts("--traces", traces, "--live", "1,2", "--costs", costs, *options)
    assert figures["costs"]["64"] == 1.1
    for live in ("1", "2"):
        assert {"same", "repeats", "all", "nodes", "asked"} == set(figures[live])
        assert figures[live]["repeats"] > 1.5
        assert figures[live]["same"] > 0.8
    dear = drafts("--traces", traces, "--live", "2", "--costs", "1:1,2:1,64:100", *options)
    assert dear["2"]["nodes"] == 0
    assert dear["2"]["asked"] < 0.5
    assert dear["2"]["all"] > 0.9


def test_what_earlier_answers_left_is_used_unless_fresh(drafts, traces):
    kept = drafts("--traces", traces, "--nodes", "8")
    fresh = drafts("--traces", traces, "--nodes", "8", "--fresh")
    assert fresh["tree"]["8"]["kinds"]["same"] == 1.0  # nothing in an answer repeats
    assert kept["tree"]["8"]["kinds"]["same"] > 1.5
    assert fresh["ngram"]["8"]["kinds"]["same"] == 1.0
    assert kept["ngram"]["8"]["kinds"]["same"] > 1.0


def test_without_traces_the_remedy_is_named(drafts, capsys):
    with pytest.raises(SystemExit, match="2"):
        drafts()
    assert "--record MODEL" in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_file_is_named(drafts, tmp_path):
    with pytest.raises(SystemExit, match=r"nothing\.json"):
        drafts("--traces", tmp_path / "nothing.json")


def test_rows_are_ordered_by_rank(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import drafts as script
    from samewise.outputs import Logprob

    entries = {7: Logprob(-1.5, 2), 3: Logprob(-0.25, 1), 9: Logprob(-9.0, None)}
    assert script.top_ids(entries) == [3, 7]
