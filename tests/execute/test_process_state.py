"""Switches of the process: pinned while an engine works, and the caller's values afterwards."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from samewise.execute.process_state import ProcessState, flushes_denormals

CPU = torch.device("cpu")
ROUND_DOWN = 0x400  # C's FE_DOWNWARD on x86-64; AArch64 has another number


@contextmanager
def setting(write: Callable[[object], object], value: object, before: object) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


def set_mkldnn_precision(value: object) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


def set_any_precision(value: object) -> None:
    torch.backends.fp32_precision = value


@contextmanager
def hook_on_all() -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, args, output: output + 1)
    try:
        yield
    finally:
        handle.remove()


DISTURBANCES = {
    "hooks on all modules": hook_on_all,
    "threads": lambda: setting(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "flush denormal": lambda: setting(torch.set_flush_denormal, True, False),
    "autocast on cpu": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "float32 matmul precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "float32 precision of mkldnn matmul": lambda: setting(set_mkldnn_precision, "bf16", "none"),
    "float32 precision of generic all": lambda: setting(set_any_precision, "tf32", "none"),
    "mkldnn_enabled": lambda: setting(torch._C._set_mkldnn_enabled, False, True),
    "flash_sdp_enabled": lambda: setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "torch function modes": lambda: torch.device("meta"),
    "torch dispatch modes": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_switch_is_pinned_and_the_callers_value_comes_back(name: str) -> None:
    state = ProcessState(CPU)
    assert state.disturbed() == []
    with DISTURBANCES[name]():
        disturbed = state.disturbed()
        assert name in disturbed
        with state.pinned():
            assert state.disturbed() == []
        assert state.disturbed() == disturbed
    assert state.disturbed() == []


@pytest.mark.parametrize("name", DISTURBANCES)
def test_the_callers_value_comes_back_after_an_exception(name: str) -> None:
    state = ProcessState(CPU)
    with DISTURBANCES[name]():
        disturbed = state.disturbed()
        with pytest.raises(KeyboardInterrupt), state.pinned():
            raise KeyboardInterrupt
        assert state.disturbed() == disturbed


def test_all_disturbances_at_once_are_pinned() -> None:
    state = ProcessState(CPU)
    with ExitStack() as stack:
        for make in DISTURBANCES.values():
            stack.enter_context(make())
        with state.pinned():
            assert state.disturbed() == []
            assert torch.ones(1).dtype == torch.float32
            assert torch.ones(1).device == CPU
    assert state.disturbed() == []


def test_a_callers_function_mode_sees_no_operator_of_the_engine() -> None:
    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        with ProcessState(CPU).pinned():
            torch.ones(1) + 1
        assert seen == []
        torch.ones(1) + 1
        assert seen


def test_hooks_on_all_modules_are_suspended_and_stay_removable() -> None:
    state, identity, x = ProcessState(CPU), nn.Identity(), torch.zeros(1)
    handles = [
        register_module_forward_hook(lambda module, args, output: output + 1),
        register_module_forward_pre_hook(lambda module, args: (args[0] + 2,)),
        register_module_module_registration_hook(lambda module, name, child: None),
    ]
    try:
        assert identity(x) == 3
        with state.pinned():
            assert identity(x) == 0
        assert identity(x) == 3
    finally:
        for handle in handles:
            handle.remove()
    assert identity(x) == 0
    assert state.disturbed() == []


def test_flushing_of_subnormal_numbers_is_read_from_the_thread() -> None:
    assert not flushes_denormals()
    with setting(torch.set_flush_denormal, True, False):
        assert flushes_denormals()


def test_another_rounding_mode_is_pinned() -> None:
    libc = ctypes.CDLL(None)
    state = ProcessState(CPU)
    if libc.fesetround(ROUND_DOWN) != 0:
        pytest.skip("this machine numbers its rounding modes differently")
    try:
        assert state.disturbed() == ["rounding mode"]
        with state.pinned():
            assert state.disturbed() == []
        assert libc.fegetround() == ROUND_DOWN
    finally:
        libc.fesetround(0)


def test_an_undisturbed_process_is_left_as_it_is() -> None:
    state = ProcessState(CPU)
    with state.pinned():  # the first time the thread's pool is looked at
        pass
    assert state.pinned() is state.pinned()  # nothing to set, nothing to put back
