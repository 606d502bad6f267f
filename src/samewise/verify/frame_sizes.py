"""Which frame sizes give the bits of the canonical one, tried on the loaded weights.

Linears were tried before (`operators`). Norms are tried here by themselves, then parts of a known text are
run at each size and compared with their bits at the canonical number of rows. A norm that differs is run at
that number; a size that still differs is dropped.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samewise import user_cache
from samewise.contract import ENGINE_VERSION
from samewise.errors import GuaranteeLost
from samewise.execute.compiler import allow_compiling
from samewise.execute.numerics import as_bits, inductor_options
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.execute.staging import StagingBuffer
from samewise.kernels.attention.base import PAGE
from samewise.model.linear import stacks_siblings
from samewise.model.row_pieces import is_norm
from samewise.types import Sampling, Span
from samewise.verify.operators import recheck_linears


@dataclass(frozen=True, slots=True)
class TrialLengths:
    """How much is compared at each size. Set by hand, to keep a start-up within seconds."""

    min_rows: int = 64  # rows compared at least, in as many frames as it takes
    min_frames: int = 4  # frames compared at least
    cuda_text: int = 600  # tokens: several key blocks and splits of the attention kernel
    cpu_text: int = 40  # tokens: CPU attention is the same at every size, so a short context suffices


TRIAL = TrialLengths()


@dataclass(frozen=True, slots=True)
class FrameSizeUse:
    """How frames of one size give the canonical bits: as they are, or with norms run at `norm_rows` rows."""

    norm_rows: int | None = None  # the canonical number of rows, where norms are run at it
    norm_widths: tuple[int, ...] = ()  # of the norms run at `norm_rows`; empty: all
    reason: str = ""  # why the size is not used; empty: it is

    @property
    def used(self) -> bool:
        """Whether frames of this size are run."""
        return not self.reason

    @property
    def unchanged(self) -> bool:
        """Whether everything is run at the size itself."""
        return self.used and self.norm_rows is None

    def __str__(self) -> str:
        if not self.used:
            return f"not used: {self.reason}"
        if self.norm_rows is None:
            return "as it is"
        norms = f"norms of {' and '.join(map(str, self.norm_widths))}" if self.norm_widths else "norms"
        return f"{norms} at {self.norm_rows} rows"


def select_frame_sizes(
    runner: Runner, facts: Mapping[str, str], max_model_len: int
) -> dict[int, FrameSizeUse]:
    """Drop the runner's sizes that do not give the canonical bits. Returns how each size is run.

    Native linears give the same bits at every size: nothing is tried, and the probe refuses a difference.
    """
    outcome = dict.fromkeys(runner.sizes, FrameSizeUse())
    if runner.native or not runner.elastic:
        return outcome
    trial, rows = _SizeTrial(runner, max_model_len), runner.frame_rows
    differing = {} if runner.fused else _differing_norms(runner, facts)
    for size in _sizes_to_try(runner):
        if not trial.fits(size):
            outcome[size] = FrameSizeUse(reason="more rows than the KV cache has room for")
            runner.drop_size(size)
            continue
        if widths := differing.get(size):
            runner.fix_norm_rows(size, widths)
            outcome[size] = FrameSizeUse(rows, tuple(widths))
        if trial.agrees(size):
            continue
        if not runner.fused:
            runner.fix_norm_rows(size)
            outcome[size] = FrameSizeUse(rows)
        if runner.fused or not trial.agrees(size):
            outcome[size] = FrameSizeUse(reason="an operator without a remedy gives other bits")
            runner.drop_size(size)
    return outcome


def _sizes_to_try(runner: Runner) -> list[int]:
    """The sizes whose bits follow from no construction.

    In fused layers over ordered linears those are the wide ones, where other products and other tiles of
    attention may run.
    """
    first = runner.frame_rows + 1 if runner.fused else 1
    return [size for size in runner.sizes if size >= first and size != runner.frame_rows]


def recheck_frame_sizes(runner: Runner, max_model_len: int) -> None:
    """Raise GuaranteeLost unless every size gives the canonical bits also on weights that were replaced.

    Linears are tried by themselves, then frames of every size.
    """
    stacked = stacks_siblings(runner.device)  # as when they were tried first
    recheck_linears(runner.model, runner.frame_rows, runner.sizes, stacked=stacked)
    if runner.native:
        return
    trial = _SizeTrial(runner, max_model_len)
    for size in _sizes_to_try(runner):
        if not trial.agrees(size):
            raise GuaranteeLost(
                f"on the new weights frames of {size} rows give other bits than frames of "
                f"{runner.frame_rows}. Build a new engine, or leave {size} out of frame_sizes"
            )


def _differing_norms(runner: Runner, facts: Mapping[str, str]) -> dict[int, list[int]]:
    """By size, the widths of norms that give other bits there than at the canonical number of rows.

    Compiled for CUDA none does, because their sums do not depend on an order (`passes.row_sums`). The result
    depends on machine and libraries, not on the weights: it is cached.
    """
    norms = _norms_called(runner)
    shapes = {str((type(norm).__qualname__, *tail)): (norm, tail) for norm, tail in norms}
    key = dict(facts) | {
        "norms": str(sorted(shapes)),
        "rows": str(runner.frame_rows),
        "sizes": str(runner.sizes),
        "compiled": str(sorted(inductor_options().items()) if runner.compiled else False),
        "dtypes": str(sorted({str(weight.dtype) for norm, _ in norms for weight in norm.parameters()})),
        "engine": ENGINE_VERSION,
    }
    # Code from elsewhere may change under the same class name.
    cacheable = all(
        type(norm).__mro__[1].__module__.split(".")[0] in ("torch", "transformers") for norm, _ in norms
    )
    cached = user_cache.get("norms", key) if cacheable else None
    if isinstance(cached, dict) and set(cached) <= set(map(str, runner.sizes)):
        return {int(size): list(widths) for size, widths in cached.items()}
    differing: dict[int, set[int]] = {}
    for norm, tail in shapes.values():
        for size in _differing_sizes(runner, norm, tail):
            differing.setdefault(size, set()).add(tail[-1])
    result = {size: sorted(widths) for size, widths in differing.items()}
    if cacheable:
        user_cache.put("norms", key, {str(size): widths for size, widths in result.items()})
    return result


def _norms_called(runner: Runner) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Every kind of norm with the shape of one row it is given, recorded in a pass."""
    called: dict[tuple[Any, ...], tuple[nn.Module, tuple[int, ...]]] = {}

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if len(args) == 1 else None
        if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.shape[1] == runner.frame_rows:
            tail = tuple(x.shape[2:])
            called.setdefault((type(module), *tail), (module, tail))

    handles = [m.register_forward_pre_hook(record) for m in runner.model.modules() if is_norm(m)]
    try:
        runner.eager(pack_frame([], runner.staging(runner.frame_rows)))
    finally:
        for handle in handles:
            handle.remove()
    return list(called.values())


@torch.inference_mode()
def _differing_sizes(runner: Runner, norm: nn.Module, tail: tuple[int, ...]) -> list[int]:
    """The sizes at which a norm gives other bits. Inputs are float32 in any dtype: norms compute in it."""
    rows = runner.frame_rows
    num_rows = -(-max(*runner.sizes, TRIAL.min_rows) // rows) * rows
    generator = torch.Generator(runner.device).manual_seed(0)
    x = torch.randn(1, num_rows, *tail, generator=generator, device=runner.device)
    x *= torch.exp2(torch.randint(-6, 7, x.shape, generator=generator, device=runner.device).float())
    compared = {size: max(size, TRIAL.min_rows // size * size) for size in runner.sizes if size != rows}
    with allow_compiling() if runner.compiled else nullcontext():
        run = runner.standalone(norm)

        def bits(size: int, num: int) -> torch.Tensor:
            parts = [run(x[:, start : start + size]) for start in range(0, num, size)]
            return as_bits(torch.cat(parts, dim=1)[:, :num])

        expected = bits(rows, num_rows)
        return [size for size, num in compared.items() if not torch.equal(bits(size, num), expected[:, :num])]


class _SizeTrial:
    """Runs parts of a known text in frames of one size, and compares with their bits in canonical frames.

    Parts start at many positions, so that rows see one block of keys and several, one split and several; in a
    frame of many rows one part is long, so that its rows share wide attention tiles.
    """

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._random = random.Random(21)
        room = (runner.store.num_pages - 2) * PAGE
        max_text = TRIAL.cuda_text if runner.device.type == "cuda" else TRIAL.cpu_text
        length = max(1, min(max_text, room, max_model_len - 1))
        self._text = [self._random.randrange(runner.arch.vocab) for _ in range(length)]
        self._pages = array("i", range(1, -(-length // PAGE) + 1))

    def fits(self, size: int) -> bool:
        """Whether the KV cache has room for this many rows."""
        return size <= (self._runner.store.num_pages - 1) * PAGE

    @torch.inference_mode()
    def agrees(self, size: int) -> bool:
        """Whether rows get the canonical bits in frames of this size."""
        runner, rows, length = self._runner, self._runner.frame_rows, len(self._text)
        canonical = torch.cat([
            self._run(runner.staging(rows), [(start, min(rows, length - start))])
            for start in range(0, length, rows)
        ])  # fmt: skip
        for _ in range(max(TRIAL.min_frames, TRIAL.min_rows // size)):
            parts = self._parts(size)
            expected = torch.cat([canonical[start : start + num] for start, num in parts])
            staging = runner.staging(size)
            if not torch.equal(as_bits(self._run(staging, parts)), as_bits(expected)):
                return False
            if staging.num_kept:  # the head on fewer rows
                keep = sorted(self._random.sample(range(size), staging.num_kept))
                if not torch.equal(as_bits(self._run(staging, parts, keep)), as_bits(expected[keep])):
                    return False
        return True

    def _parts(self, size: int) -> list[tuple[int, int]]:
        """(start, length) of parts of the text that fill a frame; in half of the frames the first is long."""
        parts: list[tuple[int, int]] = []
        while size:
            start = self._random.randrange(len(self._text))
            max_num = min(size, len(self._text) - start)
            long = not parts and self._random.random() < 0.5
            num = max_num if long else min(max_num, self._random.choice((1, 1, 3, 16, 40)))
            parts.append((start, num))
            size -= num
        return parts

    def _run(
        self, staging: StagingBuffer, parts: list[tuple[int, int]], keep: list[int] | None = None
    ) -> torch.Tensor:
        spans = []
        for start, num in parts:
            tokens = self._text[start : start + num]
            spans.append(Span(-1, start, tuple(tokens), num, self._pages, Sampling(), tokens, num))
        logits = self._runner.frame(pack_frame(spans, staging, keep))
        return logits[: sum(num for _, num in parts)].clone() if keep is None else logits


__all__ = ["TRIAL", "FrameSizeUse", "TrialLengths", "recheck_frame_sizes", "select_frame_sizes"]
