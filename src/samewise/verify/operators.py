"""Which linears give canonical bits at which sizes of a frame, found out before anything runs.

Every shape is tried on inputs built to cancel, so that another order of summation shows in most elements.
What is found is a property of the machine, its libraries and the shapes, not of the weights: it is found out
once and remembered. What to do about it is decided here too, and cannot change a bit.
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
from samewise.kernels.linear.packed import multiply, plain
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import Pieces, piece_for


@dataclass(frozen=True, slots=True)
class Operator:
    """One shape of linear: who has it first, and at how many rows it runs in a frame of each size."""

    name: str
    outputs: int
    inputs: int
    pieces: Pieces


class _Kind(NamedTuple):
    """What a library sees of a linear."""

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
    name: str  # of the first
    linears: list[nn.Linear] = field(default_factory=list)


def elastic(model: nn.Module) -> bool:
    """Whether every product of a model goes through linears whose number of rows can be chosen."""
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
    merged: bool = True,
) -> list[Operator]:
    """Try every shape of linear, and tell each linear at how many rows to run in frames of these sizes.

    `merged`: linears that are parts of a wider product will run as that product. Raises GuaranteeLost where
    place or company shows at the canonical number of rows, `frame_rows`. Run before the KV cache takes its
    memory: it needs a weight matrix of its own.
    """
    kinds: dict[_Kind, _Members] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            part = getattr(module, "part", None) if merged else None
            weight = module.weight if part is None else part.weight
            kind = _Kind(type(module), weight.shape, weight.dtype, weight.device, module.bias is not None)
            kinds.setdefault(kind, _Members(name)).linears.append(module)
    sizes = sorted({*sizes, frame_rows})
    found = _good_sizes(kinds, frame_rows, sizes, facts)
    operators = []
    for kind, members in kinds.items():
        pieces = {size: piece_for(size, found[kind.label], frame_rows) for size in sizes}
        outputs, inputs = kind.shape
        operators.append(Operator(members.name, outputs, inputs, pieces))
        for linear in members.linears:
            if isinstance(linear, FrameLinear):
                linear.pieces = {size: piece for size, piece in pieces.items() if piece != size}
    return operators


def _good_sizes(
    kinds: Mapping[_Kind, _Members], rows: int, sizes: Sequence[int], facts: Mapping[str, str]
) -> dict[str, list[int]]:
    """By kind, the sizes at which it gives the bits of `rows`: as remembered, or as tried now."""
    key = dict(facts) | {
        "engine": ENGINE_VERSION,
        "rows": str(rows),
        "sizes": str(sizes),
        "shapes": str(sorted(kind.label for kind in kinds)),
    }
    ours = all(kind.type in (nn.Linear, FrameLinear) for kind in kinds)  # a stranger's code may change
    known = user_cache.get("operators", key) if ours else None
    if isinstance(known, dict) and all(_sound(known.get(kind.label), rows, sizes) for kind in kinds):
        return known
    found = {
        kind.label: _try_linear(members.linears[0], members.name, kind, rows, sizes)
        for kind, members in kinds.items()
    }
    if ours:
        user_cache.put("operators", key, found)
    return found


def _sound(good: object, rows: int, sizes: Sequence[int]) -> bool:
    """Whether this could be what was remembered: a damaged memory is no memory."""
    return isinstance(good, list) and rows in good and all(size in sizes for size in good)


@torch.inference_mode()
def _try_linear(linear: nn.Linear, name: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes at which a linear gives the bits it gives at `rows`. W = [V, V] and x = [a, -a] + a little
    noise: the big terms cancel."""
    shape, dtype = kind.shape, kind.dtype
    weight, x = _cancelling(kind, -(-max(sizes) // rows) * rows)
    swap = {"weight": weight}
    if linear.bias is not None:  # a part is tried as the whole it is cut from
        swap["bias"] = torch.zeros(shape[0], device=kind.device, dtype=dtype)
    native = plain(weight) if getattr(linear, "packed", None) is not None else None

    def run(inputs: torch.Tensor) -> torch.Tensor:
        if native is not None:
            return _bits(multiply(inputs, native, swap.get("bias"))[0])
        answer: torch.Tensor = torch.func.functional_call(linear, swap, (inputs,))
        return _bits(answer[0])

    told = f"the operator {name} ({shape[0]}×{shape[1]}, {dtype})"
    truth = run(x[:, :rows])
    for shift in sorted({1 % rows, rows // 2, rows - 1}):
        if not torch.equal(run(x[:, :rows].roll(shift, 1)), truth.roll(shift, 0)):
            raise GuaranteeLost(
                f"{told} gives a row other bits at another place among {rows} rows. "
                f"The engine will not start. Try frame_rows={max(16, 1 << rows.bit_length())}"
            )
    if native is not None:
        bad = next((size for size in range(1, rows) if not torch.equal(run(x[:, :size]), truth[:size])), None)
        if bad is not None:
            raise GuaranteeLost(
                f"{told} gives other bits at {bad} rows than at {rows}. "
                'The engine will not start. Try linear="torch"'
            )
        return list(sizes)
    return [size for size in sizes if _agrees(run, x, rows, size)]


def _agrees(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int, size: int) -> bool:
    """Whether `size` rows get the bits they get `rows` at a time, here and a few rows further on."""
    if size == rows:
        return True
    pieces = [run(x[:, start : start + rows]) for start in range(0, max(size, rows), rows)]
    truth = torch.cat(pieces)[:size]
    shift = max(1, size // 3)
    return torch.equal(run(x[:, :size]), truth) and torch.equal(
        run(x[:, :size].roll(shift, 1)), truth.roll(shift, 0)
    )


def _cancelling(kind: _Kind, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of the kind's shape and inputs [1, rows, width] whose products almost vanish."""
    out, width = kind.shape
    half = width // 2
    generator = torch.Generator(kind.device).manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=kind.device, dtype=torch.float32)

    # A few random rows, repeated: it is the operator that is tried, and a large head takes long to fill.
    block = noise(min(out, 64), half).to(kind.dtype).repeat(-(-out // 64), 1)[:out]
    weight = torch.cat([block, block, block[:, : width - 2 * half]], 1)
    a = noise(rows, half)
    x = torch.cat([a, -a, torch.zeros(rows, width - 2 * half, device=kind.device)], 1)
    return weight, (x + 1e-3 * noise(rows, width)).to(kind.dtype).unsqueeze(0)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)


__all__ = ["Operator", "check_linears", "elastic"]
