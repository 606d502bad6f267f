"""Inspect a model without its weights: how it uses attention, and whether it can be run.

An inspection builds the model on torch's meta device and runs it once with an attention function that only
records its arguments. Head counts, head sizes and windows come from that record; an attention argument that
is not implemented is refused by name.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from samewise.errors import UnsupportedModel
from samewise.model.folder import unreadable_as_unsupported
from samewise.model.refuse import refuse
from samewise.model.rope import pin_rope
from samewise.model.source import Source

RECORDING = "samewise_inspect"  # name of the recording attention in transformers' AttentionInterface
INSPECTION_VERSION = "3"  # part of the cache key: raise it when an inspection records or refuses more
KNOWN_ARGUMENTS = frozenset({
    "rows", "calls", "sliding_window", "position_ids", "position_embeddings", "use_cache", "dropout",
    "cache_position", "past_key_values", "output_attentions", "is_causal", "logits_to_keep", "return_dict",
    "scaling",
})  # fmt: skip
"""Arguments of attention that are implemented, or have no effect without a cache or a mask."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One attention module: its dotted name, its shapes, its sliding window in tokens (None: full)."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Arch:
    """What the engine relies on about a model."""

    model_type: str
    layers: tuple[AttentionFacts, ...]
    vocab: int
    max_positions: int
    checkpoint_dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        """As plain data, for the cache of facts."""
        fields = asdict(self)
        return fields | {"checkpoint_dtype": str(self.checkpoint_dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, data: object) -> Arch | None:
        """Inverse of `to_json`; None for any other data, such as a damaged cache entry."""
        try:
            fields = dict(data)  # type: ignore[call-overload]
            layers = tuple(AttentionFacts(**layer) for layer in fields.pop("layers"))
            dtype = getattr(torch, fields.pop("checkpoint_dtype"))
            return cls(layers=layers, checkpoint_dtype=dtype, **fields)
        except (TypeError, ValueError, KeyError, AttributeError):
            return None


def record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    calls: list[tuple[nn.Module, AttentionFacts]],
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Take attention's place during an inspection: append the call to `calls`, return zeros."""
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in KNOWN_ARGUMENTS)
    if unknown:
        raise UnsupportedModel(f"its attention asks for {', '.join(unknown)}, which is not implemented")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModel("its attention is not causal")
    if kwargs.get("scaling") is None:
        raise UnsupportedModel("its attention leaves its scale to the kernel")
    _, heads, rows, dim = query.shape
    if key.shape != value.shape or key.shape[-1] != dim or heads % key.shape[1]:
        raise UnsupportedModel(
            f"its attention has query, key and value shapes {tuple(query.shape)}, {tuple(key.shape)}, "
            f"{tuple(value.shape)}; they must share the head size, and heads must come in equal groups"
        )
    calls.append((module, AttentionFacts("", heads, key.shape[1], dim, sliding_window)))
    return query.new_zeros(1, rows, heads, dim), None


AttentionInterface.register(RECORDING, record_attention)


def inspect_model(config: Any, *, trust_remote_code: bool = False) -> Arch:
    """The architecture of a model, from its configuration alone. Raises UnsupportedModel with a reason."""
    refuse(config)
    dtype = getattr(config, "dtype", None)  # read now: building a model overwrites it
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=RECORDING, trust_remote_code=trust_remote_code, dtype=torch.float32
        ).eval()
    names = {module: name for name, module in model.named_modules()}
    max_positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    calls: list[tuple[nn.Module, AttentionFacts]] = []
    with torch.device("meta"), torch.no_grad():
        pin_rope(model, max_positions)
        ids = torch.zeros(1, 4, dtype=torch.int32)
        try:
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, calls=calls).logits
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{config.model_type}: {error}", param="model") from None
        except TypeError as error:
            raise UnsupportedModel(
                f"{config.model_type}: its attention does not go through transformers' "
                f"AttentionInterface ({error})",
                param="model",
            ) from error
    layers = tuple(replace(facts, module=names[module]) for module, facts in calls)
    _check_layers(config, layers)
    return Arch(
        config.model_type,
        layers,
        int(logits.shape[-1]),
        max_positions,
        dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def _check_layers(config: Any, layers: tuple[AttentionFacts, ...]) -> None:
    """Raise unless every layer called attention once, with the window its layer type has."""
    family, expected = config.model_type, config.num_hidden_layers
    if len(layers) != expected or len({facts.module for facts in layers}) != expected:
        raise UnsupportedModel(
            f"{family}: {len(layers)} of {expected} layers go through transformers' AttentionInterface; "
            "every layer must, once",
            param="model",
        )
    layer_types = getattr(config, "layer_types", None) or []
    for facts, layer_type in zip(layers, layer_types, strict=False):
        if (layer_type == "sliding_attention") != (facts.window is not None):
            raise UnsupportedModel(
                f"{family}: {facts.module} is of type {layer_type} "
                f"but its attention is given window {facts.window}",
                param="model",
            )


def read_config(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's own configuration."""
    with unreadable_as_unsupported(source, "config.json"):
        return AutoConfig.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, local_files_only=True
        )


def layer_list(model: nn.Module, arch: Arch) -> tuple[str, nn.ModuleList]:
    """The dotted name of the list of decoder layers, and the list: the one with all attention modules."""
    first, last = arch.layers[0].module, arch.layers[-1].module
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(arch.layers):
            continue
        if first.startswith(f"{name}.0.") and last.startswith(f"{name}.{len(arch.layers) - 1}."):
            return name, module
    raise UnsupportedModel(f"{arch.model_type}: its decoder layers are not in one list", param="model")


__all__ = [
    "INSPECTION_VERSION",
    "Arch",
    "AttentionFacts",
    "inspect_model",
    "layer_list",
    "read_config",
    "record_attention",
]
