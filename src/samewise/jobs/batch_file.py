"""The two files of a batch: requests, one per line, and their results. Host only.

The output is only appended to, one line at a time, each on disk before the next is begun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.errors import BadParameter, MachineError

OutputLine = dict[str, Any]
"""A line of the output: the result of one request."""

Key = str | int
"""Identifies a line of the input: its custom_id, or its line number where it has none."""

LINE_START = b'{"id": "batch_req_'
"""The first bytes of every output line."""

FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input: a request, or the error that makes it invalid."""

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: str | None = None

    @property
    def key(self) -> Key:
        """Identifies the line in its file."""
        return self.number if self.custom_id is None else self.custom_id

    def as_text(self) -> str:
        """The line as JSON, for `parse_line`. Only of a line without an error."""
        return json.dumps({"custom_id": self.custom_id, "url": self.url, "body": self.body})


def read_lines(path: str | os.PathLike[str]) -> Iterator[BatchLine]:
    """The lines of an input file; empty ones are skipped."""
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield parse_line(number, text)
    except OSError as error:
        raise BadParameter(f"cannot read {path}: {error.strerror or error}", param="source") from None


def parse_line(number: int, text: bytes) -> BatchLine:
    """A line of an input file."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, None, error=f"this is not JSON: {error}")
    if not isinstance(fields, dict):
        return BatchLine(number, None, error="this is not a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(number, None, error=f"custom_id={custom_id!r}: give every line a name of its own")
    return BatchLine(number, custom_id, fields.get("url", ""), fields.get("body"), _line_error(fields))


def _line_error(fields: dict[str, Any]) -> str | None:
    """The first error in the fields around the body."""
    if odd := sorted(fields.keys() - set(FIELDS)):
        return f"{odd[0]!r} is unknown; a line has {', '.join(FIELDS)}"
    if fields.get("method", "POST") != "POST":
        return f"method={fields['method']!r}: only POST is known"
    if not isinstance(fields.get("url"), str):
        return "the url is missing; give /v1/chat/completions or /v1/completions"
    return None


def line_numbers(path: str | os.PathLike[str]) -> dict[Key, int]:
    """The number of every line by its key. A repeated custom_id is refused: its answer would be ambiguous."""
    numbers: dict[Key, int] = {}
    for line in read_lines(path):
        if line.key in numbers:
            raise BadParameter(
                f"{path}: lines {numbers[line.key]} and {line.number} have the same custom_id {line.key!r}; "
                "give every line a name of its own",
                param="source",
            )
        numbers[line.key] = line.number
    return numbers


class OutputFile:
    """The output file. Every line in it is complete and on disk.

    Locked: one process at a time may have it open. Close it, or use it in a `with`.
    """

    def __init__(self, path: str | os.PathLike[str], *, retry: bool = False) -> None:
        _require_posix()
        self.path = Path(path)
        self.done: set[Key] = set()
        self.contracts: set[str] = set()
        new = not self.path.exists()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BadParameter(f"cannot write {path}: {error.strerror or error}", param="target") from None
        try:
            self._lock()
            self._end = self._recover(retry=retry)
            if new:
                _sync_folder(self.path.absolute().parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, result: OutputLine) -> None:
        """Add a line. When this returns it is on disk; if it raises, the file is unchanged."""
        line = json.dumps(result, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
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
        """Close the file and release its lock."""
        os.close(self._file)

    def __enter__(self) -> OutputFile:
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
            raise BadParameter(
                f"another process is writing {self.path}; wait for it", param="target"
            ) from None

    def _recover(self, *, retry: bool) -> int:
        """Read the finished lines and cut off an incomplete last one; returns where the next line begins."""
        retained, end = bytearray(), 0
        with open(os.dup(self._file), "rb") as file:  # noqa: PTH123 - opens the locked descriptor
            file.seek(0)
            for number, text in enumerate(file, 1):
                if _is_incomplete(text):
                    break  # the process that wrote it was killed; its request is answered again
                result = _parse_output(text)
                if result is None:
                    raise BadParameter(
                        f"{self.path}, line {number} is no line of a batch's output; give another file",
                        param="target",
                    )
                end += len(text)
                if retry and not is_answer(result):
                    continue
                retained += text
                self._add_done(result)
        if retry and len(retained) < end:
            self._replace(bytes(retained))
            return len(retained)
        os.ftruncate(self._file, end)
        return end

    def _add_done(self, result: OutputLine) -> None:
        custom_id = result["custom_id"]
        self.done.add(result["error"]["line"] if custom_id is None else custom_id)
        if is_answer(result):
            self.contracts.add(str(result["response"]["body"]["system_fingerprint"]))

    def _replace(self, content: bytes) -> None:
        """Replace the file atomically and keep it locked."""
        new_path = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        old = self._file
        try:
            self._file = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._lock()
            self._write(content)
            os.fsync(self._file)
            new_path.replace(self.path)
        except OSError as error:
            new_path.unlink(missing_ok=True)
            raise MachineError(f"cannot write {new_path}: {error.strerror or error}") from error
        finally:
            if self._file != old:
                os.close(old)
        _sync_folder(self.path.absolute().parent)


def _require_posix() -> None:
    """POSIX locks and syncs ensure that no line is lost or answered twice when the process is killed."""
    try:
        import fcntl  # noqa: F401 - checks that it is there
    except ImportError:
        raise MachineError(
            "samewise batch needs Linux, macOS or another POSIX system; on Windows, run it in WSL"
        ) from None


def _is_incomplete(text: bytes) -> bool:
    """Whether this is the beginning of an output line, or the zeros that a crash can leave in its place."""
    begun = text.startswith(LINE_START) or LINE_START.startswith(text) or not text.strip(b"\0")
    return begun and not text.endswith(b"\n")


def _parse_output(text: bytes) -> OutputLine | None:
    """A complete output line; None if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_output(value) and text.endswith(b"\n") else None


def _is_output(value: dict[str, Any]) -> bool:
    """Whether a JSON object has the form of an output line."""
    custom_id, response, error = (value.get(name) for name in ("custom_id", "response", "error"))
    if error is not None:
        has_line = custom_id is None and isinstance(error, dict) and "line" in error
        return response is None and (isinstance(custom_id, str) or has_line)
    answered = isinstance(response, dict) and {"status_code", "body"} <= response.keys()
    return isinstance(custom_id, str) and answered


def is_answer(result: OutputLine) -> bool:
    """Whether a result is an answer and not an error."""
    return result["error"] is None and result["response"]["status_code"] == 200


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = [
    "LINE_START",
    "BatchLine",
    "Key",
    "OutputFile",
    "OutputLine",
    "is_answer",
    "line_numbers",
    "parse_line",
    "read_lines",
]
