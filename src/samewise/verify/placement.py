"""The probe's known text, and ways to place it in frames: cut anywhere, at any row, among other sequences."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch

from samewise.execute.runner import Runner
from samewise.kernels import noise
from samewise.kernels.attention.base import PAGE
from samewise.types import ROOT, Sampling, Span

TEXT_LEN = 2 * PAGE
"""Tokens of the known text: two full pages, few enough for a start-up of seconds. Their logits' digest is a
contract fact, so the text and its seed are fixed."""
FAR_LEN = 3
"""Tokens of each piece that is run far into a context."""
FAR_STARTS = (272, 560)
"""Positions of far pieces, beside one near the end of the longest context: past one and past two splits of
the keys on CUDA, which are 256 keys each. Multiples of a page: a piece writes to a page of its own."""
MAX_POSITION = 4096
"""How far into a context the other sequences of a frame may stand."""


class PlacedFrame(NamedTuple):
    """A frame that holds one piece of the known text."""

    spans: tuple[Span, ...]
    first: int  # row of the piece
    length: int  # rows of the piece


Placement = tuple[PlacedFrame, ...]
"""One way to place the whole text."""


class ProbeText:
    """The known text, in pages 1, 2, …; then a page for far pieces, and one that other sequences share.

    Far pieces stand at far positions of a context whose pages are the text's in a random order, again and
    again: a long context without the time to read one. One fixed seed.
    """

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._rows, self._any_size = runner.frame_rows, runner.native and runner.elastic
        self._vocab = runner.arch.vocab
        self._random = random.Random(20)
        self._max_position = min(MAX_POSITION, max_model_len) - 1
        room = min((runner.store.num_pages - 3) * PAGE, max_model_len)
        length = min(TEXT_LEN, room)
        self._text = self._known_tokens(0, length)
        self._pages = array("i", range(1, -(-length // PAGE) + 1))
        self._far_page = len(self._pages) + 1
        self._scratch_page = len(self._pages) + 2
        self._far_tokens = self._known_tokens(1, FAR_LEN)
        last = (max_model_len - FAR_LEN) // PAGE * PAGE
        starts = {start for start in (*FAR_STARTS, last) if start <= last}
        self._far_starts = sorted(starts) if TEXT_LEN == length <= last else []

    def alone(self) -> Placement:
        """The text from row 0 on, nothing else in its frames."""
        frames, start = [], 0
        while start < len(self._text):
            length = min(self._rows, len(self._text) - start)
            frames.append(PlacedFrame((self._piece(start, length),), 0, length))
            start += length
        return tuple(frames)

    def among_others(self, frame_rows: int | None = None) -> Placement:
        """The text cut at a random place, each piece at a random row among random sequences.

        `frame_rows`: rows of each frame; by default the canonical number.
        """
        frames, start = [], 0
        full = frame_rows or self._rows
        while start < len(self._text):
            length = min(self._rows, len(self._text) - start)
            if start == 0:  # cut anywhere, but so that the rest fits few frames
                min_length = max(1, min(length, len(self._text) - self._rows))
                length = min(self._random.randint(min_length, length), max(1, len(self._text) - 1))
            # Where frames have any size, one full frame is enough; the others get a few more rows.
            rows = full if start == 0 or not self._any_size else min(full, length + 4)
            frames.append(self._frame_with(self._piece(start, length), rows))
            start += length
        return tuple(frames)

    def far(self) -> Placement:
        """Far pieces, each alone in a frame. Empty where the longest context is short."""
        return tuple(PlacedFrame((piece,), 0, len(piece.inputs)) for piece in self._far_pieces())

    def far_among_others(self) -> Placement:
        """Far pieces, each at a random row among random sequences."""
        rows = min(self._rows, FAR_LEN + 4) if self._any_size else self._rows
        return tuple(self._frame_with(piece, max(rows, len(piece.inputs))) for piece in self._far_pieces())

    def _known_tokens(self, text: int, length: int) -> list[int]:
        """Tokens from an integer hash: a digest over them must not depend on a library's random numbers."""
        return [_known_number(text, i) % self._vocab for i in range(length)]

    def _far_pieces(self) -> list[Span]:
        """Far pieces, cut so that each fits a frame."""
        pieces = []
        for start in self._far_starts:
            context = [self._pages[_known_number(2, i) % len(self._pages)] for i in range(start // PAGE)]
            pages = array("i", [*context, self._far_page])
            pieces += [
                _span(self._far_tokens[i : i + self._rows], start + i, pages)
                for i in range(0, FAR_LEN, self._rows)
            ]
        return pieces

    def _frame_with(self, piece: Span, rows: int) -> PlacedFrame:
        """A frame of this many rows with the piece at a random row, and random sequences before and after."""
        length = len(piece.inputs)
        before = self._random.randint(0, rows - length)
        others = self._other_sequences(before), self._other_sequences(rows - length - before)
        return PlacedFrame((*others[0], piece, *others[1]), before, length)

    def as_tree(self) -> Placement:
        """The text's end as a path through a draft tree, among nodes that are not of the text.

        Its nodes lie in other slots than the text's positions have. Empty where a frame is too small for it.
        """
        start = PAGE + 1
        path = self._text[start:]
        if not path or len(path) + 4 > self._rows:
            return ()
        wrong = [self._random.randrange(self._vocab) for _ in range(3)]
        tokens = [self._text[PAGE], *wrong[:2], *path, wrong[2]]
        parents = (ROOT, 0, ROOT, *range(2, len(path) + 1), 2)
        pages = array("i", [*self._pages[:1], self._far_page, self._scratch_page])
        tree = _span(tokens, PAGE, pages)._replace(given=1, parents=parents)
        before = PlacedFrame((self._piece(0, start),), 0, start)
        return before, PlacedFrame((tree,), 3, len(path))

    def in_pieces(self, sizes: Sequence[int]) -> Placement:
        """The text in pieces of these lengths, each alone in a frame; what is left in full frames."""
        frames, start = [], 0
        lengths = chain(sizes, repeat(self._rows))
        while start < len(self._text):
            length = min(next(lengths), self._rows, len(self._text) - start)
            frames.append(PlacedFrame((self._piece(start, length),), 0, length))
            start += length
        return tuple(frames)

    def _piece(self, start: int, length: int) -> Span:
        return _span(self._text[start : start + length], start, self._pages)

    def _other_sequences(self, rows: int) -> list[Span]:
        spans = []
        while rows:
            length = self._random.randint(1, rows)
            start = self._random.choice((0, self._random.randint(0, max(0, self._max_position - length))))
            tokens = [self._random.randrange(self._vocab) for _ in range(length)]
            pages = array("i", [self._scratch_page] * ((start + length) // PAGE + 1))
            spans.append(_span(tokens, start, pages))
            rows -= length
        return spans


def _known_number(text: int, i: int) -> int:
    high, low = noise.key(20, text, i)
    return high << 32 | low


def _span(tokens: list[int], start: int, pages: array[int]) -> Span:
    return Span(-1, start, tuple(tokens), len(tokens), pages, Sampling(), tokens, len(tokens))


def run_placement(runner: Runner, placement: Placement) -> torch.Tensor:
    """Float32 logits [rows, V] of the known text placed this way, on the CPU."""
    parts = []
    for spans, first, length in placement:
        inputs, keep = runner.stage_frame(list(spans), list(range(first, first + length)))
        logits = runner.frame(inputs)
        rows = slice(length) if keep is not None else slice(first, first + length)
        parts.append(logits[rows].float().cpu())  # waits: the staging buffer may be filled again
    return torch.cat(parts)


__all__ = [
    "FAR_LEN",
    "FAR_STARTS",
    "MAX_POSITION",
    "TEXT_LEN",
    "PlacedFrame",
    "Placement",
    "ProbeText",
    "run_placement",
]
