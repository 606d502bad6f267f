"""`samewise serve`: its options. Nothing heavy is imported before they are understood."""

from __future__ import annotations

import gc
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from samewise.config import EngineConfig
from samewise.errors import BadParameter, MachineError
from samewise.receipts.signing import SigningKey
from samewise.serve.logs import set_up
from samewise.serve.settings import KEY_VARIABLE, LOG_LEVELS, MAX_QUEUED, ServeSettings, gather_keys

if TYPE_CHECKING:
    from samewise.llm.aio import AsyncLLM

_SERVER, _ENGINE, _SECURITY = "The server", "The engine", "Who may ask"


def serve(
    model: Annotated[str, typer.Argument(help="smollm2, a folder, a hub id or a GGUF file.")] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any.", rich_help_panel=_SERVER)] = 8000,
    unix_socket: Annotated[
        Optional[Path], typer.Option(help="Listen on this socket instead.", rich_help_panel=_SERVER)
    ] = None,
    served_model_name: Annotated[
        Optional[list[str]],
        typer.Option(help="What the model is called; repeatable.", rich_help_panel=_SERVER),
    ] = None,
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Requests that may wait; more get 429.", rich_help_panel=_SERVER)
    ] = MAX_QUEUED,
    max_body_bytes: Annotated[int, typer.Option(help="Larger bodies get 413.", rich_help_panel=_SERVER)] = 8
    * 2**20,
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds that requests may take to end after SIGTERM.", rich_help_panel=_SERVER),
    ] = 30.0,
    receipts: Annotated[
        Optional[Path], typer.Option(help="Write a receipt of every answer here.", rich_help_panel=_SERVER)
    ] = None,
    receipt_key: Annotated[
        Optional[Path], typer.Option(help="Sign receipts with this private key.", rich_help_panel=_SERVER)
    ] = None,
    hide_prompts: Annotated[
        bool,
        typer.Option(
            "--hide-prompts", help="Receipts keep only a digest of the prompt.", rich_help_panel=_SERVER
        ),
    ] = False,
    log_level: Annotated[
        str, typer.Option(help=", ".join(LOG_LEVELS) + ".", rich_help_panel=_SERVER)
    ] = "info",
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="One JSON object a line.", rich_help_panel=_SERVER)
    ] = False,
    api_key: Annotated[
        Optional[list[str]],
        typer.Option(
            help=f"Repeatable. Better: {KEY_VARIABLE} (comma-separated) or --api-key-file.",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    api_key_file: Annotated[
        Optional[Path], typer.Option(help="Keys, one a line.", rich_help_panel=_SECURITY)
    ] = None,
    allowed_origins: Annotated[
        Optional[list[str]],
        typer.Option(help="Browsers' origins that may ask; repeatable.", rich_help_panel=_SECURITY),
    ] = None,
    ssl_certfile: Annotated[
        Optional[Path], typer.Option(help="Certificate chain, PEM.", rich_help_panel=_SECURITY)
    ] = None,
    ssl_keyfile: Annotated[
        Optional[Path], typer.Option(help="Its key, PEM.", rich_help_panel=_SECURITY)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="auto, native, torch or triton.", rich_help_panel=_ENGINE)
    ] = "auto",
    linear: Annotated[str, typer.Option(help="auto, native or torch.", rich_help_panel=_ENGINE)] = "auto",
    revision: Annotated[
        Optional[str], typer.Option(help="Branch, tag or commit of a hub id.", rich_help_panel=_ENGINE)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run code that comes with a model.", rich_help_panel=_ENGINE
        ),
    ] = False,
    compile_layers: Annotated[
        Optional[bool],
        typer.Option("--compile/--no-compile", help="Compile layers.", rich_help_panel=_ENGINE),
    ] = None,
    frame_rows: Annotated[
        Optional[int], typer.Option(help="Rows of a frame.", rich_help_panel=_ENGINE)
    ] = None,
    max_model_len: Annotated[
        Optional[int], typer.Option(help="Longest context.", rich_help_panel=_ENGINE)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers at once.", rich_help_panel=_ENGINE)] = 128,
    kv_memory: Annotated[
        Optional[str], typer.Option(help="e.g. 2GiB or 50%.", rich_help_panel=_ENGINE)
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Keep prompts.", rich_help_panel=_ENGINE),
    ] = True,
    proposer: Annotated[
        str,
        typer.Option(help="auto, none, ngram, decode, model, or e.g. ngram+model.", rich_help_panel=_ENGINE),
    ] = "auto",
    draft_model: Annotated[
        Optional[str], typer.Option(help="What `model` guesses with.", rich_help_panel=_ENGINE)
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(help="Most guesses before a replay.", rich_help_panel=_ENGINE)
    ] = 16,
    draft_weights: Annotated[
        str, typer.Option(help="auto, same, int8, int4 or fp8.", rich_help_panel=_ENGINE)
    ] = "auto",
    seed: Annotated[
        int, typer.Option(help="Seeds are derived from it where none is given.", rich_help_panel=_ENGINE)
    ] = 0,
    date: Annotated[
        Optional[str], typer.Option(help="What chat templates are told, YYYY-MM-DD.", rich_help_panel=_ENGINE)
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI would.

    [dim]samewise serve[/]
    [dim]samewise serve ./my-model --port 9000 --api-key-file keys.txt[/]
    """
    if log_level not in LOG_LEVELS:
        raise BadParameter(f"log_level={log_level!r}: choose one of {', '.join(LOG_LEVELS)}")
    settings = ServeSettings(
        model_names=tuple(served_model_name or ()), keys=gather_keys(api_key or (), api_key_file),
        allowed_origins=tuple(allowed_origins or ()), max_body=max_body_bytes,
        shutdown_timeout=shutdown_timeout, receipts=receipts, hide_prompts=hide_prompts,
        signer=None if receipt_key is None else SigningKey.load(receipt_key),
    )  # fmt: skip
    engine: dict[str, Any] = {
        "device": device, "dtype": dtype, "attention": attention, "linear": linear, "revision": revision,
        "trust_remote_code": trust_remote_code, "compile": compile_layers, "frame_rows": frame_rows,
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_queued": max_num_queued_reqs,
        "kv_memory": kv_memory, "enable_prefix_caching": prefix_caching, "proposer": proposer,
        "draft_model": draft_model, "draft_tokens": draft_tokens, "draft_weights": draft_weights,
        "seed": seed, "date": date,
    }  # fmt: skip
    engine = {name: value for name, value in engine.items() if value is not None}
    EngineConfig.of(model=model, **engine)  # mistakes show now, not when the model is loaded
    set_up(log_level, as_json=json_logs)
    try:
        from samewise.serve.process import Listen, run
    except ModuleNotFoundError as error:
        raise MachineError(f"samewise serve needs {error.name}: pip install 'samewise[serve]'") from error
    listen = Listen(host=host, port=port, unix_socket=unix_socket, certificate=ssl_certfile, key=ssl_keyfile)
    code = run(lambda: _load(model, engine), settings, listen, version=_version())
    gc.unfreeze()  # so that libraries find their own again when they look for leaks
    if code:
        raise typer.Exit(code)


def _version() -> str:
    try:
        return version("samewise")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0.0.0+source"


def _load(model: str, engine: dict[str, Any]) -> AsyncLLM:
    """The engine, loaded with the garbage collector out of the way; what was made is all to stay."""
    gc.disable()
    try:
        from samewise.llm.aio import AsyncLLM

        return AsyncLLM(model, **engine)
    finally:
        gc.freeze()
        gc.enable()


__all__ = ["serve"]
