"""Receipts: content, detection of changes, signatures, files."""

import base64
import copy
import json
import math
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM, SamplingParams, receipts
from samewise.contract import Contract
from samewise.errors import BadParameter, BadReceipt
from samewise.outputs import CompletionOutput, RequestMetrics, RequestOutput
from samewise.receipts import Receipt, loads, make, store
from samewise.receipts.digests import canonical_json, content_digest
from samewise.receipts.reader import from_body
from samewise.receipts.signing import SigningKey, new_key, read_public
from samewise.testing import tiny_engine
from samewise.types import Grammar

CONTRACT = Contract.of({"weights": "abc", "dtype": "float32"})
LOGPROBS = [-0.25, -1.5, -0.0, -math.inf]
PARAMS = SamplingParams(
    temperature=0.7, top_k=5, n=2, stop=["\ud800 and", "é"], stop_token_ids=[3], bad_words=["no"],
    logit_bias={7: 1.5, 2: -1}, allowed_token_ids=[1, 2, 3], max_tokens=4,
)  # fmt: skip


def make_choice(index: int = 0, **changes: Any) -> CompletionOutput:
    fields: dict[str, Any] = {
        "index": index, "text": "abcd", "token_ids": [1, 2, 3, 4], "cumulative_logprob": 0.0,
        "logprobs": None, "finish_reason": "length", "stop_reason": None,
        "token_logprobs": LOGPROBS, "seed": 2**63 + 5,
    }  # fmt: skip
    return CompletionOutput(**fields | changes)


def make_output(*choices: CompletionOutput) -> RequestOutput:
    metrics = RequestMetrics(0.0, None, None, 4, 0)
    return RequestOutput("7", None, [5, 6], None, list(choices), True, 0, CONTRACT.id, metrics)


def make_receipt(params: SamplingParams = PARAMS, *, hide_prompt: bool = False, **changes: Any) -> Receipt:
    settings = {"dtype": "float32", "frame_rows": 16}
    (receipt,) = make(
        make_output(make_choice(**changes)), params, contract=CONTRACT, model="tiny", settings=settings,
        hide_prompt=hide_prompt,
    )  # fmt: skip
    return receipt


# ---- writing and reading


def test_reading_a_written_receipt_gives_the_same_receipt() -> None:
    receipt = make_receipt()
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


def test_layout_of_the_json_does_not_matter() -> None:
    receipt = make_receipt()
    assert loads(json.dumps(json.loads(receipt.dumps()), indent=3)) == receipt


def test_every_choice_gets_a_receipt() -> None:
    both = make(
        make_output(make_choice(0), make_choice(1)), PARAMS, contract=CONTRACT, model="tiny", settings={}
    )
    assert [receipt.index for receipt in both] == [0, 1]


def test_receipt_does_not_depend_on_other_requests() -> None:
    params = SamplingParams(temperature=0.9, max_tokens=6)
    lines = []
    for prompts in (["x"], ["y", "x", "z"]):
        llm = LLM.over(tiny_engine())
        outputs = llm.generate(prompts, params, use_tqdm=False)
        (receipt,) = llm.receipts(outputs[prompts.index("x")], params)
        lines.append(receipt.dumps())
    assert lines[0] == lines[1]


def test_logprob_digest_is_sha256_of_float32_bits() -> None:
    receipt = make_receipt()
    bits = struct.pack("<4f", *LOGPROBS)
    assert receipt.logprob_digest == "sha256:" + sha256(bits).hexdigest()
    assert receipt.logprob_checks[2] == sha256(bits[8:12]).hexdigest()[:4]
    assert receipts.logprob_check(0.0) != receipts.logprob_check(-0.0)


def test_hidden_prompt_leaves_only_its_digest() -> None:
    shown, hidden = make_receipt(), make_receipt(hide_prompt=True)
    assert shown.prompt_token_ids == (5, 6)
    assert hidden.prompt_token_ids is None
    assert hidden.prompt_digest == shown.prompt_digest == receipts.prompt_digest([5, 6])
    assert hidden.prompt_len == 2
    assert loads(hidden.dumps()) == hidden


def test_receipt_records_the_seed_and_the_length_limit_that_applied() -> None:
    unlimited = SamplingParams(max_tokens=None)
    assert make_receipt(unlimited).params.max_tokens == 4  # ended by the context
    assert make_receipt(unlimited, finish_reason="stop").params.max_tokens is None
    # The context ended it before min_tokens.
    assert make_receipt(unlimited.clone(min_tokens=9)).params.max_tokens == 9
    assert make_receipt(unlimited).params.seed == 2**63 + 5


def test_unverified_answer_has_no_promise() -> None:
    receipt = make_receipt(PARAMS.clone(verify=False))
    assert not receipt.verified
    assert json.loads(receipt.dumps())["promise"].startswith("none")
    assert json.loads(make_receipt().dumps())["promise"] == receipts.PROMISE


def test_incomplete_answer_or_other_contract_is_refused() -> None:
    for reason in (None, "abort"):
        with pytest.raises(BadParameter, match="only complete answers"):
            make_receipt(finish_reason=reason)
    with pytest.raises(BadParameter, match="contract"):
        make(make_output(make_choice()), PARAMS, contract=Contract.of({}), model="tiny", settings={})


# ---- changes and damage


def leaf_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, entry in value.items() for leaf in leaf_paths(entry, (*path, name))]
    if isinstance(value, list) and value:
        return [leaf for i, entry in enumerate(value) for leaf in leaf_paths(entry, (*path, i))]
    return [path]


def change_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.125
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return 1


@pytest.mark.parametrize("leaf", leaf_paths(json.loads(make_receipt().dumps())), ids=str)
def test_any_changed_value_is_refused(leaf: tuple[Any, ...]) -> None:
    document = json.loads(make_receipt().dumps())
    holder = document
    for name in leaf[:-1]:
        holder = holder[name]
    holder[leaf[-1]] = change_value(holder[leaf[-1]])
    with pytest.raises(BadReceipt):
        loads(json.dumps(document))


def test_changed_receipt_is_readable_without_the_check() -> None:
    document = json.loads(make_receipt().dumps())
    document["params"]["seed"] += 1
    with pytest.raises(BadReceipt, match="changed after it was made"):
        loads(json.dumps(document))
    assert not loads(json.dumps(document), check=False).intact


def test_truncated_receipt_is_refused() -> None:
    line = make_receipt().dumps()
    for end in range(0, len(line), 7):
        with pytest.raises(BadReceipt):
            loads(line[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samewise_receipt": 2}, "version 2 .* reads version 1"),
        ({"samewise_receipt": "1"}, "version '1'"),
        ({"samewise_receipt": True}, "version True"),
        ({"samewise_receipt": 1.0}, "version 1.0"),
        ({"settings": {"frame_rows": [16]}}, "frame_rows="),
        ({"extra": 1}, "'extra' is unknown"),
        ({"model": 3}, "'model' is 3"),
        ({"settings": {"trust_remote_code": True}}, "trust_remote_code"),
        ({"promise": "everything"}, "promise"),
        ({"index": 2}, "choice 2 of 2"),
        ({"index": True}, "whole number"),
        ({"output": []}, "not an object"),
        ({"output": {"token_ids": [1, -1], "finish_reason": "stop", "stop_reason": None}}, "token ids"),
        ({"output": {"token_ids": [1], "finish_reason": "abort", "stop_reason": None}}, "'abort'"),
        ({"output": {"token_ids": [1], "finish_reason": "stop"}}, "'stop_reason' in 'output' is missing"),
        ({"logprobs": {"digest": "sha256:" + "0" * 64, "checks": "0000"}}, "4 tokens and 1 checksums"),
        ({"logprobs": {"digest": "x", "checks": "0000"}}, "'x' and not a SHA-256"),
        ({"logprobs": {"digest": "sha256:" + "0" * 64, "checks": "00zz"}}, "hexadecimal checksums"),
        ({"params": {"seed": 1, "temprature": 2}}, "did you mean 'temperature'"),
        ({"params": {"seed": None}}, "no seed"),
        ({"contract": {"id": "sw-1", "facts": {"a": "b"}}}, "the facts are those of"),
        (
            {"prompt": {"digest": "sha256:" + "0" * 64, "num_tokens": 1, "token_ids": [5]}},
            "prompt is not the one",
        ),
        ({"params": {"seed": 1, "prediction": "x"}}, "'prediction'"),
        ({"params": {"seed": 1, "grammar": {"kind": "regex", "text": "a", "note": 1}}}, "note"),
        ({"signature": {"algorithm": "rot13"}}, "not ed25519"),
        ({"digest": None}, "'digest' is None"),
    ],
)
def test_invalid_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadReceipt, match=message):
        loads(json.dumps(json.loads(make_receipt().dumps()) | change))


def object_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all objects of a receipt whose fields are named by the format."""
    if not isinstance(value, dict) or path[-1:] in [("facts",), ("logit_bias",)]:
        return []
    return [path, *(inner for name, entry in value.items() for inner in object_paths(entry, (*path, name)))]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


GRAMMAR_PARAMS = SamplingParams(grammar=Grammar.regex("[a-d]+"), max_tokens=4, n=2)
RECEIPTS = {"sampled": make_receipt(), "grammar": make_receipt(GRAMMAR_PARAMS)}


@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind, receipt in RECEIPTS.items() for path in object_paths(receipt.body)],
    ids=str,
)
def test_an_unknown_field_is_refused_at_any_depth_although_the_digest_fits(
    kind: str, path: tuple[Any, ...]
) -> None:
    body = copy.deepcopy(RECEIPTS[kind].body)
    at(body, path)["note"] = "approved by all"
    resealed = body | {"digest": content_digest(canonical_json(body))}
    with pytest.raises(BadReceipt, match="note"):
        loads(json.dumps(resealed))
    with pytest.raises(BadReceipt, match="note"):
        loads(json.dumps(resealed), check=False)


def wrong_types(value: Any) -> list[Any]:
    """Values that Python takes for equal, or converts, or that a loose reader would accept instead."""
    if isinstance(value, bool):
        return [int(value), float(value), str(value), None]
    if isinstance(value, int):
        return [float(value), str(value), *([bool(value)] if value in (0, 1) else [])]
    if isinstance(value, float):
        return [str(value), *([int(value)] if value.is_integer() else [])]
    return [[value], {"value": value}] if isinstance(value, str) else []


@pytest.mark.parametrize("leaf", leaf_paths(make_receipt().body), ids=str)
def test_a_value_of_another_type_is_refused_although_the_digest_fits(leaf: tuple[Any, ...]) -> None:
    for wrong in wrong_types(at(make_receipt().body, leaf)):
        body = copy.deepcopy(make_receipt().body)
        at(body, leaf[:-1])[leaf[-1]] = wrong
        with pytest.raises(BadReceipt):
            loads(json.dumps(body | {"digest": content_digest(canonical_json(body))}))


def test_numbers_that_overflow_are_refused() -> None:
    for number in ("1e999", "-1e999", "9" * 5000):
        with pytest.raises(BadReceipt):
            loads(make_receipt().dumps().replace('"temperature":0.7', f'"temperature":{number}'))


def test_values_that_nest_too_deeply_are_refused(tmp_path: Path) -> None:
    """JSON of 900 levels can be parsed, but not shown in a message from every depth of calls."""
    text = make_receipt(SamplingParams(logit_bias={1: 2.0})).dumps()
    assert '"logit_bias":{"1":2.0}' in text
    for levels in range(700, 1000):
        deep = "[" * levels + "]" * levels
        changed = text.replace('"logit_bias":{"1":2.0}', f'"logit_bias":{{"1":{deep}}}')
        with pytest.raises(BadReceipt):
            loads(changed)
        (tmp_path / "receipt.json").write_text(changed)
        (entry,) = store.read([tmp_path / "receipt.json"])
        assert entry.receipt is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"a": 1, "a": 2}', "[NaN]", "\x00", b"\xff"]
)
def test_other_json_is_not_a_receipt(text: str | bytes) -> None:
    with pytest.raises(BadReceipt):
        loads(text)


def test_receipt_of_a_version_with_fewer_parameters_is_readable() -> None:
    """The digest covers the stored body, not what this version would have written."""
    body = copy.deepcopy(make_receipt().body)
    del body["params"]["share"]
    assert loads(from_body(body).dumps()).params.share is True


# ---- signatures


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "server.key"
    new_key(path)
    return path


def test_signature_is_valid_and_deterministic(key_file: Path) -> None:
    key = SigningKey.load(key_file)
    receipt = loads(make_receipt().signed(key).dumps())
    assert receipt.signature is not None
    assert receipt.signature.key == key.public == read_public(f"{key_file}.pub") == read_public(key_file)
    assert receipt.signature_valid
    assert not make_receipt().signature_valid
    assert make_receipt().signed(key) == receipt  # ed25519 signatures are deterministic


def test_signature_is_invalid_for_another_body(key_file: Path) -> None:
    receipt = make_receipt().signed(SigningKey.load(key_file))
    body = copy.deepcopy(receipt.body)
    body["params"]["seed"] += 1
    forged = json.loads(from_body(body).dumps()) | {"signature": json.loads(receipt.dumps())["signature"]}
    read = loads(json.dumps(forged))
    assert read.intact
    assert not read.signature_valid
    forged["signature"]["value"] = "nonsense"
    assert not loads(json.dumps(forged)).signature_valid


def test_a_signature_has_one_text(key_file: Path) -> None:
    """Base64 has unused bits, so that several texts stand for one value."""
    signed = json.loads(make_receipt().signed(SigningKey.load(key_file)).dumps())
    for name in ("key", "value"):
        document = copy.deepcopy(signed)
        text = document["signature"][name]
        last = text.rstrip("=")[-1]
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        other = alphabet[alphabet.index(last) ^ 1]  # differs in a bit that is not read
        document["signature"][name] = text.rstrip("=")[:-1] + other + "=" * text.count("=")
        assert base64.b64decode(document["signature"][name]) == base64.b64decode(text)
        assert not loads(json.dumps(document)).signature_valid


@pytest.mark.parametrize("extra", [{"note": 1}, {"key": None}, {"value": True}, {"algorithm": "ED25519"}])
def test_a_signature_has_exactly_its_fields(key_file: Path, extra: dict[str, Any]) -> None:
    document = json.loads(make_receipt().signed(SigningKey.load(key_file)).dumps())
    document["signature"] |= extra
    with pytest.raises(BadReceipt):
        loads(json.dumps(document), check=False)


def test_private_keys_are_private_and_never_overwritten(key_file: Path, tmp_path: Path) -> None:
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


def test_other_key_types_are_refused(tmp_path: Path) -> None:
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


def test_receipts_are_read_from_files_folders_json_lines_and_responses(tmp_path: Path) -> None:
    first, second = make_receipt(), make_receipt(index=1)
    saved = store.save(tmp_path / "folder", first)
    assert store.save(tmp_path / "folder", first) == saved
    (tmp_path / "folder" / "deep").mkdir()
    lines = tmp_path / "folder" / "deep" / "all.jsonl"
    lines.write_text(f"{first.dumps()}\n\n{second.dumps()}\n{second.dumps()[:99]}")
    response = tmp_path / "folder" / "response.json"
    response.write_text(
        json.dumps({"id": "x", "choices": [{"receipt": json.loads(first.dumps())}]}, indent=1)
    )
    (tmp_path / "folder" / "notes.txt").write_text("not a receipt file")
    entries = list(store.read([tmp_path / "folder"]))
    assert {Path(entry.where).name: entry.receipt for entry in entries if entry.receipt} == {
        saved.name: first, "all.jsonl:1": first, "all.jsonl:3": second, "response.json": first
    }  # fmt: skip
    (truncated,) = [entry for entry in entries if entry.receipt is None]
    assert truncated.where.endswith("all.jsonl:4")
    assert "damaged" in truncated.error


def test_path_without_receipts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="is not there"):
        list(store.read([tmp_path / "none.json"]))
    with pytest.raises(BadParameter, match="holds no"):
        list(store.read([tmp_path]))
    (tmp_path / "other.json").write_text('{"a": [1, {"b": 2}]}')
    (entry,) = store.read([tmp_path])
    assert "no receipt" in entry.error
