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
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from samewise import user_cache
from samewise.contract import ENGINE_VERSION
from samewise.errors import GuaranteeLost
from samewise.execute.numerics import inductor_options
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner, compiling
from samewise.execute.staging import StagingBuffer
from samewise.kernels.attention.base import PAGE
from samewise.model.activation import FrameActivation
from samewise.model.arch import layer_list
from samewise.model.row_pieces import is_norm
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
ROWS = 64  # compared at least at every size, in as many frames as it takes
TRIALS = 4  # frames at least
LONG, SHORT = 600, 40  # of the text that sizes are tried on
AS_IT_IS = "as it is"


def confirm_sizes(runner: Runner, max_model_len: int) -> None:
    """Raise GuaranteeLost unless every size still gives the canonical bits, on weights that have changed."""
    if runner.native:
        return
    trial = _Trial(runner, max_model_len)
    for size in [size for size in runner.sizes if size != runner.frame_rows]:
        if not trial.agrees(size):
            raise GuaranteeLost(
                f"on the new weights frames of {size} rows give other bits than frames of "
                f"{runner.frame_rows}. Build a new engine, or leave {size} out of frame_sizes"
            )


def settle_sizes(runner: Runner, facts: Mapping[str, str], max_model_len: int) -> dict[int, str]:
    """Keep the sizes of a frame that give the bits of the canonical one; what became of each.

    Linears were settled before. Norms are tried here by themselves, then parts of a known text are read at
    each size and compared with what they were at the canonical number of rows. Norms that show are run at
    that number; where a frame still shows, the size is given up. Native linears were made for every size, so
    there a difference is for the probe to tell.
    """
    found = dict.fromkeys(runner.sizes, AS_IT_IS)
    if runner.native or not runner.elastic:
        return found
    trial, rows = _Trial(runner, max_model_len), runner.frame_rows
    unsteady = _unsteady_norms(runner, facts)
    for size in [size for size in runner.sizes if size != rows]:
        if not trial.fits(size):
            found[size] = "not used: more rows than the KV cache has room for"
            runner.drop(size)
            continue
        if unsteady.get(size):
            runner.steady(size, unsteady[size])
            found[size] = f"norms of {' and '.join(map(str, unsteady[size]))} at {rows} rows"
        if trial.agrees(size):
            continue
        runner.steady(size)
        found[size] = f"norms at {rows} rows"
        if not trial.agrees(size):
            found[size] = "not used: an operator without a remedy gives other bits"
            runner.drop(size)
    return found


def _unsteady_norms(runner: Runner, facts: Mapping[str, str]) -> dict[int, list[int]]:
    """By size, the widths of norms that give other bits there than at the canonical number of rows.

    They are given float32, whatever the model's dtype: norms work in it, and no bit is hidden. Compiled on a
    card none does, because no order of summation is left there. A property of machine and libraries, so it is
    found out once and remembered.
    """
    norms = _norms_seen(runner)
    shapes = {str((type(norm).__qualname__, *tail)): (norm, tail) for norm, tail in norms}
    key = dict(facts) | {
        "norms": str(sorted(shapes)),
        "rows": str(runner.frame_rows),
        "sizes": str(runner.sizes),
        "compiled": str(sorted(inductor_options().items()) if runner.compiled else False),
        "dtypes": str(sorted({str(weight.dtype) for norm, _ in norms for weight in norm.parameters()})),
        "engine": ENGINE_VERSION,
    }
    # A stranger's code may change.
    ours = all(
        type(norm).__mro__[1].__module__.split(".")[0] in ("torch", "transformers") for norm, _ in norms
    )
    known = user_cache.get("norms", key) if ours else None
    if isinstance(known, dict) and set(known) <= set(map(str, runner.sizes)):
        return {int(size): list(widths) for size, widths in known.items()}
    found: dict[int, list[int]] = {}
    for norm, tail in shapes.values():
        for size in _felt(runner, norm, tail):
            found.setdefault(size, []).append(tail[-1])
    found = {size: sorted(set(widths)) for size, widths in found.items()}
    if ours:
        user_cache.put("norms", key, {str(size): widths for size, widths in found.items()})
    return found


def _norms_seen(runner: Runner) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Every kind of norm with the shape of one row it is given, seen in a pass."""
    seen: dict[tuple[Any, ...], tuple[nn.Module, tuple[int, ...]]] = {}

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0] if len(given) == 1 else None
        if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.shape[1] == runner.frame_rows:
            tail = tuple(x.shape[2:])
            seen.setdefault((type(module), *tail), (module, tail))

    handles = [m.register_forward_pre_hook(note) for m in runner.model.modules() if is_norm(m)]
    try:
        runner.eager(pack_frame([], runner.staging(runner.frame_rows)))
    finally:
        for handle in handles:
            handle.remove()
    return list(seen.values())


@torch.inference_mode()
def _felt(runner: Runner, norm: nn.Module, tail: tuple[int, ...]) -> list[int]:
    """The sizes at which a norm gives other bits."""
    rows, most = runner.frame_rows, -(-max(*runner.sizes, ROWS) // runner.frame_rows) * runner.frame_rows
    generator = torch.Generator(runner.device).manual_seed(0)
    x = torch.randn(1, most, *tail, generator=generator, device=runner.device)
    x *= torch.exp2(torch.randint(-6, 7, x.shape, generator=generator, device=runner.device).float())
    totals = {size: max(size, ROWS // size * size) for size in runner.sizes if size != rows}
    with compiling() if runner.compiled else nullcontext():
        run = runner.alone(norm)

        def bits(size: int, total: int) -> torch.Tensor:
            parts = [run(x[:, start : start + size]) for start in range(0, total, size)]
            return _bits(torch.cat(parts, dim=1)[:, :total])

        truth = bits(rows, most)
        return [
            size for size, total in totals.items() if not torch.equal(bits(size, total), truth[:, :total])
        ]


class _Trial:
    """Reads parts of a known text at one size of a frame, and compares with what they were when it was laid
    down at the canonical one.

    Parts stand at many positions, so that rows see one block of keys and several, one split and several; and
    in a frame of many rows one part is long, so that its rows share wide tiles.
    """

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._random = random.Random(21)
        room = (runner.store.num_pages - 2) * PAGE
        most = LONG if runner.device.type == "cuda" else SHORT  # on a CPU attention is the same at every size
        length = max(1, min(most, room, max_model_len - 1))
        self._text = [self._random.randrange(runner.arch.vocab) for _ in range(length)]
        self._pages = array("i", range(1, -(-length // PAGE) + 1))

    def fits(self, size: int) -> bool:
        """Whether there could ever be so many rows."""
        return size <= (self._runner.store.num_pages - 1) * PAGE

    @torch.inference_mode()
    def agrees(self, size: int) -> bool:
        """Whether rows get the same bits in frames of this size."""
        runner, rows, length = self._runner, self._runner.frame_rows, len(self._text)
        truth = torch.cat([
            self._read(runner.staging(rows), [(start, min(rows, length - start))])
            for start in range(0, length, rows)
        ])  # fmt: skip
        for _ in range(max(TRIALS, ROWS // size)):
            parts = self._parts(size)
            expected = torch.cat([truth[start : start + num] for start, num in parts])
            staging = runner.staging(size)
            if not torch.equal(_bits(self._read(staging, parts)), _bits(expected)):
                return False
            if staging.num_kept:  # less of the head
                keep = sorted(self._random.sample(range(size), staging.num_kept))
                if not torch.equal(_bits(self._read(staging, parts, keep)), _bits(expected[keep])):
                    return False
        return True

    def _parts(self, size: int) -> list[tuple[int, int]]:
        """(start, length) of parts of the text that fill a frame; every other time the first is long."""
        parts: list[tuple[int, int]] = []
        while size:
            start = self._random.randrange(len(self._text))
            most = min(size, len(self._text) - start)
            long = not parts and self._random.random() < 0.5
            num = most if long else min(most, self._random.choice((1, 1, 3, 16, 40)))
            parts.append((start, num))
            size -= num
        return parts

    def _read(
        self, staging: StagingBuffer, parts: list[tuple[int, int]], keep: list[int] | None = None
    ) -> torch.Tensor:
        spans = []
        for start, num in parts:
            tokens = self._text[start : start + num]
            spans.append(Span(-1, start, tuple(tokens), num, self._pages, GREEDY, tokens, num))
        logits = self._runner.frame(pack_frame(spans, staging, keep))
        return logits[: sum(num for _, num in parts)].clone() if keep is None else logits


def probe(runner: Runner, *, max_model_len: int, operators: int = 0) -> Report:
    """Prove the frame property or raise GuaranteeLost. Uses pages that nobody holds yet."""
    began = time.perf_counter()
    plan = _Plan(runner, max_model_len)
    reference = plan.reading(alone=True)
    truth = _read(runner, reference, compiled=True)
    count = len(reference.frames)
    if runner.native and runner.elastic:  # one reading in whole frames, one in growing pieces
        _check_rowwise(runner, plan.reading(alone=False).frames[0][0])
        others = [plan.reading(alone=False), plan.in_pieces(_spread(runner.sizes))]
    else:
        others = [plan.reading(alone=False) for _ in range(READINGS)]
        if runner.elastic:
            others.append(plan.in_pieces(runner.sizes))
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

    wrapped = {module.inner for module in runner.model.modules() if isinstance(module, FrameActivation)}
    inside = f"{layer_list(runner.model, runner.arch)[0]}." if runner.fused else ""
    leaves = [
        (name, module)
        for name, module in runner.model.named_modules()
        if (isinstance(module, FrameActivation) or not any(True for _ in module.children()))
        and module not in wrapped
        and not isinstance(module, nn.Linear | nn.Embedding)
        and not (runner.fused and name.startswith(inside))  # frames do not run them
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
        self._rows, self._natural = runner.frame_rows, runner.native and runner.elastic
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
        wanted = list(range(first, first + length))
        batch, keep = runner.load(list(spans), wanted if compiled else None)
        logits = runner.frame(batch) if compiled else runner.eager(batch)
        part = slice(length) if keep is not None else slice(first, first + length)
        found.append(logits[part].float().cpu())  # waits: the staging may be filled again
    return torch.cat(found)


def _tray(runner: Runner, spans: tuple[Span, ...]) -> StagingBuffer:
    return runner.frame_staging(sum(len(span.inputs) for span in spans))


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
    if runner.fused:
        culprit = "a native layer: by its modules the same frames agree; try linear='torch'"
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
            rows = runner.frame_staging(sum(len(span.inputs) for span in spans)).num_rows
            runner.eager(pack_frame(list(spans), runner.staging(rows))).cpu()
    finally:
        for handle in handles:
            handle.remove()
    return [(name, torch.cat(found[name][0]), torch.cat(found[name][1])) for name in order]


__all__ = ["Reading", "Report", "confirm_sizes", "probe", "settle_sizes"]
