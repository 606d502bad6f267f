"""Responses that are stored, for `previous_response_id` and `GET`, in a bounded memory.

A response belongs to the key that it was made with; no other key can find it. Where the memory is full, the
oldest response of the key that holds most of it is forgotten. One response takes at most a quarter, and
has no more values than a body may have, since it is read like one. Nothing is written to disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from samewise.openai.errors import ApiError
from samewise.openai.responses.exchange import ResponseRecord
from samewise.serve.http import is_crowded

OVERHEAD = 1024
"""Bytes that a record takes beside its JSON: objects and table entries, generously."""


class ResponseStore:
    """Stored responses by key. Owned by the Service; any thread may call it."""

    def __init__(self, limit: int, max_values: int = 2**20) -> None:
        self.limit = limit  # bytes of all responses
        self.max_values = max_values  # of one, see is_crowded
        self._used = 0
        self._records: dict[bytes, OrderedDict[str, ResponseRecord]] = {}  # by key, oldest first
        self._bytes: dict[bytes, int] = {}  # by key
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """The bytes of all responses."""
        return self._used

    def add(self, key: bytes, record: ResponseRecord) -> None:
        """Store a response, unless it is too large or has too many values."""
        size = _size(record)
        if size > self.limit // 4 or is_crowded(record.items, self.max_values):
            return
        with self._lock:
            self._records.setdefault(key, OrderedDict())[record.id] = record
            self._count(key, size)
            while self._used > self.limit:
                largest = max(self._bytes, key=lambda one: self._bytes[one])
                self._forget(largest, next(iter(self._records[largest])))

    def get(self, key: bytes, response_id: str, *, param: str) -> ResponseRecord:
        """A response of this key. Raises 404, which names `param`."""
        with self._lock:
            own = self._records.get(key)
            record = None if own is None else own.get(response_id)
        if record is None:
            raise ApiError(
                f"the response {response_id[:80]!r} is not stored here: it was made with store=false or "
                "another key, too large, deleted, or forgotten to make room; send the whole "
                "conversation as input",
                status=404, param=param, code="response_not_found",
            )  # fmt: skip
        return record

    def delete(self, key: bytes, response_id: str) -> None:
        """Forget a response of this key. Raises 404."""
        self.get(key, response_id, param="response_id")
        with self._lock:
            if response_id in self._records.get(key, ()):
                self._forget(key, response_id)

    def _forget(self, key: bytes, response_id: str) -> None:
        self._count(key, -_size(self._records[key].pop(response_id)))
        if not self._records[key]:
            del self._records[key], self._bytes[key]

    def _count(self, key: bytes, change: int) -> None:
        self._used += change
        self._bytes[key] = self._bytes.get(key, 0) + change


def _size(record: ResponseRecord) -> int:
    return record.num_bytes + OVERHEAD


__all__ = ["OVERHEAD", "ResponseStore"]
