"""How deep values of a body nest, and how long they are."""

from __future__ import annotations

import json

MAX_NESTING = 128
"""Levels of a body's objects and lists, at most. Schemas, templates and conversations are read by functions
that call themselves up to three times a level, and Python allows about 1000 calls within each other."""


def nests_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists lie within each other more than `levels` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not level:
            return False
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [one for part in parts for one in part if isinstance(one, dict | list)]
    return bool(level)


def is_longer(value: object, most: int) -> bool:
    """Whether a value, as JSON, has more than `most` characters. No more of it is written than that."""
    if isinstance(value, str):
        return len(value) > most
    length = 0
    for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value):
        length += len(piece)
        if length > most:
            return True
    return False


__all__ = ["MAX_NESTING", "is_longer", "nests_deeper"]
