"""Law 8, ordinary decoding does differ: unverified bits depend on the load, so the laws are not trivial."""

import pytest
from law_helpers import Case, Setup, other_requests, random_prompt, run_cases, sampled

from samewise.types import Sampling

# Wide enough that the matrix library picks another kernel for one row than for several.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
SETUP = Setup("llama", "cpu", "float32", 16)
PROMPTS = [random_prompt(n, n) for n in (3, 9, 17, 30)]


def bits(cases, *, num_others):
    """Tokens and log-probability bits of the cases, beside other requests that generate all the while.

    With torch's linears: the native ones keep their bits at any batch size.
    """
    engine = SETUP.engine(overrides=WIDE, enable_prefix_caching=False, linear="torch")
    others = other_requests(num_others, max_tokens=40, verify=cases[0].verify)
    outputs = run_cases(engine, [*others, *cases], arrivals=[0] * num_others + [4] * len(cases))
    return [(output.tokens, output.logprobs) for output in outputs[num_others:]]


@pytest.mark.parametrize("sampling", [Sampling(), sampled(3)], ids=["greedy", "sampled"])
def test_unverified_bits_depend_on_load_and_verified_bits_do_not(one_thread, sampling):
    for verify in (False, True):
        cases = [Case(f"{i}", prompt, sampling, 12, verify) for i, prompt in enumerate(PROMPTS)]
        alone = [bits([case], num_others=0)[0] for case in cases]
        loaded = bits(cases, num_others=7)
        num_differing = sum(a != b for a, b in zip(alone, loaded, strict=True))
        assert (num_differing == 0) == verify
