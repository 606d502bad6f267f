"""The probe: at start-up, checks that a row's bits depend neither on its index nor on the rest of its frame.

On the loaded weights, at the real shapes, on this machine. A known text is run alone from row 0 on, then
again cut in other places, at other rows, as a path through a draft tree, among other sequences, some of them
far into their context; and so are pieces far into a context themselves. Every bit of their logits must be the
same, and so must every bit of what the sampler makes of them; otherwise the engine does not start, and the
error names the operator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from samewise.errors import GuaranteeLost
from samewise.execute.numerics import as_bits
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.model.activation import FrameActivation
from samewise.model.arch import layer_list
from samewise.types import Span
from samewise.verify.culprit import find_culprit
from samewise.verify.placement import Placement, ProbeText, run_placement
from samewise.verify.sampler_trial import try_sampler
from samewise.verify.verifier import Verifier


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The digest of the known text's logit bits and of what was sampled, and what the probe took."""

    digest: str
    frames: int
    operators: int
    seconds: float


def probe(verifier: Verifier, *, max_model_len: int, operators: int = 0) -> ProbeReport:
    """Check the frame property or raise GuaranteeLost. Writes the first pages: no sequence may hold any."""
    began = time.perf_counter()
    runner = verifier.runner
    text = ProbeText(runner, max_model_len)
    if runner.native and runner.elastic:
        if not runner.portable:  # else every operator is a native kernel, which gives any row its bits
            _check_row_wise(runner, text.among_others()[0].spans)
        others = [text.among_others(), text.in_pieces(_doubling(runner.sizes))]
    else:
        others = [text.among_others(), text.among_others(runner.widest)]
        if runner.elastic:
            others.append(text.in_pieces(runner.sizes))
    if tree := text.as_tree():
        others.append(tree)
    # The far pieces come second: their context is the text's pages.
    placements = [[text.alone(), *others]]
    if far := text.far():
        placements.append([far, text.far_among_others()])
    logits = torch.cat([_agreed_logits(runner, *placed) for placed in placements])
    digest = sha256(logits.numpy().tobytes() + try_sampler(verifier, logits)).hexdigest()
    num_frames = sum(len(placement) for placed in placements for placement in placed)
    return ProbeReport(digest, num_frames, operators, time.perf_counter() - began)


def _agreed_logits(runner: Runner, reference: Placement, *others: Placement) -> torch.Tensor:
    """The logits of the reference; raises GuaranteeLost unless every other placement gives the same bits."""
    expected = run_placement(runner, reference)
    for other in others:
        if not torch.equal(as_bits(expected), as_bits(run_placement(runner, other))):
            culprit = find_culprit(runner, reference, other)
            raise GuaranteeLost(
                f"the probe read the same {len(expected)} tokens twice at {runner.frame_rows} rows, placed "
                f"differently, and got different bits. The operator: {culprit}. The engine will not start, "
                "because its answers would depend on load. Try another frame_rows, dtype or device"
            )
    return expected


def _check_row_wise(runner: Runner, spans: tuple[Span, ...]) -> None:
    """Compare norms and activations at every frame size, on what one full frame gives them.

    They are torch's, whose vector loops end and whose threads split depending on the number of elements.
    """
    with torch.inference_mode():
        for name, module, x in _row_wise_inputs(runner, spans):
            expected = as_bits(module(x))
            for size in runner.sizes:
                if not torch.equal(as_bits(module(x[:, :size])), expected[:, :size]):
                    raise GuaranteeLost(
                        f"the operator {name} gives other bits at {size} rows than at {runner.frame_rows}. "
                        'The engine will not start. Try linear="torch", or another OMP_NUM_THREADS'
                    )


def _row_wise_inputs(runner: Runner, spans: tuple[Span, ...]) -> list[tuple[str, nn.Module, torch.Tensor]]:
    """(name, module, input) of every kind of norm and activation that a frame over these spans calls."""
    inputs: dict[tuple[Any, ...], tuple[str, nn.Module, torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if len(args) == 1 and not kwargs else None
            if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.shape[1] == runner.frame_rows:
                # Not copied: strides may matter, and rows sliced from a wider product keep theirs.
                inputs.setdefault((type(module), x.shape, x.stride()), (name, module, x))

        return record

    wrapped = {module.inner for module in runner.model.modules() if isinstance(module, FrameActivation)}
    in_layers = f"{layer_list(runner.model, runner.arch)[0]}." if runner.fused else ""
    leaves = [
        (name, module)
        for name, module in runner.model.named_modules()
        if (isinstance(module, FrameActivation) or not any(True for _ in module.children()))
        and module not in wrapped
        and not isinstance(module, nn.Linear | nn.Embedding)
        and not (runner.fused and name.startswith(in_layers))  # fused layers do not call their modules
    ]
    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in leaves]
    try:
        staging = runner.frame_staging(sum(len(span.inputs) for span in spans))
        runner.eager(pack_frame(list(spans), staging))
    finally:
        for handle in handles:
            handle.remove()
    return list(inputs.values())


def _doubling(sizes: Sequence[int]) -> list[int]:
    """Some of the sizes, from the smallest on, each at least double the one before."""
    chosen = [sizes[0]]
    for size in sizes:
        if size >= 2 * chosen[-1]:
            chosen.append(size)
    return chosen


__all__ = ["ProbeReport", "probe"]
