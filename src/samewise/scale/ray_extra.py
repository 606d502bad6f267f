"""Ray is an extra: it is imported where it is needed, and what it lacks is said in one line."""

from __future__ import annotations

from typing import Any

from samewise.errors import MachineError


def import_ray(what: str) -> Any:
    """The package `ray` with `ray.serve`. `what`: who needs it, for the error where it is missing."""
    try:
        import ray
        from ray import serve  # noqa: F401 - makes it an attribute of ray
    except ModuleNotFoundError as error:
        raise MachineError(f"{what} needs {error.name}: pip install 'samewise[ray]'") from error
    return ray


def import_ray_data(what: str) -> Any:
    """The package `ray` with `ray.data`."""
    try:
        import pyarrow as _  # noqa: F401, ICN001 - ray.data's own error does not name it
        import ray
        from ray import data  # noqa: F401 - makes it an attribute of ray
    except ModuleNotFoundError as error:
        raise MachineError(f"{what} needs {error.name}: pip install 'samewise[ray]'") from error
    return ray


__all__ = ["import_ray", "import_ray_data"]
