"""Rollout and trainer over CUDA's kernels in Triton's interpreter; on a card see `test_logprobs`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rl_cases import TEMPERATURE, gradients, largest_error, sampled, trained_model

from samewise.engine import assemble
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.rl import TrainingForward, llm_over

pytestmark = [
    pytest.mark.slow,
    # Memory never written may hold any number: Triton's interpreter warns of overflow, CUDA does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_logprobs runs them on the CUDA device"),
]


@pytest.fixture
def cuda_kernels() -> Iterator[None]:
    """Assemble engines as on CUDA: stacked siblings, ordered linears, fused layers, Triton's attention."""
    from samewise.kernels.attention import triton
    from samewise.kernels.linear import triton as linears
    from samewise.model import fused_cuda_layer
    from samewise.model.linear import stack_siblings
    from samewise.model.surgery import copy_modules

    def stacked(model: torch.nn.Module) -> torch.nn.Module:
        stack_siblings(model)
        return copy_modules(model)

    tile = linears.LinearTile(rows=32, columns=512, described=False)  # few large tiles take the least time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "pick_kernel", lambda *_: triton.TritonKernel(2, 2))
        patch.setattr(assemble, "pick_linear", lambda *_: "triton")
        patch.setattr(assemble, "copy_modules", stacked)
        patch.setattr(
            assemble, "Sampler", lambda vocab, device, row_math: Sampler(vocab, device, by_row=False)
        )
        patch.setattr(Runner, "_fusing", property(lambda _: fused_cuda_layer))
        patch.setattr(linears, "pick_tile", lambda *_, **__: tile)
        yield


@pytest.mark.usefixtures("cuda_kernels")
def test_values_over_cudas_kernels_are_those_of_generation() -> None:
    model = trained_model(attention="sdpa", dtype=torch.bfloat16, num_hidden_layers=1)
    sizes: dict[str, Any] = {"frame_rows": 16, "frame_sizes": (16, 32), "max_model_len": 64}
    llm = llm_over(model, kv_memory=2**20, proposer="none", max_num_seqs=4, **sizes)
    assert llm.engine.runner.fused
    forward = TrainingForward(model, like=llm, kv_tokens=64, frame_sizes=(16, 32), kept_bytes=2**30)
    answers = sampled(llm, 4, max_tokens=3)
    got = forward.logprobs(
        answers.input_ids, attention_mask=answers.attention_mask, temperature=TEMPERATURE,
        logits_to_keep=answers.num_columns,
    )  # fmt: skip
    assert torch.equal(got.detach(), answers.logprobs)
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    kept = gradients(model, forward.logprobs(answers.input_ids, attention_mask=answers.attention_mask))
    without = TrainingForward(model, like=llm, kv_tokens=64, frame_sizes=(16, 32), kept_bytes=0)
    again = without.logprobs(answers.input_ids, attention_mask=answers.attention_mask)
    assert largest_error(kept, gradients(model, again)) < 0.05  # of bfloat16
    with torch.no_grad():  # stacked weights are copies, which have to follow
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        again = forward.logprobs(answers.input_ids[:, -5:], temperature=TEMPERATURE)
        new = TrainingForward(model, like=llm, kv_tokens=64, frame_sizes=(16, 32))
        assert torch.equal(again, new.logprobs(answers.input_ids[:, -5:], temperature=TEMPERATURE))
