"""The law of canonical attention, for every kernel: how rows are packed never shows in the bits.

A reference runs every row alone. Then the same rows are run in random packings: spans of any length, other
rows beside them, rows out of order, padding between, other page numbers, other junk in memory nobody may
see. Results and stored pages must be equal bit for bit, and close to attention done densely in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samewise.kernels.attention.base import PAGE, Heads, Kernel, LayerKV, Rows

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, so before anything below

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
BORDERS = (15, 16, 17, 63, 64, 65, 255, 256, 257, 600)

Row = tuple[int, int] | None
"""A text's index and a position in it, or padding."""

Make = Callable[[np.random.Generator], Kernel]
"""A kernel, with what must not matter to it (the number of programs) drawn at random."""


@dataclass(frozen=True)
class Case:
    """Texts of given lengths, of which the kernel runs the last `tail` rows each."""

    group: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = BORDERS
    tail: int = 12

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def heads(self) -> Heads:
        return Heads(self.group * self.kv_heads, self.kv_heads, self.head_dim, self.window)

    def first(self, text: int) -> int:
        return max(0, self.lengths[text] - self.tail)

    def rows(self) -> list[tuple[int, int]]:
        return [(t, p) for t, n in enumerate(self.lengths) for p in range(self.first(t), n)]


class Text(NamedTuple):
    """What a model would have computed for one text."""

    q: torch.Tensor  # [L, Hq, D]
    k: torch.Tensor  # [L, Hkv, D]
    v: torch.Tensor  # [L, Hkv, D]


def texts(case: Case, device: torch.device) -> list[Text]:
    made = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(case.dtype).to(device)

    heads = case.group * case.kv_heads
    return [
        Text(*(draw(n, h, case.head_dim) for h in (heads, case.kv_heads, case.kv_heads)))
        for n in case.lengths
    ]


def dense(case: Case, text: Text, position: int) -> torch.Tensor:
    """One row's attention in float64."""
    first = 0 if case.window is None else max(0, position + 1 - case.window)
    k, v = (x[first : position + 1].double().repeat_interleave(case.group, dim=1) for x in (text.k, text.v))
    scores = torch.einsum("hd,khd->hk", text.q[position].double(), k) * case.scale
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v)


@dataclass
class Store:
    """A layer's pages, with each text's page numbers drawn at random and junk everywhere else."""

    kernel: Kernel
    case: Case
    texts: list[Text]
    rng: np.random.Generator
    junk: float
    kv: LayerKV = field(init=False)
    tables: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        counts = [-(-n // PAGE) for n in case.lengths]
        num_pages = 1 + sum(counts) + int(self.rng.integers(1, 9))
        self.kv = self.kernel.allocate(num_pages, case.kv_heads, case.head_dim, case.dtype, self.device)
        self.kv.k.fill_(self.junk)
        self.kv.v.fill_(self.junk)
        order = 1 + self.rng.permutation(num_pages - 1)
        self.tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        for text in range(len(counts)):
            self.lay_down(text, np.arange(case.first(text)))

    @property
    def device(self) -> torch.device:
        return self.texts[0].q.device

    def lay_down(self, text: int, positions: np.ndarray) -> None:
        """Write K and V, wanting no results: through the kernel, or by hand where that costs much more."""
        if self.kernel.name.startswith("triton"):
            pages, which = self.tables[text][positions // PAGE], self.ints(positions).long()
            at = self.ints(pages).long(), slice(None), which % PAGE
            self.kv.k[at] = self.texts[text].k[which]
            self.kv.v[at] = self.texts[text].v[which]
        elif len(positions):
            self.run([(text, int(p)) for p in positions], window=1)

    def run(self, rows: list[Row], window: int | None) -> torch.Tensor:
        """One pass. The page numbers of the texts follow one another in random order, junk behind."""
        case, rng = self.case, self.rng
        starts, pages = np.zeros(len(case.lengths), np.int32), [np.empty(0, np.int64)]
        for text in rng.permutation(len(case.lengths)):
            starts[text] = sum(len(p) for p in pages)
            pages.append(self.tables[text])
        pages.append(np.full(3, 2**30))
        lengths = np.array([0 if r is None else r[1] + 1 for r in rows], np.int32)
        slots = [
            rng.integers(PAGE) if r is None else self.tables[r[0]][r[1] // PAGE] * PAGE + r[1] % PAGE
            for r in rows
        ]
        page_start = [0 if r is None else starts[r[0]] for r in rows]
        plan = self.kernel.plan([case.heads], case.dtype, len(rows), max(case.lengths))
        work = np.full(0 if plan is None else plan.work_len(len(rows)), -1, np.int32)
        if plan is not None:
            plan.write(lengths, np.array(page_start, np.int32), work)
        workspace = torch.full((0 if plan is None else plan.workspace_len,), float("nan"), device=self.device)
        if plan is not None:
            workspace[-plan.num_arrivals :] = 0.0
        where = Rows(
            *(self.ints(x) for x in (lengths, slots, page_start, np.concatenate(pages), work)),
            workspace,
        )
        found = self.kernel(*self.inputs(rows), self.kv, where, scale=case.scale, window=window)
        if plan is not None:
            assert not workspace[-plan.num_arrivals :].any(), "the next pass finds arrivals of this one"
        return found

    def inputs(self, rows: list[Row]) -> list[torch.Tensor]:
        """Q, K and V of the rows, as views into one tensor; NaN for padding."""
        heads = (self.case.group * self.case.kv_heads, self.case.kv_heads, self.case.kv_heads)
        fused = torch.full((len(rows), sum(heads), self.case.head_dim), float("nan"), dtype=self.case.dtype)
        fused = fused.to(self.device)
        for i, row in enumerate(rows):
            if row is not None:
                text, position = self.texts[row[0]], row[1]
                fused[i] = torch.cat([text.q[position], text.k[position], text.v[position]])
        return list(fused.split(heads, dim=1))

    def ints(self, values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values).astype(np.int32)).to(self.device)

    def pages(self) -> list[torch.Tensor]:
        """Every page of every text in order, as stored: K and V in turn."""
        numbers = np.concatenate(self.tables)
        return [self.kv.k[numbers], self.kv.v[numbers]]


def packing(case: Case, rng: np.random.Generator) -> list[list[Row]]:
    """Passes that run every row of the case once, each text's in order of passes, with random company."""
    passes: list[list[Row]] = []
    at = [case.first(t) for t in range(len(case.lengths))]
    while any(p < n for p, n in zip(at, case.lengths, strict=True)):
        room = int(rng.choice([1, 3, 16, 40, 90]))
        rows: list[Row] = [None] * int(rng.integers(0, 3))
        for text in rng.permutation(len(at)):
            span = min(int(rng.integers(0, 14)), room - len(rows), case.lengths[text] - at[text])
            rows += [(int(text), at[text] + i) for i in range(max(0, span))]
            at[text] += max(0, span)
        if rng.integers(2):
            rows = [rows[i] for i in rng.permutation(len(rows))]
        if rows:
            passes.append(rows)
    return passes


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype])


@cache
def alone(make: Make, case: Case, device: torch.device) -> tuple[dict[Row, torch.Tensor], list[torch.Tensor]]:
    """The reference: results and stored pages when every row has a pass to itself."""
    rng = np.random.default_rng(1)
    store = Store(make(rng), case, texts(case, device), rng, junk=float("nan"))
    return {row: store.run([row], case.window)[0] for row in case.rows()}, store.pages()


def differences(make: Make, case: Case, device: torch.device, rounds: int = 3) -> list[str]:
    """What breaks the law, in words; empty if nothing does."""
    given = texts(case, device)
    truth, pages = alone(make, case, device)
    written = [~page.isnan() for page in pages]
    found = []
    for seed in range(rounds):
        rng = np.random.default_rng([seed, case.head_dim])
        store = Store(make(rng), case, given, rng, junk=(float("nan"), float("inf"), -3e4)[seed % 3])
        for rows in packing(case, rng):
            for row, out in zip(rows, store.run(rows, case.window), strict=True):
                want = torch.zeros_like(out) if row is None else truth[row]
                if not torch.equal(bits(out), bits(want)):
                    found.append(f"round {seed}: {row} in a pass of {len(rows)}")
        for was, now, ours in zip(pages, store.pages(), written, strict=True):
            if not torch.equal(bits(was)[ours], bits(now)[ours]):
                found.append(f"round {seed}: stored pages")
    return found


def error(make: Make, case: Case, device: torch.device) -> float:
    """Largest distance from the dense result of rows run alone."""
    given = texts(case, device)
    truth, _ = alone(make, case, device)
    return max(float((out.double() - dense(case, given[r[0]], r[1])).abs().max()) for r, out in truth.items())


def native(_: np.random.Generator) -> Kernel:
    from samewise.kernels.attention.native import NativeKernel

    return NativeKernel()


def plain(_: np.random.Generator) -> Kernel:
    from samewise.kernels.attention.cpu import TorchKernel

    return TorchKernel()


def triton(rng: np.random.Generator) -> Kernel:
    """With everything at random that must not show: how many programs, and which tiles are cut."""
    from samewise.kernels.attention.tiles import Plan
    from samewise.kernels.attention.triton import TritonKernel

    class Tossed(Plan):
        def cut(self, splits: np.ndarray, num_rows: int) -> np.ndarray:
            return rng.random(len(splits)) >= rng.choice([0.0, 0.5, 1.0])

    class Kernel(TritonKernel):
        def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> Plan:
            return Tossed(**vars(super().plan(layers, dtype, max_rows, max_len)))

    return Kernel(int(rng.choice([1, 5, 264])) if CUDA else int(rng.choice([1, 3])), at_once=2)


HEADS = [
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
"""For kernels at full speed: every head shape, every border."""

FEW = [
    Case(group=3, kv_heads=1, head_dim=16, lengths=(65, 257, 16), tail=3),
    Case(group=1, kv_heads=2, head_dim=80, lengths=(17, 259), tail=3, window=7),
    Case(group=4, kv_heads=1, head_dim=96, lengths=(255, 64), tail=2, window=64, dtype=torch.bfloat16),
    Case(group=8, kv_heads=1, head_dim=64, lengths=(600, 15), tail=1, window=100, dtype=torch.float16),
    Case(group=1, kv_heads=1, head_dim=256, lengths=(256, 63), tail=2, window=1),
    Case(group=1, kv_heads=1, head_dim=128, lengths=(600, 1), tail=2, dtype=torch.bfloat16),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100,), tail=1),
    Case(group=1, kv_heads=1, head_dim=16, lengths=(4100, 5), tail=1, window=300),
]
"""For the interpreter."""


def kernels() -> list[object]:
    """Every kernel with the cases it can afford, on the device it is for."""
    cpu = torch.device("cpu")
    params = [
        pytest.param(make, case, cpu, id=f"{name}-{i}")
        for name, make in (("native", native), ("torch", plain))
        for i, case in enumerate(HEADS)
    ]
    device = torch.device("cuda") if CUDA else cpu
    marks = [pytest.mark.gpu] if CUDA else []
    params += [
        pytest.param(triton, case, device, id=f"triton-{i}", marks=marks)
        for i, case in enumerate(HEADS + FEW if CUDA else FEW)
    ]
    return params


@pytest.mark.parametrize(("make", "case", "device"), kernels())
def test_packing_never_shows_in_the_bits(make: Make, case: Case, device: torch.device) -> None:
    rounds = 2 if make is triton and not CUDA else 3  # interpreted, a pass takes a tenth of a second
    assert differences(make, case, device, rounds) == []


@pytest.mark.parametrize(("make", "case", "device"), kernels())
def test_rows_are_close_to_dense_attention(make: Make, case: Case, device: torch.device) -> None:
    assert error(make, case, device) < CLOSE[case.dtype]


# The law is not empty: kernels as they are usually written break it.


@dataclass(frozen=True)
class Sloppy:
    """Plain attention with two habits of ordinary kernels, each a switch."""

    name: str = "sloppy"
    splits_by_count: bool = False  # more pieces per row when fewer rows share the machine
    reads_whole_pages: bool = False  # and trusts a weight of zero to silence what lies there

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
        assert window in (None, 1)  # 1: laying down what rows will see, results not wanted
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
        end = len(k) if self.reads_whole_pages else length
        scores = torch.einsum("hd,khd->hk", q, k[:end]) * scale
        scores[:, length:] = float("-inf")
        p = (scores - scores.amax(dim=1, keepdim=True)).exp()
        pieces = zip(p.chunk(num_splits, dim=1), v[:end].chunk(num_splits), strict=True)
        return sum(torch.einsum("hk,khd->hd", x, y) for x, y in pieces) / p.sum(dim=1, keepdim=True)


ORDINARY = Case(group=3, kv_heads=1, head_dim=64, lengths=(600, 257, 17), tail=8)


def test_the_law_catches_a_split_count() -> None:
    """Though each result is as close to the dense one as any."""
    cpu = torch.device("cpu")

    def make(_: np.random.Generator) -> Kernel:
        return Sloppy(splits_by_count=True)

    assert error(make, ORDINARY, cpu) < CLOSE[torch.float32]
    assert differences(make, ORDINARY, cpu)


def test_the_law_catches_a_leak() -> None:
    assert differences(lambda _: Sloppy(reads_whole_pages=True), ORDINARY, torch.device("cpu"))


# Triton alone.


DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"]
EIGHT_B = Case(group=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16, lengths=(2100, 1030, 300), tail=300)
"""For a card alone, as are groups and windows of several tiles."""

TILED = [  # number 7, on a card, is the 8B layout
    Case(group=1, kv_heads=1, head_dim=16, lengths=(90,), tail=20),
    Case(group=2, kv_heads=1, head_dim=16, lengths=(70, 9), tail=12, window=10, dtype=torch.bfloat16),
    Case(group=3, kv_heads=1, head_dim=64, lengths=(130,), tail=9, dtype=torch.bfloat16),
    Case(group=4, kv_heads=2, head_dim=80, lengths=(131,), tail=6, window=70, dtype=torch.float16),
    Case(group=7, kv_heads=1, head_dim=16, lengths=(70,), tail=5, window=30, dtype=torch.bfloat16),
    Case(group=8, kv_heads=1, head_dim=128, lengths=(66,), tail=4, dtype=torch.bfloat16),
    Case(group=20, kv_heads=1, head_dim=16, lengths=(20,), tail=3),  # more than the smallest tile holds
]
if CUDA:
    TILED += [EIGHT_B, replace(EIGHT_B, window=500), replace(EIGHT_B, group=7, kv_heads=4, window=1)]
    TILED += [replace(EIGHT_B, kv_heads=2, head_dim=256)]  # the most a program holds on a card


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "wide_from"),
    [(case, rows) for i, case in enumerate(TILED) for rows in (2, 9, 10**6) if rows == 9 or i in (1, 3, 7)],
)
def test_no_tile_shows_in_the_bits(
    case: Case, wide_from: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of tiles: the same rows at once, in other cuts, and one by one."""
    import samewise.kernels.attention.triton as module

    monkeypatch.setattr(module, "WIDE_FROM", wide_from)
    monkeypatch.setattr(module, "SPLIT", module.SPLIT if CUDA else 64)
    monkeypatch.setattr(module, "BLOCK", module.BLOCK if CUDA else 32)
    given, everybody = texts(case, torch.device(device)), case.rows()
    truth: dict[Row, torch.Tensor] = {}
    for seed in range(6 if CUDA else 1):
        rng = np.random.default_rng([seed, wide_from])
        store = Store(triton(rng), case, given, rng, junk=(float("nan"), float("inf"))[seed % 2])
        for text, length in enumerate(case.lengths):
            store.lay_down(text, np.arange(case.first(text), length))
        some = [everybody[i] for i in rng.permutation(len(everybody))[: 20 if CUDA else 2]]
        for rows in (everybody, spans(everybody, rng), *([row] for row in some)):
            for row, out in zip(rows, store.run(rows, case.window), strict=True):
                want = torch.zeros_like(out) if row is None else truth.setdefault(row, out)
                assert torch.equal(bits(out), bits(want)), row
        for row in some:
            want = dense(case, given[row[0]], row[1])
            assert float((truth[row].double() - want).abs().max()) < CLOSE[case.dtype]


def spans(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """The rows cut at random places, the pieces in random order, padding between some."""
    borders = np.flatnonzero(rng.random(len(rows)) < 0.2)
    pieces = [[int(i) for i in piece] for piece in np.split(np.arange(len(rows)), borders)]
    found: list[Row] = []
    for i in rng.permutation(len(pieces)):
        found += [*(rows[j] for j in pieces[i]), *[None] * int(rng.integers(0, 2))]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 9])
def test_what_only_others_see_cannot_leak(window: int | None, poison: float, device: str) -> None:
    """Rows of one tile, one of whose K and V is not finite: who may not see it answers as if it were not."""
    case = Case(group=2, kv_heads=1, head_dim=16, lengths=(90,), tail=40, window=window)
    if CUDA:
        case = replace(EIGHT_B, lengths=(600,), tail=100, window=window)
    (calm,) = texts(case, torch.device(device))
    at = case.first(0) + 12
    wild = Text(*(x.clone() for x in calm))
    wild.k[at], wild.v[at] = poison, poison
    outs = []
    for text in (calm, wild):
        rng = np.random.default_rng(3)
        store = Store(triton(rng), case, [text], rng, junk=float("nan"))
        with np.errstate(invalid="ignore"):  # of the interpreter's own making
            outs.append(store.run([*case.rows(), None], window))
    for row, ours, theirs in zip([*case.rows(), None], *outs, strict=True):
        blind = row is None or row[1] < at or (window is not None and row[1] >= at + window)
        if blind:
            assert torch.equal(bits(ours), bits(theirs)), row
        else:
            assert theirs.isnan().any(), row


@pytest.mark.parametrize("device", DEVICES)
def test_another_split_size_gives_other_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the split size is in the kernel's name."""
    import samewise.kernels.attention.triton as module

    case = Case(group=3, kv_heads=1, head_dim=64, lengths=(600,), tail=2)
    ours, _ = alone(triton, case, torch.device(device))
    monkeypatch.setattr(module, "SPLIT", 128)
    theirs, _ = alone.__wrapped__(triton, case, torch.device(device))
    assert any(not torch.equal(bits(ours[row]), bits(theirs[row])) for row in ours)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_can_be_traced(device: str) -> None:
    """One graph, no break, and the pages written in place."""
    case = Case(group=2, kv_heads=1, head_dim=16, lengths=(20,), tail=2)
    rng = np.random.default_rng(0)
    store = Store(triton(rng), case, texts(case, torch.device(device)), rng, junk=0.0)
    truth, pages = alone(triton, case, store.device)
    kernel = store.kernel

    def layer(*args: object, scale: float, window: int | None) -> torch.Tensor:
        return kernel(*args, scale=scale, window=window)

    class Traced:
        name = kernel.name
        plan = staticmethod(kernel.plan)
        __call__ = staticmethod(torch.compile(layer, fullgraph=True, backend="aot_eager"))

    store.kernel = Traced()
    outs = store.run([(0, 18), None, (0, 19)], window=None)
    assert torch.equal(bits(outs[0]), bits(truth[0, 18]))
    assert torch.equal(bits(outs[2]), bits(truth[0, 19]))
    for was, now in zip(pages, store.pages(), strict=True):
        assert torch.equal(now[~was.isnan()], was[~was.isnan()])


@pytest.mark.parametrize("device", DEVICES)
def test_a_frame_brings_the_kernel_its_work(device: str) -> None:
    """From spans through the staging: two spans and padding, against the kernel in plain torch."""
    from array import array

    from samewise.execute.pack import pack_frame
    from samewise.execute.runner import Runner
    from samewise.testing import tiny
    from samewise.types import Sampling, Span

    spans = []
    for i, (rows, pages) in enumerate([(3, [4]), (18, [2, 5])]):
        tokens = [7 * i + j + 1 for j in range(rows)]
        spans.append(Span(i, 0, tuple(tokens), rows, array("i", pages), Sampling(), tokens, rows))
    found = []
    for kernel, where in ((plain(None), "cpu"), (triton(np.random.default_rng(0)), device)):
        loaded = tiny(num_hidden_layers=2)
        runner = Runner(
            loaded.model, loaded.arch, kernel, num_pages=8, sizes=(24,), max_rows=24, max_model_len=64,
            dtype=torch.float32, device=torch.device(where), compile=False,
        )  # fmt: skip
        found.append(runner.frame(pack_frame(spans, runner.staging(24)))[:21].cpu())
    assert torch.allclose(*found, atol=1e-3, rtol=1e-3)
