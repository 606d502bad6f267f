"""A well-behaved client of a server: short streams one after the other, and `/health` beside them.

    python bench/bystander.py http://127.0.0.1:8000 KEY

Runs until its standard input closes, and at least until `--least` streams have ended. Then prints one JSON
object: the seconds to the first token of each stream, the seconds of each `/health`, and every error. It is a
process of its own, so that the clients of an attack, which share an interpreter, do not delay its clock.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

PAUSE = 0.05  # seconds between two streams, and between two checks of `/health`
TIMEOUT = 60.0  # seconds for one answer; an answer that takes longer is an error


class Bystander:
    """Measures one server from two threads."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.address, self.headers = (parts.hostname, parts.port or 80), {"Authorization": f"Bearer {key}"}
        self.first_token: list[float] = []
        self.health: list[float] = []
        self.errors: list[str] = []
        self.stopped = threading.Event()

    def run(self, least: int) -> dict[str, list[float] | list[str]]:
        """Measure until standard input closes and `least` streams have ended or failed."""
        thread = threading.Thread(target=self._watch_health, daemon=True)
        thread.start()
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        while not self.stopped.is_set() or len(self.first_token) + len(self.errors) < least:
            self._attempt("stream", self._stream)
            time.sleep(PAUSE)
        thread.join(TIMEOUT)
        return {"first_token": self.first_token, "health": self.health, "errors": self.errors}

    def _wait_for_end(self) -> None:
        sys.stdin.read()
        self.stopped.set()

    def _watch_health(self) -> None:
        while not self.stopped.is_set():
            self._attempt("health", self._health)
            time.sleep(PAUSE)

    def _attempt(self, name: str, work) -> None:
        try:
            work()
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            self.errors.append(f"{name}: {type(error).__name__} {error}"[:300])
            time.sleep(0.2)

    def _stream(self) -> None:
        body = {"prompt": f"{len(self.first_token)}: the sea is", "max_tokens": 8, "temperature": 0,
                "stream": True, "ignore_eos": True, "share": False}  # fmt: skip
        began = time.perf_counter()
        with self._send("POST", "/v1/completions", json.dumps(body)) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {response.read(300)!r}")
            first, last = None, b""
            for line in response:
                if line.startswith(b"data: "):
                    first, last = first or time.perf_counter() - began, line
        if last.strip() != b"data: [DONE]" or first is None:
            raise ValueError(f"the stream ended with {last[:200]!r}")
        self.first_token.append(first)

    def _health(self) -> None:
        began = time.perf_counter()
        with self._send("GET", "/health") as response:
            response.read()
            if response.status != 200:
                raise ValueError(f"{response.status}")
        self.health.append(time.perf_counter() - began)

    @contextlib.contextmanager
    def _send(self, method: str, path: str, body: str | None = None):
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=TIMEOUT)) as connection:
            connection.request(method, path, body, self.headers | {"Content-Type": "application/json"})
            yield connection.getresponse()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--least", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(Bystander(args.url, args.key).run(args.least)))


if __name__ == "__main__":
    main()
