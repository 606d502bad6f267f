"""Does a row's result depend on its company? Counted over random packings, sizes and neighbours.

Random texts, two of them long, are read one at a time: the reference. Then again, all of them, in frames of
every size the engine has, cut anywhere, in any order, on other pages each time, over whatever the pages held
before; every fourth frame as prompts are read, where only the last row of each counts and the head need not
run on the others. A row differs if its token, the bits of its log-probability or a digest of all its logits'
bits does.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from loads import after
from samewise.engine import Engine
from samewise.kernels.attention.base import PAGE
from samewise.types import Sampling, Span

SHORTEST, LONGEST, LONG = 40, 300, 2500
READ = 0.25  # of the frames
GREEDY = Sampling()


class Reader:
    """Runs spans as frames of an idle engine and says what every row came to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._logits: list[torch.Tensor] = []
        self._loaded: list[tuple[Any, list[int] | None]] = []

    @torch.inference_mode()
    def rows(self, spans: list[Span]) -> torch.Tensor:
        """[R, 3] of the rows that are asked about: token, log-probability bits, digest of the logits."""
        runner, first = type(self.engine.runner), 0
        asked: list[int] = []
        for span in spans:
            asked += range(first + span.given - 1, first + len(span.inputs))
            first += len(span.inputs)
        self._logits.clear()
        self._loaded.clear()
        with after(runner, "frame", self._logits.append), after(runner, "load", self._loaded.append):
            found = self.engine.verifier.run(spans)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        (logits,), ((_, kept),) = self._logits, self._loaded
        places = {row: i for i, row in enumerate(kept)} if kept is not None else range(first)
        answers = torch.empty(len(asked), 3, dtype=torch.int64)
        answers[:, :2] = found.packed[asked]
        answers[:, 2] = digest(logits[[places[row] for row in asked]]).cpu()
        return answers


def digest(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R]: exact integer sums of the bits, weighted by place; no order of summation shows."""
    whole = {2: torch.int16, 4: torch.int32}[logits.element_size()]
    place = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int64)
    weights = ((place * 0x9E3779B1 + 0x7F4A7C15) & 0x3FFFFFFF) | 1
    blocks = [(block.view(whole).long() * weights).sum(1) for block in logits.contiguous().split(64)]
    return torch.cat(blocks)


def check(engine: Engine, rows: int, seed: int = 0) -> dict[str, Any]:
    """Compare at least this many rows with what they were alone."""
    rng, reader, sizes = random.Random(seed), Reader(engine), tuple(engine.runner.sizes)
    longest = min(LONGEST, engine.max_model_len)
    # Three of the widest frame among them, and company to draw from; fewer where few rows are asked for.
    num = max(3 * sizes[-1] * 2 // (SHORTEST + LONGEST), min(24, rows // LONGEST)) + 1
    available = engine.stats()["pages"]
    lengths = [rng.randint(min(SHORTEST, longest), longest) for _ in range(num)]
    if rows >= 2 * LONG:
        lengths[:0] = [min(LONG, engine.max_model_len)] * 2
    while sum(-(-length // PAGE) for length in lengths) > available:
        lengths.pop()
    texts = [[rng.randrange(engine.loaded.arch.vocab) for _ in range(length)] for length in lengths]
    truth = []
    for number, text in enumerate(texts):
        (pages,) = _pages(rng, [len(text)], available)
        read = [
            reader.rows([_span(number, text, start, min(engine.frame_rows, len(text) - start), pages)])
            for start in range(0, len(text), engine.frame_rows)
        ]
        truth.append(torch.cat(read))
    compared = differing = frames = 0
    by_size: dict[int, list[int]] = {size: [0, 0] for size in sizes}
    while compared < rows:
        pages = _pages(rng, lengths, available)
        for spans in packings(rng, texts, pages, sizes):
            found = reader.rows(spans)
            wanted = torch.cat(
                [truth[s.seq_id][s.start + s.given - 1 : s.start + len(s.inputs)] for s in spans]
            )
            wrong, used = int((found != wanted).any(1).sum()), sum(len(span.inputs) for span in spans)
            tally = by_size[min(size for size in sizes if size >= used)]
            tally[0], tally[1] = tally[0] + len(found), tally[1] + wrong
            compared, differing, frames = compared + len(found), differing + wrong, frames + 1
    return {
        "rows": compared, "differing": differing, "frames": frames, "texts": len(texts),
        "by_size": {size: {"rows": a, "differing": b} for size, (a, b) in by_size.items() if a},
    }  # fmt: skip


def packings(
    rng: random.Random, texts: list[list[int]], pages: list[array[int]], sizes: tuple[int, ...]
) -> Iterator[list[Span]]:
    """All texts once through, frame after frame: each of a size drawn at random, filled as it comes.

    Small sizes are drawn more often, so that they get their share of the rows.
    """
    done, shares = [0] * len(texts), [size**-0.5 for size in sizes]
    while True:
        left = {i: len(text) - done[i] for i, text in enumerate(texts) if done[i] < len(text)}
        if not left:
            return
        (place,) = rng.choices(range(len(sizes)), shares)
        least = sizes[place - 1] + 1 if place else 1
        rows = min(rng.randint(least, sizes[place]), sum(left.values()))
        order = rng.sample(sorted(left), len(left))
        reading, decoding = rng.random() < READ, rng.random() < 1 / 3  # one row each: everybody generates
        takes: dict[int, int] = {}
        for i in order:
            most = min(left[i], rows)
            takes[i] = min(most, 1 if decoding else rng.choice((1, rng.randint(1, 33), left[i])))
            rows -= takes[i]
        for i in order:  # what is still free goes to whoever can use it
            more = min(rows, left[i] - takes[i])
            takes[i], rows = takes[i] + more, rows - more
        spans = [_span(i, texts[i], done[i], takes[i], pages[i]) for i in order if takes[i]]
        yield [span._replace(given=len(span.inputs)) for span in spans] if reading else spans
        for i in order:
            done[i] += takes[i]


def _span(number: int, text: list[int], start: int, rows: int, pages: array[int]) -> Span:
    """Every row of it is asked about, as if all but the first were guesses."""
    return Span(number, start, tuple(text[start : start + rows]), 1, pages, GREEDY, text, len(text))


def _pages(rng: random.Random, lengths: list[int], available: int) -> list[array[int]]:
    """Pages for each text, anywhere; page 0 is the trash."""
    numbers = [-(-length // PAGE) for length in lengths]
    drawn = iter(rng.sample(range(1, available + 1), sum(numbers)))
    return [array("i", [next(drawn) for _ in range(number)]) for number in numbers]
