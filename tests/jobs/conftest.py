"""An engine, an auditor of the same contract, and receipts of many random requests."""

import random

import pytest
from audit_cases import AUDITING, PROMPTS, random_params

from samewise import LLM
from samewise.jobs.audit import Auditor
from samewise.receipts import Receipt
from samewise.testing import tiny_engine


@pytest.fixture(scope="package")
def llm() -> LLM:
    return LLM.over(tiny_engine(eos=True))


@pytest.fixture(scope="package")
def auditor() -> Auditor:
    return Auditor(tiny_engine(eos=True, **AUDITING))


@pytest.fixture(scope="package")
def receipts(llm: LLM) -> list[Receipt]:
    """True receipts, of requests that were answered together."""
    rng = random.Random(11)
    params = [random_params(rng) for _ in range(60)]
    outputs = llm.generate([rng.choice(PROMPTS) for _ in params], params, use_tqdm=False)
    return [one for out, par in zip(outputs, params, strict=True) for one in llm.receipts(out, par)]
