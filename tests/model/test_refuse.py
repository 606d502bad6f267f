"""Which models are run and which are not, on transformers' own configs; and RoPE pinned at load."""

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from samewise.errors import UnsupportedModel
from samewise.model.refuse import refuse
from samewise.model.rope import pin_rope

RUN = [
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

NOT_RUN = {
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


def llama(**fields):
    return CONFIG_MAPPING["llama"](**fields)


@pytest.mark.parametrize("model_type", RUN)
def test_dense_rotary_decoders_are_run(model_type):
    refuse(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("model_type", NOT_RUN)
def test_others_are_refused_by_name_and_reason(model_type):
    with pytest.raises(UnsupportedModel, match=NOT_RUN[model_type]) as caught:
        refuse(CONFIG_MAPPING[model_type]())
    assert model_type in str(caught.value)


def test_variants_that_are_run():
    refuse(CONFIG_MAPPING["qwen2"](use_sliding_window=True, sliding_window=64, max_window_layers=2))
    refuse(CONFIG_MAPPING["mistral"](sliding_window=None))
    refuse(
        CONFIG_MAPPING["gemma2"](attn_logit_softcapping=None)
    )  # the cap on the final logits is its own code
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
        refuse(llama(rope_parameters={"rope_theta": 1e4, **one}))


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
def test_features_are_refused_in_any_model(fields, reason):
    config = llama()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=reason):
        refuse(config)


@pytest.mark.parametrize("fields", [{"num_local_experts": 1}, {"num_experts": 0}, {"n_routed_experts": None}])
def test_one_expert_is_none(fields):
    refuse(llama(**fields))


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
def test_rope_that_cannot_be_promised(parameters, reason):
    config = llama()
    config.rope_parameters = parameters
    with pytest.raises(UnsupportedModel, match=reason):
        refuse(config)


def test_rope_is_read_per_layer_type():
    config = CONFIG_MAPPING["gemma3_text"]()
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="'dynamic' of full_attention layers"):
        refuse(config)
    config.rope_parameters["full_attention"] = None  # layers without positions
    refuse(config)


# ---- pinning

ORIGINAL = 32
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "intermediate_size": 16, "vocab_size": 64, "max_position_embeddings": 128}  # fmt: skip


def phi3():
    transformers.logging.set_verbosity_error()
    config = CONFIG_MAPPING["phi3"](
        **SIZES, pad_token_id=0, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONG)
    )
    return AutoModelForCausalLM.from_config(config).eval()


def gemma3():
    transformers.logging.set_verbosity_error()
    rope = {"full_attention": dict(LONG), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = CONFIG_MAPPING["gemma3_text"](
        **SIZES, head_dim=8, layer_types=["full_attention", "sliding_attention"], rope_parameters=rope
    )
    return AutoModelForCausalLM.from_config(config).eval()


def angles(model, positions, **named):
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]), **named)
    return cos[0], sin[0]


@pytest.mark.parametrize(
    ("max_model_len", "side"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long"), (128, "long")]
)
@pytest.mark.parametrize(("make", "named"), [(phi3, {}), (gemma3, {"layer_type": "full_attention"})])
def test_longrope_is_fixed_by_the_longest_sequence_allowed(make, named, max_model_len, side):
    model, theirs = make(), make()
    refuse(model.config)
    assert pin_rope(model, max_model_len) == f"longrope:{side}"
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    # A batch of theirs whose longest position lies on the same side.
    longest = 100 if side == "long" else ORIGINAL - 1
    want = [each[:3] for each in angles(theirs, [3, 7, 20, longest], **named)]
    for company in ([], [25], [ORIGINAL - 1], [ORIGINAL], [120]):
        got = [each[:3] for each in angles(model, [3, 7, 20, *company], **named)]
        assert all(map(torch.equal, got, want))
    for name, buffer in model.named_buffers():
        assert id(buffer) == before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_the_law_is_not_vacuous():
    model = phi3()
    alone, beside = angles(model, [3, 7])[0], angles(model, [3, 7, 100])[0][:2]
    assert not torch.equal(alone, beside)


def test_pinning_again_chooses_again():
    model = phi3()
    assert pin_rope(model, 128) == "longrope:long"
    assert pin_rope(model, 128) == "longrope:long"
    long = angles(model, [3])[0]
    assert pin_rope(model, 16) == "longrope:short"
    assert not torch.equal(angles(model, [3])[0], long)


def test_the_other_layer_type_keeps_its_own():
    model, theirs = gemma3(), gemma3()
    pin_rope(model, 128)
    for one, other in zip(
        angles(model, [5], layer_type="sliding_attention"),
        angles(theirs, [5], layer_type="sliding_attention"),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_nothing_to_pin():
    model = AutoModelForCausalLM.from_config(llama(**SIZES))
    assert pin_rope(model, 128) is None


def test_dynamic_is_not_pinned():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(llama(**SIZES, rope_parameters=rope))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        pin_rope(model, 128)
