"""What to ask: the project's own small set, any file in Spec-Bench's format, or prompts of given lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samewise.errors import BadParameter

OWN = Path(__file__).with_name("workload.jsonl")


@dataclass(frozen=True, slots=True)
class Question:
    """One question: its task, and its turns (only the first is asked) or token ids."""

    task: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


def read(path: Path | None = None, *, limit: int | None = None, tasks: Iterable[str] = ()) -> list[Question]:
    """The questions of a Spec-Bench file (JSON lines: `category`, `turns`), at most `limit` per task."""
    source = path or OWN
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadParameter(f"workload {str(source)!r} cannot be read: {error}") from error
    wanted, found, seen = set(tasks), [], dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(str(entry["category"]), str(entry["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadParameter(
                f"{source}, line {number}: not a Spec-Bench question (category, turns): {error!r}"
            ) from error
        seen[question.task] = seen.get(question.task, 0) + 1
        if (not wanted or question.task in wanted) and (limit is None or seen[question.task] <= limit):
            found.append(question)
    if not found:
        raise BadParameter(
            f"workload {str(source)!r} has no questions of tasks {sorted(wanted)}; it has {sorted(seen)}"
        )
    return found


def synthetic(num: int, length: int, vocab: int, seed: int = 0) -> list[Question]:
    """Random prompts of a length."""
    rng = random.Random(seed)
    return [
        Question("synthetic", token_ids=tuple(rng.randrange(vocab) for _ in range(length)))
        for _ in range(num)
    ]


__all__ = ["OWN", "Question", "read", "synthetic"]
