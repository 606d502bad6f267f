"""Folders in the cache that are made once: complete or absent, and by one process at a time.

A folder lists the SHA-256 of its files (`DIGESTS`); one whose files no longer have them is made again.
"""

import errno
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from samewise import user_cache
from samewise.errors import MachineError
from samewise.model.digest import file_digest, sha256_of
from samewise.model.source import refuse_cut_short

DIGESTS = "digests.json"
"""The file in a folder that holds the SHA-256 of the others, by name."""


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Unless `folder` is there and whole, make it: `fill(temporary folder)`, then a rename.

    A failure leaves nothing.
    """
    if _is_whole(folder):
        return
    try:
        user_cache.make_private(folder.parent)
        with _locked(folder):
            if not _is_whole(folder):
                _fill(folder, fill)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(folder.parent, None, f"make {folder.name}") from error
        raise MachineError(
            f"cannot write {folder}: {error}; set SAMEWISE_CACHE to a folder you can write to"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there and its files have the listed digests.

    Of a folder without a list, made by an earlier version, only the length of its weights is checked. One to
    which another user could have written counts as absent.
    """
    if not folder.is_dir():
        return False
    if not all(map(user_cache.is_own_folder, (folder.parent, folder))):
        notify(f"{folder} is not used: it is another user's, or other users may write to it")
        return False
    try:
        if (folder / DIGESTS).exists():
            listed = json.loads(user_cache.read_own(folder / DIGESTS))
            whole = all(file_digest(folder / name) == digest for name, digest in listed.items())
        else:
            for weights in folder.glob("*.safetensors"):
                refuse_cut_short(weights)
            whole = True
    except (OSError, ValueError, AttributeError) as error:  # UnsupportedModel is a ValueError
        notify(f"{folder} is damaged and made again ({error})")
        return False
    if not whole:
        notify(f"{folder} is damaged and made again: a file does not have its SHA-256")
    return whole


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{prefix}*"):
        if leftover.is_dir():  # of a killed process: a running one would hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        fill(temporary)
        digests = {file.name: sha256_of(file) for file in sorted(temporary.iterdir())}
        (temporary / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
        if folder.is_dir():  # damaged
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's file lock. The operating system releases it when the process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notify(f"waiting for another process that is making {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def require_space(folder: Path, num_bytes: int, task: str) -> None:
    """Raise MachineError unless the disk of `folder` has this many bytes free."""
    if shutil.disk_usage(folder).free < num_bytes:
        raise disk_full(folder.parent, num_bytes, task)


def disk_full(folder: Path, num_bytes: int | None, task: str) -> MachineError:
    """The error for a full disk: bytes needed (where known) and free, the folder, the remedy."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    amount = f"{num_bytes / 1e9:.1f} GB needed, {free:.1f} GB free" if num_bytes else f"{free:.1f} GB free"
    return MachineError(
        f"not enough disk to {task}: {amount} at {folder}. Nothing was left behind; make room, or set "
        "SAMEWISE_CACHE (HF_HOME for hub models) to a folder on a larger disk"
    )


def notify(message: str) -> None:
    """Print a line about work that takes seconds or more, on stderr."""
    print(f"samewise: {message}", file=sys.stderr, flush=True)


__all__ = ["DIGESTS", "disk_full", "make_once", "notify", "require_space"]
