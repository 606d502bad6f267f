"""Batch: every line once, whatever happens in between."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM, SamplingParams
from samewise.engine import Engine
from samewise.errors import BadParameter, MachineError
from samewise.jobs.audit import Auditor, Case, reciting
from samewise.jobs.batch import Tally, run
from samewise.jobs.batch_file import Results, read_lines, survey
from samewise.receipts import store as ledger
from samewise.testing import tiny_engine

SRC = Path(__file__).parents[2] / "src"


def request(name: str, **body: Any) -> dict[str, Any]:
    said = {"model": "tiny-llama", "prompt": f"say {name}", "max_tokens": 6, "temperature": 0.8} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": said}


def chat(name: str, **body: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": name}], "max_tokens": 5} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": said}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def answers(path: Path) -> dict[str, Any]:
    """Everything that is a function of the requests: not when it was answered, nor what was in the cache."""
    found = {}
    for record in read(path):
        assert record["custom_id"] not in found, "an answer came twice"
        body = record["response"]["body"]
        found[record["custom_id"]] = (record["id"], body["id"], body["system_fingerprint"], body["choices"])
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True)


def go(engine: Engine, source: Path, target: Path, **how: Any) -> tuple[Tally, list[tuple[int, str]]]:
    complaints: list[tuple[int, str]] = []
    tally = run(source, target, lambda: engine, complain=lambda *what: complaints.append(what), **how)
    return tally, complaints


# ---- what comes out


def test_answers_in_openai_format(engine: Engine, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        request("a", n=2, logprobs=1),
        "",
        chat("b"),
        request("c", prompt=["x", "y"]),
        request("d", prompt=[1, 2, 3], echo=True),
    )
    target = tmp_path / "out.jsonl"
    tally, complaints = go(engine, source, target)
    assert (tally.total, tally.answered, tally.bad, tally.before) == (4, 4, 0, 0)
    assert complaints == []
    records = {record["custom_id"]: record for record in read(target)}
    assert set(records) == {"a", "b", "c", "d"}
    for record in records.values():
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["system_fingerprint"] == engine.contract.id
    assert len(records["a"]["response"]["body"]["choices"]) == 2
    assert len(records["c"]["response"]["body"]["choices"]) == 2
    assert records["b"]["response"]["body"]["object"] == "chat.completion"
    params = SamplingParams(temperature=0.8, max_tokens=6, n=2)
    (alone,) = LLM.over(engine).generate("say a", params, use_tqdm=False)
    said = [choice["text"] for choice in records["a"]["response"]["body"]["choices"]]
    assert said == [one.text for one in alone.outputs]


def test_bad_lines_are_carried_by_number(engine: Engine, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        "{torn",
        request("good"),
        "[1]",
        {"custom_id": 3, "url": "/v1/completions", "body": {}},
        {"custom_id": "odd", "url": "/v1/completions", "body": {}, "extra": 1},
        {"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "where", "body": {}},
        request("unknown", model="gpt-9"),
        request("hot", temperature=-1),
        request("long", prompt=[1] * 600),
        request("stream", stream=True),
        {"custom_id": "embed", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "nothing", "url": "/v1/completions", "body": None},
    )
    target = tmp_path / "out.jsonl"
    tally, complaints = go(engine, source, target)
    assert (tally.total, tally.answered, tally.bad) == (13, 1, 12)
    assert sorted(number for number, _ in complaints) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    records = read(target)
    assert len(records) == 13
    broken = {r["error"]["line"]: r["error"]["message"] for r in records if r["error"]}
    assert sorted(broken) == [1, 3, 4, 5, 6, 7]
    assert "not JSON" in broken[1]
    assert "'extra'" in broken[5]
    refused = {r["custom_id"]: r["response"] for r in records if r["response"] and r["custom_id"] != "good"}
    assert {name: reply["status_code"] for name, reply in refused.items()} == {
        "unknown": 404, "hot": 400, "long": 400, "stream": 400, "embed": 400, "nothing": 400
    }  # fmt: skip
    assert "gpt-9" in refused["unknown"]["body"]["error"]["message"]
    # Again: nothing is left to do, and no engine is made for it.
    before = target.read_bytes()
    tally = run(source, target, lambda: pytest.fail("an engine was made"))
    assert (tally.before, tally.answered, tally.bad) == (13, 0, 0)
    assert target.read_bytes() == before


def test_what_went_wrong_can_be_tried_again(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"), request("b", model="other"), "{", request("c"))
    target = tmp_path / "out.jsonl"
    go(engine, source, target)
    kept = {r["custom_id"]: r for r in read(target) if r["custom_id"] in ("a", "c")}
    tally, _ = go(engine, source, target, names=("other",), retry=True)
    assert (tally.before, tally.answered, tally.bad) == (2, 1, 1)
    records = {r["custom_id"]: r for r in read(target)}
    assert records["b"]["response"]["status_code"] == 200
    assert {name: records[name] for name in kept} == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_receipts_come_with_answers_and_are_true(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a", receipt=True, n=2), chat("b", receipt=True))
    target = tmp_path / "out.jsonl"
    go(engine, source, target)
    entries = list(ledger.read([target]))
    assert len(entries) == 3
    auditor = Auditor(
        tiny_engine(eos=True, make_proposer=reciting, enable_prefix_caching=False, draft_tokens=4096)
    )
    findings = auditor.audit([Case(entry.where, entry.receipt) for entry in entries if entry.receipt])
    assert all(finding.good for finding in findings)


def test_formats_are_followed(engine: Engine, tmp_path: Path) -> None:
    shape = {"type": "grammar", "syntax": "regex", "definition": "(yes|no)!"}
    source = write(
        tmp_path / "in.jsonl", request("a", response_format=shape), chat("b", response_format=shape)
    )
    go(engine, source, tmp_path / "out.jsonl")
    found = {record["custom_id"]: record["response"]["body"] for record in read(tmp_path / "out.jsonl")}
    assert found["a"]["choices"][0]["text"] in ("yes!", "no!")
    assert found["b"]["choices"][0]["message"]["content"] in ("yes!", "no!")


def test_the_engine_is_kept_full(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[request(f"r{i}", max_tokens=2 + i % 9) for i in range(200)])
    before = engine.scheduler.counters.frames
    tally, _ = go(engine, source, tmp_path / "out.jsonl")
    assert tally.answered == 200
    assert engine.scheduler.counters.frames - before < 120  # 200 lines one after another would take 1200
    engine.check()


# ---- the files


def test_names_must_differ(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"), "{", request("b"), request("a"))
    with pytest.raises(BadParameter, match=r"lines 1 and 4 have the same custom_id 'a'"):
        run(source, tmp_path / "out.jsonl", lambda: pytest.fail("an engine was made"))
    assert not (tmp_path / "out.jsonl").exists()


def test_paths_that_will_not_do(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"))
    with pytest.raises(BadParameter, match="cannot read"):
        survey(tmp_path / "none.jsonl")
    with pytest.raises(BadParameter, match="input and output"):
        run(source, source, lambda: pytest.fail("an engine was made"))
    with pytest.raises(BadParameter, match="cannot write"):
        run(source, tmp_path / "no" / "out.jsonl", lambda: pytest.fail("an engine was made"))


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"))
    target = tmp_path / "out.jsonl"
    for content in ("precious", "precious\n", '{"id": 1}\n', "\n", '{"id": "batch_req_1", "custom_id": 3}\n'):
        target.write_text(content)
        with pytest.raises(BadParameter, match="no line of a batch's output"):
            run(source, target, lambda: pytest.fail("an engine was made"))
        assert target.read_text() == content


def test_answers_to_other_questions(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    go(engine, write(tmp_path / "in.jsonl", request("a")), target)
    with pytest.raises(BadParameter, match="an answer to 'a'"):
        go(engine, write(tmp_path / "other.jsonl", request("b")), target)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl"), pytest.raises(BadParameter, match="another process"):
        Results(tmp_path / "out.jsonl")
    Results(tmp_path / "out.jsonl").close()


def test_where_it_cannot_keep_its_word_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.raises(MachineError, match="POSIX"):
        Results(tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_another_contract_is_not_mixed_in(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    go(engine, write(tmp_path / "in.jsonl", request("a")), target)
    source = write(tmp_path / "in.jsonl", request("a"), request("b"))
    other = tiny_engine(eos=True, date="2025-01-31")
    with pytest.raises(BadParameter, match="begun under the contract"):
        go(other, source, target)
    tally, _ = go(other, source, target, force=True)
    assert (tally.before, tally.answered) == (1, 1)


def test_texts_no_encoding_holds(engine: Engine, tmp_path: Path) -> None:
    name = "\udc80 \u2028 é"
    source = write(tmp_path / "in.jsonl", request(name, prompt="x"))
    target = tmp_path / "out.jsonl"
    go(engine, source, target)
    assert list(answers(target)) == [name]
    assert go(engine, source, target)[0].before == 1


# ---- interruptions


def cut_points(target: Path) -> list[int]:
    """In the middle of lines, and between them."""
    content = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    return sorted({0, 1, 5, 30, *ends, *(end - 1 for end in ends), *(end - 40 for end in ends), ends[0] + 25})


def test_resumed_after_any_cut_it_is_the_same(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[request(f"r{i}") for i in range(4)], chat("c"))
    whole = tmp_path / "whole.jsonl"
    go(engine, source, whole)
    wanted, content = answers(whole), whole.read_bytes()
    target = tmp_path / "out.jsonl"
    for cut in cut_points(whole):
        target.write_bytes(content[:cut])
        tally, _ = go(engine, source, target)
        assert answers(target) == wanted
        assert tally.before == content[:cut].count(b"\n")
        assert target.read_bytes().startswith(content[: content.rfind(b"\n", 0, cut) + 1])


def test_zeros_that_a_crashed_disk_left(engine: Engine, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", request("a")), tmp_path / "out.jsonl"
    go(engine, source, target)
    content = target.read_bytes()
    target.write_bytes(content + b"\0" * 99)
    assert go(engine, source, target)[0].before == 1
    assert target.read_bytes() == content


def test_ctrl_c_leaves_a_file_to_go_on_with(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[request(f"r{i}") for i in range(300)])
    target = tmp_path / "out.jsonl"

    def tired(tally: Tally) -> None:
        if tally.answered == 100:
            signal.raise_signal(signal.SIGINT)

    # Whoever starts the tests in the background of a shell has Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            go(engine, source, target, progress=tired)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 100 <= len(answers(target)) < 300
    tally, _ = go(engine, source, target)
    assert tally.before + tally.answered == 300
    assert len(answers(target)) == 300
    while not engine.idle:
        engine.step()
    engine.check()


def test_a_full_disk_loses_nothing(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[request(f"r{i}") for i in range(20)])
    target = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(MachineError, match="Make room and run the same command again"):
            go(engine, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes().endswith(b"\n")
    before = answers(target)
    assert 0 < len(before) < 20
    tally, _ = go(engine, source, target)
    assert tally.before == len(before)
    assert len(answers(target)) == 20


def start(folder: Path, source: Path, target: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from samewise.cli.main import main; main()",
        "batch",
        str(source),
        str(target),
    ]
    options = ["--model", str(folder), "--device", "cpu", "--kv-memory", "4MiB", "--max-num-seqs", "4"]
    return subprocess.Popen(
        [*command, *options, "--served-model-name", "tiny-llama", "--proposer", "none"],
        env=os.environ | {"PYTHONPATH": str(SRC)}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def until(process: subprocess.Popen[str], target: Path, lines: int) -> None:
    end = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_in_the_middle_it_is_completed(folder: Path, tmp_path: Path) -> None:
    num = 60
    source = write(tmp_path / "in.jsonl", *[request(f"r{i}", max_tokens=60) for i in range(num)])
    target = tmp_path / "out.jsonl"
    process = start(folder, source, target)
    until(process, target, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = target.read_bytes().count(b"\n")
    assert 5 <= before < num
    with target.open("ab") as file:  # as if killed in the middle of a line
        file.write(b'{"id": "batch_req_0123", "custom_id": "r')
    with LLM(folder, device="cpu", kv_memory="4MiB") as llm:  # the same contract, or it would be refused
        tally, complaints = go(llm.engine, source, target, names=("tiny-llama",))
    assert (tally.before, tally.answered, complaints) == (before, num - before, [])
    found = answers(target)
    assert sorted(found) == sorted(f"r{i}" for i in range(num))
    assert len({fingerprint for _, _, fingerprint, _ in found.values()}) == 1


def test_read_lines_counts_empty_ones(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "", request("a"), "  ", request("b"))
    assert [line.number for line in read_lines(source)] == [2, 4]
