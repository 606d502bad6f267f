"""The app: its commands, options that do not exist, and how errors are shown."""

import subprocess
import sys

import pytest

import samewise

COMMANDS = ("demo", "generate", "chat", "serve", "probe", "batch", "audit", "bench")


def test_version_is_printed(run):
    result = run("--version")
    assert (result.code, result.out) == (0, f"samewise {samewise.__version__}\n")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_lists_all_commands(run, args):
    result = run(*args)
    assert result.code == 0 or not args
    assert all(command in result.out for command in (*COMMANDS, "keygen"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert ("[model]" if command == "serve" else "--model") in result.out.lower()
    assert "Traceback" not in result.out + result.err


def test_importing_the_command_line_imports_no_torch():
    code = "import sys, samewise.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "args", [("frobnicate",), ("generate", "--frobnicate"), ("generate", "x", "-n", "0")]
)
def test_unknown_commands_and_options_are_refused(run, args):
    result = run(*args)
    assert result.code == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "args", [["--version"], ["serve", "--help"], ["generate", "--frobnicate"], ["keygen"]]
)
def test_python_m_samewise_is_samewise(args):
    """The same output and exit code; the console script calls `samewise.cli.main.main`."""
    script = "import sys; sys.argv[0] = 'samewise'; from samewise.cli.main import main; main()"
    results = [
        subprocess.run([sys.executable, *start, *args], capture_output=True, text=True, check=False)
        for start in (["-m", "samewise"], ["-c", script])
    ]
    assert results[0].stdout + results[0].stderr
    assert [(r.returncode, r.stdout, r.stderr) for r in results[:1]] == [
        (r.returncode, r.stdout, r.stderr) for r in results[1:]
    ]


def test_an_error_is_one_line_on_stderr(run, tmp_path):
    result = run("generate", "hello", "-m", tmp_path / "nowhere")
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("samewise: ")
    assert result.err.count("\n") == 1
    assert "nowhere" in result.err


@pytest.mark.parametrize("name", ["no[/where]", "no[bold]where"])
def test_brackets_in_an_error_are_not_read_as_markup(run, name):
    result = run("generate", "hello", "-m", f"./{name}")
    assert result.code == 2
    assert name in result.err
