"""What a model looks like to the engine, found by running it once without its weights.

A model is first *surveyed*: built on torch's meta device and run with an attention function that only records
how it was called. What it records (heads, sizes, windows, every argument attention is given) is what the
engine relies on; an attention feature that is not implemented here is refused by name instead of ignored.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from samewise.errors import UnsupportedModel
from samewise.model.refuse import refuse
from samewise.model.resolve import Source
from samewise.model.rope import pin_rope

SURVEY = "samewise_survey"
SURVEY_VERSION = "2"  # raised when a survey notes or refuses anything new
UNDERSTOOD = frozenset({
    "rows", "notes", "sliding_window", "position_ids", "position_embeddings", "use_cache", "dropout",
    "cache_position", "past_key_values", "output_attentions", "is_causal", "logits_to_keep", "return_dict",
})  # fmt: skip
"""Arguments attention may be given that are handled, or cannot matter without a cache or a mask."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What one attention module was seen to do."""

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
        """As plain data, to be remembered."""
        plain = asdict(self)
        return plain | {"checkpoint_dtype": str(self.checkpoint_dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, plain: object) -> Arch | None:
        """The other way; None for what is not an Arch (a damaged memory is no memory)."""
        try:
            fields = dict(plain)  # type: ignore[call-overload]
            layers = tuple(AttentionFacts(**layer) for layer in fields.pop("layers"))
            dtype = getattr(torch, fields.pop("checkpoint_dtype"))
            return cls(layers=layers, checkpoint_dtype=dtype, **fields)
        except (TypeError, ValueError, KeyError, AttributeError):
            return None


def take_notes(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    notes: list[tuple[nn.Module, AttentionFacts]],
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for attention during the survey: note what is asked, compute nothing of use."""
    foreign = sorted(k for k, v in kwargs.items() if v is not None and k not in {*UNDERSTOOD, "scaling"})
    if foreign:
        raise UnsupportedModel(f"its attention asks for {', '.join(foreign)}, which is not implemented")
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
    notes.append((module, AttentionFacts("", heads, key.shape[1], dim, sliding_window)))
    return query.new_zeros(1, rows, heads, dim), None


AttentionInterface.register(SURVEY, take_notes)


def survey(config: Any, *, trust_remote_code: bool = False) -> Arch:
    """Find out how a model uses attention, without its weights. Refuses what cannot be promised."""
    refuse(config)
    dtype = getattr(config, "dtype", None)  # before a model is made of it, which writes its own there
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=SURVEY, trust_remote_code=trust_remote_code, dtype=torch.float32
        ).eval()
    names = {module: name for name, module in model.named_modules()}
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    notes: list[tuple[nn.Module, AttentionFacts]] = []
    with torch.device("meta"), torch.no_grad():
        pin_rope(model, longest)
        ids = torch.zeros(1, 4, dtype=torch.int32)
        try:
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, notes=notes).logits
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{config.model_type}: {error}") from None
        except TypeError as error:
            raise UnsupportedModel(
                f"{config.model_type}: its attention does not go through transformers' "
                f"AttentionInterface ({error})"
            ) from error
    layers = tuple(
        AttentionFacts(names[m], f.num_heads, f.num_kv_heads, f.head_dim, f.window) for m, f in notes
    )
    _refuse_odd_layers(config, layers)
    return Arch(
        config.model_type,
        layers,
        int(logits.shape[-1]),
        longest,
        dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def _refuse_odd_layers(config: Any, layers: tuple[AttentionFacts, ...]) -> None:
    kind, expected = config.model_type, config.num_hidden_layers
    if len(layers) != expected or len({f.module for f in layers}) != expected:
        raise UnsupportedModel(
            f"{kind}: {len(layers)} of {expected} layers go through transformers' AttentionInterface; "
            "every layer must, once"
        )
    types = getattr(config, "layer_types", None) or []
    for facts, layer_type in zip(layers, types, strict=False):
        if (layer_type == "sliding_attention") != (facts.window is not None):
            raise UnsupportedModel(
                f"{kind}: {facts.module} is of type {layer_type} "
                f"but its attention is told of window {facts.window}"
            )


def read_config(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's own configuration."""
    return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)


def layer_list(model: nn.Module, arch: Arch) -> tuple[str, nn.ModuleList]:
    """The decoder layers and the name they stand under: the list that holds the attention modules."""
    first, last = arch.layers[0].module, arch.layers[-1].module
    for name, module in model.named_modules():
        inside = isinstance(module, nn.ModuleList) and len(module) == len(arch.layers)
        if inside and first.startswith(f"{name}.0.") and last.startswith(f"{name}.{len(arch.layers) - 1}."):
            assert isinstance(module, nn.ModuleList)
            return name, module
    raise UnsupportedModel(f"{arch.model_type}: its decoder layers do not stand in one list")


__all__ = ["SURVEY_VERSION", "Arch", "AttentionFacts", "layer_list", "read_config", "survey", "take_notes"]
