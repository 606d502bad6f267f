"""From a configuration to a model in memory, with its tokenizer and the contract facts of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from samewise import machine, user_cache
from samewise.config import EngineConfig
from samewise.errors import BadParameter
from samewise.execute.choices import pick_device, pick_dtype
from samewise.execute.process_state import ProcessState
from samewise.model import folder
from samewise.model.arch import INSPECTION_VERSION, Arch, inspect_model, read_config
from samewise.model.digest import config_digests, weights_digest
from samewise.model.load import load_model
from samewise.model.resolve import resolve

FINGERPRINT_CHUNK = 1 << 26
"""Bytes summed at once, to bound the memory of int64 copies; a weighted sum of them fits an int64."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what its files say about it."""

    model: nn.Module
    arch: Arch
    facts: Mapping[str, str]  # contract facts
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's generation defaults
    eos_ids: frozenset[int] = frozenset()


def load(config: EngineConfig) -> Loaded:
    """Resolve, inspect and load the configured model. Refuses one that cannot keep the promise."""
    machine.pin_environment()
    device = pick_device(config.device)
    with ProcessState(device).pinned():
        return _load(config, device)


def _load(config: EngineConfig, device: torch.device) -> Loaded:
    trusted = config.trust_remote_code
    source = resolve(config.model, revision=config.revision, trust_remote_code=trusted)
    model_config = read_config(source, trust_remote_code=trusted)
    arch = _inspect(model_config, trusted=trusted)
    dtype = pick_dtype(config.dtype, device, arch.checkpoint_dtype)
    model = load_model(source, model_config, dtype=dtype, trust_remote_code=trusted)
    generation = folder.generation_defaults(source)
    facts = {"weights": weights_digest(source)} | config_digests(source)
    return Loaded(
        model,
        arch,
        facts,
        folder.read_tokenizer(source, trust_remote_code=trusted),
        generation,
        folder.eos_ids(generation, model_config),
    )


def _inspect(model_config: Any, *, trusted: bool) -> Arch:
    """The model's architecture, cached by its configuration and the libraries' versions."""
    key = {"config": sha256(model_config.to_json_string(use_diff=False).encode()).hexdigest()}
    key |= {name: version(name) for name in ("torch", "transformers")} | {"inspection": INSPECTION_VERSION}
    if trusted:  # code that came with a model may change under the same configuration
        return inspect_model(model_config, trust_remote_code=True)
    arch = Arch.from_json(user_cache.get("arch", key))
    if arch is None:
        arch = inspect_model(model_config)
        user_cache.put("arch", key, arch.to_json())
    return arch


def fingerprint(model: nn.Module) -> str:
    """A digest of weights in memory, computed on their device: the contract's fact after an update.

    Integer sums of the bytes, weighted by index: exact, so the order of summation cannot show.
    """
    digest = sha256()
    for name, tensor in sorted(model.named_parameters()):
        bits = tensor.detach().contiguous().view(torch.uint8).flatten()
        sums = []
        for chunk in torch.split(bits, FINGERPRINT_CHUNK):
            index = torch.arange(chunk.numel(), device=chunk.device, dtype=torch.int64)
            mixed = (chunk.long() + 1) * ((index * 0x9E3779B1 + 0x7F4A7C15) & 0x3FFFFFFF)
            sums.append(int(mixed.sum()))
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), sums)).encode())
    return "memory:" + digest.hexdigest()


def refuse_other_vocabulary(loaded: Loaded, draft: Loaded, name: str) -> None:
    """Raise BadParameter unless the draft model's token ids mean what the target model's mean."""
    if loaded.arch.vocab != draft.arch.vocab:
        raise BadParameter(
            f"draft_model={name!r} has a vocabulary of {draft.arch.vocab}, the model one of "
            f"{loaded.arch.vocab}; a draft model must have the same",
            param="draft_model",
        )
    if loaded.tokenizer is None or draft.tokenizer is None:
        return
    own, other = loaded.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    wrong = min(
        (token for token, i in own.items() if other.get(token) != i), key=own.__getitem__, default=None
    )
    if wrong is not None or len(own) != len(other):
        detail = f"{wrong!r} is {own.get(wrong)} here and {other.get(wrong)} there" if wrong else "its size"
        raise BadParameter(
            f"draft_model={name!r} has another vocabulary ({detail}); a draft model must have the same",
            param="draft_model",
        )


__all__ = ["FINGERPRINT_CHUNK", "Loaded", "fingerprint", "load", "refuse_other_vocabulary"]
