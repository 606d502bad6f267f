"""`samewise probe`: prove the frame property on this machine and print the contract."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from samewise.cli.loading import load_engine
from samewise.cli.options import AsJson, Settings, engine_options

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.verify.frame_sizes import FrameSizeUse


Portable = Annotated[
    bool,
    typer.Option(
        "--portable",
        help="Compare this machine's bits with those that every machine must give; no model is loaded.",
    ),
]


@engine_options("probe")
def probe(as_json: AsJson = False, portable: Portable = False, *, settings: Settings) -> None:
    """Prove the frame property on this machine and print the contract, fact by fact."""
    if portable:
        print_portable(as_json=as_json)
        return
    engine = load_engine(**settings)
    report, contract = engine.report, engine.contract
    if as_json:
        facts = {
            "contract": contract.id,
            "facts": dict(contract.facts),
            "sizes": {str(size): str(use) for size, use in engine.parts.sizes.items()},
            "layers": engine.runner.unfused_reason or "fused",
            "operators": [asdict(operator) for operator in engine.parts.operators],
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(title=f"contract {contract.id}", show_header=False, title_style="bold")
    for name, value in contract.facts:
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(layers_line(engine))
    if engine.runner.elastic:
        console.print(sizes_table(engine))
    console.print(
        f"[green]holds[/]: {report.frames} frames and {report.operators} shapes of linear gave the bits of "
        f"{engine.parts.frame_rows} rows at every offset of a frame and beside any other rows "
        f"({report.seconds:.1f} s)"
    )


def print_portable(*, as_json: bool) -> None:
    """The stored digests beside this machine's; exits with 1 if one differs."""
    from samewise.jobs.portable import check_portable, machine_summary

    findings = check_portable()
    same = all(finding.same for finding in findings)
    if as_json:
        rows = [finding._asdict() | {"same": finding.same} for finding in findings]
        typer.echo(json.dumps({"same": same, "machine": machine_summary(), "findings": rows}, indent=2))
    else:
        table = Table(title=f"portable bits on {machine_summary()}", title_style="bold")
        for name in ("digest of", "every machine", "this machine", ""):
            table.add_column(name)
        for finding in findings:
            verdict = "[green]same[/]" if finding.same else "[red]differs[/]"
            table.add_row(finding.name, finding.expected, finding.digest, verdict)
        console = Console()
        console.print(table)
        console.print(
            "[green]same[/]" if same else "[red]differs[/]: receipts of other machines will not match"
        )
    if not same:
        raise typer.Exit(1)


def layers_line(engine: Engine) -> str:
    """Whether layers are fused, and why not."""
    reason = engine.runner.unfused_reason
    if reason is None:
        return "layers: each is run by kernels of its own"
    return f"layers: they run as their modules: {reason}"


def sizes_table(engine: Engine) -> Table:
    """The number of rows at which each operator runs, in a frame of each size."""
    if engine.runner.native:
        table = Table(title="sizes of a frame", show_header=False, title_style="bold")
        table.add_row("from", str(engine.runner.sizes[0]))
        table.add_row("to", str(engine.runner.widest))
        table.add_row("linears", "natural at every size")
        return table
    table = Table(title="what runs at how many rows, in a frame of", title_style="bold")
    for name in ("operator", "shape", *(str(size) for size in engine.parts.sizes)):
        table.add_column(name, justify="left" if name in ("operator", "shape") else "right")
    for operator in engine.parts.operators:
        pieces = [
            "cuBLAS" if size in operator.library_rows else _pieces(size, piece)
            for size, piece in operator.pieces.items()
        ]
        table.add_row(operator.name.split(".")[-1], f"{operator.outputs}×{operator.inputs}", *pieces)
    table.add_row("norms and all else", "", *map(_use, engine.parts.sizes.values()))
    if engine.parts.linears == "triton":
        table.caption = "=: the kernel that states its order of sums; cuBLAS: a trial showed the same bits"
    return table


def _use(use: FrameSizeUse) -> str:
    """How frames of one size are run, in a cell of the table."""
    if use.unchanged:
        return "="
    return str(use) if use.used else "not used"


def _pieces(size: int, piece: int) -> str:
    """A frame of `size` rows in pieces of `piece`: `=` for one piece, `2×8`, or the padded number of rows."""
    if piece == size:
        return "="
    return f"{piece}" if piece > size else f"{size // piece}×{piece}"


__all__ = ["layers_line", "print_portable", "probe", "sizes_table"]
