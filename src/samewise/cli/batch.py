"""`samewise batch`: answer a file of requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from samewise.cli.loading import load_engine, runs_on_cuda
from samewise.cli.options import Settings, engine_options
from samewise.config import EngineConfig
from samewise.errors import BadParameter, MachineError

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.jobs.batch import BatchSummary


@engine_options("batch")
def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one a line: custom_id, method, url, body.")],
    target: Annotated[Path, typer.Argument(help="File of the answers; answers already in it are kept.")],
    served_model_name: Annotated[
        Optional[list[str]], typer.Option(help="A name requests may call the model by; repeatable.")
    ] = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Drop lines that failed before, and try them again.")
    ] = False,
    key: Annotated[Optional[Path], typer.Option(help="Private key to sign receipts with.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on under another contract.")] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Answer with workers in a Ray cluster; needs samewise[ray].", rich_help_panel="Ray"
        ),
    ] = False,
    workers: Annotated[
        Optional[int], typer.Option(help="Engines, each in a process of its own.", rich_help_panel="Ray")
    ] = None,
    ray_address: Annotated[
        Optional[str],
        typer.Option(
            help="The cluster: HOST:PORT or auto; by default one on this machine.", rich_help_panel="Ray"
        ),
    ] = None,
    worker_cpus: Annotated[
        Optional[float],
        typer.Option(help="Cores of a worker, on CPU also its threads; by default 1.", rich_help_panel="Ray"),
    ] = None,
    worker_gpus: Annotated[
        Optional[int],
        typer.Option(
            help="Devices of a worker, 0 or 1; by default 1 where the engine runs on CUDA.",
            rich_help_panel="Ray",
        ),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Killed at any moment, it goes on where it was.

    [dim]samewise batch requests.jsonl answers.jsonl[/]
    [dim]samewise batch requests.jsonl answers.jsonl --ray --workers 8 --ray-address auto[/]
    """
    of_ray = {
        "workers": workers, "ray_address": ray_address, "worker_cpus": worker_cpus,
        "worker_gpus": worker_gpus,
    }  # fmt: skip
    for name, value in of_ray.items():
        if value is not None and not ray:
            raise BadParameter(f"{name}={value!r} is for Ray; give --ray too", param=name)
    try:
        from samewise.jobs.batch import run
    except ModuleNotFoundError as error:
        raise MachineError(f"samewise batch needs {error.name}: pip install 'samewise[serve]'") from error
    from tqdm.auto import tqdm

    from samewise.receipts.signing import SigningKey

    signer = None if key is None else SigningKey.load(key)
    with tqdm(desc="Answers", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def show(summary: BatchSummary) -> None:
            bar.total, bar.n = summary.total, summary.done
            bar.refresh()

        def show_error(number: int, message: str) -> None:
            bar.write(f"{source}, line {number}: {message}", sys.stderr)

        try:
            names = tuple(served_model_name or ())
            shown: Any = {"on_progress": show, "on_error": show_error}
            if ray:
                from samewise.scale.batch import run_on_ray

                if worker_gpus is None:
                    worker_gpus = int(runs_on_cuda(EngineConfig.of(**settings).device))
                summary = run_on_ray(
                    source, target, settings, workers=1 if workers is None else workers, address=ray_address,
                    num_cpus=worker_cpus, num_gpus=worker_gpus, names=names, key=key, retry=retry_errors,
                    force=force, **shown,
                )  # fmt: skip
            else:
                summary = run(
                    source, target, lambda: _load(settings), names=names, key=signer, retry=retry_errors,
                    force=force, **shown,
                )  # fmt: skip
        except KeyboardInterrupt:
            bar.write(f"stopped; run the same command to go on: finished answers are in {target}", sys.stderr)
            raise typer.Exit(130) from None
    typer.echo(
        f"{summary.total} lines: {summary.answered} answered, {summary.failed} bad, "
        f"{summary.done_before} done before",
        err=True,
    )
    if summary.failed:
        raise typer.Exit(1)


def _load(settings: Settings) -> Engine:
    engine = load_engine(**settings)
    typer.echo(f"contract {engine.contract}", err=True)
    return engine


__all__ = ["batch"]
