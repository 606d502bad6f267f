"""How well a layer set would have guessed what was really said: one parallel pass over known text.

Teacher-forced: every position is given the committed tokens before it, and asked for the next one. Pieces
come from sequences that are live, at the positions and over the canonical KV they have, and from recent
answers, read anew. The pass writes private pages alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from samewise.execute.pack import pack_frame
from samewise.execute.runner import FastPath, Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels.attention.base import PAGE
from samewise.model.views import LayerViews
from samewise.types import Ask, LayerSet, Sampling, Span

LENGTH = 2 * PAGE  # rows of a piece at most
RECENT = 8  # answers that are remembered
KEPT = 6  # paths through the model that are kept for another look


class Piece(NamedTuple):
    """A run of known text and which of its rows are asked what comes next."""

    span: Span  # in private pages from its start on
    first: int  # its first row that is asked
    targets: tuple[int, ...]  # what comes next, for that row and those after it


class Told(NamedTuple):
    """How a layer set fared on known text."""

    right: int
    asked: int
    sure: list[tuple[float, bool]]  # of each greedy row: how sure it was, and whether it was right

    @property
    def rate(self) -> float:
        """How often it said what came next."""
        return self.right / self.asked


class Rehearsal:
    """Scores layer sets on text that was committed lately. Owns the private pages."""

    def __init__(
        self, runner: Runner, sampler: Sampler, views: LayerViews, pages: range, *, window: int
    ) -> None:
        self._runner, self._sampler, self._views = runner, sampler, views
        self._pages, self.window = pages, min(window, len(pages) * PAGE)
        self._turn = 0
        self._recent: deque[tuple[int, ...]] = deque(maxlen=RECENT)
        self._eager_path = FastPath(runner.model, None)  # modules, so that hooks run
        self._paths: dict[LayerSet, FastPath] = {}

    def remember(self, tokens: list[int], prompt_len: int) -> None:
        """An answer has ended; its last tokens may be rehearsed later."""
        if len(tokens) - prompt_len >= LENGTH:
            self._recent.append(tuple(tokens[-LENGTH:]))

    def path(self, skipped: LayerSet) -> FastPath:
        """The way through the model that leaves these sublayers out. The latest few are kept."""
        path = self._paths.pop(skipped, None) or self._runner.skipping(self._views, skipped)
        self._paths[skipped] = path
        while len(self._paths) > KEPT:
            del self._paths[next(iter(self._paths))]
        return path

    # ---- which text

    def gather(self, asks: list[Ask], least: int) -> list[Piece]:
        """Pieces of what was committed last, live sequences first, as many rows as the window has.

        Nothing where that is fewer than `least` tokens. The window is shared by all, whose turn it is first.
        """
        pieces: list[Piece] = []
        left, free = self.window, list(self._pages)
        self._turn += 1
        order = asks[self._turn % len(asks) :] + asks[: self._turn % len(asks)]
        each = min(LENGTH, max(PAGE, self.window // len(asks)))
        for ask in order:
            if ask.guide is not None:  # what its grammar allowed back then, nobody knows any more
                continue
            piece = _live(ask, min(left, each + PAGE - 1), free)
            if piece is not None:
                pieces.append(piece)
                left -= len(piece.span.inputs)
        texts = list(reversed(self._recent))[: min(left // LENGTH, len(free) * PAGE // LENGTH)]
        fresh = [_again(text, free) for text in texts]
        if sum(len(piece.targets) for piece in pieces + fresh) < least:
            return []
        return pieces + self._answered(fresh)

    def forget(self) -> None:
        """What was said so far is about something else."""
        self._recent.clear()

    def _answered(self, pieces: list[Piece]) -> list[Piece]:
        """FrameLog answers stand without what came before: what the whole model says there is the truth."""
        if not pieces:
            return []
        said = iter(self._says(pieces, self.path(LayerSet()))[0])
        return [piece._replace(targets=tuple(next(said) for _ in piece.targets)) for piece in pieces]

    # ---- how well

    def agreement(self, pieces: list[Piece], skipped: LayerSet) -> Told:
        """How often the model without these sublayers says what came next."""
        targets = [token for piece in pieces for token in piece.targets]
        said, sure = self._says(pieces, self.path(skipped))
        right = [a == b for a, b in zip(said, targets, strict=True)]
        told = [(share, held) for share, held in zip(sure, right, strict=True) if share is not None]
        return Told(sum(right), len(targets), told)

    @torch.inference_mode()
    def shares(self, pieces: list[Piece]) -> list[tuple[float, float]]:
        """How much each layer's attention and MLP add to the residual stream, as a share of it."""
        found: dict[nn.Module, float] = {}
        stream: list[torch.Tensor] = []
        handles = []

        def enter(_: nn.Module, args: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
            stream[:] = [args[0] if args else named["hidden_states"]]

        def leave(module: nn.Module, _: object, out: object) -> None:
            added = out[0] if isinstance(out, tuple) else out
            assert isinstance(added, torch.Tensor)
            whole = stream[0].float().norm(dim=-1).clamp_min(1e-12)
            found[module] = float((added.float().norm(dim=-1) / whole).mean())

        for layer, parts in self._views.layers():
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles += [part.register_forward_hook(leave) for part in parts]
        try:
            self._look(pieces, self._eager_path)
        finally:
            for handle in handles:
                handle.remove()
        return [(found[attention], found[mlp]) for _, (attention, mlp) in self._views.layers()]

    @torch.inference_mode()
    def _says(self, pieces: list[Piece], path: FastPath) -> tuple[list[int], list[float | None]]:
        """What every row that is asked says, and how surely, where it is greedy."""
        logits = self._look(pieces, path).float()
        draws: list[SamplingRow] = []
        plain: list[bool] = []
        for piece in pieces:
            span, sampling = piece.span, piece.span.sampling
            for place in range(piece.first, len(span.inputs)):
                if not sampling.plain:
                    position = span.start + place + 1
                    before = span.tokens[span.prompt_len : position] if sampling.edited else []
                    draws.append(
                        SamplingRow(len(plain), sampling, span.tokens[: span.prompt_len], before, position)
                    )
                plain.append(sampling.plain)
        picks = self._sampler.sample(logits, draws)
        sure: list[float] = picks.logprobs.exp().tolist()
        said: list[int] = picks.tokens.tolist()
        return said, [share if greedy else None for share, greedy in zip(sure, plain, strict=True)]

    def _look(self, pieces: list[Piece], path: FastPath) -> torch.Tensor:
        """Logits of the rows that are asked, in order."""
        spans = [piece.span for piece in pieces]
        rows = sum(len(span.inputs) for span in spans)
        on_cpu = self._runner.device.type == "cpu"  # elsewhere padding is cheaper than staging for every size
        batch = pack_frame(spans, self._runner.staging(rows if on_cpu else self.window))
        keep, first = list[int](), 0
        for piece in pieces:
            keep += range(first + piece.first, first + len(piece.span.inputs))
            first += len(piece.span.inputs)
        wanted = torch.tensor(keep, dtype=torch.int64, device=self._runner.device)
        return self._runner.look(replace(batch, keep=wanted), path)


def _live(ask: Ask, rows: int, free: list[int]) -> Piece | None:
    """The end of a live sequence, from a page border on; its own pages before that, private ones after."""
    end = len(ask.tokens) - 1  # the last token is what the last row is asked
    start = -(-max(end - rows, 0) // PAGE) * PAGE
    rows = end - start
    first = max(0, ask.prompt_len - 1 - start)  # what the prompt goes on with, nobody said
    need = -(-rows // PAGE)
    if rows - first < PAGE // 2 or need > len(free):
        return None
    mine = array("i", [free.pop() for _ in range(need)])
    inputs, targets = tuple(ask.tokens[start:end]), tuple(ask.tokens[start + first + 1 : end + 1])
    pages = ask.pages[: start // PAGE] + mine
    span = Span(ask.seq_id, start, inputs, rows, pages, ask.sampling, ask.tokens, ask.prompt_len)
    return Piece(span, first, targets)


def _again(text: tuple[int, ...], free: list[int]) -> Piece:
    """A recent answer's end, read as if it began there."""
    pages = array("i", [free.pop() for _ in range(-(-len(text) // PAGE))])
    span = Span(-1, 0, text, len(text), pages, Sampling(), list(text), 1)
    first = len(text) // 2  # some of it is needed to know what it is about
    return Piece(span, first, text[first:])


__all__ = ["Piece", "Rehearsal", "Told"]
