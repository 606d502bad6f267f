"""llama.cpp's own server (xllamacpp) in a process of its own: `python -m samewise.bench.llama_server`.

In the process of an engine it would share the cores with the engine's threads, which wait for work, and be
slower than it is. Lines of JSON: settings in and `about` out, then a run in and its measurement out, each.

Its defaults are kept (keys and values in float16), but caches of prompts are off. Token ids go in as they
are, and greedy choice is asked for in its cheapest form. Host only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from samewise.bench.measurement import median


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    lines = map(json.loads, sys.stdin)
    settings = next(lines)
    server, about = _start(**settings)
    print(json.dumps({"about": about}), file=answers, flush=True)
    for request in lines:
        print(json.dumps(_run(server, **request)), file=answers, flush=True)


def _start(*, gguf: str, num_live: int, max_len: int, num_threads: int) -> tuple[Any, str]:
    """A server with a slot for each of `num_live` requests of `max_len` tokens, and what it is."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_parallel, params.n_ctx = num_live, num_live * _whole(max_len, 256)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, 0
    about = f"xllamacpp {version('xllamacpp')}: {' '.join(xllamacpp.get_system_info().split())}"
    return xllamacpp.Server(params), about


def _run(
    server: Any, *, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool
) -> dict[str, float | None]:
    """A request per prompt, all at once: the fields of a Measurement."""
    bodies = [
        {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": ignore_eos, "cache_prompt": False,
         "temperature": 0, "samplers": ["top_k"], "top_k": 1}
        for prompt in prompts
    ]  # fmt: skip
    with ThreadPoolExecutor(len(bodies)) as threads:
        began = time.perf_counter()
        replies = list(threads.map(server.handle_completions, bodies))
        seconds = time.perf_counter() - began
    timings = [reply["timings"] for reply in replies]
    return {
        "tokens": sum(reply["usage"]["completion_tokens"] for reply in replies),
        "seconds": seconds,
        "first_token": median(1e-3 * one["prompt_ms"] for one in timings),
        "per_token": median(1e-3 * one["predicted_per_token_ms"] for one in timings),
    }


def _whole(num: int, size: int) -> int:
    """The least multiple of `size` that is at least `num`."""
    return -(-num // size) * size


__all__ = ["main"]

if __name__ == "__main__":
    main()
