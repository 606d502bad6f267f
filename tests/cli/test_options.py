"""Options of the engine's settings: made from the declarations of EngineConfig, for every command."""

import inspect

import pytest
import typer

from samewise.cli import options
from samewise.cli.main import app
from samewise.config import PROPOSERS, SETTINGS, EngineConfig

COMMANDS = dict(typer.main.get_command(app).commands)
PUBLISHED = {  # options that scripts of users may contain: none may disappear
    "demo": "model device dtype",
    "generate": "model device dtype revision frame-rows compile max-model-len kv-memory trust-remote-code "
    "proposer draft-model explain",
    "chat": "model device dtype max-model-len proposer draft-model",
    "probe": "model device dtype revision frame-rows compile max-model-len trust-remote-code",
    "batch": "model max-num-seqs device dtype revision frame-rows compile max-model-len kv-memory "
    "trust-remote-code proposer draft-model",
    "audit": "model device kv-memory trust-remote-code",
    "bench": "model draft-model draft-weights draft-tokens device dtype linear frame-rows compile "
    "max-model-len kv-memory",
    "serve": "device dtype attention linear revision trust-remote-code compile frame-rows max-model-len "
    "max-num-seqs kv-memory prefix-caching proposer draft-model draft-tokens draft-weights seed date "
    "max-num-queued-reqs",
}


@pytest.mark.parametrize("command", sorted(PUBLISHED))
def test_a_command_offers_every_setting_declared_for_it(command):
    offered = {flag for parameter in COMMANDS[command].params for flag in parameter.opts}
    declared = {
        option.split("/")[0]
        for setting in SETTINGS.values()
        for option in setting.options
        if command in setting.commands and (command, setting.name) != ("serve", "model")
    }
    assert declared <= offered
    assert {f"--{name}" for name in PUBLISHED[command].split()} <= offered


def test_every_command_of_a_declaration_exists():
    assert {command for setting in SETTINGS.values() for command in setting.commands} <= set(COMMANDS)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_the_help_of_proposer_names_every_proposer(command):
    (option,) = [p for p in COMMANDS[command].params if p.name == "proposer"]
    assert ", ".join(PROPOSERS) in option.help


def call(command, *args):
    """The settings that a command with the options of `command` receives for these arguments."""
    received = []

    @options.engine_options(command)
    def record(settings):
        """Record."""
        received.append(settings)

    made = typer.Typer(add_completion=False)
    made.command()(record)
    made(list(args), standalone_mode=False)
    return received[0]


def test_settings_are_the_defaults_where_no_option_is_given():
    assert EngineConfig.of(**call("serve")) == EngineConfig()
    assert EngineConfig.of(**call("generate")) == EngineConfig()


def test_options_arrive_as_settings():
    given = call(
        "serve", "--dtype", "float32", "--no-compile", "--frame-rows", "16", "--kv-memory", "2GiB",
        "--no-prefix-caching", "--trust-remote-code", "--seed", "-3", "--proposer", "ngram+skip",
        "--workload", "mail", "--max-num-queued-reqs", "7",
    )  # fmt: skip
    expected = EngineConfig(
        dtype="float32", compile=False, frame_rows=16, kv_memory="2GiB", enable_prefix_caching=False,
        trust_remote_code=True, seed=-3, proposer="ngram+skip", workload="mail", max_queued=7,
    )  # fmt: skip
    assert EngineConfig.of(**given) == expected


def test_a_default_of_none_leaves_the_setting_out():
    received = []

    @options.engine_options("audit", device=None, trust_remote_code=None, model=None)
    def record(settings):
        """Record."""
        received.append(settings)

    made = typer.Typer(add_completion=False)
    made.command()(record)
    made([], standalone_mode=False)
    made(["--trust-remote-code"], standalone_mode=False)
    assert received == [{}, {"trust_remote_code": True}]


def test_a_parameter_of_the_command_replaces_the_option():
    @options.engine_options("serve")
    def record(model: int = 3, *, settings):
        """Record."""

    parameters = inspect.signature(record).parameters
    assert parameters["model"].default == 3
    assert "settings" not in parameters
