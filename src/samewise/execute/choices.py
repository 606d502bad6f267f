"""Choices a configuration leaves open: device, dtype, kernels, context length, frame sizes, draft weights.

Nothing is measured here. A value that cannot run on the chosen device is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samewise.config import EngineConfig
from samewise.errors import BadParameter, MachineError
from samewise.kernels.attention.base import AttentionKernel
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build
from samewise.model.arch import Arch
from samewise.model.linear import FrameLinear


@dataclass(frozen=True, slots=True)
class FrameDefaults:
    """Frame sizes where the configuration names none, in rows. Set by hand from measured frame times."""

    cuda_rows: int = 128  # on an H200 a frame of 128 rows takes 14% longer than one row (8B, bf16)
    native_rows: int = 64  # rows cost time only when used: native frames have any size up to this
    torch_rows: int = 16  # a CPU frame is always padded to its size, so padding must stay cheap
    cuda_shares: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Sizes on CUDA where `frame_rows` is 128, scaled with it: few, because each is compiled and captured."""
    cpu_shares: tuple[int, ...] = (1, 16, 64, 128, 512)
    """The same for torch's linears on a CPU: few, because each has to be tried by itself."""
    max_rows: int = 2048  # logits of every row are kept: 1024 rows of a vocabulary of 128k take 0.5 GB
    shared_rows: int = 1024
    """The most in one frame while sequences generate: of an 8B model, it holds their tokens up for 28 ms."""


FRAME_DEFAULTS = FrameDefaults()

QUANTIZE_ABOVE_BYTES = 1.5
"""`draft_weights=auto` quantizes where a weight takes more bytes: int8 then reads two thirds or less."""


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise MachineError('device="cuda" but torch sees no CUDA device; use device="cpu" or "auto"')
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def pick_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """`auto` is the checkpoint's dtype on CUDA and float32 on CPU."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return checkpoint if device.type == "cuda" else torch.float32


def pick_kernel(name: str, device: torch.device) -> AttentionKernel:
    """The attention kernel for a device."""
    if (name == "triton") != (device.type == "cuda") and name != "auto":
        raise BadParameter(
            f"attention={name!r} does not run on {device.type}; use attention='auto'", param="attention"
        )
    if device.type == "cuda":
        from samewise.kernels.attention.triton import TritonKernel

        return TritonKernel.on(device)
    from samewise.kernels.attention.cpu import pick_cpu_kernel

    return pick_cpu_kernel(name)


def pick_linear(name: str, device: torch.device) -> str:
    """Which linears run: `triton` on CUDA, `native` on a CPU with a C++ compiler, else `torch`."""
    if name == ("native" if device.type == "cuda" else "triton"):
        raise BadParameter(
            f"linear={name!r} does not run on {device.type}; use linear='auto'", param="linear"
        )
    if device.type == "cuda":
        return "torch" if name == "torch" else "triton"
    if name == "auto":
        return "native" if linear.available() else "torch"
    if name == "native":
        native_build.library()  # raises MachineError where the compiler is missing
    return name


def pick_max_model_len(config: EngineConfig, arch: Arch) -> int:
    """The longest context in tokens: the configured one, or the model's."""
    max_model_len = config.max_model_len or arch.max_positions
    if max_model_len > arch.max_positions:
        raise BadParameter(
            f"max_model_len={max_model_len}: this {arch.model_type} was trained for "
            f"{arch.max_positions} positions",
            param="max_model_len",
        )
    return max_model_len


def pick_frame_rows(config: EngineConfig, device: torch.device, linears: str) -> int:
    """The canonical number of rows of a frame: the configured one, or the default of device and linears."""
    if config.frame_rows:
        return config.frame_rows
    if device.type == "cuda":
        return FRAME_DEFAULTS.cuda_rows
    return FRAME_DEFAULTS.native_rows if linears == "native" else FRAME_DEFAULTS.torch_rows


def candidate_frame_sizes(
    rows: int, *, linears: str, compiled: bool, device: str, asked: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The numbers of rows a frame may have, smallest first; each must give the bits of `rows`.

    Native linears do at any number of rows, so every size is offered. A compiled layer has one shape per
    size, and torch's linears have to be tried at each size: there the sizes are few.
    """
    if asked is not None:
        _refuse_sizes(rows, asked, linears)
        return tuple(sorted({*asked, rows}))
    if linears != "native":
        if device == "cpu" and compiled:
            return (rows,)
        shares = FRAME_DEFAULTS.cuda_shares if device == "cuda" else FRAME_DEFAULTS.cpu_shares
        sizes = {max(1, rows * share // 128) for share in shares}
        max_rows = max(rows, FRAME_DEFAULTS.max_rows)
        return tuple(sorted({rows, *(size for size in sizes if size <= max_rows)}))
    if compiled:
        return tuple(sorted({min(1 << i, rows) for i in range(rows.bit_length() + 1)}))
    return tuple(range(1, rows + 1))


def _refuse_sizes(rows: int, asked: Sequence[int], linears: str) -> None:
    """Raise BadParameter for sizes that could never give the bits of `rows`."""
    odd = [size for size in asked if size > rows and size % rows]
    if odd:
        raise BadParameter(
            f"frame_sizes={list(asked)}: {odd[0]} is above frame_rows={rows} and no multiple of it; "
            f"give {odd[0] // rows * rows} or {-(-odd[0] // rows) * rows}",
            param="frame_sizes",
        )
    if linears == "native" and max(asked) > rows:
        raise BadParameter(
            f"frame_sizes={list(asked)}: with native linears a frame has at most frame_rows={rows} rows; "
            f"give a larger frame_rows, or leave {max(asked)} out",
            param="frame_sizes",
        )


def pick_draft_quantizer(
    name: str, model: nn.Module, device: torch.device
) -> Callable[[torch.Tensor], linear.PackedWeight | None] | None:
    """How `decode` quantizes its own copy of a weight; None: it drafts with the target model's weights.

    `auto` is int8 on a CPU whose weights take more. A weight that int8 would not shrink is shared.
    """
    if name in ("int8", "int4", "fp8") and (name == "fp8") != (device.type == "cuda"):
        raise BadParameter(
            f"draft_weights={name!r} does not run on {device.type}; use 'auto' or 'same'",
            param="draft_weights",
        )
    linears = [module for module in model.modules() if isinstance(module, FrameLinear)]
    all_native = all(module.packed is not None for module in linears)
    if name in ("int8", "int4") and not all_native:
        raise BadParameter(
            f"draft_weights={name!r} needs native linears: linear='native' and a C++ compiler",
            param="draft_weights",
        )
    if name == "same" or device.type == "cuda" or not all_native:
        return None
    num_bytes = sum({id(m.packed): m.packed.num_bytes for m in linears if m.packed is not None}.values())
    num_weights = sum(module.weight.numel() for module in linears)
    if name == "auto" and num_bytes < QUANTIZE_ABOVE_BYTES * num_weights:
        return None
    form = "int8" if name == "auto" else name

    def quantize(weight: torch.Tensor) -> linear.PackedWeight | None:
        quantized = linear.quantize(weight, form)
        exact = linear.pack(weight)
        return exact if quantized is None or exact.num_bytes <= quantized.num_bytes else quantized

    return quantize


__all__ = [
    "FRAME_DEFAULTS",
    "QUANTIZE_ABOVE_BYTES",
    "FrameDefaults",
    "candidate_frame_sizes",
    "pick_device",
    "pick_draft_quantizer",
    "pick_dtype",
    "pick_frame_rows",
    "pick_kernel",
    "pick_linear",
    "pick_max_model_len",
]
