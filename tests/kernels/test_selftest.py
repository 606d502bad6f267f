"""The self-test of the C++ kernels: one set of stored digests for every build, thread and host setting."""

import ctypes
import ctypes.util
import platform

import pytest
import torch

from native_variants import VARIANTS, needs_compiler, variant_library
from samewise.errors import GuaranteeLost, MachineError
from samewise.kernels.native import build as native_build
from samewise.kernels.native.expected import EXPECTED

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library():
    return native_build.library()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_stored_digests_are_given_on_any_number_of_threads(library, threads):
    assert native_build.selftest(library, threads=threads) == EXPECTED


# -- other builds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("portable, -O1", "no futex") else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_other_builds_give_the_stored_digests(name):
    other = variant_library(name)
    assert native_build.selftest(other) == EXPECTED
    assert native_build.selftest(other, threads=4) == EXPECTED


@pytest.fixture
def forget_library():
    """The library is loaded and compared again, before the test and after it."""
    native_build.library.cache_clear()
    yield
    native_build.library.cache_clear()


@pytest.mark.parametrize("name", ["rotary", "linear int4"])
def test_a_library_of_other_bits_is_refused_and_its_kernel_is_named(monkeypatch, forget_library, name):
    monkeypatch.setitem(EXPECTED, name, EXPECTED[name] ^ 1)
    with pytest.raises(GuaranteeLost, match=rf"other bits.*: {name}\..*CXX.*attention=\"torch\""):
        native_build.library()


def test_a_library_that_lacks_a_kernel_is_refused_and_the_kernel_is_named(monkeypatch, forget_library):
    monkeypatch.setitem(EXPECTED, "another kernel", 7)
    with pytest.raises(GuaranteeLost, match="another kernel"):
        native_build.library()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast"])
def test_relaxed_arithmetic_that_is_not_noticed_by_name_is_noticed_by_its_bits(
    monkeypatch, forget_library, request, tmp_path, flag
):
    """A compiler may also be a wrapper that adds options of its own."""
    request.addfinalizer(
        lambda: torch.set_flush_denormal(False)
    )  # g++ 12 sets it when such a library is loaded
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {native_build.find_compiler()[0]} "$@" {flag} -shared\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    native_build.build(tmp_path / "relaxed.so")
    monkeypatch.setattr(native_build, "library_path", lambda *_: tmp_path / "relaxed.so")
    with pytest.raises(GuaranteeLost, match=r"wrapper.*other bits"):
        native_build.library()


@pytest.mark.parametrize(
    "option",
    [
        "-Ofast",
        "-ffast-math",
        "-funsafe-math-optimizations",
        "-fassociative-math",
        "-freciprocal-math",
        "-ffinite-math-only",
        "-fno-signed-zeros",
        "-ffp-contract=fast",
        "-ffp-model=fast",
        "-mrecip=all",
        "-mdaz-ftz",
    ],
)
def test_options_that_relax_arithmetic_are_refused_by_name(monkeypatch, option):
    monkeypatch.setenv("CXX", f"{native_build.find_compiler()[0]} -DONE {option}")
    with pytest.raises(MachineError, match=f"option {option}, .*take it out"):
        native_build.find_compiler()


def test_cxxflags_of_the_environment_are_not_read(monkeypatch):
    path, flags = native_build.library_path(), native_build.flags()
    for name in ("CXXFLAGS", "CFLAGS", "CPPFLAGS", "LDFLAGS"):
        monkeypatch.setenv(name, "-Ofast -ffast-math")
    assert native_build.library_path() == path
    assert native_build.flags() == flags


# -- settings of the calling thread --------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_of_subnormals_changes_no_digest(library, threads):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert native_build.selftest(library, threads=threads) == EXPECTED
        tiny = torch.tensor(1e-30)
        assert float(tiny * 1e-10) == 0.0  # the setting is the calling thread's again
    finally:
        torch.set_flush_denormal(False)


TO_NEAREST, UPWARD = 0, {"x86_64": 0x800, "aarch64": 0x400000}


@pytest.mark.parametrize("threads", [1, 2])
def test_another_rounding_mode_changes_no_digest(library, threads):
    mode, name = UPWARD.get(platform.machine()), ctypes.util.find_library("m")
    if mode is None or name is None:
        pytest.skip("the number of the rounding mode is not known here")
    libm = ctypes.CDLL(name)
    assert libm.fesetround(mode) == 0
    try:
        digests, after = native_build.selftest(library, threads=threads), libm.fegetround()
    finally:
        libm.fesetround(TO_NEAREST)
    assert digests == EXPECTED
    assert after == mode
