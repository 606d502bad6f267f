"""Law 7, the oracle: transformers' own forward pass, for every supported family.

Bits differ between implementations; logits agree within rounding, and greedy tokens wherever transformers'
top two logits are further apart than rounding.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from samewise.execute.choices import pick_dtype
from samewise.execute.pack import pack_frame
from samewise.model.arch import inspect_model
from samewise.testing import FAMILIES, run, submit, tiny_config, tiny_engine, tiny_model
from samewise.types import Sampling, Span

PAGE = 16  # tokens
MIN_MARGIN = 1e-3  # between the top two logits, for their tokens to be compared
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True)
class Variant:
    """A family with changes to its tiny config, and the prompt lengths to try."""

    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    lengths: tuple[int, ...] = (1, 16, 40, 90)

    def __str__(self) -> str:
        return self.name


def rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **settings}}


LONGROPE = {
    **rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(8)],
        long_factor=[1.5 + 0.5 * i for i in range(8)],
        original_max_position_embeddings=64,
    ),
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}
WINDOWED = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 20}

VARIANTS = [
    *(Variant(name, name) for name in FAMILIES),
    Variant("qwen2-layers-2-and-3-windowed", "qwen2", {**WINDOWED, "max_window_layers": 2}),
    Variant("qwen2-all-windowed", "qwen2", {**WINDOWED, "max_window_layers": 0}),
    Variant(
        "qwen2-none-windowed", "qwen2", {**WINDOWED, "use_sliding_window": False, "max_window_layers": 0}
    ),
    Variant("qwen3-windowed", "qwen3", {**WINDOWED, "max_window_layers": 1}),
    Variant("gemma3-window-of-5", "gemma3_text", {"sliding_window": 5}),
    Variant("gemma3-scaled-query", "gemma3_text", {"query_pre_attn_scalar": 100}),
    Variant("mistral-window-of-16", "mistral", {"sliding_window": 16}),
    Variant("mistral-no-window", "mistral", {"sliding_window": None}),
    Variant("smollm3-all-rotary", "smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    Variant("phi3-windowed", "phi3", {"sliding_window": 30}),
    Variant("phi3-partial-rotary", "phi3", {"partial_rotary_factor": 0.5}),
    Variant("phi3-longrope-short", "phi3", LONGROPE, max_model_len=64, lengths=(1, 16, 40)),
    Variant("phi3-longrope-long", "phi3", LONGROPE, max_model_len=256, lengths=(70, 100)),
    Variant("granite-attention-multiplier", "granite", {"attention_multiplier": 0.3}),
    Variant("llama-one-kv-head", "llama", {"num_key_value_heads": 1}),
    Variant("llama-no-groups", "llama", {"num_key_value_heads": 4}),
    Variant("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama-tied", "llama", {"tie_word_embeddings": True}),
    Variant("llama-odd-head", "llama", {"head_dim": 24}),
    Variant("llama-rope-linear", "llama", rope("linear", factor=2.0)),
    Variant(
        "llama-rope-llama3",
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Variant("llama-rope-yarn", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request):
    """(variant, engine, transformers' model with its own eager attention and the same weights)."""
    variant = request.param
    settings = {"max_model_len": variant.max_model_len} if variant.max_model_len else {}
    engine = tiny_engine(variant.family, overrides=variant.overrides, max_num_seqs=4, **settings)
    original = AutoModelForCausalLM.from_config(
        tiny_config(variant.family, **variant.overrides), attn_implementation="eager", dtype=torch.float32
    )
    original.load_state_dict(tiny_model(variant.family, **variant.overrides).state_dict())
    original.eval()
    original.generation_config.eos_token_id = None
    original.generation_config.pad_token_id = 258
    return variant, engine, original


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def logits_in_chunks(engine, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position, from frames of `chunk` tokens."""
    pages, logits = array("i", range(1, len(tokens) // PAGE + 2)), []
    for start in range(0, len(tokens), chunk):
        inputs = tuple(tokens[start : start + chunk])
        span = Span(0, start, inputs, len(inputs), pages, Sampling(), tokens, len(tokens))
        output = engine.runner.frame(pack_frame([span], engine.runner.frame_staging(len(span.inputs))))
        logits.append(output[: len(inputs)].clone())
    return torch.cat(logits)


def test_logits_are_those_of_transformers(pair):
    variant, engine, original = pair
    for length in variant.lengths:
        tokens = random_prompt(length)
        with torch.inference_mode():
            expected = original(input_ids=torch.tensor([tokens])).logits[0].float()
        for chunk in (16, 7):
            got = logits_in_chunks(engine, tokens, chunk)
            error = (got - expected).abs().max().item()
            assert error < TOLERANCE * expected.abs().max().item(), f"{length} tokens in chunks of {chunk}"


def test_greedy_tokens_are_those_of_transformers(pair):
    variant, engine, original = pair
    compared = 0
    for length in variant.lengths:
        tokens = random_prompt(length)
        with torch.inference_mode():
            answer = original.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                max_new_tokens=14,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        (output,) = run(engine, [(tokens, Sampling(), 14)])
        for expected, logits, token in zip(
            answer.sequences[0, length:].tolist(), answer.logits, output.tokens, strict=True
        ):
            best = logits[0].topk(2).values
            if (best[0] - best[1]).item() <= MIN_MARGIN:
                break  # the token may differ, and so may all after it
            assert token == expected, f"{length} tokens"
            compared += 1
    assert compared > 14


def test_windows_are_those_of_the_config(pair):
    """At least one prompt is longer than the window, so that the oracle covers it."""
    variant, engine, _ = pair
    config = tiny_config(variant.family, **variant.overrides)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    windows = [layer.window for layer in engine.loaded.arch.layers]
    if layer_types:
        assert windows == [window if kind == "sliding_attention" else None for kind in layer_types]
    elif variant.name.startswith("mistral") or variant.name == "phi3-windowed":
        assert windows == [window] * len(windows)
    if any(windows):
        assert max(variant.lengths) > max(w for w in windows if w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_dtype_auto_is_the_checkpoints_on_cuda_and_float32_on_cpu(family, dtype):
    config = tiny_config(family)
    config.dtype = dtype
    checkpoint_dtype = inspect_model(config).checkpoint_dtype
    assert pick_dtype("auto", torch.device("cuda"), checkpoint_dtype) == dtype
    assert pick_dtype("auto", torch.device("cpu"), checkpoint_dtype) == torch.float32


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bits_of_a_family_do_not_depend_on_load_or_proposer(family):
    """Its layers are one native call each on CPU where there is a compiler; views of them too."""
    prompts = [[5, 9, 77, 200, 3, 4], [7] * 40, [1, 2, 3] * 25]

    def answers(proposer, together):
        engine = tiny_engine(family, proposer=proposer, max_num_seqs=4)
        got = {}
        for group in [prompts] if together else [[prompt] for prompt in prompts]:
            ids = [submit(engine, prompt, Sampling(), max_tokens=12) for prompt in group]
            got |= {one: [] for one in ids}
            while not engine.idle:
                for delta in engine.step():
                    got[delta.request_id] += zip(delta.tokens, map(float.hex, delta.logprobs), strict=True)
        return [got[one] for one in sorted(got)]

    expected = answers("none", together=False)
    for proposer in ("none", "recycle", "skip"):
        assert answers(proposer, together=True) == expected
