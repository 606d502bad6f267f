"""`samewise bench`: questions, measurements, tables and the last line."""

import json
import time

import pytest
import torch
from rich.console import Console

from samewise.bench import engines, first_token, report, run, workload
from samewise.bench.measurement import Measurement, median
from samewise.bench.options import BenchOptions
from samewise.bench.report import Cell
from samewise.bench.run import as_line, bench
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


def printed(console):
    return console.file.getvalue()


@pytest.fixture
def console(tmp_path):
    import io

    return Console(file=io.StringIO(), width=160)


def test_the_default_workload_has_six_tasks():
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
def test_a_bad_workload_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(BadParameter, match=message):
        workload.read(path)
    with pytest.raises(BadParameter, match="cannot be read"):
        workload.read(tmp_path / "absent.jsonl")


def test_engines_and_peers_are_measured_side_by_side(folder, console, tmp_path):
    options = BenchOptions(
        proposers=("none", "auto", "unverified"), batches=(1, 2), repeats=2, max_tokens=6,
        tasks=("maths", "translating"), limit=1, peers=("transformers",), first_token=40, out=tmp_path,
    )  # fmt: skip
    results = bench(console, config(folder), options)
    assert json.loads(as_line(results)) == results
    assert {(r["contender"], r["task"], r["batch"]) for r in results["results"]} == {
        (name, task, batch)
        for name in ("none", "auto", "unverified", "transformers")
        for task in ("maths", "translating")
        for batch in (1, 2)
    }
    assert all(len(result["runs"]) == 2 and result["tokens_per_s"] > 0 for result in results["results"])
    assert all(r["tokens"] == 12 * r["batch"] for r in results["results"])  # two runs of six tokens each
    assert (tmp_path / "bench.png").stat().st_size > 1000
    times = {one["contender"]: one for one in results["first_token"]}
    assert set(times) == {"none", "auto", "unverified", "transformers"}
    assert all(one["prompt_tokens"] == 40 and len(one["runs"]) == 2 for one in times.values())
    assert results["peers"] == {"transformers": f"transformers {results['transformers']}, float32"}
    for word in ("times transformers", "tokens per frame", "no pass is shorter", "auto over the best"):
        assert word in printed(console)
    assert {(one["batch"], one["task"]) for one in results["auto"]} == {
        (batch, task) for batch in (1, 2) for task in ("maths", "translating")
    }


def test_injected_mismatches_are_recomputed(folder, console, tmp_path):
    options = BenchOptions(
        batches=(2,), repeats=1, max_tokens=24, tasks=("chat",), limit=2, inject=(0.0, 0.5), out=tmp_path
    )
    results = bench(console, config(folder), options)
    without, with_mismatches = results["overhead"]
    assert without["recomputed_share"] == 0.0
    assert with_mismatches["recomputed_share"] > 0.3
    assert (tmp_path / "overhead.png").exists()
    assert "no pass is shorter" in printed(console)


def test_synthetic_prompts_arrive_at_a_rate(folder, console, tmp_path):
    options = BenchOptions(
        proposers=("none",), batches=(3,), repeats=1, max_tokens=4, verified=0.34, synthetic=10, limit=1,
        rate=200.0, peers=(), out=tmp_path,
    )  # fmt: skip
    (result,) = bench(console, config(folder), options)["results"]
    assert result["tokens"] == 12
    assert result["time_to_first_token"] > 0


def test_a_table_compares_with_its_baseline():
    cells = [
        Cell(name, "t", 1, (Measurement(10, 1.0), Measurement(10, 0.5), Measurement(10, seconds)))
        for name, seconds in (("a", 2.0), ("b", 0.1))
    ]
    assert [cell.rate for cell in cells] == [10.0, 20.0]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report.table(cells, "a"))
    assert "20.0 (2.00)" in captured.get()


def test_auto_is_compared_run_by_run_with_the_best_fixed_choice():
    def cell(name, *seconds):
        return Cell(name, "t", 1, tuple(Measurement(12, s, counters={"frames": 1}) for s in seconds))

    cells = [cell("none", 3.0, 6.0, 3.0), cell("ngram", 2.0, 6.0, 2.0), cell("auto", 2.0, 3.0, 4.0)]
    others = [
        Cell("transformers", "t", 1, (Measurement(12, 0.1),) * 3),  # not a proposer
        cell("unverified", 0.1, 0.1, 0.1),  # without verification
    ]
    assert report.auto_ratios([*cells, *others]) == {(1, "t"): ("ngram", 1.0)}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report.auto_table(cells))
    assert "1.00 (ngram)" in captured.get()


def test_the_median_leaves_out_unknown_values():
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


def test_times_of_a_cell_are_medians_of_its_runs():
    cell = Cell("a", "t", 1, tuple(Measurement(1, 1.0, first_token=one) for one in (3.0, 1.0, 2.0)))
    assert (cell.as_json()["time_to_first_token"], cell.as_json()["time_per_output_token"]) == (2.0, None)


def test_a_prompt_of_a_given_length_is_timed_in_turns():
    class Turns:
        about, asked = "", []

        def __init__(self, name, seconds):
            self.name, self._seconds = name, iter(seconds)

        def run(self, prompts, max_tokens):
            self.asked.append((self.name, prompts, max_tokens))
            return Measurement(1, next(self._seconds))

    pair = [Turns("peer", (9.0, 2.0, 4.0)), Turns("ours", (9.0, 1.0, 1.0))]
    results = first_token.measure(pair, [[1, 2, 3], [4, 5]], 4, repeats=2)
    one, two, three = [[1, 2, 3, 4]], [[4, 5, 1, 2]], [[2, 3, 4, 5]]
    assert Turns.asked == [
        ("peer", one, 1), ("ours", one, 1), ("peer", two, 1), ("ours", two, 1),
        ("peer", three, 1), ("ours", three, 1),
    ]  # fmt: skip
    assert [(result.backend, result.seconds) for result in results] == [("peer", 3.0), ("ours", 1.0)]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(first_token.table(results))
    assert "0.33" in captured.get()


def test_answers_go_on_past_their_end_where_ends_are_ignored(folder, console, tmp_path):
    config_file = folder / "generation_config.json"
    saved = config_file.read_bytes()
    config_file.write_text(json.dumps({"eos_token_id": list(range(250))}))  # nearly every token is an end
    try:
        counts = {
            ignore: [
                result["tokens"]
                for result in bench(
                    console, config(folder),
                    BenchOptions(
                        proposers=("none",), batches=(2,), repeats=1, max_tokens=5, tasks=("maths",), limit=2,
                        peers=("transformers",), ignore_eos=ignore, first_token=9, out=tmp_path,
                    ),
                )["results"]
            ]
            for ignore in (False, True)
        }  # fmt: skip
    finally:
        config_file.write_bytes(saved)
    assert counts == {False: [2, 2], True: [10, 10]}


def test_engines_take_turns_and_each_measures_its_own_time(folder, monkeypatch):
    settings = config(folder, proposer="none")
    pair = engines.engine_backends(run.load(settings), settings, ("none", "ngram"))
    order = []
    for backend in pair:
        monkeypatch.setattr(backend, "_slice", 1e-9)  # one step a turn
        step = backend.engine.step
        monkeypatch.setattr(
            backend.engine, "step", lambda name=backend.name, step=step: order.append(name) or step()
        )
    began = time.perf_counter()
    runs = engines.run_in_turns(pair, [[1, 2, 3, 4]], 12)
    passed = time.perf_counter() - began
    assert order[:6] == ["none", "ngram"] * 3
    assert [measured.tokens for measured in runs] == [12, 12]
    assert 0 < sum(measured.seconds for measured in runs) <= passed
    assert all(0 < measured.first_token <= measured.seconds for measured in runs)


def test_a_stopwatch_advances_only_while_running():
    watch = engines.Stopwatch()
    before = watch()
    time.sleep(0.01)
    assert watch() == before
    with watch.running():
        time.sleep(0.01)
        assert watch() >= before + 0.01
    after = watch()
    time.sleep(0.01)
    assert watch() == after


def test_mismatches_occur_at_the_given_rate():
    logits = torch.randn(4000, 8)
    barred = engines.mismatches(0.25, torch.device("cpu"))(logits)
    changed = (barred.argmax(-1) != logits.argmax(-1)).float().mean()
    assert abs(changed - 0.25) < 0.04
