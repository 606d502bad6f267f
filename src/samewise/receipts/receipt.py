"""Receipts: what was asked, what was answered, and under which contract, so that anybody can check it.

A receipt is a function of the request and its answer: no time, no request id, so the same request gives
the same receipt, byte for byte. Its digest makes a change show; a signature says whose it is. Whether it
is *true* is for `samewise.jobs.audit` to find out.

Host only: this module has never heard of a tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, NoReturn

from samewise.contract import Contract
from samewise.errors import BadParameter, BadReceipt
from samewise.outputs import CompletionOutput, RequestOutput
from samewise.params import SamplingParams
from samewise.receipts.signing import ALGORITHM, Signature, SigningKey
from samewise.types import Grammar

KIND = "samewise_receipt"
VERSION = 1
PROMISE = "the same bits under this contract"
NO_PROMISE = "none: the request was not verified"
ENDINGS = ("stop", "length")
CHECK = 4
"""Hexadecimal digits of a position's checksum."""

SETTINGS = frozenset(
    {"attention", "compile", "date", "device", "dtype", "frame_rows", "linear", "max_model_len", "revision"}
)
"""What a receipt may tell an engine. Whether to run code that comes with a model is not among it."""

Json = dict[str, Any]
Settings = Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One answer to one request. `body` is what it says; the fields after it are read from there."""

    body: Json = field(repr=False)
    seal: str  # the digest written in the receipt; `digest` is what it should be
    signature: Signature | None = None
    contract: Contract
    model: str
    settings: Settings  # what an engine must be told to have this contract
    prompt_digest: str
    prompt_len: int
    prompt_token_ids: tuple[int, ...] | None  # None: only the digest was kept
    params: SamplingParams  # with the seed that was used
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprob_digest: str
    logprob_checks: tuple[str, ...]

    @property
    def verified(self) -> bool:
        """Whether the answer was made under the promise at all."""
        return self.params.verify

    @property
    def digest(self) -> str:
        """Of what the receipt says, however it is laid out."""
        return _sha256(canonical(self.body))

    @property
    def intact(self) -> bool:
        """Whether it says what it said when it was made."""
        return self.seal == self.digest

    def signed(self, key: SigningKey) -> Receipt:
        """The same receipt, signed."""
        return _read(self.body, self.seal, key.sign(_message(self.body)))

    @property
    def signature_good(self) -> bool:
        """Whether there is a signature, and its key's owner signed what the receipt says now."""
        return self.signature is not None and self.signature.good(_message(self.body))

    def as_json(self) -> Json:
        """As it stands in a file."""
        whole = self.body | {"digest": self.seal}
        if self.signature is not None:
            whole["signature"] = {"algorithm": ALGORITHM, **asdict(self.signature)}
        return whole

    def dumps(self) -> str:
        """One line of canonical JSON."""
        return canonical(self.as_json()).decode()


def make(
    output: RequestOutput,
    params: SamplingParams,
    *,
    contract: Contract,
    model: str,
    settings: Settings,
    hide_prompt: bool = False,
    key: SigningKey | None = None,
) -> list[Receipt]:
    """A receipt for each choice of a finished answer. `params` are those it was asked with.

    `hide_prompt` keeps only a digest of the prompt, which then has to be given to whoever audits.
    """
    if output.contract != contract.id:
        raise BadParameter(f"the answer has the contract {output.contract}, not {contract.id}")
    made = [
        sealed(_body(output, choice, params, contract, model, settings, hide_prompt=hide_prompt))
        for choice in output.outputs
    ]
    return [receipt.signed(key) for receipt in made] if key is not None else made


def whole(output: RequestOutput) -> bool:
    """Whether there is a receipt to be had: every choice ended by itself."""
    return all(choice.finish_reason in ENDINGS for choice in output.outputs)


def sealed(body: Json) -> Receipt:
    """A receipt that says this."""
    return _read(body, _sha256(canonical(body)), None)


def loads(text: str | bytes, *, check: bool = True) -> Receipt:
    """Read a receipt. With `check`, one that was changed after it was made is refused."""
    return from_json(parse(text), check=check)


def from_json(whole: Any, *, check: bool = True) -> Receipt:
    """Like `loads`, from JSON that was read already."""
    if not isinstance(whole, dict) or KIND not in whole:
        raise BadReceipt(f"this is no receipt: a receipt is a JSON object with {KIND!r}")
    if whole[KIND] != VERSION:
        raise BadReceipt(
            f"the receipt has version {whole[KIND]!r} and this samewise reads version {VERSION}; "
            "audit it with the samewise that made it, or a newer one"
        )
    body = {name: value for name, value in whole.items() if name not in ("digest", "signature")}
    receipt = _read(body, _text(whole, "digest"), _signature(whole.get("signature")))
    if check and not receipt.intact:
        raise BadReceipt(
            f"the receipt was changed after it was made: its digest is {receipt.seal}, "
            f"what it says has {receipt.digest}"
        )
    return receipt


def parse(text: str | bytes) -> Any:
    """JSON that says nothing twice and holds no number that is none."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise BadReceipt(f"this is no receipt, or a damaged one: {error}") from None


def canonical(value: Json) -> bytes:
    """The one way to write a JSON object down: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def prompt_digest(token_ids: Sequence[int]) -> str:
    """The digest a receipt keeps of a prompt."""
    return _sha256(struct.pack(f"<{len(token_ids)}I", *token_ids))


def logprob_digest(logprobs: Sequence[float]) -> str:
    """The digest of log-probability bits: float32, little-endian, in order."""
    return _sha256(struct.pack(f"<{len(logprobs)}f", *logprobs))


def logprob_check(logprob: float) -> str:
    """A short checksum of one log-probability's bits, so that an audit can say where they differ."""
    return sha256(struct.pack("<f", logprob)).hexdigest()[:CHECK]


# ---- writing


def _body(
    output: RequestOutput,
    choice: CompletionOutput,
    params: SamplingParams,
    contract: Contract,
    model: str,
    settings: Settings,
    *,
    hide_prompt: bool,
) -> Json:
    if choice.finish_reason not in ENDINGS:
        raise BadParameter(
            f"choice {choice.index} of request {output.request_id} has not ended by itself "
            f"(finish_reason={choice.finish_reason!r}); there is a receipt for whole answers only"
        )
    prompt: Json = {
        "digest": prompt_digest(output.prompt_token_ids),
        "num_tokens": len(output.prompt_token_ids),
        "token_ids": None if hide_prompt else list(output.prompt_token_ids),
    }
    return {
        KIND: VERSION,
        "promise": PROMISE if params.verify else NO_PROMISE,
        "contract": {"id": contract.id, "facts": dict(contract.facts)},
        "model": model,
        "settings": dict(settings),
        "prompt": prompt,
        "params": _plain_params(params, choice),
        "index": choice.index,
        "output": {
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        },
        "logprobs": {
            "digest": logprob_digest(choice.token_logprobs),
            "checks": "".join(map(logprob_check, choice.token_logprobs)),
        },
    }


def _plain_params(params: SamplingParams, choice: CompletionOutput) -> Json:
    """All of them, with what was decided on the way: the seed, and how long was too long."""
    most = params.max_tokens
    if most is None and choice.finish_reason == "length":
        most = max(len(choice.token_ids), params.min_tokens)
    resolved = params.clone(seed=choice.seed, max_tokens=most)
    return {entry.name: _plain(getattr(resolved, entry.name)) for entry in fields(resolved)}


def _plain(value: Any) -> Any:
    """As JSON would have it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return asdict(value) if isinstance(value, Grammar) else value


def _message(body: Json) -> bytes:
    return KIND.encode() + b"\n" + canonical(body)


def _sha256(content: bytes) -> str:
    return "sha256:" + sha256(content).hexdigest()


# ---- reading


def _read(body: Json, seal: str, signature: Signature | None) -> Receipt:
    known = {
        KIND,
        "promise",
        "contract",
        "model",
        "settings",
        "prompt",
        "params",
        "index",
        "output",
        "logprobs",
    }
    if odd := sorted(body.keys() ^ known):
        _damaged(f"{odd[0]!r} is {'unknown' if odd[0] in body else 'missing'}")
    prompt, output, logprobs = (_object(body, name) for name in ("prompt", "output", "logprobs"))
    params = _params(_object(body, "params"))
    if body["promise"] != (PROMISE if params.verify else NO_PROMISE):
        _damaged(f"its promise is {body['promise']!r} and verify is {params.verify}")
    prompt_ids = None if prompt.get("token_ids") is None else _ids(prompt, "token_ids")
    checks = _text(logprobs, "checks")
    receipt = Receipt(
        body=body, seal=seal, signature=signature, contract=_contract(_object(body, "contract")),
        model=_text(body, "model"), settings=_object(body, "settings"),
        prompt_digest=_text(prompt, "digest"), prompt_len=_count(prompt, "num_tokens"),
        prompt_token_ids=prompt_ids, params=params, index=_count(body, "index"),
        token_ids=_ids(output, "token_ids"), finish_reason=_text(output, "finish_reason"),
        stop_reason=_stop_reason(output), logprob_digest=_text(logprobs, "digest"),
        logprob_checks=tuple(checks[i : i + CHECK] for i in range(0, len(checks), CHECK)),
    )  # fmt: skip
    _refuse_nonsense(receipt)
    return receipt


def _refuse_nonsense(receipt: Receipt) -> None:
    """What no answer could have said."""
    if len(receipt.logprob_checks) != len(receipt.token_ids):
        _damaged(f"{len(receipt.token_ids)} tokens and {len(receipt.logprob_checks)} checksums")
    if receipt.index >= receipt.params.n:
        _damaged(f"choice {receipt.index} of {receipt.params.n}")
    if odd := sorted(receipt.settings.keys() - SETTINGS):
        _damaged(f"the setting {odd[0]!r} is unknown")
    ids = receipt.prompt_token_ids
    if ids is not None and (len(ids), prompt_digest(ids)) != (receipt.prompt_len, receipt.prompt_digest):
        _damaged("its prompt is not the one whose digest it gives")


def _once(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadReceipt("the receipt says the same thing twice; which one is meant?")
    return found


def _not_finite(text: str) -> NoReturn:
    raise BadReceipt(f"the receipt holds {text}, which is no number")


def _damaged(what: str) -> NoReturn:
    raise BadReceipt(f"the receipt is damaged: {what}")


def _object(holder: Json, name: str) -> Json:
    value = holder.get(name)
    if not isinstance(value, dict):
        _damaged(f"{name!r} is {value!r} and not an object")
    return value


def _text(holder: Json, name: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        _damaged(f"{name!r} is {value!r} and not a text")
    return value


def _count(holder: Json, name: str) -> int:
    value = holder.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _damaged(f"{name!r} is {value!r} and not a whole number")
    return value


def _ids(holder: Json, name: str) -> tuple[int, ...]:
    value = holder.get(name)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**32 for token in value):
        _damaged(f"{name!r} is not a list of token ids")
    return tuple(value)


def _stop_reason(output: Json) -> int | str | None:
    value = output.get("stop_reason")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
        _damaged(f"'stop_reason' is {value!r}")
    return value


def _contract(said: Json) -> Contract:
    facts = _object(said, "facts")
    if not all(isinstance(value, str) for value in facts.values()):
        _damaged("a fact of the contract is not a text")
    contract = Contract(tuple(sorted(facts.items())))
    if contract.id != said.get("id"):
        _damaged(f"its contract is {said.get('id')!r} and the facts are those of {contract.id}")
    return contract


def _params(said: Json) -> SamplingParams:
    if said.get("seed") is None:
        _damaged("it has no seed")
    grammar = said.get("grammar")
    try:
        given = {} if grammar is None else {"grammar": Grammar(**grammar)}
        return SamplingParams(**said | given)
    except (BadParameter, TypeError) as error:
        raise BadReceipt(f"the receipt's parameters cannot be read: {error}") from None


def _signature(said: Any) -> Signature | None:
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("algorithm") != ALGORITHM:
        _damaged(f"its signature is not {ALGORITHM}")
    return Signature(_text(said, "key"), _text(said, "value"))


__all__ = [
    "CHECK",
    "KIND",
    "NO_PROMISE",
    "PROMISE",
    "VERSION",
    "Receipt",
    "Settings",
    "canonical",
    "from_json",
    "loads",
    "logprob_check",
    "logprob_digest",
    "make",
    "parse",
    "prompt_digest",
    "sealed",
    "whole",
]
