"""What the laws share: cases to run, ways to run them, and what was heard, to the bit.

A law is a comparison with one reference: every case alone, on an engine that guesses nothing.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from samewise.draft.auto.auto import Auto, Known
from samewise.draft.base import First
from samewise.draft.build import MAKERS, MakeProposer, Parts
from samewise.draft.decode import Decode
from samewise.draft.model import DraftModel
from samewise.draft.skip.search import Best, Prices, Search
from samewise.draft.skip.skip import Skip
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.execute.runner import kv_page_bytes
from samewise.model import fp8
from samewise.model.arch import survey
from samewise.testing import Adversary, Forked, Jitter, Scripted, Transcript, tiny_config, tiny_engine
from samewise.types import Ask, Delta, LayerSet, Proposal, Sampling, Verdict

PAGE = 16
GREEDY = Sampling()


@dataclass(frozen=True)
class Setup:
    """Which model, on which machine. `frame_rows` is part of the contract, so part of the setup."""

    family: str
    device: str
    dtype: str
    frame_rows: int
    compile: bool = False
    linear: str = "auto"
    sizes: tuple[int, ...] | None = None  # of a frame; no bit depends on them

    def __str__(self) -> str:
        linear = "" if self.linear == "auto" else f"-{self.linear}"
        return f"{self.family}-{self.device}-{self.dtype}-{self.frame_rows}{linear}"

    def engine(
        self,
        make_proposer: MakeProposer | None = None,
        *,
        num_pages: int = 200,
        overrides: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Engine:
        """An engine of this setup; `num_pages` instead of kv_memory."""
        settings = {
            "device": self.device,
            "dtype": self.dtype,
            "frame_rows": self.frame_rows,
            "compile": self.compile,
            "linear": self.linear,
            "frame_sizes": self.sizes,
            "max_num_seqs": 2 * self.frame_rows,
            "proposer": "none",
        } | settings
        overrides = {"num_hidden_layers": 2} | (overrides or {})
        arch = survey(tiny_config(self.family, **overrides))
        settings["kv_memory"] = num_pages * kv_page_bytes(arch, getattr(torch, self.dtype))
        return tiny_engine(self.family, make_proposer=make_proposer, overrides=overrides, **settings)


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling = GREEDY
    most: int = 12
    verify: bool = True
    prompt_logprobs: int | None = None
    score_from: int | None = None
    salt: bytes = b""

    def add(self, engine: Engine) -> int:
        """Queue it."""
        return engine.add(
            self.prompt,
            self.sampling,
            max_tokens=self.most,
            verify=self.verify,
            prompt_logprobs=self.prompt_logprobs,
            score_from=self.score_from,
            salt=self.salt,
        )


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(256) for _ in range(length))


def warm(seed: int, **settings: Any) -> Sampling:
    """Sampled at temperature 0.8."""
    return Sampling(temperature=0.8, seed=seed, **settings)


CASES: tuple[Case, ...] = (
    Case("greedy-1", text(1)),
    Case("greedy-16", text(16), most=20),
    Case("greedy-33", text(33)),
    Case("warm-17", text(17), warm(3)),
    Case("warm-100", text(100), warm(2**63 + 5), most=9),
    Case("top-k-16", text(16, 1), warm(5, top_k=20)),
    Case("top-p-33", text(33, 1), warm(6, top_p=0.7)),
    Case("min-p-1", text(1, 1), warm(7, min_p=0.05)),
    Case("all-filters-17", text(17, 1), warm(8, top_k=40, top_p=0.9, min_p=0.01)),
    Case("presence-17", text(17, 2), Sampling(presence_penalty=1.5), most=16),
    Case("frequency-33", text(33, 2), warm(9, frequency_penalty=1.2), most=16),
    Case("repetition-16", text(16, 2), Sampling(repetition_penalty=1.4), most=16),
    Case("tops-17", text(17, 3), warm(10, top_logprobs=4)),
    Case("scored-33", text(33, 3), Sampling(), 5, prompt_logprobs=2),
)
NAMES = [case.name for case in CASES]


class Heard(Transcript):
    """A Transcript with the alternatives too, as bits. How much of it was cached is not compared."""

    __slots__ = ("num_cached",)  # outside __dict__, which is what a Transcript compares

    def __init__(self) -> None:
        super().__init__()
        self.tops: list[tuple[tuple[int, str], ...]] = []
        self.score_tops: list[tuple[tuple[int, str], ...]] = []
        self.stop_id: int | None = None
        self.num_cached = 0

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        super().take(delta)
        self.tops += [tuple((token, value.hex()) for token, value in top) for top in delta.tops]
        self.score_tops += [tuple((token, value.hex()) for token, value in top) for top in delta.score_tops]
        self.stop_id = delta.stop_id
        self.num_cached = delta.num_cached


def play(
    engine: Engine,
    cases: Iterable[Case],
    *,
    step: Callable[[Engine], list[Delta]] = Engine.step,
    arrivals: Iterable[int] | None = None,
    after: Callable[[Engine, int], None] | None = None,
    limit: int = 5000,
) -> list[Heard]:
    """Run cases to their end, each arriving at its step; pages are counted after every step."""
    todo = list(cases)
    when = [0] * len(todo) if arrivals is None else list(arrivals)
    heard = [Heard() for _ in todo]
    by_id: dict[int, Heard] = {}
    for clock in range(limit):
        for i, case in enumerate(todo):
            if when[i] == clock:
                by_id[case.add(engine)] = heard[i]
        if engine.idle and len(by_id) == len(todo):
            break
        for delta in step(engine):
            if delta.request_id in by_id:
                by_id[delta.request_id].take(delta)
        if after is not None:
            after(engine, clock)
        engine.check()
    else:
        raise AssertionError(f"not done after {limit} steps: {engine.stats()}")
    assert conserved(engine)
    return heard


def alone(engine: Engine, cases: Iterable[Case]) -> list[Heard]:
    """Each case by itself, one after the other."""
    return [play(engine, [case])[0] for case in cases]


def conserved(engine: Engine) -> bool:
    """Whether every page can be handed out again."""
    engine.check()
    return engine.scheduler.index.num_available == engine.scheduler.limits.num_pages - 1


@functools.cache
def plain_engine(setup: Setup) -> Engine:
    """The engine of reference: nothing guessed, nothing cached, so nothing remembered either."""
    return setup.engine(enable_prefix_caching=False)


def reference(setup: Setup, cases: Iterable[Case]) -> list[Heard]:
    """The truth: alone, nothing guessed, nothing cached."""
    return alone(plain_engine(setup), cases)


@functools.cache
def truth_of(setup: Setup) -> list[Heard]:
    """The truth of all cases."""
    return reference(setup, CASES)


def company(num: int, *, most: int = 40, verify: bool = True, seed: int = 77) -> list[Case]:
    """Strangers that keep generating."""
    return [
        Case(f"company-{i}", text(1 + i % 7, seed + i), warm(i), most, verify)
        for i in range(num)
    ]  # fmt: skip


def jitter(parts: Parts) -> Jitter:
    """Drafts that are right about half of the time."""
    return Jitter(parts, scale=0.6, num=4)


def adversary(parts: Parts) -> Adversary:
    """Random guesses."""
    return Adversary(parts.vocab)


def changed(parts: Parts, **settings: Any) -> Parts:
    return replace(parts, config=replace(parts.config, **settings))


def decode(parts: Parts) -> Decode:
    """Regular decoding."""
    return MAKERS["decode"](changed(parts, proposer="decode", draft_weights="same"))


def cheap(parts: Parts) -> Decode:
    """Regular decoding with the fewest bits a weight that the device has: wrong now and then."""
    if parts.runner.device.type != "cpu":
        return eight(parts)
    return MAKERS["decode"](changed(parts, proposer="decode", draft_weights="int4"))


def eight(parts: Parts) -> Decode:
    """Regular decoding with eight bits a weight, whether or not that is faster for so small a model."""
    form = "int8" if parts.runner.device.type == "cpu" else "fp8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_faster", lambda _: True)
        return MAKERS["decode"](changed(parts, proposer="decode", draft_weights=form))


def draft_model(parts: Parts) -> DraftModel:
    """The model itself, a little out of tune."""
    return MAKERS["model"](with_draft(parts))


def with_draft(parts: Parts) -> Parts:
    def load(_: Any) -> Loaded:
        assert parts.loaded is not None
        model = copy.deepcopy(parts.loaded.model)
        generator = torch.Generator(parts.runner.device).manual_seed(1)
        with torch.no_grad():
            for tensor in model.parameters():
                noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
                tensor.add_((0.01 * noise).to(tensor.dtype))
        return replace(parts.loaded, model=model)

    return replace(changed(parts, proposer="model", draft_model="draft"), load=load)


def auto(parts: Parts) -> Auto:
    """Everything at once, with drafters that would pay if the clock is to be believed."""
    cheaper = "int4" if parts.runner.device.type == "cpu" else "auto"
    parts = changed(with_draft(parts), proposer="auto", draft_weights=cheaper)
    made = MAKERS["auto"](replace(parts, clock=Fickle()))
    restless = skip(parts)
    restless._alone = False
    made._drafters["skip"] = Known(restless)
    return made


class Restless(Search):
    """A search that never ends and takes every candidate, whatever it skips: also first and last layers."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._free = [(i, kind) for i in range(layers) for kind in (0, 1)]
        self._before = np.ones(len(self._free)), np.ones(len(self._free))
        self._know()
        self.open = True

    def score(self, candidate: LayerSet, rate: float, incumbent: float, trials: int, prices: Prices) -> bool:
        super().score(candidate, rate, incumbent, trials, prices)
        self.open, self.best = True, Best(candidate, rate, 1.0)
        return True


def skip(parts: Parts) -> Skip:
    """Layers left out, another set every few tokens, with a search that may take all the time it wants."""
    parts = changed(parts, proposer="skip", draft_model=None, draft_weights="auto", search_every=1)
    made = MAKERS["skip"](replace(parts, clock=Fickle()))
    made._search, made._saved = Restless(made._search.layers), 1e9
    return made


class Barren(Restless):
    """A search that goes on and finds nothing."""

    def score(self, candidate: LayerSet, rate: float, incumbent: float, trials: int, prices: Prices) -> bool:
        super().score(candidate, rate, incumbent, trials, prices)
        self.best = Best(LayerSet())
        return False


def barren(parts: Parts) -> Skip:
    """Asked only now and then, for a step of a search that brings no guess."""
    made = skip(changed(parts, proposer="skip", draft_model=None, draft_weights="auto"))
    made._search, made._every = Barren(made._search.layers), 5
    return made


def chained_skip(parts: Parts) -> Skip:
    """The same, four guesses at a time, as on CUDA."""
    made = skip(parts)
    made._chain = 4
    return made


def forked(parts: Parts) -> Forked:
    """Drafts with branches."""
    return Forked(parts, scale=0.8, num=4)


class Fickle:
    """A clock that runs as it likes: pacing may look at it, output may not depend on it."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self._now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now += self._random.choice((1e-4, 1e-3, 1e-2))
        return self._now


PROPOSERS: dict[str, MakeProposer | None] = {
    "none": None,
    "jitter": jitter,
    "adversary": adversary,
    "decode": decode,
    "cheap": cheap,
    "eight": eight,
    "ngram": MAKERS["ngram"],
    "model": draft_model,
    "ngram+model": lambda parts: First([MAKERS["ngram"](parts), draft_model(parts)]),
    "skip": skip,
    "skip-4": chained_skip,
    "barren": barren,
    "ngram+skip": lambda parts: First([MAKERS["ngram"](parts), skip(parts)]),
    "forked": forked,
    "auto": auto,
}


@dataclass(frozen=True)
class Trial:
    """A setup under a proposer."""

    setup: Setup
    proposer: str
    chained: bool = False  # frames launched one behind the other, as on CUDA

    def __str__(self) -> str:
        return f"{self.setup}-{self.proposer}" + ("-chained" if self.chained else "")

    def engine(self, **settings: Any) -> Engine:
        """An engine to be tried."""
        if self.chained:
            settings = {"ahead": True} | settings
        return self.setup.engine(PROPOSERS[self.proposer], **settings)

    @property
    def truth(self) -> list[Heard]:
        """What it has to say to the cases."""
        return truth_of(self.setup)


class Script:
    """Guesses taken from known continuations, by prompt; `bend` may spoil them."""

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known = known

    def guesses(self, ask: Ask) -> list[int]:
        """All that is known to follow."""
        said = len(ask.tokens) - ask.prompt_len + len(ask.draft)
        return self.known.get(tuple(ask.tokens[: ask.prompt_len]), [])[said:]

    @classmethod
    def of(cls, cases: Iterable[Case], heard: Iterable[Heard]) -> "Script":
        """What was heard of these cases."""
        return cls({c.prompt: h.tokens for c, h in zip(cases, heard, strict=True)})

    def oracle(self, _: Parts) -> Scripted:
        """Guesses the whole truth, as far as there is room."""
        return Scripted(self.guesses)

    def wrong_once(self, place: int, num: int) -> MakeProposer:
        """One draft of `num` guesses for each sequence, of which the one at `place` is wrong."""
        done: set[int] = set()

        def script(ask: Ask) -> list[int]:
            if ask.seq_id in done:
                return []
            done.add(ask.seq_id)
            guesses = self.guesses(ask)[:num]
            guesses[place] = (guesses[place] + 1) % 256
            return guesses

        return lambda _: Scripted(script)


class Rude:
    """A proposer with a bug: `bug(asks)` → proposals, handed on as they are."""

    name = "rude"
    quiet = False

    def __init__(self, bug: Callable[[list[Ask]], list[Proposal]]) -> None:
        self._bug = bug

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        return self._bug(asks)

    def observe(self, verdicts: list[Verdict]) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass
