"""The two files of a batch: requests a line each, and their outcomes. Host only; knows no engine.

The output is only ever appended to, a line at a time, each on the disk before the next is begun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.errors import BadParameter, MachineError

Record = dict[str, Any]
Key = str | int
"""What names a line of the input: its custom_id, or its number where it has none."""

HEAD = b'{"id": "batch_req_'
"""How every line of the output begins."""

FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or why it is none."""

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: str | None = None

    @property
    def key(self) -> Key:
        """Its name among the lines."""
        return self.number if self.custom_id is None else self.custom_id


def read_lines(path: str | os.PathLike[str]) -> Iterator[Line]:
    """The lines of an input file, empty ones left out."""
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _line(number, text)
    except OSError as error:
        raise BadParameter(f"cannot read {path}: {error.strerror or error}") from None


def _line(number: int, text: bytes) -> Line:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(number, None, error=f"this is not JSON: {error}")
    if not isinstance(said, dict):
        return Line(number, None, error="this is not a JSON object")
    name = said.get("custom_id")
    if not isinstance(name, str) or not name:
        return Line(number, None, error=f"custom_id={name!r}: give every line a name of its own")
    return Line(number, name, said.get("url", ""), said.get("body"), _mistake(said))


def _mistake(said: Record) -> str | None:
    """What is wrong around the body, if anything is."""
    if odd := sorted(said.keys() - set(FIELDS)):
        return f"{odd[0]!r} is unknown; a line has {', '.join(FIELDS)}"
    if said.get("method", "POST") != "POST":
        return f"method={said['method']!r}: only POST is known"
    if not isinstance(said.get("url"), str):
        return "the url is missing; give /v1/chat/completions or /v1/completions"
    return None


def survey(path: str | os.PathLike[str]) -> dict[Key, int]:
    """Every line's name and number. Two of one name are refused: nobody could tell their answers apart."""
    found: dict[Key, int] = {}
    for line in read_lines(path):
        if line.key in found:
            raise BadParameter(
                f"{path}: lines {found[line.key]} and {line.number} have the same custom_id {line.key!r}; "
                "give every line a name of its own"
            )
        found[line.key] = line.number
    return found


class Results:
    """The output file. What is in it is on the disk; there is never half a line before another.

    Held by one process at a time. Close it, or use it in a `with`.
    """

    def __init__(self, path: str | os.PathLike[str], *, retry: bool = False) -> None:
        _need_posix()
        self.path = Path(path)
        self.done: set[Key] = set()
        self.contracts: set[str] = set()
        new = not self.path.exists()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BadParameter(f"cannot write {path}: {error.strerror or error}") from None
        try:
            self._lock()
            self._end = self._recover(retry=retry)
            if new:
                _sync_folder(self.path.absolute().parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: Record) -> None:
        """Add a line. When this returns it is on the disk; if it raises, the file is as before."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
        try:
            self._write(line + b"\n")
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise MachineError(
                f"cannot write {self.path}: {error.strerror or error}; all that was finished is in it. "
                "Make room and run the same command again to go on"
            ) from error
        self._end += len(line) + 1

    def close(self) -> None:
        """Let others have it."""
        os.close(self._file)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._file, content) :]

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadParameter(f"another process is writing {self.path}; wait for it") from None

    def _recover(self, *, retry: bool) -> int:
        """Learn what is finished, cut off what is torn; returns where the next line begins."""
        kept, end = bytearray(), 0
        with open(os.dup(self._file), "rb") as file:  # noqa: PTH123 - of the file that is locked
            file.seek(0)
            for number, text in enumerate(file, 1):
                if _torn(text):
                    break  # the last line; its writer was killed, and its request is done again
                record = _record(text)
                if record is None:
                    raise BadParameter(
                        f"{self.path}, line {number} is no line of a batch's output; give another file"
                    )
                end += len(text)
                if retry and not went_well(record):
                    continue
                kept += text
                self._learn(record)
        if retry and len(kept) < end:
            self._replace(bytes(kept))
            return len(kept)
        os.ftruncate(self._file, end)
        return end

    def _learn(self, record: Record) -> None:
        name = record["custom_id"]
        self.done.add(record["error"]["line"] if name is None else name)
        if went_well(record):
            self.contracts.add(str(record["response"]["body"]["system_fingerprint"]))

    def _replace(self, content: bytes) -> None:
        """Put other content in the file's place, whole or not at all, and keep holding it."""
        spare = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        old = self._file
        try:
            self._file = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._lock()
            self._write(content)
            os.fsync(self._file)
            spare.replace(self.path)
        except OSError as error:
            spare.unlink(missing_ok=True)
            raise MachineError(f"cannot write {spare}: {error.strerror or error}") from error
        finally:
            if self._file != old:
                os.close(old)
        _sync_folder(self.path.absolute().parent)


def _need_posix() -> None:
    """No line lost and none twice, whenever we are killed: that is promised with POSIX's locks and syncs."""
    try:
        import fcntl  # noqa: F401 - only whether it is there
    except ImportError:
        raise MachineError(
            "samewise batch needs Linux, macOS or another POSIX system; on Windows, run it in WSL"
        ) from None


def _torn(text: bytes) -> bool:
    """Whether this is the beginning of a line of ours, and not the whole."""
    began = text.startswith(HEAD) or HEAD.startswith(text) or not text.strip(b"\0")
    return began and not text.endswith(b"\n")


def _record(text: bytes) -> Record | None:
    """A line of the output, or None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _ours(found) and text.endswith(b"\n") else None


def _ours(record: Record) -> bool:
    """Whether this is an outcome as a batch writes it."""
    name, response, error = (record.get(part) for part in ("custom_id", "response", "error"))
    if error is not None:
        named = isinstance(name, str) or (name is None and isinstance(error, dict) and "line" in error)
        return response is None and named
    answered = isinstance(response, dict) and {"status_code", "body"} <= response.keys()
    return isinstance(name, str) and answered


def went_well(record: Record) -> bool:
    """Whether an outcome is an answer."""
    return record["error"] is None and record["response"]["status_code"] == 200


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["HEAD", "Key", "Line", "Record", "Results", "read_lines", "survey", "went_well"]
