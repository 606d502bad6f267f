"""The soak of bench/attack.py: misbehaving clients of every kind for minutes, memory recorded and plotted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attack_limits import unread
from attack_requests import CHAT, COMPLETIONS, message, schema, slow_grammar
from attack_tools import (
    ATTACKER,
    MIB,
    OTHER,
    Bench,
    Server,
    Watch,
    connection,
    head,
    send,
    temporary_folder,
)

CLIENTS = 12  # misbehaving ones, at once
SAMPLE_SECONDS = 5.0  # between two values of memory
WARM_SHARE = 1 / 3  # of the time; memory may grow until then: caches fill, and threads start
GROWTH = 0.10  # of the memory after warm-up, that the last third may be above it
MIN_GROWTH = 64 * MIB
REFUSALS = frozenset({200, 400, 413, 429})


async def _unread(server: Server, rng: random.Random) -> None:
    body = {"prompt": "x", "n": rng.choice((1, 16)), "max_tokens": 32, "logprobs": 20, "stream": True}
    async with unread(server, body | {"ignore_eos": True}, 1):
        await asyncio.sleep(rng.random() * 4)


async def _silent(server: Server, rng: random.Random) -> None:
    async with connection(server) as (_, writer):
        writer.write(rng.choice((b"", b"GET /hea", head("POST", COMPLETIONS, 1000) + b'{"prompt"')))
        await asyncio.sleep(rng.random() * 6)


async def _held_body(server: Server, rng: random.Random) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(10), connection(server) as (_, writer):
            writer.write(head("POST", COMPLETIONS, 4 * MIB))
            for _ in range(48):
                writer.write(b" " * 65536)
                await writer.drain()
            await asyncio.sleep(rng.random() * 2)


async def _garbage(server: Server, rng: random.Random) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with connection(server) as (reader, writer):
            writer.write(rng.randbytes(rng.randint(1, 3000)))
            await asyncio.wait_for(reader.read(500), 2)


async def _leave(server: Server, rng: random.Random) -> None:
    body = {"prompt": "a story", "max_tokens": 64, "n": rng.randint(1, 4), "stream": rng.random() < 0.5}
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(send(server, "POST", COMPLETIONS, body), rng.random())


async def _ask(server: Server, rng: random.Random) -> list[str]:
    """Requests that are answered, or refused in a known way; returns what was wrong."""
    grammar = schema({"type": "integer", "multipleOf": rng.randrange(2, 400)})
    kind = rng.randrange(7)
    path, body = [
        (COMPLETIONS, {"prompt": "x " * rng.randrange(1, 60), "max_tokens": rng.randrange(1, 24)}),
        (CHAT, message("a number", response_format=grammar)),
        (CHAT, slow_grammar(999961 + 2 * rng.randrange(1000))),
        (CHAT, message("x", chat_template_kwargs={"self": 1})),
        (COMPLETIONS, {"prompt": "y " * 300_000, "max_tokens": 1}),
        ("/tokenize", {"prompt": "some words " * rng.randrange(1, 20_000)}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 8, "n": 8, "logprobs": 20, "bad_words": ["a", "b"]}),
    ][kind]
    reply = await send(server, "POST", path, body, key=rng.choice((ATTACKER, OTHER)), timeout=120)
    fine = reply.status in REFUSALS
    return [] if fine else [f"{path} {json.dumps(body)[:80]}: {reply.status} {reply.body[:200]!r}"]


DEEDS = {"unread": _unread, "silent": _silent, "held body": _held_body, "garbage": _garbage, "leave": _leave}


async def _client(server: Server, seed: int, end: float, counts: Counter[str], errors: list[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end and server.alive:
        if rng.random() < 0.5:
            counts["ask"] += 1
            errors += await _ask(server, rng)
        else:
            name = rng.choice(sorted(DEEDS))
            counts[name] += 1
            with contextlib.suppress(OSError):
                await DEEDS[name](server, rng)


async def _record(server: Server, end: float, began: float, samples: list[dict[str, float]]) -> None:
    while time.monotonic() < end and server.alive:
        samples.append({
            "seconds": round(time.monotonic() - began, 1), "mib": round(server.memory() / MIB, 1),
            "descriptors": server.descriptors(),
        })  # fmt: skip
        await asyncio.sleep(SAMPLE_SECONDS)


async def _run(server: Server, minutes: float) -> dict[str, Any]:
    began, counts, errors, samples = time.monotonic(), Counter[str](), [], []
    end = began + minutes * 60
    watch = Watch(server)
    recording = asyncio.ensure_future(_record(server, end + 10, began, samples))
    await asyncio.gather(*(_client(server, seed, end, counts, errors) for seed in range(CLIENTS)))
    seen = await asyncio.to_thread(watch.end)
    await recording  # and ten seconds of quiet
    warm = [one["mib"] for one in samples if one["seconds"] >= minutes * 60 * WARM_SHARE] or [
        samples[-1]["mib"]
    ]
    third = max(1, len(warm) // 3)
    first, last = sum(warm[:third]) / third, sum(warm[-third:]) / third
    wrong = [*errors, *(f"bystander: {error}" for error in seen.errors)]
    if (last - first) * MIB > max(GROWTH * first * MIB, MIN_GROWTH):
        wrong.append(f"memory grew from {first:.0f} to {last:.0f} MiB after warm-up")
    if samples[-1]["descriptors"] > samples[0]["descriptors"] + 20:
        wrong.append(f"descriptors grew from {samples[0]['descriptors']} to {samples[-1]['descriptors']}")
    if not server.alive:
        wrong.append(f"the server ended with {server.process.returncode}")
    if "Traceback" in server.log_text():
        wrong.append("tracebacks in the log")
    return {
        "minutes": minutes, "clients": CLIENTS, "counts": dict(counts), "samples": samples,
        "warm_mib": round(first, 1), "last_mib": round(last, 1), "log_lines": server.log_lines(),
        "bystander": {
            "streams": len(seen.first_token), "median_ms": round(seen.median * 1e3, 1),
            "worst_ms": round(seen.worst * 1e3, 1), "health_p99_ms": round(seen.health_p99 * 1e3, 1),
            "errors": len(seen.errors),
        },
        "wrong": wrong[:20], "num_wrong": len(wrong), "held": int(not wrong), "of": 1,
    }  # fmt: skip


def plot(samples: list[dict[str, float]], path: Path) -> None:
    """The server's memory over time, children included."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2))
    axes.plot([one["seconds"] / 60 for one in samples], [one["mib"] for one in samples], linewidth=1.2)
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", title="A server under misbehaving clients")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def soak(model: str, minutes: float, out: Path | None) -> dict[str, Any]:
    """Run it; the figures, and the picture `attack_soak.png` where a folder is given."""
    with temporary_folder() as folder:
        bench = Bench(model, folder)
        try:
            result = asyncio.run(_run(bench.serve(), minutes))
        finally:
            bench.close()
    deeds = sum(result["counts"].values())
    print(f"{minutes:g} minutes, {deeds} deeds, memory {result['warm_mib']} MiB after warm-up, "
          f"{result['last_mib']} MiB at the end; bystander {result['bystander']}")  # fmt: skip
    for one in result["wrong"]:
        print(f"WRONG {one[:500]}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plot(result["samples"], out / "attack_soak.png")
    return result
