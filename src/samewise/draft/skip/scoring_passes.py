"""Passes over text that was committed, through layer sets: what each set would have drafted.

Teacher-forced: each row is given the committed tokens before it and predicts the next one. Two ways: a pass
for each set that leaves its sublayers out (`PassPerSet`, on CPUs: a pass saves the time of what it skips), or
one captured pass for several sets at once (`GatedPass`, on CUDA: a pass takes about as long as a frame, where
a set's own modules, launched one by one, would take many times as long). Only the search's pages are written.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samewise.draft.skip.recent_text import TextPiece
from samewise.execute.pack import pack_frame
from samewise.execute.runner import FastPath, Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.execute.staging import StagingBuffer
from samewise.kernels.attention.base import PAGE
from samewise.kernels.graph import CapturedGraph
from samewise.model.gates import LayerGates
from samewise.model.views import LayerViews
from samewise.types import LayerSet, Span


class Prediction(NamedTuple):
    """What the rows with targets predict, in order; the probability is None where the row is not greedy."""

    tokens: list[int]
    probabilities: list[float | None]


class ScoringPasses(Protocol):
    """A way to let several sets predict the same text."""

    batch: int
    """Sets of one pass."""

    def warm(self) -> None:
        """Prepare: the first pass then takes no longer than others."""
        ...

    def predict(self, pieces: list[TextPiece], sets: list[LayerSet]) -> list[Prediction]:
        """One prediction for each set."""
        ...

    def residual_shares(self, pieces: list[TextPiece]) -> list[tuple[float, float]]:
        """Norm of what each layer's attention and MLP add to the residual stream, over the stream's norm."""
        ...

    def recover(self) -> None:
        """Undo what an unfinished call left in the model."""
        ...


class SetPaths:
    """Paths that skip sublayers. The most recently used ones are kept."""

    def __init__(self, runner: Runner, views: LayerViews, max_paths: int) -> None:
        self._runner, self._views, self._max_paths = runner, views, max_paths
        self._paths: dict[LayerSet, FastPath] = {}

    def path(self, skipped: LayerSet) -> FastPath:
        """The path of a set."""
        path = self._paths.pop(skipped, None) or self._runner.skip_path(self._views, skipped)
        self._paths[skipped] = path
        while len(self._paths) > self._max_paths:
            del self._paths[next(iter(self._paths))]
        return path


class PassPerSet:
    """One pass for each set, through the set's path, neither compiled nor captured."""

    batch = 1

    def __init__(self, runner: Runner, sampler: Sampler, views: LayerViews, paths: SetPaths) -> None:
        self._runner, self._sampler, self._views, self._paths = runner, sampler, views, paths
        self._full_path = FastPath(runner.model, None)  # modules, so that hooks run
        self._hooks: list[RemovableHandle] = []  # on the model's modules, while `residual_shares` runs

    def warm(self) -> None:
        """Nothing is compiled or captured."""

    @torch.inference_mode()
    def predict(self, pieces: list[TextPiece], sets: list[LayerSet]) -> list[Prediction]:
        """One prediction for each set."""
        predictions = []
        for skipped in sets:
            logits = self._logits(pieces, self._paths.path(skipped)).float()
            predictions += _sampled(self._sampler, logits, pieces, 1)
        return predictions

    @torch.inference_mode()
    def residual_shares(self, pieces: list[TextPiece]) -> list[tuple[float, float]]:
        """From hooks on the model's modules."""
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
            self._logits(pieces, self._full_path)
        finally:
            self.recover()
        return [(shares[attention], shares[mlp]) for _, (attention, mlp) in self._views.layers()]

    def recover(self) -> None:
        """Take the hooks of an unfinished call from the model."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def _logits(self, pieces: list[TextPiece], path: FastPath) -> torch.Tensor:
        """Logits of the rows with targets, in order."""
        spans = [piece.span for piece in pieces]
        inputs = pack_frame(spans, self._runner.staging(_num_rows(pieces)))
        kept = torch.tensor(_target_rows(pieces), dtype=torch.int64, device=self._runner.device)
        return self._runner.fast_eager(replace(inputs, keep=kept), path)


class GatedPass:
    """One pass for several sets at once, each with rows, gates and pages of its own; captured on CUDA.

    The pass has `batch` times `window` rows, of which those left over are padding. Text is placed in the
    pages of the first set; each further set has as many pages, behind them.
    """

    def __init__(
        self, runner: Runner, sampler: Sampler, views: LayerViews, *, window: int, batch: int
    ) -> None:
        self._runner, self._sampler = runner, sampler
        self.batch, self._window = batch, window
        self._pages_each = -(-window // PAGE)
        self._gates = LayerGates(views.num_layers, batch * window, runner.device)
        self._path = FastPath(views.gated(self._gates), None)
        self._graph: CapturedGraph[tuple[torch.Tensor, torch.Tensor]] | None = None

    @torch.inference_mode()
    def warm(self) -> None:
        """On CUDA: capture the pass, which takes a fraction of a second."""
        if self._graph is None and self._runner.device.type == "cuda":
            pack_frame([], self._staging)
            self._graph = CapturedGraph(self._pass, self._runner.device)

    @torch.inference_mode()
    def predict(self, pieces: list[TextPiece], sets: list[LayerSet]) -> list[Prediction]:
        """One prediction for each set; as many passes as they need."""
        predictions = []
        for start in range(0, len(sets), self.batch):
            predictions += self._predict_together(pieces, sets[start : start + self.batch])
        return predictions

    @torch.inference_mode()
    def residual_shares(self, pieces: list[TextPiece]) -> list[tuple[float, float]]:
        """From a pass with all gates open."""
        self._run(pieces, [LayerSet()])
        return self._gates.shares(_num_rows(pieces))

    def recover(self) -> None:
        """Nothing is left in the model."""

    def _predict_together(self, pieces: list[TextPiece], sets: list[LayerSet]) -> list[Prediction]:
        logits, choices = self._run(pieces, sets)
        rows_each, target_rows = _num_rows(pieces), _target_rows(pieces)
        if not all(piece.span.sampling.plain for piece in pieces):
            rows = [i * rows_each + row for i in range(len(sets)) for row in target_rows]
            kept = torch.tensor(rows, dtype=torch.int64, device=logits.device)
            return _sampled(self._sampler, logits[kept].float(), pieces, len(sets))
        # Waits for the device: a frame launched behind this pass would be timed with it.
        tokens, probabilities = choices.tolist()
        return [
            Prediction(
                [int(tokens[start + row]) for row in target_rows],
                [probabilities[start + row] for row in target_rows],
            )
            for start in range(0, len(sets) * rows_each, rows_each)
        ]

    def _run(self, pieces: list[TextPiece], sets: list[LayerSet]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all rows [R, V], and the likeliest token of each and its probability [2, R]."""
        spans = [self._placed(piece.span, i) for i in range(len(sets)) for piece in pieces]
        self._gates.set(sets, _num_rows(pieces))
        self.warm()  # packs a frame of its own
        self._runner.store.flush_moves()
        pack_frame(spans, self._staging)
        return self._pass() if self._graph is None else self._graph()

    def _placed(self, span: Span, number: int) -> Span:
        """The span with its rows in the pages of the set of this number."""
        num_shared = span.start // PAGE
        moved = [page + number * self._pages_each for page in span.pages[num_shared:]]
        return span._replace(pages=span.pages[:num_shared] + array("i", moved))

    @property
    def _staging(self) -> StagingBuffer:
        return self._runner.staging(self._gates.num_rows)

    def _pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._runner.fast_eager(self._staging.inputs, self._path)
        # In parts: float32 copies of the logits take memory.
        return logits, torch.cat([_choices(part) for part in torch.split(logits, self._window)], dim=-1)


def _choices(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row [R, V], and its probability: [2, R], float64."""
    values = logits.float()
    top, ids = values.max(dim=-1)
    return torch.stack([ids.double(), (top - values.logsumexp(dim=-1)).exp().double()])


def _sampled(
    sampler: Sampler, logits: torch.Tensor, pieces: list[TextPiece], num_sets: int
) -> list[Prediction]:
    """By the requests' own sampling, from logits of the rows with targets, those of each set in turn."""
    rows: list[SamplingRow] = []
    plain: list[bool] = []
    for _ in range(num_sets):
        for piece in pieces:
            span, sampling = piece.span, piece.span.sampling
            for i in range(piece.first_row, len(span.inputs)):
                if not sampling.plain:
                    position = span.start + i + 1
                    output = span.tokens[span.prompt_len : position] if sampling.edited else []
                    prompt = span.tokens[: span.prompt_len]
                    rows.append(SamplingRow(len(plain), sampling, prompt, output, position))
                plain.append(sampling.plain)
    sampled = sampler.sample(logits, rows)
    tokens: list[int] = sampled.tokens.tolist()
    values: list[float] = sampled.logprobs.exp().tolist()
    probabilities = [p if greedy else None for p, greedy in zip(values, plain, strict=True)]
    num = len(plain) // num_sets
    return [
        Prediction(tokens[start : start + num], probabilities[start : start + num])
        for start in range(0, len(plain), num)
    ]


def _num_rows(pieces: list[TextPiece]) -> int:
    return sum(len(piece.span.inputs) for piece in pieces)


def _target_rows(pieces: list[TextPiece]) -> list[int]:
    """Rows that predict targets, where the pieces stand one behind the other."""
    rows, start = list[int](), 0
    for piece in pieces:
        rows += range(start + piece.first_row, start + len(piece.span.inputs))
        start += len(piece.span.inputs)
    return rows


__all__ = ["GatedPass", "PassPerSet", "Prediction", "ScoringPasses", "SetPaths"]
