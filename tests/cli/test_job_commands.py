"""`samewise batch`, `audit` and `keygen`: what they print, where, and with which exit code."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM, SamplingParams
from samewise.cli import main as cli
from samewise.receipts import store
from samewise.receipts import Receipt
from samewise.receipts.signing import SigningKey
from samewise.testing import byte_tokenizer, tiny_model


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`samewise …` in this process, as the shell would see it."""
    monkeypatch.setenv("COLUMNS", "200")

    def go(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["samewise", *map(str, args)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
        caught = capsys.readouterr()
        return Ran(int(code or 0), caught.out, caught.err)

    return go


@pytest.fixture(scope="module")
def receipts(folder: Path) -> list[Receipt]:
    params = SamplingParams(temperature=0.9, max_tokens=9, n=2)
    with LLM(folder, device="cpu", kv_memory="4MiB", frame_rows=16, max_model_len=64) as llm:
        outputs = llm.generate(["abc", "def"], params, use_tqdm=False)
        return [one for output in outputs for one in llm.receipts(output, params)]


QUICK = ("--kv-memory", "4MiB")


# ---- audit


def test_one_true_receipt(run: Run, receipts: list[Receipt], tmp_path: Path) -> None:
    path = store.save(tmp_path, receipts[0])
    ran = run("audit", path, *QUICK)
    assert (ran.code, ran.out) == (0, f"{path}: same (9 tokens, contract {receipts[0].contract.id})\n")


def test_a_folder_with_a_lie_in_it(run: Run, receipts: list[Receipt], tmp_path: Path) -> None:
    for receipt in receipts:
        store.save(tmp_path, receipt)
    whole = json.loads(receipts[0].dumps())
    whole["output"]["token_ids"][3] ^= 1
    (tmp_path / "lie.json").write_text(json.dumps(whole))
    (tmp_path / "torn.json").write_text(receipts[0].dumps()[:100])
    ran = run("audit", tmp_path, *QUICK)
    assert ran.code == 1
    assert "lie.json: altered" in ran.out
    assert "position 3: the receipt says token" in ran.out
    assert "torn.json: unreadable" in ran.out
    assert ran.out.endswith("1 altered, 4 same, 1 unreadable\n")
    ran = run("audit", tmp_path, "--json", *QUICK)
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert len(found) == 6
    (lie,) = [one for one in found if one["receipt"].endswith("lie.json")]
    assert (lie["status"], lie["position"], lie["num_tokens"]) == ("altered", 3, 9)


def test_another_contract_stops_there(
    run: Run, receipts: list[Receipt], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    tiny_model(seed=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    path = store.save(tmp_path, receipts[0])
    ran = run("audit", path, "--model", other, *QUICK)
    assert ran.code == 1
    assert "other contract" in ran.out
    assert "\n  weights: " in ran.out
    assert "\n  probe: " in ran.out
    assert "position" not in ran.out
    ran = run("audit", path, "--model", other, "--force", *QUICK)
    assert ran.code == 1
    assert "different" in ran.out
    assert "position" in ran.out


def test_nothing_to_audit(run: Run, tmp_path: Path) -> None:
    ran = run("audit", tmp_path / "none.json")
    assert ran.code == 2
    assert "is not there" in ran.err
    (tmp_path / "x.json").write_text("{}")
    ran = run("audit", tmp_path / "x.json")
    assert ran.code == 1
    assert "no receipt" in ran.out


def test_keys(run: Run, receipts: list[Receipt], tmp_path: Path) -> None:
    key = tmp_path / "server.key"
    ran = run("keygen", key)
    assert ran.code == 0
    assert SigningKey.load(key).public in ran.out
    assert run("keygen", key).code == 2
    signed = store.save(tmp_path / "signed", receipts[0].signed(SigningKey.load(key)))
    plain = store.save(tmp_path / "plain", receipts[0])
    assert run("audit", signed, "--key", f"{key}.pub", *QUICK).code == 0
    ran = run("audit", plain, "--key", f"{key}.pub", *QUICK)
    assert ran.code == 1
    assert "signed by nobody" in ran.out
    assert run("audit", plain, "--key", plain).code == 2


def test_hidden_prompts(run: Run, folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3)
    with LLM(folder, device="cpu", kv_memory="4MiB") as llm:
        (output,) = llm.generate("abc", params, use_tqdm=False)
        path = store.save(tmp_path, llm.receipts(output, params, hide_prompt=True)[0])
    ran = run("audit", path, *QUICK)
    assert ran.code == 1
    assert "only a digest of its prompt" in ran.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"xyz"\n"abc"\n')
    assert run("audit", path, "--prompts", prompts, *QUICK).code == 0


# ---- batch


def line(name: str, **body: Any) -> str:
    said = {"prompt": "abc", "max_tokens": 3} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": said}) + "\n"


def test_batch_and_again(run: Run, folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", receipt=True) + line("b", temperature="hot") + line("c"))
    options = ("--model", folder, "--device", "cpu", *QUICK)
    ran = run("batch", source, target, *options)
    assert ran.code == 1
    assert "in.jsonl, line 2: temperature" in ran.err
    assert "3 lines: 2 answered, 1 bad, 0 done before" in ran.err
    assert ran.out == ""
    ran = run("batch", source, target, *options)
    assert ran.code == 0
    assert "3 lines: 0 answered, 0 bad, 3 done before" in ran.err
    assert "contract" not in ran.err  # nothing was loaded
    assert run("audit", target, *QUICK).code == 0  # of the one line that was asked for a receipt
    source.write_text(line("c"))
    ran = run("batch", source, tmp_path / "bare.jsonl", *options)
    assert "no receipt" in run("audit", tmp_path / "bare.jsonl", *QUICK).out


def test_batch_of_one_name(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("a") + line("a"))
    ran = run("batch", source, tmp_path / "out.jsonl")
    assert ran.code == 2
    assert "lines 1 and 2" in ran.err
