"""Runner: owns the modules, the KV tensors, the buffers and the graphs. A batch in, logits out.

Two ways through the same modules: `frame`, at one of the sizes that all give the canonical bits, compiled
and captured where asked; and `fast`, at however many rows are live. Only a frame's logits are the truth.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from samewise.errors import GuaranteeLost, UnsupportedModel
from samewise.execute.numerics import inductor_options
from samewise.execute.pack import pack_frame
from samewise.execute.staging import Batch, StagingBuffer
from samewise.kernels.attention.base import PAGE, Heads, Kernel
from samewise.kernels.graph import Captured
from samewise.kv.store import KVStore, page_bytes
from samewise.model.arch import Arch, layer_list
from samewise.model.attention_binding import bind_attention
from samewise.model.fused_layer import fused, why_not
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import Pieces, fit, is_norm, norm_width
from samewise.model.surgery import twin, with_layers, with_module
from samewise.model.views import Views
from samewise.types import LayerSet, Span

log = logging.getLogger("samewise")

CHAIN = 8  # fast passes that may be under way at once
WIDER = tuple(
    4**i for i in range(9)
)  # rows of a fast pass beyond the widest frame, where each costs a capture
SPANS = 5  # of one sequence in a frame at most, on average: itself and its branches


@dataclass(slots=True)
class Path:
    """Modules a fast pass may go through, and their captured passes by size."""

    model: nn.Module
    compiled: nn.Module | None
    graphs: dict[int, Captured[torch.Tensor]] = field(default_factory=dict)


def compiling() -> Any:
    """Where layers may be compiled: as often as needed, and never silently left uncompiled."""
    import torch._dynamo.config as dynamo  # seconds to import, and only needed here

    # The limits count every engine of the process; reaching one must be an error, never eager.
    limits: dict[str, Any] = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
    return dynamo.patch(fail_on_recompile_limit_hit=True, **limits)


def kv_shapes(arch: Arch) -> list[tuple[int, int]]:
    """(KV heads, head size) of each layer."""
    return [(layer.num_kv_heads, layer.head_dim) for layer in arch.layers]


def kernel_heads(arch: Arch) -> list[Heads]:
    """What a kernel has to know of each layer."""
    return [Heads(x.num_heads, x.num_kv_heads, x.head_dim, x.window) for x in arch.layers]


def kv_page_bytes(arch: Arch, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return page_bytes(kv_shapes(arch), dtype)


class Runner:
    """Runs passes of one model. Everything it needs to know about a pass comes in the batch."""

    def __init__(
        self,
        model: nn.Module,
        arch: Arch,
        kernel: Kernel,
        *,
        num_pages: int,
        sizes: tuple[int, ...],
        max_rows: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        compile: bool,  # noqa: A002 - the public name of the switch
        frame_rows: int | None = None,
    ) -> None:
        self.arch, self.kernel, self.device, self.dtype = arch, kernel, device, dtype
        self.sizes = sizes
        """The numbers of rows a frame may have, least first: all give the bits of `frame_rows`."""
        self.frame_rows = frame_rows or sizes[-1]
        self.model = model.to(device)
        linears = [m for m in self.model.modules() if isinstance(m, FrameLinear)]
        self.native = any(linear.packed is not None for linear in linears)
        """Whether linears give the same bits at any number of rows by themselves."""
        self._norms: dict[int, Pieces] = {}  # by width
        for norm in [] if self.native else [m for m in self.model.modules() if is_norm(m)]:
            fit(norm, self._norms.setdefault(norm_width(norm), {}))
        self.store = KVStore(kernel, kv_shapes(arch), num_pages, dtype, device)
        bind_attention(self.model, arch, kernel, self.store.layers)
        rows = max(self.widest, max_rows)
        self._max_spans = SPANS * max_rows
        self._plan = kernel.plan(kernel_heads(arch), dtype, rows, max_model_len)
        scratch = 0 if self._plan is None else self._plan.workspace_len
        self._workspace = torch.zeros(scratch, dtype=torch.float32, device=device)
        self._max_pages = -(-max_model_len // PAGE) + 1
        self._staging_by_rows: dict[int, StagingBuffer] = {}
        self.picks = torch.zeros(self.widest, 2, dtype=torch.int32, device=device)
        """What the last frame answered, by row: a token, and the bits of its log-probability. The verifier
        writes it; the next frame may take its inputs from it without asking the host."""
        self.guesses = torch.zeros(max(rows, WIDER[-1]), dtype=torch.int32, device=device)
        """What the last fast pass answered, for the next one of a chain."""
        self.compiled = compile
        self._compiled: dict[nn.Module, Any] = {}  # by the layer it was made of
        self.fused = self.native and not compile and self._fusable()
        """Whether each layer is one call of the CPU's kernels instead of its modules'."""
        self._canonical = self._compile(self.model) if compile else self._one_call(self.model)
        self._own: Path | None = None
        self._graphs: dict[tuple[int, bool], Captured[torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._warm(self.sizes)

    @property
    def widest(self) -> int:
        """Rows of the largest frame."""
        return self.sizes[-1]

    def frame_staging(self, num_rows: int) -> StagingBuffer:
        """Staging for a frame of at least this many rows: the smallest size that holds them."""
        return self.staging(self.sizes[bisect_left(self.sizes, num_rows)])

    def staging(self, num_rows: int) -> StagingBuffer:
        """Staging for a pass of this many rows."""
        if num_rows not in self._staging_by_rows:
            size = min(num_rows, self._max_spans) * self._max_pages
            kept = self.frame_rows if self.device.type == "cuda" and num_rows > self.frame_rows else 0
            self._staging_by_rows[num_rows] = StagingBuffer(
                num_rows, size, self._workspace, self.device, CHAIN + 1, self._plan, kept
            )
        return self._staging_by_rows[num_rows]

    def load(self, spans: list[Span], wanted: list[int] | None = None) -> tuple[Batch, list[int] | None]:
        """A frame over these spans, on its way to the device, and the rows its logits will be of (None: all).

        With `wanted` the head may leave out the others.
        """
        used = sum(len(span.inputs) for span in spans)
        staging = self.frame_staging(used)
        keep = None if wanted is None else self._kept(wanted, used, staging)
        if keep is None or staging.num_kept:
            return pack_frame(spans, staging, keep), keep
        return replace(pack_frame(spans, staging), keep=torch.tensor(keep, dtype=torch.int64)), keep

    def _kept(self, wanted: list[int], used: int, staging: StagingBuffer) -> list[int] | None:
        """The rows to run the head on: those wanted, and others up to a number it can be run at."""
        if not self.elastic:
            return None
        if self.native:
            return wanted if len(wanted) < used else None
        if self.device.type == "cuda":
            number = staging.num_kept or staging.num_rows
        else:
            number = self.sizes[bisect_left(self.sizes, len(wanted))]
        if not len(wanted) <= number < staging.num_rows:
            return None
        looked_at = set(wanted)
        others = (row for row in range(staging.num_rows) if row not in looked_at)
        return wanted + list(islice(others, number - len(wanted)))

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's KV in an average layer."""
        return kv_page_bytes(self.arch, self.dtype) / PAGE / len(self.arch.layers)

    @property
    def elastic(self) -> bool:
        """Whether frames come in several sizes, and heads in fewer rows than their frames."""
        return len(self.sizes) > 1

    def steady(self, size: int, widths: Iterable[int] | None = None) -> None:
        """From now on run norms (of these widths) at the canonical number of rows in frames of this size."""
        for width in self._norms if widths is None else widths:
            self._norms[width][size] = self.frame_rows
        self._warm([size])

    def alone(self, module: nn.Module) -> Any:
        """A module outside the model as frames run it inside: compiled, or as it is."""
        return self._compiled_layer(module) if self.compiled else module

    def drop(self, size: int) -> None:
        """Do without frames of this size."""
        self.sizes = tuple(rows for rows in self.sizes if rows != size)
        self._staging_by_rows.pop(size, None)
        for kept in (False, True):
            self._graphs.pop((size, kept), None)

    @torch.inference_mode()
    def frame(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of a frame of one of the sizes, or of its kept rows. Valid until the next frame."""
        graph = self._graphs.get((batch.num_rows, batch.keep is not None))
        if graph is not None:
            return graph()
        guard: Any = nullcontext()
        if self.compiled:
            # Shapes are fixed and everything was compiled when the engine was built: guards need only tell
            # layers apart (windows, positions), and wanting to compile again is an error.
            guard = torch.compiler.set_stance("fail_on_recompile", skip_guard_eval_unsafe=True)
        try:
            with guard:
                return self._pass(self._canonical, batch)
        except RuntimeError as error:
            if self.compiled and "recompile" in str(error):
                raise GuaranteeLost(f"a compiled layer wanted to be compiled again: {error}") from error
            raise

    @torch.inference_mode()
    def eager(self, batch: Batch) -> torch.Tensor:
        """A frame by modules alone, without compiler or graph: to look inside."""
        return self._pass(self.model, batch)

    def fast_staging(self, num_rows: int) -> StagingBuffer:
        """Staging for a fast pass of at least this many rows.

        Where a size has to be compiled or captured there are few sizes: a frame's.
        """
        if self.device.type == "cuda":
            sizes = (*self.sizes, *(size for size in WIDER if size > self.widest))
            return self.staging(min(size for size in sizes if size >= num_rows))
        if self.compiled and num_rows <= self.widest:
            return self.frame_staging(num_rows)
        return self.staging(num_rows)

    @torch.inference_mode()
    def fast(self, batch: Batch, path: Path | None = None) -> torch.Tensor:
        """Logits [B, V] at the shape of whatever is live, by these modules or others. Not the truth."""
        path = path or self._ordinary()
        size = batch.num_rows
        if self.device.type == "cuda":
            if size not in path.graphs:
                with compiling():
                    path.graphs[size] = Captured(lambda: self._fast_pass(path, batch), self.device)
            return path.graphs[size]()
        return self._fast_pass(path, batch)

    def _ordinary(self) -> Path:
        """The model as it is: every operator at whatever size it is given."""
        if self._own is None:
            model = twin(self.model)
            fitted = [m for m in model.modules() if getattr(m, "pieces", None)]
            for module in fitted:
                module.pieces = {}  # type: ignore[assignment]
            self._own = Path(self.model, self._canonical)
            if fitted:
                self._own = self.path(model)
            elif self.fused:
                self._own = Path(self._canonical, None)
        return self._own

    def _fast_pass(self, path: Path, batch: Batch) -> torch.Tensor:
        small = self.device.type == "cuda" or (path is self._own and batch.num_rows in self.sizes)
        model = path.compiled if path.compiled is not None and small else path.model
        return self._pass(model, batch, self.guesses)

    @torch.inference_mode()
    def look(self, batch: Batch, path: Path) -> torch.Tensor:
        """Logits of a pass that is neither compiled nor captured: for trying a path once."""
        return self._pass(path.model, batch, self.guesses)

    def views(self) -> Views:
        """The model's layers, with any of their sublayers left out."""
        return Views(self.model, self.arch, lambda: self.eager(pack_frame([], self.staging(1))))

    def skipping(self, views: Views, skipped: LayerSet) -> Path:
        """The way that leaves these sublayers out. Whole layers run as compiled as they are; others do not:
        nobody should wait for a compiler because a set has changed."""
        if self.fused:
            return Path(views.without(skipped, fused), None)
        compiled = self.compiled and self.device.type == "cuda"
        return Path(views.without(skipped), views.without(skipped, self._as_compiled) if compiled else None)

    def _as_compiled(self, layer: nn.Module) -> Any:
        return self._compiled.get(layer, layer)

    def path(self, model: nn.Module) -> Path:
        """Another way to the same KV: modules of the same shape with other weights, for guesses alone."""
        bind_attention(model, self.arch, self.kernel, self.store.layers)
        return Path(self._one_call(model), self._compile(model) if self.compiled else None)

    def _pass(self, model: nn.Module, batch: Batch, answers: torch.Tensor | None = None) -> torch.Tensor:
        answers = self.picks[:, 0] if answers is None else answers
        answered = answers[batch.source.clamp(min=0)]
        tokens = torch.where(batch.source >= 0, answered, batch.tokens)
        keep = {} if batch.keep is None else {"logits_to_keep": batch.keep}
        out = model(
            input_ids=tokens, position_ids=batch.positions, use_cache=False, rows=batch.rows, **keep
        ).logits
        logits: torch.Tensor = out[0]
        if batch.keep is not None and logits.shape[0] != len(batch.keep):  # a model that cannot keep rows
            logits = logits[batch.keep]
        return logits

    def _fusable(self) -> bool:
        try:
            layers = layer_list(self.model, self.arch)[1]
        except UnsupportedModel:
            return False
        reasons = ((i, reason) for i, layer in enumerate(layers) if (reason := why_not(layer)) is not None)
        first = next(reasons, None)
        if first is not None:
            log.info("layers run as their modules: of layer %d, %s", *first)
        return first is None

    def _one_call(self, model: nn.Module) -> nn.Module:
        """The model with a call for each layer, where that can be."""
        if not self.fused:
            return model
        name, layers = layer_list(model, self.arch)
        return with_layers(model, name, [fused(layer) for layer in layers])

    def _compile(self, model: nn.Module) -> nn.Module:
        """A shell whose layers are compiled: whole graph, static shapes, nothing chosen by timing."""
        name, layers = layer_list(model, self.arch)
        shell = with_layers(model, name, [self._compiled_layer(layer) for layer in layers])
        if self.device.type == "cuda":
            for norm, module in [(n, m) for n, m in model.named_modules() if is_norm(m)]:
                if not norm.startswith(f"{name}."):
                    shell = with_module(shell, norm, self._compiled_layer(module))
        return shell

    def _compiled_layer(self, layer: nn.Module) -> Any:
        if layer not in self._compiled:
            from samewise.execute.passes.dedupe import DEDUPE  # brings the compiler in
            from samewise.execute.passes.row_sums import SUMS

            # One and the same pass: layers compiled with equal options share what was compiled.
            options = inductor_options() | {"post_grad_custom_pre_pass": DEDUPE}
            if self.device.type == "cuda":
                options["post_grad_custom_post_pass"] = SUMS
            self._compiled[layer] = torch.compile(layer, fullgraph=True, dynamic=False, options=options)
        return self._compiled[layer]

    @torch.inference_mode()
    def _warm(self, sizes: Iterable[int]) -> None:
        """Compile before anything else uses a layer, then capture. Padding rows only: no page is touched."""
        if not self.compiled and self.device.type != "cuda":
            return
        for size in sorted(sizes, reverse=True):
            staging = self.staging(size)
            batch = pack_frame([], staging)
            if self.compiled:
                with compiling():
                    self._pass(self._canonical, batch)
            if self.device.type == "cuda":
                self._graphs[size, False] = self._capture(batch)
                if staging.num_kept:
                    keeping = pack_frame([], staging, list(range(staging.num_kept)))
                    self._graphs[size, True] = self._capture(keeping)

    def _capture(self, batch: Batch) -> Captured[torch.Tensor]:
        return Captured(lambda: self._pass(self._canonical, batch), self.device, self._pool)


__all__ = ["CHAIN", "Path", "Runner", "compiling", "kernel_heads", "kv_page_bytes", "kv_shapes"]
