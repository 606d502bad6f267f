"""What the step loop needs of an engine: one in this process, or one whose frames run elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.engine.weights import CheckedUpdate, WeightUpdate
from samewise.errors import EngineLost
from samewise.execute.load import Loaded
from samewise.schedule.limits import Limits
from samewise.types import Delta, Guide, Received, Request
from samewise.verify.probe import ProbeReport


class AnyEngine(Protocol):
    """`engine.Engine`, or `scale.RemoteEngine`. One thread owns it; `wake` alone may be called by others."""

    config: EngineConfig
    loaded: Loaded
    limits: Limits
    contract: Contract
    report: ProbeReport
    weights_version: int  # how often the weights were replaced
    contracts: dict[str, Contract]  # the latest ones, by id

    @property
    def settings(self) -> dict[str, str | int | bool | None]:
        """What another engine must be given to reach this contract, beside the model's name."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        ...

    @property
    def lost(self) -> EngineLost | None:
        """Why the engine cannot go on, if it cannot."""
        ...

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has begun."""
        ...

    def new_id(self) -> int:
        """An id for the next request. Ids order requests by arrival and are never reused."""
        ...

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request that `llm.intake` has checked. Raises QueueFull."""
        ...

    def abort(self, request_id: int) -> Delta | None:
        """Drop a request at any moment. None if it has ended already."""
        ...

    def end(self, request_id: int) -> None:
        """End a request whose text is complete: no further delta comes of it."""
        ...

    def step(self) -> list[Delta]:
        """What was committed since the last call."""
        ...

    def wake(self) -> None:
        """End a wait inside `step`."""
        ...

    def recover(self, received: Mapping[int, Received | None] | None = None, *, blame: bool = False) -> None:
        """Start every request again from what its caller has; see Engine.recover."""
        ...

    @property
    def certified(self) -> bool:
        """Whether the weights have a contract: False after an update that failed half-way."""
        ...

    def read_update(self, update: WeightUpdate) -> CheckedUpdate:
        """Check new weights without using them. Any thread may call it."""
        ...

    def update_weights(
        self, update: WeightUpdate, *, received: Mapping[int, Received | None] | None = None
    ) -> Contract:
        """Replace the weights; see Engine.update_weights."""
        ...

    def forget_prefixes(self, received: Mapping[int, Received | None] | None = None) -> None:
        """Empty the prefix cache, and with `received` drop all KV; see Engine.forget_prefixes."""
        ...

    def close(self) -> None:
        """Let go of what this object's memory does not hold."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was built, and its state now."""
        ...

    def live(self, since: int = 0) -> dict[str, Any]:
        """The statistics, and what the frames after number `since` were used for."""
        ...


__all__ = ["AnyEngine"]
