"""Log-probabilities with gradients, beside transformers' own; and how long new weights take.

    python bench/rl.py [--model smollm2] [--tokens 1024] [--repeat 3] [--answers 200]

Limit: transformers' own forward and backward pass, alone and with gradient checkpointing. On CUDA also the
memory of each. At last answers are sampled: their log-probabilities and the trainer's have to be equal.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from samewise import LLM, SamplingParams  # noqa: E402
from samewise.model.resolve import resolve  # noqa: E402
from samewise.rl import TrainingForward, llm_over  # noqa: E402

SHAPES = {
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 128_256,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Models with random weights, by size."""


def load(name: str, device: str, dtype: torch.dtype) -> Any:
    if name not in SHAPES:
        path = resolve(name, revision=None, trust_remote_code=False).path
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    config = AutoConfig.for_model("llama", **SHAPES[name], max_position_embeddings=8192)
    with torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def seconds(call: Callable[[], object], device: str, repeat: int) -> float:
    """The best of some calls, after one that is not counted."""
    times = []
    for _ in range(repeat + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call takes on CUDA, beside what was taken before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


TEMPERATURE = 0.7
MAX_PROMPT, MAX_ANSWER = 64, 48
BATCHES = (8, 37, 200)
"""Sequences of a micro-batch; the result is the same."""


def largest_difference(llm: LLM, forward: TrainingForward, num: int) -> float:
    """Between the log-probabilities of sampled answers and the trainer's, in micro-batches of any size."""
    vocab = llm.engine.limits.vocab
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, MAX_PROMPT + 1, (num,), generator=generator).tolist()
    prompts = [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=1 + i % MAX_ANSWER, seed=i, ignore_eos=True,
            logprobs_mode="processed_logprobs",
        )
        for i in range(num)
    ]  # fmt: skip
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    ids = torch.zeros(num, MAX_PROMPT + MAX_ANSWER, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = [*prompt, *answer.token_ids]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    largest = 0.0
    for size in BATCHES:
        for start in range(0, num, size):
            part = slice(start, start + size)
            with torch.no_grad():
                got = forward.logprobs(ids[part], attention_mask=mask[part], temperature=TEMPERATURE).cpu()
            for row, prompt, answer in zip(got, prompts[part], answers[part], strict=True):
                expected = torch.tensor(answer.token_logprobs)
                own = row[len(prompt) : len(prompt) + len(expected)]
                largest = max(largest, float((own - expected).abs().max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help=f"a model, or random weights: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--answers", type=int, default=200, help="sampled at last; 0: none")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load(options.model, device, dtype)
    ids = torch.randint(model.config.vocab_size, (1, options.tokens), device=device)
    forward = TrainingForward(model, kv_tokens=max(options.tokens, MAX_PROMPT + MAX_ANSWER))

    def ordinary() -> None:
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()

    def ours() -> None:
        model.zero_grad()
        forward.logprobs(ids).sum().backward()

    result: dict[str, Any] = {
        "model": options.model, "tokens": options.tokens, "device": device, "dtype": str(dtype),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip

    def measure(name: str, call: Callable[[], None]) -> None:
        result[name] = seconds(call, device, options.repeat)
        if device == "cuda":
            model.zero_grad()
            result[f"bytes_{name}"] = peak_bytes(call)
            print(f"{name}: {result[f'bytes_{name}'] / 1e9:.2f} GB, gradients included")

    measure("ordinary", ordinary)
    print(f"limit: transformers' forward and backward {result['ordinary']:.3f} s")
    measure("ours", ours)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    measure("checkpointed", ordinary)
    model.gradient_checkpointing_disable()
    model.zero_grad()
    for name in ("ordinary", "checkpointed"):
        result[f"over_{name}"] = result["ours"] / result[name]
        print(f"samewise.rl.logprobs: {result['ours']:.3f} s, {result[f'over_{name}']:.2f}x of {name}")

    def follow() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0)  # counts as a change
        assert forward.refresh()

    result["refresh"] = seconds(follow, device, options.repeat)
    print(f"the trainer's forward pass follows new weights in {result['refresh']:.3f} s")
    llm = llm_over(model, kv_memory="1GiB", proposer="none")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    result["update"] = seconds(lambda: llm.update_weights(state), device, options.repeat)
    print(f"update_weights, with the probe: {result['update']:.3f} s")
    if options.answers:
        result["largest_difference"] = largest_difference(llm, forward, options.answers)
        print(f"{options.answers} answers, rollout and trainer: {result['largest_difference']} apart at most")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
