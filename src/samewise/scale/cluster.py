"""`samewise serve --replicas`: a server in this process over replicas in a Ray cluster.

The server is the usual one, with its limits and its way of ending; only its engine is elsewhere.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from samewise import errors
from samewise.config import EngineConfig
from samewise.errors import GuaranteeLost, MachineError
from samewise.scale.deploy import engines, remote_llm
from samewise.scale.ray_extra import import_ray
from samewise.scale.roster import roster_of
from samewise.scale.settings import ScaleSettings

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.llm.aio import AsyncLLM

log = logging.getLogger("samewise.scale")

OBJECT_STORE = 128 * 2**20
"""Bytes of a local cluster's object store. Set by hand: tokens do not pass through it."""

POLL_SECONDS = 0.5
"""Between two looks at replicas that are starting. Set by hand: they take seconds."""


@contextmanager
def ray_cluster(
    address: str | None,
    num_cpus: float,
    what: str,
    *,
    object_store: int = OBJECT_STORE,
    env: dict[str, str] | None = None,
) -> Iterator[Any]:
    """Connect to a cluster, or start one on this machine alone, which ends with the context.

    `env`: variables of the processes in it.
    """
    ray = import_ray(what)
    common: dict[str, Any] = {
        "log_to_driver": False, "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": env} if env else None,
    }  # fmt: skip
    if address is not None:
        try:
            ray.init(address=address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise MachineError(
                f"no Ray cluster at {address!r}: {error}; start one with ray start --head, or leave out "
                "--ray-address"
            ) from error
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=max(1, int(num_cpus + 0.999)), object_store_memory=object_store,
            include_dashboard=False, _node_ip_address="127.0.0.1", **common,
        )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def deployed(
    config: EngineConfig,
    scale: ScaleSettings,
    address: str | None,
    *,
    what: str,
    make_engine: Callable[[], Engine] | None = None,
) -> Iterator[Deployed]:
    """Replicas in a cluster, from `load` until the context ends."""
    with ray_cluster(address, scale.most * scale.num_cpus, what) as ray:
        application = Deployed(config, scale, ray, make_engine)
        try:
            yield application
        finally:
            application.delete()


class Deployed:
    """An application of replicas in a cluster, and the way to it."""

    def __init__(
        self, config: EngineConfig, scale: ScaleSettings, ray: Any, make_engine: Callable[[], Engine] | None
    ) -> None:
        self._config, self._scale, self._make_engine = config, scale, make_engine
        self._ray, self._serve = ray, ray.serve
        self._started = False
        self.name = f"samewise-{os.getpid()}-{secrets.token_hex(4)}"

    def load(self) -> AsyncLLM:
        """Start the replicas and connect to them. Raises what their engines raise."""
        self._started = True
        log.info("the replicas are the application %s of Ray Serve", self.name)
        self._serve.start(http_options={"location": "NoServer"})
        starting: Future[None] = Future()
        threading.Thread(target=self._start, args=(starting,), daemon=True).start()
        while not starting.done():
            wait([starting], POLL_SECONDS)
            # Once a replica runs, Ray Serve starts a refused one again for ever, and `run` does not return.
            for refusal in self._refusals():
                raise GuaranteeLost(refusal)
        starting.result()
        llm = remote_llm(self.name, self._config, self._scale, kept=True)
        llm.intake.prepare_grammars()
        return llm

    def delete(self) -> None:
        """Stop the replicas, if `load` began to start them."""
        if self._started:
            self._serve.delete(self.name)
            self._ray.kill(roster_of(self.name))

    def _start(self, starting: Future[None]) -> None:
        from ray.serve.schema import LoggingConfig

        try:
            self._serve.run(
                engines(self._config, self._scale, self._make_engine), name=self.name, route_prefix=None,
                logging_config=LoggingConfig(enable_access_log=False),
            )  # fmt: skip
        except BaseException as error:
            starting.set_exception(cause_of(str(error)) if isinstance(error, RuntimeError) else error)
        else:
            starting.set_result(None)

    def _refusals(self) -> list[str]:
        """Why replicas were refused, if some were. Also tells the roster that this process runs."""
        try:
            roster = roster_of(self.name)
            roster.keep.remote(self.name)
            refused: dict[str, str] = self._ray.get(roster.refused.remote(), timeout=10)
        except self._ray.exceptions.RayError:  # its actor is being started
            return []
        return list(refused.values())


def cause_of(text: str, *, what: str = "the replicas do not start") -> Exception:
    """The error of this package that an error of Ray quotes, or `what` happened and all that Ray said."""
    found = re.findall(r"samewise\.errors\.(\w+): (.*)", text)
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.SamewiseError):
            return kind(message.strip())
    return MachineError(f"{what}: {text.strip()[-2000:]}")


__all__ = ["OBJECT_STORE", "POLL_SECONDS", "Deployed", "cause_of", "deployed", "ray_cluster"]
