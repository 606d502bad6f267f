"""The CPU attention kernels: close to float64, and bits that depend on no other row, thread or compiler."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace

import pytest
import torch
from attention_cases import Case, native_kernel, tree_differences

from native_variants import variant_library
from samewise.errors import BadParameter, InvariantBroken
from samewise.kernels.attention import native
from samewise.kernels.attention.base import NUM_TABLES, PAGE, AttentionKernel, LayerKV, Rows
from samewise.kernels.attention.cpu import TorchKernel, pick_cpu_kernel
from samewise.kernels.native import build as native_build

needs_compiler = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")
CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's q, k, v, and its page numbers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int]

    def __len__(self) -> int:
        return self.q.shape[0]


def random_sequence(
    length, pages, *, heads=6, kv_heads=2, dim=64, dtype=torch.float32, seed=0
) -> PagedSequence:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, h, dim, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads))
    return PagedSequence(q, k, v, pages)


def scattered_pages(length: int, seed: int = 0) -> list[int]:
    numbers = list(range(1, (length + PAGE - 1) // PAGE + 3))
    random.Random(seed).shuffle(numbers)
    return numbers[: (length + PAGE - 1) // PAGE]


def allocate_pages(
    kernel: AttentionKernel, sequence: PagedSequence, num_pages: int = 0, fill: float = NAN
) -> LayerKV:
    kv_heads, dim = sequence.k.shape[1:]
    kv = kernel.allocate(num_pages or max(sequence.pages) + 1, kv_heads, dim, sequence.q.dtype, CPU)
    kv.k.fill_(fill)
    kv.v.fill_(fill)
    return kv


def pass_inputs(places: list[tuple[PagedSequence, int] | None]) -> tuple[Rows, tuple[torch.Tensor, ...]]:
    """The row tables and q, k, v of a pass of (sequence, position) rows; None is padding."""
    sequences = list({id(p[0]): p[0] for p in places if p}.values())
    starts, pages = {}, []
    for sequence in sequences:
        starts[id(sequence)] = len(pages)
        pages += sequence.pages
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    lengths = ints([p[1] + 1 if p else 0 for p in places])
    rows = Rows(
        lengths,
        ints(
            [p[0].pages[p[1] // PAGE] * PAGE + p[1] % PAGE if p else i % PAGE for i, p in enumerate(places)]
        ),
        ints([starts[id(p[0])] if p else 0 for p in places]),
        lengths,
        torch.zeros_like(lengths),
        ints(pages),
        torch.empty(0),
        torch.empty(0),
    )
    padding = torch.full_like(sequences[0].q[0], NAN), *(torch.full_like(sequences[0].k[0], NAN),) * 2
    inputs = [(p[0].q[p[1]], p[0].k[p[1]], p[0].v[p[1]]) if p else padding for p in places]
    return rows, tuple(torch.stack(x) for x in zip(*inputs, strict=True))


def run(kernel, kv, places, *, scale=0.125, window=None) -> torch.Tensor:
    rows, (q, k, v) = pass_inputs(places)
    return kernel(q, k, v, kv, rows, scale=scale, window=window)


def run_in_spans(kernel, sequence, *, size=16, window=None, kv=None, scale=0.125) -> torch.Tensor:
    """The results of a whole sequence, run in spans of `size` rows."""
    kv = kv or allocate_pages(kernel, sequence)
    places = [(sequence, position) for position in range(len(sequence))]
    spans = [places[i : i + size] for i in range(0, len(places), size)]
    return torch.cat([run(kernel, kv, span, window=window, scale=scale) for span in spans])


def dense_reference(sequence: PagedSequence, window=None, scale=0.125, first=0) -> torch.Tensor:
    """Attention in float64 of every position from `first` on."""
    q, k, v = (x.double().transpose(0, 1) for x in (sequence.q[first:], sequence.k, sequence.v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    positions = torch.arange(len(sequence))
    visible = positions[None, :] <= positions[first:, None]
    if window is not None:
        visible &= positions[None, :] > positions[first:, None] - window
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "torch"])
def kernel(request) -> AttentionKernel:
    return pick_cpu_kernel(request.param)


# -- results -------------------------------------------------------------------------------------------

SHAPES = [(6, 2, 64), (9, 3, 64), (4, 4, 16), (14, 2, 128), (8, 1, 80), (5, 5, 24), (3, 1, 7), (50, 1, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 16, 37])
def test_results_agree_with_float64(kernel, heads, kv_heads, dim, window):
    sequence = random_sequence(75, scattered_pages(75), heads=heads, kv_heads=kv_heads, dim=dim)
    got = run_in_spans(kernel, sequence, window=window)
    assert (got - dense_reference(sequence, window)).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("window", [None, 20])
def test_half_precision_results_agree_with_float64(kernel, dtype, tolerance, window):
    sequence = random_sequence(60, scattered_pages(60), dtype=dtype)
    got = run_in_spans(kernel, sequence, window=window)
    assert got.dtype == dtype
    assert (got.double() - dense_reference(sequence, window)).abs().max() < tolerance


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32_and_rounds_once(dtype):
    kernel = pick_cpu_kernel("native")
    base = random_sequence(60, scattered_pages(60), dtype=dtype)
    wide_range = torch.logspace(-8, 4, 60)[:, None, None].to(dtype)
    half = replace(base, v=base.v * wide_range)
    full = PagedSequence(half.q.float(), half.k.float(), half.v.float(), half.pages)
    assert same_bits(run_in_spans(kernel, half), run_in_spans(kernel, full).to(dtype))


def test_a_single_key_gives_its_value_exactly(kernel):
    sequence = random_sequence(1, [3])
    assert torch.equal(run_in_spans(kernel, sequence)[0], sequence.v[0].repeat_interleave(3, dim=0))


def test_scores_far_apart_neither_overflow_nor_vanish(kernel):
    sequence = random_sequence(40, scattered_pages(40))
    scaled = replace(sequence, q=sequence.q * 100, k=sequence.k * 100)
    error = (run_in_spans(kernel, scaled) - dense_reference(scaled)).abs().max()
    assert error < 1e-2  # scores are near 1e4, where float32 has steps of 1e-3


@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_agree_with_float64_and_rows_run_alone(kernel, window):
    sequence = random_sequence(5000, scattered_pages(5000), heads=3, kv_heads=1)
    kv = allocate_pages(kernel, sequence)
    run_in_spans(kernel, sequence, size=5000, kv=kv, window=1)  # fills the pages
    last = [(sequence, p) for p in range(4984, 5000)]
    got = run(kernel, kv, last, window=window)
    assert (got - dense_reference(sequence, window, first=4984)).abs().max() < 1e-5
    alone = torch.cat([run(kernel, kv, [place], window=window) for place in last])
    assert same_bits(got, alone)


@needs_compiler
def test_a_context_beyond_the_scratch_of_one_tile_keeps_its_bits():
    """32k keys and 128 queries do not fit the scores one thread may hold: the queries are cut into tiles."""
    kernel = pick_cpu_kernel("native")
    sequence = random_sequence(32768, scattered_pages(32768), heads=16, kv_heads=1, dim=16)
    kv = allocate_pages(kernel, sequence)
    run_in_spans(kernel, sequence, size=32768, kv=kv, window=1)
    places = [(sequence, p) for p in range(32760, 32768)]
    together = run(kernel, kv, places)
    assert same_bits(together[3:4], run(kernel, kv, places[3:4]))
    assert together.isfinite().all()


# -- what bits must not depend on ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("size", [1, 3, 7, 33, 100])
def test_bits_do_not_depend_on_span_length(kernel, dtype, window, size):
    sequence = random_sequence(100, scattered_pages(100), dtype=dtype)
    assert same_bits(
        run_in_spans(kernel, sequence, window=window),
        run_in_spans(kernel, sequence, size=size, window=window),
    )


@pytest.mark.parametrize("window", [None, 24])
def test_bits_do_not_depend_on_other_rows_order_page_numbers_or_unwritten_memory(kernel, window):
    one, two = random_sequence(90, list(range(1, 7))), random_sequence(70, list(range(7, 12)), seed=1)
    moved = replace(one, pages=[19, 3, 11, 12, 1, 7]), replace(two, pages=[2, 4, 5, 6, 8])
    alone = {0: run_in_spans(kernel, one, window=window), 1: run_in_spans(kernel, two, window=window)}
    rng = random.Random(5)
    for fill in (NAN, float("inf"), 3e38, 0.0):
        kv = allocate_pages(kernel, one, num_pages=20, fill=fill)
        done = [0, 0]
        while done != [90, 70]:
            spans = [
                list(range(n, min(n + rng.randrange(40), len(t))))
                for n, t in zip(done, (one, two), strict=True)
            ]
            places = [(i, p) for i, span in enumerate(spans) for p in span] + [None] * rng.randrange(3)
            if rng.random() < 0.5:
                rng.shuffle(places)
            done = [n + len(span) for n, span in zip(done, spans, strict=True)]
            if not any(places):
                continue
            got = run(kernel, kv, [p and (moved[p[0]], p[1]) for p in places], window=window)
            for row, place in enumerate(places):
                want = alone[place[0]][place[1]] if place else torch.zeros_like(got[row])
                assert same_bits(got[row], want)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 3e38])
def test_a_non_finite_key_changes_no_row_that_may_not_see_it(kernel, poison):
    sequence = random_sequence(32, [2, 1])
    k, v = sequence.k.clone(), sequence.v.clone()
    k[20], v[20] = poison, poison
    poisoned = replace(sequence, k=k, v=v)
    assert same_bits(run_in_spans(kernel, sequence)[:20], run_in_spans(kernel, poisoned)[:20])
    after = run_in_spans(kernel, poisoned, window=4)[24:]  # windows that begin after the key
    assert same_bits(after, run_in_spans(kernel, sequence, window=4)[24:])


def test_a_nan_key_gives_nan_to_rows_that_see_it(kernel):
    sequence = random_sequence(20, [1, 2])
    k = sequence.k.clone()
    k[4] = NAN
    assert run_in_spans(kernel, replace(sequence, k=k))[19].isnan().all()


def test_padding_gives_zeros(kernel):
    sequence = random_sequence(4, [1])
    rows, (q, k, v) = pass_inputs([(sequence, 0)])
    rows = rows._replace(lengths=torch.zeros(1, dtype=torch.int32), slots=torch.zeros(1, dtype=torch.int32))
    assert not kernel(q * NAN, k, v, allocate_pages(kernel, sequence), rows, scale=1.0, window=None).any()


# -- threads, compilers, strides -----------------------------------------------------------------------


@needs_compiler
def test_bits_of_trees_do_not_depend_on_the_number_of_threads():
    case = Case(group=3, kv_heads=3, head_dim=64, lengths=(400, 250, 131))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        assert tree_differences(native_kernel, case, CPU, max_nodes=64) == []
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_bits_do_not_depend_on_the_number_of_threads():
    kernel = pick_cpu_kernel("native")
    sequence = random_sequence(400, scattered_pages(400), heads=9, kv_heads=3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run_in_spans(kernel, sequence, size=130))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@needs_compiler
@pytest.mark.parametrize("build", ["portable, -O1", pytest.param("portable", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_vector_instructions_or_optimization_of_the_build(build):
    other = native.entry_of(variant_library(build))
    kernel = pick_cpu_kernel("native")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sequence = random_sequence(70, scattered_pages(70), heads=9, kv_heads=3, dim=40, dtype=dtype)
        sequence = replace(sequence, q=sequence.q * 20)
        rows, (q, k, v) = pass_inputs([(sequence, p) for p in range(70)])
        kv = allocate_pages(kernel, sequence)
        got = native.attend(other, q, k, v, kv.k, kv.v, *rows[:NUM_TABLES], 0.125, 50)
        assert same_bits(got, run_in_spans(kernel, sequence, window=50))


@needs_compiler
def test_bits_do_not_depend_on_torchs_flushing_of_subnormals():
    kernel = pick_cpu_kernel("native")
    sequence = random_sequence(50, scattered_pages(50))
    tiny = replace(sequence, v=sequence.v * 1e-39)
    want = run_in_spans(kernel, tiny)
    assert want.any()
    try:
        assert torch.set_flush_denormal(True)
        got = run_in_spans(kernel, tiny)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(want, got)


def test_bits_do_not_depend_on_strides(kernel):
    sequence = random_sequence(30, [1, 2])
    rows, (q, k, v) = pass_inputs([(sequence, p) for p in range(30)])
    want = kernel(q, k, v, allocate_pages(kernel, sequence), rows, scale=0.125, window=None)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    by_dim = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (q, k, v)]
    for inputs in (by_head, by_dim):
        got = kernel(*inputs, allocate_pages(kernel, sequence), rows, scale=0.125, window=None)
        assert got.is_contiguous()
        assert same_bits(want, got)


@needs_compiler
def test_row_tables_outside_the_pages_are_refused():
    kernel = pick_cpu_kernel("native")
    sequence = random_sequence(20, [1, 2])
    rows, (q, k, v) = pass_inputs([(sequence, p) for p in range(20)])
    kv = allocate_pages(kernel, sequence)
    for broken in (
        rows._replace(slots=rows.slots + 1000),
        rows._replace(slots=rows.slots - 1000),
        rows._replace(pages=rows.pages + 7),
        rows._replace(page_start=rows.page_start + 1),
        rows._replace(lengths=rows.lengths + 100),
        rows._replace(lengths=rows.lengths.long()),
        rows._replace(slots=rows.slots[:4]),
        rows._replace(tail=rows.tail[:4]),
        rows._replace(tail_start=rows.tail_start - 1, tail=rows.tail + 2),
        rows._replace(tail_start=rows.tail_start - 1, tail=rows.tail - 1),
        rows._replace(tail_start=rows.tail_start - 30),
        rows._replace(
            tail_start=rows.tail_start - 1,
            tail=rows.tail + 2,
            pages=torch.cat([rows.pages, rows.pages[:1] * 48]),
        ),
    ):
        with pytest.raises(InvariantBroken):
            kernel(q, k, v, kv, broken, scale=1.0, window=None)
    with pytest.raises(InvariantBroken):
        kernel(q.half(), k, v, kv, rows, scale=1.0, window=None)
    with pytest.raises(InvariantBroken):
        kernel(q, k[:, :1], v, kv, rows, scale=1.0, window=None)


# -- under torch.compile -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside torch's compiler
def test_a_compiled_layer_is_one_graph_and_writes_pages_in_place(kernel, monkeypatch):
    sequence = random_sequence(30, [1, 2])
    rows, (q, k, v) = pass_inputs([(sequence, p) for p in range(30)])

    def layer(q, k, v, kv, rows):
        return kernel(q * 2 + 1, k, v, kv, rows, scale=0.125, window=20) * 3

    eager, compiled = allocate_pages(kernel, sequence), allocate_pages(kernel, sequence)
    attend, written = native.attend, []

    def record(entry, q, k, v, k_cache, v_cache, *rest):
        written.append((k_cache.data_ptr(), v_cache.data_ptr()))
        return attend(entry, q, k, v, k_cache, v_cache, *rest)

    monkeypatch.setattr(native, "attend", record)
    with torch.no_grad():
        want = layer(q, k, v, eager, rows)
        got = torch.compile(layer, fullgraph=True)(q, k, v, compiled, rows)
    assert same_bits(want, got)
    if isinstance(kernel, native.NativeKernel):
        assert written == [(kv.k.data_ptr(), kv.v.data_ptr()) for kv in (eager, compiled)]
    for a, b in zip(eager, compiled, strict=True):
        assert same_bits(a, b)


# -- the choice of a kernel ----------------------------------------------------------------------------


def test_kernels_are_picked_by_name_and_auto_warns_without_a_compiler(monkeypatch, caplog):
    assert isinstance(pick_cpu_kernel("torch"), TorchKernel)
    with pytest.raises(BadParameter, match="flash") as caught:
        pick_cpu_kernel("flash")
    assert caught.value.param == "attention"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert isinstance(pick_cpu_kernel("auto"), TorchKernel)
    assert "contract" in caplog.text
