"""The proof at start-up: the frame property, on the loaded weights, at the real shapes, on this machine.

A known text is read alone from row 0. Then it is read again cut in other places, at other rows, beside
other sequences, some of them far into their context. Every bit of its logits must be the same. Before
that, every shape of linear is tried on inputs built to cancel (large terms of both signs), where
another order of summation shows in most elements and not in one of thousands.

If a bit differs the engine does not start: the probe repeats the two readings without compiler and
graph, module by module, and names the first operator that answers differently to the same input.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from samewise import machine
from samewise.errors import GuaranteeLost
from samewise.model.attention import PAGE
from samewise.model.linear import multiply, plain
from samewise.model.zoo import FrameLinear, Steady
from samewise.run.batch import Batch, Tray
from samewise.run.frame import pack_frame
from samewise.run.runner import Runner
from samewise.types import Sampling, Span

TEXT_LEN = 20
FAR = 4096  # how far into a context the company may stand
GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Report:
    """What the probe found: the digest of the known text's logit bits, and what it took."""

    digest: str
    frames: int
    operators: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the known text: pieces of it, each at a row of a frame among company."""

    frames: tuple[tuple[tuple[Span, ...], int, int], ...]  # (spans, first row of the piece, its length)


READINGS = 2  # beside the one alone


def check_linears(model: nn.Module, frame_rows: int, facts: Mapping[str, str]) -> int:
    """Try every shape of linear at the frame's size on cancelling inputs. Returns how many shapes.

    What it finds is a property of the machine, its libraries (`facts`) and the shapes, not of the weights:
    it is found out once and remembered. Run before the KV cache takes its memory: it needs a weight
    matrix of its own.
    """
    seen: dict[tuple[Any, ...], str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            part = getattr(module, "part", None)
            weight = module.weight if part is None else part.weight
            seen.setdefault((type(module), weight.shape, weight.dtype, weight.device), name)
    key = dict(facts) | {
        "rows": str(frame_rows),
        "shapes": str(sorted((kind.__qualname__, *shape, str(dtype)) for kind, shape, dtype, _ in seen)),
    }
    ours = all(kind in (nn.Linear, FrameLinear) for kind, *_ in seen)  # a stranger's code may change
    if ours and machine.recall("linears", key) == "invariant":
        return len(seen)
    for (_, shape, dtype, device), name in seen.items():
        _check_linear(model.get_submodule(name), name, shape, dtype, device, frame_rows)
    if ours:
        machine.remember("linears", key, "invariant")
    return len(seen)


def probe(runner: Runner, *, max_model_len: int, operators: int = 0) -> Report:
    """Prove the frame property or raise GuaranteeLost. Uses pages that nobody holds yet."""
    began = time.perf_counter()
    plan = _Plan(runner, max_model_len)
    reference = plan.reading(alone=True)
    truth = _read(runner, reference, compiled=True)
    count = len(reference.frames)
    if runner.natural:  # one reading in whole frames, one in growing pieces
        _check_rowwise(runner, plan.reading(alone=False).frames[0][0])
        others = [plan.reading(alone=False), plan.in_pieces(_spread(runner.sizes))]
    else:
        others = [plan.reading(alone=False) for _ in range(READINGS)]
    for other in others:
        count += len(other.frames)
        if not torch.equal(_bits(truth), _bits(_read(runner, other, compiled=True))):
            _accuse(runner, reference, other)
    return Report(sha256(truth.numpy().tobytes()).hexdigest(), count, operators, time.perf_counter() - began)


def _check_rowwise(runner: Runner, spans: tuple[Span, ...]) -> None:
    """Norms and activations at every size a frame may have, on what one whole frame gives them.

    They are the library's, and where one ends its vectors or splits its threads may depend on the size.
    """
    given: dict[tuple[Any, ...], tuple[str, nn.Module, torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = args[0] if len(args) == 1 and not named else None
            if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.shape[1] == runner.frame_rows:
                # As it lies in memory: rows cut from a wider product keep their distance.
                given.setdefault((type(module), x.shape, x.stride()), (name, module, x))

        return record

    wrapped = {module.inner for module in runner.model.modules() if isinstance(module, Steady)}
    leaves = [
        (name, module)
        for name, module in runner.model.named_modules()
        if (isinstance(module, Steady) or not any(True for _ in module.children()))
        and module not in wrapped
        and not isinstance(module, nn.Linear | nn.Embedding)
    ]
    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in leaves]
    try:
        runner.eager(pack_frame(list(spans), _tray(runner, spans)))
    finally:
        for handle in handles:
            handle.remove()
    with torch.inference_mode():
        for name, module, x in given.values():
            whole = _bits(module(x))
            for size in runner.sizes:
                if not torch.equal(_bits(module(x[:, :size])), whole[:, :size]):
                    raise GuaranteeLost(
                        f"the operator {name} gives other bits at {size} rows than at {runner.frame_rows}. "
                        'The engine will not start. Try linear="torch", or another OMP_NUM_THREADS'
                    )


class _Plan:
    """Makes readings of the known text out of the runner's pages, from one fixed seed."""

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._rows, self._natural = runner.frame_rows, runner.natural
        self._vocab = runner.arch.vocab
        self._random = random.Random(20)
        self._far = min(FAR, max_model_len) - 1
        room = min((runner.store.num_pages - 2) * PAGE, max_model_len)
        length = min(TEXT_LEN, room)
        self._text = [self._random.randrange(self._vocab) for _ in range(length)]
        self._pages = array("i", range(1, -(-length // PAGE) + 1))
        self._scratch = len(self._pages) + 1

    def reading(self, *, alone: bool) -> Reading:
        frames, start = [], 0
        while start < len(self._text):
            length = min(self._rows, len(self._text) - start)
            if not alone and start == 0:  # the first cut anywhere; the rest then follows in few frames
                least = max(1, min(length, len(self._text) - self._rows))
                length = min(self._random.randint(least, length), max(1, len(self._text) - 1))
            # Where frames have their natural size one whole frame will do; then a little company.
            rows = self._rows if start == 0 or not self._natural else min(self._rows, length + 4)
            before = 0 if alone else self._random.randint(0, rows - length)
            after = 0 if alone else rows - length - before
            piece = self._span(self._text[start : start + length], start, self._pages)
            spans = (*self._company(before), piece, *self._company(after))
            frames.append((spans, before, length))
            start += length
        return Reading(tuple(frames))

    def in_pieces(self, sizes: Sequence[int]) -> Reading:
        """The text in pieces of these lengths, one a frame; what is left in whole frames."""
        frames, start = [], 0
        lengths = chain(sizes, repeat(self._rows))
        while start < len(self._text):
            length = min(next(lengths), self._rows, len(self._text) - start)
            span = self._span(self._text[start : start + length], start, self._pages)
            frames.append(((span,), 0, length))
            start += length
        return Reading(tuple(frames))

    def _company(self, rows: int) -> list[Span]:
        spans = []
        while rows:
            length = self._random.randint(1, rows)
            start = self._random.choice((0, self._random.randint(0, max(0, self._far - length))))
            tokens = [self._random.randrange(self._vocab) for _ in range(length)]
            pages = array("i", [self._scratch] * ((start + length) // PAGE + 1))
            spans.append(self._span(tokens, start, pages))
            rows -= length
        return spans

    def _span(self, tokens: list[int], start: int, pages: array[int]) -> Span:
        return Span(-1, start, tuple(tokens), len(tokens), pages, GREEDY, tokens, len(tokens))


def _read(runner: Runner, reading: Reading, *, compiled: bool) -> torch.Tensor:
    """Logits [text, V] of the known text, read this way."""
    found = []
    for spans, first, length in reading.frames:
        batch: Batch = pack_frame(list(spans), _tray(runner, spans))
        if compiled and runner.natural:  # as frames are run there: the head on wanted rows only
            wanted = torch.arange(first, first + length)
            found.append(runner.frame(replace(batch, keep=wanted)).float().cpu())
            continue
        logits = runner.frame(batch) if compiled else runner.eager(batch)
        found.append(logits[first : first + length].float().cpu())  # waits: the tray may be filled again
    return torch.cat(found)


def _tray(runner: Runner, spans: tuple[Span, ...]) -> Tray:
    return runner.frame_tray(sum(len(span.inputs) for span in spans))


def _spread(sizes: Sequence[int]) -> list[int]:
    """Some of the sizes, from the least on, each about double the one before."""
    found = [sizes[0]]
    for size in sizes:
        if size >= 2 * found[-1]:
            found.append(size)
    return found


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)


def _accuse(runner: Runner, reference: Reading, other: Reading) -> None:
    """Find who broke the property and raise."""
    expected, got = _trace(runner, reference), _trace(runner, other)
    culprit = "a compiled layer or the graph: without them the same frames agree; try compile=False"
    for (name, given, answer), (_, given2, answer2) in zip(expected, got, strict=True):
        if not torch.equal(given, given2):
            culprit = f"what stands before {name} (attention, rotary or an operator without a module)"
            break
        if not torch.equal(answer, answer2):
            culprit = name
            break
    raise GuaranteeLost(
        f"the probe read the same {TEXT_LEN} tokens twice at {runner.frame_rows} rows, placed differently, "
        f"and got different bits. The operator: {culprit}. The engine will not start, because its answers "
        "would depend on load. Try another frame_rows, dtype or device"
    )


def _trace(runner: Runner, reading: Reading) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(module, input bits, output bits) for the known text's rows, in the order modules are called."""
    order: list[str] = []
    found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    place: tuple[int, int] = (0, 0)
    rows = 0

    def note(name: str, given: torch.Tensor, answer: torch.Tensor) -> None:
        if name not in found:
            order.append(name)
            found[name] = ([], [])
        first, length = place
        for values, kept in zip((given, answer), found[name], strict=True):
            by_row = values[0] if values.shape[1] == rows else values[0].transpose(0, 1)
            kept.append(_bits(by_row[first : first + length].clone()).flatten(1))

    def hook(name: str) -> Any:
        def record(_: nn.Module, given: tuple[Any, ...], answer: Any) -> None:
            tensors = [x for x in (*given[:1], answer) if isinstance(x, torch.Tensor) and x.dim() >= 3]
            if len(tensors) == 2 and all(rows in x.shape[1:3] for x in tensors):
                note(name, tensors[0], tensors[1])

        return record

    leaves = [(n, m) for n, m in runner.model.named_modules() if not any(True for _ in m.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        for spans, first, length in reading.frames:
            place = (first, length)
            rows = runner.frame_tray(sum(len(span.inputs) for span in spans)).num_rows
            runner.eager(pack_frame(list(spans), runner.tray(rows))).cpu()
    finally:
        for handle in handles:
            handle.remove()
    return [(name, torch.cat(found[name][0]), torch.cat(found[name][1])) for name in order]


@torch.inference_mode()
def _check_linear(
    linear: nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, rows: int
) -> None:
    """One linear's operator with W = [V, V] and x = [a, -a] + a little noise: the big terms cancel."""
    out, width = shape
    half = width // 2
    generator = torch.Generator(device).manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32)

    # A few random rows, repeated: it is the operator that is tried, and a large head takes long to fill.
    block = noise(min(out, 64), half).to(dtype).repeat(-(-out // 64), 1)[:out]
    weight = torch.cat([block, block, block[:, : width - 2 * half]], 1)
    del block
    a = noise(rows, half)
    x = torch.cat([a, -a, torch.zeros(rows, width - 2 * half, device=device)], 1)
    x = (x + 1e-3 * noise(rows, width)).to(dtype).unsqueeze(0)
    swap = {"weight": weight}
    if linear.bias is not None:  # a part is tried as the whole it is cut from
        swap["bias"] = torch.zeros(out, device=device, dtype=dtype)

    native = plain(weight) if getattr(linear, "packed", None) is not None else None

    def run(inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = (
            torch.func.functional_call(linear, swap, (inputs,))
            if native is None
            else multiply(inputs, native, swap.get("bias"))
        )
        return _bits(answer[0])

    expected = run(x)
    for size in range(1, rows) if native is not None else ():
        if not torch.equal(run(x[:, :size]), expected[:size]):
            raise GuaranteeLost(
                f"the operator {name} ({out}×{width}, {dtype}) gives other bits at {size} rows than "
                f'at {rows}. The engine will not start. Try linear="torch"'
            )
    for shift in sorted({1 % rows, rows // 2, rows - 1}):
        if not torch.equal(run(x.roll(shift, 1)), expected.roll(shift, 0)):
            raise GuaranteeLost(
                f"the operator {name} ({out}×{width}, {dtype}) gives a row other bits at another place "
                f"among {rows} rows. The engine will not start. Try frame_rows={_suggest(rows)}"
            )


def _suggest(rows: int) -> int:
    """A friendlier size: kernels tile rows by powers of two."""
    return max(16, 1 << rows.bit_length())


__all__ = ["Reading", "Report", "check_linears", "probe"]
