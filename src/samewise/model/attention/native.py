"""The C++ attention kernel: built once by the machine's own compiler, then loaded from the user's cache.

Its bits are IEEE arithmetic in an order fixed per row (see ``native.cpp``), so they depend on neither the
compiler, the instruction set nor the number of threads; the name in the contract is the source's digest.
It runs on the OpenMP threads torch already has: a second pool would spin against the first.

Knows tensors; has never heard of a request or a model.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.model.attention import PAGE, LayerKV, Rows

_SOURCE = Path(__file__).with_name("native.cpp")
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
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_REMEDY = 'Install a C++ compiler (g++ or clang++) or point CXX at one, or choose attention="torch".'


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
    """First 8 hex digits of the source's SHA-256: what names the kernel's bits."""
    return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]


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
        command = [*_compiler(), *_FLAGS, *extra_flags, str(_SOURCE), "-o", unfinished]
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
        raise MachineError(f"The native attention kernel needs a C++ compiler: {looked}. {_REMEDY}")
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise MachineError(_failure(command, str(error))) from error


def _failure(command: list[str], stderr: str) -> str:
    last = "\n".join(stderr.strip().splitlines()[-12:])
    return (
        f"The C++ compiler {command[0]} could not build the native attention kernel.\n"
        f"command: {shlex.join(command)}\n{last}\n{_REMEDY}"
    )


def _cache_dir() -> Path:
    if own := os.environ.get("SAMEWISE_CACHE"):
        return Path(own).expanduser() / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "samewise" / "native"


def _build_digest(compiler: list[str]) -> str:
    """Names all the machine code depends on; the CPU too, for a home folder may move to another machine."""
    version = _run([*compiler, "--version"]).stdout
    parts = [_SOURCE.read_text(), " ".join(_FLAGS), " ".join(compiler), version, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cpu() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    varying = ("processor", "core id", "apicid", "initial apicid", "cpu MHz", "physical id", "bogomips")
    return "\n".join(line for line in first.splitlines() if not line.startswith(varying))


# -- loading -------------------------------------------------------------------------------------------


class _Call(ctypes.Structure):
    """Mirrors ``Call`` in native.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pages", "v_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("lengths", "slots", "page_start", "pages")),
        *((name, ctypes.c_int64) for name in ("rows", "listed_pages", "num_pages")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("window", "dtype", "threads")),
        ("parallel", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


def load(path: Path) -> ctypes._NamedFuncPointer:
    """The entry point of a built library."""
    try:
        entry = ctypes.CDLL(str(path)).samewise_attend
    except OSError as error:
        raise MachineError(f"Cannot load the native attention kernel {path}: {error}. Delete it.") from error
    entry.argtypes = [ctypes.POINTER(_Call)]
    entry.restype = ctypes.c_int
    return entry


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    """The process's one kernel, from the cache or built now; outside the cache if that cannot be written."""
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
def _parallel() -> int | None:
    """Address of GOMP_parallel in torch's runtime (LLVM's and Intel's have it too); None: one thread."""
    path = openmp_path()
    if path is None:
        return None
    function = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


# -- calling -------------------------------------------------------------------------------------------


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def attend(
    entry: ctypes._NamedFuncPointer,
    q: torch.Tensor,  # [R, Hq, D]
    k: torch.Tensor,  # [R, Hkv, D]
    v: torch.Tensor,  # [R, Hkv, D]
    k_cache: torch.Tensor,  # [P, Hkv, D, PAGE]
    v_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    lengths: torch.Tensor,
    slots: torch.Tensor,
    page_start: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:  # [R, Hq, D]
    """One call of the kernel `entry` of a loaded library."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    num_rows, num_heads, head_dim = q.shape
    num_pages, num_kv_heads = k_cache.shape[:2]
    _check(q, k, v, k_cache, v_cache, (lengths, slots, page_start, pages))
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _Call(
        *(x.data_ptr() for x in (q, k, v, k_cache, v_cache, out, lengths, slots, page_start, pages)),
        *(num_rows, pages.shape[0], num_pages, num_heads, num_kv_heads, head_dim),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *(window or 0, _DTYPES[q.dtype], torch.get_num_threads(), _parallel(), scale),
    )
    _raise_if_failed(entry(call))
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    integers: tuple[torch.Tensor, ...],
) -> None:
    """What the kernel takes on trust. Page numbers and slots it checks itself."""
    num_pages, num_kv_heads, head_dim, _ = k_cache.shape
    if (
        k.shape != (q.shape[0], num_kv_heads, head_dim)
        or v.shape != k.shape
        or q.shape[2] != head_dim
        or q.shape[1] % num_kv_heads
        or v_cache.shape != (num_pages, num_kv_heads, PAGE, head_dim)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, k_cache, v_cache))
        raise InvariantBroken(f"attention shapes do not fit together: q, k, v, k pages, v pages = {shapes}")
    if not (q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype and q.dtype in _DTYPES):
        raise InvariantBroken(f"native attention got {q.dtype} queries and {k_cache.dtype} pages")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise InvariantBroken("K and V pages must be contiguous")
    for x in integers:
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise InvariantBroken(f"row tables must be contiguous int32, got {x.dtype}")
    if any(x.shape[0] != q.shape[0] for x in integers[:3]):
        raise InvariantBroken(f"row tables do not have the pass's {q.shape[0]} rows")


def _raise_if_failed(result: int) -> None:
    if result == 1:
        raise MachineError("Out of memory in attention: lower max_model_len or the number of threads.")
    if result == 2:
        raise InvariantBroken("a row's slot lies outside the K and V pages")
    if result == 3:
        raise InvariantBroken("a row's page list leaves the table, or names a page that is not there")
    if result:
        raise InvariantBroken(f"native attention answered {result}")


_library = torch.library.Library("samewise", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor slots,"
    " Tensor page_start, Tensor pages, float scale, int? window) -> Tensor"
)


def register(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make `function` the operator ``torch.ops.samewise.<name>``, which a compiled layer may contain."""
    _library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"samewise::{name}", lambda q, *_: q.new_empty(q.shape), lib=_library)


def _attend_native(*args: Any) -> torch.Tensor:
    return attend(_entry(), *args)


register("attend_native", _attend_native)


class NativeKernel:
    """Canonical attention on the CPU in C++. Making one builds or loads it: MachineError if that fails."""

    def __init__(self) -> None:
        _entry()
        _parallel()

    @property
    def name(self) -> str:
        """Version and source digest: one digest, one set of bits."""
        return f"native-1 ({source_digest()})"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """K pages [P, Hkv, D, PAGE], V pages [P, Hkv, PAGE, D]: 16 keys are the lanes of a vector."""
        return LayerKV(
            torch.empty(num_pages, num_kv_heads, head_dim, PAGE, dtype=dtype, device=device),
            torch.empty(num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device),
        )

    def workspace_len(self, num_rows: int, max_len: int, num_heads: int, head_dim: int) -> int:  # noqa: ARG002
        """None: the kernel keeps its own scratch per thread."""
        return 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write this pass's K and V, then attend."""
        out: torch.Tensor = torch.ops.samewise.attend_native(
            q, k, v, kv.k, kv.v, rows.lengths, rows.slots, rows.page_start, rows.pages, scale, window
        )
        return out


__all__ = [
    "NativeKernel",
    "attend",
    "available",
    "build",
    "find_compiler",
    "library_path",
    "load",
    "openmp_path",
    "register",
    "source_digest",
]
