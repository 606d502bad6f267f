"""Folders in the cache that are made once: complete or absent, and by one process at a time."""

import errno
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from samewise.errors import MachineError


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Unless `folder` exists, make it: `fill(temporary folder)`, then a rename. A failure leaves nothing."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not folder.is_dir():
                _fill(folder, fill)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(folder.parent, None, f"make {folder.name}") from error
        raise MachineError(
            f"cannot write {folder}: {error}; set SAMEWISE_CACHE to a folder you can write to"
        ) from error


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{prefix}*"):
        if leftover.is_dir():  # of a killed process: a running one would hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        fill(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
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


__all__ = ["disk_full", "make_once", "notify", "require_space"]
