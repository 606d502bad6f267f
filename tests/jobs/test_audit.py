"""Audit: true receipts are found the same, and no lie gets through."""

import copy
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter
from samewise.jobs.audit import Auditor, Case, Finding, Status, audit_files, read_prompts, reciting
from samewise.receipts import store as ledger
from samewise.receipts.receipt import Receipt, loads, logprob_check, sealed
from samewise.receipts.signing import SigningKey, new_key
from samewise.testing import tiny_engine
from samewise.types import Grammar

AUDITING = {"make_proposer": reciting, "enable_prefix_caching": False, "draft_tokens": 4096}
WORDS = ("the", "abc", "once upon a time", "0123456789" * 4, "zz")


def random_params(rng: random.Random) -> SamplingParams:
    """Any request one could make, a little of everything."""
    most = rng.choice([1, 2, 7, 16, 40])
    settings: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.3, 1.0, 1.7]),
        "max_tokens": most,
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
        "min_tokens": lambda: rng.randint(0, most),
        "ignore_eos": lambda: True,
        "include_stop_str_in_output": lambda: True,
        "logprobs": lambda: 2,
        "prompt_logprobs": lambda: 1,
    }
    for name in rng.sample(sorted(extras), rng.choice([0, 1, 2, 4])):
        settings[name] = extras[name]()
    return SamplingParams(**settings)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.over(tiny_engine(eos=True))


@pytest.fixture(scope="module")
def auditor() -> Auditor:
    return Auditor(tiny_engine(eos=True, **AUDITING))


@pytest.fixture(scope="module")
def honest(llm: LLM) -> list[Receipt]:
    """Receipts of many random requests, answered together."""
    rng = random.Random(11)
    params = [random_params(rng) for _ in range(60)]
    outputs = llm.generate([rng.choice(WORDS) for _ in params], params, use_tqdm=False)
    return [one for out, par in zip(outputs, params, strict=True) for one in llm.receipts(out, par)]


def look(auditor: Auditor, found: Iterable[Receipt], **how: Any) -> list[Finding]:
    """Findings in the order of the receipts."""
    cases = [Case(str(i), receipt) for i, receipt in enumerate(found)]
    return sorted(auditor.audit(cases, **how), key=lambda finding: int(finding.where))


def lie(receipt: Receipt, change: Callable[[dict[str, Any]], object]) -> Receipt:
    """A receipt that says something else, sealed as if it had been made so."""
    body = copy.deepcopy(receipt.body)
    change(body)
    return sealed(body)


def _set_token(at: int, token: int, body: dict[str, Any]) -> None:
    body["output"]["token_ids"][at] = token


# ---- the truth


def test_what_is_true_is_found_the_same(auditor: Auditor, honest: list[Receipt]) -> None:
    before = auditor._desk.engine.scheduler.counters.frames
    findings = look(auditor, [loads(receipt.dumps()) for receipt in honest])
    assert [finding.status for finding in findings] == [Status.SAME] * len(honest)
    assert {receipt.finish_reason for receipt in honest} == {"stop", "length"}
    assert any(isinstance(receipt.stop_reason, str) for receipt in honest)
    assert any(isinstance(receipt.stop_reason, int) for receipt in honest)
    assert any(receipt.index for receipt in honest)
    # Nothing was generated token by token: a frame carries as many tokens as it has rows.
    tokens = sum(len(receipt.token_ids) + receipt.prompt_len for receipt in honest)
    assert auditor._desk.engine.scheduler.counters.frames - before < tokens / 30
    auditor._desk.engine.check()
    assert auditor._desk.engine.idle


def test_with_few_pages_it_preempts_and_finds_the_same(honest: list[Receipt]) -> None:
    small = Auditor(tiny_engine(eos=True, **AUDITING, kv_memory=2**17))
    findings = look(small, honest)
    assert {finding.status for finding in findings} == {Status.SAME}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_other_families_sampled_and_greedy(family: str) -> None:
    params = [SamplingParams(temperature=t, max_tokens=90, min_p=0.02) for t in (0, 0.8, 1.2)]
    llm = LLM.over(tiny_engine(family))
    outputs = llm.generate(["the", "quick", "brown"], params, use_tqdm=False)
    found = [llm.receipts(out, par)[0] for out, par in zip(outputs, params, strict=True)]
    findings = look(Auditor(tiny_engine(family, **AUDITING)), found)
    assert [finding.status for finding in findings] == [Status.SAME] * 3


def test_nothing_but_reading_the_prompt(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(max_tokens=0)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    assert [finding.status for finding in look(auditor, [receipt])] == [Status.SAME]


def test_an_answer_that_filled_the_context() -> None:
    params = SamplingParams(temperature=1, max_tokens=None, ignore_eos=True)
    llm = LLM.over(tiny_engine(max_model_len=48))
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    assert receipt.params.max_tokens == 45
    (finding,) = look(Auditor(tiny_engine(max_model_len=48, **AUDITING)), [receipt])
    assert finding.good


def test_answers_with_a_form(llm: LLM, auditor: Auditor) -> None:
    pytest.importorskip("llguidance")
    forms = [Grammar.regex("[a-z]{3,9}-[0-9]{2,30}"), Grammar.json_object(), Grammar.regex("(yes|no)")]
    params = [SamplingParams(temperature=1, max_tokens=24, grammar=form) for form in forms]
    outputs = llm.generate(["abc"] * 3, params, use_tqdm=False)
    found = [llm.receipts(out, par)[0] for out, par in zip(outputs, params, strict=True)]
    findings = look(auditor, [loads(receipt.dumps()) for receipt in found])
    assert [finding.status for finding in findings] == [Status.SAME] * 3
    other = {"kind": "regex", "text": "[0-9]+"}
    lies = [lie(receipt, lambda body: body["params"].update(grammar=other)) for receipt in found]
    lies += [lie(receipt, lambda body: body["params"].update(grammar=None)) for receipt in found]
    assert {finding.status for finding in look(auditor, lies)} == {Status.DIFFERENT}
    for token in (5, 319, 320, 99_999, 2**32 - 1):
        flip = partial(_set_token, 1, token)
        lies = [lie(one, flip) for one in found]
        findings = look(auditor, lies)
        assert [(f.status, f.position) for f in findings] == [(Status.DIFFERENT, 1)] * 3


def test_answers_nobody_guessed_for(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(max_tokens=40, speculate=False)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    before = auditor._desk.engine.scheduler.counters.frames
    (finding,) = look(auditor, [receipt])
    assert finding.good
    assert auditor._desk.engine.scheduler.counters.frames - before <= 3


# ---- lies, told as if they had been so from the start


def test_one_flipped_token_is_named(auditor: Auditor, honest: list[Receipt]) -> None:
    rng, lies, places = random.Random(1), [], []
    for receipt in honest:
        for at in {0, len(receipt.token_ids) - 1, rng.randrange(len(receipt.token_ids))}:
            token = (receipt.token_ids[at] + rng.randrange(1, 320)) % 320
            lies.append(lie(receipt, partial(_set_token, at, token)))
            places.append(at)
    findings = look(auditor, lies)
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, at) for at in places
    ]
    assert "the receipt says token" in findings[0].details[0]


def test_a_token_no_model_has(auditor: Auditor, honest: list[Receipt]) -> None:
    bad = lie(honest[0], partial(_set_token, 0, 99_999))
    assert [(f.status, f.position) for f in look(auditor, [bad])] == [(Status.DIFFERENT, 0)]


def test_one_changed_bit_of_a_logprob_is_named(auditor: Auditor, honest: list[Receipt]) -> None:
    rng, lies, places = random.Random(2), [], []
    for receipt in honest:
        at = rng.randrange(len(receipt.token_ids))
        other = logprob_check(rng.random())

        def bend(body: dict[str, Any], at: int = at, other: str = other) -> None:
            checks = body["logprobs"]["checks"]
            body["logprobs"]["checks"] = checks[: 4 * at] + other + checks[4 * at + 4 :]

        lies.append(lie(receipt, bend))
        places.append(at)
        lies.append(lie(receipt, lambda body: body["logprobs"].update(digest="sha256:" + "0" * 64)))
        places.append(None)
    findings = look(auditor, lies)
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, at) for at in places
    ]
    assert "bits of its log-probability" in findings[0].details[0]


def test_a_cut_answer_is_named(auditor: Auditor, honest: list[Receipt]) -> None:
    rng, lies, places = random.Random(3), [], []
    for receipt in honest:
        keep = rng.randrange(len(receipt.token_ids))

        def cut(body: dict[str, Any], keep: int = keep) -> None:
            body["output"]["token_ids"] = body["output"]["token_ids"][:keep]
            body["logprobs"]["checks"] = body["logprobs"]["checks"][: 4 * keep]

        lies.append(lie(receipt, cut))
        places.append(keep)
    findings = look(auditor, lies)
    assert {finding.status for finding in findings} == {Status.DIFFERENT}
    for finding, keep in zip(findings, places, strict=True):
        assert finding.position == keep
        assert "the replay goes on" in finding.details[0]


def test_an_answer_with_more_at_its_end(auditor: Auditor, honest: list[Receipt]) -> None:
    def add(body: dict[str, Any]) -> None:
        body["output"]["token_ids"].append(5)
        body["logprobs"]["checks"] += "0000"

    findings = look(auditor, [lie(receipt, add) for receipt in honest])
    assert [(finding.status, finding.position) for finding in findings] == [
        (Status.DIFFERENT, len(receipt.token_ids)) for receipt in honest
    ]


@pytest.mark.parametrize("change", [{"finish_reason": "abort"}, {"stop_reason": 300}, {"stop_reason": "!"}])
def test_another_ending(auditor: Auditor, honest: list[Receipt], change: dict[str, Any]) -> None:
    findings = look(auditor, [lie(receipt, lambda body: body["output"].update(change)) for receipt in honest])
    assert {finding.status for finding in findings} == {Status.DIFFERENT}


LONG = SamplingParams(temperature=1.3, seed=4, max_tokens=24, ignore_eos=True)
TELLING: dict[str, Any] = {
    "seed": 5, "temperature": 0.2, "top_k": 1, "top_p": 0.01, "min_p": 0.9, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "repetition_penalty": 4.0, "max_tokens": 25, "bad_words": ["e", "a", "i"],
    "min_tokens": 24, "stop": ["e", "a", "i"], "stop_token_ids": list(range(0, 320, 9)),
    "logit_bias": {str(token): 9.0 for token in range(0, 320, 7)}, "allowed_token_ids": list(range(99)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TELLING))
def test_a_changed_parameter_is_caught_if_it_changes_the_answer(
    llm: LLM, auditor: Auditor, honest: list[Receipt], name: str
) -> None:
    """And only then: otherwise the receipt is as true of the other request."""
    outputs = llm.generate(list(WORDS), LONG, use_tqdm=False)
    found = [llm.receipts(out, LONG)[0] for out in outputs] + honest[:10]
    if name == "min_tokens":
        found = [one for one in honest if one.params.max_tokens == 40]
    if name == "max_tokens":
        found = [one for one in found if one.params.min_tokens <= 25]
    lies = [lie(receipt, lambda body: body["params"].update({name: TELLING[name]})) for receipt in found]
    prompts = [list(told.prompt_token_ids or ()) for told in lies]
    again = llm.generate(prompts, [told.params for told in lies], use_tqdm=False)
    expected = []
    for told, output in zip(lies, again, strict=True):
        same = llm.receipts(output, told.params)[told.index].body["output"] == told.body["output"]
        expected.append(Status.SAME if same else Status.DIFFERENT)
    assert [finding.status for finding in look(auditor, lies)] == expected
    assert Status.DIFFERENT in expected


def test_another_seed_is_caught(llm: LLM, auditor: Auditor) -> None:
    outputs = llm.generate(list(WORDS), LONG, use_tqdm=False)
    lies = [
        lie(llm.receipts(out, LONG)[0], lambda body, by=by: body["params"].update(seed=4 ^ by))
        for out in outputs
        for by in (1, 2, 1 << 63)
    ]
    assert {finding.status for finding in look(auditor, lies)} == {Status.DIFFERENT}


def test_changed_bars_and_ends(llm: LLM, auditor: Auditor) -> None:
    (output,) = llm.generate("the", LONG, use_tqdm=False)
    (receipt,) = llm.receipts(output, LONG)
    said = receipt.token_ids[9]
    for change in (
        {"logit_bias": {str(said): -100}},
        {"stop_token_ids": [said]},
        {"allowed_token_ids": [t for t in range(320) if t != said]},
        {"max_tokens": 10},
    ):
        (finding,) = look(auditor, [lie(receipt, lambda body, change=change: body["params"].update(change))])
        assert finding.status is Status.DIFFERENT
        assert finding.position is not None
        assert finding.position <= 10


def test_another_choice_or_prompt(llm: LLM, auditor: Auditor) -> None:
    params = LONG.clone(n=2)
    pair = llm.receipts(llm.generate("the", params, use_tqdm=False)[0], params)
    swapped = [lie(one, lambda body: body.update(index=1 - body["index"])) for one in pair]
    other = llm.receipts(llm.generate("thf", params, use_tqdm=False)[0], params)[0].body["prompt"]
    swapped.append(lie(pair[0], lambda body: body.update(prompt=other)))
    assert {finding.status for finding in look(auditor, swapped)} == {Status.DIFFERENT}


# ---- lies that a replay cannot see: the seal does


@pytest.mark.parametrize("name", [entry.name for entry in fields(SamplingParams)])
def test_any_changed_parameter_is_caught(auditor: Auditor, honest: list[Receipt], name: str) -> None:
    receipt = honest[0]
    other: dict[str, Any] = {
        "n": 9, "stop": ["#"], "stop_token_ids": [0], "bad_words": ["#"], "logit_bias": {"0": 1.0},
        "allowed_token_ids": [1], "max_tokens": 999, "min_tokens": 1, "logprobs": 3, "prompt_logprobs": 3,
        "grammar": {"kind": "json_object", "text": ""}, "seed": 77, "truncate_prompt_tokens": 1, "top_k": 9,
    }  # fmt: skip
    old = receipt.body["params"].get(name)
    new = other.get(name, (not old) if isinstance(old, bool) else 0.5)
    assert new != old
    whole = json.loads(receipt.dumps())
    whole["params"][name] = new
    if name == "verify":
        whole["promise"] = "none: the request was not verified"
    (finding,) = look(auditor, [loads(json.dumps(whole), check=False)])
    assert finding.status is Status.ALTERED
    assert "changed after it was made" in finding.details[0]


def test_an_altered_receipt_is_replayed_all_the_same(auditor: Auditor, honest: list[Receipt]) -> None:
    whole = json.loads(honest[0].dumps())
    whole["output"]["token_ids"][0] ^= 1
    (finding,) = look(auditor, [loads(json.dumps(whole), check=False)])
    assert (finding.status, finding.position) == (Status.ALTERED, 0)
    assert len(finding.details) == 2


# ---- what is not replayed


def test_another_contract_is_explained(honest: list[Receipt]) -> None:
    other = Auditor(tiny_engine(eos=True, seed=1, frame_rows=32, **AUDITING))
    first = honest[:3]
    findings = look(other, first)
    assert {finding.status for finding in findings} == {Status.OTHER_CONTRACT}
    said = " | ".join(findings[0].details)
    assert "frame rows: 64 in the receipt, 32 here" in said
    assert "weights: memory:" in said
    forced = look(other, first, force=True)
    assert {finding.status for finding in forced} == {Status.DIFFERENT}
    assert "another contract" in forced[0].details[-1]


def test_forced_under_another_contract_that_gives_the_same(honest: list[Receipt]) -> None:
    dated = Auditor(tiny_engine(eos=True, date="2025-01-31", **AUDITING))
    (finding,) = look(dated, honest[:1], force=True)
    assert finding.good
    assert finding.details == (f"replayed under another contract, {dated.contract.id}",)


def test_no_promise(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(max_tokens=4, verify=False)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    (finding,) = look(auditor, [receipt])
    assert finding.status is Status.NO_PROMISE
    assert not finding.good


def test_a_hidden_prompt_has_to_be_given(llm: LLM, auditor: Auditor, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    prompts: list[Any] = ["abc", [4, 5, 6], llm.chat_prompt(chat)]
    params = SamplingParams(max_tokens=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [llm.receipts(out, params, hide_prompt=True)[0] for out in outputs]
    assert {finding.status for finding in look(auditor, found)} == {Status.UNREADABLE}
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [*prompts[:2], chat, "another"])))
    findings = look(auditor, found, prompts=read_prompts(path))
    assert [finding.status for finding in findings] == [Status.SAME] * 3
    path.write_text('"a"\n{')
    with pytest.raises(BadParameter, match="line 2"):
        read_prompts(path)
    with pytest.raises(BadParameter, match="cannot read"):
        read_prompts(tmp_path / "none")


def test_what_this_model_cannot_do(auditor: Auditor, honest: list[Receipt]) -> None:
    bad = lie(honest[0], lambda body: body["params"].update(stop_token_ids=[5000]))
    (finding,) = look(auditor, [bad])
    assert finding.status is Status.UNREADABLE
    assert "5000" in finding.details[0]


def test_signatures(auditor: Auditor, honest: list[Receipt], tmp_path: Path) -> None:
    new_key(tmp_path / "a")
    new_key(tmp_path / "b")
    ours, theirs = SigningKey.load(tmp_path / "a"), SigningKey.load(tmp_path / "b")
    plain = honest[0]
    stolen = json.loads(plain.signed(ours).dumps())
    stolen["output"]["token_ids"][0] ^= 1
    found = [plain, plain.signed(ours), plain.signed(theirs), loads(json.dumps(stolen), check=False)]
    statuses = [finding.status for finding in look(auditor, found, signed_by=ours.public)]
    assert statuses == [Status.NOT_SIGNED, Status.SAME, Status.NOT_SIGNED, Status.ALTERED]
    statuses = [finding.status for finding in look(auditor, found)]
    assert statuses == [Status.SAME, Status.SAME, Status.SAME, Status.ALTERED]


def test_an_ordinary_engine_will_not_do() -> None:
    with pytest.raises(BadParameter, match="reciting"):
        Auditor(tiny_engine())


def test_leaving_early_leaves_nothing_behind(auditor: Auditor, honest: list[Receipt]) -> None:
    found = auditor.audit([Case("x", receipt) for receipt in honest])
    next(found)
    found.close()  # type: ignore[attr-defined]
    while not auditor._desk.engine.idle:
        auditor._desk.step()
    auditor._desk.engine.check()


# ---- files, models and the command line


@pytest.fixture(scope="module")
def kept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of receipts made by two engines that were configured otherwise."""
    home = tmp_path_factory.mktemp("receipts")
    for rows, longest in ((16, 64), (32, 128)):
        with LLM(folder, device="cpu", kv_memory="4MiB", frame_rows=rows, max_model_len=longest) as llm:
            params = SamplingParams(temperature=0.8, max_tokens=12, n=2)
            for output in llm.generate(["abc", "def"], params, use_tqdm=False):
                for receipt in llm.receipts(output, params):
                    ledger.keep(home, receipt)
    return home


def test_the_model_is_loaded_as_the_receipt_says(kept: Path) -> None:
    findings = list(audit_files(list(ledger.read([kept])), kv_memory="4MiB"))
    assert [finding.status for finding in findings] == [Status.SAME] * 8
    assert len({finding.contract for finding in findings}) == 2


def test_a_model_that_is_gone(kept: Path, tmp_path: Path) -> None:
    findings = list(audit_files(list(ledger.read([kept])), model=str(tmp_path / "gone")))
    assert {finding.status for finding in findings} == {Status.UNREADABLE}
    assert "gone" in findings[0].details[0]


def test_no_engine_where_none_is_needed(kept: Path) -> None:
    findings = list(audit_files(list(ledger.read([kept])), signed_by="somebody", model="/not/there"))
    assert {finding.status for finding in findings} == {Status.NOT_SIGNED}
