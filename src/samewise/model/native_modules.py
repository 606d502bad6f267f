"""The modules around the decoder layers as native CPU calls: rotary positions and the model's last norm.

Together with fused layers, native linears and the native sampler they make a pass in which every float
operation is the kernels' own, so its bits depend on no machine and no library. The embedding is a copy;
where a family scales it, or the logits, that is one IEEE operation per element.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from samewise.errors import InvariantBroken
from samewise.kernels.native import build as native_build
from samewise.kernels.native.calls import Norm
from samewise.model.arch import Arch, layer_list
from samewise.model.layer_parts import adds_one, norm_epsilon
from samewise.model.linear import FrameLinear
from samewise.model.surgery import replace_child, runs_class_forward

SCALED_EMBEDDINGS = frozenset({"Gemma3TextScaledWordEmbedding"})  # transformers' own classes
CHECK_POSITIONS = (0, 1, 2, 7, 100, 1023, 4095, 65_535)  # at which the modules are compared
CHECK_TOLERANCE = 1e-5  # of a cosine, or of a norm's largest element: above the rounding of two ways


@functools.cache
def _entries() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    library = native_build.library()
    rotary, norm = library.samewise_rotary, library.samewise_norm
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    rotary.argtypes = [pointer, pointer, int64, int64, ctypes.c_float, pointer, pointer]
    norm.argtypes = [ctypes.POINTER(Norm), pointer, int64, int64, pointer]
    return rotary, norm


class NativeRotary(nn.Module):
    """Cosines and sines of positions, as rotary.cpp states them."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.scale = float(original.attention_scaling)
        self.inv_freq = nn.Buffer(original.inv_freq.to(torch.float32).contiguous(), persistent=False)
        self._entry = _entries()[0]

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [1, R] → cosines and sines, [1, R, D] each."""
        positions = position_ids.to(torch.int64).contiguous()
        rows, half = positions.shape[-1], self.inv_freq.shape[0]
        if positions.shape != (1, rows) or x.dtype != torch.float32:
            raise InvariantBroken(f"rotary positions {tuple(positions.shape)} for {x.dtype}")
        tables = torch.empty(2, 1, rows, 2 * half, dtype=torch.float32, device="cpu")
        self._entry(
            positions.data_ptr(), self.inv_freq.data_ptr(), rows, half, self.scale,
            tables[0].data_ptr(), tables[1].data_ptr(),
        )  # fmt: skip
        return tables[0], tables[1]


class NativeRotaryByLayer(nn.Module):
    """The same of a model whose layers have rotary positions of several kinds (Gemma 3)."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict(
            {kind: NativeRotary(_kind_of(original, kind)) for kind in original.rope_type}
        )

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [1, R] → cosines and sines of a kind of layer, [1, R, D] each."""
        tables: tuple[torch.Tensor, torch.Tensor] = self.kinds[layer_type](x, position_ids)
        return tables


class _Kind(NamedTuple):
    """What one kind of a module's rotary positions has."""

    inv_freq: torch.Tensor
    attention_scaling: float


def _kind_of(original: Any, kind: str) -> _Kind:
    return _Kind(getattr(original, f"{kind}_inv_freq"), getattr(original, f"{kind}_attention_scaling"))


class NativeNorm(nn.Module):
    """An RMS norm, as layer.cpp states it; shares the weight of the module it replaces."""

    def __init__(self, original: Any, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = original.weight
        self.variance_epsilon, self._plus_one = norm_epsilon(original), plus_one
        self._entry = _entries()[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] → [..., H], each row by itself."""
        x = x.contiguous()
        width = self.weight.shape[0]
        if x.shape[-1] != width or x.dtype != torch.float32:
            raise InvariantBroken(f"a norm of width {width} was given {tuple(x.shape)}, {x.dtype}")
        y, weight = torch.empty_like(x), self.weight.float().contiguous()
        by = Norm(weight.data_ptr(), self.variance_epsilon, self._plus_one)
        self._entry(by, x.data_ptr(), x.numel() // width, width, y.data_ptr())
        return y


def use_native_modules(model: nn.Module, arch: Arch) -> str | None:
    """Replace rotary positions and the last norm of a model whose layers are fused.

    Returns why that is not possible (nothing is changed then), or None.
    """
    base: Any = model.get_submodule(layer_list(model, arch)[0].rpartition(".")[0])
    head: Any = getattr(model, "lm_head", None)
    reason = _other_reason(model, base, head)
    if reason is not None:
        return reason
    kinds = base.rotary_emb.rope_type
    rotary = (NativeRotaryByLayer if isinstance(kinds, dict) else NativeRotary)(base.rotary_emb)
    norm = NativeNorm(base.norm, plus_one=adds_one(base.norm))
    if not _rotary_agrees(base.rotary_emb, rotary):
        return "its rotary positions are computed otherwise"
    if not _norm_agrees(base.norm, norm):
        return "its last norm is computed otherwise"
    replace_child(base, "rotary_emb", rotary)
    replace_child(base, "norm", norm)
    return None


def _other_reason(model: nn.Module, base: Any, head: Any) -> str | None:
    """Why a pass computes something beside layers, rotary positions, a norm and a head; None if not."""
    modules = {name: getattr(base, name, None) for name in ("embed_tokens", "rotary_emb", "norm")}
    modules |= {"lm_head": head, "the model": model, "its body": base}
    family = type(model).__module__
    checks = (
        ("it is not transformers' own", not family.startswith("transformers.models.")),
        ("its body is of another family", type(base).__module__ != family),
        *((f"{name} was changed or has hooks", not _plain(module)) for name, module in modules.items()),
        ("its embedding is not a plain one", not _looks_up(modules["embed_tokens"])),
        ("its embedding is scaled", getattr(modules["embed_tokens"], "max_norm", None) is not None),
        ("its head is not a native linear", type(head) is not FrameLinear or head.packed is None),
        ("its logits are capped", getattr(base.config, "final_logit_softcapping", None) is not None),
        ("its last norm is another", not _is_norm(modules["norm"])),
        ("its rotary positions are others", not _is_rotary(modules["rotary_emb"])),
    )
    return next((reason for reason, holds in checks if holds), None)


def _plain(module: nn.Module | None) -> bool:
    return module is not None and runs_class_forward(module)


def _looks_up(module: nn.Module | None) -> bool:
    """Whether a module copies rows of a table, and at most scales them."""
    return type(module) is nn.Embedding or type(module).__name__ in SCALED_EMBEDDINGS


def _is_norm(module: Any) -> bool:
    return hasattr(module, "weight") and (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))


def _is_rotary(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    prefixes = [f"{kind}_" for kind in kinds] if isinstance(kinds, dict) else [""]
    names = [f"{prefix}{name}" for prefix in prefixes for name in ("inv_freq", "attention_scaling")]
    return kinds is not None and all(hasattr(module, name) for name in names)


def _rotary_agrees(original: Any, native: NativeRotary | NativeRotaryByLayer) -> bool:
    if isinstance(native, NativeRotary):
        return _tables_agree(original, native, native.scale)
    return all(
        _tables_agree(partial(original, layer_type=kind), partial(native, layer_type=kind), one.scale)
        for kind, one in native.kinds.items()
    )


@torch.inference_mode()
def _tables_agree(original: Callable[..., Any], native: Callable[..., Any], scale: Any) -> bool:
    positions = torch.tensor([CHECK_POSITIONS], dtype=torch.int64, device="cpu")
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    pairs = zip(original(x, position_ids=positions), native(x, position_ids=positions), strict=True)
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= CHECK_TOLERANCE * scale)
        for one, other in pairs
    )


@torch.inference_mode()
def _norm_agrees(original: nn.Module, native: NativeNorm) -> bool:
    width = native.weight.shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator, dtype=torch.float32, device="cpu")
    one, other = original(x), native(x)
    return bool((one - other).abs().max() <= CHECK_TOLERANCE * one.abs().max() + 1e-6)


__all__ = ["NativeNorm", "NativeRotary", "NativeRotaryByLayer", "use_native_modules"]
