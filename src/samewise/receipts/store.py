"""Receipts on disk: files, folders, JSON lines, and the saved responses of a server. Host only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.errors import BadParameter, BadReceipt, MachineError
from samewise.receipts.reader import from_json, parse_json
from samewise.receipts.receipt import KIND, Receipt
from samewise.user_cache import write_atomically

SUFFIXES = (".json", ".jsonl")
_NO_RECEIPT = f"it holds no receipt: no JSON object with {KIND!r}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A receipt and its place (`file`, `file:line` or `file#number`), or the reason it cannot be read."""

    where: str
    receipt: Receipt | None
    error: str = ""


def save(folder: str | os.PathLike[str], receipt: Receipt) -> Path:
    """Write a receipt into a folder atomically and return its path.

    The file is named by the digest, so the same answer to the same request is stored once.
    """
    path = Path(folder) / f"{receipt.stored_digest.removeprefix('sha256:')[:32]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, receipt.dumps().encode() + b"\n")
    except OSError as error:
        raise MachineError(f"cannot write the receipt {path}: {error.strerror or error}") from error
    return path


def read(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Entry]:
    """Every receipt under these paths, sorted by file name. A changed receipt is returned, not refused."""
    for path in paths:
        for file in _files(Path(path)):
            yield from _read_file(file)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise BadParameter(f"{path} is not there; give receipts, or folders of them", param="paths")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise BadParameter(f"the folder {path} holds no {' or '.join(SUFFIXES)} file", param="paths")
    return files


def _read_file(path: Path) -> Iterator[Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Entry(str(path), None, f"it cannot be read: {error}")
        return
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):  # JSON lines
        entries = [entry for number, line in lines for entry in _read_text(f"{path}:{number}", line)]
    else:
        entries = list(_read_text(str(path), text))
    yield from entries or [Entry(str(path), None, _NO_RECEIPT)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_text(where: str, text: str) -> Iterator[Entry]:
    try:
        document = parse_json(text)
        found = list(_receipts_in(document))
        if not found and isinstance(document, dict) and "custom_id" in document:
            return  # a batch line whose request did not ask for a receipt
        if not found:
            raise BadReceipt(_NO_RECEIPT)
    except (BadReceipt, RecursionError) as error:
        yield Entry(where, None, str(error))
        return
    for i, receipt in enumerate(found):
        place = where if len(found) == 1 else f"{where}#{i}"
        try:
            yield Entry(place, from_json(receipt, check=False))
        except BadReceipt as error:
            yield Entry(place, None, str(error))


def _receipts_in(value: Any) -> Iterator[Any]:
    """Receipts at any depth of a document: in a list, or in a server's response."""
    if isinstance(value, dict):
        if KIND in value:
            yield value
        else:
            for entry in value.values():
                yield from _receipts_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _receipts_in(entry)


__all__ = ["Entry", "read", "save"]
