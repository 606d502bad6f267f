"""Questions: the project's own small set, a file in Spec-Bench's format, or random prompts. Host only."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samewise.errors import BadParameter

DEFAULT = Path(__file__).with_name("workload.jsonl")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task: its text (a conversation's first turn) or its token ids."""

    task: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


def read(path: Path | None = None, *, limit: int | None = None, tasks: Iterable[str] = ()) -> list[Question]:
    """The questions of a Spec-Bench file (JSON lines: `category`, `turns`), at most `limit` per task."""
    source = path or DEFAULT
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadParameter(f"workload {str(source)!r} cannot be read: {error}", param="workload") from error
    wanted, questions, num_of_task = set(tasks), [], dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(str(entry["category"]), str(entry["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadParameter(
                f"{source}, line {number}: not a Spec-Bench question (category, turns): {error!r}",
                param="workload",
            ) from error
        num = num_of_task[question.task] = num_of_task.get(question.task, 0) + 1
        if (not wanted or question.task in wanted) and (limit is None or num <= limit):
            questions.append(question)
    if not questions:
        known = sorted(num_of_task)
        raise BadParameter(
            f"workload {str(source)!r} has no questions of tasks {sorted(wanted)}; it has {known}",
            param="tasks" if known else "workload",
        )
    return questions


def synthetic(num: int, length: int, vocab: int, seed: int = 0) -> list[Question]:
    """Random prompts of `length` tokens."""
    rng = random.Random(seed)
    return [
        Question("synthetic", token_ids=tuple(rng.randrange(vocab) for _ in range(length)))
        for _ in range(num)
    ]


__all__ = ["DEFAULT", "Question", "read", "synthetic"]
