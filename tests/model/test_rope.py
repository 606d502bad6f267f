"""Longrope pinned at load: a row's angles do not depend on the other rows. Frequencies of no machine."""

import math
from fractions import Fraction

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from samewise.errors import UnsupportedModel
from samewise.model.refuse import refuse
from samewise.model.rope import exact_frequencies, frequencies_digest, pin_rope, use_exact_frequencies

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


# -- exact frequencies ---------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "a base that is not round": {"rope_type": "default", "rope_theta": 1_234_567.89},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
}
WIDE = SIZES | {"head_dim": 64}


def llama_model(rope):
    return AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["llama"](**WIDE, rope_parameters=dict(rope))
    ).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_exact_frequencies_are_transformers_own_up_to_rounding(kind):
    model, original = llama_model(KINDS[kind]), llama_model(KINDS[kind])
    use_exact_frequencies(model)
    got, own = model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, own, rtol=1e-6, atol=0.0)
    exact = exact_frequencies(KINDS[kind]["rope_type"], KINDS[kind], 32)
    assert torch.equal(got, torch.tensor(exact, dtype=torch.float64).float())


@pytest.mark.parametrize("theta", [10_000.0, 500_000, 1_234_567.89])
def test_exact_frequencies_are_correctly_rounded(theta):
    """For the double x nearest to theta**(-i/count), x**count * theta**i is nearest to 1."""
    count = 16
    for i, x in enumerate(exact_frequencies("default", {"rope_theta": theta}, count)):
        errors = [
            abs(Fraction(y) ** count * Fraction(theta) ** i - 1)
            for y in (x, math.nextafter(x, 0.0), math.nextafter(x, 2.0))
        ]
        assert min(errors) == errors[0]


def test_slow_frequencies_of_llama3_are_divided_and_fast_ones_kept():
    plain = exact_frequencies("default", {"rope_theta": 500_000.0}, 32)
    scaled = exact_frequencies("llama3", LLAMA3, 32)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8.0
    shares = [a / b for a, b in zip(scaled, plain, strict=True)]
    assert shares == sorted(shares, reverse=True)
    assert len({share for share in shares if 0.125 < share < 1.0}) > 2


def test_other_kinds_keep_the_frequencies_they_have():
    assert exact_frequencies("yarn", {"rope_theta": 1e4}, 4) is None
    assert exact_frequencies("default", {}, 4) is None
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    model, original = llama_model(yarn), llama_model(yarn)
    use_exact_frequencies(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)


def test_frequencies_that_lie_elsewhere_are_kept():
    model = llama_model(KINDS["default"])
    model.model.rotary_emb.inv_freq = changed = model.model.rotary_emb.inv_freq * 1.001
    use_exact_frequencies(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, changed)


def test_the_digest_of_frequencies_changes_with_their_last_bit_and_with_the_scale():
    model = llama_model(KINDS["default"])
    use_exact_frequencies(model)
    digests = [frequencies_digest(model)]
    assert frequencies_digest(model) == digests[0]
    rotary = model.model.rotary_emb
    rotary.inv_freq[3] = torch.nextafter(rotary.inv_freq[3], torch.tensor(1.0))
    digests.append(frequencies_digest(model))
    rotary.attention_scaling = 1.0 + 2.0**-52
    digests.append(frequencies_digest(model))
    assert len(set(digests)) == 3


def test_the_digest_of_frequencies_is_the_same_on_every_machine():
    model = llama_model(LLAMA3)
    use_exact_frequencies(model)
    assert frequencies_digest(model) == "7c6cf23fe1b3a042"
