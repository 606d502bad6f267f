"""Attacks by files: caches that others may write, cut or linked files, altered receipts. No server runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attack_tools import Bench, Outcome, attack, environment, run_command, tiny_folder

COMPILE = "from samewise.kernels.native import build; build.library(); print(build.library_path())"
PLANTED = '#include <cstdlib>\n__attribute__((constructor)) static void run() { std::system("touch %s"); }\n'


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**env), capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return (result.stdout.strip().splitlines() or [""])[-1]


# ---- cache


@attack(
    "cache", "another user's library in a shared cache", "it was loaded and ran", server=False, seconds=300
)
async def foreign_library(bench: Bench) -> Outcome:
    """The other user is made of file modes, and of an owner where this process may give files away."""
    cache, mark = bench.folder / "shared", bench.folder / "ran"
    built = await asyncio.to_thread(python, COMPILE, SAMEWISE_CACHE=str(cache))
    library = Path(last_line(built))
    if not library.is_file():
        return Outcome(0, "no compiler", [f"nothing was built: {built.stderr[-300:]}"])
    source = bench.folder / "planted.cpp"
    source.write_text(PLANTED % mark)
    planted = bench.folder / "planted.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(planted)], check=True)
    ways: dict[str, Callable[[], object]] = {
        "writable by all": lambda: library.chmod(0o777),
        "writable by the group": lambda: library.chmod(0o720),
        "a link": lambda: (library.unlink(), library.symlink_to(planted)),
    }
    if os.geteuid() == 0:
        ways["another owner"] = lambda: os.chown(library, 12345, 12345)
        ways["another owner's folder"] = lambda: ([os.chown(p, 12345, 12345) for p in folder_and_files()])

    def folder_and_files() -> list[Path]:
        return [library.parent, *library.parent.iterdir()]

    broken = []
    for name, change in ways.items():
        library.unlink(missing_ok=True)
        shutil.copy(planted, library)
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        library.with_name(f"{library.name}.sha256").write_text(f"{digest}  {library.name}\n")
        change()
        result = await asyncio.to_thread(python, COMPILE, SAMEWISE_CACHE=str(cache))
        if mark.exists() or result.returncode:
            broken.append(f"{name}: {'the planted code ran' if mark.exists() else result.stderr[-300:]}")
            mark.unlink(missing_ok=True)
    mode = cache.stat().st_mode & 0o777
    if mode != 0o700:
        broken.append(f"the folder has mode {mode:o}")
    return Outcome(len(ways), "never loaded; built again or beside it", broken)


# ---- damage


@attack(
    "damage", "a library in the cache, cut at 4 places", "SIGBUS without a word", server=False, seconds=300
)
async def cut_library(bench: Bench) -> Outcome:
    cache = bench.folder / "cut"
    library = Path(last_line(await asyncio.to_thread(python, COMPILE, SAMEWISE_CACHE=str(cache))))
    size, broken = library.stat().st_size, []
    for kept in (0, 100, size // 2, size - 1):
        os.truncate(library, kept)
        result = await asyncio.to_thread(python, COMPILE, SAMEWISE_CACHE=str(cache))
        if result.returncode or library.stat().st_size != size:
            broken.append(f"cut at {kept}: exit {result.returncode} {result.stderr[-200:]}")
    return Outcome(4, "built again each time", broken)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 6 // 10)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "cut weights": ("model.safetensors", _cut),
    "empty weights": ("model.safetensors", lambda path: os.truncate(path, 0)),
    "cut config": ("config.json", _cut),
    "cut tokenizer": ("tokenizer.json", _cut),
    "cut generation config": ("generation_config.json", _cut),
}
LINKS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "dangling link": ("model.safetensors", lambda path: (path.unlink(), path.symlink_to("nowhere"))),
    "link to itself": ("config.json", lambda path: (path.unlink(), path.symlink_to(path.name))),
    "link to a device": (
        "generation_config.json",
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ),
    "pipe": ("generation_config.json", lambda path: (path.unlink(), os.mkfifo(path))),
}


async def _refused(bench: Bench, cases: dict[str, tuple[str, Callable[[Path], Any]]]) -> Outcome:
    """Each damage of a folder must end the command with one line and exit code 2, within half a minute."""
    whole = bench.folder / "whole"
    if not whole.exists():
        tiny_folder(whole)
    broken = []
    for name, (file, change) in cases.items():
        copy = bench.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        change(copy / file)
        result = await asyncio.to_thread(
            run_command, "generate", "hi", "-m", str(copy), "-n", "1", "--device", "cpu", timeout=30
        )
        if result.returncode != 2 or result.stderr.count("\n") != 1:
            broken.append(f"{name}: exit {result.returncode}, {result.stderr.count(chr(10))} lines")
    return Outcome(len(cases), "one line, exit 2" if not broken else "see below", broken)


@attack("damage", "damaged files of a model", "117 lines, exit 1", server=False, seconds=300)
async def damaged_model(bench: Bench) -> Outcome:
    return await _refused(bench, DAMAGES)


@attack("damage", "links and special files in a model's folder", "a traceback, or it never ended",
        server=False, seconds=300)  # fmt: skip
async def symlinks(bench: Bench) -> Outcome:
    return await _refused(bench, LINKS)


# ---- receipts, and the audit of one with a slow grammar


def _receipt(bench: Bench) -> dict[str, Any]:
    """A receipt of the model under attack, as JSON."""
    path = bench.folder / "receipt.json"
    if not path.exists():
        code = (
            "import sys; from samewise import LLM, SamplingParams; from samewise.types import Grammar\n"
            "llm = LLM(sys.argv[1], device='cpu')\n"
            "p = SamplingParams(max_tokens=4, grammar=Grammar.regex('[a-z ]+'))\n"
            "(output,) = llm.generate('hi', p, use_tqdm=False); (r,) = llm.receipts(output, p)\n"
            "open(sys.argv[2], 'w').write(r.dumps())"
        )
        subprocess.run(
            [sys.executable, "-c", code, bench.model, str(path)], env=environment(), check=True,
            capture_output=True, timeout=120,
        )  # fmt: skip
    return json.loads(path.read_text())


def _sealed(receipt: dict[str, Any]) -> dict[str, Any]:
    """The receipt with the digest of what it says now."""
    body = {name: value for name, value in receipt.items() if name not in ("digest", "signature")}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return receipt | {"digest": "sha256:" + hashlib.sha256(canonical).hexdigest()}


@attack("receipt", "receipts with unknown fields or other types, resealed", "audited as `same`", server=False)
async def altered_receipts(bench: Bench) -> Outcome:
    whole = await asyncio.to_thread(_receipt, bench)
    forged = [
        _sealed(whole | {"samewise_receipt": True}),
        _sealed(whole | {"samewise_receipt": 1.0}),
        whole | {"signature": {"algorithm": "ed25519", "key": "a", "value": "b", "note": "x"}},
        _sealed(whole | {"params": whole["params"] | {"seed": float(whole["params"]["seed"])}}),
        *(_sealed(whole | {name: whole[name] | {"note": "approved"}})
          for name in ("contract", "prompt", "output", "logprobs", "settings", "params")),
    ]  # fmt: skip
    files = bench.folder / "forged"
    files.mkdir(exist_ok=True)
    for i, receipt in enumerate([*forged, whole]):
        (files / f"{i:02}.json").write_text(json.dumps(receipt))
    result = await asyncio.to_thread(run_command, "audit", str(files), "--json")
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    statuses = {Path(one["receipt"]).stem: one["status"] for one in found if "receipt" in one}
    broken = [f"{name}: {status}" for name, status in statuses.items()
              if (status == "same") != (name == f"{len(forged):02}")]  # fmt: skip
    if len(statuses) != len(forged) + 1:
        broken.append(f"{len(statuses)} findings: {result.stdout[-300:]} {result.stderr[-300:]}")
    return Outcome(
        len(forged), "all unreadable; the true one is `same`" if not broken else "see below", broken
    )


@attack(
    "grammar", "the audit of a receipt with such a grammar", "25 s to over 300 s", server=False, seconds=200
)
async def slow_audit(bench: Bench) -> Outcome:
    whole = await asyncio.to_thread(_receipt, bench)
    text = json.dumps({"type": "integer", "multipleOf": 9999991})
    grammar = {"kind": "json_schema", "text": text}
    path = bench.folder / "slow.json"
    path.write_text(json.dumps(_sealed(whole | {"params": whole["params"] | {"grammar": grammar}})))
    began = time.monotonic()
    result = await asyncio.to_thread(run_command, "audit", str(path), timeout=120)
    took = time.monotonic() - began
    broken = (
        [f"exit {result.returncode} after {took:.0f} s"]
        if result.returncode not in (1, 2) or took > 60
        else []
    )
    if "Traceback" in result.stderr:
        broken.append(result.stderr[-300:])
    return Outcome(1, f"ended after {took:.1f} s with the model's loading", broken, {"seconds": took})
