"""Law 8: ordinary decoding does differ, so the other laws are not empty."""

import pytest
from lawbook import Case, Setup, company, play, text, warm

from samewise.types import Sampling

# Wide enough that the matrix library picks another kernel for one row than for several.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPTS = [text(n, n) for n in (3, 9, 17, 30)]


@pytest.fixture(scope="module", params=[Setup("llama", "cpu", "float32", 16)], ids=str)
def wide(request, one_thread):
    return request.param


def logprobs(setup, cases, *, others):
    """Log-probability bits of the cases, beside others that generate all the while.

    With torch's own linears, as everybody has them: the native ones keep their bits at any batch size.
    """
    engine = setup.engine(overrides=WIDE, enable_prefix_caching=False, linear="torch")
    strangers = company(others, most=40, verify=cases[0].verify)
    heard = play(engine, [*strangers, *cases], arrivals=[0] * others + [4] * len(cases))
    return [(one.tokens, one.logprobs) for one in heard[others:]]


@pytest.mark.parametrize("sampling", [Sampling(), warm(3)], ids=["greedy", "warm"])
def test_unverified_bits_depend_on_load_and_verified_ones_do_not(wide, sampling):
    for verify in (False, True):
        cases = [Case(f"{i}", prompt, sampling, 12, verify) for i, prompt in enumerate(PROMPTS)]
        alone = [logprobs(wide, [case], others=0)[0] for case in cases]
        crowded = logprobs(wide, cases, others=7)
        differing = sum(a != b for a, b in zip(alone, crowded, strict=True))
        if verify:
            assert differing == 0
        else:
            assert differing > 0
