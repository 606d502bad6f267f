"""`samewise serve` as a process: where it listens, how it ends, and with which exit code."""

import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from samewise import AsyncLLM
from samewise.cli import main as cli
from samewise.errors import BadParameter, MachineError, UnknownModel
from samewise.serve.listen import Listen
from samewise.serve.logs import LOGGERS
from samewise.serve.process import run
from samewise.serve.settings import KEY_VARIABLE, Keys, ServeSettings, gather_keys
from samewise.testing import Scripted, byte_tokenizer, paced, tiny_engine, tiny_model

T = TypeVar("T")

SRC = Path(__file__).parents[2] / "src"
QUICK = ("--kv-memory", "4MiB", "--device", "cpu", "--json-logs")
LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


class Process:
    """A server process and its log."""

    def __init__(self, *args: str) -> None:
        program = "from samewise.cli.main import main; main()"
        env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *args], env=env, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> dict[str, Any]:
        """The first log line that contains a text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                entry: dict[str, Any] = json.loads(line)
                return entry
        raise AssertionError("".join(self.lines))

    def end(self, seconds: float = 30) -> int:
        try:
            _, remaining = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, remaining = self.process.communicate()
            raise AssertionError("it did not end:\n" + "".join(self.lines) + remaining) from None
        self.lines += remaining.splitlines(keepends=True)
        return self.process.returncode


@contextmanager
def started(*args: str) -> Iterator[Process]:
    server = Process(*args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_a_server_listens_loads_answers_drains_and_exits_with_0(folder: str, tmp_path: Path) -> None:
    keys, path = tmp_path / "keys", tmp_path / "s"
    keys.write_text("# ours\nsecret-one\nsecret-two\n")
    options = ("--unix-socket", str(path), "--api-key-file", str(keys), "--served-model-name", "tiny")

    def connect(key: str) -> httpx.Client:
        transport, headers = httpx.HTTPTransport(uds=str(path)), {"Authorization": f"Bearer {key}"}
        return httpx.Client(transport=transport, base_url="http://x", headers=headers, timeout=30)

    with started(folder, *options, *QUICK) as server:
        server.wait_for("listening on")
        with connect("secret-two") as client, connect("wrong") as unauthorised:
            assert client.get("/live").status_code == 200
            assert unauthorised.get("/v1/models").status_code == 401
            early = client.post("/v1/completions", json=LONG)
            assert early.status_code in (200, 503)
            contract = server.wait_for("ready")["message"].split()[-1]
            assert client.get("/version").json()["contract"] == contract
            long = LONG | {"stream": True, "n": 16, "proposer": "none"}
            with (
                connect("secret-one") as other,
                client.stream("POST", "/v1/completions", json=long) as stream,
            ):
                lines = stream.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for("draining")
                late = other.post("/v1/completions", json=LONG)
                assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
                remaining = [line for line in lines if line]
            assert remaining[-1] == "data: [DONE]"
            assert json.loads(remaining[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
    assert all(json.loads(line) for line in server.lines)
    assert not path.exists()
    assert not any(word in "".join(server.lines) for word in ("hello", "secret"))


# ---- in this process, which is faster


@pytest.fixture(autouse=True)
def no_real_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped while loading calls os._exit, which would end the test process."""

    def raise_exit(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", raise_exit)


def serve_here(
    client: Callable[[str], T],
    load: Callable[[], AsyncLLM],
    settings: ServeSettings | None = None,
    **tls: Path,
) -> tuple[int, T]:
    """(exit code, the client's result): the server in this thread, the client in another."""
    results: list[T] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask() -> None:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        for _ in range(2000):
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health", verify=False, timeout=30)
                break
            time.sleep(0.01)
        results.append(client(url))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        code = run(load, settings or ServeSettings(), Listen(port=port, **tls), version="0")
    finally:
        thread.join(30)
    return code, results[0]


def wait_until_ready(url: str, **options: Any) -> None:
    for _ in range(3000):
        if httpx.get(f"{url}/ready", **options).status_code == 200:
            return
        time.sleep(0.01)
    raise AssertionError("it was never ready")


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def tiny() -> AsyncLLM:
    return AsyncLLM.over(paced(tiny_engine()))


@pytest.mark.parametrize("signals", [1, 2])
def test_requests_are_aborted_after_the_timeout_or_a_second_signal(signals: int) -> None:
    def client(url: str) -> list[str]:
        wait_until_ready(url)
        body = LONG | {"stream": True, "n": 16}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            for number in range(signals):
                while number and httpx.get(f"{url}/ready", timeout=30).json().get("status") != "draining":
                    time.sleep(0.001)  # two signals that wait together are one
                send_sigterm()
                time.sleep(0.05)
            return [line for line in lines if line]

    code, remaining = serve_here(client, tiny, ServeSettings(shutdown_timeout=0.02 if signals == 1 else 60))
    assert code == 0
    assert remaining[-1] == "data: [DONE]"
    assert json.loads(remaining[-2].removeprefix("data: "))["error"]["code"] == "draining"


@pytest.mark.parametrize("known", [False, True])
def test_a_model_without_tools_is_told_of_at_the_start(known: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Agents send tools with their first request, which is refused then."""

    def load() -> AsyncLLM:
        llm = tiny()
        if known:
            llm.intake.tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}"
        return llm

    def client(url: str) -> None:
        wait_until_ready(url)
        send_sigterm()

    with caplog.at_level(logging.INFO):
        serve_here(client, load)
    assert ("no tool format" in caplog.text) is not known


def test_the_server_exits_with_1_when_its_engine_stops(caplog: pytest.LogCaptureFixture) -> None:
    def broken(ask: Any) -> list[int]:
        if len(ask.tokens) > 20:
            raise RuntimeError("CUDA error: a planted device error")
        return []

    def client(url: str) -> httpx.Response:
        wait_until_ready(url)
        return httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)

    code, response = serve_here(
        client, lambda: AsyncLLM.over(tiny_engine(make_proposer=lambda _: Scripted(broken)))
    )
    assert code == 1
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert "a planted device error" in caplog.text


def test_the_server_exits_with_1_when_its_engine_fails_while_it_drains() -> None:
    signalled = threading.Event()

    def broken(ask: Any) -> list[int]:
        if signalled.is_set():
            raise RuntimeError("CUDA error: a planted device error")
        return []

    def client(url: str) -> list[str]:
        wait_until_ready(url)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            send_sigterm()
            while httpx.get(f"{url}/ready", timeout=30).json().get("status") != "draining":
                time.sleep(0.001)
            signalled.set()
            return [line for line in lines if line]

    code, remaining = serve_here(
        client, lambda: AsyncLLM.over(paced(tiny_engine(make_proposer=lambda _: Scripted(broken)), 0.02))
    )
    assert "engine_failed" in remaining[-2]
    assert code == 1


def test_an_unknown_model_ends_the_server() -> None:
    def load() -> AsyncLLM:
        return AsyncLLM("/nowhere/at/all")

    with pytest.raises(UnknownModel):
        serve_here(lambda _: None, load)


def test_a_signal_while_loading_exits_with_0() -> None:
    gate = threading.Event()
    with pytest.raises(SystemExit) as exited:
        serve_here(lambda _: send_sigterm(), lambda: (gate.wait(20), tiny())[1])
    gate.set()
    assert exited.value.code == 0


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    pytest.importorskip("cryptography")
    import datetime as dt
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = dt.datetime.now(dt.UTC)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate_ = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(host, critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate_.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "cert.pem", folder / "key.pem"


def test_the_server_speaks_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with pytest.raises(BadParameter, match="cannot be used"):
        Listen(certificate=cert)  # without its key
    trust = ssl.create_default_context(cafile=str(cert))

    def client(url: str) -> int:
        try:
            wait_until_ready(url, verify=trust)
            return httpx.get(f"{url}/v1/models", verify=trust).status_code
        finally:
            time.sleep(1)  # TLS closes with two messages, and the event loop must still run to receive them
            send_sigterm()

    code, status = serve_here(client, tiny, certificate=cert, key=key)
    assert (code, status) == (0, 200)


# ---- options


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    """Restore the loggers, which the command line configures for its process."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def refusal(*args: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["samewise", "serve", *args])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--proposer", "wizard"), "proposer='wizard'"),
        (("--log-level", "loud"), "log_level='loud'"),
        (("--port", "70000"), "port=70000"),
        (("--max-num-queued-reqs", "0"), "max_queued=0"),
        (("--api-key", "a b"), "one word of printable ASCII"),
        (("--api-key-file", "/nowhere/keys"), "cannot be read"),
        (("--ssl-keyfile", "/nowhere/key.pem"), "ssl_certfile"),
        (("--ssl-certfile", "/nowhere/cert.pem"), "is not a file"),
        (("--shutdown-timeout", "-1"), "shutdown_timeout=-1"),
        (("--max-body-bytes", "1"), "max_body=1"),
        (("--served-model-name", ""), "served_model_name"),
        (("--host", "not an address"), "cannot listen on not an address"),
    ],
)
def test_invalid_options_are_refused_before_loading(
    args: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = refusal(*args, "--log-level", "error", capsys=capsys, monkeypatch=monkeypatch) if (
        "--log-level" not in args
    ) else refusal(*args, capsys=capsys, monkeypatch=monkeypatch)  # fmt: skip
    assert message in error


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen(port=taken.getsockname()[1])
        with pytest.raises(MachineError, match="choose another"):
            listen.open()


def test_a_unix_socket_replaces_only_abandoned_sockets(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("another program's file")
    with pytest.raises(MachineError, match="not a socket"):
        Listen(unix_socket=path).open()
    path.unlink()
    with Listen(unix_socket=path).open() as first:
        assert Listen(unix_socket=path).address(first) == f"unix:{path}"
        with pytest.raises(MachineError, match="another server listens"):
            Listen(unix_socket=path).open()
    Listen(unix_socket=path).open().close()  # no server listens on it: replaced
    with pytest.raises(MachineError, match="cannot listen"):
        Listen(unix_socket=tmp_path / "no" / "s").open()


def test_answers_are_sent_without_waiting_for_acknowledgements() -> None:
    with Listen(port=0).open() as listening:
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_address_is_a_url() -> None:
    with Listen(port=0).open() as listening:
        assert Listen(port=0).address(listening).startswith("http://127.0.0.1:")


# ---- keys


def test_keys_are_read_from_options_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "env-1, env-2")
    file = tmp_path / "keys"
    file.write_text("# a comment\nfile-1\n\nfile-2\n")
    keys = gather_keys(["given"], file)
    names = ("given", "env-1", "env-2", "file-1", "file-2")
    digests = {keys.match(name) for name in names}
    assert len(digests) == 5
    assert None not in digests
    assert keys.match("other") is None
    assert keys.match("") is None
    assert not any(name in repr(ServeSettings(keys=keys)) for name in names)
    file.write_text("# nothing\n")
    with pytest.raises(BadParameter, match="holds no key"):
        gather_keys((), file)
    monkeypatch.delenv(KEY_VARIABLE)
    assert not gather_keys()


def test_every_digest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of an answer would reveal a key's position in the list."""
    import hmac

    seen = []
    inner = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append(1) or inner(a, b))
    keys = Keys.of(["a", "b", "c"])
    for given in ("a", "c", "x"):
        seen.clear()
        keys.match(given)
        assert len(seen) == 3
