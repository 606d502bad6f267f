"""Proposers that the laws run: doubles that are wrong on purpose, and each real proposer made busy.

A busy proposer drafts whether or not that pays for so small a model: its clock is random, its layer search
never ends, its draft weights are quantized.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from samewise.draft.auto.auto import Auto
from samewise.draft.base import Fallback, Proposer
from samewise.draft.build import (
    MAKERS,
    MakeProposer,
    ProposerParts,
    make_auto,
    make_model,
    make_skip,
    make_tree_drafter,
)
from samewise.draft.cost_model import FrameCosts
from samewise.draft.decode import Decode
from samewise.draft.model import DraftModel
from samewise.draft.skip.search import ATTENTION, MLP, Incumbent, Prices, Search
from samewise.draft.skip.skip import Skip
from samewise.draft.tree_drafter import Sources
from samewise.draft.tree_proposer import TreeProposer
from samewise.draft.tuning import ModelTuning, SearchTuning, Tuning
from samewise.execute.load import Loaded
from samewise.model import fp8
from samewise.testing import Adversary, Bushy, Jitter
from samewise.types import Ask, LayerSet, Proposal


class RandomClock:
    """Advances by a random step per call: pacing may read a clock, output must not depend on it."""

    def __init__(self, seed: int = 0, steps: tuple[float, ...] = (1e-4, 1e-3, 1e-2)) -> None:
        self._random, self._now, self._steps = random.Random(seed), 0.0, steps

    def __call__(self) -> float:
        self._now += self._random.choice(self._steps)
        return self._now


def with_settings(parts: ProposerParts, **settings: Any) -> ProposerParts:
    return replace(parts, config=replace(parts.config, **settings))


def with_draft_model(parts: ProposerParts) -> ProposerParts:
    """The draft model is the target model with noise on its weights, so some drafts are wrong."""

    def load(_: Any) -> Loaded:
        assert parts.loaded is not None
        model = copy.deepcopy(parts.loaded.model)
        generator = torch.Generator(parts.runner.device).manual_seed(1)
        with torch.no_grad():
            for tensor in model.parameters():
                noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
                tensor.add_((0.01 * noise).to(tensor.dtype))
        return replace(parts.loaded, model=model)

    return replace(with_settings(parts, proposer="model", draft_model="draft"), load=load)


# -- doubles ------------------------------------------------------------------------------------------


def jitter(parts: ProposerParts) -> Jitter:
    """Drafts of which about half are right."""
    return Jitter(parts, scale=0.6, num=4)


def adversary(parts: ProposerParts) -> Adversary:
    """Random drafts."""
    return Adversary(parts.vocab)


def bushy(parts: ProposerParts) -> Bushy:
    """Draft trees."""
    return Bushy(parts, scale=0.8, num=4)


class BuggyProposer(Proposer):
    """Returns the proposals of `bug(asks)` without checking them."""

    name = "buggy"

    def __init__(self, bug: Callable[[list[Ask]], list[Proposal]]) -> None:
        self._bug = bug

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        return self._bug(asks)


def trees(parts: ProposerParts) -> TreeProposer:
    """Four guesses for each sequence, from texts and rows, whatever they cost."""
    frames, tuning = FrameCosts(parts.runner.sizes), replace(parts.tuning.trees, max_nodes=4, min_prob=0.0)
    frames.observe(1, 1.0)
    return TreeProposer(make_tree_drafter(parts.vocab, Sources.ALL, tuning), Sources.ALL, tuning, frames)


# -- decode and draft models --------------------------------------------------------------------------


def decode(parts: ProposerParts) -> Decode:
    """Regular decoding."""
    return MAKERS["decode"](with_settings(parts, proposer="decode", draft_weights="same"))


def decode_int4(parts: ProposerParts) -> Decode:
    """Regular decoding with the fewest bits per weight that the device has: some drafts are wrong."""
    if parts.runner.device.type != "cpu":
        return decode_int8(parts)
    return MAKERS["decode"](with_settings(parts, proposer="decode", draft_weights="int4"))


def decode_int8(parts: ProposerParts) -> Decode:
    """Regular decoding with eight bits per weight, also where that is slower."""
    form = "int8" if parts.runner.device.type == "cpu" else "fp8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_is_faster", lambda _: True)
        return MAKERS["decode"](with_settings(parts, proposer="decode", draft_weights=form))


def draft_model(parts: ProposerParts, *, standalone: bool = True) -> DraftModel:
    """A draft model that never pauses; by the random clock its drafts have any length."""
    tuning = Tuning(model=ModelTuning(min_steps=10**9))
    clock = RandomClock(steps=(0.0, 0.0, 0.0, 1e-2))  # most passes cost nothing: drafts are long
    return make_model(replace(with_draft_model(parts), clock=clock, tuning=tuning), standalone=standalone)


def draft_model_ahead(parts: ProposerParts) -> DraftModel:
    """The same, each pass launched before the tokens of the one before are known, as on CUDA."""
    return draft_model(replace(parts, chain=4))


def pausing_draft_model(parts: ProposerParts) -> DraftModel:
    """A draft model that pauses often."""
    tuning = Tuning(model=ModelTuning(min_steps=2, pause_frames=3, max_pause_frames=5))
    return make_model(replace(with_draft_model(parts), clock=RandomClock(), tuning=tuning))


# -- skip ---------------------------------------------------------------------------------------------


class EndlessSearch(Search):
    """A search that never ends and takes every candidate, also one that skips the first or last layer."""

    def __init__(self, layers: int) -> None:
        every_sublayer = [(i, kind) for i in range(layers) for kind in (ATTENTION, MLP)]
        super().__init__(layers, free=every_sublayer, tuning=SearchTuning(prior_loss=1.0, prior_loss_std=1.0))

    def score_several(
        self, scores: list[tuple[LayerSet, float]], incumbent_rate: float, trials: int, prices: Prices
    ) -> bool:
        super().score_several(scores, incumbent_rate, trials, prices)
        self.open, self.best = True, Incumbent(*scores[-1], 1.0)
        return True


class FruitlessSearch(EndlessSearch):
    """A search that never ends and takes no candidate."""

    def score_several(
        self, scores: list[tuple[LayerSet, float]], incumbent_rate: float, trials: int, prices: Prices
    ) -> bool:
        super().score_several(scores, incumbent_rate, trials, prices)
        self.best = Incumbent(LayerSet())
        return False


def skip(
    parts: ProposerParts,
    search: type[Search] = EndlessSearch,
    *,
    every: int = 1,
    window: int = 64,
    standalone: bool = True,
) -> Skip:
    """Skipped layers, another set every few tokens, with no limit on the search's time."""
    parts = with_settings(parts, proposer="skip", draft_model=None, draft_weights="auto")
    tuning = Tuning(search=SearchTuning(every=every, window=window, min_targets=8))
    parts = replace(parts, clock=RandomClock(), tuning=tuning)
    proposer = make_skip(parts, search=search(len(parts.runner.arch.layers)), standalone=standalone)
    proposer.optimiser.budget.saved = 1e9
    return proposer


def fruitless_skip(parts: ProposerParts) -> Skip:
    """A search step every five tokens and never a draft."""
    return skip(parts, FruitlessSearch, every=5)


def gated_skip(parts: ProposerParts) -> Skip:
    """Skipped layers; the search's pages hold two windows, so one pass with gates scores two sets."""
    return skip(parts, window=32)


def chained_skip(parts: ProposerParts) -> Skip:
    """Skipped layers, four draft tokens per call, as on CUDA."""
    return skip(replace(parts, chain=4))


# -- auto ---------------------------------------------------------------------------------------------


def auto(parts: ProposerParts) -> Auto:
    """All drafters at once; by the random clock each of them pays now and then."""
    drafters = [draft_model(parts, standalone=False), decode_int4(parts), skip(parts, standalone=False)]
    return make_auto(replace(with_settings(parts, proposer="auto"), clock=RandomClock()), drafters)


PROPOSERS: dict[str, MakeProposer | None] = {
    "none": None,
    "jitter": jitter,
    "adversary": adversary,
    "decode": decode,
    "decode-int4": decode_int4,
    "decode-int8": decode_int8,
    "ngram": MAKERS["ngram"],
    "recycle": MAKERS["recycle"],
    "model": draft_model,
    "model-ahead": draft_model_ahead,
    "model-pausing": pausing_draft_model,
    "ngram+model": lambda parts: Fallback([MAKERS["ngram"](parts), draft_model(parts)]),
    "skip": skip,
    "skip-chain4": chained_skip,
    "skip-gated": gated_skip,
    "skip-fruitless": fruitless_skip,
    "ngram+skip": lambda parts: Fallback([MAKERS["ngram"](parts), skip(parts)]),
    "bushy": bushy,
    "trees": trees,
    "auto": auto,
}
