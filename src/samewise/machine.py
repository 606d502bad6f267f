"""Facts about the CPU, and the environment variables that torch must find when it loads.

Host only: torch is never imported here, because the variables have no effect once it is loaded.
"""

import hashlib
import importlib.metadata
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from samewise import user_cache

TryIsa = Callable[[str | None], int | None]
"""(oneDNN instruction-set cap or None) -> exit status of a child process that used it; None: it timed out."""

CPUINFO = Path("/proc/cpuinfo")
CPUINFO_FIELDS = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    # The same on ARM.
    "CPU implementer",
    "CPU part",
    "CPU variant",
)

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------ the CPU


def cpu_facts(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Contract facts that identify the CPU: model name, numeric ids, a digest of its feature flags."""
    fields = _first_processor(cpuinfo)
    facts = {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_arch": platform.machine(),
        "cpu_features": hashlib.sha256(" ".join(_features(fields)).encode()).hexdigest()[:16],
    }
    for name in CPUINFO_FIELDS:
        if name in fields:
            facts["cpu_" + name.removeprefix("cpu ").removeprefix("CPU ")] = fields[name]
    return facts


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor; empty where the kernel does not list them.

    Only the first block is read: the kernel generates the file while it is read, slowly on large machines.
    """
    fields: dict[str, str] = {}
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace", buffering=4096) as lines:
            for line in lines:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError:
        return {}
    return fields


def _features(fields: Mapping[str, str]) -> list[str]:
    return sorted((fields.get("flags") or fields.get("Features") or "").split())


# ---------------------------------------------------------------------------------------- the environment

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads its old name too
ISA_CAPS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # caps to try, fastest first
AMX_FLAGS = frozenset({"amx_bf16", "amx_tile"})
FATAL_SIGNALS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
TRY_ISA_SECONDS = 180  # far above the seconds a child takes to import torch, also on a busy machine

# Variables that may change torch's bits on a CPU if they are set when it loads; each that is set is a fact of
# a contract that names the machine. A name that ends in _ stands for all variables that begin with it.
NUMERIC_VARIABLES = (
    *ISA_VARIABLES,
    "ATEN_CPU_CAPABILITY",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "DNNL_",
    "OPENBLAS_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_COMPILE_",
)

# The same on CUDA. The workspace of cuBLAS has a fact of its own.
CUDA_VARIABLES = (
    "CUBLAS_",
    "CUBLASLT_",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "DISABLE_ADDMM_CUDA_LT",
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "NVIDIA_TF32_OVERRIDE",
    "PTXAS_OPTIONS",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_",
    "TORCH_COMPILE_",
    "TORCH_CUBLASLT_",
    "TORCH_CUBLAS_",
    "TRITON_",
)

# Of these, the ones that cannot change a bit: where caches lie, what is logged, how threads wait and where
# they run. All others count, known or not.
HARMLESS_VARIABLES = frozenset({
    "CUBLASLT_LOG_FILE",
    "CUBLASLT_LOG_LEVEL",
    "CUBLASLT_LOG_MASK",
    "CUBLAS_LOGDEST_DBG",
    "CUBLAS_LOGINFO_DBG",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_VERBOSE",
    "GOMP_CPU_AFFINITY",
    "GOMP_DEBUG",
    "GOMP_SPINCOUNT",
    "GOMP_STACKSIZE",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "KMP_SETTINGS",
    "KMP_STACKSIZE",
    "KMP_WARNINGS",
    "MKL_VERBOSE",
    "OMP_AFFINITY_FORMAT",
    "OMP_DISPLAY_AFFINITY",
    "OMP_DISPLAY_ENV",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_STACKSIZE",
    "OMP_WAIT_POLICY",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "ONEDNN_VERBOSE",
    "TORCHDYNAMO_VERBOSE",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_TRACE",
    "TORCHINDUCTOR_WORKER_START",
    "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DEBUG_DIR",
    "TRITON_ALWAYS_COMPILE",
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_MANAGER",
    "TRITON_DUMP_DIR",
    "TRITON_HOME",
    "TRITON_KERNEL_DUMP",
    "TRITON_PRINT_AUTOTUNING",
    "TRITON_REPRODUCER_PATH",
})  # fmt: skip

CUBLAS_WORKSPACE = ":4096:8"
"""Of cuBLAS: kilobytes and number of its buffers. cuBLAS chooses algorithms by the room it has."""

_TRY_ISA_CODE = """
import torch
for rows in (1, 16, 64):
    for inner, outer in ((64, 64), (576, 1536), (32, 48)):
        x = torch.ones(rows, inner, dtype=torch.bfloat16)
        w = torch.ones(outer, inner, dtype=torch.bfloat16)
        assert torch.nn.functional.linear(x, w)[0, 0] > 0
        assert (x @ w.t())[0, 0] > 0
"""


def pin_environment(
    try_isa: TryIsa | None = None,
    *,
    cpuinfo: Path = CPUINFO,
    environ: MutableMapping[str, str] | None = None,
) -> dict[str, str]:
    """Set the variables torch must find, and return every variable that can change its bits on a CPU.

    Must run before torch is loaded. Variables that are already set keep their values. Some virtual machines
    advertise AMX and kill a process that uses it: a child process tries it once per machine, and oneDNN is
    capped below AMX where the child dies.
    """
    env = os.environ if environ is None else environ
    # Otherwise MKL and OpenMP use fewer threads on a busy machine, and sums are split elsewhere.
    env.setdefault("MKL_DYNAMIC", "FALSE")
    env.setdefault("OMP_DYNAMIC", "FALSE")
    env.setdefault("OMP_NUM_THREADS", str(num_cores()))
    # Otherwise OpenMP's threads spin for milliseconds after each of torch's operations, on the cores that the
    # kernels' own threads and other processes need.
    if "GOMP_SPINCOUNT" not in env:
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    if not any(name in env for name in ISA_VARIABLES):
        cap = _isa_cap(_first_processor(cpuinfo), try_isa or try_isa_in_child)
        if cap is not None:
            env["ONEDNN_MAX_CPU_ISA"] = cap
    return numeric_variables(env)


def numeric_variables(environ: Mapping[str, str], *, cuda: bool = False) -> dict[str, str]:
    """The variables that are set and can change bits, on a CPU or on CUDA, sorted by name."""
    names = CUDA_VARIABLES if cuda else NUMERIC_VARIABLES
    prefixes = tuple(name for name in names if name.endswith("_"))
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in names or name.startswith(prefixes)) and name not in HARMLESS_VARIABLES
    }


def num_cores() -> int:
    """Physical cores this process may use: its affinity mask without hyper-threads, within its CPU quota."""
    allowed = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return str(cpu)


def _quota(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    try:
        quota, period = cpu_max.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such controller, or "max": no limit
        return sys.maxsize


def _isa_cap(fields: Mapping[str, str], try_isa: TryIsa) -> str | None:
    """The fastest oneDNN cap that works here; None: oneDNN's own choice works."""
    features = _features(fields)
    if AMX_FLAGS.isdisjoint(features):
        return None
    key: user_cache.Key = {
        "cpu": fields.get("model name", ""),
        "features": hashlib.sha256(" ".join(features).encode()).hexdigest(),
        "kernel": platform.release(),
        "torch": _version("torch"),
    }
    known = user_cache.get("isa", key)
    if isinstance(known, dict) and (known.get("cap") is None or known.get("cap") in ISA_CAPS):
        cap: str | None = known.get("cap")
        return cap
    cap, certain = _find_isa_cap(try_isa)
    if certain:
        user_cache.put("isa", key, {"cap": cap})
    return cap


def _find_isa_cap(try_isa: TryIsa) -> tuple[str | None, bool]:
    """(cap, certain). After an unclear result (a timeout, another failure) AMX is avoided, and not cached."""
    for cap in (None, *ISA_CAPS):
        status = try_isa(cap)
        if status == 0:
            return cap, True
        if status is None or -status not in FATAL_SIGNALS:
            log.warning("could not find out whether this CPU runs AMX (child: %s); going without it", status)
            return cap or ISA_CAPS[0], False
    log.warning("bfloat16 products kill their process here, even with %s; expect only float32 to work", cap)
    return ISA_CAPS[-1], True


def try_isa_in_child(cap: str | None) -> int | None:
    """Multiply a few bfloat16 matrices in a child process: its exit status, or None if it took too long."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if cap is not None:
        env["ONEDNN_MAX_CPU_ISA"] = cap
    # -P: a torch.py in the current folder must not be imported.
    command = [sys.executable, "-P", "-c", _TRY_ISA_CODE]
    try:
        return subprocess.run(
            command, env=env, capture_output=True, timeout=TRY_ISA_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


# ------------------------------------------------------------------------------------- loaded libraries

MAPS = Path("/proc/self/maps")


def loaded_libraries(pattern: str, maps: Path = MAPS) -> list[Path]:
    """Files that this process has loaded whose names match a pattern, in order; empty without /proc.

    A library may be loaded from elsewhere than its package says: LD_LIBRARY_PATH, another wheel.
    """
    try:
        text = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # Address, permissions, offset, device, inode; then the path, which may contain spaces.
    fields = [line.split(maxsplit=5) for line in text.splitlines()]
    paths = {Path(field[5]) for field in fields if len(field) == 6 and field[5].startswith("/")}
    return sorted(path for path in paths if re.fullmatch(pattern, path.name))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


__all__ = [
    "CUBLAS_WORKSPACE",
    "HARMLESS_VARIABLES",
    "MAPS",
    "cpu_facts",
    "loaded_libraries",
    "num_cores",
    "numeric_variables",
    "pin_environment",
    "try_isa_in_child",
]
