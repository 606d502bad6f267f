"""`samewise probe`: the contract, the table of frame sizes, portable bits."""

import io
import json
from dataclasses import replace

from rich.console import Console

from native_variants import needs_compiler
from samewise.cli.probe import layers_line, sizes_table
from samewise.jobs.portable import EXPECTED_MODELS
from samewise.testing import tiny_engine
from samewise.verify.frame_sizes import FrameSizeUse


def test_the_contract_is_printed_fact_by_fact(run, model):
    result = run("probe", "-m", model, "--device", "cpu")
    assert result.code == 0
    assert "holds" in result.out
    assert "contract sw-" in result.out
    as_json = run("probe", "-m", model, "--device", "cpu", "--json")
    report = json.loads(as_json.out)
    assert report["contract"] in result.out
    assert {"weights", "dtype", "probe", "text"} <= report["facts"].keys()
    assert len(report["operators"]) == 5
    assert set(report["sizes"].values()) == {"as it is"}
    assert "layers:" in result.out
    assert report["layers"]


def test_the_table_of_sizes_shows_the_rows_at_which_each_operator_runs():
    engine = tiny_engine(linear="torch", frame_rows=16, proposer="none")
    assert list(engine.parts.sizes) == [1, 2, 8, 16, 64]
    first, second, *others = engine.parts.operators
    engine.parts = replace(
        engine.parts,
        operators=[
            replace(first, pieces={1: 8, 2: 8, 8: 8, 16: 16, 64: 16}),
            replace(second, pieces={rows: rows for rows in (1, 2, 8, 16, 64)}, library_rows=(64,)),
            *others,
        ],
        sizes=engine.parts.sizes | {1: FrameSizeUse(16, (64,)), 2: FrameSizeUse(reason="too large")},
    )
    text = io.StringIO()
    Console(file=text, width=160).print(sizes_table(engine))
    lines = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    name = first.name.split(".")[-1]
    assert [name, f"{first.outputs}×{first.inputs}", "8", "8", "=", "=", "4×16"] in lines
    name = second.name.split(".")[-1]
    assert [name, f"{second.outputs}×{second.inputs}", "=", "=", "=", "=", "cuBLAS"] in lines
    assert "norms and all else norms of 64 at 16 rows not used = = =" in map(" ".join, lines)


def test_the_reason_why_layers_run_as_their_modules_is_said():
    assert "settings" in layers_line(tiny_engine(linear="torch", proposer="none"))
    other = tiny_engine(overrides={"hidden_act": "relu"}, proposer="none", linear="native")
    assert "of layer 0, its MLP has another activation than SiLU" in layers_line(other)


@needs_compiler
def test_fused_layers_are_named():
    assert "kernels of its own" in layers_line(tiny_engine(proposer="none", linear="native"))


def test_uses_of_a_frame_size_are_printed_in_words():
    words = {
        "as it is": FrameSizeUse(),
        "norms of 16 and 64 at 32 rows": FrameSizeUse(32, (16, 64)),
        "norms at 32 rows": FrameSizeUse(32),
        "not used: too large": FrameSizeUse(reason="too large"),
    }
    assert [str(use) for use in words.values()] == list(words)


def test_probe_and_generate_report_the_same_contract(run, model):
    contract = json.loads(run("probe", "-m", model, "--device", "cpu", "--json").out)["contract"]
    result = run("generate", "x", "-m", model, "-n", "1", "--json", "--kv-memory", "4MiB", "--device", "cpu")
    assert result.records[0]["contract"] == contract


@needs_compiler
def test_portable_bits_are_printed_beside_those_of_every_machine(run, monkeypatch):
    result = run("probe", "--portable")
    assert result.code == 0
    assert "differs" not in result.out
    assert result.out.splitlines()[-1] == "same"
    report = json.loads(run("probe", "--portable", "--json").out)
    assert report["same"] is True
    assert all(finding["digest"] == finding["expected"] for finding in report["findings"])
    assert "torch" in report["machine"]
    for finding in report["findings"]:
        assert finding["digest"] in result.out


@needs_compiler
def test_portable_bits_that_differ_are_named_and_the_command_fails(run, monkeypatch):
    name = next(iter(EXPECTED_MODELS))
    monkeypatch.setitem(EXPECTED_MODELS, name, "0123456789abcdef")
    result = run("probe", "--portable")
    assert result.code == 1
    (line,) = [line for line in result.out.splitlines() if name in line]
    assert "0123456789abcdef" in line
    assert "differs" in line
    report = run("probe", "--portable", "--json")
    assert report.code == 1
    assert [one["name"] for one in json.loads(report.out)["findings"] if not one["same"]] == [
        f"model: {name}"
    ]
