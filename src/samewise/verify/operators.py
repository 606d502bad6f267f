"""Finds the frame sizes at which each linear gives the canonical bits, before anything runs.

Every shape is tried on inputs built to cancel, so that another order of summation shows in most elements. The
result depends on the machine, its libraries and the shapes, not on the weights: it is cached. At other sizes
a linear is run in pieces or padded, which cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from samewise import user_cache
from samewise.contract import ENGINE_VERSION
from samewise.errors import GuaranteeLost
from samewise.execute.numerics import as_bits
from samewise.kernels.linear.packed import multiply, pack_as_is
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import Pieces, piece_for


@dataclass(frozen=True, slots=True)
class Operator:
    """One shape of linear: the first module that has it, and the rows it runs at in a frame of each size."""

    name: str
    outputs: int
    inputs: int
    pieces: Pieces


class _Kind(NamedTuple):
    """What a library can tell linears apart by."""

    type: type[nn.Module]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    bias: bool

    @property
    def label(self) -> str:
        bias = " with bias" if self.bias else ""
        return f"{self.type.__qualname__} {self.shape[0]}×{self.shape[1]} {self.dtype}{bias}"


@dataclass(slots=True)
class _Members:
    """The linears of one kind."""

    name: str  # of the first
    linears: list[nn.Linear] = field(default_factory=list)


def elastic(model: nn.Module) -> bool:
    """Whether every product of a model goes through linears that can run at another number of rows."""
    return all(
        isinstance(module, FrameLinear | nn.Embedding)
        or all(parameter.dim() < 2 for parameter in module.parameters(recurse=False))
        for module in model.modules()
    )


def check_linears(
    model: nn.Module,
    frame_rows: int,
    facts: Mapping[str, str],
    sizes: Sequence[int] = (),
    *,
    stacked: bool = True,
) -> list[Operator]:
    """Try every shape of linear, and set the rows each linear runs at in frames of these sizes.

    `stacked`: linears that share their input will run as one product of their stacked weights. Raises
    GuaranteeLost where a row's bits depend on its index at the canonical number of rows, `frame_rows`. A
    trial allocates a weight matrix of its own, so it runs before the KV cache takes the memory.
    """
    kinds = _kinds_of(model, stacked=stacked)
    sizes = sorted({*sizes, frame_rows})
    good_sizes = _good_sizes(kinds, frame_rows, sizes, facts)
    operators = []
    for kind, members in kinds.items():
        pieces = {size: piece_for(size, good_sizes[kind.label], frame_rows) for size in sizes}
        outputs, inputs = kind.shape
        operators.append(Operator(members.name, outputs, inputs, pieces))
        for linear in members.linears:
            if isinstance(linear, FrameLinear):
                linear.pieces = {size: piece for size, piece in pieces.items() if piece != size}
    return operators


def _kinds_of(model: nn.Module, *, stacked: bool) -> dict[_Kind, _Members]:
    kinds: dict[_Kind, _Members] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows = module.stacked if stacked and isinstance(module, FrameLinear) else None
            weight = module.weight if rows is None else rows.weight
            kind = _Kind(type(module), weight.shape, weight.dtype, weight.device, module.bias is not None)
            kinds.setdefault(kind, _Members(name)).linears.append(module)
    return kinds


def _good_sizes(
    kinds: Mapping[_Kind, _Members], rows: int, sizes: Sequence[int], facts: Mapping[str, str]
) -> dict[str, list[int]]:
    """By kind, the sizes at which it gives the bits of `rows`: from the cache, or tried now."""
    key = dict(facts) | {
        "engine": ENGINE_VERSION,
        "rows": str(rows),
        "sizes": str(sizes),
        "shapes": str(sorted(kind.label for kind in kinds)),
    }
    # Code from elsewhere may change under the same class name.
    cacheable = all(kind.type in (nn.Linear, FrameLinear) for kind in kinds)
    cached = user_cache.get("operators", key) if cacheable else None
    if isinstance(cached, dict) and all(_is_valid(cached.get(kind.label), rows, sizes) for kind in kinds):
        return cached
    good_sizes = {
        kind.label: _try_linear(members.linears[0], members.name, kind, rows, sizes)
        for kind, members in kinds.items()
    }
    if cacheable:
        user_cache.put("operators", key, good_sizes)
    return good_sizes


def _is_valid(good: object, rows: int, sizes: Sequence[int]) -> bool:
    """Whether a cached value has the form of a result; a damaged one counts as absent."""
    return isinstance(good, list) and rows in good and all(size in sizes for size in good)


@torch.inference_mode()
def _try_linear(linear: nn.Linear, name: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes at which a linear gives the bits it gives at `rows` rows."""
    shape, dtype = kind.shape, kind.dtype
    weight, x = _cancelling(kind, -(-max(sizes) // rows) * rows)
    parameters = {"weight": weight}
    if linear.bias is not None:  # of the kind's shape: a stacked linear is tried as the whole product
        parameters["bias"] = torch.zeros(shape[0], device=kind.device, dtype=dtype)
    is_native = isinstance(linear, FrameLinear) and linear.packed is not None
    native = pack_as_is(weight) if is_native else None

    def run(inputs: torch.Tensor) -> torch.Tensor:
        if native is not None:
            return as_bits(multiply(inputs, native, parameters.get("bias"))[0])
        output: torch.Tensor = torch.func.functional_call(linear, parameters, (inputs,))
        return as_bits(output[0])

    label = f"the operator {name} ({shape[0]}×{shape[1]}, {dtype})"
    expected = run(x[:, :rows])
    for shift in sorted({1 % rows, rows // 2, rows - 1}):
        if not torch.equal(run(x[:, :rows].roll(shift, 1)), expected.roll(shift, 0)):
            raise GuaranteeLost(
                f"{label} gives a row other bits at another place among {rows} rows. "
                f"The engine will not start. Try frame_rows={max(16, 1 << rows.bit_length())}"
            )
    if native is None:
        return [size for size in sizes if _agrees(run, x, rows, size)]
    for size in range(1, rows):
        if not torch.equal(run(x[:, :size]), expected[:size]):
            raise GuaranteeLost(
                f"{label} gives other bits at {size} rows than at {rows}. "
                'The engine will not start. Try linear="torch"'
            )
    return list(sizes)


def _agrees(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int, size: int) -> bool:
    """Whether `size` rows get the bits they get in calls of `rows` rows, in two orders."""
    if size == rows:
        return True
    pieces = [run(x[:, start : start + rows]) for start in range(0, max(size, rows), rows)]
    expected = torch.cat(pieces)[:size]
    shift = max(1, size // 3)
    return torch.equal(run(x[:, :size]), expected) and torch.equal(
        run(x[:, :size].roll(shift, 1)), expected.roll(shift, 0)
    )


def _cancelling(kind: _Kind, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [V, V] and inputs [a, -a] plus a little noise: the large terms of each product cancel.

    The weight has the kind's shape; the inputs are [1, rows, width].
    """
    out, width = kind.shape
    half = width // 2
    generator = torch.Generator(kind.device).manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=kind.device, dtype=torch.float32)

    # A few random rows, repeated: a large head would take long to fill, and only the operator is tried.
    block = noise(min(out, 64), half).to(kind.dtype).repeat(-(-out // 64), 1)[:out]
    weight = torch.cat([block, block, block[:, : width - 2 * half]], 1)
    a = noise(rows, half)
    x = torch.cat([a, -a, torch.zeros(rows, width - 2 * half, device=kind.device)], 1)
    return weight, (x + 1e-3 * noise(rows, width)).to(kind.dtype).unsqueeze(0)


__all__ = ["Operator", "check_linears", "elastic"]
