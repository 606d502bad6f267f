"""Which models are run and which are refused, on transformers' own configs."""

import pytest
from transformers import CONFIG_MAPPING

from samewise.errors import UnsupportedModel
from samewise.model.refuse import refuse

SUPPORTED = [
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
]

REFUSED = {
    "bamba": "besides keys and values",
    "bart": "encoder–decoder",
    "bert": "not rotary",
    "bloom": "alibi",
    "dbrx": "several models|experts",
    "deepseek_v3": "mixture of experts",
    "diffllama": "differential",
    "falcon": "replaced",
    "falcon_h1": "besides keys and values",
    "gemma2": "soft-capped",
    "gemma3": "multimodal",
    "gemma3n_text": "share keys and values",
    "gpt2": "not rotary",
    "gpt_oss": "experts",
    "granitemoe": "experts",
    "granitemoehybrid": "experts",
    "jamba": "experts",
    "lfm2": "besides keys and values",
    "llama4": "multimodal",
    "llama4_text": "chunks",
    "mamba": "besides keys and values",
    "mamba2": "besides keys and values",
    "minimax": "experts",
    "mixtral": "experts",
    "mpt": "alibi",
    "olmoe": "experts",
    "opt": "not rotary",
    "qwen2_5_vl": "multimodal",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "qwen3_next": "experts",
    "recurrent_gemma": "block_types",
    "rwkv": "recurrent",
    "t5": "encoder–decoder",
    "whisper": "encoder–decoder",
    "zamba2": "layers_block_type",
}


def llama_config(**fields):
    return CONFIG_MAPPING["llama"](**fields)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_dense_rotary_decoder_is_supported(model_type):
    refuse(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_model_is_refused_with_its_type_and_the_reason(model_type):
    with pytest.raises(UnsupportedModel, match=REFUSED[model_type]) as caught:
        refuse(CONFIG_MAPPING[model_type]())
    assert model_type in str(caught.value)


def test_windows_and_fixed_rope_types_are_supported():
    refuse(CONFIG_MAPPING["qwen2"](use_sliding_window=True, sliding_window=64, max_window_layers=2))
    refuse(CONFIG_MAPPING["mistral"](sliding_window=None))
    refuse(
        CONFIG_MAPPING["gemma2"](attn_logit_softcapping=None)
    )  # the cap on the final logits is applied by the model
    for one in (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ):
        refuse(llama_config(rope_parameters={"rope_theta": 1e4, **one}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised.*gptq"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"moe_num_experts": 2}, "experts"),
        ({"layer_types": ["full_attention", "chunked_attention"], "num_hidden_layers": 2}, "chunks"),
        ({"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}, "linear_attention"),
        ({"attn_logit_softcapping": 30.0}, "soft-capped"),
        ({"attention_sink_bias": True}, "sinks"),
        ({"alibi": True}, "alibi"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"use_bidirectional_attention": "all"}, "both directions"),
        ({"is_causal": False}, "both directions"),
        ({"kv_lora_rank": 512}, "multi-latent"),
        ({"head_dim": 128, "v_head_dim": 64}, "value heads"),
        ({"num_kv_shared_layers": 4}, "share"),
        ({"index_topk": 64}, "picks the tokens"),
        ({"mamba_d_state": 16}, "state"),
    ],
)
def test_unsupported_feature_is_refused_in_any_model(fields, reason):
    config = llama_config()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=reason):
        refuse(config)


@pytest.mark.parametrize("fields", [{"num_local_experts": 1}, {"num_experts": 0}, {"n_routed_experts": None}])
def test_model_with_one_expert_is_supported(fields):
    refuse(llama_config(**fields))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "longest position"),
        ({"rope_type": "spiral", "rope_theta": 1e4}, "'spiral' is not known"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8]}, "several axes"),
        ({}, "not rotary"),
        (None, "not rotary"),
    ],
)
def test_unsupported_rope_is_refused(parameters, reason):
    config = llama_config()
    config.rope_parameters = parameters
    with pytest.raises(UnsupportedModel, match=reason):
        refuse(config)


def test_rope_is_checked_per_layer_type():
    config = CONFIG_MAPPING["gemma3_text"]()
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="'dynamic' of full_attention layers"):
        refuse(config)
    config.rope_parameters["full_attention"] = None  # layers without positions are supported
    refuse(config)
