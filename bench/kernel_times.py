"""The device's kernels from torch's profiler, each with its group, by the host's clock.

On CUDA a frame ends with the copy of its tokens to the host. So the last linear before such a copy is the
head, and the kernels between the two are the sampler's; all other kernels are grouped by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MARK = "samewise: one clock for both"

GROUPS = {  # the first pattern that matches a kernel's name
    "copies": r"^mem(cpy|set)|aten::(copy_|_to_copy|to|clone|cat|index_put_?|fill_|zero_)$",
    "layers": r"samewise::layer",
    "norms and positions": r"norm_rows|rotate_and_store|gate_rows",
    "attention": r"_attend|_store|attention|flash|sdpa",
    "linears": r"gemm|gemv|nvjet|cutlass|cublas|splitk|linear_tile|samewise::linear|"
    r"aten::(addmm|mm|bmm|linear|matmul)",
    "sampler": r"sampler|argm(ax|in)|logsumexp|softmax|gather|sort|topk|cumsum|aten::(exp|log|max|amax|sum)$",
    "norms and activations": r"rsqrt|silu|triton_|elementwise|reduce|aten::(mul|add|mean|pow|neg|sub|div)_?$",
}


class Kernel(NamedTuple):
    """One kernel or operator, in seconds by the host's clock."""

    name: str
    begin: float
    end: float
    group: str


@contextmanager
def recorded(device: torch.device) -> Iterator[Callable[[], list[Kernel]]]:
    """Profile the block; the function returns the kernels after it has ended."""
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    kernels: list[Kernel] = []
    marked = 0.0
    with profile(activities=activities, acc_events=True) as profiler:
        marked = time.perf_counter()
        with record_function(MARK):
            pass
        yield lambda: kernels
        if cuda:
            torch.cuda.synchronize()
    events = list(profiler.events() or ())
    mark = next(event.time_range.start for event in events if event.name == MARK)
    shift = marked - mark * 1e-6
    times = (_of_device if cuda else _of_host)(events)
    kernels += _grouped([(n, b * 1e-6 + shift, e * 1e-6 + shift) for n, b, e in times], cuda=cuda)


def labelled(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the profiler sees calls of the function under this name."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label):
                return method(*args, **kwargs)

        return call

    return make


def _of_device(events: list[Any]) -> list[tuple[str, float, float]]:
    kind = torch.autograd.DeviceType.CUDA
    times = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == kind and not event.name.startswith(("samewise: ", "ProfilerStep"))
    ]
    return sorted(times, key=lambda kernel: kernel[1])


def _of_host(events: list[Any]) -> list[tuple[str, float, float]]:
    """Times of operators without those they call."""
    times = []
    for event in events:
        reached = event.time_range.start
        for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
            times.append((event.name, reached, child.time_range.start))
            reached = child.time_range.end
        times.append((event.name, reached, event.time_range.end))
    return sorted(((n, b, e) for n, b, e in times if e > b and n != MARK), key=lambda kernel: kernel[1])


def _grouped(kernels: list[tuple[str, float, float]], *, cuda: bool) -> list[Kernel]:
    grouped = [Kernel(name, begin, end, _group(name)) for name, begin, end in kernels]
    return _with_heads(grouped) if cuda else grouped


def _group(name: str) -> str:
    return next(
        (group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), "other"
    )


def _with_heads(kernels: list[Kernel]) -> list[Kernel]:
    """Regroup the last linear before a copy to the host as head, and the kernels after it as sampler."""
    result = list(kernels)
    head: int | None = None
    for i, kernel in enumerate(kernels):
        if kernel.group == "linears":
            head = i
        elif head is not None and "dtoh" in kernel.name.lower():
            result[head] = result[head]._replace(group="head")
            for j in range(head + 1, i):
                if result[j].group != "copies":
                    result[j] = result[j]._replace(group="sampler")
            head = None
    return result


def seconds_by_group(kernels: list[Kernel]) -> dict[str, float]:
    """Seconds by group, the largest first, and `idle` seconds. Overlaps count for the first kernel."""
    spent: dict[str, float] = {}
    reached = kernels[0].begin
    idle = 0.0
    for kernel in sorted(kernels, key=lambda k: k.begin):
        idle += max(0.0, kernel.begin - reached)
        own = max(0.0, kernel.end - max(reached, kernel.begin))
        spent[kernel.group] = spent.get(kernel.group, 0.0) + own
        reached = max(reached, kernel.end)
    return dict(sorted(spent.items(), key=lambda item: -item[1])) | {"idle": idle}
