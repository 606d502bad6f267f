"""JSON -> Receipt. Everything a receipt says is checked here. Host only."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from samewise.config import SETTINGS
from samewise.contract import Contract
from samewise.errors import BadParameter, BadReceipt
from samewise.params import SamplingParams
from samewise.receipts.digests import CHECK_DIGITS, as_json, canonical_json, content_digest, prompt_digest
from samewise.receipts.receipt import (
    COMPLETE,
    KIND,
    NO_PROMISE,
    PROMISE,
    UNRECORDED,
    VERSION,
    Json,
    Receipt,
)
from samewise.receipts.signing import ALGORITHM, Signature
from samewise.types import Grammar

FIELDS = frozenset(
    {KIND, "promise", "contract", "model", "settings", "prompt", "params", "index", "output", "logprobs"}
)
"""Fields of a receipt's body; each is required."""

OPTIONAL_FIELDS = frozenset({"weights_version"})
"""Further fields. The contract names the weights; the version only tells those of one process apart."""

INNER_FIELDS = {
    "contract": frozenset({"id", "facts"}),
    "prompt": frozenset({"digest", "num_tokens", "token_ids"}),
    "output": frozenset({"token_ids", "finish_reason", "stop_reason"}),
    "logprobs": frozenset({"digest", "checks"}),
    "signature": frozenset({"algorithm", "key", "value"}),
}
"""Fields of the objects inside a receipt; each is required, and no other is allowed: a replay checks nothing
of a field that it does not know, so a receipt with one would say more than an audit shows."""

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CHECKS = re.compile(rf"(?:[0-9a-f]{{{CHECK_DIGITS}}})*")

RECEIPT_SETTINGS = frozenset(
    {"attention", "compile", "date", "device", "dtype", "frame_rows", "linear", "max_model_len", "revision"}
)
"""Engine settings a receipt may carry. `trust_remote_code` is not among them: a receipt must not be able to
make an auditor run code that comes with a model."""


def loads(text: str | bytes, *, check: bool = True) -> Receipt:
    """Read a receipt. With `check`, one that was changed after it was made is refused."""
    return from_json(parse_json(text), check=check)


def from_json(document: Any, *, check: bool = True) -> Receipt:
    """Like `loads`, from parsed JSON."""
    try:
        return _from_json(document, check=check)
    except RecursionError:  # of `repr` too: messages quote values
        raise BadReceipt("this is no receipt, or a damaged one: it nests too deeply") from None


def _from_json(document: Any, *, check: bool) -> Receipt:
    if not isinstance(document, dict) or KIND not in document:
        raise BadReceipt(f"this is no receipt: a receipt is a JSON object with {KIND!r}", param=KIND)
    if type(document[KIND]) is not int or document[KIND] != VERSION:  # True and 1.0 equal 1
        raise BadReceipt(
            f"the receipt has version {document[KIND]!r} and this samewise reads version {VERSION}; "
            "audit it with the samewise that made it, or a newer one",
            param=KIND,
        )
    body = {name: value for name, value in document.items() if name not in ("digest", "signature")}
    receipt = _read(body, _text(document, "digest"), _signature(document.get("signature")))
    if check and not receipt.intact:
        raise BadReceipt(
            f"the receipt was changed after it was made: its digest is {receipt.stored_digest}, "
            f"the digest of its content is {receipt.digest}",
            param="digest",
        )
    return receipt


def from_body(body: Json) -> Receipt:
    """An unsigned receipt with this body and the digest of it."""
    return _read(body, content_digest(canonical_json(body)), None)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: a repeated key, NaN or an infinity is an error."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_not_finite, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise BadReceipt(f"this is no receipt, or a damaged one: {error}") from None


def _read(body: Json, digest: str, signature: Signature | None) -> Receipt:
    _refuse_other_fields(body, FIELDS | (OPTIONAL_FIELDS & body.keys()), None)
    contract, prompt, output, logprobs = (
        _inner(body, name) for name in ("contract", "prompt", "output", "logprobs")
    )
    params = _params(_object(body, "params"))
    if body["promise"] != (PROMISE if params.verify else NO_PROMISE):
        _damaged(f"its promise is {body['promise']!r} and verify is {params.verify}", "promise")
    prompt_ids = None if prompt["token_ids"] is None else _token_ids(prompt, "token_ids")
    checks = _matching(logprobs, "checks", CHECKS, "hexadecimal checksums")
    receipt = Receipt(
        body=body, stored_digest=digest, signature=signature, contract=_contract(contract),
        model=_text(body, "model"), settings=_settings(_object(body, "settings")),
        prompt_digest=_digest(prompt), prompt_len=_count(prompt, "num_tokens"),
        prompt_token_ids=prompt_ids, params=params, index=_count(body, "index"),
        token_ids=_token_ids(output, "token_ids"), finish_reason=_finish_reason(output),
        stop_reason=_stop_reason(output), logprob_digest=_digest(logprobs),
        logprob_checks=tuple(checks[i : i + CHECK_DIGITS] for i in range(0, len(checks), CHECK_DIGITS)),
        weights_version=_count(body, "weights_version") if "weights_version" in body else 0,
    )  # fmt: skip
    _refuse_contradictions(receipt)
    return receipt


def _refuse_other_fields(value: Json, fields: frozenset[str], inside: str | None) -> None:
    if odd := sorted(value.keys() ^ fields):
        place = "" if inside is None else f" in {inside!r}"
        _damaged(f"{odd[0]!r}{place} is {'unknown' if odd[0] in value else 'missing'}", inside or odd[0])


def _refuse_contradictions(receipt: Receipt) -> None:
    """Refuse fields that are valid one by one and cannot belong to one answer."""
    if len(receipt.logprob_checks) != len(receipt.token_ids):
        _damaged(f"{len(receipt.token_ids)} tokens and {len(receipt.logprob_checks)} checksums", "logprobs")
    if receipt.index >= receipt.params.n:
        _damaged(f"choice {receipt.index} of {receipt.params.n}", "index")
    ids = receipt.prompt_token_ids
    if ids is not None and (len(ids), prompt_digest(ids)) != (receipt.prompt_len, receipt.prompt_digest):
        _damaged("its prompt is not the one whose digest it gives", "prompt")


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise BadReceipt("the receipt has a JSON object in which a key stands twice")
    return result


def _not_finite(text: str) -> NoReturn:
    raise BadReceipt(f"the receipt holds {text}, which is not a finite number")


def _finite(text: str) -> float:
    """A number with a fraction or an exponent; json reads 1e999 as an infinity without a word."""
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _damaged(what: str, name: str) -> NoReturn:
    raise BadReceipt(f"the receipt is damaged: {what}", param=name)


def _object(parent: Json, name: str) -> Json:
    value = parent.get(name)
    if not isinstance(value, dict):
        _damaged(f"{name!r} is {value!r} and not an object", name)
    return value


def _inner(parent: Json, name: str) -> Json:
    """One of the objects of INNER_FIELDS, with exactly its fields."""
    value = _object(parent, name)
    _refuse_other_fields(value, INNER_FIELDS[name], name)
    return value


def _text(parent: Json, name: str) -> str:
    value = parent.get(name)
    if not isinstance(value, str):
        _damaged(f"{name!r} is {value!r} and not a text", name)
    return value


def _matching(parent: Json, name: str, pattern: re.Pattern[str], meaning: str) -> str:
    value = _text(parent, name)
    if pattern.fullmatch(value) is None:
        _damaged(f"{name!r} is {value[:80]!r} and not {meaning}", name)
    return value


def _digest(parent: Json) -> str:
    return _matching(parent, "digest", DIGEST, "a SHA-256")


def _count(parent: Json, name: str) -> int:
    value = parent.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _damaged(f"{name!r} is {value!r} and not a whole number", name)
    return value


def _token_ids(parent: Json, name: str) -> tuple[int, ...]:
    value = parent.get(name)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**32 for token in value):
        _damaged(f"{name!r} is not a list of token ids", name)
    return tuple(value)


def _finish_reason(output: Json) -> str:
    value = _text(output, "finish_reason")
    if value not in COMPLETE:
        _damaged(f"'finish_reason' is {value!r} and not one of {', '.join(COMPLETE)}", "finish_reason")
    return value


def _settings(value: Json) -> Json:
    if odd := sorted(value.keys() - RECEIPT_SETTINGS):
        _damaged(f"the setting {odd[0]!r} is unknown", "settings")
    try:
        for name, entry in value.items():
            SETTINGS[name].check(entry)
    except BadParameter as error:
        raise BadReceipt(f"the receipt's settings cannot be read: {error}", param="settings") from None
    return value


def _stop_reason(output: Json) -> int | str | None:
    value = output.get("stop_reason")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
        _damaged(f"'stop_reason' is {value!r}", "stop_reason")
    return value


def _contract(value: Json) -> Contract:
    facts = _object(value, "facts")
    if not all(isinstance(fact, str) for fact in facts.values()):
        _damaged("a fact of the contract is not a text", "contract")
    contract = Contract(tuple(sorted(facts.items())))
    if contract.id != value.get("id"):
        _damaged(f"its contract is {value.get('id')!r} and the facts are those of {contract.id}", "contract")
    return contract


def _params(value: Json) -> SamplingParams:
    """The parameters, each in the form in which receipts write it: `1` for `1.0` or `true` is an error."""
    if value.get("seed") is None:
        _damaged("it has no seed", "params")
    if odd := [name for name in UNRECORDED if name in value]:
        _damaged(f"{odd[0]!r} is no parameter of receipts", "params")
    grammar = value.get("grammar")
    try:
        parsed = {} if grammar is None else {"grammar": Grammar(**grammar)}
        params = SamplingParams(**value | parsed)
    except (BadParameter, TypeError, OverflowError) as error:
        raise BadReceipt(f"the receipt's parameters cannot be read: {error}", param="params") from None
    for name, given in value.items():
        written = as_json(getattr(params, name))
        if canonical_json({name: given}) != canonical_json({name: written}):
            _damaged(f"the parameter {name!r} is {given!r} and not {written!r}", "params")
    return params


def _signature(value: Any) -> Signature | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("algorithm") != ALGORITHM:
        _damaged(f"its signature is not {ALGORITHM}", "signature")
    _refuse_other_fields(value, INNER_FIELDS["signature"], "signature")
    return Signature(_text(value, "key"), _text(value, "value"))


__all__ = ["FIELDS", "INNER_FIELDS", "RECEIPT_SETTINGS", "from_body", "from_json", "loads", "parse_json"]
