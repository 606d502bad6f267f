"""The user's cache folder: converted models, and small JSON values that later processes read.

Host only. No entry is needed: a missing, damaged or unreadable one is computed again.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

Key = Mapping[str, str | int]

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """$SAMEWISE_CACHE, else the folder `samewise` in $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("SAMEWISE_CACHE"):
        return Path(named).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "samewise"
    return Path("~/.cache/samewise").expanduser()


def get(kind: str, key: Key) -> object | None:
    """The value stored under (kind, key), or None. A damaged or unreadable entry counts as absent."""
    path = _entry_path(kind, key)
    try:
        entry = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("ignoring the damaged cache entry %s: %s", path, error)
        return None
    if not isinstance(entry, dict) or entry.get("key") != dict(key):
        log.warning("ignoring the damaged cache entry %s: its key is another one", path)
        return None
    value: object = entry.get("value")
    return value


def put(kind: str, key: Key, value: object) -> None:
    """Store a small JSON value atomically. A failed write is logged and never raised."""
    path = _entry_path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": dict(key), "value": value}).encode())
    except OSError as error:
        log.warning("cannot write the cache entry %s: %s", path, error)


def write_atomically(path: Path, content: bytes) -> None:
    """Readers of `path` see the old content or the new, never a part. A failure leaves no temporary file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _entry_path(kind: str, key: Key) -> Path:
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "facts" / kind / f"{name}.json"


__all__ = ["Key", "cache_dir", "get", "put", "write_atomically"]
