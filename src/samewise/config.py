"""What a user decides: read once, validated once, frozen. Measurements are not configuration.

Host only.
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from samewise.errors import BadParameter

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION = ("auto", "native", "torch", "triton")
LINEAR = ("auto", "native", "torch")
PROPOSERS = ("auto", "none", "ngram", "decode", "model", "skip")
DRAFT_WEIGHTS = ("auto", "same", "int8", "int4", "fp8")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class EngineSettings(TypedDict, total=False):
    """The keywords of `LLM` and `AsyncLLM`: EngineConfig's, but for the model. See there for each."""

    revision: str | None
    trust_remote_code: bool
    dtype: str
    device: str
    attention: str
    linear: str
    compile: bool | None
    frame_rows: int | None
    frame_sizes: Sequence[int] | None
    proposer: str
    draft_model: str | None
    draft_tokens: int
    draft_weights: str
    verify_deadline: int
    search_every: int
    search_share: float
    search_rounds: int
    search_window: int
    workload: str
    explain: bool
    max_num_seqs: int
    max_queued: int | None
    max_model_len: int | None
    kv_memory: int | float | str | None
    enable_prefix_caching: bool
    seed: int
    date: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. `None` means: decided at load, from the model and machine.

    model: `smollm2` (built in), a folder of safetensors, a hub id (with `revision`) or a GGUF file.
    dtype: `auto` is the checkpoint's on CUDA and float32 on CPU.
    attention: which kernel; `auto` is `triton` on CUDA, and on CPU `native` where there is a compiler.
    linear: which linears; `auto` is torch's own on CUDA, and on CPU `native` where there is a compiler.
    compile: compile each layer; by default on CUDA only.
    frame_rows: the canonical rows of a frame, T; 128 on CUDA, on CPU 64 (16 with torch's own linears).
    frame_sizes: the rows a frame may have, all with the bits of T; by default from 1 to 8 T on CUDA.
        The output does not depend on it; each size is compiled and proved at start.
    proposer: who guesses: `auto`, `none`, `ngram`, `decode`, `model`, `skip`, or several in turn
        (`ngram+decode`).
        The output does not depend on it.
    draft_model: what `model` guesses with; named like `model`, with the same vocabulary.
    draft_tokens: how many guesses at most before they are replayed.
    draft_weights: what `decode` guesses with: the `same` weights, `int8` or `int4` (CPU), `fp8` (CUDA);
        `auto` is int8 on a CPU where that is less to read, else the same.
    verify_deadline: steps a finished draft may wait for others to share its frame.
    search_every: `skip` scores a layer set every so many tokens, while it is looking for one,
    search_share: as long as that takes no more than this share of the time,
    search_rounds: for at most so many scores,
    search_window: over so many of the last tokens.
    workload: a name for what is asked here; layer sets found for it are kept under it.
    explain: say why `auto` decides as it does, on the log `samewise.auto`, or on stderr where nobody logs.
    max_num_seqs, max_queued: how many requests run together, and how many may wait.
    max_model_len: longest context; by default what the model was made for.
    kv_memory: bytes (`2**30`, `"1GiB"`) or a share of what is free (`0.5`, `"50%"`).
    seed: seeds are derived from it and the prompt where a request gives none.
    date: what a chat template that asks for the date is told, as YYYY-MM-DD.
    """

    model: str = "smollm2"
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    linear: str = "auto"
    compile: bool | None = None
    frame_rows: int | None = None
    frame_sizes: Sequence[int] | None = None
    proposer: str = "auto"
    draft_model: str | None = None
    draft_tokens: int = 16
    draft_weights: str = "auto"
    verify_deadline: int = 4
    search_every: int = 16
    search_share: float = 0.02
    search_rounds: int = 64
    search_window: int = 64
    workload: str = ""
    explain: bool = False
    max_num_seqs: int = 128
    max_queued: int | None = None
    max_model_len: int | None = None
    kv_memory: int | float | str | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    date: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("attention", self.attention, ATTENTION)
        _one_of("linear", self.linear, LINEAR)
        self._check_proposer()
        _whole("max_num_seqs", self.max_num_seqs, 1, 65536)
        if self.frame_rows is not None:
            _whole("frame_rows", self.frame_rows, 1, 4096)
        if self.frame_sizes is not None:
            if not isinstance(self.frame_sizes, list | tuple):
                raise BadParameter(f"frame_sizes={self.frame_sizes!r}: give a list of numbers of rows")
            if not self.frame_sizes:
                raise BadParameter("frame_sizes=[]: give at least one number of rows, or leave it out")
            if not all(type(size) is int and 1 <= size <= 65536 for size in self.frame_sizes):
                raise BadParameter(
                    f"frame_sizes={self.frame_sizes!r}: give each as a whole number from 1 to 65536"
                )
        if self.max_queued is not None:
            _whole("max_queued", self.max_queued, 1, 10**9)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2, 2**26)
        _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if not isinstance(self.model, str) or not self.model:
            raise BadParameter(f"model={self.model!r}: give a name, a folder, a hub id or a GGUF file")
        _flag("trust_remote_code", self.trust_remote_code)
        _flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.compile is not None:
            _flag("compile", self.compile)
        _day(self.date)
        memory(self.kv_memory)

    def _check_proposer(self) -> None:
        for name in self.proposers:
            _one_of("proposer", name, PROPOSERS)
        if len(self.proposers) > 1 and {"auto", "none"} & set(self.proposers):
            raise BadParameter(f"proposer={self.proposer!r}: auto and none stand alone")
        if "model" in self.proposers and not self.draft_model:
            raise BadParameter("proposer='model' needs draft_model: a smaller model of the same vocabulary")
        if self.draft_model and not {"model", "auto"} & set(self.proposers):
            raise BadParameter(
                f"draft_model={self.draft_model!r} is for proposer='model' or 'auto', not {self.proposer!r}"
            )
        _one_of("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        if self.draft_weights not in ("auto", "same") and not {"decode", "auto"} & set(self.proposers):
            raise BadParameter(
                f"draft_weights={self.draft_weights!r} is for proposer='decode' or 'auto', "
                f"not {self.proposer!r}"
            )
        _whole("draft_tokens", self.draft_tokens, 1, 4096)
        _whole("verify_deadline", self.verify_deadline, 0, 10**6)
        _flag("explain", self.explain)
        _whole("search_every", self.search_every, 1, 10**9)
        _whole("search_rounds", self.search_rounds, 1, 10**6)
        _whole("search_window", self.search_window, 32, 4096)
        share = self.search_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise BadParameter(f"search_share={share!r}: give a share of the time, above 0 and at most 1")
        if not isinstance(self.workload, str):
            raise BadParameter(f"workload={self.workload!r}: give a short text")

    @property
    def proposers(self) -> list[str]:
        """The names in `proposer`, in order."""
        return str(self.proposer).split("+")

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused with the nearest known."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise BadParameter(f"unknown engine parameter {name!r}{hint}")
        return cls(**settings)


def memory(value: int | float | str | None) -> int | float | None:
    """Bytes (int), a share of what is free (float) or None, from `2**30`, `0.5`, `"2GiB"`, `"50%"`."""
    if value is None:
        return None
    refusal = BadParameter(
        f'kv_memory={value!r}: give bytes (2**30 or "1GiB") or a share of what is free (0.5 or "50%")'
    )
    found = value
    if isinstance(value, str):
        text = value.strip().upper().replace(" ", "")
        unit = next((u for u in sorted(UNITS, key=len, reverse=True) if text.endswith(u)), None)
        try:
            if text.endswith("%"):
                found = float(text[:-1]) / 100
            elif unit:
                found = int(float(text.removesuffix(unit)) * UNITS[unit])
            else:
                found = float(text) if "." in text else int(text)
        except (ValueError, OverflowError):
            raise refusal from None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise refusal
    if not found > 0 or (isinstance(found, float) and found > 1):
        raise refusal
    return found


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadParameter(f"{name}={value!r}: give True or False")


def _day(date: str | None) -> None:
    try:
        if date is not None:
            dt.datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise BadParameter(f"date={date!r}: give it as YYYY-MM-DD") from None


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadParameter(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadParameter(f"{name}={value!r}: give a whole number from {low} to {high}")


__all__ = ["PROPOSERS", "EngineConfig", "EngineSettings", "memory"]
