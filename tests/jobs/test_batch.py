"""Batch: every line is answered exactly once, also across interruptions."""

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
from samewise.jobs.audit import Auditor, Case, make_recorded_tokens
from samewise.jobs.batch import BatchSummary, run
from samewise.jobs.batch_file import OutputFile, line_numbers, read_lines
from samewise.receipts import store
from samewise.testing import tiny_engine
from samewise.text.compile_process import ChildLost, CompileProcess

SRC = Path(__file__).parents[2] / "src"


def completion_line(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "prompt": f"say {custom_id}", "max_tokens": 6, "temperature": 0.8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def answers(path: Path) -> dict[str, Any]:
    """The parts of each answer that depend on its request alone (not `created`, not cached tokens)."""
    by_id = {}
    for record in read_output(path):
        assert record["custom_id"] not in by_id, "a line was answered twice"
        body = record["response"]["body"]
        by_id[record["custom_id"]] = (record["id"], body["id"], body["system_fingerprint"], body["choices"])
    return by_id


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True)


def run_batch(
    engine: Engine, source: Path, target: Path, **options: Any
) -> tuple[BatchSummary, list[tuple[int, str]]]:
    errors: list[tuple[int, str]] = []
    summary = run(source, target, lambda: engine, on_error=lambda *error: errors.append(error), **options)
    return summary, errors


# ---- output


def test_answers_have_openai_batch_format(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        completion_line("a", n=2, logprobs=1),
        "",
        chat_line("b"),
        completion_line("c", prompt=["x", "y"]),
        completion_line("d", prompt=[1, 2, 3], echo=True),
    )
    target = tmp_path / "out.jsonl"
    summary, errors = run_batch(engine, source, target)
    assert (summary.total, summary.answered, summary.failed, summary.done_before) == (4, 4, 0, 0)
    assert errors == []
    records = {record["custom_id"]: record for record in read_output(target)}
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
    texts = [choice["text"] for choice in records["a"]["response"]["body"]["choices"]]
    assert texts == [one.text for one in alone.outputs]


def test_invalid_lines_are_reported_by_number(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        "{incomplete",
        completion_line("good"),
        "[1]",
        {"custom_id": 3, "url": "/v1/completions", "body": {}},
        {"custom_id": "odd", "url": "/v1/completions", "body": {}, "extra": 1},
        {"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "where", "body": {}},
        completion_line("unknown", model="gpt-9"),
        completion_line("hot", temperature=-1),
        completion_line("long", prompt=[1] * 600),
        completion_line("stream", stream=True),
        {"custom_id": "embed", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "nothing", "url": "/v1/completions", "body": None},
    )
    target = tmp_path / "out.jsonl"
    summary, errors = run_batch(engine, source, target)
    assert (summary.total, summary.answered, summary.failed) == (13, 1, 12)
    assert sorted(number for number, _ in errors) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    records = read_output(target)
    assert len(records) == 13
    invalid = {r["error"]["line"]: r["error"]["message"] for r in records if r["error"]}
    assert sorted(invalid) == [1, 3, 4, 5, 6, 7]
    assert "not JSON" in invalid[1]
    assert "'extra'" in invalid[5]
    refused = {r["custom_id"]: r["response"] for r in records if r["response"] and r["custom_id"] != "good"}
    assert {name: reply["status_code"] for name, reply in refused.items()} == {
        "unknown": 404, "hot": 400, "long": 400, "stream": 400, "embed": 400, "nothing": 400
    }  # fmt: skip
    assert "gpt-9" in refused["unknown"]["body"]["error"]["message"]
    # A second run has nothing to do and loads no engine.
    before = target.read_bytes()
    summary = run(source, target, lambda: pytest.fail("an engine was made"))
    assert (summary.done_before, summary.answered, summary.failed) == (13, 0, 0)
    assert target.read_bytes() == before


def test_failed_lines_are_retried_on_request(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        completion_line("a"),
        completion_line("b", model="other"),
        "{",
        completion_line("c"),
    )
    target = tmp_path / "out.jsonl"
    run_batch(engine, source, target)
    answered = {r["custom_id"]: r for r in read_output(target) if r["custom_id"] in ("a", "c")}
    summary, _ = run_batch(engine, source, target, names=("other",), retry=True)
    assert (summary.done_before, summary.answered, summary.failed) == (2, 1, 1)
    records = {r["custom_id"]: r for r in read_output(target)}
    assert records["b"]["response"]["status_code"] == 200
    assert {name: records[name] for name in answered} == answered
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_receipts_in_answers_pass_an_audit(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", completion_line("a", receipt=True, n=2), chat_line("b", receipt=True)
    )
    target = tmp_path / "out.jsonl"
    run_batch(engine, source, target)
    entries = list(store.read([target]))
    assert len(entries) == 3
    auditor = Auditor(
        tiny_engine(
            eos=True, make_proposer=make_recorded_tokens, enable_prefix_caching=False, draft_tokens=4096
        )
    )
    findings = auditor.audit([Case(entry.where, entry.receipt) for entry in entries if entry.receipt])
    assert all(finding.is_same for finding in findings)


def test_response_format_is_followed(engine: Engine, tmp_path: Path) -> None:
    response_format = {"type": "grammar", "syntax": "regex", "definition": "(yes|no)!"}
    source = write_lines(
        tmp_path / "in.jsonl",
        completion_line("a", response_format=response_format),
        chat_line("b", response_format=response_format),
    )
    run_batch(engine, source, tmp_path / "out.jsonl")
    bodies = {
        record["custom_id"]: record["response"]["body"] for record in read_output(tmp_path / "out.jsonl")
    }
    assert bodies["a"]["choices"][0]["text"] in ("yes!", "no!")
    assert bodies["b"]["choices"][0]["message"]["content"] in ("yes!", "no!")


def test_a_line_whose_grammar_kills_the_child_that_compiles_it_gets_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = CompileProcess.trial

    def killed(process: Any, grammar: Any, **limits: Any) -> Any:
        if "yes" in grammar.text:
            raise ChildLost("the process that compiles grammars has ended")
        return trial(process, grammar, **limits)

    monkeypatch.setattr(CompileProcess, "trial", killed)
    formats = [{"type": "grammar", "syntax": "regex", "definition": f"({word})!"} for word in ("yes", "no")]
    lines = [completion_line(f"r{i}", response_format=one) for i, one in enumerate(formats)]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    summary, _ = run_batch(tiny_engine(eos=True), source, tmp_path / "out.jsonl")
    assert (summary.answered, summary.failed) == (1, 1)
    bodies = {one["custom_id"]: one["response"]["body"] for one in read_output(tmp_path / "out.jsonl")}
    assert bodies["r0"]["error"]["code"] == "request_failed"
    assert bodies["r1"]["choices"][0]["text"] == "no!"


def test_lines_are_answered_together(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", *[completion_line(f"r{i}", max_tokens=2 + i % 9) for i in range(200)]
    )
    before = engine.scheduler.counters.frames
    summary, _ = run_batch(engine, source, tmp_path / "out.jsonl")
    assert summary.answered == 200
    assert engine.scheduler.counters.frames - before < 120  # answered one at a time they take 1200
    engine.check()


# ---- files


def test_repeated_custom_id_is_refused(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", completion_line("a"), "{", completion_line("b"), completion_line("a")
    )
    with pytest.raises(BadParameter, match=r"lines 1 and 4 have the same custom_id 'a'"):
        run(source, tmp_path / "out.jsonl", lambda: pytest.fail("an engine was made"))
    assert not (tmp_path / "out.jsonl").exists()


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", completion_line("a"))
    with pytest.raises(BadParameter, match="cannot read"):
        line_numbers(tmp_path / "none.jsonl")
    with pytest.raises(BadParameter, match="input and output"):
        run(source, source, lambda: pytest.fail("an engine was made"))
    with pytest.raises(BadParameter, match="cannot write"):
        run(source, tmp_path / "no" / "out.jsonl", lambda: pytest.fail("an engine was made"))


def test_other_file_as_output_is_refused_and_unchanged(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", completion_line("a"))
    target = tmp_path / "out.jsonl"
    for content in ("text", "text\n", '{"id": 1}\n', "\n", '{"id": "batch_req_1", "custom_id": 3}\n'):
        target.write_text(content)
        with pytest.raises(BadParameter, match="no line of a batch's output"):
            run(source, target, lambda: pytest.fail("an engine was made"))
        assert target.read_text() == content


def test_output_of_another_input_is_refused(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(engine, write_lines(tmp_path / "in.jsonl", completion_line("a")), target)
    with pytest.raises(BadParameter, match="an answer to 'a'"):
        run_batch(engine, write_lines(tmp_path / "other.jsonl", completion_line("b")), target)


def test_output_file_is_locked(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl"), pytest.raises(BadParameter, match="another process"):
        OutputFile(tmp_path / "out.jsonl")
    OutputFile(tmp_path / "out.jsonl").close()


def test_system_without_posix_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.raises(MachineError, match="POSIX"):
        OutputFile(tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_another_contract_is_refused_without_force(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(engine, write_lines(tmp_path / "in.jsonl", completion_line("a")), target)
    source = write_lines(tmp_path / "in.jsonl", completion_line("a"), completion_line("b"))
    other = tiny_engine(eos=True, max_model_len=400)
    with pytest.raises(BadParameter, match="begun under the contract"):
        run_batch(other, source, target)
    summary, _ = run_batch(other, source, target, force=True)
    assert (summary.done_before, summary.answered) == (1, 1)


def test_custom_id_with_a_lone_surrogate_is_kept(engine: Engine, tmp_path: Path) -> None:
    name = "\udc80 \u2028 é"
    source = write_lines(tmp_path / "in.jsonl", completion_line(name, prompt="x"))
    target = tmp_path / "out.jsonl"
    run_batch(engine, source, target)
    assert list(answers(target)) == [name]
    assert run_batch(engine, source, target)[0].done_before == 1


# ---- interruptions


def cut_points(target: Path) -> list[int]:
    """Offsets inside lines and between them."""
    content = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    return sorted({0, 1, 5, 30, *ends, *(end - 1 for end in ends), *(end - 40 for end in ends), ends[0] + 25})


def test_resuming_after_any_cut_gives_the_same_answers(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[completion_line(f"r{i}") for i in range(4)], chat_line("c"))
    complete = tmp_path / "complete.jsonl"
    run_batch(engine, source, complete)
    expected, content = answers(complete), complete.read_bytes()
    target = tmp_path / "out.jsonl"
    for cut in cut_points(complete):
        target.write_bytes(content[:cut])
        summary, _ = run_batch(engine, source, target)
        assert answers(target) == expected
        assert summary.done_before == content[:cut].count(b"\n")
        assert target.read_bytes().startswith(content[: content.rfind(b"\n", 0, cut) + 1])


def test_zeros_left_by_a_crash_are_cut_off(engine: Engine, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", completion_line("a")), tmp_path / "out.jsonl"
    run_batch(engine, source, target)
    content = target.read_bytes()
    target.write_bytes(content + b"\0" * 99)
    assert run_batch(engine, source, target)[0].done_before == 1
    assert target.read_bytes() == content


def test_interrupted_batch_can_be_resumed(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[completion_line(f"r{i}") for i in range(300)])
    target = tmp_path / "out.jsonl"

    def interrupt(summary: BatchSummary) -> None:
        if summary.answered == 100:
            signal.raise_signal(signal.SIGINT)

    # A process in the background of a shell starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_batch(engine, source, target, on_progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 100 <= len(answers(target)) < 300
    summary, _ = run_batch(engine, source, target)
    assert summary.done_before + summary.answered == 300
    assert len(answers(target)) == 300
    while not engine.idle:
        engine.step()
    engine.check()


def test_full_disk_loses_no_answer(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[completion_line(f"r{i}") for i in range(20)])
    target = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(MachineError, match="Make room and run the same command again"):
            run_batch(engine, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes().endswith(b"\n")
    before = answers(target)
    assert 0 < len(before) < 20
    summary, _ = run_batch(engine, source, target)
    assert summary.done_before == len(before)
    assert len(answers(target)) == 20


def start_process(folder: Path, source: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "samewise", "batch", str(source), str(target)]
    options = ["--model", str(folder), "--device", "cpu", "--kv-memory", "4MiB", "--max-num-seqs", "4"]
    return subprocess.Popen(
        [*command, *options, "--served-model-name", "tiny-llama", "--proposer", "none"],
        env=os.environ | {"PYTHONPATH": str(SRC)}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_lines(process: subprocess.Popen[str], target: Path, lines: int) -> None:
    end = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_batch_is_completed_by_the_next_run(folder: Path, tmp_path: Path) -> None:
    num = 60
    source = write_lines(
        tmp_path / "in.jsonl", *[completion_line(f"r{i}", max_tokens=250) for i in range(num)]
    )
    target = tmp_path / "out.jsonl"
    process = start_process(folder, source, target)
    wait_for_lines(process, target, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = target.read_bytes().count(b"\n")
    assert 5 <= before < num
    with target.open("ab") as file:  # as if killed while writing a line
        file.write(b'{"id": "batch_req_0123", "custom_id": "r')
    with LLM(folder, device="cpu", kv_memory="4MiB") as llm:  # another contract would be refused
        summary, errors = run_batch(llm.engine, source, target, names=("tiny-llama",))
    assert (summary.done_before, summary.answered, errors) == (before, num - before, [])
    completed = answers(target)
    assert sorted(completed) == sorted(f"r{i}" for i in range(num))
    assert len({fingerprint for _, _, fingerprint, _ in completed.values()}) == 1


def test_line_numbers_count_empty_lines(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "", completion_line("a"), "  ", completion_line("b"))
    assert [line.number for line in read_lines(source)] == [2, 4]


def test_a_line_whose_later_prompt_is_refused_leaves_nothing_running(tmp_path):
    engine = tiny_engine(max_queued=1)
    source = write_lines(tmp_path / "in.jsonl", completion_line("a", prompt=["one", "two", "three"]))
    summary = run(source, tmp_path / "out.jsonl", lambda: engine)
    assert (summary.answered, summary.failed) == (0, 1)
    assert engine.idle
    engine.check()


# ---- lines that fail


def test_lines_after_one_that_cannot_be_served_are_answered(engine: Engine, tmp_path: Path) -> None:
    schema = {"type": "integer", "maximum": 2**70}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    source = write_lines(
        tmp_path / "in.jsonl",
        chat_line("a", chat_template_kwargs={"self": 1}),
        completion_line("b", response_format=form),
        completion_line("c", bad_words=["\ud800"]),
        completion_line("d"),
    )
    summary = run(source, tmp_path / "out.jsonl", lambda: engine)
    assert (summary.answered, summary.failed) == (1, 3)
    errors = {
        line["custom_id"]: line["response"]["body"]["error"]["param"]
        for line in read_output(tmp_path / "out.jsonl")
        if line["response"]["status_code"] == 400
    }
    assert errors == {"a": "chat_template_kwargs", "b": "response_format", "c": "bad_words"}


def test_any_exception_of_a_line_is_its_error(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from samewise.jobs import batch

    parse = batch.parse

    def fail(url: str, body: Any, options: Any) -> Any:
        if body["prompt"] == "say b":
            raise ZeroDivisionError("a secret")
        return parse(url, body, options)

    monkeypatch.setattr(batch, "parse", fail)
    source = write_lines(tmp_path / "in.jsonl", *(completion_line(name) for name in "abc"))
    summary = run(source, tmp_path / "out.jsonl", lambda: engine)
    assert (summary.answered, summary.failed) == (2, 1)
    (failed,) = (line for line in read_output(tmp_path / "out.jsonl") if line["custom_id"] == "b")
    assert failed["response"]["status_code"] == 500
    assert "secret" not in json.dumps(failed)
    assert "ZeroDivisionError" in caplog.text


def test_request_that_makes_a_step_fail_does_not_end_the_batch(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = engine.step, iter(range(1000))

    def fail_once() -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError
        return step()

    monkeypatch.setattr(engine, "step", fail_once)
    source = write_lines(tmp_path / "in.jsonl", *(completion_line(name) for name in "abc"))
    summary = run(source, tmp_path / "out.jsonl", lambda: engine)
    assert summary.answered + summary.failed == 3
    assert summary.answered >= 2
