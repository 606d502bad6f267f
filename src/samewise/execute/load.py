"""From a configuration to a model in memory, with its tokenizer and the contract facts of its files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from samewise.model.digest import config_digests, model_files, refuse_changed, stamps_of, weights_digest
from samewise.model.load import count_writes, load_model, num_updates, tracked_tensors
from samewise.model.resolve import resolve

MEMORY = "memory:"
"""Begins the fact `weights` of a model that did not come from files, or was changed since."""
FINGERPRINT_PIECE = 1 << 24
"""Bytes hashed at once by one thread, and held of a tensor on a device. Part of the fingerprint."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what its files say about it."""

    model: nn.Module
    arch: Arch
    facts: Mapping[str, str]  # contract facts
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's generation defaults
    eos_ids: frozenset[int] = frozenset()
    num_writes: int | None = None  # to the model's tensors when its files were read; None: not from files


def load(config: EngineConfig) -> Loaded:
    """Resolve, inspect and load the configured model. Refuses one that cannot keep the promise."""
    machine.pin_environment()
    device = pick_device(config.device)
    # Out of inference mode: torch counts no writes to tensors that were made in it.
    with ProcessState(device).pinned(), torch.inference_mode(mode=False):
        return _load(config, device)


def _load(config: EngineConfig, device: torch.device) -> Loaded:
    trusted = config.trust_remote_code
    source = resolve(config.model, revision=config.revision, trust_remote_code=trusted)
    model_config = read_config(source, trust_remote_code=trusted)
    arch = _inspect(model_config, trusted=trusted)
    dtype = pick_dtype(config.dtype, device, arch.checkpoint_dtype)
    stamps = stamps_of(model_files(source, trusted=trusted))
    facts = {"weights": weights_digest(source)} | config_digests(source, trusted=trusted)
    model = load_model(source, model_config, dtype=dtype, device=device, trust_remote_code=trusted)
    generation = folder.generation_defaults(source)
    tokenizer = folder.read_tokenizer(source, trust_remote_code=trusted)
    refuse_changed(stamps)
    eos_ids = folder.eos_ids(generation, model_config)
    num_writes = count_writes(tracked_tensors(model))
    return Loaded(model, arch, facts, tokenizer, generation, eos_ids, num_writes)


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


def model_facts(loaded: Loaded, model: nn.Module) -> dict[str, str]:
    """The contract facts of a loaded model: those of its files, or of its tensors if it came without files.

    `model` is the loaded one as it is run.
    """
    facts = dict(loaded.facts)
    if not _are_those_of_files(loaded):
        facts["weights"] = fingerprint(model)
    return facts


def _are_those_of_files(loaded: Loaded) -> bool:
    """Whether the weights in memory are those that the facts name: no engine and no caller changed them."""
    if loaded.facts.get("weights", MEMORY).startswith(MEMORY) or num_updates(loaded.model):
        return False
    return loaded.num_writes in (None, count_writes(tracked_tensors(loaded.model)))


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over every parameter and buffer in memory: name, shape, dtype and bytes.

    Tensors are hashed in pieces, by several threads (hashing releases the interpreter lock), and copied from
    a device piece by piece.
    """
    tensors = sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items())
    for device in {tensor.device for _, tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # the threads below do not wait for this thread's stream
    digest = sha256()
    with ThreadPoolExecutor(max_workers=machine.num_cores()) as pool:
        pieces = [(name, tensor, pool.map(_piece_digest, _pieces(tensor))) for name, tensor in tensors]
        for name, tensor, digests in pieces:
            header = repr((name, tuple(tensor.shape), str(tensor.dtype)))
            digest.update(header.encode() + b"".join(digests))
    return MEMORY + digest.hexdigest()


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Runs of rows, each of about FINGERPRINT_PIECE bytes; views of the tensor."""
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    if rows.numel() == 0:
        return []
    return list(torch.split(rows, max(1, FINGERPRINT_PIECE * rows.shape[0] // rows.nbytes)))


def _piece_digest(piece: torch.Tensor) -> bytes:
    if piece.is_cuda:  # by way of pinned memory, which is several times faster
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)
    else:
        host = piece.contiguous()
    return sha256(host.view(torch.uint8).numpy().data).digest()


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


__all__ = ["FINGERPRINT_PIECE", "Loaded", "fingerprint", "load", "model_facts", "refuse_other_vocabulary"]
