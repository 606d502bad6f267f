"""Numeric switches of torch and its compiler, set before anything runs, and the contract facts about them.

Every switch that lets a library choose another arithmetic by itself is off.
"""

from __future__ import annotations

import os
import platform
import re
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

CUBLAS_WORKSPACE = ":4096:8"

INDUCTOR: dict[str, Any] = {
    "deterministic": True,  # with this and the next four, no kernel is chosen by timing candidates
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,
    "benchmark_fusion": False,
    "emulate_precision_casts": True,  # fused operators round as unfused ones do; no fused multiply-add
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
    "cpp.enable_kernel_profile": False,
}


def inductor_options() -> dict[str, Any]:
    """The compiler's switches, without those that this version of it does not have."""
    import torch._inductor.config as inductor

    known = inductor.get_config_copy()
    return {name: value for name, value in INDUCTOR.items() if name in known}


def compiler_name(device: torch.device) -> str:
    """The contract fact "compile": Inductor, backend (Triton or a C++ compiler), digest of switches."""
    switches = sha256(str(sorted(inductor_options().items())).encode()).hexdigest()[:8]
    return f"inductor, {_backend(device)}, switches {switches}"


def _backend(device: torch.device) -> str:
    if device.type == "cuda":
        return f"triton {_version('triton')}"
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    name = get_cpp_compiler()
    version_text = get_compiler_version_info(name)
    match = re.search(r"(gcc|clang) version [^_\n]+", version_text)
    return match[0].strip() if match else sha256(version_text.encode()).hexdigest()[:16]


def pin_switches(device: torch.device) -> dict[str, str]:
    """Set torch's switches and return them as contract facts."""
    if device.type != "cuda":
        return {}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    return {
        "tf32": "off",
        "reduced-precision reductions": "off",
        "cublas workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }


def facts(device: torch.device) -> dict[str, str]:
    """Contract facts about the device and the libraries of this process."""
    common = {
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "numpy": _version("numpy"),
        "platform": platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return common | {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs",
            "cuda": str(torch.version.cuda),
            "cublas": _version("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
            "triton": _version("triton"),
        }
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return common | {
        "device": "cpu",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "blas": "mkl" if mkl else "other",
        "torch build": sha256(torch.__config__.show().encode()).hexdigest()[:16],  # names the libraries
        "mkl dynamic": os.environ.get("MKL_DYNAMIC", "unset"),
        "onednn isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "unset"),
        "flush denormal": "on" if float(torch.tensor([1e-40]) * 1.0) == 0.0 else "off",
    }


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The same values as integers of their size, so that comparing them compares bits."""
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "absent"


__all__ = ["as_bits", "compiler_name", "facts", "inductor_options", "pin_switches"]
