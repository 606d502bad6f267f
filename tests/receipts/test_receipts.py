"""Receipts: what they say, that a change shows, and whose they are."""

import copy
import json
import math
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM, SamplingParams
from samewise.contract import Contract
from samewise.errors import BadParameter, BadReceipt
from samewise.outputs import CompletionOutput, RequestMetrics, RequestOutput
from samewise.receipts import receipt as receipts
from samewise.receipts import store as ledger
from samewise.receipts.receipt import Receipt, loads, make, sealed
from samewise.receipts.signing import SigningKey, new_key, read_public
from samewise.testing import tiny_engine

CONTRACT = Contract.of({"weights": "abc", "dtype": "float32"})
LOGPROBS = [-0.25, -1.5, -0.0, -math.inf]
PARAMS = SamplingParams(
    temperature=0.7, top_k=5, n=2, stop=["\ud800 and", "é"], stop_token_ids=[3], bad_words=["no"],
    logit_bias={7: 1.5, 2: -1}, allowed_token_ids=[1, 2, 3], max_tokens=4,
)  # fmt: skip


def choice(index: int = 0, **changes: Any) -> CompletionOutput:
    said: dict[str, Any] = {
        "index": index, "text": "abcd", "token_ids": [1, 2, 3, 4], "cumulative_logprob": 0.0,
        "logprobs": None, "finish_reason": "length", "stop_reason": None,
        "token_logprobs": LOGPROBS, "seed": 2**63 + 5,
    }  # fmt: skip
    return CompletionOutput(**said | changes)


def output(*choices: CompletionOutput) -> RequestOutput:
    metrics = RequestMetrics(0.0, None, None, 4, 0)
    return RequestOutput("7", None, [5, 6], None, list(choices), True, 0, CONTRACT.id, metrics)


def one(params: SamplingParams = PARAMS, *, hide_prompt: bool = False, **changes: Any) -> Receipt:
    settings = {"dtype": "float32", "frame_rows": 16}
    (receipt,) = make(
        output(choice(**changes)), params, contract=CONTRACT, model="tiny", settings=settings,
        hide_prompt=hide_prompt,
    )  # fmt: skip
    return receipt


# ---- out and in


def test_it_comes_back_as_it_was_written() -> None:
    receipt = one()
    line = receipt.dumps()
    back = loads(line)
    assert back == receipt
    assert back.dumps() == line
    assert "\n" not in line
    assert line.isascii()
    assert back.params == PARAMS.clone(seed=2**63 + 5)
    assert back.intact
    assert back.verified
    assert back.token_ids == (1, 2, 3, 4)


def test_layout_is_of_no_account() -> None:
    receipt = one()
    assert loads(json.dumps(json.loads(receipt.dumps()), indent=3)) == receipt


def test_one_for_each_choice() -> None:
    both = make(output(choice(0), choice(1)), PARAMS, contract=CONTRACT, model="tiny", settings={})
    assert [receipt.index for receipt in both] == [0, 1]


def test_the_same_answer_gives_the_same_receipt() -> None:
    params = SamplingParams(temperature=0.9, max_tokens=6)
    lines = []
    for company in (["x"], ["y", "x", "z"]):
        llm = LLM.over(tiny_engine())
        outputs = llm.generate(company, params, use_tqdm=False)
        (receipt,) = llm.receipts(outputs[company.index("x")], params)
        lines.append(receipt.dumps())
    assert lines[0] == lines[1]


def test_logprob_bits_are_digested_as_documented() -> None:
    receipt = one()
    bits = struct.pack("<4f", *LOGPROBS)
    assert receipt.logprob_digest == "sha256:" + sha256(bits).hexdigest()
    assert receipt.logprob_checks[2] == sha256(bits[8:12]).hexdigest()[:4]
    assert receipts.logprob_check(0.0) != receipts.logprob_check(-0.0)


def test_a_prompt_may_be_kept_back() -> None:
    open_one, hidden = one(), one(hide_prompt=True)
    assert open_one.prompt_token_ids == (5, 6)
    assert hidden.prompt_token_ids is None
    assert hidden.prompt_digest == open_one.prompt_digest == receipts.prompt_digest([5, 6])
    assert hidden.prompt_len == 2
    assert loads(hidden.dumps()) == hidden


def test_what_was_decided_on_the_way_is_written_down() -> None:
    unlimited = SamplingParams(max_tokens=None)
    assert one(unlimited).params.max_tokens == 4  # ended by the context: that long was too long
    assert one(unlimited, finish_reason="stop").params.max_tokens is None
    assert one(unlimited.clone(min_tokens=9)).params.max_tokens == 9  # the context was shorter still
    assert one(unlimited).params.seed == 2**63 + 5


def test_an_unverified_answer_promises_nothing() -> None:
    receipt = one(PARAMS.clone(verify=False))
    assert not receipt.verified
    assert json.loads(receipt.dumps())["promise"].startswith("none")
    assert json.loads(one().dumps())["promise"] == receipts.PROMISE


def test_only_whole_answers_under_the_right_contract() -> None:
    for reason in (None, "abort"):
        with pytest.raises(BadParameter, match="whole answers"):
            one(finish_reason=reason)
    with pytest.raises(BadParameter, match="contract"):
        make(output(choice()), PARAMS, contract=Contract.of({}), model="tiny", settings={})


# ---- damage


def every_leaf(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, entry in value.items() for leaf in every_leaf(entry, (*path, name))]
    if isinstance(value, list) and value:
        return [leaf for i, entry in enumerate(value) for leaf in every_leaf(entry, (*path, i))]
    return [path]


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.125
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return 1


@pytest.mark.parametrize("leaf", every_leaf(json.loads(one().dumps())), ids=str)
def test_any_change_shows(leaf: tuple[Any, ...]) -> None:
    whole = json.loads(one().dumps())
    holder = whole
    for name in leaf[:-1]:
        holder = holder[name]
    holder[leaf[-1]] = changed(holder[leaf[-1]])
    with pytest.raises(BadReceipt):
        loads(json.dumps(whole))


def test_a_change_may_be_read_on_purpose() -> None:
    whole = json.loads(one().dumps())
    whole["params"]["seed"] += 1
    with pytest.raises(BadReceipt, match="changed after it was made"):
        loads(json.dumps(whole))
    assert not loads(json.dumps(whole), check=False).intact


def test_every_cut_is_an_error() -> None:
    line = one().dumps()
    for end in range(0, len(line), 7):
        with pytest.raises(BadReceipt):
            loads(line[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samewise_receipt": 2}, "version 2 .* reads version 1"),
        ({"samewise_receipt": "1"}, "version '1'"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"model": 3}, "'model' is 3"),
        ({"settings": {"trust_remote_code": True}}, "trust_remote_code"),
        ({"promise": "everything"}, "promise"),
        ({"index": 2}, "choice 2 of 2"),
        ({"index": True}, "whole number"),
        ({"output": []}, "not an object"),
        ({"output": {"token_ids": [1, -1], "finish_reason": "stop", "stop_reason": None}}, "token ids"),
        ({"logprobs": {"digest": "x", "checks": "0000"}}, "4 tokens and 1 checksums"),
        ({"params": {"seed": 1, "temprature": 2}}, "did you mean 'temperature'"),
        ({"params": {"seed": None}}, "no seed"),
        ({"contract": {"id": "sw-1", "facts": {"a": "b"}}}, "the facts are those of"),
        ({"prompt": {"digest": "sha256:0", "num_tokens": 1, "token_ids": [5]}}, "prompt is not the one"),
        ({"signature": {"algorithm": "rot13"}}, "not ed25519"),
        ({"digest": None}, "'digest' is None"),
    ],
)
def test_nonsense_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadReceipt, match=message):
        loads(json.dumps(json.loads(one().dumps()) | change))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"a": 1, "a": 2}', "[NaN]", "\x00", b"\xff"]
)
def test_what_is_no_receipt(text: str | bytes) -> None:
    with pytest.raises(BadReceipt):
        loads(text)


def test_parameters_unknown_then_do_not_spoil_old_receipts() -> None:
    """A receipt's digest is of what it says, not of what this version would have written."""
    body = copy.deepcopy(one().body)
    del body["params"]["share"]
    assert loads(sealed(body).dumps()).params.share is True


# ---- signatures


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "server.key"
    new_key(path)
    return path


def test_sign_and_check(key_file: Path) -> None:
    key = SigningKey.load(key_file)
    receipt = loads(one().signed(key).dumps())
    assert receipt.signature is not None
    assert receipt.signature.key == key.public == read_public(f"{key_file}.pub") == read_public(key_file)
    assert receipt.signature_good
    assert not one().signature_good
    assert one().signed(key) == receipt  # ed25519 has no noise of its own


def test_a_signature_holds_for_one_text_only(key_file: Path) -> None:
    receipt = one().signed(SigningKey.load(key_file))
    body = copy.deepcopy(receipt.body)
    body["params"]["seed"] += 1
    forged = json.loads(sealed(body).dumps()) | {"signature": json.loads(receipt.dumps())["signature"]}
    found = loads(json.dumps(forged))
    assert found.intact
    assert not found.signature_good
    forged["signature"]["value"] = "nonsense"
    assert not loads(json.dumps(forged)).signature_good


def test_keys_are_kept_safe(key_file: Path, tmp_path: Path) -> None:
    assert key_file.stat().st_mode & 0o077 == 0
    with pytest.raises(BadParameter, match="never overwritten"):
        new_key(key_file)
    with pytest.raises(BadParameter, match="cannot write"):
        new_key(tmp_path / "no" / "where")
    assert "PRIVATE" not in repr(SigningKey.load(key_file))
    with pytest.raises(BadParameter, match="no private ed25519 key"):
        SigningKey.load(f"{key_file}.pub")
    (tmp_path / "junk").write_text("junk")
    for read in (SigningKey.load, read_public):
        with pytest.raises(BadParameter, match="samewise keygen"):
            read(tmp_path / "junk")
        with pytest.raises(BadParameter, match="cannot read"):
            read(tmp_path / "none")


def test_other_kinds_of_key_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key = generate_private_key(SECP256R1())
    path = tmp_path / "ec"
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    with pytest.raises(BadParameter, match="no private ed25519 key"):
        SigningKey.load(path)
    locked = form.BestAvailableEncryption(b"x")
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    with pytest.raises(BadParameter, match="passphrase"):
        SigningKey.load(path)


# ---- on disk


def test_files_folders_lines_and_answers(tmp_path: Path) -> None:
    first, second = one(), one(index=1)
    kept = ledger.keep(tmp_path / "folder", first)
    assert ledger.keep(tmp_path / "folder", first) == kept  # once
    (tmp_path / "folder" / "deep").mkdir()
    lines = tmp_path / "folder" / "deep" / "all.jsonl"
    lines.write_text(f"{first.dumps()}\n\n{second.dumps()}\n{second.dumps()[:99]}")
    answer = tmp_path / "folder" / "response.json"
    answer.write_text(json.dumps({"id": "x", "choices": [{"receipt": json.loads(first.dumps())}]}, indent=1))
    (tmp_path / "folder" / "notes.txt").write_text("not looked at")
    found = list(ledger.read([tmp_path / "folder"]))
    assert {Path(entry.where).name: entry.receipt for entry in found if entry.receipt} == {
        kept.name: first, "all.jsonl:1": first, "all.jsonl:3": second, "response.json": first
    }  # fmt: skip
    (torn,) = [entry for entry in found if entry.receipt is None]
    assert torn.where.endswith("all.jsonl:4")
    assert "damaged" in torn.error


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="is not there"):
        list(ledger.read([tmp_path / "none.json"]))
    with pytest.raises(BadParameter, match="holds no"):
        list(ledger.read([tmp_path]))
    (tmp_path / "other.json").write_text('{"a": [1, {"b": 2}]}')
    (entry,) = ledger.read([tmp_path])
    assert "no receipt" in entry.error
