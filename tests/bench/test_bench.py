"""`samewise bench`: what is asked, who answers, what is said about it."""

import json
import time

import pytest
import torch
from rich.console import Console

from samewise.bench import report, run, workload
from samewise.bench.contend import Sample
from samewise.bench.report import Cell
from samewise.bench.run import Plan, as_line, bench
from samewise.config import EngineConfig
from samewise.errors import BadParameter
from samewise.testing import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(num_hidden_layers=2).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def config(folder, **settings):
    return EngineConfig(model=str(folder), device="cpu", kv_memory="8MiB", max_model_len=512, **settings)


def said(console):
    return console.file.getvalue()


@pytest.fixture
def console(tmp_path):
    import io

    return Console(file=io.StringIO(), width=160)


def test_the_projects_own_set_covers_six_tasks():
    questions = workload.read()
    assert {q.task for q in questions} == {
        "chat", "code", "maths", "retrieval", "summarising", "translating",
    }  # fmt: skip
    assert len(workload.read(limit=1)) == 6
    assert {q.task for q in workload.read(tasks=["maths"])} == {"maths"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", "line 1: not a Spec-Bench question"),
        ('{"category": "a", "turns": []}', "line 1"),
        ('\n{"turns": ["x"]}', "line 2"),
        ("", "has no questions"),
    ],
)
def test_a_bad_workload_is_named(tmp_path, text, message):
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(BadParameter, match=message):
        workload.read(path)
    with pytest.raises(BadParameter, match="cannot be read"):
        workload.read(tmp_path / "absent.jsonl")


def test_everybody_is_measured_side_by_side(folder, console, tmp_path):
    plan = Plan(
        ("none", "auto", "unverified"), (1, 2), 2, 6, tasks=("maths", "translating"), limit=1, out=tmp_path
    )
    found = bench(console, config(folder), plan)
    assert json.loads(as_line(found)) == found
    assert {(r["contender"], r["task"], r["batch"]) for r in found["results"]} == {
        (name, task, batch)
        for name in ("none", "auto", "unverified", "transformers")
        for task in ("maths", "translating")
        for batch in (1, 2)
    }
    assert all(len(result["runs"]) == 2 and result["tokens_per_s"] > 0 for result in found["results"])
    assert all(r["tokens"] == 12 * r["batch"] for r in found["results"])  # two runs of six tokens each
    assert (tmp_path / "bench.png").stat().st_size > 1000
    for word in ("times transformers", "tokens per frame", "no pass is shorter", "auto over the best"):
        assert word in said(console)
    assert {(one["batch"], one["task"]) for one in found["auto"]} == {
        (batch, task) for batch in (1, 2) for task in ("maths", "translating")
    }


def test_mismatches_are_injected(folder, console, tmp_path):
    plan = Plan(
        batches=(2,), repeats=1, max_tokens=24, tasks=("chat",), limit=2, inject=(0.0, 0.5), out=tmp_path
    )
    found = bench(console, config(folder), plan)
    clean, spoiled = found["overhead"]
    assert clean["recomputed_share"] == 0.0
    assert spoiled["recomputed_share"] > 0.3
    assert (tmp_path / "overhead.png").exists()
    assert "no pass is shorter" in said(console)


def test_synthetic_prompts_arrive_at_a_rate(folder, console, tmp_path):
    plan = Plan(
        ("none",), (3,), 1, 4, verified=0.34, synthetic=10, limit=1, rate=200.0, peers=False, out=tmp_path
    )
    (result,) = bench(console, config(folder), plan)["results"]
    assert result["tokens"] == 12
    assert result["time_to_first_token"] > 0


def test_a_table_compares_with_its_baseline():
    cells = [
        Cell(name, "t", 1, (Sample(10, 1.0), Sample(10, 0.5), Sample(10, seconds)))
        for name, seconds in (("a", 2.0), ("b", 0.1))
    ]
    assert [cell.rate for cell in cells] == [10.0, 20.0]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report.table(cells, "a"))
    assert "20.0 (2.00)" in captured.get()


def test_auto_is_compared_run_by_run_with_the_best_fixed_choice():
    def cell(name, *seconds):
        return Cell(name, "t", 1, tuple(Sample(12, one, counters={"frames": 1}) for one in seconds))

    cells = [cell("none", 3.0, 6.0, 3.0), cell("ngram", 2.0, 6.0, 2.0), cell("auto", 2.0, 3.0, 4.0)]
    others = [
        Cell("transformers", "t", 1, (Sample(12, 0.1),) * 3),  # no choice of ours
        cell("unverified", 0.1, 0.1, 0.1),  # another promise
    ]
    assert report.over_best([*cells, *others]) == {(1, "t"): ("ngram", 1.0)}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report.auto_over_best(cells))
    assert "1.00 (ngram)" in captured.get()


def test_times_of_a_cell_are_medians_of_its_runs():
    cell = Cell("a", "t", 1, tuple(Sample(1, 1.0, first_token=one) for one in (3.0, 1.0, 2.0)))
    assert (cell.as_json()["time_to_first_token"], cell.as_json()["time_per_output_token"]) == (2.0, None)


class Absent:
    """A peer that is installed, and does not start."""

    def __init__(self, *given):
        raise RuntimeError(f"no room for {given[0]}")


def test_peers_are_found_where_they_are_installed(folder, console, tmp_path, monkeypatch):
    """Also for a GGUF file of the user's own; one that does not start is said to be left out."""
    from samewise.bench import contend
    from samewise.model.source import Source

    file = tmp_path / "own.gguf"
    monkeypatch.setattr(contend, "installed", lambda _: True)
    monkeypatch.setattr(contend, "LlamaCpp", lambda path, longest: ("llama", path, longest))
    monkeypatch.setattr(contend, "VLLM", Absent)
    monkeypatch.setattr(run, "resolve", lambda *_, **__: Source("own", "gguf", folder, gguf=file))
    settings = config(folder, proposer="none")
    mine = contend.ours(run.load(settings), settings, ("none",), 1.0, None)
    theirs = list(run._peers(console, mine, settings))
    assert theirs[0].name == "transformers"
    assert theirs[1:] == [("llama", str(file), 512)]
    assert f"vllm is installed but does not start (no room for {folder}); left out" in said(console)


def test_engines_take_turns_and_each_has_its_own_time(folder, monkeypatch):
    from samewise.bench import contend

    settings = config(folder, proposer="none")
    loaded = run.load(settings)
    two = contend.ours(loaded, settings, ("none", "ngram"), 1.0, None)
    monkeypatch.setattr(two[0], "_slice", 1e-9)  # one step a turn
    monkeypatch.setattr(two[1], "_slice", 1e-9)
    order = []
    for one in two:
        step = one.engine.step
        monkeypatch.setattr(one.engine, "step", lambda n=one.name, step=step: order.append(n) or step())
    began = time.perf_counter()
    samples = contend.together(two, [[1, 2, 3, 4]], 12)
    passed = time.perf_counter() - began
    assert order[:6] == ["none", "ngram"] * 3
    assert [sample.tokens for sample in samples] == [12, 12]
    assert 0 < sum(sample.seconds for sample in samples) <= passed
    assert all(0 < sample.first_token <= sample.seconds for sample in samples)


def test_a_stopwatch_stands_still():
    from samewise.bench.contend import Stopwatch

    watch = Stopwatch()
    before = watch()
    time.sleep(0.01)
    assert watch() == before
    with watch.running():
        time.sleep(0.01)
        assert watch() >= before + 0.01
    after = watch()
    time.sleep(0.01)
    assert watch() == after


def test_spoiled_guesses_are_spoiled_at_the_rate():
    from samewise.bench.contend import injecting

    class Parts:
        class runner:
            device = torch.device("cpu")

        sampler, chain = None, 1

    spoil = injecting(0.25)(Parts)._perturb
    logits = torch.randn(4000, 8)
    changed = (spoil(logits).argmax(-1) != logits.argmax(-1)).float().mean()
    assert abs(changed - 0.25) < 0.04
