"""Attention in Triton: tiles, leaks and tracing, on a CUDA device or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import (
    CUDA,
    QKV,
    TOLERANCE,
    Case,
    PagedLayer,
    Row,
    Tree,
    bits,
    dense_attention,
    paths_run_plainly,
    random_sequences,
    rows_run_alone,
    torch_kernel,
    triton_kernel,
)

from samewise.kernels.attention.base import Heads

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"]
EIGHT_B = Case(group=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16, lengths=(2100, 1030, 300), tail=300)
"""The heads of an 8B model: too slow for the interpreter, as are groups and windows of several tiles."""

TILED = [  # on a CUDA device, number 7 is EIGHT_B
    Case(group=1, kv_heads=1, head_dim=16, lengths=(90,), tail=20),
    Case(group=2, kv_heads=1, head_dim=16, lengths=(70, 9), tail=12, window=10, dtype=torch.bfloat16),
    Case(group=3, kv_heads=1, head_dim=64, lengths=(130,), tail=9, dtype=torch.bfloat16),
    Case(group=4, kv_heads=2, head_dim=80, lengths=(131,), tail=6, window=70, dtype=torch.float16),
    Case(group=7, kv_heads=1, head_dim=16, lengths=(70,), tail=5, window=30, dtype=torch.bfloat16),
    Case(group=8, kv_heads=1, head_dim=128, lengths=(66,), tail=4, dtype=torch.bfloat16),
    Case(
        group=20, kv_heads=1, head_dim=16, lengths=(20,), tail=3
    ),  # more heads than the smallest tile has rows
]
if CUDA:
    TILED += [EIGHT_B, replace(EIGHT_B, window=500), replace(EIGHT_B, group=7, kv_heads=4, window=1)]
    TILED += [replace(EIGHT_B, kv_heads=2, head_dim=256)]  # the widest head that fits a program on an H200


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "wide_from"),
    [(case, rows) for i, case in enumerate(TILED) for rows in (2, 9, 10**6) if rows == 9 or i in (1, 3, 7)],
)
def test_bits_do_not_depend_on_tiles(
    case: Case, wide_from: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in one pass, in random spans, and one by one, in narrow and in wide tiles."""
    import samewise.kernels.attention.triton as module

    constants = replace(module.CONSTANTS, wide_from=wide_from)
    monkeypatch.setattr(module, "CONSTANTS", constants if CUDA else replace(constants, split=64, block=32))
    sequences, all_rows = random_sequences(case, torch.device(device)), case.rows()
    results: dict[Row, torch.Tensor] = {}
    for seed in range(6 if CUDA else 1):
        rng = np.random.default_rng([seed, wide_from])
        fill = (float("nan"), float("inf"))[seed % 2]
        layer = PagedLayer(triton_kernel(rng), case, sequences, rng, fill)
        for sequence, length in enumerate(case.lengths):
            layer.write_kv(sequence, np.arange(case.first(sequence), length))
        single_rows = [all_rows[i] for i in rng.permutation(len(all_rows))[: 20 if CUDA else 2]]
        for rows in (all_rows, random_spans(all_rows, rng), *([row] for row in single_rows)):
            for row, out in zip(rows, layer.run(rows, case.window), strict=True):
                expected = torch.zeros_like(out) if row is None else results.setdefault(row, out)
                assert torch.equal(bits(out), bits(expected)), row
        for row in single_rows:
            expected = dense_attention(case, sequences[row[0]], row[1])
            assert float((results[row].double() - expected).abs().max()) < TOLERANCE[case.dtype]


def random_spans(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """The rows split at random, the spans in random order, padding after some of them."""
    borders = np.flatnonzero(rng.random(len(rows)) < 0.2)
    spans = [[int(i) for i in span] for span in np.split(np.arange(len(rows)), borders)]
    shuffled: list[Row] = []
    for i in rng.permutation(len(spans)):
        shuffled += [*(rows[j] for j in spans[i]), *[None] * int(rng.integers(0, 2))]
    return shuffled


# Contexts end at and beside the edges of pages, blocks of 32 keys and splits of 64.
TREES = [
    Case(group=1, kv_heads=1, head_dim=16, lengths=(31, 60), window=None),
    Case(group=4, kv_heads=1, head_dim=16, lengths=(64, 17, 95), dtype=torch.bfloat16),
    Case(group=6, kv_heads=2, head_dim=16, lengths=(63, 32)),
    Case(group=4, kv_heads=1, head_dim=16, lengths=(62, 33), window=3),  # the window begins in the tree
    Case(group=4, kv_heads=1, head_dim=16, lengths=(127, 16), window=40, dtype=torch.bfloat16),
    Case(group=20, kv_heads=1, head_dim=16, lengths=(47,), window=9),
]
if CUDA:
    TREES += [replace(EIGHT_B, window=window) for window in (None, 4, 500)]
    TREES += [replace(EIGHT_B, group=6, kv_heads=2, head_dim=64, lengths=(255, 256, 31))]


def depth_first_tree(context: int, num_nodes: int, rng: np.random.Generator) -> Tree:
    """A tree whose nodes stand depth first: a node's parent is the node before it or an ancestor of that."""
    parents: list[int] = []
    tree = Tree(context, ())
    for node in range(num_nodes):
        path = [-1, *(tree.path(node - 1) if node else [])]
        parents.append(path[-1] if rng.random() < 0.6 else path[int(rng.integers(len(path)))])
        tree = Tree(context, tuple(parents))
    return tree


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "wide_from"), [(case, 2 if i % 3 == 1 else 10**6) for i, case in enumerate(TREES)]
)
def test_a_trees_rows_have_the_bits_of_their_paths_in_any_tiles(
    case: Case, wide_from: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole trees after the last rows of their context, in one pass; K and V of some nodes are not finite."""
    import samewise.kernels.attention.triton as module

    constants = replace(module.CONSTANTS, wide_from=wide_from)
    monkeypatch.setattr(module, "CONSTANTS", constants if CUDA else replace(constants, split=64, block=32))
    for seed in range(4 if CUDA else 1):
        rng = np.random.default_rng([seed, case.group, wide_from])
        trees = tuple(depth_first_tree(n, 60 if CUDA else 14, rng) for n in case.lengths)
        places = replace(case, lengths=tuple(tree.context + len(tree.parents) for tree in trees))
        sequences = random_sequences(places, torch.device(device))
        broken = [set(np.flatnonzero(rng.random(len(tree.parents)) < 0.1).tolist()) for tree in trees]
        for sequence, tree, nodes in zip(sequences, trees, broken, strict=True):
            for x in (sequence.k, sequence.v):
                x[[tree.context + node for node in nodes]] = (float("nan"), float("inf"))[seed % 2]
        layer = PagedLayer(triton_kernel(rng), places, sequences, rng, float("nan"), trees)
        given = int(rng.integers(1, 4))  # rows of the context in the same pass
        rows: list[Row] = []
        for s, tree in enumerate(trees):
            rows += [(s, p) for p in range(tree.context - given, places.lengths[s])] + [None] * (s % 2)
        with np.errstate(invalid="ignore"):  # the interpreter's arithmetic is numpy's
            got = dict(zip(rows, layer.run(rows, case.window), strict=True))
            for s, tree in enumerate(trees):
                plain = paths_run_plainly(triton_kernel, case, sequences[s], tree, broken[s])
                for node, expected in plain.items():
                    assert torch.equal(bits(got[s, tree.context + node]), bits(expected)), (tree, node)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 9])
def test_a_non_finite_key_does_not_leak_to_rows_that_may_not_see_it(
    window: int | None, poison: float, device: str
) -> None:
    """The rows share a tile with rows that see the key."""
    case = Case(group=2, kv_heads=1, head_dim=16, lengths=(90,), tail=40, window=window)
    if CUDA:
        case = replace(EIGHT_B, lengths=(600,), tail=100, window=window)
    (finite,) = random_sequences(case, torch.device(device))
    poisoned_at = case.first(0) + 12
    poisoned = QKV(*(x.clone() for x in finite))
    poisoned.k[poisoned_at], poisoned.v[poisoned_at] = poison, poison
    outs = []
    for sequence in (finite, poisoned):
        rng = np.random.default_rng(3)
        layer = PagedLayer(triton_kernel(rng), case, [sequence], rng, fill=float("nan"))
        with np.errstate(invalid="ignore"):  # the interpreter's arithmetic is numpy's
            outs.append(layer.run([*case.rows(), None], window))
    for row, out, poisoned_out in zip([*case.rows(), None], *outs, strict=True):
        hidden = (
            row is None or row[1] < poisoned_at or (window is not None and row[1] >= poisoned_at + window)
        )
        if hidden:
            assert torch.equal(bits(out), bits(poisoned_out)), row
        else:
            assert poisoned_out.isnan().any(), row


@pytest.mark.parametrize("device", DEVICES)
def test_another_split_size_gives_other_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is why the split size is part of the kernel's name."""
    import samewise.kernels.attention.triton as module

    case = Case(group=3, kv_heads=1, head_dim=64, lengths=(600,), tail=2)
    default, _ = rows_run_alone(triton_kernel, case, torch.device(device))
    monkeypatch.setattr(module, "CONSTANTS", replace(module.CONSTANTS, split=128))
    other, _ = rows_run_alone.__wrapped__(triton_kernel, case, torch.device(device))
    assert any(not torch.equal(bits(default[row]), bits(other[row])) for row in default)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_traced_into_one_graph_and_writes_pages_in_place(device: str) -> None:
    case = Case(group=2, kv_heads=1, head_dim=16, lengths=(20,), tail=2)
    rng = np.random.default_rng(0)
    sequences = random_sequences(case, torch.device(device))
    layer = PagedLayer(triton_kernel(rng), case, sequences, rng, fill=0.0)
    reference, pages = rows_run_alone(triton_kernel, case, layer.device)
    kernel = layer.kernel

    def call(*args: object, scale: float, window: int | None) -> torch.Tensor:
        return kernel(*args, scale=scale, window=window)

    class TracedKernel:
        name = kernel.name
        plan = staticmethod(kernel.plan)
        __call__ = staticmethod(torch.compile(call, fullgraph=True, backend="aot_eager"))

    layer.kernel = TracedKernel()
    outs = layer.run([(0, 18), None, (0, 19)], window=None)
    assert torch.equal(bits(outs[0]), bits(reference[0, 18]))
    assert torch.equal(bits(outs[2]), bits(reference[0, 19]))
    for before, after in zip(pages, layer.pages(), strict=True):
        assert torch.equal(after[~before.isnan()], before[~before.isnan()])


@pytest.mark.parametrize("device", DEVICES)
def test_a_frame_writes_the_work_list_for_the_kernel(device: str) -> None:
    """Two spans and padding through the runner's staging buffer, compared with the torch kernel."""
    from array import array

    from samewise.execute.pack import pack_frame
    from samewise.execute.runner import Runner
    from samewise.testing import tiny
    from samewise.types import Sampling, Span

    spans = []
    for i, (rows, pages) in enumerate([(3, [4]), (18, [2, 5])]):
        tokens = [7 * i + j + 1 for j in range(rows)]
        spans.append(Span(i, 0, tuple(tokens), rows, array("i", pages), Sampling(), tokens, rows))
    logits = []
    for kernel, name in ((torch_kernel(None), "cpu"), (triton_kernel(np.random.default_rng(0)), device)):
        loaded = tiny(num_hidden_layers=2)
        runner = Runner(
            loaded.model, loaded.arch, kernel, num_pages=8, sizes=(24,), max_rows=24, max_model_len=64,
            dtype=torch.float32, device=torch.device(name), compile=False,
        )  # fmt: skip
        logits.append(runner.frame(pack_frame(spans, runner.staging(24)))[:21].cpu())
    assert torch.allclose(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_pairs", [0, 1, 7, 20, 100, 256])
def test_slots_are_moved_as_if_all_were_read_before_any_is_written(
    num_pairs: int, dtype: torch.dtype, device: str
) -> None:
    """Sources are targets of other pairs; layers have several shapes; junk that is NaN keeps its bits."""
    kernel, rng = triton_kernel(np.random.default_rng(0)), np.random.default_rng(num_pairs)
    on = torch.device(device)
    layers = [kernel.allocate(25, heads, dim, dtype, on) for heads, dim in ((2, 16), (3, 24), (2, 16))]
    slots = rng.integers(16, 400, size=num_pairs), 16 + rng.permutation(384)[:num_pairs]
    sources, targets = (torch.from_numpy(x).to(on) for x in slots)
    mover = kernel.slot_mover(layers)
    moves = torch.full((1 + 2 * mover.max_pairs,), 7, dtype=torch.int32, device=on)
    moves[0] = num_pairs
    moves[1 : 1 + 2 * num_pairs] = torch.stack((sources, targets), dim=1).flatten()
    expected = []
    for cache in (cache for layer in layers for cache in layer):
        cache.copy_(torch.randn(cache.shape))
        cache[3, :, :5] = float("nan")
        flat = cache.transpose(1, 2).flatten(0, 1).clone()
        flat[targets] = flat[sources]
        expected.append(flat)
    mover(moves)
    for cache, flat in zip((cache for layer in layers for cache in layer), expected, strict=True):
        assert torch.equal(bits(cache.transpose(1, 2).flatten(0, 1)), bits(flat))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_pairs", [3, 280])
def test_the_store_moves_few_slots_through_the_kernel_and_many_without(num_pairs: int, device: str) -> None:
    from samewise.kv.store import KVStore

    store = KVStore(
        triton_kernel(np.random.default_rng(0)), [(2, 16)], 40, torch.float32, torch.device(device)
    )
    store.fill(0.0)
    flat = store.layers[0].k.transpose(1, 2)
    flat.copy_(torch.arange(640.0, device=device).reshape(40, 16, 1, 1).expand_as(flat))
    store.move([(slot + 300, slot) for slot in range(num_pairs)])
    store.move([(num_pairs + 300, 0)])  # at once: the first one's pairs were copied before
    expected = [num_pairs + 300, *(slot + 300 for slot in range(1, num_pairs))]
    assert flat.flatten(0, 1)[:num_pairs, 1, 3].tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_extra", [0, 300] if CUDA else [0])
def test_a_frame_moves_slots_before_it_runs(num_extra: int, device: str) -> None:
    """A tree's second chain is accepted; the next frame with moves equals moves and then the frame.

    On CUDA the frame is captured and begins with the moves, unless there are too many (`num_extra`).
    """
    from array import array

    from samewise.execute.runner import Runner
    from samewise.testing import tiny
    from samewise.types import ROOT, Sampling, Span

    def span(start: int, inputs: list[int], given: int, parents: tuple[int, ...] = ()) -> Span:
        pages = array("i", range(2, 5))
        return Span(0, start, tuple(inputs), given, pages, Sampling(), inputs, given, parents=parents)

    tree = span(0, [*range(1, 19), 30, 31, 32, 40, 41, 42], 18, (ROOT, 0, 1, ROOT, 3, 4))
    slots = [(32 + 18 + 3 + i, 32 + 18 + i) for i in range(3)]
    moves = slots + [(200 + i, 600 + i) for i in range(num_extra)]
    outcomes = []
    for staged in (True, False):
        loaded = tiny(num_hidden_layers=1)
        runner = Runner(
            loaded.model, loaded.arch, triton_kernel(np.random.default_rng(0)), num_pages=64, sizes=(4, 24),
            max_rows=24, max_model_len=64, dtype=torch.float32, device=torch.device(device), compile=False,
        )  # fmt: skip
        runner.store.fill(0.0)
        runner.frame(runner.stage_frame([tree])[0])
        (runner.store.queue_moves if staged else runner.store.move)(moves)
        inputs, _ = runner.stage_frame([span(21, [43, 44], 2)])
        logits = runner.frame(inputs)[:2].clone()
        outcomes.append((logits, *(kv[2:4].clone() for layer in runner.store.layers for kv in layer)))
    assert all(torch.equal(bits(ours), bits(theirs)) for ours, theirs in zip(*outcomes, strict=True))
    assert not torch.equal(outcomes[0][0][0], outcomes[0][0][1])


@pytest.mark.parametrize(
    ("kilobytes", "head_dim", "pairs"),
    [(227, 128, 2), (227, 256, 2), (227, 512, 1), (99, 64, 2), (99, 128, 2), (99, 256, 0)],
)
def test_wide_tiles_are_used_where_their_blocks_fit(
    kilobytes: int, head_dim: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import samewise.kernels.attention.triton as module

    monkeypatch.setattr(module, "_shared_memory", lambda _: (kilobytes * 1024, True))
    assert module._num_pairs(2 * head_dim, torch.device("cpu")) == pairs
    plan = module.TritonKernel(8, 4).plan([Heads(8, 2, head_dim, None)], torch.bfloat16, 256, 1024)
    assert (plan.wide_rows > 0) == (pairs > 0)
