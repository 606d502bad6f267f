"""Engine settings, each declared once: a field of EngineConfig with its values, commands and meaning.

From the declaration come the validation, the keywords of LLM and AsyncLLM (`settings_signature`), the options
of the command line (`samewise.cli.options`) and docs/settings.md (`settings_page`).

Host only.
"""

from __future__ import annotations

import datetime as dt
import difflib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from samewise.errors import BadParameter
from samewise.values import FLAG, Values, integer, one_of, string

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_KERNELS = ("auto", "native", "torch", "triton")
LINEAR = ("auto", "native", "torch", "triton")
PROPOSERS = ("auto", "none", "ngram", "recycle", "decode", "model", "skip")
DRAFT_WEIGHTS = ("auto", "same", "int8", "int4", "fp8")
MEMORY_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

LOADING = ("demo", "generate", "chat", "probe", "batch", "bench", "serve")
"""Commands that load a model from settings. `audit` reads most settings from receipts."""
ANSWERING = ("generate", "chat", "batch", "serve")
"""Commands that answer requests of a user."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting; `flags` are its command-line names if not `--like-its-name`."""

    name: str
    type: Any
    default: Any
    values: Values
    meaning: str
    commands: tuple[str, ...]
    flags: tuple[str, ...]

    def check(self, value: object) -> None:
        """Refuse a value that is not one of `values`. None is allowed where it is the default."""
        self.values.read(self.name, value, optional=self.default is None)

    @property
    def options(self) -> tuple[str, ...]:
        """Its names on the command line."""
        return self.flags or ("--" + self.name.replace("_", "-"),)


def setting(default: Any, values: Values, meaning: str, commands: tuple[str, ...] = (), *flags: str) -> Any:
    """A field of EngineConfig. `default` None means: decided at load, from the model and the machine."""
    return field(default=default, metadata={"declared": (values, meaning, commands, flags)})


def _bytes_or_share(value: object) -> int | float | None:
    """As `parse_memory`; None for a value that is neither."""
    number = _number_with_unit(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if number > 0 and (isinstance(number, int) or number <= 1) else None


def _number_with_unit(text: str) -> int | float | None:
    compact = text.strip().upper().replace(" ", "")
    unit = next((u for u in sorted(MEMORY_UNITS, key=len, reverse=True) if compact.endswith(u)), None)
    try:
        if compact.endswith("%"):
            return float(compact[:-1]) / 100
        if unit:
            return int(float(compact.removesuffix(unit)) * MEMORY_UNITS[unit])
        return float(compact) if "." in compact else int(compact)
    except (ValueError, OverflowError):
        return None


def _is_date(value: object) -> bool:
    try:
        return isinstance(value, str) and dt.datetime.fromisoformat(value) is not None
    except ValueError:
        return False


SEVERAL_SIZES = Values(
    "a list of whole numbers from 1 to 65536, at least one",
    lambda value: (
        isinstance(value, list | tuple)
        and bool(value)
        and all(type(size) is int and 1 <= size <= 65536 for size in value)
    ),
)
SEVERAL_PROPOSERS = Values(
    f"one of {', '.join(PROPOSERS)}, or several in order (ngram+decode)",
    lambda value: all(name in PROPOSERS for name in str(value).split("+")),
    "choose",
)
MEMORY = Values(
    'bytes (2**30 or "1GiB") or a share of what is free (0.5 or "50%")',
    lambda value: _bytes_or_share(value) is not None,
)
DATE = Values("a date as YYYY-MM-DD", _is_date)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from; docs/settings.md is made from these declarations."""

    model: str = setting(
        "smollm2", string("a name, a folder, a hub id or a GGUF file"),
        "Model to run: smollm2 (built in), a folder of safetensors, a hub id or a GGUF file.",
        (*LOADING, "audit"), "--model", "-m",
    )  # fmt: skip
    revision: str | None = setting(
        None, string("a branch, a tag or a commit"), "Branch, tag or commit of a hub id.", LOADING
    )
    trust_remote_code: bool = setting(
        False,
        FLAG,
        "Run the Python code that comes with a model.",
        (*LOADING, "audit"),
        "--trust-remote-code",
    )
    dtype: str = setting(
        "auto", one_of(*DTYPES), "Number format; auto: the checkpoint's on CUDA, float32 on CPU.", LOADING
    )
    device: str = setting(
        "auto", one_of(*DEVICES), "Device to run on; auto: CUDA where there is a device.", (*LOADING, "audit")
    )
    attention: str = setting(
        "auto", one_of(*ATTENTION_KERNELS),
        "Attention kernel; auto: triton on CUDA, on CPU native where there is a C++ compiler.", LOADING,
    )  # fmt: skip
    linear: str = setting(
        "auto", one_of(*LINEAR),
        "Linear layers; auto: triton on CUDA, on CPU native where there is a C++ compiler.", LOADING,
    )  # fmt: skip
    cublas: bool = setting(
        True, FLAG,
        "On CUDA: cuBLAS for products in wide frames, where a trial shows the bits of the triton linears.",
        LOADING, "--cublas/--no-cublas",
    )  # fmt: skip
    compile: bool | None = setting(
        None,
        FLAG,
        "Compile each layer; by default on CUDA, where no fused kernels know it.",
        LOADING,
        "--compile/--no-compile",
    )
    frame_rows: int | None = setting(
        None, integer(1, 4096),
        "Canonical rows of a frame; by default 128 on CUDA, on CPU 64 (16 with torch's linears).", LOADING,
    )  # fmt: skip
    frame_sizes: Sequence[int] | None = setting(
        None, SEVERAL_SIZES,
        "Rows a frame may have, all with the bits of frame_rows; each size is tried at start.",
    )  # fmt: skip
    proposer: str = setting(
        "auto", SEVERAL_PROPOSERS,
        "How drafts are made; the output does not depend on it.", ANSWERING,
    )  # fmt: skip
    draft_model: str | None = setting(
        None, Values("a model's name or path", lambda value: isinstance(value, str | os.PathLike)),
        "Model that drafts for the proposer model; its vocabulary must be the same.", (*ANSWERING, "bench"),
    )  # fmt: skip
    draft_tokens: int = setting(
        16, integer(1, 4096),
        "Most tokens of a draft before it is verified; of a draft tree its levels (32 at most, of 64 nodes).",
        (*ANSWERING, "bench"),
    )  # fmt: skip
    draft_weights: str = setting(
        "auto", one_of(*DRAFT_WEIGHTS),
        "Weights decode drafts with: int8, int4 on CPU, fp8 on CUDA; auto: int8 where smaller, else same.",
        (*ANSWERING, "bench"),
    )  # fmt: skip
    workload: str = setting(
        "", string("a short text", empty=True),
        "Name under which the proposer skip remembers the layer sets it found.", ANSWERING,
    )  # fmt: skip
    explain: bool = setting(
        False,
        FLAG,
        "Log why auto drafts or does not (logger samewise.auto, or stderr).",
        ANSWERING,
        "--explain",
    )
    max_num_seqs: int = setting(
        128, integer(1, 65536), "Most sequences that run together.", ("generate", "batch", "bench", "serve")
    )
    max_queued: int | None = setting(
        None, integer(1, 10**9), "Most requests that wait; more are refused (a server answers 429).",
        ("serve",), "--max-num-queued-reqs",
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, integer(2, 2**26), "Longest context in tokens; by default the model's own.", LOADING
    )
    kv_memory: int | float | str | None = setting(
        None, MEMORY, "Memory of the KV cache: bytes (2GiB) or a share of what is free (50%).",
        (*LOADING, "audit"),
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, FLAG, "Reuse the KV of equal prefixes of earlier prompts and answers.", ANSWERING,
        "--prefix-caching/--no-prefix-caching",
    )  # fmt: skip
    seed: int = setting(
        0, integer(-(2**63), 2**64 - 1),
        "Where a request gives no seed, one is derived from this and the prompt.", ("batch", "serve"),
    )  # fmt: skip
    date: str | None = setting(None, DATE, "Date that chat templates are given, as YYYY-MM-DD.", ANSWERING)

    def __post_init__(self) -> None:
        for declared in SETTINGS.values():
            declared.check(getattr(self, declared.name))
        self._check_proposer()

    def _check_proposer(self) -> None:
        """Refuse settings that exclude each other."""
        names = set(self.proposers)
        if len(self.proposers) > 1 and {"auto", "none"} & names:
            raise BadParameter(
                f"proposer={self.proposer!r}: auto and none cannot be combined with other proposers",
                param="proposer",
            )
        if "model" in names and not self.draft_model:
            raise BadParameter(
                "proposer='model' needs draft_model: a smaller model of the same vocabulary",
                param="draft_model",
            )
        if self.draft_model and not {"model", "auto"} & names:
            raise BadParameter(
                f"draft_model={self.draft_model!r} is for proposer='model' or 'auto', not {self.proposer!r}",
                param="draft_model",
            )
        if self.draft_weights not in ("auto", "same") and not {"decode", "auto"} & names:
            raise BadParameter(
                f"draft_weights={self.draft_weights!r} is for proposer='decode' or 'auto', "
                f"not {self.proposer!r}",
                param="draft_weights",
            )

    @property
    def proposers(self) -> list[str]:
        """The names in `proposer`, in order."""
        return str(self.proposer).split("+")

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused with the nearest known."""
        known = list(SETTINGS)
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise BadParameter(f"unknown engine parameter {name!r}{hint}", param=name)
        return cls(**settings)


def _declared() -> dict[str, Setting]:
    types = get_type_hints(EngineConfig)
    return {
        f.name: Setting(f.name, types[f.name], f.default, *f.metadata["declared"])
        for f in fields(EngineConfig)
    }


SETTINGS: Mapping[str, Setting] = _declared()
"""Every setting by name, in the order of declaration."""


def settings_signature() -> inspect.Signature:
    """Of a constructor that takes the model by position and every other setting by keyword.

    LLM and AsyncLLM carry it as `__signature__`, so that help() and editors list the settings.
    """
    kinds = inspect.Parameter
    return inspect.Signature([
        kinds(
            name, kinds.POSITIONAL_OR_KEYWORD if name == "model" else kinds.KEYWORD_ONLY,
            default=declared.default, annotation=declared.type,
        )
        for name, declared in SETTINGS.items()
    ])  # fmt: skip


def settings_page() -> str:
    """docs/settings.md."""
    rows = [
        "# Engine settings",
        "",
        "Made from the declarations in `samewise/config.py`. Python takes a setting as a keyword of `LLM`,",
        "`AsyncLLM` or `EngineConfig`; the listed commands take it as an option. The default `None` means:",
        "decided when the model is loaded, from the model and the machine.",
        "",
        "| setting | default | values | meaning | option | commands |",
        "|---|---|---|---|---|---|",
    ]
    for declared in SETTINGS.values():
        option = ", ".join(f"`{flag}`" for flag in declared.options) if declared.commands else ""
        commands = ", ".join(declared.commands).replace(", ".join(LOADING), "all that load a model")
        name, default = f"`{declared.name}`", f"`{declared.default!r}`"
        cells = name, default, declared.values.text, declared.meaning, option, commands
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def parse_memory(value: int | float | str | None) -> int | float | None:
    """Bytes (int), a share of what is free (float) or None, from `2**30`, `0.5`, `"2GiB"`, `"50%"`."""
    SETTINGS["kv_memory"].check(value)
    return None if value is None else _bytes_or_share(value)


__all__ = [
    "PROPOSERS",
    "SETTINGS",
    "EngineConfig",
    "Setting",
    "parse_memory",
    "setting",
    "settings_page",
    "settings_signature",
]
