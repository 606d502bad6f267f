"""Random passes over random sequences, for the tests of attention kernels.

A reference runs every row alone. Then the same rows run in random passes: spans of any length, other rows
beside them, rows out of order, padding between, other page numbers, another fill of unwritten memory.

Rows of draft trees are compared with each path of the tree run as a sequence of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from samewise.kernels.attention.base import PAGE, AttentionKernel, Heads, LayerKV, Rows

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, so before anything below

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
EDGE_LENGTHS = (15, 16, 17, 63, 64, 65, 255, 256, 257, 600)
"""At and beside multiples of pages, blocks and splits."""

Row = tuple[int, int] | None
"""The index of a sequence and a position in it, or padding."""

MakeKernel = Callable[[np.random.Generator], AttentionKernel]
"""Makes a kernel; what its bits must not depend on (the number of programs) is random."""


@dataclass(frozen=True)
class Case:
    """Sequences of given lengths, of which the kernel runs the last `tail` rows each."""

    group: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = EDGE_LENGTHS
    tail: int = 12

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def heads(self) -> Heads:
        return Heads(self.group * self.kv_heads, self.kv_heads, self.head_dim, self.window)

    def first(self, sequence: int) -> int:
        """The first position the kernel runs."""
        return max(0, self.lengths[sequence] - self.tail)

    def rows(self) -> list[tuple[int, int]]:
        return [(s, p) for s, n in enumerate(self.lengths) for p in range(self.first(s), n)]


@dataclass(frozen=True)
class Tree:
    """A draft after `context` positions of a sequence. Node i has the slot of position ``context + i``."""

    context: int
    parents: tuple[int, ...]  # a node's parent; -1 is the last position of the context

    def path(self, node: int) -> list[int]:
        """The node's ancestors, the first of them first, and the node."""
        parent = self.parents[node]
        return [*(self.path(parent) if parent >= 0 else []), node]

    def leaves(self) -> list[int]:
        return [node for node in range(len(self.parents)) if node not in self.parents]


class QKV(NamedTuple):
    """Queries, keys and values of one sequence."""

    q: torch.Tensor  # [L, Hq, D]
    k: torch.Tensor  # [L, Hkv, D]
    v: torch.Tensor  # [L, Hkv, D]


def random_sequences(case: Case, device: torch.device) -> list[QKV]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

    heads = case.group * case.kv_heads
    return [
        QKV(*(draw(n, h, case.head_dim) for h in (heads, case.kv_heads, case.kv_heads))) for n in case.lengths
    ]


def dense_attention(case: Case, sequence: QKV, position: int) -> torch.Tensor:
    """One row's attention in float64."""
    first = 0 if case.window is None else max(0, position + 1 - case.window)
    k, v = (
        x[first : position + 1].double().repeat_interleave(case.group, dim=1)
        for x in (sequence.k, sequence.v)
    )
    scores = torch.einsum("hd,khd->hk", sequence.q[position].double(), k) * case.scale
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v)


@dataclass
class PagedLayer:
    """A layer's KV pages: each sequence has random page numbers, unwritten memory is filled with `fill`."""

    kernel: AttentionKernel
    case: Case
    sequences: list[QKV]
    rng: np.random.Generator
    fill: float
    trees: tuple[Tree, ...] = ()  # of every sequence; its last positions are then nodes
    kv: LayerKV = field(init=False)
    page_tables: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        counts = [-(-n // PAGE) for n in case.lengths]
        num_pages = 1 + sum(counts) + int(self.rng.integers(1, 9))
        self.kv = self.kernel.allocate(num_pages, case.kv_heads, case.head_dim, case.dtype, self.device)
        self.kv.k.fill_(self.fill)
        self.kv.v.fill_(self.fill)
        order = 1 + self.rng.permutation(num_pages - 1)
        self.page_tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        for sequence in range(len(counts)):
            self.write_kv(sequence, np.arange(self.first(sequence)))

    @property
    def device(self) -> torch.device:
        return self.sequences[0].q.device

    def write_kv(self, sequence: int, positions: np.ndarray) -> None:
        """Write K and V through the kernel; directly for Triton, whose interpreter would take long."""
        if self.kernel.name.startswith("triton"):
            pages, at = self.page_tables[sequence][positions // PAGE], self.ints(positions).long()
            slots = self.ints(pages).long(), slice(None), at % PAGE
            self.kv.k[slots] = self.sequences[sequence].k[at]
            self.kv.v[slots] = self.sequences[sequence].v[at]
        elif len(positions):
            self.run([(sequence, int(p)) for p in positions], window=1)

    def run(self, rows: list[Row], window: int | None) -> torch.Tensor:
        """One pass. The sequences' page numbers come in random order, invalid numbers after them."""
        case, rng = self.case, self.rng
        starts, pages = np.zeros(len(case.lengths), np.int32), [np.empty(0, np.int64)]
        for sequence in rng.permutation(len(case.lengths)):
            starts[sequence] = sum(len(p) for p in pages)
            pages.append(self.page_tables[sequence])
        pages.append(np.full(3, 2**30))
        lengths = np.array([0 if r is None else r[1] + 1 for r in rows], np.int32)
        slots = [rng.integers(PAGE) if r is None else self.slot(*r) for r in rows]
        tail_start, tail = lengths.copy(), rng.integers(2**30, size=len(rows))
        self.add_tails(rows, lengths, tail_start, tail, pages)
        page_start = [0 if r is None else starts[r[0]] for r in rows]
        plan = self.kernel.plan([case.heads], case.dtype, len(rows), max(case.lengths))
        work_list = np.full(0 if plan is None else plan.work_list_len(len(rows)), -1, np.int32)
        if plan is not None:
            tables = (lengths, page_start, tail_start, tail)
            plan.write(*(np.array(x, np.int32) for x in tables), work_list)
        workspace = torch.full((0 if plan is None else plan.workspace_len,), float("nan"), device=self.device)
        if plan is not None:
            workspace[-plan.num_arrivals :] = 0.0
        tables = Rows(
            *(self.ints(x) for x in (lengths, slots, page_start, tail_start, tail)),
            *(self.ints(x) for x in (np.concatenate(pages), work_list)),
            workspace,
        )
        out = self.kernel(*self.inputs(rows), self.kv, tables, scale=case.scale, window=window)
        if plan is not None:
            assert not workspace[-plan.num_arrivals :].any(), "arrivals must be zero for the next pass"
        return out

    def first(self, sequence: int) -> int:
        """The first position that passes run: the last one of the context where a tree follows."""
        return self.trees[sequence].context - 1 if self.trees else self.case.first(sequence)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.page_tables[sequence][position // PAGE]) * PAGE + position % PAGE

    def add_tails(
        self,
        rows: list[Row],
        lengths: np.ndarray,
        tail_start: np.ndarray,
        tail: np.ndarray,
        pages: list[np.ndarray],
    ) -> None:
        """Set length and tail of rows that are nodes. Those of one chain share a list, or have their own."""
        nodes = [
            (i, row[0], tree.path(row[1] - tree.context))
            for i, row in enumerate(rows)
            if row is not None and self.trees and row[1] >= (tree := self.trees[row[0]]).context
        ]
        lists: list[tuple[int, list[int], int]] = []
        for i, sequence, path in sorted(nodes, key=lambda node: -len(node[2])):
            context = self.trees[sequence].context
            lengths[i], tail_start[i] = context + len(path), context
            shared = [at for s, nodes, at in lists if s == sequence and nodes[: len(path)] == path]
            if shared and self.rng.random() < 0.9:
                tail[i] = shared[0]
                continue
            tail[i] = sum(len(p) for p in pages)
            lists.append((sequence, path, int(tail[i])))
            pages.append(np.array([self.slot(sequence, context + node) for node in path]))

    def inputs(self, rows: list[Row]) -> list[torch.Tensor]:
        """Q, K and V of the rows, as views into one tensor; NaN for padding."""
        heads = (self.case.group * self.case.kv_heads, self.case.kv_heads, self.case.kv_heads)
        fused = torch.full((len(rows), sum(heads), self.case.head_dim), float("nan"), dtype=self.case.dtype)
        fused = fused.to(self.device)
        for i, row in enumerate(rows):
            if row is not None:
                sequence, position = self.sequences[row[0]], row[1]
                fused[i] = torch.cat([sequence.q[position], sequence.k[position], sequence.v[position]])
        return list(fused.split(heads, dim=1))

    def ints(self, values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values).astype(np.int32)).to(self.device)

    def pages(self) -> list[torch.Tensor]:
        """K and V, each with every page of every sequence in order, as stored."""
        numbers = np.concatenate(self.page_tables)
        return [self.kv.k[numbers], self.kv.v[numbers]]


def random_passes(layer: PagedLayer, rng: np.random.Generator, max_span: int = 13) -> list[list[Row]]:
    """Passes that run every row of the case once, each sequence in order, in random packings."""
    passes: list[list[Row]] = []
    case = layer.case
    at = [layer.first(s) for s in range(len(case.lengths))]
    while any(p < n for p, n in zip(at, case.lengths, strict=True)):
        max_rows = int(rng.choice([1, 3, 16, 40, 90]))
        rows: list[Row] = [None] * int(rng.integers(0, 3))
        for sequence in rng.permutation(len(at)):
            span = min(
                int(rng.integers(0, max_span + 1)),
                max_rows - len(rows),
                case.lengths[sequence] - at[sequence],
            )
            rows += [(int(sequence), at[sequence] + i) for i in range(max(0, span))]
            at[sequence] += max(0, span)
        if rng.integers(2):
            rows = [rows[i] for i in rng.permutation(len(rows))]
        if rows:
            passes.append(rows)
    return passes


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype])


@cache
def rows_run_alone(
    make: MakeKernel, case: Case, device: torch.device
) -> tuple[dict[Row, torch.Tensor], list[torch.Tensor]]:
    """The reference: results and stored pages when every row has a pass of its own."""
    rng = np.random.default_rng(1)
    layer = PagedLayer(make(rng), case, random_sequences(case, device), rng, fill=float("nan"))
    return {row: layer.run([row], case.window)[0] for row in case.rows()}, layer.pages()


def differences(make: MakeKernel, case: Case, device: torch.device, rounds: int = 3) -> list[str]:
    """Every row and page whose bits differ from the reference in random passes, in words."""
    sequences = random_sequences(case, device)
    reference, reference_pages = rows_run_alone(make, case, device)
    written = [~page.isnan() for page in reference_pages]
    differing = []
    for seed in range(rounds):
        rng = np.random.default_rng([seed, case.head_dim])
        fill = (float("nan"), float("inf"), -3e4)[seed % 3]
        layer = PagedLayer(make(rng), case, sequences, rng, fill)
        for rows in random_passes(layer, rng):
            for row, out in zip(rows, layer.run(rows, case.window), strict=True):
                expected = torch.zeros_like(out) if row is None else reference[row]
                if not torch.equal(bits(out), bits(expected)):
                    differing.append(f"round {seed}: {row} in a pass of {len(rows)}")
        for before, after, mask in zip(reference_pages, layer.pages(), written, strict=True):
            if not torch.equal(bits(before)[mask], bits(after)[mask]):
                differing.append(f"round {seed}: stored pages")
    return differing


def max_error(make: MakeKernel, case: Case, device: torch.device) -> float:
    """Largest distance of rows run alone from dense attention in float64."""
    sequences = random_sequences(case, device)
    reference, _ = rows_run_alone(make, case, device)
    return max(
        float((out.double() - dense_attention(case, sequences[row[0]], row[1])).abs().max())
        for row, out in reference.items()
    )


def random_tree(context: int, max_nodes: int, rng: np.random.Generator) -> Tree:
    """A tree whose nodes mostly continue the one before; sometimes a chain, sometimes all random."""
    branching = float(rng.choice([0.0, 0.2, 0.5, 1.0]))
    num_nodes = int(rng.integers(1, max_nodes + 1))
    parents = [
        int(rng.integers(-1, node)) if rng.random() < branching else node - 1 for node in range(num_nodes)
    ]
    return Tree(context, tuple(parents))


def tree_differences(
    make: MakeKernel, case: Case, device: torch.device, max_nodes: int, rounds: int = 3
) -> list[str]:
    """Every node of random trees whose bits differ from those of its path run plainly, in words.

    A tree of up to `max_nodes` nodes follows each sequence of the case. K and V of some nodes are not finite,
    which changes no bit of rows that may not see them.
    """
    differing = []
    for seed in range(rounds):
        rng = np.random.default_rng([seed, case.head_dim, max_nodes])
        fill = (float("nan"), float("inf"), -3e4)[seed % 3]
        trees = tuple(random_tree(n, max_nodes, rng) for n in case.lengths)
        places = replace(case, lengths=tuple(tree.context + len(tree.parents) for tree in trees))
        sequences = random_sequences(places, device)
        broken = [set(np.flatnonzero(rng.random(len(tree.parents)) < 0.15).tolist()) for tree in trees]
        for sequence, tree, nodes in zip(sequences, trees, broken, strict=True):
            for x in (sequence.k, sequence.v):
                x[[tree.context + node for node in nodes]] = fill
        layer = PagedLayer(make(rng), places, sequences, rng, fill, trees)
        got: dict[Row, torch.Tensor] = {}
        for rows in random_passes(layer, rng, max_span=3 * max_nodes):
            got |= dict(zip(rows, layer.run(rows, case.window), strict=True))
        for s, tree in enumerate(trees):
            for node, expected in paths_run_plainly(make, case, sequences[s], tree, broken[s]).items():
                if not torch.equal(bits(got[s, tree.context + node]), bits(expected)):
                    differing.append(f"round {seed}: node {node} of {tree}")
    return differing


def paths_run_plainly(
    make: MakeKernel, case: Case, sequence: QKV, tree: Tree, broken: set[int]
) -> dict[int, torch.Tensor]:
    """The results of the tree's nodes, each path as a sequence, up to the first broken node."""
    results: dict[int, torch.Tensor] = {}
    rng = np.random.default_rng(2)
    for leaf in tree.leaves():
        path = list(takewhile(lambda node: node not in broken, tree.path(leaf)))
        if not path or path[-1] in results:
            continue
        at = [*range(tree.context), *(tree.context + node for node in path)]
        alone = replace(case, lengths=(len(at),), tail=len(path) + 1)
        layer = PagedLayer(make(rng), alone, [QKV(*(x[at] for x in sequence))], rng, fill=float("nan"))
        out = layer.run([(0, p) for p in range(tree.context - 1, len(at))], case.window)[1:]
        results |= dict(zip(path, out, strict=True))
    return results


def native_kernel(_: np.random.Generator) -> AttentionKernel:
    from samewise.kernels.attention.native import NativeKernel

    return NativeKernel()


def torch_kernel(_: np.random.Generator) -> AttentionKernel:
    from samewise.kernels.attention.cpu import TorchKernel

    return TorchKernel()


def triton_kernel(rng: np.random.Generator) -> AttentionKernel:
    """With a random number of programs, and random tiles cut: bits must depend on neither."""
    from samewise.kernels.attention.tiles import TilePlan
    from samewise.kernels.attention.triton import TritonKernel

    class RandomCuts(TilePlan):
        def cut(self, splits: np.ndarray, num_rows: int) -> np.ndarray:
            return rng.random(len(splits)) >= rng.choice([0.0, 0.5, 1.0])

    class RandomlyCutKernel(TritonKernel):
        def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> TilePlan:
            return RandomCuts(**vars(super().plan(layers, dtype, max_rows, max_len)))

    num_programs = int(rng.choice([1, 5, 264])) if CUDA else int(rng.choice([1, 3]))
    return RandomlyCutKernel(num_programs, concurrent_programs=2)
