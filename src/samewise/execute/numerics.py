"""Numeric switches of torch and its compiler, set before anything runs, and the contract facts about them.

Every switch that lets a library choose another arithmetic by itself is off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samewise import machine
from samewise.model.digest import file_digest

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
    """Set torch's switches for CUDA and return them as contract facts. On CPU, see `process_state`."""
    if device.type != "cuda":
        return {}
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_fp16_accumulation = False
    torch.backends.cuda.preferred_blas_library("cublas")
    return {
        "tf32": "off",
        "reduced-precision reductions": "off",
        "cublas workspace": _pin_cublas_workspace(device),
    }


@functools.cache
def _pin_cublas_workspace(device: torch.device) -> str:
    """Have cuBLAS work with the configured workspace, and return its configuration and its bytes.

    torch reads the variable when a stream first needs a workspace, which may have been before this. So the
    workspaces are dropped, and the size of a new one is what a product takes of the device's memory. Once per
    process: graphs that are captured afterwards keep the workspace they were captured with.
    """
    config = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", machine.CUBLAS_WORKSPACE)
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - has no public name
    x = torch.zeros(16, 16, device=device, dtype=torch.float32)
    if clear is None:
        return config
    torch.mm(x, x)  # loads the library
    torch.cuda.synchronize(device)
    clear()
    before = torch.cuda.memory_allocated(device)
    y = torch.mm(x, x)
    num_bytes = torch.cuda.memory_allocated(device) - before - y.untyped_storage().nbytes()
    return f"{config}, {num_bytes} bytes"


def facts(device: torch.device) -> dict[str, str]:
    """Contract facts about the device, and the libraries and variables of this process."""
    common = {
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "numpy": _version("numpy"),
        "platform": platform.machine(),
    }
    return common | (_cuda_facts(device) if device.type == "cuda" else _cpu_facts())


def _cuda_facts(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    return machine.numeric_variables(os.environ, cuda=True) | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs",
        "cuda": str(torch.version.cuda),
        "cublas": cublas_fact(machine.loaded_libraries(r"libcublas(Lt)?\.so[.\d]*")),
        "triton": _version("triton"),
    }


def cublas_fact(libraries: list[Path]) -> str:
    """Name, version and content digest of each loaded library; the package's version where none is known."""
    if not libraries:
        return "package " + _version("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
    return ", ".join(f"{_library_version(path)} {file_digest(path)[:16]}" for path in libraries)


def _library_version(path: Path) -> str:
    """The version that a loaded cuBLAS or cuBLASLt states itself."""
    library = ctypes.CDLL(str(path))  # loaded already: this is the same one
    name = path.name.split(".so")[0]
    if hasattr(library, "cublasLtGetVersion"):
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return f"{name} {library.cublasLtGetVersion()}"
    parts = []
    for kind in range(3):  # major, minor, patch
        value = ctypes.c_int(-1)
        if (
            hasattr(library, "cublasGetProperty")
            and library.cublasGetProperty(kind, ctypes.byref(value)) == 0
        ):
            parts.append(str(value.value))
    return f"{name} {'.'.join(parts) or 'unknown'}"


def _cpu_facts() -> dict[str, str]:
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return machine.numeric_variables(os.environ) | {
        "device": "cpu",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(region_threads(torch.get_num_threads())),
        "blas": "mkl" if mkl else "other",
        "torch build": sha256(torch.__config__.show().encode()).hexdigest()[:16],  # names the libraries
        "mkl dynamic": os.environ.get("MKL_DYNAMIC", "unset"),
        "onednn isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "unset"),
        "flush denormal": "on" if threads_flush_denormals() else "off",
    }


def threads_flush_denormals() -> bool:
    """Whether any of torch's threads takes subnormal numbers for zero.

    A thread has the setting of the thread that started it, at that time; `process_state` pins the caller's
    alone. Every thread gets a part of a tensor this long.
    """
    tiny = torch.full((torch.get_num_threads() << 16,), 1e-40, dtype=torch.float32)
    return bool((tiny * 1.0 == 0.0).any())


def region_threads(num_threads: int, maps: Path = machine.MAPS) -> int:
    """Threads that a parallel region of torch really gets when it asks for `num_threads`.

    OpenMP may give it fewer: OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS, or a call to the runtime.
    """
    for path in machine.loaded_libraries(r"lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*", maps):
        library = ctypes.CDLL(str(path))
        if library.omp_get_max_active_levels() < 1:
            return 1
        num_threads = min(num_threads, library.omp_get_thread_limit())
    return num_threads


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


__all__ = [
    "as_bits",
    "compiler_name",
    "cublas_fact",
    "facts",
    "inductor_options",
    "pin_switches",
    "region_threads",
    "threads_flush_denormals",
]
