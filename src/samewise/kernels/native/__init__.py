"""The C++ kernels: built once by the machine's own compiler, then loaded from the user's cache.

Their bits are IEEE arithmetic in an order fixed per row (each source file says which), so they
depend on neither the compiler, the instruction set nor the number of threads; the name in the contract is
the source's digest. They run on the OpenMP threads torch already has: a second pool would spin against it.

Knows how to build and load; has never heard of a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from samewise.errors import MachineError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "linear.cpp", "layer.cpp"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("lanes.h", "calls.h"))
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # a fused multiply-add is written where it is meant
    "-fno-math-errno",
    "-fno-trapping-math",  # lets comparisons vectorise; changes no value
    "-fPIC",
    "-shared",
)
_REMEDY = (
    "Install a C++ compiler (g++ or clang++) or point CXX at one, "
    'or choose attention="torch" and linear="torch".'
)


# -- building ------------------------------------------------------------------------------------------


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX`` if set, else the first of c++, g++, clang++; None if absent."""
    wanted = os.environ.get("CXX")
    candidates = [shlex.split(wanted)] if wanted else [["c++"], ["g++"], ["clang++"]]
    for program, *arguments in candidates:
        if found := shutil.which(program):
            return [found, *arguments]
    return None


def available() -> bool:
    """Whether a compiler is there; says nothing of whether it works."""
    return find_compiler() is not None


def source_digest() -> str:
    """First 8 hex digits of the sources' SHA-256: what names the kernels' bits."""
    return hashlib.sha256("\0".join(_texts()).encode()).hexdigest()[:8]


def _texts() -> list[str]:
    return [path.read_text() for path in (*HEADERS, *SOURCES)]


def library_path() -> Path:
    """Where the cache keeps (or would keep) the library built from this source, here, by this compiler."""
    return _cache_dir() / f"{_build_digest(_compiler())}.so"


def build(target: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile to `target`, which appears whole or not at all.

    MachineError if the compiler fails, OSError if the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        command = [*_compiler(), *_FLAGS, *extra_flags, *map(str, SOURCES), "-o", unfinished]
        done = _run(command)
        if done.returncode != 0:
            raise MachineError(_failure(command, done.stderr))
        Path(unfinished).replace(target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _compiler() -> list[str]:
    found = find_compiler()
    if found is None:
        wanted = os.environ.get("CXX")
        looked = f"CXX={wanted!r} is not a program" if wanted else "none of c++, g++, clang++ is on the PATH"
        raise MachineError(f"The native kernels need a C++ compiler: {looked}. {_REMEDY}")
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise MachineError(_failure(command, str(error))) from error


def _failure(command: list[str], stderr: str) -> str:
    last = "\n".join(stderr.strip().splitlines()[-12:])
    return (
        f"The C++ compiler {command[0]} could not build the native kernels.\n"
        f"command: {shlex.join(command)}\n{last}\n{_REMEDY}"
    )


def _cache_dir() -> Path:
    if own := os.environ.get("SAMEWISE_CACHE"):
        return Path(own).expanduser() / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "samewise" / "native"


def _build_digest(compiler: list[str]) -> str:
    """Names all the machine code depends on; the CPU too, for a home folder may move to another machine."""
    version = _run([*compiler, "--version"]).stdout
    parts = [*_texts(), " ".join(_FLAGS), " ".join(compiler), version, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cpu() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    varying = ("processor", "core id", "apicid", "initial apicid", "cpu MHz", "physical id", "bogomips")
    return "\n".join(line for line in first.splitlines() if not line.startswith(varying))


# -- loading -------------------------------------------------------------------------------------------


def load(path: Path) -> ctypes.CDLL:
    """A built library."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(
            f"Cannot load the native kernels from {path}: {error}. Delete the file."
        ) from error


@functools.cache
def library() -> ctypes.CDLL:
    """The process's one library, from the cache or built now; outside the cache if that cannot be written."""
    target = library_path()
    if target.exists():
        return load(target)
    try:
        build(target)
        return load(target)
    except (OSError, MachineError):
        # A full disk shows as a compiler's failure: one that is the compiler's own will come up again.
        with tempfile.TemporaryDirectory(prefix="samewise-native-") as folder:
            elsewhere = Path(folder) / target.name
            build(elsewhere)
            return load(elsewhere)


@functools.cache
def openmp_path() -> Path | None:
    """The OpenMP runtime torch brought into this process; None where it cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6)
    runtimes = [Path(file) for file in files if Path(file).name.startswith(("libgomp", "libiomp5", "libomp"))]
    inside_torch = [path for path in runtimes if path.is_relative_to(Path(torch.__file__).parent.parent)]
    return next(iter([*inside_torch, *runtimes]), None)


@functools.cache
def parallel() -> int | None:
    """Address of GOMP_parallel in torch's runtime (LLVM's and Intel's have it too); None: one thread."""
    path = openmp_path()
    if path is None:
        return None
    function = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


__all__ = [
    "available",
    "build",
    "find_compiler",
    "library",
    "library_path",
    "load",
    "openmp_path",
    "parallel",
    "source_digest",
]
