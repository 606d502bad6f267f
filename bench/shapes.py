"""Shared by the CUDA benchmarks: a model's shape, random weights made on the device, the ceiling.

The 8B shape is that of Llama 3 8B. The tiny one tests a script on any machine in seconds; its figures mean
nothing.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from samewise import machine

machine.pin_environment()  # before torch is imported

import torch  # noqa: E402

from samewise.execute.load import Loaded  # noqa: E402
from samewise.model.arch import inspect_model  # noqa: E402
from samewise.model.attention_binding import ATTENTION  # noqa: E402
from samewise.model.load import wrap_modules  # noqa: E402


def shape_8b(layers: int = 32) -> Any:
    """The shape of an 8B model, with this many layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
        tie_word_embeddings=False,
    )  # fmt: skip


def shape_tiny(layers: int = 2) -> Any:
    """A shape that runs on any machine in milliseconds."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64, intermediate_size=112, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=320, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip


def random_on(config: Any, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Random weights of the config's shape, made on the device."""
    model = bare(config, device, dtype, ATTENTION)
    return Loaded(wrap_modules(model), inspect_model(config), {"weights": "random"})


def random_on_card(config: Any) -> Loaded:
    """Random bf16 weights of the config's shape, made on the card."""
    return random_on(config, torch.device("cuda"), torch.bfloat16)


def bare(config: Any, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
    """transformers' own model of the config's shape, with the same random weights every time."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.eval()


# ---- the ceiling


def copy_bandwidth(device: torch.device | None = None) -> float:
    """Bytes per second of a large copy within the device's memory, counting both directions."""
    device = device or torch.device("cuda")
    size = 2**31 if device.type == "cuda" else 2**27
    ms = _copy_ms(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / ms * 1e3


def _copy_ms(size: int, device: torch.device) -> float:
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    b.copy_(a)  # the first copy includes page faults
    return timed(lambda: b.copy_(a), 10 if device.type == "cuda" else 3, device)


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of weights that a pass reads: every linear once, including the head."""
    head_dim = config.hidden_size // config.num_attention_heads
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    return (config.num_hidden_layers * layer + head) * dtype.itemsize


def kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the KV of one token over all layers."""
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize


def timed(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


# ---- conditions


def conditions(device: torch.device) -> dict[str, Any]:
    """The software and hardware that figures were measured with."""
    import transformers

    cuda = device.type == "cuda"
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "cpu": machine.cpu_facts().get("cpu", platform.processor()),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The commit of the measured source; `unknown` outside a checkout."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
