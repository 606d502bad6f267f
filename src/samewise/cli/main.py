"""The app `samewise`: its commands, and how errors are shown."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import samewise
from samewise import machine
from samewise.cli.audit import audit
from samewise.cli.batch import batch
from samewise.cli.bench import bench
from samewise.cli.chat import chat
from samewise.cli.demo import demo
from samewise.cli.generate import generate
from samewise.cli.keygen import keygen
from samewise.cli.probe import probe
from samewise.cli.serve import serve
from samewise.cli.several_values import SeveralNamesCommand
from samewise.errors import SamewiseError

app = typer.Typer(
    help="Language models that answer the same way every time: same request, same bits, under any load.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, chat, serve, probe, batch, audit, keygen, bench):
    app.command(cls=SeveralNamesCommand if command is serve else None)(command)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"samewise {samewise.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main() -> None:
    """Run the command line; an error of this package is one line on stderr, not a traceback."""
    machine.pin_environment()
    try:
        app(prog_name="samewise")
    except SamewiseError as error:
        Console(stderr=True).print(
            f"[bold red]samewise:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        sys.exit(2)
    except BrokenPipeError:  # the reader of stdout has closed it (`| head`); this is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


__all__ = ["app", "main"]
