"""What law 11 changes around an engine: a list that is easy to add to.

Each is one of four: a process started with other variables; something done to the process while an engine
starts and while it works; a file beside the weights; another configuration. `Expect` says what must hold
beside the law itself.
"""

import ctypes
import decimal
import functools
import gc
import json
import locale
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from samewise.execute import filters


class Expect(Enum):
    """What must hold beside "equal ids, equal bits"."""

    SAME_ID = "the id stays"
    OTHER_ID = "the id changes"
    LAW = "nothing more"  # the id may change


@dataclass(frozen=True)
class Variables:
    """A process that is started with these environment variables."""

    name: str
    variables: dict[str, str]
    native: Expect = Expect.SAME_ID  # of the contract that names no machine
    machine: Expect = Expect.LAW  # of contracts that name it
    core: bool = False  # run by `make test`

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Action:
    """Something done in the process around calls of an engine; undone at the end of the context."""

    name: str
    make: Callable[[], AbstractContextManager[Any]]
    start: Expect = Expect.SAME_ID  # of an engine that starts meanwhile, for contracts that name the machine

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Setting:
    """Another configuration."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    native: Expect = Expect.SAME_ID
    machine: Expect = Expect.SAME_ID

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class File:
    """A file that is put beside the weights before an engine starts."""

    name: str
    path: str
    content: str
    expected: Expect = Expect.SAME_ID

    def __str__(self) -> str:
        return self.name


# -- before start ------------------------------------------------------------------------------------

TWO = {"OMP_NUM_THREADS": "2"}
VARIABLES = [
    Variables("two threads, again", TWO, machine=Expect.SAME_ID),
    Variables("two threads, of which OpenMP gives one", TWO | {"OMP_THREAD_LIMIT": "1"}, core=True),
    Variables("two threads, and no parallel regions", TWO | {"OMP_MAX_ACTIVE_LEVELS": "0"}),
    Variables("two threads, a limit far above", TWO | {"OMP_THREAD_LIMIT": "64"}),
    Variables("one thread", {"OMP_NUM_THREADS": "1"}),
    Variables("four threads", {"OMP_NUM_THREADS": "4"}),
    Variables("a number of threads that may vary", TWO | {"OMP_DYNAMIC": "TRUE", "MKL_DYNAMIC": "TRUE"}),
    Variables("MKL on one thread", TWO | {"MKL_NUM_THREADS": "1"}),
    Variables("MKL's other code path", TWO | {"MKL_CBWR": "COMPATIBLE"}),
    Variables("torch without vectors", TWO | {"ATEN_CPU_CAPABILITY": "default"}),
    Variables("torch with AVX2", TWO | {"ATEN_CPU_CAPABILITY": "avx2"}),
    Variables("oneDNN with AVX2", TWO | {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Variables("oneDNN in bfloat16", TWO | {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}),
    Variables(
        "what no contract names",
        TWO
        | {
            "LC_ALL": "C.UTF-8",
            "TZ": "Asia/Tokyo",
            "PYTHONHASHSEED": "7",
            "LD_BIND_NOW": "1",
            "MALLOC_PERTURB_": "165",  # memory that is not written yet holds other bytes
            "MALLOC_ARENA_MAX": "1",
            "OMP_PROC_BIND": "FALSE",
            "OMP_STACKSIZE": "4M",
            "OMP_DISPLAY_ENV": "FALSE",
            "MKL_VERBOSE": "0",
        },
        machine=Expect.SAME_ID,
    ),
    Variables(
        "many at once",
        {
            "OMP_NUM_THREADS": "3",
            "MKL_CBWR": "COMPATIBLE",
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OMP_THREAD_LIMIT": "2",
            "MALLOC_PERTURB_": "90",
            "PYTHONHASHSEED": "11",
        },
    ),
]

# -- while an engine starts, and while it works ------------------------------------------------------


@contextmanager
def setting(write: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    """Write a value, and the one before at the end."""
    write(value)
    try:
        yield
    finally:
        write(before)


def threads(number: int) -> Callable[[], AbstractContextManager[None]]:
    return lambda: setting(torch.set_num_threads, number, torch.get_num_threads())


@contextmanager
def one_core() -> Iterator[None]:
    """The process may use one of its cores only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@functools.cache
def made_locales() -> tempfile.TemporaryDirectory[str]:
    """A folder of locales with a German one, xx_XX, if the tool and the sources are installed."""
    folder = tempfile.TemporaryDirectory()
    if shutil.which("localedef"):
        command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(Path(folder.name) / "xx_XX")]
        subprocess.run(command, capture_output=True, check=False)
    return folder


@contextmanager
def another_locale() -> Iterator[None]:
    """A locale with a decimal comma and other names of days, where the machine has one or can make one.

    Elsewhere nothing is disturbed.
    """
    before, path = locale.setlocale(locale.LC_ALL), os.environ.get("LOCPATH")
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "xx_XX"):
        if name == "xx_XX":
            os.environ["LOCPATH"] = made_locales().name  # the C library reads it in setlocale
        with suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            break
    try:
        yield
    finally:
        if path is None:
            os.environ.pop("LOCPATH", None)
        else:
            os.environ["LOCPATH"] = path
        locale.setlocale(locale.LC_ALL, before)


@contextmanager
def another_decimal_context() -> Iterator[None]:
    """Of one digit. Results that were remembered under another context are forgotten, before and after."""
    with decimal.localcontext() as context:
        context.prec = 1
        context.rounding = decimal.ROUND_UP
        forget_results(filters)
        yield
    forget_results(filters)


def forget_results(module: ModuleType) -> None:
    """Empty the caches of a module's functions."""
    for function in vars(module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextmanager
def hook_on_all_modules() -> Iterator[None]:
    """Embeddings of the whole process give other values."""
    handle = register_module_forward_hook(
        lambda module, _, output: output * 1.5 if isinstance(module, nn.Embedding) else None
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rounding_up() -> Iterator[None]:
    """C's FE_UPWARD on x86-64. Elsewhere the number means another mode, or none."""
    with setting(ctypes.CDLL(None).fesetround, 0x800, 0):
        yield


@contextmanager
def errors_from_numpy() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


@contextmanager
def errors_from_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def seeds() -> Iterator[None]:
    """Generators whose state no answer may depend on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)  # noqa: NPY002 - the global state is the point
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_precision(value: str) -> None:
    torch.backends.fp32_precision = value


ACTIONS = [
    Action("one thread", threads(1), start=Expect.LAW),
    Action("three threads", threads(3), start=Expect.LAW),
    Action("one core", one_core),
    Action("float64 by default", lambda: setting(torch.set_default_dtype, torch.float64, torch.float32)),
    Action("bfloat16 by default", lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32)),
    Action("the meta device by default", lambda: setting(torch.set_default_device, "meta", None)),
    Action("within torch.device('meta')", lambda: torch.device("meta")),
    Action("subnormal numbers flushed", lambda: setting(torch.set_flush_denormal, True, False)),
    Action("another rounding mode", rounding_up),
    Action("autocast to bfloat16", lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    Action("products of medium precision", lambda: setting(
        torch.set_float32_matmul_precision, "medium", "highest"
    )),
    Action("products in tf32", lambda: setting(set_precision, "tf32", "none")),
    Action("deterministic algorithms", lambda: setting(torch.use_deterministic_algorithms, True, False)),
    Action("without oneDNN", lambda: setting(torch._C._set_mkldnn_enabled, False, True)),
    Action("without flash attention", lambda: setting(torch.backends.cuda.enable_flash_sdp, False, True)),
    Action("without the plain attention", lambda: setting(torch.backends.cuda.enable_math_sdp, False, True)),
    Action("other seeds", seeds),
    Action("inference mode", torch.inference_mode),
    Action("without gradients", torch.no_grad),
    Action("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True)),
    Action("a counter of operations", lambda: FlopCounterMode(display=False)),
    Action("another locale", another_locale),
    Action("another decimal context", another_decimal_context),
    Action("hooks on all modules", hook_on_all_modules),
    Action("errors from numpy", errors_from_numpy),
    Action("errors from warnings", errors_from_warnings),
    Action("no garbage collection", no_collection),
    Action("a shorter switch interval", lambda: setting(
        sys.setswitchinterval, 1e-5, sys.getswitchinterval()
    )),
]  # fmt: skip

# -- files beside the weights --------------------------------------------------------------------------

ENDS = json.dumps({"eos_token_id": [*range(1000, 60_000)]})
TEMPLATE = "tools {{ messages[0]['content'] }}"
FILES = [
    File("a chat template", "chat_template.jinja", TEMPLATE, Expect.OTHER_ID),
    File("a template for tools", "additional_chat_templates/tool_use.jinja", TEMPLATE, Expect.OTHER_ID),
    File(
        "another one for tools", "additional_chat_templates/tool_use.jinja", TEMPLATE + "!", Expect.OTHER_ID
    ),
    File("tokens that end an answer", "generation_config.json", ENDS, Expect.OTHER_ID),
    File("a tokenizer of another library", "tekken.json", "{}", Expect.OTHER_ID),
    File("code that is not trusted", "stray.py", "x = 1"),
    File("notes", "README.md", "x"),
    File("a file of another program", "other/tool_use.jinja", TEMPLATE),
]

# -- configurations ----------------------------------------------------------------------------------

SETTINGS = [
    Setting("a context of 40", {"max_model_len": 40}, Expect.OTHER_ID, Expect.OTHER_ID),
    Setting("a context of 300", {"max_model_len": 300}, Expect.OTHER_ID, Expect.OTHER_ID),
    Setting("float16", {"dtype": "float16"}, Expect.OTHER_ID, Expect.OTHER_ID),
    Setting("a date that no template asks for", {"date": "2024-07-26"}),
    Setting("torch's attention", {"attention": "torch"}, Expect.OTHER_ID, Expect.LAW),
    Setting("16 rows", {"frame_rows": 16}, Expect.SAME_ID, Expect.LAW),
    Setting("32 rows", {"frame_rows": 32}, Expect.SAME_ID, Expect.OTHER_ID),
    Setting("n-grams", {"proposer": "ngram"}),
    Setting("skipped layers", {"proposer": "skip"}),
    Setting("few sequences", {"max_num_seqs": 2}),
    Setting("little memory", {"kv_memory": 2**20}),
    Setting("no prefix cache", {"enable_prefix_caching": False}),
]

__all__ = [
    "ACTIONS",
    "FILES",
    "SETTINGS",
    "TWO",
    "VARIABLES",
    "Action",
    "Expect",
    "File",
    "Setting",
    "Variables",
]
