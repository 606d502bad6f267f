"""Any number of engines behind one address, and over one batch file, with Ray (extra `ray`).

Holds: remote_engine an engine whose frames run elsewhere, for `llm`; records what travels; engine_host an
engine for routers, job_server its answers; channel the connection between them, wire its form; prefix_choice
and routing which replica is asked; replica and ray_replicas the two ends in Ray Serve; roster their contract;
deploy the application; cluster `samewise serve --replicas`; batch Ray Data; settings; merge_stats; ray_extra
imports ray. Only routing imports ray when it is imported, and no module that a replica unpickles imports
torch before the replica has pinned its environment.
State: a RemoteEngine owns what callers have of their requests, a Replica its engine, the Roster the contract.
Imports: serve, jobs, llm, engine, and what they import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samewise.scale.batch import LineAnswerer
    from samewise.scale.deploy import app
    from samewise.scale.settings import ScaleSettings

_MODULE_OF = {
    "LineAnswerer": "samewise.scale.batch",
    "ScaleSettings": "samewise.scale.settings",
    "app": "samewise.scale.deploy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'samewise.scale' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


__all__ = ["LineAnswerer", "ScaleSettings", "app"]
