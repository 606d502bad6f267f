"""The demonstration: one question, four situations, two ways of decoding, and whose bits moved."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from samewise.llm.answers import Answer, Desk
from samewise.llm.llm import LLM
from samewise.params import SamplingParams

QUESTION = "Why is the sky blue? Answer in two sentences."
CROWD = (
    "Name three rivers in Europe.",
    "Write a haiku about rain.",
    "What is 17 times 6?",
    "Translate 'good morning' to French.",
    "List four prime numbers.",
    "Who wrote Hamlet?",
    "Explain what a compiler does in one sentence.",
)
SITUATIONS = ("alone", "in a crowd of 8", "in another order", "after a preemption")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the question got in one situation."""

    token_ids: tuple[int, ...]
    digest: str


def demo(console: Console, make: Callable[..., LLM], *, max_tokens: int = 32) -> bool:
    """Show it. Returns whether verified decoding gave one digest throughout.

    Ordinary decoding is what everybody does: dynamic batching over torch's own linears.
    """
    with console.status("loading the model and proving the frame property …"):
        llm = make()
    report = llm.engine.report
    console.print(
        f"contract [bold]{llm.contract}[/]: {report.frames} frames and {report.operators} operators probed "
        f"in {report.seconds:.1f} s\n"
    )
    _stream(console, llm)
    with console.status("loading it again, with torch's own linears, for ordinary decoding …"):
        ordinary = make(linear="torch")
    outcomes = _all(console, {"ordinary": ordinary, "verified": llm}, max_tokens)
    console.print(_table(outcomes))
    counts = {way: len({o.digest for o in found.values()}) for way, found in outcomes.items()}
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


def _all(console: Console, ways: dict[str, LLM], max_tokens: int) -> dict[str, dict[str, Outcome]]:
    """Every situation, each way, with a line of progress for each."""
    outcomes: dict[str, dict[str, Outcome]] = {way: {} for way in ways}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(SITUATIONS) * 2)
        for way, found in outcomes.items():
            for situation in SITUATIONS:
                progress.update(task, description=f"asking {situation}, {way} decoding")
                found[situation] = _ask(ways[way], situation, verify=way == "verified", max_tokens=max_tokens)
                progress.advance(task)
    return outcomes


def _ask(llm: LLM, situation: str, *, verify: bool, max_tokens: int) -> Outcome:
    """Ask the question in a situation, and look at nothing but its own answer."""
    desk = Desk(llm.engine)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, verify=verify)
    prompts = [QUESTION] if situation == "alone" else [QUESTION, *CROWD]
    if situation == "in another order":
        prompts.reverse()
    answers = {
        prompt: desk.submit(desk.ask(desk.chat_prompt([{"role": "user", "content": prompt}]), params))
        for prompt in prompts
    }
    mine = answers[QUESTION]
    disturbed = situation != "after a preemption"
    while not llm.engine.idle:
        desk.step()
        if not disturbed and len(mine.choices[0].token_ids) >= max_tokens // 2:
            disturbed = llm.engine.preempt(mine.choices[0].engine_id)
    return _outcome(mine)


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
        row = [situation]
        for found in outcomes.values():
            same = found[situation].digest == found[SITUATIONS[0]].digest
            mark = "[green]same[/]" if same else "[red]differs[/]"
            row.append(f"{found[situation].digest}  {mark}")
        table.add_row(*row)
    return table


__all__ = ["Outcome", "demo"]
