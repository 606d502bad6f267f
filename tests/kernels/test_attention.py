"""The rule of canonical attention, for every kernel: how rows are packed into passes changes no bit.

Results and stored pages must equal those of rows run alone, bit for bit, and be close to dense attention in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attention_cases import (
    CUDA,
    TOLERANCE,
    Case,
    MakeKernel,
    differences,
    max_error,
    native_kernel,
    torch_kernel,
    tree_differences,
    triton_kernel,
)

from samewise.kernels.attention.base import PAGE, AttentionKernel, Heads, LayerKV, Rows
from samewise.kernels.native.build import compiler_available

CASES = [
    Case(group=1, kv_heads=2, head_dim=16),
    Case(group=3, kv_heads=1, head_dim=64, window=1),
    Case(group=4, kv_heads=2, head_dim=80, window=7),
    Case(group=8, kv_heads=1, head_dim=96, window=64),
    Case(group=3, kv_heads=2, head_dim=128, window=100, dtype=torch.bfloat16),
    Case(group=4, kv_heads=1, head_dim=256),
    Case(group=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16),
    Case(group=3, kv_heads=3, head_dim=64, lengths=(70, 33, 8), tail=70),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100, 20), tail=3, window=300),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100, 20), tail=3),
]
"""For kernels at full speed: every head shape, every edge length."""

INTERPRETER_CASES = [
    Case(group=3, kv_heads=1, head_dim=16, lengths=(65, 257, 16), tail=3),
    Case(group=1, kv_heads=2, head_dim=80, lengths=(17, 259), tail=3, window=7),
    Case(group=4, kv_heads=1, head_dim=96, lengths=(255, 64), tail=2, window=64, dtype=torch.bfloat16),
    Case(group=8, kv_heads=1, head_dim=64, lengths=(600, 15), tail=1, window=100, dtype=torch.float16),
    Case(group=1, kv_heads=1, head_dim=256, lengths=(256, 63), tail=2, window=1),
    Case(group=1, kv_heads=1, head_dim=128, lengths=(600, 1), tail=2, dtype=torch.bfloat16),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100,), tail=1),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100, 5), tail=1, window=300),
]
"""Small enough for Triton's interpreter, where a pass takes a tenth of a second."""


TREE_CASES = [
    Case(group=3, kv_heads=2, head_dim=64, lengths=(1, 15, 16, 17, 100)),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(2, 31, 32, 47, 90), window=1),
    Case(group=4, kv_heads=1, head_dim=80, lengths=(1, 14, 30, 62, 256), window=7),
    Case(group=8, kv_heads=1, head_dim=96, lengths=(5, 33, 64, 250), window=40),
    Case(group=3, kv_heads=3, head_dim=64, lengths=(1, 20, 79, 513), window=200, dtype=torch.bfloat16),
    Case(group=4, kv_heads=1, head_dim=256, lengths=(8, 63, 240), dtype=torch.float16),
]
"""Contexts at and beside the edges of pages and splits, windows smaller and larger than the tree."""

INTERPRETER_TREE_CASES = [
    Case(group=3, kv_heads=1, head_dim=16, lengths=(1, 15, 255)),
    Case(group=4, kv_heads=1, head_dim=64, lengths=(14, 60, 254), window=7, dtype=torch.bfloat16),
    Case(group=1, kv_heads=2, head_dim=80, lengths=(63, 250), window=100),
]


def kernels_with_cases(
    cases: list[Case] = CASES, interpreter_cases: list[Case] = INTERPRETER_CASES
) -> list[object]:
    """Every kernel with its cases, on its device."""
    cpu = torch.device("cpu")
    needs_compiler = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")
    params = [
        pytest.param(make, case, cpu, id=f"{name}-{i}", marks=marks)
        for name, make, marks in (("native", native_kernel, [needs_compiler]), ("torch", torch_kernel, []))
        for i, case in enumerate(cases)
    ]
    device = torch.device("cuda") if CUDA else cpu
    marks = [pytest.mark.gpu] if CUDA else []
    params += [
        pytest.param(triton_kernel, case, device, id=f"triton-{i}", marks=marks)
        for i, case in enumerate(cases + interpreter_cases if CUDA else interpreter_cases)
    ]
    return params


@pytest.mark.parametrize(("make", "case", "device"), kernels_with_cases())
def test_bits_do_not_depend_on_how_rows_are_packed(
    make: MakeKernel, case: Case, device: torch.device
) -> None:
    rounds = 2 if make is triton_kernel and not CUDA else 3
    assert differences(make, case, device, rounds) == []


@pytest.mark.parametrize(("make", "case", "device"), kernels_with_cases())
def test_rows_are_close_to_dense_attention(make: MakeKernel, case: Case, device: torch.device) -> None:
    assert max_error(make, case, device) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(("make", "case", "device"), kernels_with_cases(TREE_CASES, INTERPRETER_TREE_CASES))
def test_bits_of_a_trees_rows_are_those_of_their_paths_run_plainly(
    make: MakeKernel, case: Case, device: torch.device
) -> None:
    slow = make is triton_kernel and not CUDA
    assert tree_differences(make, case, device, max_nodes=8 if slow else 40, rounds=1 if slow else 4) == []


# Kernels as they are usually written break the rule, and the tests above detect it.


@dataclass(frozen=True)
class OrdinaryKernel(AttentionKernel):
    """Plain attention with two properties of ordinary kernels, each a switch."""

    splits_by_count: bool = False  # more splits per row where a pass has fewer rows
    reads_unwritten_slots: bool = False  # multiplies unwritten values by a weight of zero

    @property
    def name(self) -> str:
        return "ordinary"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        shape = (num_pages, PAGE, num_kv_heads, head_dim)
        return LayerKV(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> None:
        return None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        assert window in (None, 1)  # 1: the pass only writes K and V, its results are not used
        kv.k.flatten(0, 1)[rows.slots.long()] = k
        kv.v.flatten(0, 1)[rows.slots.long()] = v
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        num_splits = max(1, 8 // len(q)) if self.splits_by_count else 1
        for i, (start, length) in enumerate(
            zip(rows.page_start.tolist(), rows.lengths.tolist(), strict=True)
        ):
            if length and window is None:
                pages = rows.pages[start : start - (-length // PAGE)].long()
                keys, values = (x[pages].flatten(0, 1).repeat_interleave(3, dim=1) for x in kv)
                out[i] = self.attend(q[i], keys, values, length, scale, num_splits)
        return out

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float, num_splits: int
    ) -> torch.Tensor:
        end = len(k) if self.reads_unwritten_slots else length
        scores = torch.einsum("hd,khd->hk", q, k[:end]) * scale
        scores[:, length:] = float("-inf")
        p = (scores - scores.amax(dim=1, keepdim=True)).exp()
        pieces = zip(p.chunk(num_splits, dim=1), v[:end].chunk(num_splits), strict=True)
        return sum(torch.einsum("hk,khd->hd", x, y) for x, y in pieces) / p.sum(dim=1, keepdim=True)


ORDINARY_CASE = Case(group=3, kv_heads=1, head_dim=64, lengths=(600, 257, 17), tail=8)


def test_a_number_of_splits_that_depends_on_the_pass_is_detected() -> None:
    cpu = torch.device("cpu")

    def make(_: np.random.Generator) -> AttentionKernel:
        return OrdinaryKernel(splits_by_count=True)

    assert max_error(make, ORDINARY_CASE, cpu) < TOLERANCE[torch.float32]
    assert differences(make, ORDINARY_CASE, cpu)


def test_reading_unwritten_slots_is_detected() -> None:
    assert differences(
        lambda _: OrdinaryKernel(reads_unwritten_slots=True), ORDINARY_CASE, torch.device("cpu")
    )
