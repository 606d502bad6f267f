"""Whether this machine gives the bits that every machine must give: stored digests, computed again.

Kernels are tried on fixed inputs, then whole engines: tiny models, one for each kind of layer, answer fixed
requests, and everything they return is digested. Their weights come from an integer hash. The digests below
were made once and hold for every CPU, instruction set, number of threads, compiler and version of torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from samewise import machine
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.kernels.native import build as native_build
from samewise.kernels.native.expected import EXPECTED as EXPECTED_KERNELS
from samewise.llm.llm import LLM
from samewise.model.arch import inspect_model
from samewise.model.attention_binding import ATTENTION
from samewise.model.load import wrap_modules
from samewise.outputs import RequestOutput
from samewise.params import SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 5003,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip

TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # the families' own are beyond the vocabulary
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3 RoPE": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral, sliding window": ("mistral", {"sliding_window": 24}),
    "qwen3, norms over heads": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3, norms around sublayers": (
        "gemma3_text",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo2, norms after sublayers": ("olmo2", TOKENS),
    "phi3, part of a head turns": ("phi3", TOKENS | {"rope_parameters": PARTIAL_ROPE}),
    "granite, multipliers": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    ),
    "smollm3, a layer without RoPE": ("smollm3", TOKENS | {"no_rope_layers": [1, 1, 0]}),
}

EXPECTED_MODELS = {
    "llama, llama3 RoPE": "7c8305ab9a97a43a",
    "mistral, sliding window": "7f33cfb45f5a262b",
    "qwen3, norms over heads": "cc9ad0cb09557c1a",
    "gemma3, norms around sublayers": "4f0b3e72cd2c96f0",
    "olmo2, norms after sublayers": "a8ed96a69f1cb51c",
    "phi3, part of a head turns": "658ff7220600198a",
    "granite, multipliers": "1cec60cc3368d9d4",
    "smollm3, a layer without RoPE": "3441f33b48659f0e",
}
"""By model: the digest of its answers. Changes only with the engine's arithmetic (`ENGINE_VERSION`)."""


class Finding(NamedTuple):
    """One digest beside the stored one."""

    name: str
    expected: str
    digest: str

    @property
    def same(self) -> bool:
        """Whether this machine gave the stored bits."""
        return self.digest == self.expected


def check_portable() -> list[Finding]:
    """Every kernel and every model. Raises MachineError without a C++ compiler."""
    kernels = native_build.selftest(native_build.library(), threads=torch.get_num_threads())
    findings = [
        Finding(f"kernel: {name}", f"{digest:016x}", f"{kernels.get(name, 0):016x}")
        for name, digest in EXPECTED_KERNELS.items()
    ]
    for name, digest in EXPECTED_MODELS.items():
        findings.append(Finding(f"model: {name}", digest, model_digest(name)))
    return findings


def machine_summary() -> str:
    """What could have mattered and must not: CPU, threads, compiler, torch."""
    program, *options = native_build.find_compiler() or ["no compiler"]
    compiler = " ".join([Path(program).name, *options])
    flags = ", portable C++" if os.environ.get("SAMEWISE_PORTABLE") else ""
    return (
        f"{machine.cpu_facts()['cpu']} ({platform.machine()}), {torch.get_num_threads()} threads, "
        f"{compiler}{flags}, torch {torch.__version__}"
    )


def model_digest(name: str) -> str:
    """The digest of all that one of MODELS returns for fixed requests."""
    config = EngineConfig.of(
        model=name, device="cpu", dtype="float32", attention="native", linear="native", compile=False,
        kv_memory=32 << 20, max_num_seqs=4, proposer="ngram",
    )  # fmt: skip
    with LLM.over(Engine(hashed_model(name), config)) as llm:
        digest = hashlib.sha256()
        for output in llm.generate(list(PROMPTS), list(PARAMS), use_tqdm=False):
            digest.update(_described(output).encode())
        for score in llm.score([PROMPTS[0]], [PROMPTS[1]]):
            digest.update(" ".join(map(float.hex, score.logprobs)).encode())
    return digest.hexdigest()[:16]


def hashed_model(name: str) -> Loaded:
    """One of MODELS with weights from an integer hash: multiples of 2**-12 between -0.25 and 0.25."""
    family, changes = MODELS[name]
    settings = AutoConfig.for_model(family, **SHAPE | changes)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=ATTENTION, dtype=torch.float32)
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
            index = np.arange(parameter.numel(), dtype=np.uint64) + np.uint64(i << 32)
            values = (_mixed(index) % np.uint64(2049)).astype(np.float32) / np.float32(4096.0) - np.float32(
                0.25
            )
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape) + centre)
    arch = inspect_model(settings)
    return Loaded(wrap_modules(model.eval()), arch, {"weights": f"hashed, {name}"})


def _mixed(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """splitmix64, modulo 2**64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _prompt(length: int, seed: int) -> list[int]:
    ids = _mixed(np.arange(length, dtype=np.uint64) + np.uint64(seed << 32)) % np.uint64(SHAPE["vocab_size"])
    return [int(token) for token in ids]


PROMPTS = (_prompt(90, 1), _prompt(7, 2), _prompt(33, 3), _prompt(400, 4))
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, n=2, max_tokens=24),
    SamplingParams(
        temperature=1.3, top_k=50, min_p=0.02, seed=8, max_tokens=24, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=-0.2, logit_bias={5: 2.5, 77: -3.0},
    ),
    SamplingParams(temperature=1.0, seed=9, max_tokens=16, logprobs=1),
)  # fmt: skip


def _described(output: RequestOutput) -> str:
    """Every id and every log-probability of an answer, the latter to the bit."""
    parts: list[str] = []
    for position in output.prompt_logprobs or ():
        parts += [f"{token}:{value.logprob.hex()}" for token, value in (position or {}).items()]
    for choice in output.outputs:
        parts += [f"{token}" for token in choice.token_ids]
        parts += [value.hex() for value in choice.token_logprobs]
        for position in choice.logprobs or ():
            parts += [f"{token}:{value.logprob.hex()}" for token, value in position.items()]
    return " ".join(parts)


__all__ = [
    "EXPECTED_MODELS",
    "MODELS",
    "Finding",
    "check_portable",
    "hashed_model",
    "machine_summary",
    "model_digest",
]
