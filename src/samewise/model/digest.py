"""SHA-256 digests of a model's files, as the contract states them.

Cached by path, size, inode, mtime and ctime. A program may set a file's mtime to any value; ctime is the time
of the last change by the system's own clock. Neither changes when a file in memory (tmpfs) is written through
a mapping, so the digests of such files are not cached.
"""

import ctypes
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from samewise import user_cache
from samewise.errors import GuaranteeLost
from samewise.model.source import Source, weight_files

CONFIG_FILES = re.compile(
    r"config\.json|generation_config\.json|tekken\.json|chat_template.*"
    r"|(additional_chat_templates/)?[^/]*\.jinja|[^/]*\.(tiktoken|model|spm)"
    r"|(tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece)[^/]*\.(json|txt|bpe)"
)
"""Of paths inside the model's folder. Code (.py) counts in addition where it is trusted, at any depth."""
TMPFS, RAMFS = 0x01021994, 0x858458F6
"""Linux's numbers of the file systems that keep files in memory."""
SETTLED_NS = 2_000_000_000
"""Nanoseconds a file must be unchanged before its digest is cached: the coarsest file-system clock (FAT's)
ticks every 2 s, and within one tick a file can change without changing its mtime or ctime."""


class FileStamp(NamedTuple):
    """What shows that a file was changed."""

    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The file's stamp now."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)


def model_files(source: Source, *, trusted: bool = False) -> list[Path]:
    """Every file that digests are made of: weights, configuration, tokenizer, and code if it is trusted."""
    return [*weight_files(source.path), *_config_files(source, trusted=trusted)]


def stamps_of(paths: Iterable[Path]) -> dict[Path, FileStamp]:
    """The stamps of files, to be compared later with `refuse_changed`."""
    return {path: FileStamp.of(path) for path in paths}


def refuse_changed(stamps: Mapping[Path, FileStamp]) -> None:
    """Raise GuaranteeLost if a file is no longer the one whose stamp was taken."""
    for path, stamp in stamps.items():
        if not path.exists() or FileStamp.of(path) != stamp:
            raise GuaranteeLost(
                f"{path} was changed while it was loaded, so the model in memory may not be the one that the "
                "contract names; wait until the file is complete and start again"
            )


def weights_digest(source: Source) -> str:
    """sha256 over names and contents of the weight files, in order of name."""
    files = weight_files(source.path)
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases the interpreter lock
        digests = list(pool.map(file_digest, files))
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.name}\0{digest}\n".encode())
    return total.hexdigest()


def config_digests(source: Source, *, trusted: bool = False) -> dict[str, str]:
    """Path in the folder -> sha256: config, tokenizer, chat templates, generation defaults, trusted code."""
    files = _config_files(source, trusted=trusted)
    return {path.relative_to(source.path).as_posix(): file_digest(path) for path in files}


def _config_files(source: Source, *, trusted: bool) -> list[Path]:
    """Sorted by path."""
    paths = [*source.path.iterdir(), *source.path.glob("additional_chat_templates/*")]
    files = {path for path in paths if CONFIG_FILES.fullmatch(path.relative_to(source.path).as_posix())}
    if trusted:
        files |= set(source.path.rglob("*.py"))
    return sorted(path for path in files if path.is_file())


def file_digest(path: Path) -> str:
    """sha256 of a file, from the cache where the file has not changed since."""
    real = path.resolve()
    if in_memory(real):
        return sha256_of(real)
    stamp = FileStamp.of(real)
    key: dict[str, str | int] = {"path": str(real), **stamp._asdict()}
    cached = user_cache.get("digest", key)
    if isinstance(cached, str) and len(cached) == 64:
        return cached
    digest = sha256_of(real)
    if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) > SETTLED_NS:
        user_cache.put("digest", key, digest)
    return digest


def in_memory(path: Path) -> bool:
    """Whether a file lies in a file system that is kept in memory. Known on Linux only."""
    return file_system(path) in {TMPFS, RAMFS}


def file_system(path: Path) -> int | None:
    """Linux's number of the file system in which a path lies; None elsewhere, or where it cannot be read."""
    if sys.platform != "linux":
        return None
    result = ctypes.create_string_buffer(1024)  # a struct statfs, which has about 120 bytes
    if ctypes.CDLL(None).statfs(os.fsencode(path), result) != 0:
        return None
    return int.from_bytes(result.raw[:4], sys.byteorder)  # f_type; its number has 32 bits


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, always read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = [
    "FileStamp",
    "config_digests",
    "file_digest",
    "file_system",
    "in_memory",
    "model_files",
    "refuse_changed",
    "sha256_of",
    "stamps_of",
    "weights_digest",
]
