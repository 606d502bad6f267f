"""Seconds from a command to its first token, each time in a fresh process. Last line: JSON.

    python bench/start_up.py [--model smollm2] [--repeats 5]

`samewise generate "Hello" --max-tokens 1` with the model in the cache: from the start of Python to the end of
the process, and the processors' time. The first run, which may read files from a disk, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

COMMAND = "from samewise.cli.main import main; main()"


def run(model: str) -> tuple[float, float]:
    """Seconds on the clock, and of processors, that one command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-c", COMMAND, "generate", "Hello", "--model", model, "--max-tokens", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the command again and again; print each time and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    times = []
    for i in range(args.repeats + 1):
        seconds, of_processors = run(args.model)
        print(
            f"{seconds:6.2f} s, {of_processors:6.2f} s of processors{'' if i else ' (not counted)'}",
            flush=True,
        )
        times.append((seconds, of_processors))
    seconds, of_processors = (statistics.median(column) for column in zip(*times[1:], strict=True))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print(json.dumps({"seconds": seconds, "processor_seconds": of_processors, "load": load}))


if __name__ == "__main__":
    main()
