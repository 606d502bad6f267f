"""Libraries of the C++ kernels that are built in other ways, kept in the cache beside the usual one."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
from pathlib import Path

import pytest

from samewise.kernels.native import build as native_build

needs_compiler = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")

X86 = platform.machine() in {"x86_64", "AMD64"}
CPU_FEATURES = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
PORTABLE = "-DSAMEWISE_PORTABLE"

VARIANTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    # name: the compiler (None: the usual one) and the flags after the usual ones
    "portable": (None, (PORTABLE,)),
    "portable, -O1": (None, (PORTABLE, "-O1")),
    "-O0": (None, ("-O0",)),
    "-O1": (None, ("-O1",)),
    "-O2": (None, ("-O2",)),
    "AVX2": (None, ("-mno-avx512f",)),
    "no futex": (None, ("-DSAMEWISE_NO_FUTEX", PORTABLE, "-O1")),  # how threads sleep where there is no Linux
    "x86-64, portable": (None, ("-march=x86-64", "-mtune=generic", PORTABLE)),
    "clang++": ("clang++", ()),
    "clang++, portable": ("clang++", (PORTABLE,)),
    "clang++, AVX2": ("clang++", ("-mno-avx512f",)),
}


def missing(name: str) -> str | None:
    """Why this machine cannot build and run a variant."""
    compiler, _ = VARIANTS[name]
    if compiler is not None and shutil.which(compiler) is None:
        return f"no {compiler}"
    if "AVX2" in name and not {"avx2", "avx512f"} <= set(CPU_FEATURES):
        return "not a CPU with AVX-512: its own build is the AVX2 one, or it has none"
    return "not x86-64" if name.startswith("x86-64") and not X86 else None


def variant_path(name: str) -> Path:
    """The variant's library, built if it is not in the cache."""
    compiler, flags = VARIANTS[name]
    with _compiler(compiler):
        return built(native_build.SOURCES, flags)


def built(sources: tuple[Path, ...], flags: tuple[str, ...]) -> Path:
    """A library of these sources with these flags after the usual ones, built if it is not in the cache."""
    usual = native_build.library_path(sources)
    digest = hashlib.sha256(f"{usual.stem} {' '.join(flags)}".encode()).hexdigest()
    target = usual.with_name(f"{digest}.so")
    if not target.exists():
        native_build.build(target, flags, sources)
    return target


def variant_library(name: str) -> ctypes.CDLL:
    """The variant's library, loaded; the test is skipped where it cannot be built."""
    if reason := missing(name):
        pytest.skip(reason)
    return native_build.load_library(variant_path(name))


@contextlib.contextmanager
def _compiler(program: str | None):
    """CXX set to a program for a while."""
    before = os.environ.get("CXX")
    if program is not None:
        os.environ["CXX"] = program
    try:
        yield
    finally:
        if program is not None:
            del os.environ["CXX"]
            if before is not None:
                os.environ["CXX"] = before
