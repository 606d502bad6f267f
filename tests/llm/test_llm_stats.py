"""What LLM.stats and an output report about requests, guesses and times."""

import json

from llm_cases import PROMPT, encode, generate, greedy

from samewise import LLM, SamplingParams
from samewise.testing import tiny_engine


def test_stats_have_the_documented_keys_and_count_requests(llm: LLM) -> None:
    before = llm.stats()
    generate(llm, PROMPT * 2, greedy(max_tokens=4, ignore_eos=True))
    generate(llm, PROMPT * 2, greedy(max_tokens=4, ignore_eos=True))
    stats = llm.stats()
    assert {
        *("requests", "finished", "aborted", "preempted", "prompt_tokens", "cached_tokens", "output_tokens"),
        *("unverified_tokens", "frames", "rows", "padded_rows", "guessed", "accepted", "rolled_back"),
        *("tokens_per_frame", "proposer", "running", "waiting", "pages", "pages_available", "pages_indexed"),
        *("contract", "uptime"),
    } <= stats.keys()
    assert stats["requests"] - before["requests"] == 2
    assert stats["finished"] - before["finished"] == 2
    assert stats["output_tokens"] - before["output_tokens"] == 8
    assert stats["prompt_tokens"] - before["prompt_tokens"] == 2 * len(encode(PROMPT * 2))
    assert stats["cached_tokens"] - before["cached_tokens"] >= 64
    assert (stats["running"], stats["waiting"]) == (0, 0)
    json.dumps(stats)


def test_an_output_names_its_contract_cached_tokens_and_times(llm: LLM) -> None:
    prompt = "a prompt of this test alone " * 3
    (cold,), (warm,) = generate(llm, prompt), generate(llm, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (len(encode(prompt)) - 1) // 16 * 16)
    assert cold.contract == llm.contract.id
    for out in (cold, warm):
        metrics = out.metrics
        assert metrics.num_output_tokens == len(out.outputs[0].token_ids)
        assert metrics.time_to_first_token is not None
        assert metrics.time_to_first_token >= 0
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.finished_time


def test_an_output_counts_guesses_by_proposer() -> None:
    verified = SamplingParams(n=2, temperature=0, max_tokens=24, ignore_eos=True)
    unverified = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, verify=False)
    llm = LLM.over(tiny_engine(proposer="ngram", clock=lambda: 0.0))  # drafts cost nothing
    out, plain = llm.generate([list(range(8)) * 4] * 2, [verified, unverified])
    metrics = out.metrics
    assert metrics.num_output_tokens == 48
    assert metrics.num_guessed_tokens == metrics.num_accepted_tokens + metrics.num_rolled_back_tokens > 0
    assert metrics.drafters == {"ngram": (metrics.num_guessed_tokens, metrics.num_accepted_tokens)}
    assert metrics.num_output_tokens == metrics.num_frames + metrics.num_accepted_tokens
    assert metrics.tokens_per_frame == 48 / metrics.num_frames
    assert metrics.recomputed_share == metrics.num_rolled_back_tokens / metrics.num_guessed_tokens
    assert plain.metrics.num_guessed_tokens == 0
    assert plain.metrics.tokens_per_frame is None
    assert not plain.metrics.drafters
