"""`samewise generate`: what it prints, where, and with which exit code."""

import subprocess
import sys

import pytest

from samewise import SamplingParams

QUICK = ("--kv-memory", "4MiB", "--device", "cpu")


def answer(llm, text, *, chat=True, **params):
    """What the Python interface returns for the same prompt."""
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6} | params)
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_stdout_holds_the_answer_and_nothing_else(run, model, llm):
    result = run("generate", "hello", "-m", model, "-n", "6", *QUICK)
    assert result.code == 0
    assert result.out == answer(llm, "hello").outputs[0].text + "\n"


@pytest.mark.parametrize("args", [(), ("-",)])
def test_a_prompt_is_read_from_stdin(run, model, llm, args):
    result = run("generate", *args, "-m", model, "-n", "6", "--json", *QUICK, stdin="hello\n")
    assert result.code == 0
    assert result.records[0]["prompt"] == "hello"
    assert result.records[0]["token_ids"] == answer(llm, "hello").outputs[0].token_ids


def test_json_is_one_object_a_line_with_the_exact_numbers(run, model, llm):
    result = run("generate", "hello", "-m", model, "-n", "6", "--json", "--logprobs", "2", *QUICK)
    (record,) = result.records
    expected = answer(llm, "hello", logprobs=2)
    first = expected.outputs[0]
    assert record["text"] == first.text
    assert record["token_ids"] == first.token_ids
    assert record["token_logprobs"] == first.token_logprobs
    assert record["finish_reason"] == first.finish_reason
    assert record["seed"] == first.seed
    assert record["num_prompt_tokens"] == len(expected.prompt_token_ids)
    assert record["contract"].startswith("sw-")
    assert [list(map(int, position)) for position in record["logprobs"]] == [list(p) for p in first.logprobs]


def test_raw_continues_the_text_without_a_chat_template(run, model, llm):
    result = run("generate", "hello", "--raw", "-m", model, "-n", "6", "--json", *QUICK)
    assert result.records[0]["token_ids"] == answer(llm, "hello", chat=False).outputs[0].token_ids
    assert result.records[0]["num_prompt_tokens"] == 5


def test_a_system_message_and_sampling_reach_the_model(run, model, llm):
    args = ("--system", "be brief", "-t", "0.9", "--top-p", "0.9", "--top-k", "40", "--seed", "11")
    result = run("generate", "hello", "-m", model, "-n", "6", "--json", *args, *QUICK)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=6)
    expected = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
    assert result.records[0]["token_ids"] == expected.token_ids
    assert result.records[0]["token_logprobs"] == expected.token_logprobs
    assert result.records[0]["seed"] == 11


def test_a_file_holds_one_prompt_a_line(run, model, llm, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\n  \nwörld\n", encoding="utf-8")
    result = run("generate", "--file", prompts, "-m", model, "-n", "6", "--json", *QUICK)
    assert result.code == 0
    assert [record["prompt"] for record in result.records] == ["hello", "wörld"]
    assert [record["token_ids"] for record in result.records] == [
        answer(llm, text).outputs[0].token_ids for text in ("hello", "wörld")
    ]


def test_brackets_in_a_prompt_are_not_read_as_markup(run, model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why [/b] not\nsay [red]hello[/red]\n")
    result = run("generate", "-f", prompts, "-m", model, "-n", "2", *QUICK)
    assert result.code == 0
    assert "why [/b] not" in result.out
    assert "say [red]hello[/red]" in result.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--top-p", "0"), "top_p=0.0"),
        (("--stop", ""), "stop"),
        (("--dtype", "int3"), "dtype='int3'"),
        (("--device", "tpu"), "device='tpu'"),
        (("--frame-rows", "0"), "frame_rows=0"),
        (("--max-model-len", "100000"), "max_model_len=100000"),
        (("--kv-memory", "lots"), "kv_memory='lots'"),
        (("--max-model-len", "8"), "max_model_len is 8"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(run, model, args, message):
    result = run("generate", "hello hello", "-m", model, "--raw", *args)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert len([line for line in result.err.splitlines() if line.startswith("samewise: ")]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("",), "the prompt is empty"),
        (("-",), "the prompt is empty"),
        (("x", "--file", "y"), "not both"),
        (("--file", "/nowhere/at/all"), "cannot read"),
    ],
)
def test_a_missing_prompt_is_refused(run, args, message):
    result = run("generate", *args)
    assert result.code == 2
    assert message in result.err


def test_a_prediction_is_counted_and_changes_nothing(run, model, llm, tmp_path):
    (tmp_path / "guess").write_text("hello world")
    result = run(
        "generate", "hello", "-m", model, "-n", "6", "--json", "--prediction", tmp_path / "guess", *QUICK
    )
    (record,) = result.records
    assert record["token_ids"] == answer(llm, "hello").outputs[0].token_ids
    assert record["accepted_prediction_tokens"] + record["rejected_prediction_tokens"] > 0
    result = run("generate", "hello", "--prediction", "/nowhere/at/all")
    assert (result.code, "cannot read" in result.err) == (2, True)


def test_a_file_of_blank_lines_is_refused(run, tmp_path):
    (tmp_path / "blank").write_text("\n \n")
    result = run("generate", "--file", tmp_path / "blank")
    assert result.code == 2
    assert "holds no prompt" in result.err


@pytest.mark.real
@pytest.mark.slow
def test_the_built_in_model_answers():
    done = subprocess.run(
        [sys.executable, "-m", "samewise", "generate", "Hello", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
