"""`samewise serve --replicas`: a server in this process over replicas in a Ray cluster.

The server is the usual one, with its limits and its way of ending; only its engine is elsewhere.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from samewise import errors
from samewise.config import EngineConfig
from samewise.errors import MachineError
from samewise.scale.deploy import engines, remote_llm
from samewise.scale.ray_extra import import_ray
from samewise.scale.settings import ScaleSettings

if TYPE_CHECKING:
    from samewise.llm.aio import AsyncLLM

log = logging.getLogger("samewise.scale")

OBJECT_STORE = 128 * 2**20
"""Bytes of a local cluster's object store. Set by hand: tokens do not pass through it."""


@contextmanager
def ray_cluster(
    address: str | None, num_cpus: float, what: str, *, object_store: int = OBJECT_STORE
) -> Iterator[Any]:
    """Connect to a cluster, or start one on this machine alone, which ends with the context."""
    ray = import_ray(what)
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise MachineError(
                f"no Ray cluster at {address!r}: {error}; start one with ray start --head, or leave out "
                "--ray-address"
            ) from error
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=max(1, int(num_cpus + 0.999)), object_store_memory=object_store,
            include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def deployed(
    config: EngineConfig, scale: ScaleSettings, address: str | None, *, what: str
) -> Iterator[Deployed]:
    """Replicas in a cluster, from `load` until the context ends."""
    with ray_cluster(address, scale.most * scale.num_cpus, what) as ray:
        application = Deployed(config, scale, ray, f"samewise-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            yield application
        finally:
            application.delete()


class Deployed:
    """An application of replicas in a cluster, and the way to it."""

    def __init__(self, config: EngineConfig, scale: ScaleSettings, ray: Any, name: str) -> None:
        self._config, self._scale, self._ray, self.name = config, scale, ray, name

    def load(self) -> AsyncLLM:
        """Start the replicas and connect to them. Raises what their engines raise."""
        serve = self._ray.serve
        from ray.serve.schema import LoggingConfig

        serve.start(http_options={"location": "NoServer"})
        application = engines(self._config, self._scale)
        try:
            serve.run(
                application, name=self.name, route_prefix=None,
                logging_config=LoggingConfig(enable_access_log=False),
            )  # fmt: skip
        except RuntimeError as error:
            raise cause_of(str(error)) from error
        llm = remote_llm(self.name, self._scale.most, self._config.max_queued)
        llm.intake.prepare_grammars()
        return llm

    def delete(self) -> None:
        """Stop the replicas."""
        self._ray.serve.delete(self.name)


def cause_of(text: str) -> Exception:
    """The error of this package that a failed deployment quotes, or all that Ray said."""
    found = re.findall(r"samewise\.errors\.(\w+): (.*)", text)
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.SamewiseError):
            return kind(message.strip())
    return MachineError(f"the replicas do not start: {text.strip()[-2000:]}")


__all__ = ["OBJECT_STORE", "Deployed", "cause_of", "deployed", "ray_cluster"]
