"""The sampler's part of the probe: ways of sampling that disagree are refused, and all are in the digest."""

import pytest
import torch

from samewise.errors import GuaranteeLost
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.kernels.attention import base
from samewise.testing import tiny_engine
from samewise.verify.placement import FAR_STARTS, TEXT_LEN, ProbeText
from samewise.verify.probe import probe
from samewise.verify.sampler_trial import try_sampler
from samewise.verify.verifier import Verifier


class Wrong(Sampler):
    """A sampler that is wrong in one way."""

    fault = ""

    def sample(self, logits, rows):
        output = super().sample(logits, rows)
        logprobs = output.logprobs.clone()
        if self.fault == "negative zero":
            logprobs = torch.where(logprobs == 0.0, -0.0, logprobs)
        if self.fault == "negative zero alone" and len(logits) == 1:
            logprobs = torch.where(logprobs == 0.0, -0.0, logprobs)
        if self.fault == "number of rows":
            logprobs = logprobs * (1.0 + 1e-6 * (len(logits) % 2))
        if self.fault == "other sampling":
            logprobs = logprobs + 0.5 * bool(rows)
        if self.fault == "index":
            logprobs = logprobs - 1e-3 * torch.arange(len(logits))
        if self.fault == "everywhere":
            logprobs = logprobs - 0.25
        return SamplerOutput(output.tokens, logprobs)

    def score(self, logits, rows, targets):
        score = super().score(logits, rows, targets)
        return score - 0.25 if self.fault in ("score", "everywhere") else score

    def top(self, logits, rows, nums):
        tops = super().top(logits, rows, nums)
        if self.fault not in ("top", "everywhere"):
            return tops
        return [tuple((token, value - 0.25) for token, value in top) for top in tops]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def verifier_with(engine, fault: str) -> Verifier:
    sampler = Wrong(engine.runner.arch.vocab, engine.device)
    sampler.fault = fault
    return Verifier(engine.runner, sampler, ahead=False)


@pytest.mark.parametrize(
    "fault",
    [
        "negative zero",
        "negative zero alone",
        "number of rows",
        "other sampling",
        "index",
        "score",
        "top",
        "everywhere",  # a certain token has log-probability +0.0 by every way
    ],
)
def test_a_sampler_whose_ways_disagree_is_refused(engine, fault: str) -> None:
    with pytest.raises(GuaranteeLost, match="the sampler gives a row other bits"):
        try_sampler(verifier_with(engine, fault), torch.randn(8, engine.runner.arch.vocab))


def test_what_is_sampled_is_part_of_the_digest(engine) -> None:
    logits = torch.randn(8, engine.runner.arch.vocab, generator=torch.Generator().manual_seed(0))
    right = try_sampler(engine.verifier, logits)
    assert try_sampler(verifier_with(engine, ""), logits) == right
    assert try_sampler(engine.verifier, logits.roll(1, 1)) != right


def test_the_digest_does_not_depend_on_memory_frame_sizes_or_other_limits(engine) -> None:
    others = [
        tiny_engine(kv_memory=2**22),
        tiny_engine(kv_memory=4 * 12288),  # the smallest: four pages
        tiny_engine(frame_sizes=[4, 64]),
        tiny_engine(max_num_seqs=3),
    ]
    assert {other.report.digest for other in others} == {engine.report.digest}


def test_the_digest_covers_positions_up_to_the_longest_context(engine) -> None:
    far = ProbeText(engine.runner, 512).far()
    assert [frame.spans[0].start for frame in far] == [272, 496]
    assert [frame.spans[0].start for frame in ProbeText(engine.runner, 40_000).far()] == [272, 560, 39984]
    assert ProbeText(engine.runner, TEXT_LEN).far() == ()


def test_far_pieces_stand_past_one_and_two_splits_of_the_keys() -> None:
    triton = pytest.importorskip("samewise.kernels.attention.triton")
    split = triton.CONSTANTS.split
    assert split < FAR_STARTS[0] < 2 * split < FAR_STARTS[1]
    assert all(start % base.PAGE == 0 for start in FAR_STARTS)


def test_attention_that_differs_only_far_into_a_context_is_refused(engine, monkeypatch) -> None:
    """Rows past position 256 see the row before them in the frame."""
    real = type(engine.runner).frame

    def frame(runner, inputs):
        logits = real(runner, inputs).clone()
        if inputs.keep is None:
            far = inputs.positions.reshape(-1)[: len(logits)] > 256
            logits[far] += 1e-4 * logits.roll(1, 0)[far]
        return logits

    monkeypatch.setattr(type(engine.runner), "frame", frame)
    monkeypatch.setattr(type(engine.runner), "stage_frame", lambda self, spans, *_: _all_rows(self, spans))
    with pytest.raises(GuaranteeLost, match="placed differently"):
        probe(engine.verifier, max_model_len=engine.max_model_len)


def _all_rows(runner, spans):
    from samewise.execute.pack import pack_frame

    return pack_frame(spans, runner.frame_staging(sum(len(span.inputs) for span in spans))), None
