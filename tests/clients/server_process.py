"""`samewise serve` in a process of its own over a tiny model."""

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
TEMPLATE = (  # a template with tools, in the format of the Hermes models, and with thinking marks
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer with <tool_call>{"name": …, "arguments": …}</tool_call>\n{% endif %}'
    "{% for m in messages %}<s>{{ m['role'] }}: "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CLIENT_ENV = {
    "PYTHONPATH": str(SRC),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_folder(path: Path) -> Path:
    """A checkpoint folder with a tiny random model and its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    tiny_model(max_position_embeddings=1024).save_pretrained(path)
    return path


class ServerProcess:
    """A server process, its URL and its log."""

    def __init__(self, folder: Path, log: Path, *options: str, ready_seconds: float = 60) -> None:
        command = [
            *(sys.executable, "-c", "from samewise.cli.main import main; main()", "serve", str(folder)),
            *("--port", "0", "--device", "cpu", "--json-logs", "--served-model-name", NAME, *options),
        ]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ | CLIENT_ENV, stderr=out, stdout=out)
        self.url = self._entry("listening on")["message"].split("listening on ")[1].split(";")[0]
        self._entry("ready: ", ready_seconds)

    def _entry(self, text: str, seconds: float = 60) -> dict[str, Any]:
        """The first log entry that contains a text; waits for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if text in line:
                    entry: dict[str, Any] = json.loads(line)
                    return entry
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the log never contained {text!r}:\n" + self.log.read_text())

    def wait_for_log(self, text: str) -> None:
        """Wait until the log contains a text."""
        self._entry(text)

    def metric(self, name: str) -> float:
        """A metric, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"samewise:{name}{{"))

    def check_idle(self) -> None:
        """Wait until no request is active, and check that every page is free."""
        end = time.monotonic() + 30
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < end, "it never became idle"
            time.sleep(0.02)
        assert self.metric("kv_cache_usage_perc") == 0

    def wait(self, seconds: float = 60) -> int:
        """Wait until it ends; returns the exit code."""
        return self.process.wait(seconds)


@contextmanager
def running_server(
    folder: Path, log: Path, *options: str, ready_seconds: float = 60
) -> Iterator[ServerProcess]:
    """Start a server; kill it at the end if it still runs."""
    server = ServerProcess(folder, log, *options, ready_seconds=ready_seconds)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
