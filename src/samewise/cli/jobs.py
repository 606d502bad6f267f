"""batch, audit, keygen: commands over files. They parse options and call; heavy things come when needed."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import typer

from samewise.errors import MachineError

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.jobs.batch import Tally

T = TypeVar("T")

KvMemory = Annotated[Optional[str], typer.Option("--kv-memory", help="e.g. 2GiB or 50%.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]


def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one a line: custom_id, method, url, body.")],
    target: Annotated[Path, typer.Argument(help="Where the answers go; what is there already is kept.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2, a folder, a hub id or a GGUF file.")
    ] = "smollm2",
    served_model_name: Annotated[
        Optional[list[str]], typer.Option(help="A name requests may call the model by; repeatable.")
    ] = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Drop lines that went wrong before, and try them again.")
    ] = False,
    key: Annotated[Optional[Path], typer.Option(help="Private key to sign receipts with.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on under another contract.")] = False,
    max_num_seqs: Annotated[Optional[int], typer.Option(help="Requests at once.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    frame_rows: Annotated[Optional[int], typer.Option(help="Rows of a frame.")] = None,
    compile_layers: Annotated[
        Optional[bool], typer.Option("--compile/--no-compile", help="Compile layers.")
    ] = None,
    max_model_len: Annotated[Optional[int], typer.Option(help="Longest context.")] = None,
    kv_memory: KvMemory = None,
    trust_remote_code: Trust = False,
    proposer: Annotated[Optional[str], typer.Option(help="Who guesses; see `samewise generate`.")] = None,
    draft_model: Annotated[Optional[str], typer.Option(help="What `model` guesses with.")] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Killed at any moment, it goes on where it was.

    [dim]samewise batch requests.jsonl answers.jsonl[/]
    """
    try:
        from samewise.jobs.batch import run
    except ModuleNotFoundError as error:
        raise MachineError(f"samewise batch needs {error.name}: pip install 'samewise[serve]'") from error
    from tqdm.auto import tqdm

    from samewise.receipts.signing import SigningKey

    settings = {
        "device": device, "dtype": dtype, "revision": revision, "frame_rows": frame_rows,
        "compile": compile_layers, "max_model_len": max_model_len, "kv_memory": kv_memory,
        "trust_remote_code": trust_remote_code, "proposer": proposer, "draft_model": draft_model,
        "max_num_seqs": max_num_seqs,
    }  # fmt: skip
    signer = None if key is None else SigningKey.load(key)
    with tqdm(desc="Answers", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def show(tally: Tally) -> None:
            bar.total, bar.n = tally.total, tally.done
            bar.refresh()

        def complain(number: int, what: str) -> None:
            bar.write(f"{source}, line {number}: {what}", sys.stderr)

        try:
            tally = run(
                source, target, lambda: _engine(model, settings), names=tuple(served_model_name or ()),
                key=signer, retry=retry_errors, force=force, progress=show, complain=complain,
            )  # fmt: skip
        except KeyboardInterrupt:
            bar.write(f"stopped; run the same command to go on: what is finished is in {target}", sys.stderr)
            raise typer.Exit(130) from None
    typer.echo(
        f"{tally.total} lines: {tally.answered} answered, {tally.bad} bad, {tally.before} done before",
        err=True,
    )
    if tally.bad:
        raise typer.Exit(1)


def _engine(model: str, settings: dict[str, Any]) -> Engine:
    """An engine, loaded with the garbage collector out of the way: what is made is all to stay."""
    gc.disable()
    try:
        from samewise.config import EngineConfig
        from samewise.engine import build

        given = {name: value for name, value in settings.items() if value is not None}
        engine = build(EngineConfig.of(model=model, **given))
    finally:
        gc.enable()
    typer.echo(f"contract {engine.contract}", err=True)
    return engine


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
    device: Annotated[Optional[str], typer.Option(help="cpu or cuda, if not where it was.")] = None,
    kv_memory: KvMemory = None,
    trust_remote_code: Trust = False,
) -> None:
    """Replay answers from their receipts and say whether they are the same, bit for bit.

    The model is the one the receipt names. Leaves with 0 if all are the same, else with 1.

    [dim]samewise audit receipt.json[/]
    [dim]samewise audit receipts/ --key server.pub[/]
    """
    from samewise.jobs.audit import audit_files, read_prompts
    from samewise.receipts.signing import read_public
    from samewise.receipts.store import read

    signed_by = None if key is None else read_public(key)
    given = [] if prompts is None else read_prompts(prompts)
    entries = list(read(paths))
    changes = {"device": device, "kv_memory": kv_memory, "trust_remote_code": trust_remote_code or None}
    found = audit_files(
        entries, model=model, prompts=given, signed_by=signed_by, force=force,
        **{name: value for name, value in changes.items() if value is not None},
    )  # fmt: skip
    counts: dict[str, int] = {}
    for finding in _progress(found, len(entries)):
        counts[finding.status.value] = counts.get(finding.status.value, 0) + 1
        if as_json:
            typer.echo(json.dumps(finding.as_json(), ensure_ascii=False))
        elif not finding.good or len(entries) == 1 or finding.details:
            tokens = f" ({finding.num_tokens} tokens, contract {finding.contract})" if finding.good else ""
            typer.echo("\n  ".join([f"{finding.where}: {finding.status.value}{tokens}", *finding.details]))
    if not as_json and len(entries) > 1:
        typer.echo(", ".join(f"{num} {status}" for status, num in sorted(counts.items())))
    if set(counts) != {"same"}:
        raise typer.Exit(1)


def keygen(
    path: Annotated[Path, typer.Argument(help="Where the private key goes; PATH.pub gets the public one.")],
) -> None:
    """Make an ed25519 key pair to sign receipts with."""
    from samewise.receipts.signing import new_key

    typer.echo(f"{path}: private key, keep it to yourself\n{path}.pub: public key {new_key(path)}")


def _progress(found: Iterable[T], total: int) -> Iterable[T]:
    """A bar on stderr, where there is more than one thing to wait for and somebody to see it."""
    from tqdm.auto import tqdm

    hidden = total < 2 or not sys.stderr.isatty()
    bar: Iterable[T] = tqdm(found, total=total, disable=hidden, dynamic_ncols=True)
    return bar


__all__ = ["audit", "batch", "keygen"]
