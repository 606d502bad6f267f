"""Packing: the C++ packer and the Python reference fill a staging buffer with the same numbers."""

import random
from array import array

import numpy as np
import pytest
import torch

from native_variants import needs_compiler
from samewise.errors import InvariantBroken
from samewise.execute.native import packer
from samewise.execute.pack import pack_fast, pack_frame
from samewise.execute.staging import FIELDS, StagingBuffer
from samewise.kernels.attention.base import PAGE
from samewise.kernels.attention.tiles import TilePlan
from samewise.types import ROOT, Ask, Sampling, Span

GREEDY = Sampling()
PLAN = TilePlan(
    tile_rows=4, split=64, window=None, kv_heads=2, num_slots=60, slot_len=4, num_arrivals=64,
    concurrent_programs=24, busy_rows=32,
)  # fmt: skip
PLANS = {
    "no plan": None,
    "plain": PLAN,
    "window": TilePlan(**(vars(PLAN) | {"window": 100})),
    "wide": TilePlan(**(vars(PLAN) | {"wide_rows": 16, "wide_from": 40, "tile_rows": 3})),
    "wide and window": TilePlan(**(vars(PLAN) | {"wide_rows": 12, "wide_from": 1, "window": 40})),
    "much space": TilePlan(**(vars(PLAN) | {"num_slots": 10_000, "concurrent_programs": 4})),
}


def staging_of(rows, plan, *, native, pages=4000, num_kept=0, max_moves=0):
    staging = StagingBuffer(
        rows, pages, torch.zeros(0), torch.device("cpu"), 3, plan, num_kept=num_kept, max_moves=max_moves
    )
    if not native:
        staging.packer = None
    return staging


def span_of(start, inputs, *, given=None, parents=(), pages=None, source=None):
    given = len(inputs) - len(parents) if given is None else given
    if pages is None:
        pages = range(1, 2 + (start + len(inputs)) // PAGE)
    tokens = list(range(start + given))
    return Span(
        0, start, tuple(inputs), given, array("i", pages), GREEDY, tokens, 1, source=source, parents=parents
    )


def random_span(rng, room):
    """A decode row, a row from the device, a prompt chunk, a chain or a tree of up to `room` rows."""
    kind, start = rng.choice(("decode", "source", "prompt", "chain", "tree")), rng.choice((0, 15, 40, 700))
    start += rng.randrange(60)
    rows = 1 if kind in {"decode", "source"} else rng.randint(1, room)
    inputs = [rng.randrange(50_000) for _ in range(rows)]
    pages = [rng.randrange(1, 10_000) for _ in range((start + rows) // PAGE + 1 + rng.randrange(3))]
    if kind == "tree":
        given = rng.randint(1, min(rows, 3))
        parents = tuple(rng.randint(max(ROOT, node - 3), node - 1) for node in range(rows - given))
        return span_of(start, inputs, given=given, parents=parents, pages=pages)
    source = rng.randrange(30) if kind == "source" else None
    given = rows + rng.choice((0, 0, 20)) if kind == "prompt" else 1
    return span_of(start, inputs, given=given, pages=pages, source=source)


def random_spans(rng, num_rows):
    spans, room = [], rng.randint(0, num_rows)
    while room > 0:
        spans.append(random_span(rng, min(room, rng.choice((1, 8, 40)))))
        room -= len(spans[-1].inputs)
    return spans


def assert_same(native, reference):
    for ours, theirs in zip(native._arrays, reference._arrays, strict=True):
        assert np.array_equal(ours, theirs)
    assert native._current == reference._current


@needs_compiler
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("num_rows", [1, 8, 50])
def test_frames_are_packed_to_the_same_numbers(num_rows, plan):
    """The whole buffers are compared after each of many frames: what is left as it was is the same too."""
    rng = random.Random(num_rows)
    kept = num_rows // 3
    native, reference = (
        staging_of(num_rows, plan, native=native, num_kept=kept, max_moves=6) for native in (True, False)
    )
    assert native.packer is not None
    for _ in range(100):
        spans = random_spans(rng, num_rows)
        keep = rng.sample(range(num_rows), kept) if kept and rng.random() < 0.5 else None
        moves = [(rng.randrange(10**6), rng.randrange(10**6)) for _ in range(rng.choice((0, 0, 3, 6)))]
        inputs = [pack_frame(spans, staging, keep, moves) for staging in (native, reference)]
        assert_same(native, reference)
        assert all((x.keep is None) == (keep is None) for x in inputs)
        num_tables = sum(len(span.pages) for span in spans)
        assert torch.equal(inputs[0].rows.pages[:num_tables], inputs[1].rows.pages[:num_tables])


@needs_compiler
@pytest.mark.parametrize("plan", [None, PLAN], ids=["no plan", "plan"])
def test_fast_passes_are_packed_to_the_same_numbers(plan):
    rng = random.Random(5)
    native, reference = (staging_of(7, plan, native=native) for native in (True, False))
    for num in (0, 1, 3, 7):
        asks = []
        for i in range(num):
            tokens = [rng.randrange(100) for _ in range(rng.randint(1, 50))]
            draft = [rng.randrange(100) for _ in range(rng.choice((0, 3)))]
            asks.append(Ask(i, tokens, 1, draft, 0, array("i", [9, 3, 7, 5, 8]), GREEDY, 4))
        for sources, ahead in ((None, 0), ([5] * num, 3)):
            for staging in (native, reference):
                pack_fast(asks, staging, sources, ahead)
            assert_same(native, reference)


@pytest.fixture(params=[pytest.param(True, marks=needs_compiler), False], ids=["native", "python"])
def native(request):
    return request.param


def test_a_tree_is_laid_out_with_positions_slots_and_tails(native):
    """Two given rows at 14 and 15, then two chains of two nodes from the root: slots follow the pages."""
    staging = staging_of(8, None, native=native)
    span = span_of(14, [7, 8, 1, 2, 3, 4], parents=(ROOT, 0, ROOT, 2), pages=[5, 3])
    pack_frame([span_of(0, [6], pages=[9]), span], staging)
    written = staging._arrays[0][:64].reshape(8, 8).tolist()
    fields = dict(zip(FIELDS, written, strict=True))
    assert fields == {
        "tokens": [6, 7, 8, 1, 2, 3, 4, 0],
        "source": [-1] * 8,
        "positions": [0, 14, 15, 16, 17, 16, 17, 0],
        "lengths": [1, 15, 16, 17, 18, 17, 18, 0],
        "slots": [144, 94, 95, 48, 49, 50, 51, 0],
        "page_start": [0, 1, 1, 1, 1, 1, 1, 0],
        "tail_start": [1, 15, 16, 16, 16, 16, 16, 0],
        "tail": [0, 0, 0, 3, 3, 5, 5, 0],
    }
    assert staging.inputs.rows.pages[:7].tolist() == [9, 5, 3, 48, 49, 50, 51]


def test_slots_to_move_and_rows_to_keep_reach_the_device(native):
    staging = staging_of(4, PLAN, native=native, num_kept=2, max_moves=3)
    inputs = pack_frame([span_of(0, [1, 2])], staging, [1, 0], [(20, 17), (30, 18)])
    assert inputs.moves.tolist() == [2, 20, 17, 30, 18, 0, 0]
    assert inputs.keep.tolist() == [1, 0]
    assert pack_frame([], staging).moves[0] == 0
    assert staging_of(4, PLAN, native=native).inputs.moves is None


def test_more_rows_or_moves_than_fit_are_refused(native):
    staging = staging_of(4, None, native=native, max_moves=1)
    with pytest.raises(InvariantBroken, match="rows for a pass of 4"):
        pack_frame([span_of(0, [1, 2, 3]), span_of(0, [4, 5])], staging)
    with pytest.raises(InvariantBroken):
        pack_frame([], staging, moves=[(1, 2), (3, 4)])


@needs_compiler
@pytest.mark.parametrize(
    "span",
    [
        span_of(30, [1, 2, 3], pages=[4, 5]),
        span_of(0, [1, 2, 3], parents=(ROOT, 1)),
        span_of(0, [1, 2, 3], parents=(ROOT, -2)),
        span_of(0, [1, 2, 3], given=1, parents=(ROOT,)),
        span_of(-1, [1]),
        span_of(0, [1] * 8, parents=(ROOT, ROOT, 0, 1, 2, 3, 4), pages=[1] * 40),
        span_of(0, [1], pages=[1] * 51),
    ],
    ids=["position", "parent", "no parent", "parents", "start", "tails", "pages"],
)
def test_numbers_that_do_not_fit_together_are_refused(span):
    staging = staging_of(8, PLAN, native=True, pages=50)
    with pytest.raises(InvariantBroken, match="cannot be packed"):
        pack_frame([span], staging)


def test_without_a_compiler_passes_are_packed_in_python(monkeypatch):
    monkeypatch.setattr(packer, "_library", lambda: None)
    staging = StagingBuffer(2, 4, torch.zeros(0), torch.device("cpu"))
    assert staging.packer is None
    assert pack_frame([span_of(3, [5])], staging).tokens.tolist() == [[5, 0]]


@needs_compiler
def test_a_plan_of_another_kind_is_written_in_python():
    class OtherPlan:
        workspace_len = 0

        def work_list_len(self, num_rows):
            return 1

        def write(self, lengths, page_start, tail_start, tail, work_list):
            work_list[:] = lengths.sum()

    staging = staging_of(2, OtherPlan(), native=True)
    assert staging.packer is None
    assert pack_frame([span_of(3, [5])], staging).rows.work_list.tolist() == [4]
