"""A model's folder: its tokenizer, its generation defaults, its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer

from samewise.errors import BadParameter, SamewiseError, UnsupportedModel
from samewise.model.source import INDEX, SAFETENSORS, Source, refuse_cut_short, weight_files

T = TypeVar("T")


@contextmanager
def unreadable_as_unsupported(source: Source, what: str) -> Iterator[None]:
    """Raise UnsupportedModel in place of what transformers and its libraries raise for a damaged file.

    Which exception that is differs between files, damages and versions: json's, tokenizers' own, others.
    """
    try:
        yield
    except SamewiseError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UnsupportedModel(
            f"the {what} of {source.name!r} in {source.path} cannot be read ({reason}); it may be damaged: "
            "download the model again",
            param="model",
        ) from error


def read_tokenizer(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's tokenizer; None for a folder without one, whose prompts must be token ids."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((source.path / name).exists() for name in names):
        return None
    with unreadable_as_unsupported(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, local_files_only=True
        )


def generation_defaults(source: Source) -> dict[str, Any]:
    """The content of generation_config.json; empty if there is none."""
    path = source.path / "generation_config.json"
    if not path.is_file():
        return {}
    with unreadable_as_unsupported(source, "generation_config.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
    return fields if isinstance(fields, dict) else {}


def eos_ids(generation: Mapping[str, Any], config: Any) -> frozenset[int]:
    """End-of-text ids: the generation config's, one or a list, else the model's own."""
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list | tuple) else [ids])


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder's safetensors files, sharded or not. BadParameter where one cannot be read."""
    if not any(folder.glob("*.safetensors")):
        raise BadParameter(
            f"update_weights: {folder} holds no *.safetensors; give a folder of weights or named tensors",
            param="update",
        )
    if not (folder / SAFETENSORS).exists() and not (folder / INDEX).exists():
        raise BadParameter(
            f"update_weights: {folder} holds neither {SAFETENSORS} nor {INDEX}, which names its shards",
            param="update",
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in _readable(folder / INDEX, lambda: weight_files(folder)):
        tensors |= _readable(path, partial(_tensors_of, path))
    return tensors


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    refuse_cut_short(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _readable(path: Path, read: Callable[[], T]) -> T:
    """What `read` returns, with its failure as a BadParameter that names the file."""
    try:
        return read()
    except (OSError, SafetensorError, UnsupportedModel) as error:
        raise BadParameter(
            f"update_weights: {path} cannot be read ({error}); write the folder again", param="update"
        ) from error


__all__ = ["eos_ids", "generation_defaults", "read_tensors", "read_tokenizer", "unreadable_as_unsupported"]
