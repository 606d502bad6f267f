"""Score a layer set: one parallel pass over committed text, counting the tokens that it predicts right.

Teacher-forced: each row is given the committed tokens before it and predicts the next one. The text comes
from live sequences, at their positions and over their canonical KV, and from the ends of recent answers, read
again. The pass writes only the scorer's own pages.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samewise.draft.tuning import DEFAULTS, SearchTuning
from samewise.execute.pack import pack_fast, pack_frame
from samewise.execute.runner import FastPath, Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels.attention.base import PAGE
from samewise.model.views import LayerViews
from samewise.types import Ask, LayerSet, Sampling, Span


class TextPiece(NamedTuple):
    """A run of committed text, and the tokens that its rows from `first_row` on have to predict."""

    span: Span  # its rows are in the scorer's pages
    first_row: int
    targets: tuple[int, ...]


class LayerSetScore(NamedTuple):
    """Tokens predicted right, and of each greedy row its confidence and whether it was right."""

    num_right: int
    num_targets: int
    confidences: list[tuple[float, bool]]

    @property
    def rate(self) -> float:
        """The match rate."""
        return self.num_right / self.num_targets


class LayerSetScorer:
    """Scores layer sets on recently committed text. Owns its KV pages and the paths of recent sets."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        views: LayerViews,
        pages: range,
        tuning: SearchTuning = DEFAULTS.search,
    ) -> None:
        self._runner, self._sampler, self._views = runner, sampler, views
        self._pages, self._tuning = pages, tuning
        self.window = min(tuning.window, len(pages) * PAGE)
        self._piece_len = tuning.piece_pages * PAGE
        self._turn = 0
        self._answers: deque[tuple[int, ...]] = deque(maxlen=tuning.recent_answers)
        self._eager_path = FastPath(runner.model, None)  # modules, so that hooks run
        self._paths: dict[LayerSet, FastPath] = {}
        self._hooks: list[RemovableHandle] = []  # on the model's modules, while `residual_shares` runs

    def path(self, skipped: LayerSet) -> FastPath:
        """The path that skips these sublayers. The most recently used paths are kept."""
        path = self._paths.pop(skipped, None) or self._runner.skip_path(self._views, skipped)
        self._paths[skipped] = path
        while len(self._paths) > self._tuning.max_paths:
            del self._paths[next(iter(self._paths))]
        return path

    # ---- the text

    def add_answer(self, tokens: list[int], prompt_len: int) -> None:
        """Keep the end of an answer that has ended."""
        if len(tokens) - prompt_len >= self._piece_len:
            self._answers.append(tuple(tokens[-self._piece_len :]))

    def forget_answers(self) -> None:
        """Drop the ended answers: they were about another topic."""
        self._answers.clear()

    def gather(self, asks: list[Ask]) -> list[TextPiece]:
        """Pieces of the text committed last, as many rows as the window has; [] if there is too little.

        Live sequences come first, another one each time, and share the window evenly.
        """
        pieces: list[TextPiece] = []
        rows_left, free_pages = self.window, list(self._pages)
        self._turn += 1
        order = asks[self._turn % len(asks) :] + asks[: self._turn % len(asks)]
        rows_each = min(self._piece_len, max(PAGE, self.window // len(asks)))
        for ask in order:
            if ask.guide is not None:  # the grammar's masks at earlier positions are not known any more
                continue
            piece = _live_piece(ask, min(rows_left, rows_each + PAGE - 1), free_pages)
            if piece is not None:
                pieces.append(piece)
                rows_left -= len(piece.span.inputs)
        num = min(rows_left, len(free_pages) * PAGE) // self._piece_len
        ended = [_ended_piece(tokens, free_pages) for tokens in list(reversed(self._answers))[:num]]
        if sum(len(piece.targets) for piece in pieces + ended) < self._tuning.min_targets:
            return []
        return pieces + self._with_own_targets(ended)

    def _with_own_targets(self, pieces: list[TextPiece]) -> list[TextPiece]:
        """Ended answers lack their context here: the targets are what the full model predicts without it."""
        if not pieces:
            return []
        tokens = iter(self._predict(pieces, self.path(LayerSet()))[0])
        return [piece._replace(targets=tuple(next(tokens) for _ in piece.targets)) for piece in pieces]

    def recover(self) -> None:
        """Take the hooks of an unfinished call from the model."""
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    # ---- scores

    def score(self, pieces: list[TextPiece], skipped: LayerSet) -> LayerSetScore:
        """How often the model without these sublayers predicts the targets; the full model always does."""
        targets = [token for piece in pieces for token in piece.targets]
        if not skipped:
            return LayerSetScore(len(targets), len(targets), [])
        tokens, confidences = self._predict(pieces, self.path(skipped))
        right = [a == b for a, b in zip(tokens, targets, strict=True)]
        greedy = [(c, r) for c, r in zip(confidences, right, strict=True) if c is not None]
        return LayerSetScore(sum(right), len(targets), greedy)

    @torch.inference_mode()
    def residual_shares(self, pieces: list[TextPiece]) -> list[tuple[float, float]]:
        """Norm of what each layer's attention and MLP add to the residual stream, over the stream's norm."""
        shares: dict[nn.Module, float] = {}
        stream: list[torch.Tensor] = []

        def enter(_: nn.Module, args: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
            stream[:] = [args[0] if args else named["hidden_states"]]

        def leave(module: nn.Module, _: object, out: object) -> None:
            added = out[0] if isinstance(out, tuple) else out
            assert isinstance(added, torch.Tensor)
            norm = stream[0].float().norm(dim=-1).clamp_min(1e-12)
            shares[module] = float((added.float().norm(dim=-1) / norm).mean())

        try:
            for layer, sublayers in self._views.layers():
                self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks += [sublayer.register_forward_hook(leave) for sublayer in sublayers]
            self._logits(pieces, self._eager_path)
        finally:
            self._remove_hooks()
        return [(shares[attention], shares[mlp]) for _, (attention, mlp) in self._views.layers()]

    @torch.inference_mode()
    def time_full_pass(self, asks: list[Ask], clock: Callable[[], float]) -> float:
        """Seconds of a fast pass that skips nothing, sampling included. Writes scratch KV, as drafts do."""
        seconds = 0.0
        for _ in range(2):  # the first one may compile or capture
            began = clock()
            inputs = pack_fast(asks, self._runner.fast_staging(len(asks)))
            logits = self._runner.fast(inputs)[: len(asks)].float()
            self._sampler.sample(logits, []).tokens.tolist()
            seconds = clock() - began
        return seconds

    @torch.inference_mode()
    def _predict(self, pieces: list[TextPiece], path: FastPath) -> tuple[list[int], list[float | None]]:
        """The tokens that the rows with targets predict, and of greedy rows their probability."""
        logits = self._logits(pieces, path).float()
        rows: list[SamplingRow] = []
        plain: list[bool] = []
        for piece in pieces:
            span, sampling = piece.span, piece.span.sampling
            for i in range(piece.first_row, len(span.inputs)):
                if not sampling.plain:
                    position = span.start + i + 1
                    output = span.tokens[span.prompt_len : position] if sampling.edited else []
                    prompt = span.tokens[: span.prompt_len]
                    rows.append(SamplingRow(len(plain), sampling, prompt, output, position))
                plain.append(sampling.plain)
        sampled = self._sampler.sample(logits, rows)
        tokens: list[int] = sampled.tokens.tolist()
        probabilities: list[float] = sampled.logprobs.exp().tolist()
        return tokens, [p if greedy else None for p, greedy in zip(probabilities, plain, strict=True)]

    def _logits(self, pieces: list[TextPiece], path: FastPath) -> torch.Tensor:
        """Logits of the rows with targets, in order."""
        spans = [piece.span for piece in pieces]
        num_rows = sum(len(span.inputs) for span in spans)
        on_cpu = self._runner.device.type == "cpu"  # on CUDA padding is cheaper than a buffer for every size
        inputs = pack_frame(spans, self._runner.staging(num_rows if on_cpu else self.window))
        keep, start = list[int](), 0
        for piece in pieces:
            keep += range(start + piece.first_row, start + len(piece.span.inputs))
            start += len(piece.span.inputs)
        kept_rows = torch.tensor(keep, dtype=torch.int64, device=self._runner.device)
        return self._runner.fast_eager(replace(inputs, keep=kept_rows), path)


def _live_piece(ask: Ask, max_rows: int, free_pages: list[int]) -> TextPiece | None:
    """The end of a live sequence from a page border on, over its own pages before that; None if too short."""
    end = len(ask.tokens) - 1  # the last token is only a target
    start = -(-max(end - max_rows, 0) // PAGE) * PAGE
    num_rows = end - start
    first_row = max(0, ask.prompt_len - 1 - start)  # tokens of the prompt are no targets
    num_pages = -(-num_rows // PAGE)
    if num_rows - first_row < PAGE // 2 or num_pages > len(free_pages):
        return None
    own_pages = array("i", [free_pages.pop() for _ in range(num_pages)])
    inputs, targets = tuple(ask.tokens[start:end]), tuple(ask.tokens[start + first_row + 1 : end + 1])
    pages = ask.pages[: start // PAGE] + own_pages
    span = Span(ask.seq_id, start, inputs, num_rows, pages, ask.sampling, ask.tokens, ask.prompt_len)
    return TextPiece(span, first_row, targets)


def _ended_piece(tokens: tuple[int, ...], free_pages: list[int]) -> TextPiece:
    """The end of a recent answer, read as if it began there. Its first half only gives context."""
    pages = array("i", [free_pages.pop() for _ in range(-(-len(tokens) // PAGE))])
    span = Span(-1, 0, tokens, len(tokens), pages, Sampling(), list(tokens), 1)
    first_row = len(tokens) // 2
    return TextPiece(span, first_row, tokens[first_row:])


__all__ = ["LayerSetScore", "LayerSetScorer", "TextPiece"]
