"""The user's cache folder: native libraries, converted models, and small JSON values for later processes.

Host only. No entry is needed: a missing, damaged or unreadable one is computed again. The folder may be
shared with other users (SAMEWISE_CACHE), who could put files there to be loaded: only files are read that
belong to this user or to root and that no other user can write. Folders are made with mode 0700.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from itertools import takewhile
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


def folder(kind: str) -> Path:
    """The cache's folder for one kind of entries; it need not exist.

    It is `kind`, or `kind-UID` where `kind` is there and other users may write to it. A folder of this user's
    own that others may write to is closed to them.
    """
    path = cache_dir() / kind
    if not os.path.lexists(path) or is_own_folder(path):
        return path
    return cache_dir() / f"{kind}-{_user()}"


def make_private(path: Path) -> None:
    """Make a folder, and those above it that are missing, with mode 0700.

    PermissionError if it is there and other users may write to it.
    """
    for missing in reversed([path, *takewhile(lambda above: not above.exists(), path.parents)]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(path):
        raise PermissionError(f"other users may write to {path}")


def open_own(path: Path) -> int:
    """A descriptor of a file that this user or root owns, and that no other user can write.

    PermissionError for any other file, OSError if it cannot be opened. The descriptor stays the same file
    whatever happens to its name. Symbolic links are not followed.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and _is_owned(status) and not _others_may_write(status):
        return handle
    os.close(handle)
    raise PermissionError(f"{path} is another user's, other users may write to it, or it is no plain file")


def read_own(path: Path) -> bytes:
    """The content of a file, as `open_own` opens it."""
    with os.fdopen(open_own(path), "rb") as file:
        return file.read()


def is_own_folder(path: Path) -> bool:
    """Whether only this user and root can write to a folder; one of this user's own is made so.

    False for a folder that is not there.
    """
    try:
        link, status = path.lstat(), path.stat()
        if not (stat.S_ISDIR(status.st_mode) and _is_owned(link) and _is_owned(status)):
            return False
        if _others_may_write(status):
            path.chmod(0o700)  # PermissionError for root's folder
    except OSError:
        return False
    return True


def _is_owned(status: os.stat_result) -> bool:
    """Whether a file is this user's or root's."""
    return not hasattr(os, "geteuid") or status.st_uid in {_user(), 0}


def _others_may_write(status: os.stat_result) -> bool:
    """Whether users beside the owner can write to a file. Windows keeps no such bits."""
    return hasattr(os, "geteuid") and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def get(kind: str, key: Key) -> object | None:
    """The value stored under (kind, key), or None. A damaged or unreadable entry counts as absent."""
    path = _entry_path(kind, key)
    try:
        entry = json.loads(read_own(path))
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
        make_private(path.parent)
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
    return folder("facts") / kind / f"{name}.json"


__all__ = [
    "Key",
    "cache_dir",
    "folder",
    "get",
    "is_own_folder",
    "make_private",
    "open_own",
    "put",
    "read_own",
    "write_atomically",
]
