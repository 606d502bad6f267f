"""The application for Ray Serve: replicas with an engine each, and HTTP over them."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from samewise.config import EngineConfig
from samewise.scale.ray_extra import import_ray
from samewise.scale.settings import ScaleSettings

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.llm.aio import AsyncLLM
    from samewise.serve.settings import ServeSettings
    from samewise.serve.worker import Worker

log = logging.getLogger("samewise.scale")

ENGINES = "Engines"
ROUTER = "Router"
"""Names of the deployments in the application."""

ROUTER_ONGOING = 4096
"""HTTP requests that Ray Serve hands to a router process at once. Set by hand: above what `max_queued`
admits, so that the router itself refuses, with 429 and a reason."""

FACTS_SECONDS = 600.0
"""For a replica of an application that is up to say what it is. Set by hand: it may be being restarted."""

WATCH_SECONDS = 1.0
"""Between two looks at a router's engine thread. Set by hand: below the time that a new router takes."""


@dataclass(frozen=True, slots=True)
class BuildEngine:
    """Makes a replica's engine, in the replica."""

    config: EngineConfig

    def __call__(self) -> Engine:
        """Load the model, certify, warm up."""
        from samewise.engine import build

        return build(self.config)


def engines(
    config: EngineConfig, scale: ScaleSettings, make_engine: Callable[[], Engine] | None = None
) -> Any:
    """The application without HTTP. `make_engine` is called in place of building.

    Waiting requests are bounded by the router, so the replicas themselves queue any number.
    """
    serve = import_ray("samewise.scale").serve
    from samewise.scale.replica import Replica

    make = make_engine or BuildEngine(replace(config, max_queued=None))
    places = scale.num_places(config.max_num_seqs)
    actors: dict[str, Any] = {"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus}
    if scale.resources:
        actors["resources"] = dict(scale.resources)
    if not scale.num_gpus:  # Ray sets this only where a core is claimed whole
        actors["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(max(1, int(scale.num_cpus)))}}
    count: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas is not None:
        count = {
            "autoscaling_config": {
                "min_replicas": scale.replicas,
                "max_replicas": scale.max_replicas,
                # Below `places`: routers give a replica no more, and Ray Serve sees only what it has.
                "target_ongoing_requests": min(max(1, config.max_num_seqs // 2), places / 2),
            }
        }
    replicas = serve.deployment(Replica).options(
        name=ENGINES, ray_actor_options=actors, max_ongoing_requests=places,
        graceful_shutdown_timeout_s=scale.drain_seconds, health_check_period_s=2.0,
        request_router_config=_router_config(), **count,
    )  # fmt: skip
    return replicas.bind(make)


def _router_config() -> Any:
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(request_router_class="samewise.scale.routing.PrefixRouter")


def app(
    model: str = "smollm2",
    *,
    scale: ScaleSettings | None = None,
    serve: ServeSettings | None = None,
    make_engine: Callable[[], Engine] | None = None,
    **settings: Any,
) -> Any:
    """An application for `ray.serve.run`: the OpenAI interface over replicas of one engine each.

    Keywords are those of EngineConfig. `make_engine` is called in each replica in place of building from
    them. The HTTP settings of `serve` that concern connections are Ray Serve's own there.
    """
    ray_serve = import_ray("samewise.scale.app").serve
    from samewise.serve.settings import ServeSettings

    config, scale = EngineConfig.of(model=model, **settings), scale or ScaleSettings()
    serve = serve or ServeSettings()
    build = _asgi_builder(partial(remote_llm, config=config, scale=scale, timeout=None), serve)
    router = ray_serve.deployment(ray_serve.ingress(build)()).options(
        name=ROUTER, num_replicas=scale.routers, max_ongoing_requests=ROUTER_ONGOING,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=serve.shutdown_timeout,
        **_new_before_old(ray_serve),
    )  # fmt: skip
    return router.bind(engines(config, scale, make_engine))


def _new_before_old(serve: Any) -> dict[str, Any]:
    """The option by which a replaced router is stopped after the new one is up, where Ray Serve has it."""
    known = inspect.signature(serve.Deployment.options).parameters
    return {"max_surge_percent": 100} if "max_surge_percent" in known else {}


def _asgi_builder(load: Callable[[str], AsyncLLM], settings: ServeSettings) -> Callable[[], Any]:
    """A function for `ray.serve.ingress`, called in the router's process.

    `load` is called with the application's name.
    """

    def build() -> Any:
        from ray import serve

        import samewise
        from samewise.scale.replica import end_process
        from samewise.serve.app import make_app
        from samewise.serve.worker import Worker

        name = serve.get_replica_context().app_name
        worker = Worker(partial(load, name))
        http = make_app(worker, settings, version=samewise.__version__)

        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await _lifespan(worker, receive, send, partial(end_process, "router"))
            else:
                await http(scope, receive, send)

        return _Asgi(asgi)

    return build


class _Asgi:
    """An ASGI application. Ray Serve would call a plain function for one."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._call(scope, receive, send)


async def _lifespan(worker: Worker, receive: Any, send: Any, end: Callable[[], None]) -> None:
    """Load before the process counts as up, and stop the engine's thread when it is stopped.

    `end` is called where that thread has stopped by itself.
    """
    await receive()  # lifespan.startup
    try:
        await worker.load()
    except Exception as error:
        log.exception("the router cannot start")
        await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
        return
    watching = asyncio.ensure_future(_end_with_engine(worker, end))
    await send({"type": "lifespan.startup.complete"})
    await receive()  # lifespan.shutdown
    watching.cancel()
    await worker.close()
    await send({"type": "lifespan.shutdown.complete"})


async def _end_with_engine(worker: Worker, end: Callable[[], None]) -> None:
    """Call `end` when the engine's thread has stopped and its requests have got their errors."""
    while worker.failure is None:
        await asyncio.sleep(WATCH_SECONDS)
    await worker.abort_all()
    end()


def remote_llm(
    app_name: str,
    config: EngineConfig,
    scale: ScaleSettings,
    *,
    kept: bool = False,
    timeout: float | None = FACTS_SECONDS,
) -> AsyncLLM:
    """An AsyncLLM over the replicas of an application. Waits so many seconds for the first of them.

    `kept`: they are stopped when this process falls silent.
    """
    serve = import_ray("samewise.scale").serve
    from samewise.llm.aio import AsyncLLM
    from samewise.scale.ray_replicas import RayReplicas
    from samewise.scale.remote_engine import RemoteEngine
    from samewise.scale.roster import RosterLink

    handle = serve.get_deployment_handle(ENGINES, app_name)
    replicas = RayReplicas(handle, RosterLink(app_name), kept=app_name if kept else None)
    facts = replicas.facts(timeout)
    engine = RemoteEngine(
        facts, replicas, num_replicas=scale.most, num_places=scale.num_places(facts.config.max_num_seqs),
        max_queued=config.max_queued,
    )  # fmt: skip
    return AsyncLLM.over(engine)


__all__ = ["ENGINES", "ROUTER", "BuildEngine", "app", "engines", "remote_llm"]
