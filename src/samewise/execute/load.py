"""From a configuration to a model in memory: what to load, where to, how wide, how much memory.

Decides everything an engine needs before it exists. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samewise import machine, user_cache
from samewise.config import EngineConfig, parse_memory
from samewise.errors import BadParameter, MachineError
from samewise.execute.runner import kv_page_bytes
from samewise.kernels.attention.base import PAGE, Kernel
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build
from samewise.model import folder
from samewise.model import load as model_load
from samewise.model.arch import INSPECTION_VERSION, Arch, inspect_model, read_config
from samewise.model.digest import config_digests, weights_digest
from samewise.model.linear import FrameLinear
from samewise.model.resolve import resolve

FRAME_ROWS = {"native": 64, "torch": 16, "cuda": 128}
FREE_SHARE = {"cpu": 0.25, "cuda": 0.85}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to be run, and what is known about where it came from."""

    model: nn.Module
    arch: Arch
    facts: Mapping[str, str]
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()


def load(config: EngineConfig) -> Loaded:
    """Bring a model in: resolved, inspected, refused or loaded."""
    machine_facts = machine.pin_environment()
    source = resolve(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    trusted = config.trust_remote_code
    model_config = read_config(source, trust_remote_code=trusted)
    arch = _inspect(model_config, trusted=trusted)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device, arch.checkpoint_dtype)
    model = model_load.load(source, model_config, dtype=dtype, trust_remote_code=trusted)
    generation = folder.generation_defaults(source)
    facts = {"weights": weights_digest(source)} | config_digests(source)
    if device.type == "cpu":  # a card's bits do not depend on the host's threads
        facts |= machine_facts
    return Loaded(
        model,
        arch,
        facts,
        folder.read_tokenizer(source, trust_remote_code=trusted),
        generation,
        folder.eos_ids(generation, model_config),
    )


def _inspect(model_config: Any, *, trusted: bool) -> Arch:
    """The model's architecture, cached by its configuration and the libraries' versions."""
    key = {"config": sha256(model_config.to_json_string(use_diff=False).encode()).hexdigest()}
    key |= {name: version(name) for name in ("torch", "transformers")} | {"inspection": INSPECTION_VERSION}
    if trusted:  # code that came with a model may change under the same configuration
        return inspect_model(model_config, trust_remote_code=True)
    arch = Arch.from_json(user_cache.get("arch", key))
    if arch is None:
        arch = inspect_model(model_config)
        user_cache.put("arch", key, arch.to_json())
    return arch


def fingerprint(model: nn.Module) -> str:
    """A digest of weights in memory, computed where they are.

    Exact integer sums of the bits, weighted by position: cheap on the device, independent of the
    order of summation. The probe's logits in the contract stand beside it.
    """
    digest = sha256()
    for name, tensor in sorted(model.named_parameters()):
        bits = tensor.detach().contiguous().view(torch.uint8).flatten()
        sums = []
        for chunk in torch.split(bits, 1 << 26):
            place = torch.arange(chunk.numel(), device=chunk.device, dtype=torch.int64)
            mixed = (chunk.long() + 1) * ((place * 0x9E3779B1 + 0x7F4A7C15) & 0x3FFFFFFF)
            sums.append(int(mixed.sum()))
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), sums)).encode())
    return "memory:" + digest.hexdigest()


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise MachineError('device="cuda" but torch sees no CUDA device; use device="cpu" or "auto"')
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def pick_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """`auto` is the checkpoint's on CUDA and float32 on CPU."""
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    return checkpoint if device.type == "cuda" else torch.float32


def pick_kernel(name: str, device: torch.device) -> Kernel:
    """The attention kernel for a device."""
    if (name == "triton") != (device.type == "cuda") and name != "auto":
        raise BadParameter(f"attention={name!r} does not run on {device.type}; use attention='auto'")
    if device.type == "cuda":
        from samewise.kernels.attention.triton import TritonKernel

        return TritonKernel.on(device)
    from samewise.kernels.attention.cpu import pick

    return pick(name)


def pick_linear(name: str, device: torch.device) -> str:
    """Whose linears: `native` on a CPU with a compiler, else `torch`."""
    if device.type == "cuda":
        if name == "native":
            raise BadParameter("linear='native' does not run on cuda; use linear='auto'")
        return "torch"
    if name == "auto":
        return "native" if linear.available() else "torch"
    if name == "native":
        native_build.library()  # MachineError says what is missing
    return name


ELASTIC = {"cuda": (1, 8, 32, 64, 128, 256, 512, 1024), "cpu": (1, 16, 64, 128, 512)}
"""Sizes of a frame, in 128ths of the canonical number of rows, where each has to be settled by itself."""
WIDEST = 1024
"""None above this by default: logits of every row are kept."""


def frame_sizes(
    rows: int, *, linears: str, compiled: bool, device: str, asked: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The numbers of rows a frame may have, least first: at each, every operator gives the bits of `rows`.

    Native linears do at any number; a compiled layer has one shape per size, so there they are few, as they
    are where a library's linears have to be tried at each.
    """
    if asked is not None:
        odd = [size for size in asked if size > rows and size % rows]
        if odd:
            raise BadParameter(
                f"frame_sizes={list(asked)}: {odd[0]} is above frame_rows={rows} and no multiple of it; "
                f"give {odd[0] // rows * rows} or {-(-odd[0] // rows) * rows}"
            )
        if linears == "native" and max(asked) > rows:
            raise BadParameter(
                f"frame_sizes={list(asked)}: with native linears a frame has at most frame_rows={rows} rows; "
                f"give a larger frame_rows, or leave {max(asked)} out"
            )
        return tuple(sorted({*asked, rows}))
    if linears != "native":
        if device == "cpu" and compiled:
            return (rows,)
        found = {max(1, rows * share // 128) for share in ELASTIC[device]}
        return tuple(sorted({rows, *(size for size in found if size <= max(rows, WIDEST))}))
    if compiled:
        return tuple(sorted({min(1 << i, rows) for i in range(rows.bit_length() + 1)}))
    return tuple(range(1, rows + 1))


def cheaper(
    name: str, model: nn.Module, device: torch.device
) -> Callable[[torch.Tensor], linear.Packed | None] | None:
    """How `decode` should keep its own copy of a weight, or None: with the weights that are there.

    On a CPU, `auto` is eight bits where the weights take more; a weight that would not shrink is shared.
    """
    if name in ("int8", "int4", "fp8") and (name == "fp8") != (device.type == "cuda"):
        raise BadParameter(f"draft_weights={name!r} does not run on {device.type}; use 'auto' or 'same'")
    linears = [m for m in model.modules() if isinstance(m, FrameLinear)]
    native_ones = all(m.packed is not None for m in linears)
    if name in ("int8", "int4") and not native_ones:
        raise BadParameter(f"draft_weights={name!r} needs native linears: linear='native' and a C++ compiler")
    if name == "same" or device.type == "cuda" or not native_ones:
        return None
    read = sum({id(m.packed): m.packed.num_bytes for m in linears if m.packed is not None}.values())
    weights = sum(m.weight.numel() for m in linears)
    form = {"auto": "int8"}.get(name, name)
    if name == "auto" and read < 1.5 * weights:
        return None

    def smaller(weight: torch.Tensor) -> linear.Packed | None:
        quantised = linear.quantise(weight, form)
        exact = linear.pack(weight)
        return exact if quantised is None or exact.num_bytes <= quantised.num_bytes else quantised

    return smaller


def refuse_other_vocabulary(loaded: Loaded, draft: Loaded, name: str) -> None:
    """Raise BadParameter unless a draft model's tokens are the model's tokens."""
    if loaded.arch.vocab != draft.arch.vocab:
        raise BadParameter(
            f"draft_model={name!r} has a vocabulary of {draft.arch.vocab}, the model one of "
            f"{loaded.arch.vocab}; a draft model must have the same"
        )
    if loaded.tokenizer is None or draft.tokenizer is None:
        return
    own, other = loaded.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    wrong = min(
        (token for token, i in own.items() if other.get(token) != i), key=own.__getitem__, default=None
    )
    if wrong is not None or len(own) != len(other):
        told = f"{wrong!r} is {own.get(wrong)} here and {other.get(wrong)} there" if wrong else "its size"
        raise BadParameter(
            f"draft_model={name!r} has another vocabulary ({told}); a draft model must have the same"
        )


def longest(config: EngineConfig, arch: Arch) -> int:
    """The longest context: what was asked for, or what the model was made for."""
    wanted = config.max_model_len or arch.max_positions
    if wanted > arch.max_positions:
        raise BadParameter(
            f"max_model_len={wanted}: {arch.model_type} here was made for {arch.max_positions} positions"
        )
    return wanted


def count_pages(
    config: EngineConfig, arch: Arch, max_len: int, device: torch.device, *, widest: int = 0
) -> int:
    """As many pages as the memory allows, but no more than every sequence at its longest could use.

    Beside them there must be room for the logits of the widest frame, and for what is made of them.
    """
    dtype = _dtype_of(config, arch, device)
    size = kv_page_bytes(arch, dtype)
    asked = parse_memory(config.kv_memory)
    share = FREE_SHARE[device.type] if asked is None else asked
    logits = widest * arch.vocab * (3 * dtype.itemsize + 8) if device.type == "cuda" else 0
    free = max(0, _free_bytes(device) - logits) if isinstance(share, float) else 0
    budget = int(share * free) if isinstance(share, float) else share
    most = config.max_num_seqs * -(-(max_len + 1) // PAGE) + 2
    pages = min(budget // size, most)
    if pages < 4:
        raise BadParameter(
            f"kv_memory={config.kv_memory!r} is {budget} bytes, and one page of {PAGE} tokens takes {size}; "
            f"give at least {4 * size} bytes"
        )
    return int(pages)


def _dtype_of(config: EngineConfig, arch: Arch, device: torch.device) -> torch.dtype:
    return pick_dtype(config.dtype, device, arch.checkpoint_dtype)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was tried before lies there still
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    return 2**31  # a machine that does not say: assume a modest two gigabytes


__all__ = [
    "FRAME_ROWS",
    "Loaded",
    "cheaper",
    "count_pages",
    "fingerprint",
    "frame_sizes",
    "load",
    "longest",
    "pick_device",
    "pick_dtype",
    "pick_kernel",
    "pick_linear",
    "refuse_other_vocabulary",
]
