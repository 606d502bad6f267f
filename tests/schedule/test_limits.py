"""Limits: which requests can never run, and what the refusal says."""

import pytest
from fake_engine import make_limits

from samewise.errors import BadPrompt


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (0, 4, "the prompt is empty"),
        (60, 4, r"60 tokens and max_model_len is 60.*truncate_prompt_tokens"),
        (61, 0, r"61 tokens and max_model_len is 60"),
        (20, 40, r"grow to 60 tokens and the KV cache holds 36.*raise kv_memory"),
    ],
)
def test_a_request_that_could_never_run_is_refused_with_a_remedy(
    prompt_len: int, max_tokens: int, message: str
) -> None:
    with pytest.raises(BadPrompt, match=message) as refused:
        make_limits(num_pages=10 if max_tokens == 40 else 40).refuse_misfit(prompt_len, max_tokens)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(1, 0), (59, 1), (60, 0), (20, 40)])
def test_a_request_that_just_fits_is_not_refused(prompt_len: int, max_tokens: int) -> None:
    make_limits().refuse_misfit(prompt_len, max_tokens)


def test_the_longest_sequence_is_bounded_by_the_context_and_by_the_kv_cache() -> None:
    assert make_limits().longest == 60
    assert make_limits(num_pages=10).longest == 36
