"""Finds the frame sizes at which each linear gives the canonical bits, before anything runs.

Every shape is tried twice, at the first linear that has it. On a made weight and inputs that cancel, another
order of summation shows in most elements: the result depends on the machine, its libraries and the shapes. On
the loaded weight and bias the linear is tried as it will be run: packed or stacked, on CUDA captured in a
graph. Both results are cached, the second by the weights too. At other sizes a linear is run in pieces or
padded, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from samewise import user_cache
from samewise.contract import ENGINE_VERSION
from samewise.errors import GuaranteeLost
from samewise.execute.numerics import as_bits
from samewise.kernels.graph import CapturedGraph
from samewise.kernels.linear.packed import multiply, pack_as_is
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import Pieces, piece_for

LIBRARY_FROM = 256
"""Rows from which on torch's product is tried in place of an ordered one: below, it is no faster."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One shape of linear: the first module that has it, and the rows it runs at in a frame of each size."""

    name: str
    outputs: int
    inputs: int
    pieces: Pieces
    library_rows: tuple[int, ...] = ()  # an ordered linear's: where torch's product gives its bits


class _Kind(NamedTuple):
    """What a library can tell linears apart by."""

    type: type[nn.Module]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    bias: bool

    @property
    def text(self) -> str:
        return f"{self.shape[0]}×{self.shape[1]}, {self.dtype}"

    @property
    def label(self) -> str:
        bias = " with bias" if self.bias else ""
        return f"{self.type.__qualname__} {self.shape[0]}×{self.shape[1]} {self.dtype}{bias}"


@dataclass(slots=True)
class _Members:
    """The linears of one kind."""

    name: str  # of the first
    linears: list[nn.Linear] = field(default_factory=list)


Product = Callable[[torch.Tensor], torch.Tensor]
"""Inputs [1, rows, width] → outputs, or their bits."""
Attempt = Callable[[nn.Linear, str, _Kind, int, Sequence[int]], list[int]]
"""(linear, its name, kind, canonical rows, sizes) → the sizes at which it gives the canonical bits."""


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
    weights: str = "",
    stacked: bool = True,
    use_library: bool = True,
) -> list[Operator]:
    """Try every shape of linear, and set the rows each linear runs at in frames of these sizes.

    `facts`: the machine and its libraries; `weights`: a digest of the model's, or "" to cache nothing about
    them. `stacked`: linears that share their input will run as one product of their stacked weights.
    `use_library`: ordered linears may run as torch's product in wide frames, where it gives their bits.
    Raises GuaranteeLost where a row's bits depend on its index at the canonical number of rows, `frame_rows`.
    A trial allocates a weight matrix of its own, so it runs before the KV cache takes the memory.
    """
    kinds = _kinds_of(model, stacked=stacked)
    sizes = sorted({*sizes, frame_rows})
    made = _good_sizes(kinds, frame_rows, sizes, facts, _try_made)
    loaded = _good_sizes(kinds, frame_rows, sizes, {**facts, "weights": weights}, _try_loaded)
    # Never at the canonical number of rows: all others are compared with the stated order itself.
    wide = [size for size in sizes if size >= LIBRARY_FROM and size != frame_rows and use_library]
    library = _library_sizes(kinds, frame_rows, wide, facts, weights)
    operators = []
    for kind, members in kinds.items():
        good = [size for size in made[kind.label] if size in loaded[kind.label]]
        pieces = {size: piece_for(size, good, frame_rows) for size in sizes}
        outputs, inputs = kind.shape
        library_rows = library.get(kind.label, [])
        operators.append(Operator(members.name, outputs, inputs, pieces, tuple(library_rows)))
        for linear in members.linears:
            if isinstance(linear, FrameLinear):
                linear.pieces = {size: piece for size, piece in pieces.items() if piece != size}
                linear.library_rows = frozenset(library_rows)
    return operators


def recheck_linears(model: nn.Module, frame_rows: int, sizes: Sequence[int], *, stacked: bool) -> None:
    """Raise GuaranteeLost unless linears give canonical bits also with weights that were replaced.

    As before only the first linear of each shape is tried, at the rows that frames of these sizes run it at.
    """
    for kind, members in _kinds_of(model, stacked=stacked).items():
        first = members.linears[0]
        pieces: Pieces = first.pieces if isinstance(first, FrameLinear) else {}
        used = sorted({frame_rows, *(pieces.get(size, size) for size in sizes)})
        good = _try_loaded(first, members.name, kind, frame_rows, used)
        if library := sorted(getattr(first, "library_rows", ())):
            same = _try_library_loaded(first, members.name, kind, frame_rows, library)
            good = [rows for rows in good if rows not in library or rows in same]
        if bad := [rows for rows in used if rows not in good]:
            raise GuaranteeLost(
                f"on the new weights the operator {members.name} ({kind.text}) gives other bits at {bad[0]} "
                f"rows than at {frame_rows}. Build a new engine, which tries every number of rows"
            )


def _library_sizes(
    kinds: Mapping[_Kind, _Members], rows: int, sizes: Sequence[int], facts: Mapping[str, str], weights: str
) -> dict[str, list[int]]:
    """By kind of ordered linear, the sizes at which torch's product gives its bits, on both weights."""
    ordered = {kind: members for kind, members in kinds.items() if _is_ordered(members.linears[0])}
    if not ordered or not sizes:
        return {}
    facts = {**facts, "product": "library"}
    made = _good_sizes(ordered, rows, sizes, facts, _try_library_made)
    loaded = _good_sizes(ordered, rows, sizes, {**facts, "weights": weights}, _try_library_loaded)
    return {
        label: [size for size in sizes if size in made[label] and size in loaded[label]] for label in made
    }


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
    kinds: Mapping[_Kind, _Members],
    rows: int,
    sizes: Sequence[int],
    facts: Mapping[str, str],
    attempt: Attempt,
) -> dict[str, list[int]]:
    """By kind, the sizes at which it gives the bits of `rows`: from the cache, or tried now."""
    key = dict(facts) | {
        "engine": ENGINE_VERSION,
        "rows": str(rows),
        "sizes": str(sizes),
        "shapes": str(sorted(kind.label for kind in kinds)),
    }
    # Code from elsewhere may change under the same class name.
    cacheable = facts.get("weights") != "" and all(kind.type in (nn.Linear, FrameLinear) for kind in kinds)
    cached = user_cache.get("operators", key) if cacheable else None
    if isinstance(cached, dict) and all(_is_valid(cached.get(kind.label), rows, sizes) for kind in kinds):
        return cached
    good_sizes = {
        kind.label: attempt(members.linears[0], members.name, kind, rows, sizes)
        for kind, members in kinds.items()
    }
    if cacheable:
        user_cache.put("operators", key, good_sizes)
    return good_sizes


def _is_valid(good: object, rows: int, sizes: Sequence[int]) -> bool:
    """Whether a cached value has the form of a result; a damaged one counts as absent."""
    if not isinstance(good, list) or not all(size in sizes for size in good):
        return False
    return rows in good or rows not in sizes


@torch.inference_mode()
def _try_made(linear: nn.Linear, name: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes at which a linear with a made weight gives the bits it gives at `rows` rows."""
    weight, x = _cancelling(kind, -(-max(sizes) // rows) * rows)
    parameters = {"weight": weight}
    if linear.bias is not None:  # of the kind's shape: a stacked linear is tried as the whole product
        parameters["bias"] = torch.zeros(kind.shape[0], device=kind.device, dtype=kind.dtype)
    if _is_native(linear):
        packed = pack_as_is(weight)
        run = _bits_of(kind, lambda x: multiply(x, packed, parameters.get("bias")))
        return _sizes_of_native(run, x, f"{name} ({kind.text})", rows, sizes, range(1, rows))
    run = _bits_of(kind, lambda x: torch.func.functional_call(linear, parameters, (x,)))
    if _is_ordered(linear):
        return _sizes_of_native(run, x, f"{name} ({kind.text})", rows, sizes, _below(rows, sizes))
    return _sizes_that_agree(run, x, f"{name} ({kind.text})", rows, sizes)


@torch.inference_mode()
def _try_loaded(linear: nn.Linear, name: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The same with its own weight and bias, as they will be run."""
    x = _wide(kind, -(-max(sizes) // rows) * rows)
    run = _bits_of(kind, _product_of(linear, kind))
    if _is_native(linear):
        return _sizes_of_native(
            run, x, f"{name} ({kind.text})", rows, sizes, {1, 3, rows // 2} & {*range(1, rows)}
        )
    if _is_ordered(linear):
        return _sizes_of_native(run, x, f"{name} ({kind.text})", rows, sizes, _below(rows, sizes))
    return _sizes_that_agree(run, x, f"{name} ({kind.text})", rows, sizes)


@torch.inference_mode()
def _try_library_made(linear: nn.Linear, _: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes at which torch's product with a made weight gives the bits of the ordered one."""
    weight, x = _cancelling(kind, max(sizes))
    bias = None
    if linear.bias is not None:
        bias = torch.linspace(-1.0, 1.0, kind.shape[0], device=kind.device).to(kind.dtype)
    return _sizes_of_library(kind, weight, bias, x, rows, sizes)


@torch.inference_mode()
def _try_library_loaded(linear: nn.Linear, _: str, kind: _Kind, rows: int, sizes: Sequence[int]) -> list[int]:
    """The same with its own weight and bias, as they will be run."""
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias
    if isinstance(linear, FrameLinear) and linear.stacked and linear.stacked.weight.shape == kind.shape:
        weight, bias = linear.stacked[:2]
    return _sizes_of_library(kind, weight, bias, _wide(kind, max(sizes)), rows, sizes)


def _sizes_of_library(
    kind: _Kind,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    rows: int,
    sizes: Sequence[int],
) -> list[int]:
    """The sizes at which torch's product gives the ordered product's bits, in two orders of the rows."""
    ordered = _bits_of(kind, lambda part: torch.ops.samewise.ordered_linear(part, weight, bias))
    library = _bits_of(kind, lambda part: nn.functional.linear(part, weight, bias))
    expected = torch.cat([ordered(part) for part in torch.split(x, rows, dim=1)])
    good = []
    for size in sizes:
        first, shift = x[:, :size], max(1, size // 3)
        if torch.equal(library(first), expected[:size]) and torch.equal(
            library(first.roll(shift, 1)), expected[:size].roll(shift, 0)
        ):
            good.append(size)
    return good


def _is_ordered(linear: nn.Module) -> bool:
    return isinstance(linear, FrameLinear) and linear.ordered


def _is_native(linear: nn.Linear) -> bool:
    return isinstance(linear, FrameLinear) and linear.packed is not None


def _product_of(linear: nn.Linear, kind: _Kind) -> Product:
    """The product that a linear's rows go through: its own, or the one it shares with its siblings."""
    if not isinstance(linear, FrameLinear):
        return linear
    if linear.packed is not None:
        packed, bias = linear.packed, linear.bias if linear.merged is None else linear.merged[0].bias
        return lambda x: multiply(x, packed, bias)
    if linear.stacked is not None and linear.stacked.weight.shape == kind.shape:
        stacked = linear.stacked
        if linear.ordered:
            return lambda x: torch.ops.samewise.ordered_linear(x, stacked.weight, stacked.bias)
        return lambda x: nn.functional.linear(x, stacked.weight, stacked.bias)
    return linear


def _bits_of(kind: _Kind, product: Product) -> Product:
    """The product's bits, [rows, outputs]; on CUDA captured once for each number of rows, as in frames."""
    if kind.device.type != "cuda":
        return lambda x: as_bits(product(x)[0])
    captured: dict[int, tuple[torch.Tensor, CapturedGraph[torch.Tensor]]] = {}
    pool = torch.cuda.graph_pool_handle()

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        if rows not in captured:
            buffer = x.clone()
            captured[rows] = buffer, CapturedGraph(lambda: product(buffer), kind.device, pool)
        buffer, graph = captured[rows]
        buffer.copy_(x)
        return as_bits(graph()[0].clone())

    return run


def _sizes_that_agree(run: Product, x: torch.Tensor, name: str, rows: int, sizes: Sequence[int]) -> list[int]:
    _refuse_by_index(run, x, name, rows)
    return [size for size in sizes if _agrees(run, x, rows, size)]


def _sizes_of_native(
    run: Product, x: torch.Tensor, name: str, rows: int, sizes: Sequence[int], tried: Iterable[int]
) -> list[int]:
    """All sizes; raises GuaranteeLost where one of the tried numbers of rows gives other bits."""
    expected = _refuse_by_index(run, x, name, rows)
    for size in tried:
        if not torch.equal(run(x[:, :size]), expected[:size]):
            raise GuaranteeLost(
                f"the operator {name} gives other bits at {size} rows than at {rows}. "
                'The engine will not start. Try linear="torch"'
            )
    return list(sizes)


def _below(rows: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size < rows]


def _refuse_by_index(run: Product, x: torch.Tensor, name: str, rows: int) -> torch.Tensor:
    """The bits of the first `rows` rows; raises GuaranteeLost if they depend on a row's index."""
    expected = run(x[:, :rows])
    for shift in sorted({1 % rows, rows // 2, rows - 1}):
        if not torch.equal(run(x[:, :rows].roll(shift, 1)), expected.roll(shift, 0)):
            raise GuaranteeLost(
                f"the operator {name} gives a row other bits at another place among {rows} rows. "
                f"The engine will not start. Try frame_rows={max(16, 1 << rows.bit_length())}"
            )
    return expected


def _agrees(run: Product, x: torch.Tensor, rows: int, size: int) -> bool:
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


def _wide(kind: _Kind, rows: int) -> torch.Tensor:
    """Inputs [1, rows, width] of both signs and many magnitudes: most bits of a product depend on its order.

    No inputs cancel against any weight whatever; large terms of both signs come near it.
    """
    generator = torch.Generator(kind.device).manual_seed(1)
    shape = (1, rows, kind.shape[1])
    x = torch.randn(shape, generator=generator, device=kind.device, dtype=torch.float32)
    exponents = torch.randint(-8, 9, shape, generator=generator, device=kind.device)
    return (x * torch.exp2(exponents.float())).to(kind.dtype)


__all__ = ["Operator", "check_linears", "elastic", "recheck_linears"]
