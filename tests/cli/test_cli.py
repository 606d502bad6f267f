"""The command line: what it prints, where, and with which exit code."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import samewise
from samewise import LLM, SamplingParams
from samewise.cli import main as cli
from samewise.cli.demo import demo
from samewise.testing import byte_tokenizer, tiny_engine, tiny_model

COMMANDS = ("demo", "generate", "chat", "serve", "probe", "batch", "audit")
QUICK = ("--kv-memory", "4MiB", "--device", "cpu")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`samewise …` in this process, as the shell would see it."""
    monkeypatch.setenv("COLUMNS", "200")

    def go(*args: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["samewise", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.over(tiny_engine(eos=True))


def answer(llm: LLM, text: str, *, chat: bool = True, **params: Any) -> Any:
    prompt: Any = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    wanted = SamplingParams(**{"temperature": 0, "max_tokens": 6} | params)
    return llm.generate(prompt, wanted, use_tqdm=False)[0]


# ---- the front door


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"samewise {samewise.__version__}\n")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_the_front_door_lists_the_rooms(run: Run, args: tuple[str, ...]) -> None:
    ran = run(*args)
    assert ran.code == 0 or not args
    assert all(command in ran.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert ("[model]" if command == "serve" else "--model") in ran.out.lower()
    assert "Traceback" not in ran.out + ran.err


def test_help_is_quick_because_torch_stays_out() -> None:
    code = "import sys, samewise.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "args", [("frobnicate",), ("generate", "--frobnicate"), ("generate", "x", "-n", "0")]
)
def test_what_does_not_exist_is_refused(run: Run, args: tuple[str, ...]) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert "Traceback" not in ran.err


# ---- generate


def test_a_prompt_is_answered_on_stdout_alone(run: Run, folder: str, llm: LLM) -> None:
    ran = run("generate", "hello", "-m", folder, "-n", "6", *QUICK)
    assert ran.code == 0
    assert ran.out == answer(llm, "hello").outputs[0].text + "\n"


@pytest.mark.parametrize("args", [(), ("-",)])
def test_a_prompt_may_come_on_stdin(run: Run, folder: str, llm: LLM, args: tuple[str, ...]) -> None:
    ran = run("generate", *args, "-m", folder, "-n", "6", "--json", *QUICK, stdin="hello\n")
    assert ran.code == 0
    assert ran.records[0]["prompt"] == "hello"
    assert ran.records[0]["token_ids"] == answer(llm, "hello").outputs[0].token_ids


def test_json_is_one_object_a_line_with_the_exact_numbers(run: Run, folder: str, llm: LLM) -> None:
    ran = run("generate", "hello", "-m", folder, "-n", "6", "--json", "--logprobs", "2", *QUICK)
    (record,) = ran.records
    wanted = answer(llm, "hello", logprobs=2)
    first = wanted.outputs[0]
    assert record["text"] == first.text
    assert record["token_ids"] == first.token_ids
    assert record["token_logprobs"] == first.token_logprobs
    assert record["finish_reason"] == first.finish_reason
    assert record["seed"] == first.seed
    assert record["num_prompt_tokens"] == len(wanted.prompt_token_ids)
    assert record["contract"].startswith("sw-")
    assert [list(map(int, position)) for position in record["logprobs"]] == [list(p) for p in first.logprobs]


def test_raw_continues_the_text_itself(run: Run, folder: str, llm: LLM) -> None:
    ran = run("generate", "hello", "--raw", "-m", folder, "-n", "6", "--json", *QUICK)
    assert ran.records[0]["token_ids"] == answer(llm, "hello", chat=False).outputs[0].token_ids
    assert ran.records[0]["num_prompt_tokens"] == 5


def test_a_system_message_and_sampling_reach_the_model(run: Run, folder: str, llm: LLM) -> None:
    args = ("--system", "be brief", "-t", "0.9", "--top-p", "0.9", "--top-k", "40", "--seed", "11")
    ran = run("generate", "hello", "-m", folder, "-n", "6", "--json", *args, *QUICK)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=6)
    wanted = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
    assert ran.records[0]["token_ids"] == wanted.token_ids
    assert ran.records[0]["token_logprobs"] == wanted.token_logprobs
    assert ran.records[0]["seed"] == 11


def test_a_file_holds_a_prompt_a_line(run: Run, folder: str, llm: LLM, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\n  \nwörld\n", encoding="utf-8")
    ran = run("generate", "--file", str(prompts), "-m", folder, "-n", "6", "--json", *QUICK)
    assert ran.code == 0
    assert [record["prompt"] for record in ran.records] == ["hello", "wörld"]
    assert [r["token_ids"] for r in ran.records] == [
        answer(llm, text).outputs[0].token_ids for text in ("hello", "wörld")
    ]


def test_prompts_are_shown_as_they_were_written(run: Run, folder: str, tmp_path: Path) -> None:
    """Brackets are text, not markup."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why [/b] not\nsay [red]hello[/red]\n")
    ran = run("generate", "-f", str(prompts), "-m", folder, "-n", "2", *QUICK)
    assert ran.code == 0
    assert "why [/b] not" in ran.out
    assert "say [red]hello[/red]" in ran.out


# ---- mistakes


def test_an_unknown_model_is_one_line(run: Run, tmp_path: Path) -> None:
    ran = run("generate", "hello", "-m", str(tmp_path / "nowhere"))
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("samewise: ")
    assert ran.err.count("\n") == 1
    assert "nowhere" in ran.err


def test_an_error_is_shown_as_it_is_even_with_brackets_in_it(run: Run) -> None:
    ran = run("generate", "hello", "-m", "./no[/where]")
    assert ran.code == 2
    assert "no[/where]" in ran.err
    ran = run("generate", "hello", "-m", "./no[bold]where")
    assert "no[bold]where" in ran.err


@pytest.mark.parametrize(
    ("args", "says"),
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
def test_a_bad_value_is_one_line_with_the_value(
    run: Run, folder: str, args: tuple[str, ...], says: str
) -> None:
    ran = run("generate", "hello hello", "-m", folder, "--raw", *args)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err
    assert len([line for line in ran.err.splitlines() if line.startswith("samewise: ")]) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("",), "the prompt is empty"),
        (("-",), "the prompt is empty"),
        (("x", "--file", "y"), "not both"),
        (("--file", "/nowhere/at/all"), "cannot read"),
    ],
)
def test_no_prompt_is_no_question(run: Run, args: tuple[str, ...], says: str) -> None:
    ran = run("generate", *args)
    assert ran.code == 2
    assert says in ran.err


def test_a_file_of_blank_lines_holds_no_prompt(run: Run, tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n \n")
    ran = run("generate", "--file", str(tmp_path / "blank"))
    assert ran.code == 2
    assert "holds no prompt" in ran.err


# ---- chat


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """The LLMs a command made."""
    made: list[LLM] = []
    make = cli._llm
    monkeypatch.setattr(cli, "_llm", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    return made


def shown(text: str) -> str:
    """As a terminal gets it: bells and the like are left out."""
    return text.translate(dict.fromkeys([7, 8, 11, 12, 13])).strip()


def test_the_second_turn_reads_only_what_is_new(run: Run, folder: str, kept: list[LLM], llm: LLM) -> None:
    ran = run("chat", "-m", folder, "-n", "6", "--device", "cpu", stdin="tell me of rivers\nand of hills\n")
    assert ran.code == 0
    assert "contract sw-" in ran.out
    first = answer(llm, "tell me of rivers").outputs[0].text
    assert shown(first) in ran.out
    stats = kept[0].stats()
    assert stats["requests"] == stats["finished"] == 2
    assert stats["cached_tokens"] >= 32
    messages = [
        {"role": "user", "content": "tell me of rivers"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and of hills"},
    ]
    params = SamplingParams(temperature=0, max_tokens=6)
    assert shown(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text) in ran.out


def test_new_starts_over_and_quit_leaves(run: Run, folder: str, kept: list[LLM]) -> None:
    stdin = "hello\n\n/new\nhello\n/quit\nnever\n"
    ran = run("chat", "-m", folder, "-n", "3", "--device", "cpu", stdin=stdin)
    assert ran.code == 0
    assert kept[0].stats()["requests"] == 2
    prompt = len(kept[0].chat_prompt([{"role": "user", "content": "hello"}]))
    assert kept[0].stats()["prompt_tokens"] == 2 * prompt


# ---- probe, demo


def test_probe_prints_the_contract_fact_by_fact(run: Run, folder: str) -> None:
    ran = run("probe", "-m", folder, "--device", "cpu")
    assert ran.code == 0
    assert "holds" in ran.out
    assert "contract sw-" in ran.out
    as_json = run("probe", "-m", folder, "--device", "cpu", "--json")
    found = json.loads(as_json.out)
    assert found["contract"] in ran.out
    assert {"weights", "dtype", "probe", "frame rows"} <= found["facts"].keys()
    assert len(found["operators"]) == 5
    assert set(found["sizes"].values()) == {"as it is"}


def test_probe_tells_what_runs_at_how_many_rows() -> None:
    engine = tiny_engine(linear="torch", frame_rows=16, proposer="none")
    assert list(engine.sizes) == [1, 2, 8, 16, 64]
    first, *others = engine.operators
    engine.operators = [replace(first, pieces={1: 8, 2: 8, 8: 8, 16: 16, 64: 16}), *others]
    engine.sizes = engine.sizes | {1: "norms of 64: at 16 rows"}
    text = io.StringIO()
    Console(file=text, width=160).print(cli._sizes_table(engine))
    lines = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    name = first.name.split(".")[-1]
    assert [name, f"{first.outputs}×{first.inputs}", "8", "8", "=", "=", "4×16"] in lines
    assert ["norms", "and", "all", "else", "norms", "of", "64", "=", "=", "=", "="] in lines


def test_the_same_folder_has_the_same_contract_everywhere(run: Run, folder: str) -> None:
    found = json.loads(run("probe", "-m", folder, "--device", "cpu", "--json").out)["contract"]
    ran = run("generate", "x", "-m", folder, "-n", "1", "--json", *QUICK)
    assert ran.records[0]["contract"] == found


def test_the_demonstration_shows_one_digest_for_verified_decoding(llm: LLM) -> None:
    text = io.StringIO()
    assert demo(Console(file=text, width=160), lambda **_: llm, max_tokens=6)
    shown = text.getvalue()
    assert "verified 1" in shown
    for situation in ("alone", "in a crowd of 8", "in another order", "after a preemption"):
        assert situation in shown
    llm.engine.check()
    assert llm.engine.idle


@pytest.mark.real
@pytest.mark.slow
def test_the_built_in_model_answers() -> None:
    main = "from samewise.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, "generate", "Hello", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
