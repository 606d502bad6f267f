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
from samewise.draft.fast_passes import FastPasses
from samewise.draft.model import DraftModel
from samewise.draft.model_passes import max_pass_rows
from samewise.draft.native.drafter import NativeDrafter
from samewise.draft.quantized import fp8_copy, packed_copy
from samewise.draft.skip.active_set import ActiveSet
from samewise.draft.skip.confidence import ConfidenceSampler
from samewise.draft.skip.layer_set_store import LayerSetStore
from samewise.draft.skip.optimiser import LayerSetOptimiser
from samewise.draft.skip.pacing import ConfidencePacing
from samewise.draft.skip.pricing import PassPricing
from samewise.draft.skip.score_layer_set import LayerSetScorer
from samewise.draft.skip.search import Search
from samewise.draft.skip.skip import Skip
from samewise.draft.tree_drafter import GrowsTrees, Sources, TreeDrafter
from samewise.draft.tree_proposer import TreeProposer
from samewise.draft.tuning import DEFAULTS, TreeTuning, Tuning
from samewise.errors import BadParameter, MachineError
from samewise.execute.budget import count_pages
from samewise.execute.choices import pick_draft_quantizer, pick_linear
from samewise.execute.load import Loaded, load, refuse_other_vocabulary
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.model.linear import FrameLinear, order_linears, pack_linears, stack_siblings
from samewise.model.rope import pin_rope
from samewise.model.surgery import copy_modules

log = logging.getLogger("samewise")

MakeProposer = Callable[["ProposerParts"], Proposer]


@dataclass(frozen=True, slots=True)
class ProposerParts:
    """What a proposer may be built from. Made by the engine."""

    runner: Runner
    sampler: Sampler
    vocab: int
    config: EngineConfig = field(default_factory=EngineConfig)
    frame_costs: FrameCosts = field(default_factory=lambda: FrameCosts((1,)))
    clock: Callable[[], float] = time.perf_counter
    loaded: Loaded | None = None
    max_model_len: int = 0
    load: Callable[[EngineConfig], Loaded] = load
    ahead: bool = False  # frames are launched ahead where no drafts are made
    chain: int = 1  # fast passes that are launched before the host waits for their tokens
    scratch_pages: range = range(0)  # for the layer-set search alone
    counters: Counters = field(default_factory=Counters)  # the engine's own, for reading
    tuning: Tuning = DEFAULTS


def make_tree_drafter(
    vocab: int, sources: Sources = Sources.ALL, tuning: TreeTuning = DEFAULTS.trees
) -> GrowsTrees:
    """A tree drafter in C++, or in Python where no compiler is installed: the same trees, slower."""
    try:
        return NativeDrafter(vocab, sources, tuning)
    except MachineError as reason:
        log.info("draft trees are grown in Python, which is slower: %s", reason)
        return TreeDrafter(vocab, sources, tuning)


def make_trees(parts: ProposerParts, sources: Sources) -> TreeProposer:
    """`ngram`, `recycle`, or the trees of `auto`, by what they are made from."""
    tuning = parts.tuning.trees
    return TreeProposer(make_tree_drafter(parts.vocab, sources, tuning), sources, tuning, parts.frame_costs)


def make_decode(parts: ProposerParts) -> Decode:
    """`decode`, through quantized weights where they are asked for or pay."""
    runner, copy = parts.runner, None
    quantize = pick_draft_quantizer(parts.config.draft_weights, runner.model, runner.device)
    if parts.config.draft_weights == "fp8":
        copy = fp8_copy(runner)
    elif quantize is not None:
        copy = packed_copy(runner, quantize)
    return Decode(runner, parts.sampler, copy=copy, chain=parts.chain)


def make_model(parts: ProposerParts, *, standalone: bool = True) -> DraftModel:
    """`model`: load the draft model and give it a runner and pages of its own."""
    assert parts.loaded is not None
    tuning, kv_memory = parts.tuning, parts.config.kv_memory
    config = replace(
        parts.config, model=parts.config.draft_model or "", revision=None, max_model_len=None,
        kv_memory=tuning.model.kv_share if kv_memory is None else kv_memory,
    )  # fmt: skip
    draft = parts.load(config)
    refuse_other_vocabulary(parts.loaded, draft, config.model)
    device = parts.runner.device
    draft.model.to(device)
    cuda = device.type == "cuda"
    if cuda:
        stack_siblings(draft.model)
    model = copy_modules(draft.model)
    max_len = min(parts.max_model_len, draft.arch.max_positions)
    pin_rope(model, max_len)
    linears = pick_linear(config.linear, device)
    if linears == "native":
        pack_linears(model)
    elif linears == "triton":
        order_linears(model)
    num_pages = count_pages(config, draft.arch, max_len, device)
    max_rows = max_pass_rows(cuda, config.max_num_seqs, tuning.model)
    runner = Runner(
        model, draft.arch, parts.runner.kernel, num_pages=num_pages, sizes=(1,),
        max_rows=max_rows, max_model_len=max_len,
        dtype=next(model.parameters()).dtype, device=device, compile=cuda and config.compile is not False,
        fuse=linears != "torch" and config.compile is not True,
    )  # fmt: skip
    return DraftModel(
        runner, parts.sampler, num_pages, max_len, parts.frame_costs, parts.clock,
        max_rows=max_rows, ahead=parts.chain > 1, standalone=standalone, tuning=tuning,
    )  # fmt: skip


def make_skip(parts: ProposerParts, *, search: Search | None = None, standalone: bool = True) -> Skip:
    """`skip`, with its search or another one. BadParameter where the model's layers cannot be skipped."""
    config, runner, sampler, tuning = parts.config, parts.runner, parts.sampler, parts.tuning
    on_cpu = runner.device.type == "cpu"
    views = runner.views()
    search = search or Search(views.num_layers, seed=config.seed % 2**32, tuning=tuning.search)
    weights = [views.sublayer_bytes(layer) for layer in range(views.num_layers)]
    all_linears = sum(m.weight.nbytes for m in runner.model.modules() if isinstance(m, FrameLinear))
    other = max(0.0, all_linears - sum(attention + mlp for attention, mlp in weights))  # mostly the head
    pricing = PassPricing(weights, other, runner.kv_bytes, parts.frame_costs, config.draft_tokens, tuning)
    active = ActiveSet(search, tuning)
    confidence = ConfidenceSampler(sampler, on_cpu=on_cpu, tuning=tuning.skip)
    optimiser = LayerSetOptimiser(
        search, LayerSetScorer(runner, sampler, views, parts.scratch_pages, tuning.search), active, pricing,
        LayerSetStore(config.workload), parts.frame_costs, parts.counters, parts.clock,
        frame_is_full_pass=runner.elastic or not on_cpu, in_advance=standalone, tuning=tuning,
    )  # fmt: skip
    return Skip(
        FastPasses(runner, sampler, chain=parts.chain, sample=confidence.sample),
        confidence, active, optimiser, ConfidencePacing(active, pricing, parts.chain, tuning), pricing,
        parts.clock, standalone=standalone,
        capture_seconds=0.0 if standalone or on_cpu else tuning.skip.capture_seconds,
    )  # fmt: skip


def make_auto(parts: ProposerParts, drafters: list[Drafter] | None = None) -> Auto:
    """`auto`, with all drafters that could pay here, or with these."""
    config, tuning = parts.config, parts.tuning
    drafters = _auto_drafters(parts) if drafters is None else drafters
    return Auto(
        make_trees(parts, Sources.ALL), drafters, parts.frame_costs, parts.clock,
        max_tokens=config.draft_tokens, ahead=parts.ahead, explain=config.explain, tuning=tuning,
    )  # fmt: skip


def _auto_drafters(parts: ProposerParts) -> list[Drafter]:
    """A draft model if one is set, `decode` if its weights are quantized, `skip` if layers can be skipped."""
    config, runner = parts.config, parts.runner
    drafters: list[Drafter] = [make_model(parts, standalone=False)] if config.draft_model else []
    quantized = config.draft_weights == "fp8"
    if quantized or pick_draft_quantizer(config.draft_weights, runner.model, runner.device) is not None:
        drafters.append(make_decode(parts))
    try:
        skip = make_skip(parts, standalone=False)
    except BadParameter as reason:
        log.info("auto goes without skip: %s", reason)
        return drafters
    return [*drafters, skip] if skip.possible else drafters


MAKERS: dict[str, MakeProposer] = {
    "auto": make_auto,
    "decode": make_decode,
    "model": make_model,
    "ngram": lambda parts: make_trees(parts, Sources.SUFFIXES),
    "none": lambda _: NoDrafts(),
    "recycle": lambda parts: make_trees(parts, Sources.ROWS),
    "skip": make_skip,
}


def maker_of(config: EngineConfig) -> MakeProposer:
    """How to build the proposer, or the several proposers, that a configuration names."""
    makers = [MAKERS[name] for name in config.proposers]
    return makers[0] if len(makers) == 1 else lambda parts: Fallback([make(parts) for make in makers])


__all__ = [
    "MAKERS",
    "MakeProposer",
    "ProposerParts",
    "make_auto",
    "make_decode",
    "make_model",
    "make_skip",
    "make_tree_drafter",
    "make_trees",
    "maker_of",
]
