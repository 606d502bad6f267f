"""The time of one layer's attention on CUDA, against the ceiling. Last line: JSON.

    python bench/attention.py                                   # every case, with the kernel's constants
    python bench/attention.py --tile 16 64 --stages 2 3 4       # every combination of these constants
    python bench/attention.py --cases decode-8 prompt --split 256 512

An 8B model's heads (32 query, 8 KV heads of 128, bfloat16). 32 calls, each with pages of its own as far as
memory allows, are captured in a graph and timed together. The ceiling is the longer of two times: to read the
K and V that the rows see once per sequence at the bandwidth of a copy, or to multiply at 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from samewise import machine

machine.pin_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

import samewise.kernels.attention.triton as kernels  # noqa: E402
from samewise.kernels.attention.base import PAGE, Heads, LayerKV, Rows  # noqa: E402
from shapes import commit, copy_bandwidth, timed  # noqa: E402
from tree_shapes import best_first_tree, depths  # noqa: E402

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
FLOPS = 800e12  # per second: what large bf16 products reach on an H200
CONSTANTS = {
    "tile": "tile",
    "wide": "wide_tile",
    "wide_from": "wide_from",
    "split": "split",
    "block": "block",
    "warps": "warps",
    "stages": "stages",
    "fold_stages": "fold_stages",
    "programs": "programs_per_processor",
    "at_once": "concurrent_per_processor",
}


@dataclass(frozen=True)
class Case:
    """`sequences` spans of `rows` rows each that end at `context`.

    With `tree` all rows but the first of a span are nodes of a draft tree, the slots are those of a chain.
    """

    name: str
    sequences: int
    rows: int
    context: int
    window: int | None = None
    tree: bool = False

    @property
    def parents(self) -> tuple[int, ...]:
        return best_first_tree(self.rows - 1, seed=0)

    @property
    def positions(self) -> np.ndarray:
        """Of the rows' slots."""
        return np.tile(np.arange(self.context - self.rows, self.context), self.sequences)

    @property
    def lengths(self) -> np.ndarray:
        if not self.tree:
            return (self.positions + 1).astype(np.int32)
        root = self.context - self.rows + 1
        return np.tile(root + np.array([0, *depths(self.parents)]), self.sequences).astype(np.int32)

    def tails(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the tail of each row starts, the index of its list, and the lists one after the other."""
        start, tail, lists = self.lengths.copy(), 0 * self.lengths, list[int]()
        for sequence in range(self.sequences if self.tree else 0):
            first = sequence * self.rows + 1
            for node, parent in enumerate(self.parents):
                start[first + node] = self.lengths[first - 1]
                tail[first + node] = tail[first + node - 1]
                if node == 0 or parent != node - 1:
                    tail[first + node] = len(lists)
                    path = [node]
                    while (above := self.parents[path[0]]) >= 0:
                        path.insert(0, above)
                    lists += [int(slots[first + at]) for at in path]
                else:
                    lists.append(int(slots[first + node]))
        return start, tail, np.array(lists, np.int64)

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return -(-self.context // PAGE)

    def ceiling(self, bandwidth: float) -> float:
        """Microseconds."""
        reach = self.context if self.window is None else min(self.context, self.window + self.rows - 1)
        seen = self.lengths if self.window is None else np.minimum(self.lengths, self.window)
        read = self.sequences * reach * KV_HEADS * DIM * 2 * 2
        return 1e6 * max(read / bandwidth, 4 * HEADS * DIM * float(seen.sum()) / FLOPS)


# Contexts of decode steps end within a block, as most do; prompt chunks end at a block's end.
CASES = [
    *(Case(f"decode-{n}-1k", n, 1, 1024 - 24) for n in (1, 8, 32, 64, 128, 256)),
    *(Case(f"decode-{n}-32k", n, 1, 32768 - 24) for n in (1, 8)),
    *(Case(f"prompt-{n}-{c // 1024}k", 1, n, c) for n in (512, 1024) for c in (1024, 8192)),
    Case("drafts-8x16-1k", 8, 16, 1024 - 24),
    Case("trees-8x16-1k", 8, 16, 1024 - 24, tree=True),
    *(
        Case(f"{name}-{n}-1k", 1, n, 1024 - 24, tree=name == "tree")
        for n in (8, 16, 32, 64)
        for name in ("chain", "tree")
    ),
    *(Case(f"window-{n}-32k", n, 1, 32768 - 24, 1024) for n in (1, 8, 128)),
    Case("window-prompt-512-32k", 1, 512, 32768, 1024),
]


class Pool:
    """Memory filled with random numbers, from which every case takes its pages."""

    def __init__(self, share: float) -> None:
        free = torch.cuda.mem_get_info()[0]
        self.noise = torch.empty(int(share * free) // 2, dtype=torch.bfloat16, device="cuda")
        for piece in self.noise.split(2**28):
            piece.normal_()

    def layers(self, num_pages: int) -> list[LayerKV]:
        """KV of this many pages for as many layers as fit, at most LAYERS."""
        shape = (num_pages, KV_HEADS, PAGE, DIM)
        size = num_pages * KV_HEADS * PAGE * DIM
        count = min(LAYERS, len(self.noise) // (2 * size))
        if not count:
            raise SystemExit(f"no room for {4 * size / 2**30:.1f} GiB of K and V")
        layers = self.noise[: 2 * count * size].view(count, 2, *shape)
        return [LayerKV(layer[0], layer[1]) for layer in layers]


def microseconds(case: Case, pool: Pool, share: float, repeats: int) -> float:
    """Microseconds of one layer's attention, including the storing of K and V."""
    device = torch.device("cuda")
    kernel = kernels.TritonKernel.on(device)
    lengths, num_rows = case.lengths, case.sequences * case.rows
    used = case.sequences * case.pages
    plan = kernel.plan([Heads(HEADS, KV_HEADS, DIM, case.window)], torch.bfloat16, num_rows, case.context)
    plan = replace(plan, cut_threshold=share)
    # Scattered pages, as after many requests; page 0 is the trash page.
    tables = 1 + np.random.default_rng(0).permutation(used).reshape(case.sequences, -1)
    owner = np.repeat(np.arange(case.sequences), case.rows)
    slots = tables[owner, case.positions // PAGE] * PAGE + case.positions % PAGE
    starts = (owner * case.pages).astype(np.int32)
    tail_start, tail, lists = case.tails(slots)
    tail = (tail + tables.size).astype(np.int32)
    work = np.zeros(plan.work_list_len(num_rows), np.int32)
    plan.write(lengths, starts, tail_start, tail, work)

    def ints(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device)

    rows = Rows(
        *(ints(x) for x in (lengths, slots, starts, tail_start, tail)),
        *(ints(x) for x in (np.concatenate([tables.ravel(), lists]), work)),
        torch.zeros(plan.workspace_len, device=device),
    )
    fused = torch.randn(num_rows, HEADS + 2 * KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    layers = pool.layers(used + 1)

    def model() -> None:
        for i in range(LAYERS):
            kernel(q, k, v, layers[i % len(layers)], rows, scale=DIM**-0.5, window=case.window)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model()
    graph.replay()
    return timed(graph.replay, repeats, device) / LAYERS * 1e3


def settings(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Every combination of the given constants and shares."""
    values_of = {
        name: getattr(args, name) or [getattr(kernels.CONSTANTS, field)] for name, field in CONSTANTS.items()
    }
    for values in itertools.product(*values_of.values(), args.share):
        yield dict(zip([*values_of, "share"], values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in CONSTANTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+")
    parser.add_argument("--share", type=float, nargs="+", default=[1.5], help="0: cut all; inf: none")
    parser.add_argument("--cases", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the free memory used for pages")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/attention.py measures the CUDA kernel, but torch sees no CUDA device")
    cases = [case for case in CASES if case.name.startswith(tuple(args.cases))]
    if not cases:
        raise SystemExit(f"no case begins with {args.cases}: there are {[case.name for case in CASES]}")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    pool = Pool(args.memory)
    combinations = list(settings(args))
    varied = [name for name in combinations[0] if len({setting[name] for setting in combinations}) > 1]
    results = []
    for setting in combinations:
        values = {field: setting[name] for name, field in CONSTANTS.items()}
        kernels.CONSTANTS = replace(kernels.CONSTANTS, **values)
        print("  ".join(f"{name} {setting[name]}" for name in varied) or kernels.TritonKernel(1, 1).name)
        for case in cases:
            ceiling = case.ceiling(bandwidth)
            try:
                us = microseconds(case, pool, setting["share"], args.repeats)
            except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError) as error:
                print(f"  {case.name:24} {str(error).splitlines()[0][:60]}")
                continue
            print(
                f"  {case.name:24} {us:8.1f} us   ceiling {ceiling:8.1f}   {us / ceiling:5.2f}x", flush=True
            )
            figures = {"case": case.name, "us": round(us, 2), "ceiling_us": round(ceiling, 2)}
            results.append({name: setting[name] for name in varied} | figures)
    conditions = {
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_s": round(bandwidth / 1e12, 2),
        "constants": {name: combinations[0][name] for name in combinations[0] if name not in varied},
    }
    print(json.dumps(conditions | {"results": results}))


if __name__ == "__main__":
    main()
