"""Log-probabilities with gradients, beside transformers' own; and how long new weights take.

    python bench/rl.py [--model smollm2] [--tokens 1024] [--repeat 3]

Limit: transformers' own forward and backward pass, alone and with gradient checkpointing.
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help=f"a model, or random weights: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load(options.model, device, dtype)
    ids = torch.randint(1000, 40_000, (1, options.tokens), device=device)
    forward = TrainingForward(model, kv_tokens=options.tokens)

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
    result["ordinary"] = seconds(ordinary, device, options.repeat)
    print(f"limit: transformers' forward and backward {result['ordinary']:.3f} s")
    result["ours"] = seconds(ours, device, options.repeat)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    result["checkpointed"] = seconds(ordinary, device, options.repeat)
    model.gradient_checkpointing_disable()
    model.zero_grad()
    for name in ("ordinary", "checkpointed"):
        result[f"over_{name}"] = result["ours"] / result[name]
        print(f"samewise.rl.logprobs: {result['ours']:.3f} s, {result[f'over_{name}']:.2f}x of {name}")
    llm = llm_over(model, kv_memory="1GiB", proposer="none")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    result["update"] = seconds(lambda: llm.update_weights(state), device, options.repeat)
    print(f"update_weights, with the probe: {result['update']:.3f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
