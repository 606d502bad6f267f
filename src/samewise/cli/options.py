"""Options that commands share. Those of the engine are made from the declarations of EngineConfig."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional, get_args

import typer

from samewise.config import SETTINGS, Setting

Settings = dict[str, Any]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Probability mass to sample from; 1: all.")]
TopK = Annotated[int, typer.Option("--top-k", help="Most likely tokens to sample from; 0: all.")]
Seed = Annotated[Optional[int], typer.Option(help="Same seed, same text.")]
System = Annotated[Optional[str], typer.Option("--system", help="A system message.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def engine_options(command: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add to a command the options of every engine setting that is declared for it.

    The command takes `settings`, a dict of the settings whose value is not None. `defaults` replace those of
    EngineConfig. A setting that the command declares as a parameter of its own is not added.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "settings"]
        names = {parameter.name for parameter in own}
        added = [
            _parameter(declared, defaults.get(declared.name, declared.default))
            for declared in SETTINGS.values()
            if command in declared.commands and declared.name not in names
        ]

        def run(**arguments: Any) -> None:
            values = {parameter.name: arguments.pop(parameter.name) for parameter in added}
            function(**arguments, settings={name: v for name, v in values.items() if v is not None})

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(declared: Setting, default: Any) -> inspect.Parameter:
    """The typer parameter of a setting; its type is the first of str, bool, int that the setting accepts."""
    accepted = get_args(declared.type) or (declared.type,)
    kind: Any = next(one for one in (str, bool, int) if one in accepted)
    values = declared.values
    meaning = (
        f"{declared.meaning} {values.text.capitalize()}." if values.verb == "choose" else declared.meaning
    )
    panel = None if declared.name == "model" else "Engine"
    option = typer.Option(*declared.options, help=meaning, rich_help_panel=panel)
    annotation: Any = Annotated[kind if default is not None else Optional[kind], option]
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


__all__ = [
    "AsJson",
    "MaxTokens",
    "Seed",
    "Settings",
    "System",
    "Temperature",
    "TopK",
    "TopP",
    "engine_options",
]
