"""bench/scale.py: whose replicas it finds, and that it counts no stream that is not complete."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scale(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import scale

    return scale


SLEEPER = "import sys; sys.stdin.read()"
NAME = "ray::ServeReplica:an-application:Engines"
STARTER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}, {NAME!r}])"


def test_replicas_of_other_servers_are_left_alone(scale):
    """One replica is below a server, another one is not."""
    server = subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", SLEEPER, NAME], stdin=subprocess.PIPE)
    with server, other:
        while not (found := scale.replica_pids(server.pid)):
            assert server.poll() is None
        assert other.pid in scale.replica_pids(os.getpid())
        assert found != [other.pid]
        assert len(found) == 1


class Answers(BaseHTTPRequestHandler):
    """Two tokens as events; `max_tokens` of 1 is never said to be complete, 2 is refused."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(503 if asked["max_tokens"] == 2 else 200)
        self.end_headers()
        for end in (None, None if asked["max_tokens"] == 1 else "length"):
            choice = {"token_ids": [7], "text": "a", "logprobs": None, "finish_reason": end}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def log_message(self, *_):
        """Nothing is logged."""


def test_a_stream_that_is_not_complete_ends_a_timing(scale):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            results = asyncio.run(scale.ask_complete(url, [scale.body(1, 9), scale.body(2, 9)], 2))
            assert [got.tokens for got, _ in results] == [[7, 7]] * 2
            for tokens, reason in ((1, "None after 2 tokens"), (2, "status 503 after 0 tokens")):
                with pytest.raises(SystemExit, match=reason):
                    asyncio.run(scale.ask_complete(url, [scale.body(1, 9), scale.body(2, tokens)], 2))
        finally:
            server.shutdown()
            serving.join()
