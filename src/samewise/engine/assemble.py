"""Build an engine's parts from a loaded model and a configuration, and try its operators at every size."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from samewise import machine
from samewise.config import EngineConfig
from samewise.draft.tuning import Tuning
from samewise.execute import numerics
from samewise.execute.budget import count_pages
from samewise.execute.choices import (
    FRAME_DEFAULTS,
    candidate_frame_sizes,
    pick_device,
    pick_frame_rows,
    pick_kernel,
    pick_linear,
    pick_max_model_len,
)
from samewise.execute.load import Loaded, model_facts
from samewise.execute.process_state import ProcessState
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.kernels.attention.base import PAGE
from samewise.kernels.cpu_sampling import pick_row_math
from samewise.model.linear import order_linears, pack_linears, stack_siblings, stacks_siblings
from samewise.model.rope import fix_rope, frequencies_digest
from samewise.model.surgery import copy_modules
from samewise.schedule.limits import Limits
from samewise.verify import operators
from samewise.verify.frame_sizes import FrameSizeUse, select_frame_sizes
from samewise.verify.operators import Operator
from samewise.verify.verifier import Verifier

log = logging.getLogger("samewise")

FAST_PASSES = {"cuda": 4, "cpu": 1}
"""Fast passes that are launched before the host waits for their tokens. Only CUDA runs beside the host."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine's parts. Made once; the parts that are mutable are owned by the Engine."""

    device: torch.device
    runner: Runner
    sampler: Sampler
    verifier: Verifier
    limits: Limits
    operators: list[Operator]  # what was found about each linear
    sizes: dict[int, FrameSizeUse]  # frame size → how its bits are kept equal to those of `frame_rows`
    frame_rows: int  # the canonical number of rows
    linears: str  # whose linears: "native", "triton" or "torch"
    rope: str  # how rotary positions were fixed, for the contract
    scratch_pages: range  # pages of the layer-set search, outside the scheduler's pool
    platform: dict[str, str]  # contract facts: machine, libraries, numeric switches
    process: ProcessState  # switches of torch, under which everything canonical runs


def assemble(loaded: Loaded, config: EngineConfig, tuning: Tuning, *, ahead: bool | None) -> Assembly:
    """Everything between a loaded model and an engine. `ahead`: see Verifier; by default on CUDA only."""
    machine.pin_environment()
    device = pick_device(config.device)
    switches = numerics.pin_switches(device)  # to stay: every step then finds them as they should be
    process = ProcessState(device)
    with process.pinned():
        platform = _platform_facts(device, switches)
        return _assemble(loaded, config, tuning, device, process, platform, ahead=ahead)


def _assemble(
    loaded: Loaded,
    config: EngineConfig,
    tuning: Tuning,
    device: torch.device,
    process: ProcessState,
    platform: dict[str, str],
    *,
    ahead: bool | None,
) -> Assembly:
    arch = loaded.arch
    max_model_len = pick_max_model_len(config, arch)
    linears = pick_linear(config.linear, device)
    frame_rows = pick_frame_rows(config, device, linears)
    kernel = pick_kernel(config.attention, device)
    compiled = device.type == "cuda" if config.compile is None else config.compile
    loaded.model.to(device)
    if stacks_siblings(device):
        stack_siblings(loaded.model)  # before any graph is captured: stacking moves the weights
    model = copy_modules(loaded.model)  # another engine may run over the same weights
    rope = _fix_rope(model, max_model_len)
    if linears == "native":
        pack_linears(model)
    if linears == "triton":
        order_linears(model)
    sizes: tuple[int, ...] = (frame_rows,)
    if operators.elastic(model):
        sizes = candidate_frame_sizes(
            frame_rows, linears=linears, compiled=compiled, device=device.type, asked=config.frame_sizes
        )
    elif config.frame_sizes is not None:
        log.warning("frame_sizes is not used: %s has products that are not linears", arch.model_type)
    weights = model_facts(loaded, model)["weights"]
    tried = operators.check_linears(
        model, frame_rows, platform | {"linear": linears}, sizes,
        weights=weights, stacked=stacks_siblings(device), use_library=config.cublas,
    )  # fmt: skip
    num_pages = count_pages(config, arch, max_model_len, device, widest=sizes[-1])
    window, num_sets = tuning.search.window, tuning.search.batch_on(device.type)
    num_scratch = num_sets * -(-window // PAGE)
    runner = Runner(
        model,
        arch,
        kernel,
        num_pages=num_pages + num_scratch,
        sizes=sizes,
        frame_rows=frame_rows,
        max_rows=max(config.max_num_seqs, num_sets * window),
        max_model_len=max_model_len,
        dtype=next(model.parameters()).dtype,
        device=device,
        compile=compiled,
        fuse=linears != "torch" and config.compile is not True,
    )
    on_cpu = device.type == "cpu"
    row_math = pick_row_math(native=linears == "native") if on_cpu else None
    sampler = Sampler(arch.vocab, device, row_math=row_math)
    size_report = select_frame_sizes(runner, platform, max_model_len)
    verifier = Verifier(runner, sampler, ahead=device.type == "cuda" if ahead is None else ahead)
    limits = Limits(
        num_pages=num_pages,
        page=PAGE,
        max_rows=runner.widest,
        canonical_rows=frame_rows,
        shared_rows=min(runner.widest, max(frame_rows, FRAME_DEFAULTS.shared_rows)),
        frame_sizes=runner.sizes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab=arch.vocab,
        max_draft=config.draft_tokens,
        burst=FAST_PASSES[device.type],
        deadline=tuning.draft_deadline,
        max_queued=config.max_queued,
        prefix_caching=config.enable_prefix_caching,
    )
    return Assembly(
        device, runner, sampler, verifier, limits, tried, size_report, frame_rows, linears,
        rope, range(num_pages, num_pages + num_scratch), platform, process,
    )  # fmt: skip


def _fix_rope(model: nn.Module, max_model_len: int) -> str:
    """Fix the frequencies of rotary positions. Returns the contract's fact: longrope's choice, the bits."""
    choice = fix_rope(model, max_model_len)
    digest = frequencies_digest(model)
    return digest if choice is None else f"{choice}, {digest}"


def _platform_facts(device: torch.device, switches: dict[str, str]) -> dict[str, str]:
    """The machine and its libraries, as far as bits may depend on them."""
    cpu = machine.cpu_facts().items() if device.type == "cpu" else ()
    cpu_text = ", ".join(f"{name} {value}" for name, value in sorted(cpu)) or "any"
    pinned = machine.pin_environment() if device.type == "cpu" else {}
    return numerics.facts(device) | switches | pinned | {"cpu": cpu_text}


__all__ = ["Assembly", "assemble"]
