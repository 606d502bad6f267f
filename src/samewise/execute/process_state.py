"""Switches of the process and the thread that could change a bit, pinned while an engine works.

torch keeps its default dtype, its numbers of threads, autocast, hooks on all modules and more for the whole
process or thread, and a caller may change them between two calls. `ProcessState.pinned` gives each
the value it had when the contract was made, and puts the caller's value back afterwards.
"""

# ruff: noqa: SLF001 - torch has no public name for most ways to read its switches
from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _disable_current_modes

from samewise.execute.thread_pool import repair_pool

IEEE = ("none", "ieee")
"""Values of torch's switches for the precision of float32 products that mean float32 as it is."""


class Switch(NamedTuple):
    """One switch: how to read and to write it, and the values that give the contract's bits."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    good: tuple[Any, ...]  # the first is written where the switch has none of them
    cuda: bool = False  # whether only work on CUDA depends on it


class ProcessState:
    """The value of every switch under which one engine works. Made when the engine is assembled.

    All have fixed values, except the number of threads: that is the process's own at the time. The only state
    is which threads' pools were looked at.
    """

    def __init__(self, device: torch.device) -> None:
        switches = _switches(torch.get_num_threads())
        self._switches = switches if device.type == "cuda" else [s for s in switches if not s.cuda]
        self._has_pool = device.type == "cpu"
        self._thread = threading.local()  # .ready: whether the calling thread's pool was looked at

    def disturbed(self) -> list[str]:
        """The names of what has another value now."""
        names = [switch.name for switch in self._switches if not _is_good(switch)]
        names += ["torch function modes"] if torch._C._len_torch_function_stack() else []
        names += ["torch dispatch modes"] if torch._C._len_torch_dispatch_stack() else []
        return names

    def pinned(self) -> AbstractContextManager[None]:
        """A context in which every switch has its value; the caller's values come back at its end.

        Takes microseconds where nothing has to be changed. In a thread's first call its pool is looked at.
        """
        if not getattr(self._thread, "ready", False):
            return self._changed()
        try:
            for switch in self._switches:
                if switch.read() not in switch.good:
                    return self._changed()
        except RuntimeError:  # a value that torch cannot state: see `_is_good`
            return self._changed()
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return self._changed()
        return UNDISTURBED

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with _without_function_modes(), _without_dispatch_modes():
            before: list[tuple[Switch, Any]] = []
            try:
                # In order: a general switch shows in the narrower ones after it.
                for switch in self._switches:
                    if not _is_good(switch):
                        before.append((switch, switch.read()))
                        switch.write(switch.good[0])
                self._prepare_thread()
                yield
            finally:
                for switch, value in reversed(before):
                    switch.write(value)

    def _prepare_thread(self) -> None:
        if self._has_pool and not getattr(self._thread, "ready", False):
            repair_pool()
        self._thread.ready = True


UNDISTURBED: AbstractContextManager[None] = nullcontext()


def _is_good(switch: Switch) -> bool:
    try:
        return switch.read() in switch.good
    except RuntimeError:  # torch refuses to sum up narrower switches that differ; those follow in the list
        return True


def _switches(num_threads: int) -> list[Switch]:
    """In the order in which they are set: general ones before those that may inherit from them."""
    c: Any = torch._C
    switches = [
        Switch("rounding mode", _rounding_mode, _set_rounding_mode, (TO_NEAREST,)),
        Switch("flush denormal", flushes_denormals, torch.set_flush_denormal, (False,)),
        Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype, (torch.float32,)),
        Switch("threads", torch.get_num_threads, torch.set_num_threads, (num_threads,)),
        Switch("hooks on all modules", _hooks_on_all, _set_hooks_on_all, (NO_HOOKS,)),
        _autocast("cpu"),
        _autocast("cuda")._replace(cuda=True),
        Switch("deterministic algorithms", c._get_deterministic_algorithms, _set_deterministic, (False,)),
        Switch(
            "float32 matmul precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            ("highest",),
        ),
    ]
    if hasattr(c, "_get_fp32_precision_getter"):
        switches += [_fp32_precision(backend, operators) for backend, operators in FP32_PRECISIONS]
    switches += [_flag(name, value) for name, value in FLAGS if hasattr(c, f"_get_{name}")]
    if hasattr(c, "_get_blas_preferred_backend"):
        read, write = c._get_blas_preferred_backend, c._set_blas_preferred_backend
        switches.append(Switch("preferred BLAS", read, write, (c._BlasBackend.Cublas,), cuda=True))
    return switches


FP32_PRECISIONS = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("cuda", "all"),
    ("cuda", "matmul"),
)
"""(backend, operators) of the switches that let float32 products be computed in fewer bits."""

FLAGS: tuple[tuple[str, Any], ...] = (
    ("mkldnn_enabled", True),
    ("flash_sdp_enabled", True),  # the next three choose how scaled_dot_product_attention is computed
    ("math_sdp_enabled", True),
    ("math_sdp_allow_fp16_bf16_reduction", False),
    ("cpu_allow_fp16_reduced_precision_reduction", False),
    ("cublas_allow_fp16_accumulation", False),
    ("cublas_allow_bf16_reduced_precision_reduction", (False, True)),  # (allowed, split K allowed)
    ("cublas_allow_fp16_reduced_precision_reduction", (False, True)),
)
"""Names of torch's flags (its functions _get_name and _set_name), and their values."""

SETTERS = {
    "flash_sdp_enabled": "_set_sdp_use_flash",
    "math_sdp_enabled": "_set_sdp_use_math",
    "math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
}
"""Flags whose setter has another name."""


def _flag(name: str, value: Any) -> Switch:
    read = getattr(torch._C, f"_get_{name}")
    write = getattr(torch._C, SETTERS.get(name, f"_set_{name}"))
    cuda = name.startswith("cublas")
    if isinstance(value, tuple) and not isinstance(read(), tuple):  # an older torch: one value
        return Switch(name, read, write, (value[0],), cuda)
    if isinstance(value, tuple):
        return Switch(name, read, lambda values: write(*values), (value,), cuda)
    return Switch(name, read, write, (value,), cuda)


def _autocast(device: str) -> Switch:
    return Switch(
        f"autocast on {device}",
        lambda: torch.is_autocast_enabled(device),
        lambda value: torch.set_autocast_enabled(device, value),
        (False,),
    )


def _fp32_precision(backend: str, operators: str) -> Switch:
    c: Any = torch._C
    read, write = c._get_fp32_precision_getter, c._set_fp32_precision_setter
    return Switch(
        f"float32 precision of {backend} {operators}",
        lambda: read(backend, operators),
        lambda value: write(backend, operators, value),
        IEEE,
        cuda=backend == "cuda",
    )


NO_HOOKS = ()
HOOKS_ON_ALL: tuple[dict[Any, Any], ...] = tuple(
    value
    for name, value in vars(torch_modules).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
"""torch's dicts of hooks that run in every module of the process, or where one gets a parameter or child."""


def _hooks_on_all() -> tuple[dict[Any, Any], ...]:
    """The content of each dict; NO_HOOKS where all are empty."""
    return tuple(map(dict, HOOKS_ON_ALL)) if any(HOOKS_ON_ALL) else NO_HOOKS


def _set_hooks_on_all(contents: tuple[dict[Any, Any], ...]) -> None:
    for hooks in HOOKS_ON_ALL:
        hooks.clear()
    for hooks, content in zip(HOOKS_ON_ALL, contents, strict=False):  # contents may be NO_HOOKS
        hooks.update(content)


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


# ── the thread's floating-point registers ────────────────────────────────────────────────────────────

TO_NEAREST = 0  # C's FE_TONEAREST on x86-64 and AArch64
_SMALLEST, _HALF, _ONE = 2.0**-1074, 0.5, 1.0
_SMALLEST_NORMAL = 2.0**-1022
_STEP = math.ulp(1.0)
_BELOW_HALF, _ABOVE_HALF = 0.25 * _STEP, 0.75 * _STEP


def flushes_denormals() -> bool:
    """Whether subnormal numbers are taken for zero by this thread, as inputs or as results."""
    return _SMALLEST * _ONE == 0.0 or _SMALLEST_NORMAL * _HALF == 0.0


def _rounding_mode() -> int:
    """0 where sums are rounded to nearest; otherwise C's number of the mode."""
    if _ONE + _BELOW_HALF == 1.0 and _ONE + _ABOVE_HALF > 1.0:
        return TO_NEAREST
    return ctypes.CDLL(None).fegetround()  # type: ignore[no-any-return]


def _set_rounding_mode(mode: int) -> None:
    ctypes.CDLL(None).fesetround(mode)


# ── modes that torch runs around every operator ──────────────────────────────────────────────────────


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Without torch function modes: a default device, `with torch.device(...)`, a caller's own."""
    c: Any = torch._C
    modes = [c._pop_torch_function_stack() for _ in range(c._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            c._push_on_torch_function_stack(mode)


def _without_dispatch_modes() -> AbstractContextManager[Any]:
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


__all__ = ["ProcessState", "Switch", "flushes_denormals"]
