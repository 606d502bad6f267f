"""Read the header of a GGUF file: metadata fields and where each tensor lies.

The package `gguf` reads headers too, but makes several arrays per token of the vocabulary: 9 s for 150,000
tokens, and 0.4 s here. Knows the file format alone: no names of models, no unpacking of tensors.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 counts in 32 bits and has not been written since 2023
STRING, ARRAY = 8, 9  # types of metadata values that are not numbers
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DEFAULT_ALIGNMENT = 32  # bytes; `general.alignment` says otherwise
FLOAT32 = 0  # type of an unpacked tensor
UINT32 = 4  # type of a metadata value


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of the file. `shape` has the rows first, as in torch; `data` is a view of the mapped file."""

    name: str
    shape: tuple[int, ...]
    type: int  # as numbered by `gguf.GGMLQuantizationType`
    data: np.ndarray  # uint8, one dimension

    @property
    def num_elements(self) -> int:
        """Weights in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file. `raw` holds the bytes of each field, by name."""

    path: Path
    fields: dict[str, Any]
    raw: dict[str, bytes]
    tensors: tuple[PackedTensor, ...]


class _Cursor:
    """A place in the bytes of a header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_number_code(kind))

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in NUMBERS:
            size = struct.calcsize(f"<{NUMBERS[kind]}")
            return list(np.frombuffer(self._bytes(length * size), f"<{NUMBERS[kind]}").tolist())
        read: Callable[[], Any] = self.text if kind == STRING else partial(self.value, kind)
        return [read() for _ in range(length)]

    def _bytes(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise ValueError(f"{length} bytes at {self.at} go past the end of the file")
        self.at += length
        return self.data[self.at - length : self.at]


def _number_code(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"unknown type {kind} of a metadata value")
    return NUMBERS[kind]


def read_header(path: Path, num_bytes: Callable[[int, tuple[int, ...]], int]) -> GGUFFile:
    """The header of `path`. `num_bytes(type, shape)` says how long a packed tensor is.

    Raises ValueError for a file that is not GGUF, is cut short, or is big-endian.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read_header(path, _Cursor(mapped), num_bytes)
    except struct.error as error:
        raise ValueError("the header is cut short") from error


def _read_header(path: Path, cursor: _Cursor, num_bytes: Callable[[int, tuple[int, ...]], int]) -> GGUFFile:
    if cursor.data[:4] != MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    cursor.at = 4
    if (version := cursor.number("I")) not in VERSIONS:
        raise ValueError(f"version {version}; known are {VERSIONS}, little-endian")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    raw: dict[str, bytes] = {}
    for _ in range(num_fields):
        start, name = cursor.at, cursor.text()
        fields[name] = cursor.value(cursor.number("I"))
        raw[name] = cursor.data[start : cursor.at]
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    data = np.frombuffer(cursor.data, np.uint8)[-(-cursor.at // alignment) * alignment :]
    tensors = []
    for name, shape, kind, offset in infos:
        length = num_bytes(kind, shape)
        if offset + length > len(data):
            raise ValueError(f"tensor {name!r} goes past the end of the file")
        tensors.append(PackedTensor(name, shape, kind, data[offset : offset + length]))
    return GGUFFile(path, fields, raw, tuple(tensors))


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    return name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")


def write_outline(path: Path, file: GGUFFile, *, skip: set[str], numbers: dict[str, int]) -> None:
    """Write a small GGUF file: the fields of `file` but `skip`, and of each tensor its name and one zero.

    `numbers` are added where the file has no such field.
    """
    fields = [raw for name, raw in file.raw.items() if name not in skip | {"general.alignment"}]
    fields += [
        _packed_text(name) + struct.pack("<II", UINT32, number)
        for name, number in numbers.items()
        if name not in file.raw
    ]
    parts = [MAGIC, struct.pack("<IQQ", 3, len(file.tensors), len(fields)), *fields]
    for i, tensor in enumerate(file.tensors):
        info = struct.pack("<IQIQ", 1, 1, FLOAT32, i * DEFAULT_ALIGNMENT)
        parts += [_packed_text(tensor.name), info]
    header = b"".join(parts)
    padding = bytes(-len(header) % DEFAULT_ALIGNMENT)
    path.write_bytes(header + padding + bytes(len(file.tensors) * DEFAULT_ALIGNMENT))


def _packed_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


__all__ = ["GGUFFile", "PackedTensor", "read_header", "write_outline"]
