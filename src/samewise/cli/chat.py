"""`samewise chat`: a conversation on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from samewise.cli.loading import load_llm
from samewise.cli.options import MaxTokens, Seed, Settings, System, Temperature, TopP, engine_options
from samewise.errors import CallerError
from samewise.params import SamplingParams

if TYPE_CHECKING:
    from samewise.llm.llm import LLM


@engine_options("chat")
def chat(
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    *,
    settings: Settings,
) -> None:
    """Talk with the model. A turn computes only its new tokens: the others are in the prefix cache.

    [dim]/new[/] starts over, [dim]/quit[/] or Ctrl-D leaves.
    """
    console = Console()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with console.status("loading …"):
        llm = load_llm(**settings)
    name = escape(settings["model"])
    console.print(f"[dim]{name}, contract {llm.contract}; /new starts over, /quit leaves[/]")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _read_line(console)) is not None:
        if line == "/quit":
            break
        if line == "/new":
            messages = list(start)
        elif line:
            question = {"role": "user", "content": line}
            try:
                answer = _stream_answer(console, llm, [*messages, question], params)
            except CallerError as error:  # such as a conversation beyond max_model_len; it is kept as it was
                console.print(f"[bold red]samewise:[/] {escape(str(error))} [dim](/new starts over)[/]")
            else:
                messages += [question, {"role": "assistant", "content": answer}]


def _read_line(console: Console) -> str | None:
    try:
        return console.input("[bold green]you[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _stream_answer(console: Console, llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print an answer as it comes; Ctrl-C ends it and keeps its text so far."""
    text = ""
    try:
        for chunk in llm.stream_chat(messages, params):
            text += chunk.text
            console.print(chunk.text, end="", soft_wrap=True, highlight=False, markup=False)
    except KeyboardInterrupt:
        console.print(" …", end="")
    console.print()
    return text


__all__ = ["chat"]
