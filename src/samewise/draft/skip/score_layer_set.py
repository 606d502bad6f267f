"""Score layer sets: how many tokens of text committed lately each of them predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from samewise.draft.skip.recent_text import RecentText, TextPiece
from samewise.draft.skip.scoring_passes import GatedPass, PassPerSet, Prediction, ScoringPasses, SetPaths
from samewise.draft.tuning import DEFAULTS, SearchTuning
from samewise.execute.pack import pack_fast
from samewise.execute.runner import FastPath, Runner
from samewise.execute.sampling import Sampler
from samewise.kernels.attention.base import PAGE
from samewise.model.views import LayerViews
from samewise.types import Ask, LayerSet


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
    """Scores layer sets on recent text, as many at once as the search's KV pages allow.

    `pages`: of the search alone. Where they hold the window several times, several sets share a pass.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        views: LayerViews,
        pages: range,
        tuning: SearchTuning = DEFAULTS.search,
    ) -> None:
        self._runner, self._sampler = runner, sampler
        pages_each = min(len(pages), -(-tuning.window // PAGE))
        self.text = RecentText(pages[:pages_each], tuning)
        self._paths = SetPaths(runner, views, tuning.max_paths)
        self._passes: ScoringPasses
        batch = len(pages) // max(1, pages_each)
        if batch > 1:
            self._passes = GatedPass(runner, sampler, views, window=self.text.window, batch=batch)
        else:
            self._passes = PassPerSet(runner, sampler, views, self._paths)

    @property
    def batch(self) -> int:
        """Sets of one pass."""
        return self._passes.batch

    @property
    def num_rows(self) -> int:
        """Rows of a pass."""
        return self.batch * self.text.window

    def warm(self) -> None:
        """Prepare the passes, before any time is measured."""
        self._passes.warm()

    def recover(self) -> None:
        """Undo what an unfinished call left behind."""
        self._passes.recover()

    def path(self, skipped: LayerSet) -> FastPath:
        """The path that drafts without these sublayers."""
        return self._paths.path(skipped)

    def num_candidates(self, pieces: list[TextPiece], incumbent: LayerSet) -> int:
        """Candidates that can be scored in one pass beside the incumbent; at least one."""
        others = bool(incumbent) + any(piece.ended for piece in pieces)
        return max(1, self.batch - others)

    def score(self, pieces: list[TextPiece], sets: list[LayerSet]) -> list[LayerSetScore]:
        """How often the model without each set's sublayers predicts the targets; the full model always does.

        Ended answers lack their context here: their targets are what the full model predicts without it.
        """
        skipping = [skipped for skipped in sets if skipped]
        ended = [piece for piece in pieces if piece.ended]
        if ended and self.batch == 1:  # the full model reads only what it has to
            predictions = self._passes.predict(pieces, skipping)
            own = self._passes.predict(ended, [LayerSet()])[0].tokens
        elif ended:
            *predictions, full = self._passes.predict(pieces, [*skipping, LayerSet()])
            targeted = (piece for piece in pieces for _ in piece.targets)
            own = [token for token, piece in zip(full.tokens, targeted, strict=True) if piece.ended]
        else:
            predictions, own = self._passes.predict(pieces, skipping), []
        new = iter(own)
        targets = [next(new) if piece.ended else token for piece in pieces for token in piece.targets]
        scores = {skipped: _score(one, targets) for skipped, one in zip(skipping, predictions, strict=True)}
        scores[LayerSet()] = LayerSetScore(len(targets), len(targets), [])
        return [scores[skipped] for skipped in sets]

    def residual_shares(self, pieces: list[TextPiece]) -> list[tuple[float, float]]:
        """Norm of what each layer's attention and MLP add to the residual stream, over the stream's norm."""
        return self._passes.residual_shares(pieces)

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


def _score(prediction: Prediction, targets: list[int]) -> LayerSetScore:
    right = [a == b for a, b in zip(prediction.tokens, targets, strict=True)]
    greedy = [(p, r) for p, r in zip(prediction.probabilities, right, strict=True) if p is not None]
    return LayerSetScore(sum(right), len(targets), greedy)


__all__ = ["LayerSetScore", "LayerSetScorer"]
