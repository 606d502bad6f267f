"""`samewise bench`: measure proposers and peers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from samewise.bench.options import PEERS, BenchOptions
from samewise.cli.options import MaxTokens, Settings, engine_options
from samewise.config import PROPOSERS, EngineConfig

DEFAULT_OPTIONS = BenchOptions()


@engine_options("bench")
def bench(
    proposers: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(PROPOSERS)}, ngram+skip, unverified.")
    ] = ",".join(DEFAULT_OPTIONS.proposers),
    batches: Annotated[str, typer.Option("--batch", help="Requests at once, comma-separated.")] = ",".join(
        map(str, DEFAULT_OPTIONS.batches)
    ),
    repeats: Annotated[
        int, typer.Option(help="Interleaved runs of everything.", min=1)
    ] = DEFAULT_OPTIONS.repeats,
    max_tokens: MaxTokens = DEFAULT_OPTIONS.max_tokens,
    workload: Annotated[
        Optional[Path], typer.Option(help="A file in Spec-Bench's format; default: the project's own set.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Only these tasks, comma-separated.")] = "",
    limit: Annotated[int, typer.Option(help="Questions per task; 0: all.", min=0)] = DEFAULT_OPTIONS.limit
    or 0,
    synthetic: Annotated[Optional[int], typer.Option(help="Random prompts of this length instead.")] = None,
    rate: Annotated[Optional[float], typer.Option(help="Requests per second; default: all at once.")] = None,
    verified: Annotated[
        float, typer.Option(help="Share of requests verified.", min=0, max=1)
    ] = DEFAULT_OPTIONS.verified,
    inject: Annotated[
        str,
        typer.Option(
            help="Mismatch rates, e.g. 0,0.01,0.1: draws what rolling back costs, at the first --batch."
        ),
    ] = "",
    timeline: Annotated[
        bool, typer.Option(help="The proposer skip over one task after the other: draws its phases.")
    ] = False,
    search_share: Annotated[
        float, typer.Option(help="Share of the time that skip may search.")
    ] = DEFAULT_OPTIONS.search_share,
    peers: Annotated[
        Optional[str],
        typer.Option(help=f"Comma-separated: {', '.join(PEERS)}; default: those that are installed."),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Compare with no peer.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past ends of answers: equally many tokens from all.")
    ] = DEFAULT_OPTIONS.ignore_eos,
    first_token: Annotated[
        int, typer.Option(help="Also time the first token of a prompt of this length; 0: none.", min=0)
    ] = DEFAULT_OPTIONS.first_token,
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = DEFAULT_OPTIONS.out,
    *,
    settings: Settings,
) -> None:
    """Measure proposers and peers side by side: a table, a picture, one last line of JSON.

    [dim]samewise bench[/]
    [dim]samewise bench --proposers auto --workload questions.jsonl --limit 5[/]
    [dim]samewise bench --peers llama.cpp --proposers none[/]
    [dim]samewise bench --inject 0,0.01,0.05,0.2[/]
    """
    from samewise.bench.run import as_line
    from samewise.bench.run import bench as measure

    config = EngineConfig.of(**settings)
    sizes, rates = _numbers("batch", batches), _numbers("inject", inject)
    if not sizes or any(size < 1 or size != int(size) for size in sizes):
        raise typer.BadParameter(f"--batch {batches!r}: give whole numbers from 1")
    if any(not 0 <= one <= 1 for one in rates):
        raise typer.BadParameter(f"--inject {inject!r}: give rates from 0 to 1")
    if rate is not None and rate <= 0:
        raise typer.BadParameter(f"--rate {rate}: give more than 0 requests a second")
    if rate is not None and (rates or timeline):
        raise typer.BadParameter(f"--rate {rate}: with --inject and --timeline all requests come at once")
    chosen = () if no_peers else None if peers is None else _names(peers)
    for name in chosen or ():
        if name not in PEERS:
            raise typer.BadParameter(f"--peers {name!r}: choose from {', '.join(PEERS)}")
    if no_peers and peers is not None:
        raise typer.BadParameter(f"--peers {peers!r}: not with --no-peers; give one of the two")
    if rate is not None and chosen != ():
        typer.echo("no peers: with --rate requests arrive one after the other, and peers take all at once")
        chosen = ()
    options = BenchOptions(
        proposers=_names(proposers), batches=tuple(int(size) for size in sizes), repeats=repeats,
        max_tokens=max_tokens, verified=verified, workload=workload, tasks=_names(tasks), limit=limit or None,
        synthetic=synthetic, rate=rate, peers=chosen, inject=rates, timeline=timeline,
        search_share=search_share, out=out, ignore_eos=ignore_eos, first_token=first_token,
    )  # fmt: skip
    typer.echo(as_line(measure(Console(), config, options)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError:
        raise typer.BadParameter(f"--{name} {text!r}: give numbers, comma-separated") from None


__all__ = ["bench"]
