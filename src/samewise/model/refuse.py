"""Refuse, before any weight is read, a model whose output could depend on the batch.

Supported are dense decoders with rotary positions and plain causal attention, full or in a sliding window.
Each rule reads one feature of the config and returns the reason for refusing, or None. Most rules go by
features, so that future models are refused too; HIDDEN lists families whose config does not show the feature.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from samewise.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Fields = Mapping[str, Any]
Rule = Callable[[Fields], str | None]


def refuse(config: "PretrainedConfig") -> None:
    """Raise UnsupportedModel, with the reason, unless a model of this config can be run under the promise."""
    fields = config.to_dict()
    reasons = (reason for rule in RULES if (reason := rule(fields)) is not None)
    reason = next(reasons, None) or _composite(config) or _unreachable(config)
    if reason is not None:
        raise UnsupportedModel(
            f"model type {fields.get('model_type') or '(none)'} cannot be run under the promise: "
            f"{reason}. Dense decoders with rotary positions can: llama, qwen3, mistral, gemma3_text ...",
            param="model",
        )


# -------------------------------------------------------------------------------------------- structure


def _quantised(fields: Fields) -> str | None:
    quantisation = fields.get("quantization_config")
    if not quantisation:
        return None
    method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, Mapping) else "unnamed"
    return f"its checkpoint is quantised ({method}) for kernels with no fixed bits; use the original weights"


def _encoder_decoder(fields: Fields) -> str | None:
    return "it is an encoder–decoder" if fields.get("is_encoder_decoder") else None


def _multimodal(fields: Fields) -> str | None:
    for name in ("vision_config", "audio_config", "text_config", "speech_config"):
        if fields.get(name):
            return f"it is multimodal ({name}); use its text-only checkpoint if there is one"
    return None


def _composite(config: "PretrainedConfig") -> str | None:
    parts = sorted(getattr(config, "sub_configs", None) or ())
    return f"it is made of several models ({', '.join(parts)})" if parts else None


EXPERT_COUNT = re.compile(r"(.*_)?n(um)?_(\w+_)?experts|.*_expert_num")


def _experts(fields: Fields) -> str | None:
    for name, value in fields.items():
        if EXPERT_COUNT.fullmatch(name) and isinstance(value, int) and value > 1:
            return f"it is a mixture of experts ({name}={value}), which groups a batch's tokens by expert"
    if fields.get("enable_moe_block") or {"sparse", "moe"} & set(fields.get("mlp_layer_types") or ()):
        return "it is a mixture of experts"
    return None


STATE = re.compile(
    r"(mamba|ssm|rwkv|lru|linear)_(?!bias)\w+|conv_(L_cache|kernel)|(conv|conv1d)_width|state_size"
)
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "attn_type_list", "hybrid_override_pattern")


def _chunked(fields: Fields) -> str | None:
    if fields.get("attention_chunk_size") or "chunked_attention" in (fields.get("layer_types") or ()):
        return "it attends in chunks (chunked_attention)"
    return None


def _state(fields: Fields) -> str | None:
    for name in LAYER_LISTS:
        layer_types = set(map(str, fields.get(name) or ()))
        if others := sorted(layer_types - PLAIN_LAYERS):
            return f"it has layers other than full and sliding attention ({name}: {others[0]})"
    for name, value in fields.items():
        if STATE.fullmatch(name) and value:
            return f"it carries state from token to token besides keys and values ({name}={value})"
    return None


# -------------------------------------------------------------------------------------------- attention


def _softcapped(fields: Fields) -> str | None:
    for name in ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap", "attn_logit_cap"):
        if fields.get(name):
            return f"its attention scores are soft-capped ({name}={fields[name]})"
    return None


SINKS = re.compile(r"attention_sink|attn_sink|sink_bias|use_sinks|learnable_sink")


def _sinks(fields: Fields) -> str | None:
    for name, value in fields.items():
        if SINKS.search(name) and value is not None and value is not False:
            return f"it has attention sinks ({name})"
    return None


def _biased(fields: Fields) -> str | None:
    nested = fields.get("attn_config")
    if fields.get("alibi") or (isinstance(nested, Mapping) and nested.get("alibi")):
        return "its attention is biased by distance (alibi)"
    if fields.get("relative_attention_num_buckets") or fields.get("position_bias_num_buckets"):
        return "its attention has a learned position bias"
    return None


def _bidirectional(fields: Fields) -> str | None:
    if fields.get("use_bidirectional_attention") or fields.get("is_causal") is False:
        return "it attends in both directions"
    return None


def _sparse(fields: Fields) -> str | None:
    for name in (
        "index_topk",
        "index_topk_blocks",
        "keep_window_size",
        "attention_window",
        "sparse_block_size",
    ):
        if fields.get(name):
            return f"it picks the tokens it attends to ({name}={fields[name]})"
    return None


def _uneven_heads(fields: Fields) -> str | None:
    """KV pages hold one K and one V tensor per layer, of one shape for all layers, written by that layer."""
    if fields.get("kv_lora_rank"):
        return f"its attention is multi-latent (kv_lora_rank={fields['kv_lora_rank']})"
    key, value = fields.get("qk_head_dim") or fields.get("head_dim"), fields.get("v_head_dim")
    if value and key and value != key:
        return f"its value heads (v_head_dim={value}) are not the size of its key heads ({key})"
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_attention_heads_per_layer"):
        if isinstance(fields.get(name), list):
            return f"its heads differ from layer to layer ({name})"
    if fields.get("per_layer_config") or fields.get("global_head_dim"):
        return "its heads differ from layer to layer"
    if fields.get("num_kv_shared_layers"):
        return f"its layers share keys and values (num_kv_shared_layers={fields['num_kv_shared_layers']})"
    if fields.get("hidden_size_per_layer_input"):
        return "its layers take inputs of their own (hidden_size_per_layer_input)"
    return None


# -------------------------------------------------------------------------------------------- positions

FIXED_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
PINNED_ROPE = {"longrope"}  # depends on the longest position in the batch until rope.pin_rope fixes it


def _rope_settings(fields: Fields) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """(layer type, its RoPE parameters); the layer type is None where all layers share one setting."""
    parameters = fields.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        # Layers of a type with None have no positions, which is supported.
        yield from ((layer_type, one) for layer_type, one in parameters.items() if one is not None)
    elif parameters:
        yield None, parameters


def _positions(fields: Fields) -> str | None:
    settings = list(_rope_settings(fields))
    if not settings:
        return "its positions are not rotary (no rope_parameters)"
    for layer_type, one in settings:
        rope_type = one.get("rope_type") or one.get("type") or "default"
        where = f"RoPE type {rope_type!r}" + (f" of {layer_type} layers" if layer_type else "")
        if rope_type == "dynamic":
            return f"its {where} depends on the longest position in the batch"
        if rope_type not in FIXED_ROPE | PINNED_ROPE:
            return f"its {where} is not known here ({', '.join(sorted(FIXED_ROPE | PINNED_ROPE))} are)"
        if one.get("mrope_section"):
            return "its positions have several axes (mrope_section)"
    return None


# --------------------------------------------------------------------------- features a config does not show

HIDDEN = {
    "bloom": "its attention is biased by distance (alibi)",
    "cohere_compass_text": "it attends in both directions",
    "diffllama": "its attention is differential",
    "doge": "it picks the tokens it attends to",
    "gpt_oss": "it is a mixture of experts with attention sinks",
    "granite_swa": "it has attention sinks",
    "hrm_text": "it runs its layers in a loop of its own",
    "lfm2": "it is a hybrid of convolutions and attention",
    "mpt": "its attention is biased by distance (alibi)",
    "rwkv": "it is a recurrent model",
    "xlstm": "it is a recurrent model",
}


def _named(fields: Fields) -> str | None:
    name = str(fields.get("model_type") or "")
    if name in HIDDEN:
        return HIDDEN[name]
    if re.search(r"moe(_|$)", name):
        return "it is a mixture of experts"
    if re.search(r"mamba|recurrent|hybrid|falcon_h1|qwen3_next|jamba|zamba|bamba|nemotron_h", name):
        return "it is a state-space or hybrid model"
    return None


def _unreachable(config: "PretrainedConfig") -> str | None:
    """Whether attention can be replaced in the model's class, and has no sinks; read from its source."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config).__module__.startswith("transformers_modules"):
        return None  # the checkpoint's own code, with trust_remote_code: the inspection finds out
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return "transformers does not let its attention be replaced"
    if re.search(r"\bs_aux\b", inspect.getsource(sys.modules[model_class.__module__])):
        return "it has attention sinks"
    return None


RULES: tuple[Rule, ...] = (
    _quantised,
    _encoder_decoder,
    _multimodal,
    _chunked,
    _sparse,
    _experts,
    _state,
    _biased,
    _softcapped,
    _sinks,
    _bidirectional,
    _uneven_heads,
    _named,
    _positions,
)

__all__ = ["refuse"]
