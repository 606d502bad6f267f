"""Tries the sampler: every way of choosing and scoring gives a row the same bits, alone or beside others.

Rows are the target model's own logits, and rows that are hard for a sampler: one certain token, equal logits,
tokens excluded by -inf. What was chosen becomes part of the probe's digest, so that a contract names the bits
of tokens and log-probabilities, not of logits alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import torch

from samewise.errors import GuaranteeLost
from samewise.execute.pack import pack_frame
from samewise.execute.sampling_rows import SamplingRow
from samewise.execute.staging import PassInputs
from samewise.types import Sampling, TopLogprobs
from samewise.verify.verifier import Verifier

MODEL_ROWS = 4
"""Rows of the target model's logits that are tried, beside those that are made."""
NUM_CHOICES = 22
"""Choices that are made: each of SAMPLINGS at least twice, on different rows. Set by hand, for 0.1 s."""
NUM_TOPS = 5
"""Top log-probabilities asked for of each row."""
CERTAIN = 300.0
"""A logit this far above the others leaves them no probability in float32: exp(-300) is 0."""

SAMPLINGS: tuple[Sampling, ...] = (
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(temperature=1.3, top_k=20, seed=3),
    Sampling(temperature=1.0, min_p=0.05, seed=4),
    Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=5, index=1),
    Sampling(presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(temperature=1.0, repetition_penalty=1.3, seed=6),
    Sampling(temperature=1e-6, seed=7),
    Sampling(temperature=1.0, logit_bias=((1, 3.0), (2, -3.0)), seed=8),
    Sampling(temperature=2.0, allowed_token_ids=(0, 1, 2, 3, 5), seed=2**63 + 9),
)
"""One of each way of choosing a token."""


class Outcome(NamedTuple):
    """What the sampler gave for one row, as bits."""

    token: int
    logprob: bytes
    score: bytes  # log-probability of the same token, by `score`
    tops: tuple[tuple[int, bytes], ...]


@torch.inference_mode()
def try_sampler(verifier: Verifier, logits: torch.Tensor) -> bytes:
    """SHA-256 of what is chosen from these logits [R, V] and from made rows; raises GuaranteeLost.

    The rows of a frame must not show in a row's result: all-greedy frames are sampled by a shorter way than
    frames with a sampled row, scoring is a third way, and top log-probabilities are a fourth.
    """
    runner = verifier.runner
    block = _trial_rows(logits, runner.arch.vocab).to(runner.dtype).to(runner.device)
    for inputs in _frames(verifier, len(block)):
        _refuse_unless(_greedy_agrees(verifier, block, inputs))
    choices = [(i % len(block), SAMPLINGS[i % len(SAMPLINGS)]) for i in range(NUM_CHOICES)]
    values = block.float()
    together = _outcomes(verifier, values[[row for row, _ in choices]], [how for _, how in choices])
    for (row, how), outcome in zip(choices, together, strict=True):
        _refuse_unless(list(_outcomes(verifier, values[row : row + 1], [how])) == [outcome])
        _refuse_unless(outcome.logprob == outcome.score)
        _refuse_unless(all(bits == outcome.logprob for token, bits in outcome.tops if token == outcome.token))
    certain = [
        outcome for (row, how), outcome in zip(choices, together, strict=True) if row == 0 and how.plain
    ]
    _refuse_unless(all(outcome.logprob == struct.pack("<f", 0.0) for outcome in certain))
    return sha256(repr(together).encode()).digest()


def _frames(verifier: Verifier, num_rows: int) -> Iterator[PassInputs]:
    """The frames to sample in: on CUDA of every captured shape; on CPU, where rows go one by one, of one."""
    runner = verifier.runner
    if verifier.cuda:
        yield from verifier.empty_frames()
    else:
        yield pack_frame([], runner.frame_staging(min(num_rows + 1, runner.widest)))


def _refuse_unless(agrees: bool) -> None:
    if not agrees:
        raise GuaranteeLost(
            "the sampler gives a row other bits beside other rows, at another index or by another way of "
            "asking; the engine will not start. Try another device or dtype"
        )


def _trial_rows(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """[R, V] float32 on the CPU: a certain token first; then equal logits, ties, -inf; then the model's."""
    ids = torch.arange(vocab)
    certain = torch.where(ids == vocab // 3, CERTAIN, 0.0)
    equal = torch.full((vocab,), 0.5)
    ties = (ids % 7).float()  # several tokens share the largest logit: the lowest id is chosen
    few = torch.where(ids % max(1, vocab // 5) == 0, ids % 11 * 0.25, -math.inf)
    one = torch.where(ids == vocab - 1, 1.5, -math.inf)
    far = torch.where(ids % 2 == 0, -80.0, 8.0) - (ids % 13) * 0.125  # half of the exponentials are tiny
    step = max(1, len(logits) // MODEL_ROWS)
    made = torch.stack([certain, equal, ties, few, one, far])
    return torch.cat([made, logits[::step][:MODEL_ROWS].float().cpu()])


def _outcomes(verifier: Verifier, logits: torch.Tensor, samplings: list[Sampling]) -> list[Outcome]:
    """What the sampler gives for the rows of a block [R, V] in float32."""
    sampler, num_rows = verifier.sampler, len(samplings)
    prompt, output = [1, 2, 3, 1], [2, 5, 2]
    rows = [SamplingRow(i, how, prompt, output, 40) for i, how in enumerate(samplings)]
    chosen = sampler.sample(logits, [row for row in rows if not row.sampling.plain])
    tokens: list[int] = chosen.tokens.tolist()
    logprobs: list[float] = chosen.logprobs.tolist()
    scores: list[float] = sampler.score(logits, range(num_rows), tokens).tolist()
    tops = sampler.top(logits, range(num_rows), [NUM_TOPS] * num_rows)
    return [
        Outcome(token, _bits(logprob), _bits(score), _top_bits(top))
        for token, logprob, score, top in zip(tokens, logprobs, scores, tops, strict=True)
    ]


def _bits(value: float) -> bytes:
    return struct.pack("<f", value)


def _top_bits(top: TopLogprobs) -> tuple[tuple[int, bytes], ...]:
    return tuple((token, _bits(value)) for token, value in top)


def _greedy_agrees(verifier: Verifier, block: torch.Tensor, inputs: PassInputs) -> bool:
    """Whether the block's rows get the same tokens and log-probabilities in any place of a frame.

    On CUDA through the graphs that serve requests; with and without a sampled row in the frame.
    """
    outputs = list(_greedy_outputs(verifier, block, inputs))
    return all(torch.equal(output, outputs[0]) for output in outputs)


def _greedy_outputs(verifier: Verifier, block: torch.Tensor, inputs: PassInputs) -> Iterator[torch.Tensor]:
    """Tokens and log-probability bits of the block's rows, [R, 2] int32, in frames of one shape."""
    num_logits = inputs.num_rows if inputs.keep is None else len(inputs.keep)
    width = min(num_logits, len(block))
    for first, company in ((0, False), (0, True), (num_logits // 2, False), (num_logits - 1, True)):
        # Row `other` of the frame holds no row that is compared; where there is none, no row is sampled.
        other = (first + width) % num_logits if num_logits > width else None
        outputs = []
        for start in range(0, len(block), width):
            rows = block[start : start + width]
            index = (torch.arange(num_logits, device=block.device) - first) % num_logits % len(rows)
            sampled = other if company else None
            frame = verifier.sample_block(rows[index], inputs, sampled_row=sampled)
            outputs.append(frame.roll(-first, 0)[: len(rows)])
        yield torch.cat(outputs)


__all__ = ["Outcome", "try_sampler"]
