"""Audit: true receipts are the same; what cannot be replayed is named."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from audit_cases import AUDITING, audit_all, forge, set_token
from huggingface_hub import errors

from samewise import LLM, SamplingParams
from samewise.contract import Contract
from samewise.errors import BadParameter, GuaranteeLost, MachineError, SamewiseError
from samewise.jobs import audit
from samewise.jobs.audit import Auditor, Case, Status, audit_files, read_prompts
from samewise.receipts import Receipt, SigningKey, loads, new_key, store
from samewise.receipts.store import Entry
from samewise.testing import tiny_engine
from samewise.text.grammar import Pace
from samewise.types import Grammar

# ---- true receipts


def test_true_receipts_are_the_same(auditor: Auditor, receipts: list[Receipt]) -> None:
    before = auditor._loop.engine.scheduler.counters.frames
    findings = audit_all(auditor, [loads(receipt.dumps()) for receipt in receipts])
    assert [finding.status for finding in findings] == [Status.SAME] * len(receipts)
    assert {receipt.finish_reason for receipt in receipts} == {"stop", "length"}
    assert any(isinstance(receipt.stop_reason, str) for receipt in receipts)
    assert any(isinstance(receipt.stop_reason, int) for receipt in receipts)
    assert any(receipt.index for receipt in receipts)
    # Recorded tokens are verified many per frame, not generated one by one.
    tokens = sum(len(receipt.token_ids) + receipt.prompt_len for receipt in receipts)
    assert auditor._loop.engine.scheduler.counters.frames - before < tokens / 30
    auditor._loop.engine.check()
    assert auditor._loop.engine.idle


def test_audit_with_preemption_finds_the_same(receipts: list[Receipt]) -> None:
    small = Auditor(tiny_engine(eos=True, **AUDITING, kv_memory=2**17))
    findings = audit_all(small, receipts)
    assert {finding.status for finding in findings} == {Status.SAME}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_receipts_of_other_model_families_are_the_same(family: str) -> None:
    params = [SamplingParams(temperature=t, max_tokens=90, min_p=0.02) for t in (0, 0.8, 1.2)]
    llm = LLM.over(tiny_engine(family))
    outputs = llm.generate(["the", "quick", "brown"], params, use_tqdm=False)
    originals = [llm.receipts(out, par)[0] for out, par in zip(outputs, params, strict=True)]
    findings = audit_all(Auditor(tiny_engine(family, **AUDITING)), originals)
    assert [finding.status for finding in findings] == [Status.SAME] * 3


def test_receipt_without_output_tokens_is_the_same(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(max_tokens=0)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    assert [finding.status for finding in audit_all(auditor, [receipt])] == [Status.SAME]


def test_receipt_of_an_answer_that_filled_the_context_is_the_same() -> None:
    params = SamplingParams(temperature=1, max_tokens=None, ignore_eos=True)
    llm = LLM.over(tiny_engine(max_model_len=48))
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    assert receipt.params.max_tokens == 45
    (finding,) = audit_all(Auditor(tiny_engine(max_model_len=48, **AUDITING)), [receipt])
    assert finding.is_same


def test_receipts_of_answers_under_a_grammar_are_audited(llm: LLM, auditor: Auditor) -> None:
    pytest.importorskip("llguidance")
    grammars = [Grammar.regex("[a-z]{3,9}-[0-9]{2,30}"), Grammar.json_object(), Grammar.regex("(yes|no)")]
    params = [SamplingParams(temperature=1, max_tokens=24, grammar=grammar) for grammar in grammars]
    outputs = llm.generate(["abc"] * 3, params, use_tqdm=False)
    originals = [llm.receipts(out, par)[0] for out, par in zip(outputs, params, strict=True)]
    findings = audit_all(auditor, [loads(receipt.dumps()) for receipt in originals])
    assert [finding.status for finding in findings] == [Status.SAME] * 3
    other = {"kind": "regex", "text": "[0-9]+"}
    forged = [forge(receipt, lambda body: body["params"].update(grammar=other)) for receipt in originals]
    forged += [forge(receipt, lambda body: body["params"].update(grammar=None)) for receipt in originals]
    assert {finding.status for finding in audit_all(auditor, forged)} == {Status.DIFFERENT}
    for token in (5, 319, 320, 99_999, 2**32 - 1):
        flip = partial(set_token, 1, token)
        forged = [forge(one, flip) for one in originals]
        findings = audit_all(auditor, forged)
        assert [(f.status, f.position) for f in findings] == [(Status.DIFFERENT, 1)] * 3


def test_receipt_of_an_answer_without_speculation_is_replayed_in_few_frames(
    llm: LLM, auditor: Auditor
) -> None:
    params = SamplingParams(max_tokens=40, speculate=False)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    before = auditor._loop.engine.scheduler.counters.frames
    (finding,) = audit_all(auditor, [receipt])
    assert finding.is_same
    assert auditor._loop.engine.scheduler.counters.frames - before <= 3


# ---- receipts that are not replayed


def test_facts_of_another_contract_are_named(receipts: list[Receipt]) -> None:
    other = Auditor(tiny_engine(eos=True, seed=1, max_model_len=256, **AUDITING))
    first = receipts[:3]
    findings = audit_all(other, first)
    assert {finding.status for finding in findings} == {Status.OTHER_CONTRACT}
    details = " | ".join(findings[0].details)
    assert "context: 512 in the receipt, 256 here" in details
    assert "weights: memory:" in details
    forced = audit_all(other, first, force=True)
    assert {finding.status for finding in forced} == {Status.DIFFERENT}
    assert "another contract" in forced[0].details[-1]


def test_forced_audit_under_another_contract_reports_it(receipts: list[Receipt]) -> None:
    shorter = Auditor(tiny_engine(eos=True, max_model_len=400, **AUDITING))
    (finding,) = audit_all(shorter, receipts[:1], force=True)
    assert finding.is_same
    assert finding.details == (f"replayed under another contract, {shorter.contract.id}",)


def test_unverified_answer_has_no_promise(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(max_tokens=4, verify=False)
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    (finding,) = audit_all(auditor, [receipt])
    assert finding.status is Status.NO_PROMISE
    assert not finding.is_same


def test_hidden_prompt_must_be_given(llm: LLM, auditor: Auditor, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    prompts: list[Any] = ["abc", [4, 5, 6], llm.chat_prompt(chat)]
    params = SamplingParams(max_tokens=4)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    originals = [llm.receipts(out, params, hide_prompt=True)[0] for out in outputs]
    assert {finding.status for finding in audit_all(auditor, originals)} == {Status.UNREADABLE}
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [*prompts[:2], chat, "another"])))
    findings = audit_all(auditor, originals, prompts=read_prompts(path))
    assert [finding.status for finding in findings] == [Status.SAME] * 3
    path.write_text('"a"\n{')
    with pytest.raises(BadParameter, match="line 2"):
        read_prompts(path)
    with pytest.raises(BadParameter, match="cannot read"):
        read_prompts(tmp_path / "none")


def test_request_the_model_cannot_run_is_unreadable(auditor: Auditor, receipts: list[Receipt]) -> None:
    bad = forge(receipts[0], lambda body: body["params"].update(stop_token_ids=[5000]))
    (finding,) = audit_all(auditor, [bad])
    assert finding.status is Status.UNREADABLE
    assert "5000" in finding.details[0]


def test_signature_of_the_given_key_is_required(
    auditor: Auditor, receipts: list[Receipt], tmp_path: Path
) -> None:
    new_key(tmp_path / "a")
    new_key(tmp_path / "b")
    ours, theirs = SigningKey.load(tmp_path / "a"), SigningKey.load(tmp_path / "b")
    plain = receipts[0]
    changed = json.loads(plain.signed(ours).dumps())
    changed["output"]["token_ids"][0] ^= 1
    signed = [plain, plain.signed(ours), plain.signed(theirs), loads(json.dumps(changed), check=False)]
    statuses = [finding.status for finding in audit_all(auditor, signed, signed_by=ours.public)]
    assert statuses == [Status.NOT_SIGNED, Status.SAME, Status.NOT_SIGNED, Status.ALTERED]
    statuses = [finding.status for finding in audit_all(auditor, signed)]
    assert statuses == [Status.SAME, Status.SAME, Status.SAME, Status.ALTERED]


def test_engine_without_recorded_tokens_is_refused() -> None:
    with pytest.raises(BadParameter, match="make_recorded_tokens"):
        Auditor(tiny_engine())


def test_unfinished_audit_leaves_no_sequence_running(auditor: Auditor, receipts: list[Receipt]) -> None:
    findings = auditor.audit([Case("x", receipt) for receipt in receipts])
    next(findings)
    findings.close()  # type: ignore[attr-defined]
    while not auditor._loop.engine.idle:
        auditor._loop.step()
    auditor._loop.engine.check()


# ---- files


@pytest.fixture(scope="module")
def receipt_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Receipts of two engines with different settings."""
    path = tmp_path_factory.mktemp("receipts")
    for frame_rows, max_model_len in ((16, 64), (32, 128)):
        with LLM(
            folder, device="cpu", kv_memory="4MiB", frame_rows=frame_rows, max_model_len=max_model_len
        ) as llm:
            params = SamplingParams(temperature=0.8, max_tokens=12, n=2)
            for output in llm.generate(["abc", "def"], params, use_tqdm=False):
                for receipt in llm.receipts(output, params):
                    store.save(path, receipt)
    return path


def test_engine_has_the_settings_of_the_receipt(receipt_folder: Path) -> None:
    findings = list(audit_files(list(store.read([receipt_folder])), kv_memory="4MiB"))
    assert [finding.status for finding in findings] == [Status.SAME] * 8
    assert len({finding.contract for finding in findings}) == 2


def test_missing_model_is_unreadable(receipt_folder: Path, tmp_path: Path) -> None:
    findings = list(audit_files(list(store.read([receipt_folder])), model=str(tmp_path / "gone")))
    assert {finding.status for finding in findings} == {Status.UNREADABLE}
    assert "gone" in findings[0].details[0]


@pytest.mark.parametrize("error", [MachineError, GuaranteeLost, BadParameter])
def test_receipt_whose_engine_cannot_be_built_ends_no_other_audit(
    receipt_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[SamewiseError]
) -> None:
    entries = list(store.read([receipt_folder]))
    build = audit.build

    def without_long_contexts(config: Any, **options: Any) -> Any:
        if config.max_model_len == 64:
            raise error("no such device")
        return build(config, **options)

    monkeypatch.setattr(audit, "build", without_long_contexts)
    findings = list(audit_files(entries, kv_memory="4MiB"))
    assert sorted(finding.status for finding in findings) == [Status.SAME] * 4 + [Status.UNREADABLE] * 4
    assert any("no such device" in finding.details[0] for finding in findings if finding.details)


def test_error_in_the_middle_of_a_replay_ends_no_other_audit(
    receipt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(store.read([receipt_folder]))
    step, calls = Auditor._step, 0

    def failing(self: Auditor, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MachineError("out of memory")
        return step(self, *given)

    monkeypatch.setattr(Auditor, "_step", failing)
    findings = list(audit_files(entries, kv_memory="4MiB"))
    assert sorted(finding.status for finding in findings) == [Status.SAME] * 4 + [Status.UNREADABLE] * 4
    assert {finding.where for finding in findings} == {entry.where for entry in entries}


@pytest.mark.parametrize(
    ("setting", "value", "detail"),
    [
        ("compile", True, "compile: off in the receipt, on here"),
        ("max_model_len", 4096, "context: 64 in the receipt, 4096 here"),
        ("dtype", "float16", "dtype: float32 in the receipt, float16 here"),
    ],
)
def test_settings_that_are_not_those_of_the_contract_build_no_engine(
    receipts: list[Receipt], monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, detail: str
) -> None:
    def change(body: dict[str, Any]) -> None:
        facts = body["contract"]["facts"] | {"compile": "off", "context": "64", "dtype": "float32"}
        own = {"compile": False, "max_model_len": 64, "dtype": "float32", "device": "cpu"}
        contract = Contract.of(facts)
        body["contract"] = {"id": contract.id, "facts": dict(contract.facts)}
        body["settings"] = body["settings"] | own | {setting: value}

    def refuse(*_: Any, **__: Any) -> Any:
        raise BadParameter("built", param="model")

    monkeypatch.setattr(audit, "build", refuse)
    entries = [Entry("bad", forge(receipts[0], change))]
    (finding,) = audit_files(entries)
    assert (finding.status, finding.details) == (Status.OTHER_CONTRACT, (detail,))
    for options in ({"force": True}, {setting: value}):
        (finding,) = audit_files(entries, model="smollm2", **options)
        assert "built" in str(finding.details)


def test_model_that_only_a_receipt_names_is_not_downloaded(
    receipts: list[Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append(local_files_only)
        raise errors.LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    entry = Entry("bad", forge(receipts[0], lambda body: body.update(model="org/any")))
    (finding,) = audit_files([entry])
    assert finding.status is Status.UNREADABLE
    assert "is not downloaded" in finding.details[0]
    assert asked == [True]
    list(audit_files([entry], model="org/any"))
    assert asked[1:] == [False]


def test_no_engine_is_loaded_without_a_replay(receipt_folder: Path) -> None:
    findings = list(
        audit_files(list(store.read([receipt_folder])), signed_by="another key", model="/not/there")
    )
    assert {finding.status for finding in findings} == {Status.NOT_SIGNED}


def test_receipt_whose_grammar_takes_too_long_to_follow_is_unreadable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar.lark('start: s\ns: s s | "a" | "b"')
    params = SamplingParams(temperature=1, max_tokens=24, min_tokens=9, grammar=grammar)
    originals = [llm.receipts(out, params)[0] for out in llm.generate(["a", "b"], params, use_tqdm=False)]
    statuses = []
    for pace in (audit.PACE, Pace(first=1e-7, per_token=1e-7)):
        monkeypatch.setattr(audit, "PACE", pace)
        findings = audit_all(Auditor(tiny_engine(eos=True, **AUDITING)), originals)
        statuses.append({finding.status for finding in findings})
    assert statuses == [{Status.SAME}, {Status.UNREADABLE}]
    assert {finding.details for finding in findings} == {(audit.SLOW_GRAMMAR,)}


def test_receipt_whose_grammar_takes_too_long_to_compile_is_unreadable(llm: LLM, auditor: Auditor) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, grammar=Grammar.json_schema({"type": "integer"}))
    (receipt,) = llm.receipts(llm.generate("abc", params, use_tqdm=False)[0], params)
    slow = Grammar.json_schema({"type": "integer", "multipleOf": 9999991})  # over 300 seconds
    text = json.dumps(receipt.body).replace(json.dumps(params.grammar.text), json.dumps(slow.text))
    forged = forge(receipt, lambda body: body.update(json.loads(text)))
    assert forged.params.grammar == slow
    (finding,) = audit_all(auditor, [forged])
    assert finding.status is Status.UNREADABLE
    assert "to compile" in finding.details[0]
