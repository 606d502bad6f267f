"""`samewise demo`: the bits of one answer in four situations, with and without verification."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from samewise.cli.loading import load_llm
from samewise.cli.options import MaxTokens, Settings, engine_options
from samewise.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from samewise.llm.answer import Answer
    from samewise.llm.llm import LLM

QUESTION = "Why is the sky blue? Answer in two sentences."
OTHER_QUESTIONS = (
    "Name three rivers in Europe.",
    "Write a haiku about rain.",
    "What is 17 times 6?",
    "Translate 'good morning' to French.",
    "List four prime numbers.",
    "Who wrote Hamlet?",
    "Explain what a compiler does in one sentence.",
)
SITUATIONS = ("alone", "in a batch of 8", "in another order", "after a preemption")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to QUESTION in one situation; `digest` is of the bits of its log-probabilities."""

    token_ids: tuple[int, ...]
    digest: str


@engine_options("demo")
def demo(max_tokens: MaxTokens = 32, *, settings: Settings) -> None:
    """Watch the model answer, then see which bits depend on the load."""
    if not show(Console(), lambda **changes: load_llm(**settings | changes), max_tokens=max_tokens):
        raise typer.Exit(1)


def show(console: Console, load: Callable[..., LLM], *, max_tokens: int) -> bool:
    """Run and print the demonstration. Returns whether verified decoding gave one digest throughout.

    Ordinary decoding is dynamic batching over torch's own linears, without verification.
    """
    with console.status("loading the model and proving the frame property …"):
        llm = load()
    report = llm.engine.report
    console.print(
        f"contract [bold]{llm.contract}[/]: {report.frames} frames and {report.operators} operators probed "
        f"in {report.seconds:.1f} s\n"
    )
    _stream(console, llm)
    with console.status("loading it again, with torch's own linears, for ordinary decoding …"):
        ordinary = load(linear="torch")
    outcomes = _measure(console, {"ordinary": ordinary, "verified": llm}, max_tokens)
    console.print(_table(outcomes))
    counts = {way: len({outcome.digest for outcome in row.values()}) for way, row in outcomes.items()}
    console.print(
        f"\ndifferent log-probability digests: ordinary decoding [bold]{counts['ordinary']}[/], "
        f"verified [bold]{counts['verified']}[/]"
    )
    return counts["verified"] == 1


def _stream(console: Console, llm: LLM) -> None:
    console.print(f"[bold cyan]{QUESTION}[/]")
    params = SamplingParams(temperature=0, max_tokens=64)
    for chunk in llm.stream_chat([{"role": "user", "content": QUESTION}], params):
        console.print(chunk.text, end="", soft_wrap=True, highlight=False, markup=False)
    console.print("\n")


def _measure(console: Console, llms: dict[str, LLM], max_tokens: int) -> dict[str, dict[str, Outcome]]:
    """Outcomes by way of decoding and situation."""
    outcomes: dict[str, dict[str, Outcome]] = {way: {} for way in llms}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(SITUATIONS) * len(llms))
        for way, llm in llms.items():
            for situation in SITUATIONS:
                progress.update(task, description=f"asking {situation}, {way} decoding")
                outcomes[way][situation] = _ask(
                    llm, situation, verify=way == "verified", max_tokens=max_tokens
                )
                progress.advance(task)
    return outcomes


def _ask(llm: LLM, situation: str, *, verify: bool, max_tokens: int) -> Outcome:
    from samewise.llm.step_loop import StepLoop

    loop = StepLoop(llm.engine)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, verify=verify)
    questions = [QUESTION] if situation == "alone" else [QUESTION, *OTHER_QUESTIONS]
    if situation == "in another order":
        questions.reverse()
    answers = {}
    for question in questions:
        prompt = loop.intake.chat_prompt([{"role": "user", "content": question}])
        answers[question] = loop.submit(loop.intake.check(prompt, params))
    answer = answers[QUESTION]
    preempted = situation != "after a preemption"  # true also where there is nothing to preempt
    while not llm.engine.idle:
        loop.step()
        if not preempted and len(answer.choices[0].token_ids) >= max_tokens // 2:
            preempted = llm.engine.preempt(answer.choices[0].engine_id)
    return _outcome(answer)


def _outcome(answer: Answer) -> Outcome:
    choice = answer.choices[0]
    bits = struct.pack(f"<{len(choice.logprobs)}f", *choice.logprobs)
    return Outcome(tuple(choice.token_ids), sha256(bits).hexdigest()[:12])


def _table(outcomes: dict[str, dict[str, Outcome]]) -> Table:
    table = Table(title="the same question, digest of its log-probabilities", title_style="bold")
    table.add_column("asked")
    for way in outcomes:
        table.add_column(f"{way} decoding")
    for situation in SITUATIONS:
        cells = [situation]
        for row in outcomes.values():
            same = row[situation].digest == row[SITUATIONS[0]].digest
            cells.append(f"{row[situation].digest}  {'[green]same[/]' if same else '[red]differs[/]'}")
        table.add_row(*cells)
    return table


__all__ = ["Outcome", "demo", "show"]
