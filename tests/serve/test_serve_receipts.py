"""Receipts through the server: asked for, kept for all, signed, and true."""

import json
from pathlib import Path
from typing import Any

from shop import CHAT, COMPLETIONS, go, shop

from samewise.jobs.audit import Auditor, Case, reciting
from samewise.receipts import store
from samewise.receipts import from_json
from samewise.receipts.signing import SigningKey, new_key
from samewise.serve.settings import ServeSettings
from samewise.testing import tiny_engine


def audited(found: list[Any]) -> set[str]:
    auditor = Auditor(tiny_engine(make_proposer=reciting, enable_prefix_caching=False, draft_tokens=4096))
    cases = [Case(str(i), from_json(one)) for i, one in enumerate(found)]
    return {finding.status.value for finding in auditor.audit(cases)}


def test_whoever_asks_gets_receipts_that_are_true() -> None:
    async def work() -> list[Any]:
        async with shop() as here:
            assert "receipt" not in await here.complete()
            one = await here.complete(receipt=True, temperature=0.9)
            many = await here.complete(["a", "b"], n=2, receipt=True, temperature=0.9, logprobs=2)
            chat = await here.chat(receipt=True, max_tokens=None, stop=["a", "e"])
            body = {"messages": [{"role": "user", "content": "hello"}], "receipt": True, "max_tokens": 6}
            streamed = await here.events(CHAT, body)
            (last,) = [event["receipt"] for event in streamed if "receipt" in event]
            whole = await here.post(CHAT, body)
            assert last == whole["receipt"]  # streamed or not, the same receipt, byte for byte
            return [one["receipt"], *many["receipt"], chat["receipt"], last]

    found = go(work())
    assert len(found) == 7
    assert audited(found) == {"same"}


def test_one_of_every_answer_is_kept(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    key = SigningKey.load(tmp_path / "key")
    settings = ServeSettings(receipts=tmp_path / "kept", signer=key, hide_prompts=True)

    async def work() -> None:
        async with shop(settings) as here:
            said = await here.complete("abc")
            assert "receipt" not in said
            await here.complete("abc")  # the same again: one receipt
            await here.complete("abc", verify=False)
            await here.events(COMPLETIONS, {"prompt": "def", "n": 2, "temperature": 1, "max_tokens": 4})

    go(work())
    found = [entry.receipt for entry in store.read([tmp_path / "kept"])]
    assert len(found) == 4
    for receipt in found:
        assert receipt is not None
        assert receipt.intact
        assert receipt.signature_valid
        assert receipt.signature is not None
        assert receipt.signature.key == key.public
        assert receipt.prompt_token_ids is None
    assert sorted(receipt.verified for receipt in found if receipt) == [False, True, True, True]


def test_no_answer_without_its_receipt(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def work() -> None:
        async with shop(ServeSettings(receipts=tmp_path / "file")) as here:
            status, error = await here.refusal(COMPLETIONS, {"prompt": "abc", "max_tokens": 2})
            assert (status, error["code"]) == (500, "receipt_failed")
            assert str(tmp_path) not in json.dumps(error)
            await here.quiet()

    go(work())
