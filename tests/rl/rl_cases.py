"""Models in training, and batches of sampled answers, that the tests of samewise.rl share."""

from dataclasses import dataclass
from typing import Any

import torch

from samewise import LLM, SamplingParams
from samewise.rl.alias import set_attention
from samewise.testing import tiny_model

TEMPERATURE = 0.7


def trained_model(family: str = "llama", *, attention: str = "eager", **options: Any) -> Any:
    """A tiny model with transformers' own attention, in training mode."""
    model = tiny_model(family, **options)
    set_attention(model, attention)
    return model.train().requires_grad_(True)


@dataclass(frozen=True)
class Answers:
    """Sampled answers, padded on the left for prompts and on the right for answers."""

    input_ids: torch.Tensor  # [B, P + A]
    attention_mask: torch.Tensor
    num_columns: int  # A
    logprobs: torch.Tensor  # [B, A] of generation; 0 where there is no token


def sampled(llm: LLM, num: int, *, temperature: float = TEMPERATURE, max_tokens: int = 12) -> Answers:
    """`num` answers of different lengths to prompts of different lengths."""
    mode = "raw_logprobs" if temperature == 1.0 else "processed_logprobs"
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=1 + i % max_tokens,
            logprobs_mode=mode,
            seed=i,
            ignore_eos=True,
        )
        for i in range(num)
    ]
    prompts = [[3 + (7 * i + j) % 250 for j in range(1 + (5 * i) % 37)] for i in range(num)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    width = max(map(len, prompts))
    shape = num, width + max_tokens
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    logprobs = torch.zeros(num, max_tokens)
    for i, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        tokens = torch.tensor([*prompt, *choice.token_ids])
        at = slice(width - len(prompt), width + len(choice.token_ids))
        ids[i, at], mask[i, at] = tokens, 1
        logprobs[i, : len(choice.token_ids)] = torch.tensor(choice.token_logprobs)
    device = llm.engine.device
    return Answers(ids.to(device), mask.to(device), max_tokens, logprobs.to(device))


def ordinary_logprobs(model: Any, answers: Answers, temperature: float) -> torch.Tensor:
    """transformers' own forward pass; 0 where there is no token."""
    ids, mask, num = answers.input_ids, answers.attention_mask, answers.num_columns
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -num - 1 : -1]
    logprobs = (logits.float() / temperature).log_softmax(-1).gather(-1, ids[:, -num:, None])[..., 0]
    return logprobs * mask[:, -num:]


def gradients(model: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of log-probabilities, by parameter."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(logprobs.shape, generator=generator).to(logprobs.device)
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone().float() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any gradient, as a share of the parameter's largest."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-12))
        for name in one
    )
