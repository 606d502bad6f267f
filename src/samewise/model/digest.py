"""SHA-256 digests of a model's files, as the contract states them; cached by path, size, mtime and inode."""

import hashlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samewise import user_cache
from samewise.model.source import Source, weight_files

CONFIG_FILES = re.compile(
    r"config\.json|generation_config\.json|chat_template.*|.*\.(jinja|tiktoken|model|py)"
    r"|(tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece)[^/]*\.(json|txt)"
)
SETTLED_NS = 2_000_000_000
"""Nanoseconds a file must be unchanged before its digest is cached: the coarsest file-system clock (FAT's)
ticks every 2 s, and within one tick a file can change without changing its mtime."""


def weights_digest(source: Source) -> str:
    """sha256 over names and contents of the weight files, in order of name."""
    files = weight_files(source.path)
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases the interpreter lock
        digests = list(pool.map(file_digest, files))
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.name}\0{digest}\n".encode())
    return total.hexdigest()


def config_digests(source: Source) -> dict[str, str]:
    """File name -> sha256: config, tokenizer, chat template and generation defaults, sorted by name."""
    return {
        path.name: file_digest(path)
        for path in sorted(source.path.iterdir())
        if CONFIG_FILES.fullmatch(path.name) and path.is_file()
    }


def file_digest(path: Path) -> str:
    """sha256 of a file, from the cache where the file has not changed since."""
    real = path.resolve()
    stat = real.stat()
    key: dict[str, str | int] = {
        "path": str(real),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "inode": stat.st_ino,
    }
    cached = user_cache.get("digest", key)
    if isinstance(cached, str) and len(cached) == 64:
        return cached
    digest = sha256_of(real)
    if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
        user_cache.put("digest", key, digest)
    return digest


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, always read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["config_digests", "file_digest", "sha256_of", "weights_digest"]
