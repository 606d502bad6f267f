"""Measures transformers' continuous batching and vLLM on the same card, where they are installed.

Both get random weights of the same shape and as many random prompts. Figures of vLLM, measured on a machine
that had it, are kept here as constants.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import inspect
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from shapes import bare

SOURCE = "vLLM 0.24.0, same card and shape"
ORDINARY = {1: 4.95, 8: 5.31, 32: 6.38, 64: 7.81, 128: 11.12}
INVARIANT = {1: 18.0, 8: 17.7, 32: 17.5, 64: 16.3, 128: 14.7}
"""Milliseconds per decode step by live sequences: one H200, 8B shape, dummy bf16 weights, prompts of 1024,
256 out, CUDA graphs and compile on; the second with VLLM_BATCH_INVARIANT=1."""
MEASURED_AT = (1024, 256)  # prompt and output length, in tokens, of these figures

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The load of every peer: `num` requests at once; lengths in tokens."""

    config: Any
    device: torch.device
    dtype: torch.dtype
    num: int
    prompt: int
    output: int

    def prompts(self) -> list[list[int]]:
        """Random prompts, the same in every run."""
        rng = random.Random(2)
        return [[rng.randrange(self.config.vocab_size) for _ in range(self.prompt)] for _ in range(self.num)]


def transformers(work: Work) -> Figures:
    """transformers' generate_batch: continuous batching over paged SDPA."""
    model = bare(work.config, work.device, work.dtype, "sdpa")
    _batch(model, work.prompts()[:2], 2)  # warm-up
    began = time.perf_counter()
    results = list(_batch(model, work.prompts(), work.output))
    wall = time.perf_counter() - began
    failed = next((result.error for result in results if result.error), None)
    tokens = sum(len(result.generated_tokens) for result in results)
    if failed or tokens < work.num * work.output:
        raise RuntimeError(failed or f"{tokens} tokens came of {work.num * work.output}")
    # From the start of the first request to the end of the last: without building cache and graphs.
    lives = [getattr(result, "lifespan", (-1, -1)) for result in results]
    seconds = max(end for _, end in lives) - min(begin for begin, _ in lives)
    seconds = seconds if 0 < seconds <= wall else wall
    return {"tok_s": tokens / seconds, "seconds": seconds, "seconds_with_start": wall, "tokens": tokens}


def _batch(model: Any, prompts: list[list[int]], max_tokens: int) -> Any:
    from transformers import GenerationConfig

    options: dict[str, Any] = {}
    generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    known = inspect.signature(model.generate_batch).parameters
    if "continuous_batching_config" in known:
        from transformers import ContinuousBatchingConfig

        wanted = {
            "auto_switch_to_flash": False,  # it would download a kernel
            "allow_block_sharing": False,
            "max_memory_percent": 0.5,
        }
        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        settings = {name: value for name, value in wanted.items() if name in names}
        options["continuous_batching_config"] = ContinuousBatchingConfig(**settings)
    if "progress_bar" in known:
        options["progress_bar"] = False
    return model.generate_batch(prompts, generation_config=generation, **options).values()


def vllm(work: Work) -> Figures:
    """vLLM with dummy weights; a decode step is the time beyond that of a one-token output, per token."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        work.config.architectures = ["LlamaForCausalLM"]
        work.config.save_pretrained(folder)
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype=str(work.dtype).split(".")[-1],
            max_model_len=work.prompt + work.output + 16, max_num_seqs=max(16, work.num),
            enable_prefix_caching=False, gpu_memory_utilization=0.6,
        )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts()]
    seconds = {}
    for max_tokens in (1, 1, work.output):  # the first is the warm-up
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds[max_tokens] = time.perf_counter() - began
    total = seconds[work.output]
    return {
        "tok_s": work.num * work.output / total,
        "seconds": total,
        "ms": (total - seconds[1]) * 1e3 / max(1, work.output - 1),
        "prompt_tok_s": work.num * work.prompt / seconds[1],
    }


PEERS: dict[str, Callable[[Work], Figures]] = {"transformers": transformers, "vllm": vllm}


def measure(name: str, work: Work) -> Figures:
    """The figures of a peer, or under "absent" the reason why there are none."""
    if importlib.util.find_spec(name) is None:
        return {"absent": f"{name} is not installed"}
    try:
        return PEERS[name](work)
    except Exception as error:
        return {"absent": f"{name} did not run: {type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if work.device.type == "cuda":
            torch.cuda.empty_cache()
