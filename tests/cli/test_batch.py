"""`samewise batch`: what it prints, where, and with which exit code."""

import json

QUICK = ("--kv-memory", "4MiB")


def request_line(custom_id, **body):
    body = {"prompt": "abc", "max_tokens": 3} | body
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
    )


def test_a_second_run_answers_only_what_is_missing(run, folder, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        request_line("a", receipt=True) + request_line("b", temperature="hot") + request_line("c")
    )
    options = ("--model", folder, "--device", "cpu", *QUICK)
    result = run("batch", source, target, *options)
    assert result.code == 1
    assert "in.jsonl, line 2: temperature" in result.err
    assert "3 lines: 2 answered, 1 bad, 0 done before" in result.err
    assert result.out == ""
    result = run("batch", source, target, *options)
    assert result.code == 0
    assert "3 lines: 0 answered, 0 bad, 3 done before" in result.err
    assert "contract" not in result.err  # no engine was loaded
    assert run("audit", target, *QUICK).code == 0  # of the one line that has a receipt
    source.write_text(request_line("c"))
    run("batch", source, tmp_path / "bare.jsonl", *options)
    assert "no receipt" in run("audit", tmp_path / "bare.jsonl", *QUICK).out


def test_two_lines_with_one_custom_id_are_refused(run, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(request_line("a") + request_line("a"))
    result = run("batch", source, tmp_path / "out.jsonl")
    assert result.code == 2
    assert "lines 1 and 2" in result.err
