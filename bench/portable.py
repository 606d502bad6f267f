"""Compares the bits of the C++ kernels over compilers, instruction sets and interpreters. Last line: JSON.

    python bench/portable.py                                     # every build that can be made and run here
    python bench/portable.py --only aarch64                      # those with this word in their name
    python bench/portable.py --pythons .venv/bin/python ../other/bin/python

The first form compiles the kernels' self-test to a program of its own, runs it (that of another architecture
under qemu) and compares its digests with those stored in `kernels/native/expected.py`. What lacks a tool is
listed with the tool's name. The last form runs `samewise probe --portable` with each interpreter, whose
environment may hold another version of torch, and compares the digests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from samewise.kernels.native import build as native_build
from samewise.kernels.native.expected import EXPECTED

SRC = Path(__file__).parents[1] / "src"
PORTABLE = "-DSAMEWISE_PORTABLE"
NOT_OF_A_PROGRAM = {"-march=native", "-fPIC", "-shared", PORTABLE}
QEMU_AARCH64 = "qemu-aarch64-static"
AARCH64 = ("-march=armv8-a", "-static")


class Build(NamedTuple):
    """One way to compile the self-test, and what its program needs to run."""

    compiler: str
    flags: tuple[str, ...]
    emulator: str | None = None
    feature: str | None = None  # of the CPU, as /proc/cpuinfo names it


THREADS = (1, 3)
"""Every build computes the digests on so many threads."""

BUILDS = {
    "g++, AVX-512": Build("g++", ("-march=x86-64-v4",), feature="avx512f"),
    "g++, AVX2": Build("g++", ("-march=x86-64-v3",), feature="avx2"),
    "g++, x86-64, portable": Build("g++", ("-march=x86-64", PORTABLE), feature="sse2"),
    "g++ -O0, AVX2": Build("g++", ("-march=x86-64-v3", "-O0"), feature="avx2"),
    "clang++, AVX-512": Build("clang++", ("-march=x86-64-v4",), feature="avx512f"),
    "clang++, AVX2": Build("clang++", ("-march=x86-64-v3",), feature="avx2"),
    "clang++, x86-64, portable": Build("clang++", ("-march=x86-64", PORTABLE), feature="sse2"),
    "g++, aarch64, NEON": Build("aarch64-linux-gnu-g++", AARCH64, QEMU_AARCH64),
    "g++, aarch64, portable": Build("aarch64-linux-gnu-g++", (*AARCH64, PORTABLE), QEMU_AARCH64),
    "clang++, aarch64, NEON": Build("clang++", ("--target=aarch64-linux-gnu", *AARCH64), QEMU_AARCH64),
}


class Result(NamedTuple):
    """same, differs, or not run, and why."""

    verdict: str
    details: str


def run_build(build: Build, program: Path) -> Result:
    """Compile the self-test to `program`, run it and compare."""
    if reason := lacking(build):
        return Result("not run", reason)
    flags = [flag for flag in native_build.flags() if flag not in NOT_OF_A_PROGRAM]
    command = [build.compiler, *flags, *build.flags, "-DSAMEWISE_SELFTEST_MAIN"]
    made = run([*command, *map(str, native_build.SOURCES), "-o", str(program)])
    if made.returncode:
        return Result("not run", f"{build.compiler}: {made.stderr.strip().splitlines()[0]}")
    wrong: list[str] = []
    for threads in THREADS:
        ran = run([*([build.emulator] if build.emulator else []), str(program), str(threads)])
        if ran.returncode:
            return Result("not run", f"the program ended with {ran.returncode}")
        digests = {line[:-17].rstrip(): int(line[-16:], 16) for line in ran.stdout.splitlines()}
        differing = [name for name in EXPECTED | digests if EXPECTED.get(name) != digests.get(name)]
        wrong += [f"{name} on {threads} threads" for name in differing]
    version = run([build.compiler, "--version"]).stdout.splitlines()[0]
    return Result("differs" if wrong else "same", ", ".join(wrong) or version)


def lacking(build: Build) -> str | None:
    """The tool or the instruction set that a build needs and this machine has not."""
    for tool in (build.compiler, build.emulator):
        if tool is not None and shutil.which(tool) is None:
            return f"no {tool}"
    cpu = Path("/proc/cpuinfo")
    features = cpu.read_text().split() if cpu.exists() else []
    return f"a CPU without {build.feature}" if build.feature and build.feature not in features else None


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env)


PROBE = "from samewise.cli.main import main; main()"


def run_interpreter(python: str) -> Result:
    """`samewise probe --portable` with another interpreter, over the sources of this checkout."""
    done = run([python, "-c", PROBE, "probe", "--portable", "--json"], PYTHONPATH=str(SRC))
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return Result("not run", done.stderr.strip()[-200:] or "no output")
    wrong = [finding["name"] for finding in report["findings"] if not finding["same"]]
    return Result("differs" if wrong else "same", "; ".join([report["machine"], *wrong]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="builds with this text in their name")
    parser.add_argument("--pythons", nargs="+", default=[], help="interpreters to compare; no builds then")
    parser.add_argument("--out", help="folder for the programs; a temporary one by default")
    args = parser.parse_args()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="samewise-portable-") as temporary:
        folder = Path(args.out or temporary)
        for name in args.pythons or [name for name in BUILDS if args.only in name]:
            program = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
            result = run_interpreter(name) if args.pythons else run_build(BUILDS[name], program)
            results[name] = result
            print(f"{name:<28} {result.verdict:<8} {result.details}", flush=True)
    same = all(result.verdict != "differs" for result in results.values())
    print(json.dumps({"same": same, "results": {name: one._asdict() for name, one in results.items()}}))
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
