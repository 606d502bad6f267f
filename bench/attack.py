"""Attacks a server process on this machine in every known way, and says what held. Last line: JSON.

    python bench/attack.py                          # every line of the table in docs/security.md
    python bench/attack.py --only share,tls         # some of them, by line or by name; --list names them
    python bench/attack.py --soak 30 --out figures  # misbehaving clients for 30 minutes, memory plotted

Each attack is bounded in count and time, and runs against `samewise serve` in a process of its own, with the
server's defaults unless its line needs an option. Beside it runs a well-behaved client at another key
(bystander.py): its time to the first token, on the quiet server and during the attack, and its errors are in
the table. An attack *held* if the server did what docs/security.md says, and the bystander saw no error, a
median time to the first token of at most 3 times the quiet one, and `/health` within 100 ms: all answers but
one of 100, and that one within 500 ms. Server, attacker and bystander share the machine's cores, so that a
lone late answer may be the machine's; a server that stands still for longer shows in the worst one, however
few there are. The exit code is 1 if one did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

import attack_access
import attack_files
import attack_limits
import attack_requests
from attack_tools import (
    ATTACKS,
    FIRST_TOKEN_RATIO,
    HEALTH_SECONDS,
    HEALTH_WORST_SECONDS,
    Attack,
    Bench,
    Outcome,
    Watch,
    Watched,
    temporary_folder,
)

CASES = (attack_requests, attack_limits, attack_access, attack_files)
"""The modules whose attacks are registered by importing them."""
QUIET_SECONDS = 4.0  # how long the bystander measures the quiet server before each attack
LEAST_SECONDS = 8.0  # of an attack on a server; /health is asked about 15 times a second
DURING_LEAST = 8  # streams that the bystander measures during each attack, at least


async def attempt(bench: Bench, one: Attack) -> dict:
    """Run one attack with the bystander beside it; its row of the table."""
    began, quiet, during = time.monotonic(), None, None
    if one.server:
        await asyncio.to_thread(bench.serve, one.options, file_limit=one.file_limit)
        quiet = await watch(bench, asyncio.sleep(QUIET_SECONDS))
        outcome, during = await watched(bench, one)
    else:
        outcome = await bounded(bench, one)
    broken = [*outcome.broken, *judge_bystander(quiet, during)]
    if one.server and bench.server is not None and not bench.server.alive:
        broken.append(f"the server ended with {bench.server.process.returncode}")
    return {
        "line": one.line,
        "name": one.name,
        "title": one.title,
        "tried": outcome.tried,
        "held": not broken,
        "before": one.before,
        "now": outcome.figure,
        "broken": broken,
        "figures": outcome.figures,
        "bystander": None if quiet is None or during is None else summary(quiet, during),
        "seconds": round(time.monotonic() - began, 1),
    }


async def watched(bench: Bench, one: Attack) -> tuple[Outcome, Watched]:
    """The attack's outcome, and what the bystander measured while it ran."""
    process = Watch(bench.server, DURING_LEAST)
    try:
        outcome = await bounded(bench, one)
    finally:
        during = await asyncio.to_thread(process.end)
    return outcome, during


async def bounded(bench: Bench, one: Attack) -> Outcome:
    """The attack's outcome; one that runs past its bound did not hold.

    A short attack on a server is repeated, so that the bystander measures it and not its end.
    """
    began, outcome = time.monotonic(), None
    try:
        async with asyncio.timeout(one.seconds):
            while outcome is None or (one.server and time.monotonic() - began < LEAST_SECONDS):
                repeat = await one.run(bench)
                outcome = repeat if outcome is None else repeat.after(outcome)
    except TimeoutError:
        outcome = Outcome(
            0, f"over {one.seconds:.0f} s", [f"the attack ran past its bound of {one.seconds} s"]
        )
    return outcome


async def watch(bench: Bench, work) -> Watched:
    process = Watch(bench.server)
    await work
    return await asyncio.to_thread(process.end)


def judge_bystander(quiet: Watched | None, during: Watched | None) -> list[str]:
    if quiet is None or during is None:
        return []
    broken = [f"bystander: {error}" for error in during.errors[:3]]
    if not during.median <= FIRST_TOKEN_RATIO * quiet.median:
        broken.append(f"bystander: first token {during.median:.3f} s, quiet {quiet.median:.3f} s")
    if not during.health_p99 <= HEALTH_SECONDS:
        broken.append(f"bystander: /health took {during.health_p99:.3f} s")
    elif during.health_worst > HEALTH_WORST_SECONDS:
        broken.append(f"bystander: /health once took {during.health_worst:.3f} s")
    return broken


def summary(quiet: Watched, during: Watched) -> dict:
    return {
        "quiet_ms": round(quiet.median * 1e3, 1),
        "during_ms": round(during.median * 1e3, 1),
        "ratio": round(during.median / quiet.median, 2),
        "worst_ms": round(during.worst * 1e3, 1),
        "streams": len(during.first_token),
        "health_p99_ms": round(during.health_p99 * 1e3, 1),
        "health_worst_ms": round(during.health_worst * 1e3, 1),
        "errors": len(during.errors),
    }


def report(rows: list[dict]) -> None:
    """The table, as docs/security.md has it."""
    first_line = (
        "line | attack | tried | held | before | now | first token: quiet, during | `/health` p99, worst"
    )
    print(f"\n| {first_line} |")
    print("|---|---|---:|---|---|---|---|---:|")
    for row in rows:
        beside = row["bystander"]
        first = health = "–"
        if beside:
            first = f"{beside['quiet_ms']} → {beside['during_ms']} ms ({beside['ratio']}×)"
            health = f"{beside['health_p99_ms']}, {beside['health_worst_ms']} ms"
        held = "yes" if row["held"] else "**no**"
        print(f"| {row['line']} | {row['title']} | {row['tried']} | {held} | {row['before']} | {row['now']} "
              f"| {first} | {health} |")  # fmt: skip
    for row in rows:
        for broken in row["broken"]:
            print(f"DID NOT HOLD {row['line']} {row['name']}: {broken[:600]}")


LINES = (
    "grammar", "share", "connection", "field", "size", "cache", "error", "damage", "receipt", "text",
    "access",
)  # fmt: skip
"""What attacks aim at, in the order of the table."""


def ordered() -> list[Attack]:
    """The attacks in the order of the table: by what they aim at."""
    return sorted(ATTACKS, key=lambda one: LINES.index(one.line))


def selected(only: str | None) -> list[Attack]:
    if only is None:
        return ordered()
    wanted = [word.strip().lower() for word in only.split(",")]
    known = {one.line.lower() for one in ATTACKS} | {one.name for one in ATTACKS}
    for word in wanted:
        if word not in known:
            sys.exit(f"no attack {word!r}; --list names them")
    return [one for one in ordered() if one.line.lower() in wanted or one.name in wanted]


async def run_all(args: argparse.Namespace) -> list[dict]:
    rows = []
    with temporary_folder() as folder:
        bench = Bench(args.model, folder)
        try:
            for one in selected(args.only):
                row = await attempt(bench, one)
                rows.append(row)
                print(f"{row['line']:12}{row['name']:28}{'held' if row['held'] else 'DID NOT HOLD':14}"
                      f"{row['seconds']:6.1f} s  {row['now']}", flush=True)  # fmt: skip
        finally:
            bench.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a model's name or folder; tiny: a random one")
    parser.add_argument("--only", help="lines or names, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the attacks and end")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="run misbehaving clients for so long")
    parser.add_argument("--out", type=Path, help="a folder for the JSON and the picture of the soak's memory")
    args = parser.parse_args()
    if args.list:
        for one in ordered():
            print(f"{one.line:12}{one.name:28}{one.title}")
        return
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, max(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    )
    environment = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if args.soak is not None:
        from attack_soak import soak

        result = environment | soak(args.model, args.soak, args.out)
    else:
        rows = asyncio.run(run_all(args))
        report(rows)
        result = environment | {"rows": rows, "held": sum(row["held"] for row in rows), "of": len(rows)}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "attack.json" if args.soak is None else "attack_soak.json"
        (args.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if result["held"] < result["of"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
