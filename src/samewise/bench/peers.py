"""Other systems on the same weights: transformers' generate, and vLLM and llama.cpp where installed."""

from __future__ import annotations

import importlib.util
import time

import torch

from samewise.bench.measurement import Measurement, Prompts


class Transformers:
    """transformers' own generate, with its own attention, on the same weights."""

    name = "transformers"

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, eos: set[int], pad: int) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self._model, self._eos, self._pad = model.to(device).eval(), eos, pad

    @torch.inference_mode()
    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """One left-padded batch."""
        longest = max(map(len, prompts))
        device = self._model.device
        rows = [[self._pad] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(rows, device=device)
        began = time.perf_counter()
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.tensor(mask, device=device), do_sample=False,
            max_new_tokens=max_tokens, eos_token_id=sorted(self._eos) or None, pad_token_id=self._pad,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return Measurement(sum(self._length(row) for row in output[:, longest:].tolist()), seconds)

    def _length(self, row: list[int]) -> int:
        """Tokens up to and including the first end-of-text; what follows is padding."""
        ends = [i for i, token in enumerate(row) if token in self._eos]
        return ends[0] + 1 if ends else len(row)


class VLLM:
    """vLLM, where it is installed."""

    name = "vllm"

    def __init__(self, path: str, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(path, dtype=dtype, enable_prefix_caching=False)

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """All prompts in one call."""
        from vllm import SamplingParams as Params

        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, Params(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - began
        return Measurement(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, where it is installed and the model is a GGUF file."""

    name = "llama.cpp, one by one"

    def __init__(self, path: str, max_model_len: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(path, n_ctx=max_model_len, n_threads=torch.get_num_threads(), verbose=False)
        self._eos = {self._llama.token_eos()}

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """One prompt after the other."""
        tokens, began = 0, time.perf_counter()
        for prompt in prompts:
            self._llama.reset()
            for token, _ in zip(
                self._llama.generate(list(prompt), temp=0.0), range(max_tokens), strict=False
            ):
                tokens += 1
                if token in self._eos:
                    break
        return Measurement(tokens, time.perf_counter() - began)


def installed(name: str) -> bool:
    """Whether a package can be imported; it may still fail to start."""
    return importlib.util.find_spec(name) is not None


__all__ = ["VLLM", "LlamaCpp", "Transformers", "installed"]
