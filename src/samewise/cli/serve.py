"""`samewise serve`: an HTTP server. Nothing heavy is imported before the options are checked."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

import samewise
from samewise.cli.loading import runs_on_cuda, without_garbage_collection
from samewise.cli.options import Settings, engine_options
from samewise.config import SETTINGS, EngineConfig
from samewise.errors import BadParameter, MachineError
from samewise.machine import num_cores
from samewise.params import LOGPROBS_MODES
from samewise.receipts.signing import SigningKey
from samewise.scale.settings import ScaleSettings
from samewise.serve.limits import ServeLimits
from samewise.serve.listen import Listen
from samewise.serve.logs import set_up
from samewise.serve.settings import (
    KEY_VARIABLE,
    LOCAL_HOSTS,
    LOG_LEVELS,
    MAX_QUEUED,
    Keys,
    ServeSettings,
    gather_keys,
)

if TYPE_CHECKING:
    from samewise.llm.aio import AsyncLLM

DEFAULT_LISTEN = Listen()
DEFAULT_SETTINGS = ServeSettings()
DEFAULT_LIMITS = DEFAULT_SETTINGS.limits
DEFAULT_SCALE = ScaleSettings()
_server = partial(typer.Option, rich_help_panel="Server")
_access = partial(typer.Option, rich_help_panel="Access")
_limit = partial(typer.Option, rich_help_panel="Limits")
_replicas = partial(typer.Option, rich_help_panel="Replicas")


@engine_options("serve", max_queued=MAX_QUEUED)
def serve(
    model: Annotated[str, typer.Argument(help=SETTINGS["model"].meaning)] = SETTINGS["model"].default,
    host: Annotated[str, _server(help="Address to listen on.")] = DEFAULT_LISTEN.host,
    port: Annotated[int, _server(help="Port; 0: any.")] = DEFAULT_LISTEN.port,
    unix_socket: Annotated[Optional[Path], _server(help="Listen on this socket instead.")] = None,
    served_model_name: Annotated[
        Optional[list[str]],
        _server(help="What the model is called; repeatable, and after MODEL also as A B."),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        _server(help="Seconds that requests may take to end after SIGTERM."),
    ] = DEFAULT_SETTINGS.shutdown_timeout,
    receipts: Annotated[Optional[Path], _server(help="Write a receipt of every answer here.")] = None,
    receipt_key: Annotated[Optional[Path], _server(help="Sign receipts with this private key.")] = None,
    hide_prompts: Annotated[
        bool,
        _server("--hide-prompts", help="Receipts keep only a digest of the prompt."),
    ] = False,
    no_special_tokens_in_content: Annotated[
        bool,
        _server("--no-special-tokens-in-content", help="Read control tokens in messages as text."),
    ] = False,
    enable_training: Annotated[
        bool,
        _server("--enable-training", help="Routes for trainers: pauses, new weights. Only with a key."),
    ] = False,
    logprobs_mode: Annotated[
        str, _server(help=f"Of requests that do not say: {', '.join(LOGPROBS_MODES)}.")
    ] = DEFAULT_SETTINGS.logprobs_mode,
    unseeded: Annotated[
        Optional[str],
        _server(
            help="Seeds of sampled requests that give none: fresh, drawn for each (by default with "
            "--enable-training), or prompt, derived from it (by default)."
        ),
    ] = DEFAULT_SETTINGS.unseeded,
    log_level: Annotated[str, _server(help=", ".join(LOG_LEVELS) + ".")] = "info",
    json_logs: Annotated[bool, _server("--json-logs", help="One JSON object a line.")] = False,
    api_key: Annotated[
        Optional[list[str]],
        _access(help=f"Repeatable. Better: {KEY_VARIABLE} (comma-separated) or --api-key-file."),
    ] = None,
    api_key_file: Annotated[Optional[Path], _access(help="Keys, one a line.")] = None,
    allowed_origins: Annotated[
        Optional[list[str]],
        _access(help="Origins of web pages that may call the server; repeatable."),
    ] = None,
    allowed_hosts: Annotated[
        Optional[list[str]],
        _access(help="Host names of this server, if not this machine's own; repeatable. Only without a key."),
    ] = None,
    ssl_certfile: Annotated[Optional[Path], _access(help="Certificate chain, PEM.")] = None,
    ssl_keyfile: Annotated[Optional[Path], _access(help="Its key, PEM.")] = None,
    max_body_bytes: Annotated[int, _limit(help="Larger bodies get 413.")] = DEFAULT_SETTINGS.max_body,
    max_bodies_bytes: Annotated[int, _limit(help="Of all bodies together.")] = DEFAULT_LIMITS.max_bodies,
    max_unread_bytes: Annotated[
        int,
        _limit(help="Memory of answers not read; the largest of the key that holds most is dropped first."),
    ] = DEFAULT_LIMITS.max_unread,
    max_stored_bytes: Annotated[
        int,
        _limit(help="Memory of stored responses; the oldest of the key that holds most is forgotten first."),
    ] = DEFAULT_LIMITS.max_stored,
    max_prompt_tokens: Annotated[
        int,
        _limit(help="Of the prompts and predictions of all requests, waiting or running, together."),
    ] = DEFAULT_LIMITS.max_prompts,
    max_connections: Annotated[
        Optional[int],
        _limit(help="Open connections; by default as many as the limit on files allows."),
    ] = DEFAULT_LIMITS.max_connections,
    head_timeout: Annotated[
        float,
        _limit(help="Seconds for TLS and a request's head."),
    ] = DEFAULT_LIMITS.head_timeout,
    body_timeout: Annotated[
        float, _limit(help="Seconds for a request's body.")
    ] = DEFAULT_LIMITS.body_timeout,
    write_timeout: Annotated[
        float,
        _limit(help="Seconds in which a client must read some of its answer."),
    ] = DEFAULT_LIMITS.write_timeout,
    replicas: Annotated[
        Optional[int],
        _replicas(help="Engines, each in a process of its own, in a Ray cluster; needs samewise[ray]."),
    ] = None,
    max_replicas: Annotated[Optional[int], _replicas(help="As many under load.")] = None,
    ray_address: Annotated[
        Optional[str],
        _replicas(help="The cluster: HOST:PORT or auto; by default one on this machine, for this server."),
    ] = None,
    replica_cpus: Annotated[
        Optional[float],
        _replicas(help="Cores of a replica; by default this machine's, divided, or 1 in another cluster."),
    ] = None,
    replica_gpus: Annotated[
        Optional[int],
        _replicas(help="Devices of a replica, 0 or 1; by default 1 where the engine runs on CUDA."),
    ] = None,
    drain_seconds: Annotated[
        float,
        _replicas(help="For answers to end on a replica that is stopped; the rest goes on in another one."),
    ] = DEFAULT_SCALE.drain_seconds,
    *,
    settings: Settings,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    [dim]samewise serve[/]
    [dim]samewise serve ./my-model --port 9000 --api-key-file keys.txt[/]
    [dim]samewise serve ./my-model --replicas 2[/]
    """
    if log_level not in LOG_LEVELS:
        raise BadParameter(
            f"log_level={log_level!r}: choose one of {', '.join(LOG_LEVELS)}", param="log_level"
        )
    config = EngineConfig.of(model=model, **settings)
    limits = ServeLimits(
        max_connections=max_connections, head_timeout=head_timeout, body_timeout=body_timeout,
        write_timeout=write_timeout, max_bodies=max_bodies_bytes, max_unread=max_unread_bytes,
        max_stored=max_stored_bytes, max_prompts=max_prompt_tokens,
    )  # fmt: skip
    listen = Listen(host=host, port=port, unix_socket=unix_socket, certificate=ssl_certfile, key=ssl_keyfile)
    keys = gather_keys(api_key or (), api_key_file)
    served = ServeSettings(
        model_names=tuple(served_model_name or ()), keys=keys, limits=limits,
        allowed_origins=tuple(allowed_origins or ()), max_body=max_body_bytes,
        allowed_hosts=_hosts(listen, keys, allowed_hosts or ()),
        shutdown_timeout=shutdown_timeout, receipts=receipts, hide_prompts=hide_prompts,
        special_tokens_in_content=not no_special_tokens_in_content,
        training=enable_training, logprobs_mode=logprobs_mode, unseeded=unseeded,
        signer=None if receipt_key is None else SigningKey.load(receipt_key),
    )  # fmt: skip
    scale = _scale(
        config, replicas, max_replicas=max_replicas, ray_address=ray_address, num_cpus=replica_cpus,
        num_gpus=replica_gpus, drain_seconds=drain_seconds, training=enable_training,
    )  # fmt: skip
    set_up(log_level, as_json=json_logs)
    try:
        from samewise.serve.process import run
    except ModuleNotFoundError as error:
        raise MachineError(f"samewise serve needs {error.name}: pip install 'samewise[serve]'") from error
    version = samewise.__version__
    if scale is None:
        code = run(lambda: _load(config), served, listen, version=version)
    else:
        from samewise.scale.cluster import deployed

        with deployed(config, scale, ray_address, what="samewise serve --replicas") as application:
            code = run(application.load, served, listen, version=version)
    gc.unfreeze()  # undo what _load froze, for libraries that look for leaks at exit
    if code:
        raise typer.Exit(code)


def _hosts(listen: Listen, keys: Keys, given: Sequence[str]) -> tuple[str, ...] | None:
    """The names that a Host header may hold; None: any.

    Without a key, on an address of this machine alone: its own names. Any other name would be that of a web
    page which has made its name lead here. Elsewhere the server's names are not known.
    """
    if keys or listen.unix_socket is not None or not (listen.is_local or given):
        return None
    return (*LOCAL_HOSTS, listen.host, *given)


def _scale(
    config: EngineConfig,
    replicas: int | None,
    *,
    max_replicas: int | None,
    ray_address: str | None,
    num_cpus: float | None,
    num_gpus: int | None,
    drain_seconds: float,
    training: bool,
) -> ScaleSettings | None:
    """The replicas that were asked for; None: the engine runs in this process."""
    if replicas is None:
        given = {
            "max_replicas": max_replicas, "ray_address": ray_address, "replica_cpus": num_cpus,
            "replica_gpus": num_gpus,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise BadParameter(f"{name}={value!r} is for replicas; give --replicas too", param=name)
        return None
    if training:
        raise BadParameter(
            "--enable-training needs an engine in this process; leave out --replicas", param="enable_training"
        )
    if num_cpus is None:
        num_cpus = 1 if ray_address else max(1, num_cores() // max(1, max_replicas or replicas))
    return ScaleSettings(
        replicas=replicas, max_replicas=max_replicas, num_cpus=num_cpus, drain_seconds=drain_seconds,
        num_gpus=runs_on_cuda(config.device) if num_gpus is None else num_gpus,
    )  # fmt: skip


def _load(config: EngineConfig) -> AsyncLLM:
    """The engine; its objects stay until the end, so the garbage collector need not look at them."""
    with without_garbage_collection():
        from samewise.engine import build
        from samewise.llm.aio import AsyncLLM

        llm = AsyncLLM.over(build(config))
        llm.intake.prepare_grammars()
        gc.freeze()
    return llm


__all__ = ["serve"]
