"""Building the C++ kernels: once per sources, CPU and compiler, and what happens where that fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from samewise import user_cache
from samewise.errors import MachineError
from samewise.kernels.attention import native
from samewise.kernels.attention.base import PAGE, Rows
from samewise.kernels.native import build as native_build

needs_compiler = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")


def forget_library():
    native._entry.cache_clear()
    native_build.library.cache_clear()


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """An empty cache folder, and no library loaded yet."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    forget_library()
    yield tmp_path / "cache" / "native"
    forget_library()


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_compiler
def test_the_library_is_built_once_and_loaded_from_the_cache_afterwards(empty_cache, monkeypatch):
    native.NativeKernel()
    name = native_build.library_path().name
    assert sorted(p.name for p in empty_cache.iterdir()) == [name, f"{name}.sha256"]
    built = native_build.library_path().stat().st_mtime_ns
    forget_library()
    monkeypatch.setattr(native_build, "build", lambda *_: pytest.fail("built again"))
    native.NativeKernel()
    assert native_build.library_path().stat().st_mtime_ns == built


@needs_compiler
def test_another_cpu_or_compiler_has_another_library(empty_cache, monkeypatch, tmp_path):
    here = native_build.library_path()
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "_cpu", lambda: "another")
        assert native_build.library_path() != here
    monkeypatch.setenv("CXX", str(executable(tmp_path / "cxx", "#!/bin/sh\necho version 99\n")))
    assert native_build.library_path() != here


@needs_compiler
def test_an_edited_header_beside_a_source_has_another_library(tmp_path):
    sources = tmp_path / "one.cpp", tmp_path / "two.cpp"
    for source in sources:
        source.write_text('#include "part.h"\n')
    header = tmp_path / "part.h"
    paths = []
    for text in ("", "inline int part() { return 1; }\n", "inline int part() { return 2; }\n"):
        header.write_text(text)
        paths.append(native_build.library_path(sources))
    assert len(set(paths)) == 3
    (tmp_path / "notes.txt").write_text("no source of the library")
    assert native_build.library_path(sources) == paths[-1]


@needs_compiler
def test_a_header_is_read_once_for_all_sources_beside_it(monkeypatch):
    read, text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args: read.append(path) or text(path, *args))
    native_build.library_path()
    ours = [path for path in read if path.suffix in {".h", ".cpp"}]
    assert sorted(ours) == sorted({*native_build.HEADERS, *native_build.SOURCES})


@needs_compiler
def test_options_in_cxx_reach_the_compiler_and_have_a_library_of_their_own(monkeypatch):
    program, default = native_build.find_compiler()[0], native_build.library_path()
    monkeypatch.setenv("CXX", f"{program} -DONE -DTWO")
    assert native_build.find_compiler() == [program, "-DONE", "-DTWO"]
    assert native_build.library_path() != default


@needs_compiler
def test_the_portable_build_is_chosen_by_the_environment_and_has_a_library_of_its_own(monkeypatch):
    monkeypatch.setenv("SAMEWISE_PORTABLE", "1")
    portable = native_build.library_path()
    assert "-DSAMEWISE_PORTABLE" in native_build.flags()
    monkeypatch.delenv("SAMEWISE_PORTABLE")
    assert "-DSAMEWISE_PORTABLE" not in native_build.flags()
    assert native_build.library_path() != portable


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert native_build._cache_dir() == Path("/a/native")
    monkeypatch.delenv("SAMEWISE_CACHE")
    assert native_build._cache_dir() == Path("/b/samewise/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native_build._cache_dir() == Path.home() / ".cache/samewise/native"


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_needed(monkeypatch, tmp_path, empty_cache):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "file"))
    kernel = native.NativeKernel()
    q, k, v = torch.randn(3, 20, 2, 8)
    positions = torch.arange(20, dtype=torch.int32)
    pages, none = torch.tensor([1, 2], dtype=torch.int32), torch.empty(0)
    lengths, zeros = positions + 1, torch.zeros_like(positions)
    rows = Rows(lengths, positions + PAGE, zeros, lengths, zeros, pages, none, none)
    kv = kernel.allocate(3, 2, 8, torch.float32, torch.device("cpu"))
    got = kernel(q, k, v, kv, rows, scale=0.125, window=None)
    by_head = (x.transpose(0, 1).double() for x in (q, k, v))
    expected = scaled_dot_product_attention(*by_head, is_causal=True, scale=0.125).transpose(0, 1)
    assert (got - expected).abs().max() < 1e-5


def test_a_missing_compiler_is_an_error_that_names_the_remedy(monkeypatch, empty_cache):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert not native_build.compiler_available()
    with pytest.raises(MachineError, match=r'g\+\+.*attention="torch"'):
        native.NativeKernel()
    monkeypatch.setenv("CXX", "my-cxx")
    with pytest.raises(MachineError, match="my-cxx"):
        native.NativeKernel()


def test_a_failing_compiler_is_quoted_in_the_error(monkeypatch, empty_cache, tmp_path):
    broken = executable(tmp_path / "broken-cxx", "#!/bin/sh\necho internal error >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(MachineError) as caught:
        native.NativeKernel()
    for part in (str(broken), "-ffp-contract=off", "internal error", 'attention="torch"'):
        assert part in str(caught.value)
    assert not list(empty_cache.glob(".building-*"))


# ---- files that are damaged, or that another user could have put there

TINY = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def tiny(empty_cache, tmp_path):
    """A source file that builds in no time, and its library in the cache, not yet loaded."""
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY % 1)
    target = native_build.library_path((source,))
    native_build.build(target, sources=(source,))
    return source, target


@pytest.fixture
def planted(tmp_path):
    """A library with another answer, as another user would build it."""
    source = tmp_path / "planted.cpp"
    source.write_text(TINY % 666)
    native_build.build(tmp_path / "planted" / "lib.so", sources=(source,))
    return tmp_path / "planted" / "lib.so"


def plant(planted, target):
    """Put another library in place of one, with the digest that fits it."""
    shutil.copy(planted, target)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    target.with_name(f"{target.name}.sha256").write_bytes(native_build._digest_line(digest, target))


@needs_compiler
def test_folders_of_the_cache_are_private_and_others_write_access_is_taken(tiny, empty_cache):
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(empty_cache.parent.stat().st_mode) == 0o700
    empty_cache.chmod(0o777)
    assert native_build._cache_dir() == empty_cache
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "no digest", "another's digest"])
def test_a_damaged_library_is_built_again(tiny, damage):
    """A library cut short ends the process with SIGBUS when it is loaded."""
    source, target = tiny
    content, digest = target.read_bytes(), target.with_name(f"{target.name}.sha256")
    changes = {
        "cut": lambda: os.truncate(target, len(content) // 2),
        "empty": lambda: os.truncate(target, 0),
        "changed": lambda: target.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "no digest": digest.unlink,
        "another's digest": lambda: digest.write_text(digest.read_text().replace(target.name, "other.so")),
    }
    changes[damage]()
    assert native_build._library((source,)).answer() == 1
    assert target.read_bytes() == content
    assert target.name in digest.read_text()


@needs_compiler
@pytest.mark.parametrize("mode", [0o722, 0o702, 0o720])
def test_a_library_that_others_may_write_is_not_loaded(tiny, planted, mode):
    source, target = tiny
    plant(planted, target)
    target.chmod(mode)
    assert native_build._library((source,)).answer() == 1
    assert stat.S_IMODE(target.stat().st_mode) & 0o022 == 0


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(tiny, planted, monkeypatch):
    """This process's user counts as another one, so that the test needs no second user."""
    source, target = tiny
    plant(planted, target)
    user = target.stat().st_uid
    monkeypatch.setattr(user_cache, "_is_owned", lambda status: status.st_uid != user)
    assert native_build._load_cached(target) is None
    monkeypatch.undo()
    monkeypatch.setenv("SAMEWISE_CACHE", str(target.parents[1]))
    assert native_build._library((source,)).answer() == 666  # the same file, once it is this user's


@needs_compiler
def test_a_library_behind_a_symbolic_link_is_not_loaded(tiny, planted):
    source, target = tiny
    target.unlink()
    target.symlink_to(planted)
    assert native_build._library((source,)).answer() == 1
    assert not target.is_symlink()


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files to another user")
def test_another_users_folder_is_left_alone_and_libraries_go_beside_it(tiny, planted):
    source, target = tiny
    plant(planted, target)
    for path in (target.parent, *target.parent.iterdir()):
        os.chown(path, 12345, 12345)
    assert native_build._cache_dir() == target.parent.with_name("native-0")
    for _ in range(2):  # built, then loaded
        assert native_build._library((source,)).answer() == 1
    assert (target.parent.with_name("native-0") / target.name).exists()
    os.chown(target.parent.with_name("native-0"), 12345, 12345)
    assert native_build._library((source,)).answer() == 1  # built in a temporary folder


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_concurrent_processes_build_one_library_and_load_no_openmp_of_their_own(tmp_path):
    script = (
        "import torch, pathlib\n"
        "from samewise.kernels.attention import native\n"
        "kernel = native.NativeKernel()\n"
        "paths = pathlib.Path('/proc/self/maps').read_text().split()\n"
        "names = ('libgomp', 'libomp', 'libiomp')\n"
        "print(len({w for w in paths if pathlib.Path(w).name.startswith(names)}))\n"
    )
    env = {**os.environ, "SAMEWISE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0].split() for p in processes] == [["1"]] * 2
    assert sorted(p.suffix for p in (tmp_path / "native").iterdir()) == [".sha256", ".so"]
