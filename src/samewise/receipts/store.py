"""Receipts on disk: a file, a folder of files, JSON lines, or inside the answers of a server. Host only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.errors import BadParameter, BadReceipt, MachineError
from samewise.machine import write_atomically
from samewise.receipts.receipt import KIND, Receipt, from_json, parse

SUFFIXES = (".json", ".jsonl")
_NONE = f"it holds no receipt: no JSON object with {KIND!r}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A receipt and the place it was found at, or why there is none."""

    where: str
    receipt: Receipt | None
    error: str = ""


def keep(folder: str | os.PathLike[str], receipt: Receipt) -> Path:
    """Write a receipt into a folder, whole or not at all, and return its path.

    It is named by its digest, so the same answer to the same request is kept once.
    """
    path = Path(folder) / f"{receipt.seal.removeprefix('sha256:')[:32]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, receipt.dumps().encode() + b"\n")
    except OSError as error:
        raise MachineError(f"cannot keep the receipt {path}: {error.strerror or error}") from error
    return path


def read(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Entry]:
    """Every receipt under these paths, in the order of their names. A changed one is read as it is."""
    for path in paths:
        for file in _files(Path(path)):
            yield from _read_file(file)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise BadParameter(f"{path} is not there; give receipts, or folders of them")
    if not path.is_dir():
        return [path]
    found = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    if not found:
        raise BadParameter(f"the folder {path} holds no {' or '.join(SUFFIXES)} file")
    return found


def _read_file(path: Path) -> Iterator[Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Entry(str(path), None, f"it cannot be read: {error}")
        return
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):  # each line a document of its own
        found = [entry for number, line in lines for entry in _read_text(f"{path}:{number}", line)]
    else:
        found = list(_read_text(str(path), text))
    yield from found or [Entry(str(path), None, _NONE)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_text(where: str, text: str) -> Iterator[Entry]:
    try:
        document = parse(text)
        found = list(_within(document))
        if not found and isinstance(document, dict) and "custom_id" in document:
            return  # a batch's line that was not asked for one
        if not found:
            raise BadReceipt(_NONE)
    except (BadReceipt, RecursionError) as error:
        yield Entry(where, None, str(error))
        return
    for i, whole in enumerate(found):
        place = where if len(found) == 1 else f"{where}#{i}"
        try:
            yield Entry(place, from_json(whole, check=False))
        except BadReceipt as error:
            yield Entry(place, None, str(error))


def _within(value: Any) -> Iterator[Any]:
    """Receipts anywhere in a document: a list of them, or a server's answer that carries some."""
    if isinstance(value, dict):
        if KIND in value:
            yield value
        else:
            for entry in value.values():
                yield from _within(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _within(entry)


__all__ = ["Entry", "keep", "read"]
