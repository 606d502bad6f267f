"""Build the C++ kernels once with the machine's own compiler, then load them from the user's cache.

Each source file states the order of its IEEE operations per row, so the bits depend on neither the compiler,
the instruction set nor the number of threads. Every library is tried when it is loaded: it computes the
digests that are stored in `expected`, or it is refused.

The kernels run on threads of their own (team.cpp), which sleep between passes: as many as torch has.

``CXX`` names the compiler and may carry options, but none that relaxes IEEE arithmetic; torch's own compiler
reads it too, as a program's name only. ``CXXFLAGS`` is not read. ``SAMEWISE_PORTABLE=1`` builds without
vector intrinsics, to the same bits, slower. Each variant has its own file in the cache, and its SHA-256 in a
file beside it. A library runs as the user: one is loaded only if this user or root owns it, no other user can
write it, and it has that SHA-256; otherwise it is built again, in another place if need be.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from samewise import user_cache
from samewise.errors import GuaranteeLost, MachineError
from samewise.kernels.native.expected import EXPECTED

log = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp")
    for name in ("attention", "grid", "layer", "linear", "move", "rotary", "sampling", "selftest", "team")
)
HEADERS = tuple(
    Path(__file__).with_name(f"{name}.h")
    for name in ("attention", "calls", "functions", "lanes", "linear", "panels", "team")
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # the sources write every fused multiply-add themselves
    "-fno-math-errno",
    "-fno-trapping-math",  # lets comparisons be vectorised; changes no value
    "-fPIC",
    "-pthread",
    "-shared",
)
_RELAXED = (
    "-Ofast",
    "-ffast-math",
    "-funsafe-math-optimizations",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
    "-ffp-model=fast",
    "-mrecip",
    "-mdaz-ftz",
)
"""Options under which a compiler may compute something else than the sources say, or the library may switch
the process to flushing subnormal numbers when it is loaded."""
_REMEDY = (
    "Install a C++ compiler (g++ or clang++) or point CXX at one, "
    'or choose attention="torch" and linear="torch".'
)


# -- building ------------------------------------------------------------------------------------------


def flags() -> tuple[str, ...]:
    """The compiler's options in this environment."""
    return (*_FLAGS, "-DSAMEWISE_PORTABLE") if os.environ.get("SAMEWISE_PORTABLE") else _FLAGS


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX`` if set, else the first of c++, g++, clang++; None if absent."""
    cxx = os.environ.get("CXX")
    candidates = [shlex.split(cxx)] if cxx else [["c++"], ["g++"], ["clang++"]]
    for program, *options in candidates:
        if path := shutil.which(program):
            _refuse_relaxed(options)
            return [path, *options]
    return None


def _refuse_relaxed(options: list[str]) -> None:
    relaxed = [option for option in options if option.startswith(_RELAXED)]
    if relaxed:
        raise MachineError(
            f"CXX has the option {relaxed[0]}, which lets the compiler change float results; take it out: "
            "the kernels must give the same bits on every machine"
        )


def compiler_available() -> bool:
    """Whether a compiler is installed; it may still fail."""
    return find_compiler() is not None


def library_path(sources: tuple[Path, ...] = SOURCES) -> Path:
    """The cache's file for these sources, this CPU and this compiler; it need not exist."""
    return _cache_dir() / f"{_build_digest(_compiler(), sources)}.so"


def build(target: Path, extra_flags: tuple[str, ...] = (), sources: tuple[Path, ...] = SOURCES) -> None:
    """Compile to `target`, which is replaced only by a complete library, and write its digest beside it.

    MachineError if the compiler fails, OSError if the folder cannot be written.
    """
    user_cache.make_private(target.parent)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        command = [*_compiler(), *flags(), *extra_flags, *map(str, sources), "-o", temporary]
        result = _run(command)
        if result.returncode != 0:
            raise MachineError(_failure(command, result.stderr))
        digest = hashlib.sha256(Path(temporary).read_bytes()).hexdigest()
        Path(temporary).replace(target)
        user_cache.write_atomically(_digest_path(target), _digest_line(digest, target))
    finally:
        Path(temporary).unlink(missing_ok=True)


def _compiler() -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        cxx = os.environ.get("CXX")
        reason = f"CXX={cxx!r} is not a program" if cxx else "none of c++, g++, clang++ is on the PATH"
        raise MachineError(f"The native kernels need a C++ compiler: {reason}. {_REMEDY}")
    return compiler


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise MachineError(_failure(command, str(error))) from error


def _failure(command: list[str], stderr: str) -> str:
    last_lines = "\n".join(stderr.strip().splitlines()[-12:])
    return (
        f"The C++ compiler {command[0]} could not build the native kernels.\n"
        f"command: {shlex.join(command)}\n{last_lines}\n{_REMEDY}"
    )


def _cache_dir() -> Path:
    return user_cache.folder("native")


def _digest_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _digest_line(digest: str, library: Path) -> bytes:
    """The content of a digest's file, as `sha256sum` writes and checks it."""
    return f"{digest}  {library.name}\n".encode()


def _build_digest(compiler: list[str], sources: tuple[Path, ...]) -> str:
    """SHA-256 of all the machine code depends on, headers beside the sources too.

    Of the CPU as well, as machines may share a home folder.
    """
    version = _run([*compiler, "--version"]).stdout
    folders = dict.fromkeys(source.parent for source in sources)
    beside = [header for folder in folders for header in sorted(folder.glob("*.h"))]
    texts = [path.read_text() for path in dict.fromkeys((*HEADERS, *beside, *sources))]
    parts = [*texts, " ".join(flags()), " ".join(compiler), version, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cpu() -> str:
    """What identifies the CPU's instruction set, without the fields that differ between cores."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    varying = ("processor", "core id", "apicid", "initial apicid", "cpu MHz", "physical id", "bogomips")
    return "\n".join(line for line in first.splitlines() if not line.startswith(varying))


# -- loading -------------------------------------------------------------------------------------------


def load_library(path: Path) -> ctypes.CDLL:
    """Load a built library. MachineError if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(
            f"Cannot load the native kernels from {path}: {error}. Delete the file."
        ) from error


def selftest(library: ctypes.CDLL, threads: int = 1) -> dict[str, int]:
    """The digests that a library's kernels give for fixed inputs, by name. MachineError without memory."""
    count, name, run = (getattr(library, f"samewise_selftest{part}") for part in ("_count", "_name", ""))
    count.restype, name.restype, run.restype = ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
    name.argtypes, run.argtypes = [ctypes.c_int64], [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    digests, digest = dict[str, int](), ctypes.c_uint64()
    for i in range(count()):
        if run(i, threads, ctypes.byref(digest)):
            raise MachineError("Out of memory when the native kernels were tried.")
        digests[name(i).decode()] = digest.value
    return digests


def _refuse_other_bits(library: ctypes.CDLL) -> None:
    digests = selftest(library)
    wrong = [name for name in EXPECTED | digests if EXPECTED.get(name) != digests.get(name)]
    if wrong:
        raise GuaranteeLost(
            f"the native kernels built by {shlex.join(_compiler())} give other bits than on other machines: "
            f"{', '.join(wrong)}. The engine will not start. Try another compiler (CXX), or "
            'attention="torch" and linear="torch", whose contract names this machine'
        )


@functools.cache
def library() -> ctypes.CDLL:
    """The process's one library, whose bits were compared with the stored ones."""
    library = _library(SOURCES)
    _refuse_other_bits(library)
    return library


@functools.cache
def library_of(*sources: Path) -> ctypes.CDLL:
    """The process's one library of other source files, which compute nothing that must be the same bits.

    MachineError where it cannot be built or loaded.
    """
    return _library(sources)


def _library(sources: tuple[Path, ...]) -> ctypes.CDLL:
    """From the cache, or built now (in a temporary folder if the cache fails)."""
    target = library_path(sources)
    if (cached := _load_cached(target)) is not None:
        return cached
    try:
        build(target, sources=sources)
        if (cached := _load_cached(target)) is None:
            raise MachineError(f"{target} cannot be loaded")
    except (OSError, MachineError):
        # A full disk makes the compiler fail too. A failure of the compiler itself repeats and is raised.
        with tempfile.TemporaryDirectory(prefix="samewise-native-") as folder:
            uncached = Path(folder) / target.name
            build(uncached, sources=sources)
            return load_library(uncached)
    return cached


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """The library in the cache; None if it is missing, damaged, or another user could have written it."""
    try:
        handle = user_cache.open_own(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("not loading a library of the cache: %s", error)
        return None
    library = None
    try:
        if _has_its_digest(handle, path):
            library = load_library(_path_of(handle, path))
        else:
            log.info("%s has no SHA-256 beside it, or another one: it is built again", path)
    except (OSError, MachineError) as error:
        log.warning("%s is built again: %s", path, error)
    finally:
        if library is None:
            os.close(handle)  # else it stays open: the loader takes two files of one name for one file
    return library


def _has_its_digest(handle: int, path: Path) -> bool:
    with os.fdopen(handle, "rb", closefd=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        return user_cache.read_own(_digest_path(path)) == _digest_line(digest, path)
    except FileNotFoundError:
        return False


def _path_of(handle: int, path: Path) -> Path:
    """A name of an open file that no other user can give to another file; `path` where there is none."""
    name = Path(f"/proc/self/fd/{handle}")
    return name if name.exists() else path


__all__ = [
    "build",
    "compiler_available",
    "find_compiler",
    "flags",
    "library",
    "library_of",
    "library_path",
    "load_library",
    "selftest",
]
