"""Names the operator whose bits depend on placement: two placements run module by module, eagerly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samewise.execute.numerics import as_bits
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.verify.placement import Placement


def find_culprit(runner: Runner, reference: Placement, other: Placement) -> str:
    """The first module that gives other bits for the same input, in words; or what lies between modules."""
    for (name, given, output), (_, other_given, other_output) in zip(
        _trace(runner, reference), _trace(runner, other), strict=True
    ):
        if not torch.equal(given, other_given):
            return f"an operator before {name} (attention, rotary or one without a module)"
        if not torch.equal(output, other_output):
            return name
    if runner.fused:
        return "a native layer: by its modules the same frames agree; try linear='torch'"
    return "a compiled layer or the graph: without them the same frames agree; try compile=False"


def _trace(runner: Runner, placement: Placement) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(module, input bits, output bits) of the known text's rows, in the order modules are called."""
    traces: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    first = length = num_rows = 0  # of the frame being run

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensors = [x for x in (*args[:1], output) if isinstance(x, torch.Tensor) and x.dim() >= 3]
            if len(tensors) != 2 or not all(num_rows in x.shape[1:3] for x in tensors):
                return
            for values, bits in zip(tensors, traces.setdefault(name, ([], [])), strict=True):
                by_row = values[0] if values.shape[1] == num_rows else values[0].transpose(0, 1)
                bits.append(as_bits(by_row[first : first + length].clone()).flatten(1))

        return record

    leaves = [(n, m) for n, m in runner.model.named_modules() if not any(True for _ in m.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        for spans, first, length in placement:  # noqa: B007 - read by the hooks
            staging = runner.frame_staging(sum(len(span.inputs) for span in spans))
            num_rows = staging.num_rows
            runner.eager(pack_frame(list(spans), staging)).cpu()
    finally:
        for handle in handles:
            handle.remove()
    return [(name, torch.cat(given), torch.cat(output)) for name, (given, output) in traces.items()]


__all__ = ["find_culprit"]
