"""The machine under us: its cache folder, its CPU, and the environment torch must find when it loads.

Host only: this module has never imported torch. What it settles must be settled before anyone does.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

Key = Mapping[str, str | int]
Probe = Callable[[str | None], int | None]
"""(oneDNN instruction-set cap or None) -> return code of a child that used it; None: no answer in time."""

CPUINFO = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------- the cache


def cache_dir() -> Path:
    """Where converted models and measured facts are kept: $SAMEWISE_CACHE, else the user's cache folder."""
    if named := os.environ.get("SAMEWISE_CACHE"):
        return Path(named).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "samewise"
    return Path("~/.cache/samewise").expanduser()


def recall(kind: str, key: Key) -> object | None:
    """What `remember` stored under (kind, key), or None. A damaged or unreadable entry counts as absent."""
    path = _fact_path(kind, key)
    try:
        entry = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("ignoring the damaged cache entry %s: %s", path, error)
        return None
    if not isinstance(entry, dict) or entry.get("key") != dict(key):
        log.warning("ignoring the damaged cache entry %s: it is not about this", path)
        return None
    value: object = entry.get("value")
    return value


def remember(kind: str, key: Key, value: object) -> None:
    """Store a small JSON value for later processes, whole or not at all. Never fails: only a cache."""
    path = _fact_path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": dict(key), "value": value}).encode())
    except OSError as error:
        log.warning("cannot write the cache entry %s: %s", path, error)


def write_atomically(path: Path, content: bytes) -> None:
    """Readers of `path` see the old content or the new, never a part. Raises OSError and leaves no litter."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _fact_path(kind: str, key: Key) -> Path:
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "facts" / kind / f"{name}.json"


# ------------------------------------------------------------------------------------------------ the CPU


def cpu_facts(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """What names this CPU in a contract: its model, its numbers, a digest of its features."""
    fields = _first_processor(cpuinfo)
    facts = {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_arch": platform.machine(),
        "cpu_features": hashlib.sha256(" ".join(_features(fields)).encode()).hexdigest()[:16],
    }
    # The last three are how an ARM kernel says the same thing.
    for name in (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "CPU implementer",
        "CPU part",
        "CPU variant",
    ):
        if name in fields:
            facts["cpu_" + name.removeprefix("cpu ").removeprefix("CPU ")] = fields[name]
    return facts


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor; empty where the kernel does not list them.

    Only the first block is read: the kernel makes the rest as it is asked for it, slowly on large machines.
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

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN honours its old name too
ISA_LADDER = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # what to fall back to, best first
AMX_FLAGS = frozenset({"amx_bf16", "amx_tile"})
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
PROBE_SECONDS = 180

# Whatever of these is set when torch loads may change its bits, so it is a fact for the contract.
NUMERIC_VARIABLES = (
    *ISA_VARIABLES,
    "ATEN_CPU_CAPABILITY",
    "KMP_DETERMINISTIC_REDUCTION",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_JIT_PROFILE",
    "OPENBLAS_NUM_THREADS",
)

_PROBE_CODE = """
import torch
for rows in (1, 16, 64):
    for inner, outer in ((64, 64), (576, 1536), (32, 48)):
        x = torch.ones(rows, inner, dtype=torch.bfloat16)
        w = torch.ones(outer, inner, dtype=torch.bfloat16)
        assert torch.nn.functional.linear(x, w)[0, 0] > 0
        assert (x @ w.t())[0, 0] > 0
"""


def pin_environment(
    probe: Probe | None = None,
    *,
    cpuinfo: Path = CPUINFO,
    environ: MutableMapping[str, str] | None = None,
) -> dict[str, str]:
    """Set what torch must find in the environment, and return every variable there that can change bits.

    Call it before torch is loaded. Nothing the user has set is overridden. Some virtual machines advertise
    AMX and kill whoever uses it: there a child process finds out, once, and oneDNN is capped below it.
    """
    env = os.environ if environ is None else environ
    # MKL and OpenMP may use fewer threads when the machine is busy, and sums would split elsewhere.
    env.setdefault("MKL_DYNAMIC", "FALSE")
    env.setdefault("OMP_DYNAMIC", "FALSE")
    env.setdefault("OMP_NUM_THREADS", str(num_cores()))
    if not any(name in env for name in ISA_VARIABLES):
        cap = _isa_cap(_first_processor(cpuinfo), probe or run_probe)
        if cap is not None:
            env["ONEDNN_MAX_CPU_ISA"] = cap
    return {name: env[name] for name in sorted(NUMERIC_VARIABLES) if name in env}


def num_cores() -> int:
    """Physical cores this process may use: its affinity mask without hyper-twins, within its quota."""
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


def _isa_cap(fields: Mapping[str, str], probe: Probe) -> str | None:
    """The best oneDNN instruction set that survives here; None: whatever oneDNN picks by itself does."""
    features = _features(fields)
    if AMX_FLAGS.isdisjoint(features):
        return None
    key: Key = {
        "cpu": fields.get("model name", ""),
        "features": hashlib.sha256(" ".join(features).encode()).hexdigest(),
        "kernel": platform.release(),
        "torch": _version("torch"),
    }
    known = recall("isa", key)
    if isinstance(known, dict) and (known.get("cap") is None or known.get("cap") in ISA_LADDER):
        cap: str | None = known.get("cap")
        return cap
    cap, certain = _search(probe)
    if certain:
        remember("isa", key, {"cap": cap})
    return cap


def _search(probe: Probe) -> tuple[str | None, bool]:
    """(cap, certain). Without a clear answer the cautious cap is taken, and not remembered."""
    for cap in (None, *ISA_LADDER):
        code = probe(cap)
        if code == 0:
            return cap, True
        if code is None or -code not in FAULTS:
            log.warning("could not find out whether this CPU runs AMX (child: %s); going without it", code)
            return cap or ISA_LADDER[0], False
    log.warning("bfloat16 products kill their process here, even with %s; expect only float32 to work", cap)
    return ISA_LADDER[-1], True


def run_probe(cap: str | None) -> int | None:
    """Multiply a few bfloat16 matrices in a child process. Its return code, or None if it takes too long."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if cap is not None:
        env["ONEDNN_MAX_CPU_ISA"] = cap
    # -P: a torch.py lying in the current folder is not torch.
    command = [sys.executable, "-P", "-c", _PROBE_CODE]
    try:
        return subprocess.run(
            command, env=env, capture_output=True, timeout=PROBE_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


__all__ = [
    "cache_dir",
    "cpu_facts",
    "num_cores",
    "pin_environment",
    "recall",
    "remember",
    "run_probe",
    "write_atomically",
]
