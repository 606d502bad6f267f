"""Families that run without being tested everywhere: the trainer's values and gradients of each."""

from typing import Any

import pytest
import torch
from rl_cases import TEMPERATURE, gradients, largest_error, ordinary_logprobs, sampled
from transformers import AutoConfig, AutoModelForCausalLM

from samewise.rl import TrainingForward, llm_over
from samewise.testing import COMMON, FAMILIES

WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": WINDOW,
    "ernie4_5": {"head_dim": 16},
    "exaone4": WINDOW,
    "gemma": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt_neox": {},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16, **WINDOW},
    "olmo": {},
    "olmo3": WINDOW,
    "phi": {},
    "seed_oss": {"head_dim": 16},
    "starcoder2": {},
}
QUICK = ("gpt_neox", "phi")  # gpt_neox gives its base model the tokens by position
GRADIENT_TOLERANCE = 1e-4  # of a parameter's largest gradient, in float32


def random_model(family: str) -> Any:
    """A model of two layers in training mode, with weights large enough that its tokens vary."""
    config = AutoConfig.for_model(family, **COMMON | {"num_hidden_layers": 2} | OTHERS[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.18)
            else:
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model.train().requires_grad_(True)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in OTHERS]
)
def test_values_are_those_of_generation_and_gradients_are_right(family: str) -> None:
    model = random_model(family)
    llm = llm_over(model, kv_memory=2**24, proposer="none")
    answers = sampled(llm, 4)
    got = TrainingForward(model, like=llm).logprobs(
        answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
        logits_to_keep=answers.num_columns,
    )  # fmt: skip
    assert torch.equal(got.detach(), answers.logprobs)
    expected = gradients(model, ordinary_logprobs(model.eval(), answers, TEMPERATURE))
    assert largest_error(gradients(model, got), expected) < GRADIENT_TOLERANCE


def test_these_are_others_than_those_tested_everywhere() -> None:
    assert not OTHERS.keys() & FAMILIES.keys()
