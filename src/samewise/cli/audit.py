"""`samewise audit`: replay answers from their receipts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Optional, TypeVar

import typer

from samewise.cli.options import Settings, engine_options

T = TypeVar("T")


@engine_options("audit", device=None, trust_remote_code=None)
def audit(
    paths: Annotated[list[Path], typer.Argument(help="Receipts, JSON lines of them, or folders.")],
    model: Annotated[
        Optional[str], typer.Option("--model", "-m", help="Where the model is now, if not where it was.")
    ] = None,
    prompts: Annotated[
        Optional[Path],
        typer.Option(help="JSON lines of prompts (ids, texts or messages), where receipts keep digests."),
    ] = None,
    key: Annotated[Optional[Path], typer.Option(help="Only receipts signed with this public key.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replay under another contract too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a receipt.")] = False,
    *,
    settings: Settings,
) -> None:
    """Replay answers from their receipts and report whether they are the same, bit for bit.

    The model is the one the receipt names. Exits with 0 if all are the same, else with 1.

    [dim]samewise audit receipt.json[/]
    [dim]samewise audit receipts/ --key server.pub[/]
    """
    from samewise.jobs.audit import audit_files, read_prompts
    from samewise.receipts.signing import read_public
    from samewise.receipts.store import read

    entries = list(read(paths))
    findings = audit_files(
        entries, model=model, prompts=[] if prompts is None else read_prompts(prompts),
        signed_by=None if key is None else read_public(key), force=force, **settings,
    )  # fmt: skip
    counts: dict[str, int] = {}
    for finding in _with_progress(findings, len(entries)):
        counts[finding.status.value] = counts.get(finding.status.value, 0) + 1
        if as_json:
            typer.echo(json.dumps(finding.as_json(), ensure_ascii=False))
        elif not finding.is_same or len(entries) == 1 or finding.details:
            tokens = f" ({finding.num_tokens} tokens, contract {finding.contract})" if finding.is_same else ""
            typer.echo("\n  ".join([f"{finding.where}: {finding.status.value}{tokens}", *finding.details]))
    if not as_json and len(entries) > 1:
        typer.echo(", ".join(f"{num} {status}" for status, num in sorted(counts.items())))
    if set(counts) != {"same"}:
        raise typer.Exit(1)


def _with_progress(findings: Iterable[T], total: int) -> Iterable[T]:
    """The same, with a bar where stderr is a terminal and there is more than one."""
    from tqdm.auto import tqdm

    hidden = total < 2 or not sys.stderr.isatty()
    bar: Iterable[T] = tqdm(findings, total=total, disable=hidden, dynamic_ncols=True)
    return bar


__all__ = ["audit"]
