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
from samewise.serve.logs import OURS
from samewise.serve.process import Listen, run
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
    """A server of its own, and what it logs."""

    def __init__(self, *args: str) -> None:
        program = "from samewise.cli.main import main; main()"
        env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *args], env=env, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def wait_for(self, says: str) -> dict[str, Any]:
        """The log line that says so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if says in line:
                entry: dict[str, Any] = json.loads(line)
                return entry
        raise AssertionError("".join(self.lines))

    def end(self, seconds: float = 30) -> int:
        try:
            _, rest = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, rest = self.process.communicate()
            raise AssertionError("it did not end:\n" + "".join(self.lines) + rest) from None
        self.lines += rest.splitlines(keepends=True)
        return self.process.returncode


@contextmanager
def started(*args: str) -> Iterator[Process]:
    made = Process(*args)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


def test_a_servers_life(folder: str, tmp_path: Path) -> None:
    """It listens before it has loaded, answers, drains when told to end, and leaves with 0."""
    keys, path = tmp_path / "keys", tmp_path / "s"
    keys.write_text("# ours\nsecret-one\nsecret-two\n")
    options = ("--unix-socket", str(path), "--api-key-file", str(keys), "--served-model-name", "tiny")

    def connect(key: str) -> httpx.Client:
        transport, headers = httpx.HTTPTransport(uds=str(path)), {"Authorization": f"Bearer {key}"}
        return httpx.Client(transport=transport, base_url="http://x", headers=headers, timeout=30)

    with started(folder, *options, *QUICK) as server:
        server.wait_for("listening on")
        with connect("secret-two") as client, connect("wrong") as stranger:
            assert client.get("/health").status_code == 200
            assert stranger.get("/v1/models").status_code == 401
            early = client.post("/v1/completions", json=LONG)
            assert early.status_code in (200, 503)
            contract = server.wait_for("ready")["message"].split()[-1]
            assert client.get("/version").json()["contract"] == contract
            with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for("draining")
                with connect("secret-one") as other:
                    late = other.post("/v1/completions", json=LONG)
                    assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
    assert all(json.loads(line) for line in server.lines)
    assert not path.exists()
    assert not any(word in "".join(server.lines) for word in ("hello", "secret"))


# ---- the same in this process, which is quicker


@pytest.fixture(autouse=True)
def no_real_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is told to end while it loads leaves at once; this process is not to go with it."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


def serve_here(
    client: Callable[[str], T],
    load: Callable[[], AsyncLLM],
    settings: ServeSettings | None = None,
    **tls: Path,
) -> tuple[int, T]:
    """(exit code, what the client found): the server in this thread, the client in another."""
    found: list[T] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask() -> None:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        for _ in range(2000):
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health", verify=False, timeout=30)
                break
            time.sleep(0.01)
        found.append(client(url))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        code = run(load, settings or ServeSettings(), Listen(port=port, **tls), version="0")
    finally:
        thread.join(30)
    return code, found[0]


def ready(url: str, **how: Any) -> None:
    for _ in range(3000):
        if httpx.get(f"{url}/ready", **how).status_code == 200:
            return
        time.sleep(0.01)
    raise AssertionError("it never was ready")


def told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def tiny() -> AsyncLLM:
    return AsyncLLM.over(paced(tiny_engine()))


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_end_is_aborted(signals: int) -> None:
    """After the timeout; or at once, when told twice."""

    def client(url: str) -> list[str]:
        ready(url)
        body = LONG | {"stream": True, "n": 16}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(signals):
                told_to_end()
                time.sleep(0.05)
            return [line for line in lines if line]

    code, rest = serve_here(client, tiny, ServeSettings(shutdown_timeout=0.02 if signals == 1 else 60))
    assert code == 0
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"


def test_a_server_dies_with_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    def broken(ask: Any) -> list[int]:
        if len(ask.tokens) > 20:
            raise ZeroDivisionError("a planted bug")
        return []

    def client(url: str) -> httpx.Response:
        ready(url)
        return httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)

    code, response = serve_here(
        client, lambda: AsyncLLM.over(tiny_engine(make_proposer=lambda _: Scripted(broken)))
    )
    assert code == 1
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert "a planted bug" in caplog.text


def test_a_model_that_is_not_there_ends_the_server() -> None:
    def load() -> AsyncLLM:
        return AsyncLLM("/nowhere/at/all")

    with pytest.raises(UnknownModel):
        serve_here(lambda _: None, load)


def test_told_to_end_while_loading() -> None:
    gate = threading.Event()
    with pytest.raises(SystemExit) as left:
        serve_here(lambda _: told_to_end(), lambda: (gate.wait(20), tiny())[1])
    gate.set()
    assert left.value.code == 0


def certificate(folder: Path) -> tuple[Path, Path]:
    """One of our own making, and its key."""
    pytest.importorskip("cryptography")
    import datetime as dt
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = dt.datetime.now(dt.UTC)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(host, critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "cert.pem", folder / "key.pem"


def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with pytest.raises(BadParameter, match="will not do"):
        Listen(certificate=cert)  # its key is elsewhere
    trust = ssl.create_default_context(cafile=str(cert))

    def client(url: str) -> int:
        try:
            ready(url, verify=trust)
            return httpx.get(f"{url}/v1/models", verify=trust).status_code
        finally:
            time.sleep(0.3)  # TLS says goodbye twice, and the loop must be there to hear it
            told_to_end()

    code, status = serve_here(client, tiny, certificate=cert, key=key)
    assert (code, status) == (0, 200)


# ---- before anything is loaded


@pytest.fixture(autouse=True)
def same_logs() -> Iterator[None]:
    """The command line sets up logging for its process; this one goes on."""
    loggers = [logging.getLogger(name) for name in OURS]
    before = [(log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def refused(*args: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["samewise", "serve", *args])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
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
def test_mistakes_show_at_once(
    args: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = refused(*args, "--log-level", "error", capsys=capsys, monkeypatch=monkeypatch) if (
        "--log-level" not in args
    ) else refused(*args, capsys=capsys, monkeypatch=monkeypatch)  # fmt: skip
    assert says in told


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen(port=taken.getsockname()[1])
        with pytest.raises(MachineError, match="choose another"):
            listen.open()


def test_unix_sockets_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("a file of somebody's")
    with pytest.raises(MachineError, match="not a socket"):
        Listen(unix_socket=path).open()
    path.unlink()
    with Listen(unix_socket=path).open() as first:
        assert Listen(unix_socket=path).address(first) == f"unix:{path}"
        with pytest.raises(MachineError, match="another server listens"):
            Listen(unix_socket=path).open()
    Listen(unix_socket=path).open().close()  # left behind by a dead server: taken over
    with pytest.raises(MachineError, match="cannot listen"):
        Listen(unix_socket=tmp_path / "no" / "s").open()


def test_addresses() -> None:
    with Listen(port=0).open() as listening:
        assert Listen(port=0).address(listening).startswith("http://127.0.0.1:")


# ---- keys


def test_keys_come_from_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "env-1, env-2")
    file = tmp_path / "keys"
    file.write_text("# a comment\nfile-1\n\nfile-2\n")
    keys = gather_keys(["given"], file)
    names = ("given", "env-1", "env-2", "file-1", "file-2")
    customers = {keys.customer(name) for name in names}
    assert len(customers) == 5
    assert None not in customers
    assert keys.customer("other") is None
    assert keys.customer("") is None
    assert not any(name in repr(ServeSettings(keys=keys)) for name in names)
    file.write_text("# nothing\n")
    with pytest.raises(BadParameter, match="holds no key"):
        gather_keys((), file)
    monkeypatch.delenv(KEY_VARIABLE)
    assert not gather_keys()


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the time of an answer would tell where in the list a key stands."""
    import hmac

    seen = []
    inner = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append(1) or inner(a, b))
    keys = Keys.of(["a", "b", "c"])
    for given in ("a", "c", "x"):
        seen.clear()
        keys.customer(given)
        assert len(seen) == 3
