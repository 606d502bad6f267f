"""Receipts through the server: requested, stored, signed, and audited."""

import json
from pathlib import Path
from typing import Any

from served_app import CHAT, COMPLETIONS, run, served_app

from samewise.jobs.audit import Auditor, Case, make_recorded_tokens
from samewise.receipts import from_json, store
from samewise.receipts.signing import SigningKey, new_key
from samewise.serve.settings import ServeSettings
from samewise.testing import tiny_engine


def audit_statuses(receipts: list[Any]) -> set[str]:
    settings = {"make_proposer": make_recorded_tokens, "enable_prefix_caching": False, "draft_tokens": 4096}
    auditor = Auditor(tiny_engine(**settings))
    cases = [Case(str(i), from_json(one)) for i, one in enumerate(receipts)]
    return {finding.status.value for finding in auditor.audit(cases)}


def test_requested_receipts_pass_the_audit() -> None:
    async def work() -> list[Any]:
        async with served_app() as served:
            assert "receipt" not in await served.complete()
            one = await served.complete(receipt=True, temperature=0.9)
            many = await served.complete(["a", "b"], n=2, receipt=True, temperature=0.9, logprobs=2)
            chat = await served.chat(receipt=True, max_tokens=None, stop=["a", "e"])
            body = {"messages": [{"role": "user", "content": "hello"}], "receipt": True, "max_tokens": 6}
            streamed = await served.events(CHAT, body)
            (last,) = [event["receipt"] for event in streamed if "receipt" in event]
            whole = await served.post(CHAT, body)
            assert last == whole["receipt"]  # byte for byte
            return [one["receipt"], *many["receipt"], chat["receipt"], last]

    receipts = run(work())
    assert len(receipts) == 7
    assert audit_statuses(receipts) == {"same"}


def test_a_receipt_of_every_answer_is_stored(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    key = SigningKey.load(tmp_path / "key")
    settings = ServeSettings(receipts=tmp_path / "receipts", signer=key, hide_prompts=True)

    async def work() -> None:
        async with served_app(settings) as served:
            assert "receipt" not in await served.complete("abc")
            await served.complete("abc")  # equal answers have one receipt
            await served.complete("abc", verify=False)
            await served.events(COMPLETIONS, {"prompt": "def", "n": 2, "temperature": 1, "max_tokens": 4})

    run(work())
    receipts = [entry.receipt for entry in store.read([tmp_path / "receipts"])]
    assert len(receipts) == 4
    for receipt in receipts:
        assert receipt is not None
        assert receipt.intact
        assert receipt.signature_valid
        assert receipt.signature is not None
        assert receipt.signature.key == key.public
        assert receipt.prompt_token_ids is None
    assert sorted(receipt.verified for receipt in receipts if receipt) == [False, True, True, True]


def test_an_answer_whose_receipt_cannot_be_stored_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def work() -> None:
        async with served_app(ServeSettings(receipts=tmp_path / "file")) as served:
            status, error = await served.refusal(COMPLETIONS, {"prompt": "abc", "max_tokens": 2})
            assert (status, error["code"]) == (500, "receipt_failed")
            assert str(tmp_path) not in json.dumps(error)
            await served.check_idle()

    run(work())
