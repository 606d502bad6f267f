"""Random requests, forged receipts and audits, for the tests of the audit."""

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

from samewise import SamplingParams
from samewise.jobs.audit import Auditor, Case, Finding, make_recorded_tokens
from samewise.receipts import Receipt
from samewise.receipts.reader import from_body

AUDITING = {"make_proposer": make_recorded_tokens, "enable_prefix_caching": False, "draft_tokens": 4096}
PROMPTS = ("the", "abc", "once upon a time", "0123456789" * 4, "zz")


def random_params(rng: random.Random) -> SamplingParams:
    """A request with a few random parameters."""
    max_tokens = rng.choice([1, 2, 7, 16, 40])
    settings: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.3, 1.0, 1.7]),
        "max_tokens": max_tokens,
        "seed": rng.choice([None, 0, 2**64 - 1, -5, rng.getrandbits(40)]),
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    extras: dict[str, Callable[[], Any]] = {
        "top_k": lambda: rng.choice([1, 3, 50]),
        "top_p": lambda: rng.choice([0.2, 0.9]),
        "min_p": lambda: 0.05,
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "logit_bias": lambda: {rng.randrange(320): rng.uniform(-50, 50) for _ in range(3)},
        "bad_words": lambda: rng.sample(["a", "th", "zz", "e"], 2),
        "allowed_token_ids": lambda: rng.sample(range(320), 40),
        "stop_token_ids": lambda: rng.sample(range(320), 25),
        "stop": lambda: rng.sample([chr(c) for c in range(97, 123)], 6),
        "min_tokens": lambda: rng.randint(0, max_tokens),
        "ignore_eos": lambda: True,
        "include_stop_str_in_output": lambda: True,
        "logprobs": lambda: 2,
        "prompt_logprobs": lambda: 1,
    }
    for name in rng.sample(sorted(extras), rng.choice([0, 1, 2, 4])):
        settings[name] = extras[name]()
    return SamplingParams(**settings)


def audit_all(auditor: Auditor, receipts: Iterable[Receipt], **options: Any) -> list[Finding]:
    """Findings in the order of the receipts."""
    cases = [Case(str(i), receipt) for i, receipt in enumerate(receipts)]
    return sorted(auditor.audit(cases, **options), key=lambda finding: int(finding.where))


def forge(receipt: Receipt, change: Callable[[dict[str, Any]], object]) -> Receipt:
    """A receipt with a changed body and the digest of that body."""
    body = copy.deepcopy(receipt.body)
    change(body)
    return from_body(body)


def set_token(at: int, token: int, body: dict[str, Any]) -> None:
    """Change one token of a receipt's body."""
    body["output"]["token_ids"][at] = token
