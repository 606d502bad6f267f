"""What trainers send and expect: bodies of vLLM's, SGLang's, TRL's and prime-rl's training routes. No HTTP.

A request for tokens becomes a body of `/v1/completions` or `/v1/chat/completions`, so that it is checked as
any other; an answer becomes the shape that the client of its route reads.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.openai.errors import ApiError, invalid, unsupported
from samewise.openai.replies import MIN_LOGPROB, finite, usage
from samewise.outputs import CompletionOutput, Logprob, RequestOutput

Json = dict[str, Any]

PROCESSED = {"logprobs_mode": "processed_logprobs"}
"""TRL's and SGLang's trainers divide logits by the temperature, so log-probabilities are given so."""

RAW = {"logprobs_mode": "raw_logprobs"}
"""SGLang gives those of a prompt as the model has them, whatever the temperature."""

VLLM_NEUTRAL = ("output_kind", "detokenize", "skip_reading_prefix_cache", "bad_words_token_ids")
"""Sampling parameters of vLLM that change nothing here."""

SGLANG_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""SGLang's names of sampling parameters, where they are not vLLM's."""

SGLANG_NEUTRAL = ("no_stop_trim", "custom_params")

FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of the number formats that weights may have on the wire."""


def required(body: Mapping[str, Any], name: str, kind: type, text: str) -> Any:
    """A field of a body; ApiError where it is missing or of another type."""
    value = body.get(name)
    if value is None:
        raise ApiError(f"{name} is missing; give {text}", param=name, code="missing_required_parameter")
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ApiError(f"{name}: give {text}", param=name, code="invalid_type")
    return value


def as_object(body: Any) -> Json:
    """A body, which is a JSON object."""
    if not isinstance(body, dict):
        raise ApiError("the body is a JSON object", code="invalid_body")
    return body


def request_names(ids: Sequence[str]) -> set[str]:
    """Names that requests may have by which a trainer calls them: also an answer's id names its request."""
    return {*ids, *(one.removeprefix("chatcmpl-").removeprefix("cmpl-") for one in ids)}


# ---- token in, token out: vLLM's /inference/v1/generate


def token_request(body: Json) -> Json:
    """The body of a completion."""
    sampling = required(body, "sampling_params", dict, "an object of sampling parameters")
    token_ids = required(body, "token_ids", list, "a list of token ids")
    if body.get("features"):
        raise unsupported("features", "is not supported; text only")
    _refuse_stream(body)
    fields = {name: value for name, value in sampling.items() if name not in VLLM_NEUTRAL}
    return fields | {
        "prompt": token_ids, "return_token_ids": True, "cache_salt": body.get("cache_salt"),
        "model": body.get("model"),
    }  # fmt: skip


def token_reply(request_id: str, output: RequestOutput) -> Json:
    """vLLM's GenerateResponse, and the weights' version."""
    choices = [
        {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "logprobs": _chat_logprobs(choice),
            "seed": choice.seed,
        }
        | weights_of(choice)
        for choice in output.outputs
    ]
    prompt_logprobs = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = [
            None if entry is None else {str(t): _as_dict(one, len(entry)) for t, one in entry.items()}
            for entry in output.prompt_logprobs
        ]
    return {
        "request_id": request_id, "choices": choices, "prompt_logprobs": prompt_logprobs,
        "kv_transfer_params": None, "weights_version": output.weights_version,
        "system_fingerprint": output.contract, "usage": usage([output]),
    }  # fmt: skip


def weights_of(choice: CompletionOutput) -> Json:
    """Which tokens are of which weights, where there are several."""
    spans = [{"start": s.start, "contract": s.contract, "version": s.version} for s in choice.weights]
    return {"weights": spans} if len(spans) > 1 else {}


def _chat_logprobs(choice: CompletionOutput) -> Json | None:
    if choice.logprobs is None:
        return None
    content = []
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        ranked = sorted((one.rank, other) for other, one in entry.items() if one.rank is not None)
        tops = [_token(other, entry[other]) for _, other in ranked]
        content.append(_token(token, entry[token]) | {"top_logprobs": tops})
    return {"content": content}


def _token(token: int, logprob: Logprob) -> Json:
    return {"token": f"token_id:{token}", "logprob": finite(logprob.logprob), "bytes": None}


def _as_dict(logprob: Logprob, num: int) -> Json:
    rank, text = logprob.rank or num, logprob.decoded_token
    return {"logprob": finite(logprob.logprob), "rank": rank, "decoded_token": text}


# ---- SGLang's /generate, which slime sends


SGLANG_UNSUPPORTED = (
    "audio_data", "custom_logit_processor", "image_data", "input_embeds", "lora_path", "return_hidden_states",
    "return_routed_experts", "video_data",
)  # fmt: skip


def sglang_request(body: Json) -> tuple[Json, bool]:
    """The body of a completion, and whether the reply is a list."""
    _refuse_stream(body)
    for name in SGLANG_UNSUPPORTED:
        if body.get(name):
            raise unsupported(name, "is not supported")
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise invalid("input_ids", "give text or input_ids, one of them")
    prompt = text if input_ids is None else input_ids
    sampling = as_object(body.get("sampling_params") or {})
    fields: Json = {"max_tokens": 128, "return_token_ids": True} | PROCESSED
    for name, value in sampling.items():
        if name not in SGLANG_NEUTRAL and value is not None:
            fields[SGLANG_NAMES.get(name, name)] = value
    if body.get("return_logprob"):
        fields["logprobs"] = body.get("top_logprobs_num") or 0
        if sglang_start(body) is not None and _has_raw_prompt(fields):
            fields["prompt_logprobs"] = 0
            if fields["max_tokens"] == 0:
                fields |= RAW
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list | str)
    many = several or fields.get("n", 1) != 1
    return fields | {"prompt": prompt}, many


def _has_raw_prompt(fields: Json) -> bool:
    """Whether one request gives both: nothing is divided by a temperature, or nothing is generated."""
    return fields["max_tokens"] == 0 or fields.get("temperature") in (0, 1)


def sglang_scoring(body: Json, completion: Json) -> Json | None:
    """A request of its own for a prompt's log-probabilities, where those of the completion are others."""
    if sglang_start(body) is None or not body.get("return_logprob") or "prompt_logprobs" in completion:
        return None
    kept = ("prompt", "add_special_tokens", "truncate_prompt_tokens")
    fields = {name: completion[name] for name in kept if name in completion}
    return fields | {"max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True} | RAW


def sglang_names(body: Json) -> tuple[frozenset[str], tuple[str, ...]]:
    """The `rid` of a request, or of each of its prompts."""
    rid = body.get("rid") or None
    if isinstance(rid, str):
        return frozenset({rid}), ()
    if rid is not None and not (isinstance(rid, list) and all(isinstance(one, str) for one in rid)):
        raise invalid("rid", "give a text, or a list of texts, one for each prompt")
    return frozenset(), tuple(rid or ())


def sglang_start(body: Json) -> int | None:
    """The prompt's first token whose log-probability is asked for; None: of no prompt token."""
    start = body.get("logprob_start_len")
    if start is None or start == -1:
        return None
    if type(start) is not int or start < 0:
        raise invalid("logprob_start_len", "give the number of a token of the prompt, or -1: none")
    return start


def sglang_reply(
    output: RequestOutput, choice: CompletionOutput, version: str, start: int | None, scored: RequestOutput
) -> Json:
    """One answer. `start`: the first prompt token that is listed; SGLang gives no log-probability of it.

    `scored`: what has the log-probabilities of the prompt.
    """
    reason: Json = {"type": choice.finish_reason}
    if choice.finish_reason == "length":
        reason["length"] = len(choice.token_ids)
    elif choice.finish_reason == "stop":
        reason["matched"] = choice.stop_reason
    elif choice.finish_reason == "abort":
        reason["message"] = "Aborted"
    meta: Json = {
        "id": f"{output.request_id}-{choice.index}",
        "finish_reason": reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "weight_version": version,
        "system_fingerprint": output.contract,
        "seed": choice.seed,
    } | weights_of(choice)
    if choice.logprobs is not None:
        pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
        meta["output_token_logprobs"] = [[finite(e[t].logprob), t, None] for t, e in pairs]
        meta["output_top_logprobs"] = [
            [[finite(one.logprob), token, None] for token, one in entry.items() if one.rank is not None]
            for _, entry in pairs
        ]
    if start is not None and scored.prompt_logprobs is not None:
        listed = list(zip(scored.prompt_token_ids, scored.prompt_logprobs, strict=True))[start:]
        meta["input_token_logprobs"] = [
            [None if i == 0 else finite((e or {})[t].logprob), t, None] for i, (t, e) in enumerate(listed)
        ]
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


# ---- TRL's /generate/, /chat/ and /get_sequence_logprobs/

TRL_FIELDS = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs")


def trl_request(body: Json) -> list[Json]:
    """Bodies of completions, or of chats: one for /generate/, one per conversation for /chat/."""
    for name in ("images", "structured_outputs_regex", "guided_decoding_regex"):
        if body.get(name):
            raise unsupported(name, "is not supported here")
    fields: Json = {"max_tokens": 16, "temperature": 1.0, "logprobs": 0, "return_token_ids": True} | PROCESSED
    fields |= {name: body[name] for name in TRL_FIELDS if body.get(name) is not None}
    fields |= as_object(body.get("generation_kwargs") or {})
    if "truncate_prompt_tokens" in body:
        fields["truncate_prompt_tokens"] = body["truncate_prompt_tokens"]
    if "messages" not in body:
        return [fields | {"prompt": required(body, "prompts", list, "a list of prompts")}]
    fields["top_logprobs"] = fields.pop("logprobs")
    template = {"chat_template_kwargs": body.get("chat_template_kwargs") or None, "tools": body.get("tools")}
    conversations = required(body, "messages", list, "a list of conversations")
    return [fields | template | {"messages": one, "logprobs": True} for one in conversations]


def trl_reply(outputs: Sequence[RequestOutput]) -> Json:
    """Token ids and log-probabilities of all answers, prompt by prompt."""
    choices = [choice for output in outputs for choice in output.outputs]
    ranked = [[_by_value(entry) for entry in choice.logprobs or []] for choice in choices]
    return {
        "prompt_ids": [output.prompt_token_ids for output in outputs],
        "completion_ids": [choice.token_ids for choice in choices],
        "logprobs": [[[finite(value) for _, value in row] for row in rows] for rows in ranked],
        "logprob_token_ids": [[[token for token, _ in row] for row in rows] for rows in ranked],
        "seeds": [choice.seed for choice in choices],
        "weights_version": max((output.weights_version for output in outputs), default=0),
    }


def _by_value(entry: Mapping[int, Logprob]) -> list[tuple[int, float]]:
    """(token, value) by falling value."""
    return sorted(((token, one.logprob) for token, one in entry.items()), key=lambda pair: -pair[1])


def sequence_request(body: Json) -> tuple[Json, list[int], int]:
    """The body of a completion that scores sequences, the lengths of their prompts, and how many tops."""
    sequences = required(body, "sequences", list, "a list of lists of token ids")
    lengths = required(body, "prompt_lengths", list, "the length of each prompt")
    if not sequences or not all(isinstance(one, list) for one in sequences):
        raise invalid("sequences", "give a list of lists of token ids")
    if len(sequences) != len(lengths):
        raise invalid("prompt_lengths", f"{len(lengths)} for {len(sequences)} sequences; give one each")
    for sequence, length in zip(sequences, lengths, strict=True):
        if type(length) is not int or not 0 < length <= len(sequence):
            raise invalid("prompt_lengths", "give whole numbers from 1 to the length of each sequence")
    num = body.get("top_logprobs", 100)
    if type(num) is not int or num < 0:
        raise invalid("top_logprobs", "give a whole number, 0 or more")
    fields = {
        "prompt": sequences, "max_tokens": 0, "prompt_logprobs": num, "return_token_ids": True,
        "temperature": body.get("temperature", 1.0),
    }  # fmt: skip
    return fields | PROCESSED, lengths, num


def sequence_reply(outputs: Sequence[RequestOutput], lengths: Sequence[int], num: int) -> Json:
    """Log-probabilities of the tokens after each prompt: the likeliest ones, and the sequence's own."""
    reply: Json = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": [], "actual_token_ids": []}
    for output, length in zip(outputs, lengths, strict=True):
        entries = (output.prompt_logprobs or [])[length:]
        actual = output.prompt_token_ids[length:]
        rows = [
            _by_value({t: one for t, one in (e or {}).items() if one.rank is not None})[:num] for e in entries
        ]
        reply["logprobs"].append([_filled([finite(v) for _, v in row], num, MIN_LOGPROB) for row in rows])
        reply["logprob_token_ids"].append([_filled([t for t, _ in row], num, 0) for row in rows])
        own = [finite((e or {})[token].logprob) for e, token in zip(entries, actual, strict=True)]
        reply["actual_logprobs"].append([[value] for value in own])
        reply["actual_token_ids"].append([[token] for token in actual])
    return reply


def _filled(values: list[Any], length: int, value: Any) -> list[Any]:
    return values + [value] * (length - len(values))


# ---- weights


@dataclass(frozen=True, slots=True)
class Piece:
    """A named tensor from the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def piece_of(body: Json) -> Piece:
    """`{"name", "dtype", "shape", "data"}`; `data` is the tensor's bytes in base64."""
    name = required(body, "name", str, "the tensor's name in the state dict")
    dtype = required(body, "dtype", str, f"one of {', '.join(FLOATS)}").removeprefix("torch.")
    shape = required(body, "shape", list, "the tensor's shape")
    if dtype not in FLOATS:
        raise invalid("dtype", f"{dtype[:40]!r} is not one of {', '.join(FLOATS)}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise invalid("shape", "give a list of whole numbers")
    if body.get("data") is None:
        raise ApiError(
            "data is missing: without NCCL a tensor is sent in the body, its bytes in base64",
            param="data", code="missing_required_parameter",
        )  # fmt: skip
    try:
        data = base64.b64decode(required(body, "data", str, "base64"), validate=True)
    except (binascii.Error, ValueError):
        raise invalid("data", "is not base64") from None
    if len(data) != math.prod(shape) * FLOATS[dtype]:
        raise invalid("data", f"{len(data)} bytes are not a {dtype} tensor of shape {shape}")
    return Piece(name, dtype, tuple(shape), data)


def folder_of(body: Json) -> str | None:
    """The folder that an update names: `weight_dir`, also in `update_info`, or SGLang's `model_path`."""
    info = body.get("update_info")
    places = (body, as_object(info) if info is not None else {})
    names = ("weight_dir", "model_path", "path")
    for place in places:
        for name in names:
            if place.get(name) is not None:
                return str(required(place, name, str, "a folder of safetensors"))
    return None


def without_nccl(path: str) -> ApiError:
    """The answer of a route that needs NCCL."""
    return ApiError(
        f"{path}: there is no NCCL group here; send weights as a folder (/update_weights, "
        "/update_weights_from_disk) or in bodies (/update_named_param/)",
        status=501, code="unsupported_endpoint", param="url",
    )  # fmt: skip


def _refuse_stream(body: Json) -> None:
    if body.get("stream"):
        raise unsupported("stream", "is not supported here; use /v1/completions with return_token_ids")


__all__ = [
    "FLOATS",
    "Json",
    "Piece",
    "as_object",
    "folder_of",
    "piece_of",
    "request_names",
    "required",
    "sequence_reply",
    "sequence_request",
    "sglang_names",
    "sglang_reply",
    "sglang_request",
    "sglang_scoring",
    "sglang_start",
    "token_reply",
    "token_request",
    "trl_reply",
    "trl_request",
    "weights_of",
    "without_nccl",
]
