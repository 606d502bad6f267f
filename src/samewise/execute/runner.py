"""Runner: owns the modules, the KV tensors, the staging buffers and the graphs. PassInputs in, logits out.

Two ways through the same modules: `frame`, at one of the sizes that all give the canonical bits, compiled and
captured where configured; and `fast`, at the number of live rows. Only a frame's logits are canonical.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from samewise.errors import GuaranteeLost, UnsupportedModel
from samewise.execute.compiler import LayerCompiler, allow_compiling, forbid_compiling
from samewise.execute.pack import pack_follow_up, pack_frame
from samewise.execute.staging import PassInputs, StagingBuffer
from samewise.follow_up import FollowUp
from samewise.kernels.attention.base import PAGE, AttentionKernel, Heads
from samewise.kernels.graph import CapturedGraph
from samewise.kv.store import KVStore, page_bytes
from samewise.model import fused_layer
from samewise.model.arch import Arch, layer_list
from samewise.model.attention_binding import bind_attention
from samewise.model.fused_layer import changed_modules
from samewise.model.fused_stack import stack_layers
from samewise.model.linear import FrameLinear
from samewise.model.native_modules import use_native_modules
from samewise.model.row_pieces import Pieces, is_norm, norm_width, use_pieces
from samewise.model.surgery import copy_modules, with_layers, with_module
from samewise.model.views import LayerViews
from samewise.types import MAX_TREE_DEPTH, MAX_TREE_NODES, NUM_CANDIDATES, LayerSet, Span

log = logging.getLogger("samewise")


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Limits of passes. All set by hand; none can change a bit."""

    max_chain: int = 8  # fast passes under way at once; each has a host buffer of its own
    fast_rows: tuple[int, ...] = tuple(4**i for i in range(9))
    """Rows of fast passes above the widest frame on CUDA: few sizes, because each is captured as a graph."""


PASS_LIMITS = PassLimits()


@dataclass(slots=True)
class FastPath:
    """Modules that fast passes run through, and their captured passes by number of rows.

    `after` is called with a pass's logits and captured with it. Paths with one `pool` share their graphs'
    memory: logits of a pass are then valid until the next pass.
    """

    model: nn.Module
    compiled: nn.Module | None
    graphs: dict[int, CapturedGraph[torch.Tensor]] = field(default_factory=dict)
    after: Callable[[torch.Tensor], None] | None = None
    pool: Any = None


def kv_shapes(arch: Arch) -> list[tuple[int, int]]:
    """(KV heads, head size) of each layer."""
    return [(layer.num_kv_heads, layer.head_dim) for layer in arch.layers]


def kernel_heads(arch: Arch) -> list[Heads]:
    """What an attention kernel has to know of each layer."""
    return [Heads(x.num_heads, x.num_kv_heads, x.head_dim, x.window) for x in arch.layers]


def kv_page_bytes(arch: Arch, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return page_bytes(kv_shapes(arch), dtype)


def _with_kept_rows(inputs: PassInputs, keep: list[int] | None) -> PassInputs:
    """The inputs with the rows to keep, where these are not part of the staging buffer."""
    if keep is None or inputs.keep is not None:
        return inputs
    return replace(inputs, keep=torch.tensor(keep, dtype=torch.int64, device="cpu"))


class Runner:
    """Runs passes of one model. All that varies between passes is in their PassInputs."""

    def __init__(
        self,
        model: nn.Module,
        arch: Arch,
        kernel: AttentionKernel,
        *,
        num_pages: int,
        sizes: tuple[int, ...],
        max_rows: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        compile: bool,  # noqa: A002 - the public name of the switch
        fuse: bool = True,
        frame_rows: int | None = None,
    ) -> None:
        self.arch, self.kernel, self.device, self.dtype = arch, kernel, device, dtype
        self.sizes = sizes
        """The numbers of rows a frame may have, smallest first: all give the bits of `frame_rows`."""
        self.frame_rows = frame_rows or sizes[-1]
        self.model = model.to(device)
        linears = [m for m in self.model.modules() if isinstance(m, FrameLinear)]
        self.native = any(linear.packed is not None for linear in linears)
        """Whether linears are native, which give the same bits at any number of rows."""
        self.store = KVStore(kernel, kv_shapes(arch), num_pages, dtype, device)
        bind_attention(self.model, arch, kernel, self.store.layers)
        self.unfused_reason = self._unfusable_reason() if fuse else "the settings ask for modules"
        """Why layers run as their modules; None where they are fused."""
        self.fused = self.unfused_reason is None
        """Whether each layer is run by kernels of its own instead of its modules: on CPU one native call."""
        self.compiled = compile and not self.fused
        self._norm_pieces: dict[int, Pieces] = {}  # by the norm's width
        for norm in [] if self.native or self.fused else [m for m in self.model.modules() if is_norm(m)]:
            use_pieces(norm, self._norm_pieces.setdefault(norm_width(norm), {}))
        rows = max(self.widest, max_rows)
        self._max_spans = max_rows
        self._plan = kernel.plan(kernel_heads(arch), dtype, rows, max_model_len)
        workspace_len = 0 if self._plan is None else self._plan.workspace_len
        self._workspace = torch.zeros(workspace_len, dtype=torch.float32, device=device)
        self._max_pages = -(-(max_model_len + MAX_TREE_NODES) // PAGE) + 1
        self._staging_by_rows: dict[int, StagingBuffer] = {}
        self.frame_outputs = torch.zeros(self.widest, 2 + NUM_CANDIDATES, dtype=torch.int32, device=device)
        """By row of the last frame: its token, the bits of the log-probability, and candidates if wanted.
        Written by the verifier; the next frame may take its inputs from here without a copy to the host."""
        max_fast_rows = max(rows, PASS_LIMITS.fast_rows[-1])
        self.fast_tokens = torch.zeros(max_fast_rows, dtype=torch.int32, device=device)
        """By row of the last fast pass: its token, for the next pass of a chain."""
        self._compiler = LayerCompiler(device)
        self.portable = self.native and self.fused and dtype == torch.float32 and self._use_native_modules()
        """Whether every float operation of a frame is a native kernel's: no bit depends on the machine."""
        self._by_layer = (
            self._compiler.compile_model(self.model, arch)
            if self.compiled
            else self._with_fused_layers(self.model)
        )
        """The model as frames run it, with a module for each layer."""
        self._canonical = self._with_stacked_layers(self._by_layer)
        self._default_path: FastPath | None = None
        self._graphs: dict[tuple[int, bool], CapturedGraph[torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._warm_up(self.sizes)

    @property
    def widest(self) -> int:
        """Rows of the largest frame."""
        return self.sizes[-1]

    @property
    def elastic(self) -> bool:
        """Whether frames have several sizes, and the head may run on fewer rows than the frame."""
        return len(self.sizes) > 1

    @property
    def layers_name(self) -> str:
        """What runs a layer, for the contract."""
        return self._fusing.NAME if self.fused else "modules"

    @property
    def kept_products(self) -> tuple[tuple[str, ...], ...]:
        """The products that layers can hand out while they run, by the paths of their linears."""
        return getattr(self._fusing, "KEPT_PRODUCTS", ()) if self.fused else ()

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's KV in an average layer."""
        return kv_page_bytes(self.arch, self.dtype) / PAGE / len(self.arch.layers)

    # ── staging ──────────────────────────────────────────────────────────────────────────────────

    def staging(self, num_rows: int) -> StagingBuffer:
        """The staging buffer for passes of this many rows."""
        if num_rows not in self._staging_by_rows:
            max_tables = min(num_rows, self._max_spans) * self._max_pages
            wide = self.device.type == "cuda" and num_rows > self.frame_rows
            self._staging_by_rows[num_rows] = StagingBuffer(
                num_rows,
                max_tables + num_rows * MAX_TREE_DEPTH,  # and the tails of every row
                self._workspace,
                self.device,
                PASS_LIMITS.max_chain + 1,
                self._plan,
                self.frame_rows if wide else 0,
                self.store.max_moves if self.device.type == "cuda" else 0,
            )
        return self._staging_by_rows[num_rows]

    def frame_staging(self, num_rows: int) -> StagingBuffer:
        """The staging buffer for a frame of at least this many rows: the smallest size that holds them."""
        return self.staging(self.sizes[bisect_left(self.sizes, num_rows)])

    def fast_staging(self, num_rows: int) -> StagingBuffer:
        """The staging buffer for a fast pass of at least this many rows.

        Where a size has to be compiled or captured, a frame's sizes are used too.
        """
        if self.device.type == "cuda":
            sizes = (*self.sizes, *(size for size in PASS_LIMITS.fast_rows if size > self.widest))
            return self.staging(min(size for size in sizes if size >= num_rows))
        if self.compiled and num_rows <= self.widest:
            return self.frame_staging(num_rows)
        return self.staging(num_rows)

    def stage_frame(
        self, spans: list[Span], wanted: list[int] | None = None
    ) -> tuple[PassInputs, list[int] | None]:
        """A frame over these spans, being copied to the device, and the rows its logits are of (None: all).

        With `wanted`, the head may run on these rows only, or on these and some others. Queued moves of K and
        V are done first: by the frame itself where it is captured, and then each time it runs; else now.
        """
        num_used, moves = sum(len(span.inputs) for span in spans), self.store.take_moves()
        staging, keep, moved = self._choose_staging(num_used, wanted, moves)
        inputs = pack_frame(spans, staging, keep if staging.num_kept else None, () if moved else moves)
        return _with_kept_rows(inputs, keep), keep

    def stage_follow_up(self, follow_up: FollowUp) -> tuple[PassInputs, list[int] | None]:
        """The same for a frame that is given as numbers, moves among them."""
        wanted = follow_up.sampled_rows() if follow_up.reads and self.elastic else None
        staging, keep, moved = self._choose_staging(follow_up.num_rows, wanted, follow_up.moves())
        if moved:
            follow_up = follow_up.without_moves()
        return _with_kept_rows(
            pack_follow_up(follow_up, staging, keep if staging.num_kept else None), keep
        ), keep

    def _choose_staging(
        self, num_used: int, wanted: list[int] | None, moves: list[tuple[int, int]]
    ) -> tuple[StagingBuffer, list[int] | None, bool]:
        """Where to stage a frame, the rows to keep, and whether its moves were done: else the frame does."""
        staging = self.frame_staging(num_used)
        keep = None if wanted is None else self._rows_to_keep(wanted, num_used, staging)
        captured = (staging.num_rows, keep is not None) in self._graphs
        if not moves or (captured and len(moves) <= staging.max_moves):
            return staging, keep, False
        self.store.move(moves)
        return staging, keep, True

    @property
    def packs_natively(self) -> bool:
        """Whether frames are packed by C++, so that they may be given as numbers."""
        return self.staging(self.frame_rows).packer is not None

    def _rows_to_keep(self, wanted: list[int], num_used: int, staging: StagingBuffer) -> list[int] | None:
        """The rows to run the head on: the wanted ones, and others up to a number of rows it may run at."""
        if not self.elastic:
            return None
        if self.native:
            return wanted if len(wanted) < num_used else None
        if self.device.type == "cuda":
            num = staging.num_kept or staging.num_rows
        else:
            num = self.sizes[bisect_left(self.sizes, len(wanted))]
        if not len(wanted) <= num < staging.num_rows:
            return None
        known = set(wanted)
        others = (row for row in range(staging.num_rows) if row not in known)
        return wanted + list(islice(others, num - len(wanted)))

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def frame(self, inputs: PassInputs) -> torch.Tensor:
        """Logits [R, V] of a frame of one of the sizes, or of its kept rows. Valid until the next frame."""
        graph = self._graphs.get((inputs.num_rows, inputs.keep is not None))
        if graph is not None:
            return graph()
        try:
            with forbid_compiling() if self.compiled else nullcontext():
                return self._pass(self._canonical, inputs)
        except RuntimeError as error:
            if self.compiled and "recompile" in str(error):
                raise GuaranteeLost(f"a compiled layer would be compiled again: {error}") from error
            raise

    @torch.inference_mode()
    def traced(
        self,
        inputs: PassInputs,
        record: Callable[[int, torch.Tensor], None],
        keep: Callable[[int], Callable[[tuple[str, ...], torch.Tensor], None] | None] = lambda _: None,
    ) -> torch.Tensor:
        """The same logits without a graph; `record` is given each layer's number and its input [R, H],
        and after the last layer its output. `keep(layer)`: what is given its products (`kept_products`).

        Captured or launched one by one, and layer by layer or stacked, kernels give the same bits.
        """
        self.store.flush_moves()

        def recorder(layer: int) -> Callable[..., Any]:
            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                record(layer, (args[0] if args else kwargs["hidden_states"])[0])
                keep_product = keep(layer)
                return None if keep_product is None else (args, kwargs | {"keep": keep_product})

            return before

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            result = output[0] if isinstance(output, tuple) else output
            record(len(layers), result[0])

        layers = layer_list(self._by_layer, self.arch)[1]
        hooks = [
            layer.register_forward_pre_hook(recorder(i), with_kwargs=True) for i, layer in enumerate(layers)
        ]
        hooks.append(layers[-1].register_forward_hook(after))
        try:
            with forbid_compiling() if self.compiled else nullcontext():
                return self._pass(self._by_layer, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def eager(self, inputs: PassInputs) -> torch.Tensor:
        """A frame by its modules, without compiler or graph, so that hooks on them run."""
        return self._pass(self.model, inputs)

    def fix_norm_rows(self, size: int, widths: Iterable[int] | None = None) -> None:
        """From now on run norms (of these widths) at the canonical number of rows in frames of this size."""
        for width in self._norm_pieces if widths is None else widths:
            self._norm_pieces[width][size] = self.frame_rows
        self._warm_up([size])

    def standalone(self, module: nn.Module) -> Any:
        """A module as frames run it (compiled, or as it is), to be called by itself."""
        return self._compiler.compile(module) if self.compiled else module

    def drop_size(self, size: int) -> None:
        """Have no frames of this size any more."""
        self.sizes = tuple(rows for rows in self.sizes if rows != size)
        self._staging_by_rows.pop(size, None)
        for keep in (False, True):
            self._graphs.pop((size, keep), None)

    # ── fast passes ──────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def fast(self, inputs: PassInputs, path: FastPath | None = None) -> torch.Tensor:
        """Logits [R, V] at the number of rows that are live, through a path. Not canonical."""
        self.store.flush_moves()
        path = path or self._get_default_path()
        size = inputs.num_rows
        if self.device.type == "cuda":
            if size not in path.graphs:
                with allow_compiling():
                    path.graphs[size] = CapturedGraph(
                        lambda: self._fast_pass(path, inputs), self.device, path.pool
                    )
            return path.graphs[size]()
        return self._fast_pass(path, inputs)

    @torch.inference_mode()
    def fast_eager(self, inputs: PassInputs, path: FastPath) -> torch.Tensor:
        """Logits of a fast pass that is neither compiled nor captured, for a path that is used once."""
        self.store.flush_moves()
        return self._pass(path.model, inputs, self.fast_tokens)

    def fast_path(self, model: nn.Module) -> FastPath:
        """A path through a model of the same shape with other weights, over the same KV; for drafts only."""
        bind_attention(model, self.arch, self.kernel, self.store.layers)
        compiled = self._compiler.compile_model(model, self.arch) if self.compiled else None
        return FastPath(self._with_stacked_layers(self._with_fused_layers(model)), compiled)

    def skip_path(self, views: LayerViews, skipped: LayerSet) -> FastPath:
        """The path that leaves these sublayers out.

        Layers used whole run compiled where they were compiled before. Others do not: compiling takes
        seconds, and a layer set may change at any time.
        """
        if self.fused:
            return FastPath(self._with_stacked_layers(views.without(skipped, self._fuse_layer)), None)
        if not self.compiled or self.device.type != "cuda":
            return FastPath(views.without(skipped), None)
        return FastPath(views.without(skipped), views.without(skipped, self._compiler.compiled_if_known))

    def views(self) -> LayerViews:
        """The model's layers, with any of their sublayers left out."""
        return LayerViews(self.model, self.arch, lambda: self.eager(pack_frame([], self.staging(1))))

    def _get_default_path(self) -> FastPath:
        """The target model itself, with every norm at the number of rows it is given."""
        if self._default_path is None:
            model = copy_modules(self.model)
            in_pieces = [m for m in model.modules() if getattr(m, "pieces", None)]
            for module in in_pieces:
                module.pieces = {}  # type: ignore[assignment]
            if in_pieces:
                self._default_path = self.fast_path(model)
            elif self.fused:
                self._default_path = FastPath(self._canonical, None)
            else:
                self._default_path = FastPath(self.model, self._canonical)
        return self._default_path

    def _fast_pass(self, path: FastPath, inputs: PassInputs) -> torch.Tensor:
        # On a CPU only the frame's sizes were compiled, and only of the target model itself.
        compiled_size = self.device.type == "cuda" or (
            path is self._default_path and inputs.num_rows in self.sizes
        )
        model = path.compiled if path.compiled is not None and compiled_size else path.model
        logits = self._pass(model, inputs, self.fast_tokens)
        if path.after is not None:
            path.after(logits)
        return logits

    # ── both ─────────────────────────────────────────────────────────────────────────────────────

    def _pass(
        self, model: nn.Module, inputs: PassInputs, previous: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One forward pass. `previous`: tokens that rows with a source take; by default the last frame's."""
        previous = self.frame_outputs[:, 0] if previous is None else previous
        chained = previous[inputs.source.clamp(min=0)]
        tokens = torch.where(inputs.source >= 0, chained, inputs.tokens)
        keep = {} if inputs.keep is None else {"logits_to_keep": inputs.keep}
        out = model(
            input_ids=tokens, position_ids=inputs.positions, use_cache=False, rows=inputs.rows, **keep
        ).logits
        logits: torch.Tensor = out[0]
        if inputs.keep is not None and logits.shape[0] != len(inputs.keep):
            # The model ignores logits_to_keep.
            logits = logits[inputs.keep]
        return logits

    def _unfusable_reason(self) -> str | None:
        """Why layers run as their modules; None where they can be fused."""
        try:
            layers = layer_list(self.model, self.arch)[1]
        except UnsupportedModel as error:
            return str(error)
        unfusable_reason = self._fusing.unfusable_reason
        reasons = (
            (i, reason) for i, layer in enumerate(layers) if (reason := unfusable_reason(layer)) is not None
        )
        first = next(reasons, None)
        if first is None and self.device.type == "cuda":
            changed = [path for path, norm in self._outer_norms(self.model) if changed_modules(norm)]
            first = (len(layers), f"{changed[0]} was changed or has hooks") if changed else None
        if first is None:
            return None
        log.info("layers run as their modules: of layer %d, %s", *first)
        return f"of layer {first[0]}, {first[1]}"

    @property
    def _fusing(self) -> Any:
        """The module that fuses layers on this device."""
        if self.device.type == "cuda":
            from samewise.model import fused_cuda_layer  # imports Triton

            return fused_cuda_layer
        return fused_layer

    def _use_native_modules(self) -> bool:
        reason = use_native_modules(self.model, self.arch)
        if reason is not None:
            log.info("the contract names this machine: of the model, %s", reason)
        return reason is None

    def _with_fused_layers(self, model: nn.Module) -> nn.Module:
        """A copy of the model with one native call per layer, where that is possible; else the model."""
        if not self.fused:
            return model
        name, layers = layer_list(model, self.arch)
        fused = with_layers(model, name, [self._fuse_layer(layer) for layer in layers])
        if self.device.type == "cuda":
            for path, norm in self._outer_norms(model):
                fused = with_module(fused, path, self._fusing.fuse_norm(norm))
        return fused

    def _with_stacked_layers(self, model: nn.Module) -> nn.Module:
        """A copy of the model in which fused layers that follow one another are one call; else the model."""
        if not self.fused or self.device.type == "cuda":
            return model
        name = layer_list(self.model, self.arch)[0]
        layers: Any = model.get_submodule(name)
        return with_layers(model, name, stack_layers(list(layers)))

    def _outer_norms(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Norms outside of the layers, by path."""
        layers = f"{layer_list(model, self.arch)[0]}."
        norms = [(path, norm) for path, norm in model.named_modules() if is_norm(norm)]
        return [(path, norm) for path, norm in norms if not path.startswith(layers)]

    def _fuse_layer(self, layer: nn.Module) -> nn.Module:
        fused: nn.Module = self._fusing.fuse_layer(layer)
        return fused

    @torch.inference_mode()
    def _warm_up(self, sizes: Iterable[int]) -> None:
        """Compile and capture frames of these sizes, of padding rows only: no page is written."""
        if not self.compiled and self.device.type != "cuda":
            return
        for size in sorted(sizes, reverse=True):
            staging = self.staging(size)
            inputs = pack_frame([], staging)
            if self.compiled:
                with allow_compiling():
                    self._pass(self._canonical, inputs)
            if self.device.type == "cuda":
                self._graphs[size, False] = self._capture(inputs)
                if staging.num_kept:
                    keeping = pack_frame([], staging, list(range(staging.num_kept)))
                    self._graphs[size, True] = self._capture(keeping)

    def _capture(self, inputs: PassInputs) -> CapturedGraph[torch.Tensor]:
        def frame() -> torch.Tensor:
            if inputs.moves is not None:
                self.store.move_staged(inputs.moves)
            return self._pass(self._canonical, inputs)

        return CapturedGraph(frame, self.device, self._pool)


__all__ = [
    "PASS_LIMITS",
    "FastPath",
    "PassLimits",
    "Runner",
    "kernel_heads",
    "kv_page_bytes",
    "kv_shapes",
]
