"""A tokenizer's configuration as JSON, as vLLM's `/tokenizer_info` shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samewise.openai.bodies import TokenizerInfo
from samewise.openai.errors import ApiError

PLACES = ("name_or_path", "_dir", "_file", "_path")
"""Ends of names whose values say where files of this machine lie."""
INTERNALS = frozenset({"backend", "is_local", "local_files_only"})
"""What transformers adds to a tokenizer's configuration while it loads it."""
ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""What a configuration says of an added token."""


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    """What the tokenizer was made with, its class, and its chat template. 404 where there is no tokenizer."""
    if tokenizer is None:
        raise ApiError("this model has no tokenizer", status=404, param="url", code="not_found")
    given = dict(getattr(tokenizer, "init_kwargs", None) or {})
    special = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    shown = {name for name in given if not name.endswith(PLACES)} - INTERNALS
    values = _as_json({name: value for name, value in given.items() if name in shown})
    if added := getattr(tokenizer, "added_tokens_decoder", None):
        values["added_tokens_decoder"] = {
            str(token_id): {name: getattr(token, name) for name in ADDED} for token_id, token in added.items()
        }
    info: TokenizerInfo = special | values | {"tokenizer_class": type(tokenizer).__name__}
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        info["chat_template"] = template
    return info


def _as_json(value: Any) -> Any:
    """The value as JSON: added tokens as their text, what JSON does not have as its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return str(getattr(value, "content", value))


__all__ = ["ADDED", "INTERNALS", "PLACES", "tokenizer_info"]
