"""Prompts, parameters and checks that the tests of LLM share."""

import json
from pathlib import Path
from typing import Any

from samewise import LLM, SamplingParams
from samewise.outputs import CompletionOutput, RequestOutput
from samewise.testing import byte_tokenizer, tiny_model

PAGE_BYTES = 12288  # of a KV page of the tiny llama
LETTERS = "abcdefgh "
PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
MESSAGES = [{"role": "user", "content": "hello"}]


def encode(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


def decode(llm: LLM, tokens: list[int]) -> str:
    return llm.get_tokenizer().decode(tokens)


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8} | given)


def greedy_letters(**given: Any) -> SamplingParams:
    """Greedy over a few letters, so that each token is one character of the text."""
    return greedy(allowed_token_ids=encode(LETTERS), **{"max_tokens": 16} | given)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def first_choice(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[str]]]:
    """Token ids and exact log-probabilities of every choice of every output."""
    return [(o.token_ids, [v.hex() for v in o.token_logprobs]) for out in outputs for o in out.outputs]


def assert_idle(llm: LLM) -> None:
    """No request runs or waits, and no page is held."""
    llm.engine.check()
    assert llm.engine.scheduler.idle
    stats = llm.stats()
    assert stats["pages_available"] == stats["pages"]
    assert not llm._loop._open


def save_model(
    folder: Path, *, shard: str = "5GB", swapped: bool = False, generation: Any = None, **overrides: Any
) -> str:
    """Save a tiny model and its tokenizer; `swapped`: the ids of two of its tokens are exchanged."""
    tiny_model(**overrides).save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    if swapped:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)
