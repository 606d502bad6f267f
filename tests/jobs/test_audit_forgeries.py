"""Audit: a changed receipt is recognised, and the first change is located."""

import json
import random
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from audit_cases import PROMPTS, audit_all, forge, set_token

from samewise import LLM, SamplingParams
from samewise.jobs.audit import Auditor, Status
from samewise.receipts import Receipt, loads, logprob_check
from samewise.receipts.receipt import UNRECORDED

# ---- forgeries with a digest of their own: the replay finds them


def test_position_of_a_changed_token_is_named(auditor: Auditor, receipts: list[Receipt]) -> None:
    rng, forged, positions = random.Random(1), [], []
    for receipt in receipts:
        for at in {0, len(receipt.token_ids) - 1, rng.randrange(len(receipt.token_ids))}:
            token = (receipt.token_ids[at] + rng.randrange(1, 320)) % 320
            forged.append(forge(receipt, partial(set_token, at, token)))
            positions.append(at)
    findings = audit_all(auditor, forged)
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, at) for at in positions
    ]
    assert "the receipt says token" in findings[0].details[0]


def test_token_outside_the_vocabulary_is_different(auditor: Auditor, receipts: list[Receipt]) -> None:
    bad = forge(receipts[0], partial(set_token, 0, 99_999))
    assert [(f.status, f.position) for f in audit_all(auditor, [bad])] == [(Status.DIFFERENT, 0)]


def test_position_of_changed_logprob_bits_is_named(auditor: Auditor, receipts: list[Receipt]) -> None:
    rng, forged, positions = random.Random(2), [], []
    for receipt in receipts:
        at = rng.randrange(len(receipt.token_ids))
        other = logprob_check(rng.random())

        def change_check(body: dict[str, Any], at: int = at, other: str = other) -> None:
            checks = body["logprobs"]["checks"]
            body["logprobs"]["checks"] = checks[: 4 * at] + other + checks[4 * at + 4 :]

        forged.append(forge(receipt, change_check))
        positions.append(at)
        forged.append(forge(receipt, lambda body: body["logprobs"].update(digest="sha256:" + "0" * 64)))
        positions.append(None)
    findings = audit_all(auditor, forged)
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, at) for at in positions
    ]
    assert "bits of its log-probability" in findings[0].details[0]


def test_shortened_answer_is_different(auditor: Auditor, receipts: list[Receipt]) -> None:
    rng, forged, positions = random.Random(3), [], []
    for receipt in receipts:
        keep = rng.randrange(len(receipt.token_ids))

        def cut(body: dict[str, Any], keep: int = keep) -> None:
            body["output"]["token_ids"] = body["output"]["token_ids"][:keep]
            body["logprobs"]["checks"] = body["logprobs"]["checks"][: 4 * keep]

        forged.append(forge(receipt, cut))
        positions.append(keep)
    findings = audit_all(auditor, forged)
    assert {finding.status for finding in findings} == {Status.DIFFERENT}
    for finding, keep in zip(findings, positions, strict=True):
        assert finding.position == keep
        assert "the replay goes on" in finding.details[0]


def test_extended_answer_is_different(auditor: Auditor, receipts: list[Receipt]) -> None:
    def add(body: dict[str, Any]) -> None:
        body["output"]["token_ids"].append(5)
        body["logprobs"]["checks"] += "0000"

    findings = audit_all(auditor, [forge(receipt, add) for receipt in receipts])
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, len(receipt.token_ids)) for receipt in receipts
    ]


OTHER_REASON = {"stop": "length", "length": "stop"}


@pytest.mark.parametrize(
    "change",
    [
        lambda output: {"finish_reason": OTHER_REASON[output["finish_reason"]]},
        lambda _: {"stop_reason": 300},
        lambda _: {"stop_reason": "!"},
    ],
)
def test_changed_finish_reason_is_different(
    auditor: Auditor, receipts: list[Receipt], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    def forged(receipt: Receipt) -> Receipt:
        return forge(receipt, lambda body: body["output"].update(change(body["output"])))

    findings = audit_all(auditor, [forged(receipt) for receipt in receipts])
    assert {finding.status for finding in findings} == {Status.DIFFERENT}


LONG_PARAMS = SamplingParams(temperature=1.3, seed=4, max_tokens=24, ignore_eos=True)
CHANGED_PARAMS: dict[str, Any] = {
    "seed": 5, "temperature": 0.2, "top_k": 1, "top_p": 0.01, "min_p": 0.9, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "repetition_penalty": 4.0, "max_tokens": 25, "bad_words": ["e", "a", "i"],
    "min_tokens": 24, "stop": ["e", "a", "i"], "stop_token_ids": list(range(0, 320, 9)),
    "logit_bias": {str(token): 9.0 for token in range(0, 320, 7)}, "allowed_token_ids": list(range(99)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CHANGED_PARAMS))
def test_changed_parameter_is_different_exactly_if_it_changes_the_answer(
    llm: LLM, auditor: Auditor, receipts: list[Receipt], name: str
) -> None:
    """Where the answer stays the same, the receipt is true of the changed request too."""
    outputs = llm.generate(list(PROMPTS), LONG_PARAMS, use_tqdm=False)
    originals = [llm.receipts(out, LONG_PARAMS)[0] for out in outputs] + receipts[:10]
    if name == "min_tokens":
        originals = [one for one in receipts if one.params.max_tokens == 40]
    if name == "max_tokens":
        originals = [one for one in originals if one.params.min_tokens <= 25]
    forged = [
        forge(receipt, lambda body: body["params"].update({name: CHANGED_PARAMS[name]}))
        for receipt in originals
    ]
    prompts = [list(one.prompt_token_ids or ()) for one in forged]
    again = llm.generate(prompts, [one.params for one in forged], use_tqdm=False)
    expected = []
    for one, output in zip(forged, again, strict=True):
        same = llm.receipts(output, one.params)[one.index].body["output"] == one.body["output"]
        expected.append(Status.SAME if same else Status.DIFFERENT)
    assert [finding.status for finding in audit_all(auditor, forged)] == expected
    assert Status.DIFFERENT in expected


def test_changed_seed_is_different(llm: LLM, auditor: Auditor) -> None:
    outputs = llm.generate(list(PROMPTS), LONG_PARAMS, use_tqdm=False)
    forged = [
        forge(llm.receipts(out, LONG_PARAMS)[0], lambda body, by=by: body["params"].update(seed=4 ^ by))
        for out in outputs
        for by in (1, 2, 1 << 63)
    ]
    assert {finding.status for finding in audit_all(auditor, forged)} == {Status.DIFFERENT}


def test_changed_token_limits_are_different_at_that_token(llm: LLM, auditor: Auditor) -> None:
    (output,) = llm.generate("the", LONG_PARAMS, use_tqdm=False)
    (receipt,) = llm.receipts(output, LONG_PARAMS)
    token = receipt.token_ids[9]
    for change in (
        {"logit_bias": {str(token): -100.0}},
        {"stop_token_ids": [token]},
        {"allowed_token_ids": [t for t in range(320) if t != token]},
        {"max_tokens": 10},
    ):
        (finding,) = audit_all(
            auditor, [forge(receipt, lambda body, change=change: body["params"].update(change))]
        )
        assert finding.status is Status.DIFFERENT
        assert finding.position is not None
        assert finding.position <= 10


def test_swapped_choice_or_prompt_is_different(llm: LLM, auditor: Auditor) -> None:
    params = LONG_PARAMS.clone(n=2)
    pair = llm.receipts(llm.generate("the", params, use_tqdm=False)[0], params)
    swapped = [forge(one, lambda body: body.update(index=1 - body["index"])) for one in pair]
    other = llm.receipts(llm.generate("thf", params, use_tqdm=False)[0], params)[0].body["prompt"]
    swapped.append(forge(pair[0], lambda body: body.update(prompt=other)))
    assert {finding.status for finding in audit_all(auditor, swapped)} == {Status.DIFFERENT}


# ---- changes that a replay may not see: the digest shows them


@pytest.mark.parametrize(
    "name", [entry.name for entry in fields(SamplingParams) if entry.name not in UNRECORDED]
)
def test_any_changed_parameter_is_altered(auditor: Auditor, receipts: list[Receipt], name: str) -> None:
    receipt = receipts[0]
    other: dict[str, Any] = {
        "n": 9, "stop": ["#"], "stop_token_ids": [0], "bad_words": ["#"], "logit_bias": {"0": 1.0},
        "allowed_token_ids": [1], "max_tokens": 999, "min_tokens": 1, "logprobs": 3, "prompt_logprobs": 3,
        "grammar": {"kind": "json_object", "text": ""}, "seed": 77, "truncate_prompt_tokens": 1, "top_k": 9,
        "truncation_side": "right", "logprob_token_ids": [3], "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    old = receipt.body["params"].get(name)
    new = other.get(name, (not old) if isinstance(old, bool) else 0.5)
    assert new != old
    document = json.loads(receipt.dumps())
    document["params"][name] = new
    if name == "verify":
        document["promise"] = "none: the request was not verified"
    (finding,) = audit_all(auditor, [loads(json.dumps(document), check=False)])
    assert finding.status is Status.ALTERED
    assert "changed after it was made" in finding.details[0]


def test_altered_receipt_is_replayed_too(auditor: Auditor, receipts: list[Receipt]) -> None:
    document = json.loads(receipts[0].dumps())
    document["output"]["token_ids"][0] ^= 1
    (finding,) = audit_all(auditor, [loads(json.dumps(document), check=False)])
    assert (finding.status, finding.position) == (Status.ALTERED, 0)
    assert len(finding.details) == 2
