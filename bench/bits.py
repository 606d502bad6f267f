"""Counts rows whose bits depend on the frame they are in, over random packings, sizes and neighbours.

Random texts, two of them long, are computed one at a time: the reference. Then all of them are computed again
in frames of every size the engine has, with random cuts, in random order, on other pages each time, over
whatever those pages held before. Every fourth frame is a prefill frame, where only the last row of each span
counts and the head may skip the others. A row differs if its token, the bits of its log-probability or the
digest of its logits' bits differs.
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

SHORTEST, LONGEST, LONG = 40, 300, 2500  # tokens of a text; two texts are LONG
PREFILL_SHARE = 0.25  # of the frames
GREEDY = Sampling()


class FrameRunner:
    """Runs spans as frames of an idle engine and returns the result of every row."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._logits: list[torch.Tensor] = []
        self._staged: list[tuple[Any, list[int] | None]] = []

    @torch.inference_mode()
    def rows(self, spans: list[Span]) -> torch.Tensor:
        """[R, 3] of the rows from each span's last given one on: token, logprob bits, logits' digest."""
        runner, num_rows = type(self.engine.runner), 0
        wanted: list[int] = []
        for span in spans:
            wanted += range(num_rows + span.given - 1, num_rows + len(span.inputs))
            num_rows += len(span.inputs)
        self._logits.clear()
        self._staged.clear()
        with after(runner, "frame", self._logits.append), after(runner, "stage_frame", self._staged.append):
            truth = self.engine.verifier.run(spans)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        (logits,), ((_, head_rows),) = self._logits, self._staged
        index = {row: i for i, row in enumerate(head_rows)} if head_rows is not None else range(num_rows)
        results = torch.empty(len(wanted), 3, dtype=torch.int64)
        results[:, :2] = truth.packed[wanted, :2]
        results[:, 2] = digest(logits[[index[row] for row in wanted]]).cpu()
        return results


def digest(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R]: integer sums of the bits, weighted by index; exact, so independent of summation order."""
    integer = {2: torch.int16, 4: torch.int32}[logits.element_size()]
    index = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int64)
    weights = ((index * 0x9E3779B1 + 0x7F4A7C15) & 0x3FFFFFFF) | 1
    blocks = [(block.view(integer).long() * weights).sum(1) for block in logits.contiguous().split(64)]
    return torch.cat(blocks)


def check(engine: Engine, rows: int, seed: int = 0) -> dict[str, Any]:
    """Compare at least this many rows with the reference."""
    rng, runner, sizes = random.Random(seed), FrameRunner(engine), tuple(engine.runner.sizes)
    longest = min(LONGEST, engine.max_model_len)
    # Texts for three of the widest frame, or up to 24 if that is more; fewer where few rows are wanted.
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
        parts = [
            runner.rows([_span(number, text, start, min(engine.parts.frame_rows, len(text) - start), pages)])
            for start in range(0, len(text), engine.parts.frame_rows)
        ]
        truth.append(torch.cat(parts))
    compared = differing = frames = 0
    by_size: dict[int, list[int]] = {size: [0, 0] for size in sizes}
    while compared < rows:
        pages = _pages(rng, lengths, available)
        for spans in packings(rng, texts, pages, sizes):
            results = runner.rows(spans)
            expected = torch.cat(
                [truth[s.seq_id][s.start + s.given - 1 : s.start + len(s.inputs)] for s in spans]
            )
            wrong, used = int((results != expected).any(1).sum()), sum(len(span.inputs) for span in spans)
            counts = by_size[min(size for size in sizes if size >= used)]
            counts[0], counts[1] = counts[0] + len(results), counts[1] + wrong
            compared, differing, frames = compared + len(results), differing + wrong, frames + 1
    return {
        "rows": compared, "differing": differing, "frames": frames, "texts": len(texts),
        "by_size": {size: {"rows": a, "differing": b} for size, (a, b) in by_size.items() if a},
    }  # fmt: skip


def packings(
    rng: random.Random, texts: list[list[int]], pages: list[array[int]], sizes: tuple[int, ...]
) -> Iterator[list[Span]]:
    """The spans of frames that hold every row of every text once; each frame has a random size.

    Small sizes are drawn more often, so that they hold a comparable share of the rows.
    """
    done, shares = [0] * len(texts), [size**-0.5 for size in sizes]
    while True:
        left = {i: len(text) - done[i] for i, text in enumerate(texts) if done[i] < len(text)}
        if not left:
            return
        (drawn,) = rng.choices(range(len(sizes)), shares)
        least = sizes[drawn - 1] + 1 if drawn else 1
        rows = min(rng.randint(least, sizes[drawn]), sum(left.values()))
        order = rng.sample(sorted(left), len(left))
        prefill, decoding = rng.random() < PREFILL_SHARE, rng.random() < 1 / 3  # decoding: one row per text
        takes: dict[int, int] = {}
        for i in order:
            room = min(left[i], rows)
            takes[i] = min(room, 1 if decoding else rng.choice((1, rng.randint(1, 33), left[i])))
            rows -= takes[i]
        for i in order:  # free rows go to the texts that have rows left
            more = min(rows, left[i] - takes[i])
            takes[i], rows = takes[i] + more, rows - more
        spans = [_span(i, texts[i], done[i], takes[i], pages[i]) for i in order if takes[i]]
        yield [span._replace(given=len(span.inputs)) for span in spans] if prefill else spans
        for i in order:
            done[i] += takes[i]


def _span(number: int, text: list[int], start: int, rows: int, pages: array[int]) -> Span:
    """A span whose every row counts: the first is given, the others are drafted."""
    return Span(number, start, tuple(text[start : start + rows]), 1, pages, GREEDY, text, len(text))


def _pages(rng: random.Random, lengths: list[int], available: int) -> list[array[int]]:
    """Random pages for each text; page 0 is the trash page."""
    numbers = [-(-length // PAGE) for length in lengths]
    drawn = iter(rng.sample(range(1, available + 1), sum(numbers)))
    return [array("i", [next(drawn) for _ in range(number)]) for number in numbers]
