"""A command whose option may be followed by several values, as vLLM's `--served-model-name A B`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

SEVERAL = "--served-model-name"


class SeveralNamesCommand(TyperCommand):
    """Takes the words after SEVERAL for its values, up to the next option, where an argument came before it.

    Without one before it only the first word is its value: the next one is the command's argument.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        return super().parse_args(ctx, repeat_option(args, self._with_value()))

    def _with_value(self) -> frozenset[str]:
        """The options that take a value."""
        options = [one for one in self.params if one.param_type_name == "option"]
        return frozenset(
            name for one in options if not getattr(one, "is_flag", False) for name in (*one.opts,)
        )


def repeat_option(args: Sequence[str], with_value: frozenset[str]) -> list[str]:
    """The words, with SEVERAL before each of its values."""
    words: list[str] = []
    argument = False  # whether an argument of the command was seen
    waiting: str | None = None  # the option whose value comes next
    several = False  # whether a further word is a value of SEVERAL
    for i, word in enumerate(args):
        if word == "--":
            return [*words, *args[i:]]
        if waiting is not None:
            words.append(word)
            several, waiting = waiting == SEVERAL and argument, None
        elif word.startswith("-") and word != "-":
            words.append(word)
            waiting = word if word in with_value else None
            several = word.startswith(f"{SEVERAL}=") and argument
        elif several:
            words += [SEVERAL, word]
        else:
            words.append(word)
            argument = True
    return words


__all__ = ["SEVERAL", "SeveralNamesCommand", "repeat_option"]
