"""Build the proposer that a configuration names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from samewise.config import EngineConfig
from samewise.counters import Counters
from samewise.draft.auto.auto import Auto
from samewise.draft.base import Drafter, Fallback, NoDrafts, Proposer
from samewise.draft.cost_model import FrameCosts
from samewise.draft.decode import Decode
from samewise.draft.model import READ_ROWS, DraftModel
from samewise.draft.ngram import Ngram
from samewise.draft.quantized import fp8_copy, packed_copy
from samewise.draft.skip.layer_set_store import LayerSetStore
from samewise.draft.skip.pricing import Pricing
from samewise.draft.skip.score_layer_set import Rehearsal
from samewise.draft.skip.search import Search
from samewise.draft.skip.skip import Skip
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.errors import BadParameter
from samewise.execute.budget import count_pages
from samewise.execute.choices import pick_draft_quantizer, pick_linear
from samewise.execute.load import Loaded, load, refuse_other_vocabulary
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.model.linear import FrameLinear, pack_linears
from samewise.model.rope import pin_rope
from samewise.model.surgery import copy_modules

log = logging.getLogger("samewise")

MakeProposer = Callable[["ProposerParts"], Proposer]


@dataclass(frozen=True, slots=True)
class ProposerParts:
    """What a proposer may be built from."""

    runner: Runner
    sampler: Sampler
    vocab: int
    config: EngineConfig = field(default_factory=EngineConfig)
    frames: FrameCosts = field(default_factory=lambda: FrameCosts((1,)))
    clock: Callable[[], float] = time.perf_counter
    loaded: Loaded | None = None
    max_model_len: int = 0
    load: Callable[[EngineConfig], Loaded] = load
    ahead: bool = False
    private: range = range(0)  # pages nobody else uses
    counters: Counters = field(default_factory=Counters)  # the engine's own, for reading
    tuning: Tuning = DEFAULTS

    @property
    def chain(self) -> int:
        """Fast passes to launch before waiting: some where the device runs beside the host."""
        return 4 if self.runner.device.type == "cuda" else 1


def _decode(parts: ProposerParts) -> Decode:
    """Regular decoding, with cheaper weights where that is asked for or pays."""
    runner, copy = parts.runner, None
    quantize = pick_draft_quantizer(parts.config.draft_weights, runner.model, runner.device)
    if parts.config.draft_weights == "fp8":
        copy = fp8_copy(runner)
    elif quantize is not None:
        copy = packed_copy(runner, quantize)
    return Decode(runner, parts.sampler, copy=copy, chain=parts.chain)


def _model(parts: ProposerParts) -> DraftModel:
    """A draft model beside the model."""
    assert parts.loaded is not None
    config = replace(
        parts.config, model=parts.config.draft_model or "", revision=None, max_model_len=None,
        kv_memory=parts.config.kv_memory if parts.config.kv_memory is not None else 0.1,
    )  # fmt: skip
    draft = parts.load(config)
    refuse_other_vocabulary(parts.loaded, draft, config.model)
    device, runner = parts.runner.device, parts.runner
    model = copy_modules(draft.model.to(device))
    longest_draft = min(parts.max_model_len, draft.arch.max_positions)
    pin_rope(model, longest_draft)
    if pick_linear(config.linear, device) == "native":
        pack_linears(model)
    num_pages = count_pages(config, draft.arch, longest_draft, device)
    own = Runner(
        model, draft.arch, runner.kernel, num_pages=num_pages, sizes=(READ_ROWS,),
        max_rows=max(READ_ROWS, config.max_num_seqs), max_model_len=longest_draft,
        dtype=next(model.parameters()).dtype, device=device, compile=False,
    )  # fmt: skip
    return DraftModel(own, parts.sampler, num_pages, longest_draft)


def _skip_if_possible(parts: ProposerParts) -> list[Drafter]:
    """`skip`, where the model has layers to leave out and they can be told apart."""
    try:
        made = _skip(parts, alone=False)
    except BadParameter as reason:
        log.info("auto goes without skip: %s", reason)
        return []
    return [made] if made.possible else []


def _skip(parts: ProposerParts, *, alone: bool = True) -> Skip:
    """The model itself, with a layer set that finds itself."""
    config, runner = parts.config, parts.runner
    views = runner.views()
    search = Search(views.num_layers, seed=config.seed % 2**32, rounds=config.search_rounds)
    rehearsal = Rehearsal(runner, parts.sampler, views, parts.private, window=config.search_window)
    weights = [views.sublayer_bytes(layer) for layer in range(views.num_layers)]
    linears = sum(m.weight.nbytes for m in runner.model.modules() if isinstance(m, FrameLinear))
    rest = max(0.0, linears - sum(attention + mlp for attention, mlp in weights))  # the head, mostly
    pricing = Pricing(weights, rest, runner.kv_bytes, parts.frames, config.draft_tokens)
    made = Skip(
        runner, parts.sampler, rehearsal, search, pricing, parts.frames, parts.counters, parts.clock,
        store=LayerSetStore(config.workload), every=config.search_every, share=config.search_share, chain=parts.chain,
        alone=alone,
    )  # fmt: skip
    return made


def _auto(parts: ProposerParts) -> Auto:
    """All that could pay here: suffix matches, and a draft model and cheaper decoding if there are."""
    config, runner = parts.config, parts.runner
    drafters: list[Drafter] = [_model(parts)] if config.draft_model else []
    if (
        config.draft_weights == "fp8"
        or pick_draft_quantizer(config.draft_weights, runner.model, runner.device) is not None
    ):
        drafters.append(_decode(parts))
    drafters += _skip_if_possible(parts)
    return Auto(
        Ngram(), drafters, parts.frames, parts.clock, most=config.draft_tokens, restful=parts.ahead,
        explain=config.explain,
    )  # fmt: skip


MAKERS: dict[str, MakeProposer] = {
    "auto": _auto,
    "decode": _decode,
    "model": _model,
    "ngram": lambda _: Ngram(),
    "none": lambda _: NoDrafts(),
    "skip": _skip,
}


def maker_of(config: EngineConfig) -> MakeProposer:
    """How to build what a configuration names."""
    makers = [MAKERS[name] for name in config.proposers]
    return makers[0] if len(makers) == 1 else lambda parts: Fallback([make(parts) for make in makers])


__all__ = ["MAKERS", "MakeProposer", "ProposerParts", "maker_of"]
