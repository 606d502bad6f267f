"""Longrope pinned at load: a row's angles do not depend on the other rows."""

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from samewise.errors import UnsupportedModel
from samewise.model.refuse import refuse
from samewise.model.rope import pin_rope

ORIGINAL = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "intermediate_size": 16, "vocab_size": 64, "max_position_embeddings": 128}  # fmt: skip


def phi3_model():
    transformers.logging.set_verbosity_error()
    config = CONFIG_MAPPING["phi3"](
        **SIZES, pad_token_id=0, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONGROPE)
    )
    return AutoModelForCausalLM.from_config(config).eval()


def gemma3_model():
    transformers.logging.set_verbosity_error()
    rope = {
        "full_attention": dict(LONGROPE),
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = CONFIG_MAPPING["gemma3_text"](
        **SIZES, head_dim=8, layer_types=["full_attention", "sliding_attention"], rope_parameters=rope
    )
    return AutoModelForCausalLM.from_config(config).eval()


def rotary_angles(model, positions, **kwargs):
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]), **kwargs)
    return cos[0], sin[0]


@pytest.mark.parametrize(
    ("max_model_len", "side"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long"), (128, "long")]
)
@pytest.mark.parametrize(
    ("make_model", "kwargs"), [(phi3_model, {}), (gemma3_model, {"layer_type": "full_attention"})]
)
def test_longrope_frequencies_depend_on_max_model_len_only(make_model, kwargs, max_model_len, side):
    model, original = make_model(), make_model()
    refuse(model.config)
    assert pin_rope(model, max_model_len) == f"longrope:{side}"
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    # The original's angles in a batch whose longest position needs the same frequencies.
    longest = 100 if side == "long" else ORIGINAL - 1
    expected = [each[:3] for each in rotary_angles(original, [3, 7, 20, longest], **kwargs)]
    for others in ([], [25], [ORIGINAL - 1], [ORIGINAL], [120]):
        got = [each[:3] for each in rotary_angles(model, [3, 7, 20, *others], **kwargs)]
        assert all(map(torch.equal, got, expected))
    for name, buffer in model.named_buffers():
        assert id(buffer) == before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_unpinned_longrope_depends_on_the_other_rows():
    model = phi3_model()
    alone, in_batch = rotary_angles(model, [3, 7])[0], rotary_angles(model, [3, 7, 100])[0][:2]
    assert not torch.equal(alone, in_batch)


def test_pinning_again_uses_the_new_length():
    model = phi3_model()
    assert pin_rope(model, 128) == "longrope:long"
    assert pin_rope(model, 128) == "longrope:long"
    long = rotary_angles(model, [3])[0]
    assert pin_rope(model, 16) == "longrope:short"
    assert not torch.equal(rotary_angles(model, [3])[0], long)


def test_layer_type_without_longrope_keeps_its_frequencies():
    model, original = gemma3_model(), gemma3_model()
    pin_rope(model, 128)
    for pinned, expected in zip(
        rotary_angles(model, [5], layer_type="sliding_attention"),
        rotary_angles(original, [5], layer_type="sliding_attention"),
        strict=True,
    ):
        assert torch.equal(pinned, expected)


def test_model_without_longrope_has_no_rope_fact():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    assert pin_rope(model, 128) is None


def test_dynamic_rope_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES, rope_parameters=rope))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        pin_rope(model, 128)
