"""`samewise serve` as a process of its own over a tiny model, for clients that know nothing about it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from samewise.testing import byte_tokenizer, tiny_model

SRC = Path(__file__).parents[2] / "src"
NAME = "tiny"
TEMPLATE = (  # in the manner of the Hermes models, which can be told of tools
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer with <tool_call>{"name": …, "arguments": …}</tool_call>\n{% endif %}'
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
QUIET_ENV = {
    "PYTHONPATH": str(SRC),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_folder(path: Path) -> Path:
    """A tiny random model with its tokenizer, as a checkpoint folder."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    tiny_model(max_position_embeddings=1024).save_pretrained(path)
    return path


class House:
    """A server's process, its address and its log."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        command = [
            *(sys.executable, "-c", "from samewise.cli.main import main; main()", "serve", str(folder)),
            *("--port", "0", "--device", "cpu", "--json-logs", "--served-model-name", NAME, *options),
        ]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ | QUIET_ENV, stderr=out, stdout=out)
        self.url = self._entry("listening on")["message"].split("listening on ")[1].split(";")[0]
        self._entry("ready: ")

    def _entry(self, says: str, seconds: float = 60) -> dict[str, Any]:
        """The line of the log that says so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if says in line:
                    entry: dict[str, Any] = json.loads(line)
                    return entry
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"it never said {says!r}:\n" + self.log.read_text())

    def said(self, says: str) -> None:
        """Wait until the log says so."""
        self._entry(says)

    def number(self, name: str) -> float:
        """A metric, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"samewise:{name}{{"))

    def quiet(self) -> None:
        """Wait until nothing is computed and every page is back."""
        end = time.monotonic() + 30
        while self.number("num_requests_running") or self.number("num_requests_waiting"):
            assert time.monotonic() < end, "it is never quiet"
            time.sleep(0.02)
        assert self.number("kv_cache_usage_perc") == 0

    def end(self, seconds: float = 60) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(seconds)


@contextmanager
def opened(folder: Path, log: Path, *options: str) -> Iterator[House]:
    """Start one; what still runs at the end is killed."""
    house = House(folder, log, *options)
    try:
        yield house
    finally:
        if house.process.poll() is None:
            house.process.kill()
            house.process.wait()
