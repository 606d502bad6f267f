"""RequestOutput -> receipts. Host only."""

from __future__ import annotations

from dataclasses import fields

from samewise.contract import Contract
from samewise.errors import BadParameter
from samewise.outputs import CompletionOutput, RequestOutput
from samewise.params import SamplingParams
from samewise.receipts.digests import as_json, logprob_check, logprob_digest, prompt_digest
from samewise.receipts.reader import from_body
from samewise.receipts.receipt import (
    COMPLETE,
    KIND,
    NO_PROMISE,
    PROMISE,
    UNRECORDED,
    VERSION,
    Json,
    Receipt,
    Settings,
)
from samewise.receipts.signing import SigningKey


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
    """A receipt for each choice of a finished answer. `params` are those of the request.

    With `hide_prompt` the receipt holds only a digest of the prompt, and an audit needs the prompt beside it.
    """
    if output.contract != contract.id:
        raise BadParameter(
            f"the answer has the contract {output.contract}, not {contract.id}", param="contract"
        )
    if output.mixed:
        raise BadParameter(
            f"request {output.request_id} was answered under several contracts: its weights were replaced "
            "while it ran, so no single receipt can be checked",
            param="output",
        )
    receipts = [
        from_body(_body(output, choice, params, contract, model, settings, hide_prompt=hide_prompt))
        for choice in output.outputs
    ]
    return [receipt.signed(key) for receipt in receipts] if key is not None else receipts


def is_complete(output: RequestOutput) -> bool:
    """Whether `make` gives receipts: every choice is complete, and all tokens are of one contract."""
    return not output.mixed and all(choice.finish_reason in COMPLETE for choice in output.outputs)


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
    if choice.finish_reason not in COMPLETE:
        raise BadParameter(
            f"choice {choice.index} of request {output.request_id} is not complete "
            f"(finish_reason={choice.finish_reason!r}); only complete answers have receipts",
            param="output",
        )
    prompt: Json = {
        "digest": prompt_digest(output.prompt_token_ids),
        "num_tokens": len(output.prompt_token_ids),
        "token_ids": None if hide_prompt else list(output.prompt_token_ids),
    }
    version = {"weights_version": output.weights_version} if output.weights_version else {}
    return version | {
        KIND: VERSION,
        "promise": PROMISE if params.verify else NO_PROMISE,
        "contract": {"id": contract.id, "facts": dict(contract.facts)},
        "model": model,
        "settings": dict(settings),
        "prompt": prompt,
        "params": _params_json(params, choice),
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


def _params_json(params: SamplingParams, choice: CompletionOutput) -> Json:
    """All parameters that say what was asked for, with the seed that was used.

    A prediction and a priority are left out: no answer depends on them, and requests that differ in them have
    one receipt.

    An answer without `max_tokens` that was ended by the context records its length as `max_tokens`, so that a
    replay with a longer context ends at the same token.
    """
    max_tokens = params.max_tokens
    if max_tokens is None and choice.finish_reason == "length":
        max_tokens = max(len(choice.token_ids), params.min_tokens)
    resolved = params.clone(seed=choice.seed, max_tokens=max_tokens)
    names = [entry.name for entry in fields(resolved) if entry.name not in UNRECORDED]
    return {name: as_json(getattr(resolved, name)) for name in names}


__all__ = ["is_complete", "make"]
