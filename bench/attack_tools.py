"""What the attacks of bench/attack.py share: a server process, plain connections, and what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ATTACKER, BYSTANDER, OTHER = "attacker-key", "bystander-key", "other-key"
KEYS = (ATTACKER, BYSTANDER, OTHER)
MIB = 2**20
FIRST_TOKEN_RATIO = 3.0
"""A bystander's median time to the first token under attack may be this many times that of a quiet server."""
HEALTH_SECONDS = 0.1
"""`/health` answers within this time, in seconds, in 99 of 100 cases while an attack runs."""
HEALTH_WORST_SECONDS = 0.5
"""And in every case within this time. Set by hand: on two busy cores single answers took 0.27 s."""
START_SECONDS = 180.0  # for a server to load its model
COMMAND = (sys.executable, "-c", "from samewise.cli.main import main; main()")
"""The command line of this working tree, whichever samewise is installed."""


def environment(**changes: str) -> dict[str, str]:
    """The environment of servers and commands: this working tree, one thread of computation."""
    base = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    extra = os.environ.get("PYTHONPATH")
    if extra:
        base["PYTHONPATH"] += os.pathsep + extra
    return os.environ | base | offline | changes


# ---- results


@dataclass
class Outcome:
    """What one attack showed. It held if nothing is listed in `broken`."""

    tried: int
    figure: str  # one phrase for the table
    broken: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def after(self, earlier: Outcome) -> Outcome:
        """This outcome with what an earlier run of the same attack tried and broke."""
        return replace(self, tried=earlier.tried + self.tried, broken=earlier.broken + self.broken)


@dataclass(frozen=True)
class Attack:
    """An attack: a line of the table in docs/security.md."""

    line: str
    name: str
    title: str
    before: str  # what the same attack did before there was a defence
    run: Callable[..., Awaitable[Outcome]]
    options: tuple[str, ...] = ()  # of the server
    file_limit: int | None = None  # `ulimit -n` of the server
    server: bool = True  # whether it needs one
    seconds: float = 120.0  # bound on its time


ATTACKS: list[Attack] = []


def attack(line: str, title: str, before: str, **fields: Any) -> Callable[..., Any]:
    """Register a function as an attack; its name with dashes is the attack's."""

    def register(function: Callable[..., Awaitable[Outcome]]) -> Callable[..., Awaitable[Outcome]]:
        name = function.__name__.replace("_", "-")
        ATTACKS.append(Attack(line, name, title, before, function, **fields))
        return function

    return register


# ---- the server


class Server:
    """`samewise serve` in a process of its own, with three keys and a log file."""

    def __init__(
        self,
        model: str,
        folder: Path,
        options: tuple[str, ...] = (),
        *,
        file_limit: int | None = None,
        keys: bool = True,
        command: tuple[str, ...] = COMMAND,
        **env: str,
    ) -> None:
        key_file = folder / "keys"
        key_file.write_text("".join(f"{key}\n" for key in KEYS))
        self.log = Path(tempfile.mkstemp(dir=folder, suffix=".log")[1])
        with_keys = ("--api-key-file", str(key_file)) if keys else ()
        arguments = ("serve", model, "--port", "0", "--device", "cpu", "--json-logs", *with_keys, *options)
        limited = ("sh", "-c", 'ulimit -n "$0"; exec "$@"', str(file_limit)) if file_limit else ()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*limited, *command, *arguments], env=environment(**env), stdout=out, stderr=out
            )
        try:
            self.url = self._wait_for("listening on ").split("listening on ")[1].split(";")[0]
            self._wait_for("ready: ")
        except BaseException:
            self.kill()
            raise
        self.port = int(self.url.rsplit(":", 1)[1]) if self.url.startswith("http") else 0
        self.start_rss = self.memory()

    def _wait_for(self, text: str) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for line in self.log.read_text(errors="replace").splitlines():
                if text in line and line.startswith("{"):
                    return json.loads(line)["message"]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(
            f"the server did not say {text!r}:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """The server's process and its descendants."""
        found, new = [], [self.process.pid]
        while new:
            found += new
            new = [child for pid in new for child in _children(pid)]
        return found

    def memory(self) -> int:
        """Resident bytes of the server and its descendants."""
        return sum(_rss(pid) for pid in self.pids())

    def descriptors(self) -> int:
        with contextlib.suppress(OSError):
            return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        return 0

    def log_text(self) -> str:
        """The log, at most its first 16 MiB."""
        with self.log.open(errors="replace") as file:
            return file.read(16 * MIB)

    def log_lines(self) -> int:
        return self.log_text().count("\n")

    def stop(self, seconds: float = 90.0) -> tuple[float, int | None]:
        """SIGTERM; seconds until it ended and the exit code, None if it had to be killed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - began
        self.kill()
        return took, code

    def kill(self) -> None:
        for pid in reversed(self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _rss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    return 0


# ---- connections


@dataclass(frozen=True)
class Reply:
    """An HTTP response and the seconds it took."""

    status: int
    body: bytes
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The error's code, if the body is an error."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            return self.json["error"]["code"]
        return None


def head(method: str, path: str, length: int, *, key: str | None = ATTACKER, **headers: str) -> bytes:
    """The bytes of a request's head."""
    lines = [f"{method} {path} HTTP/1.1"]
    fields = {"Host": "127.0.0.1", "Connection": "close", "Content-Length": str(length)}
    fields |= {"Content-Type": "application/json"} if length else {}
    fields |= {"Authorization": f"Bearer {key}"} if key else {}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in fields.items()), "", ""]).encode("latin-1")


async def send(
    server: Server,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = ATTACKER,
    timeout: float = 100.0,
    **headers: str,
) -> Reply:
    """One request over its own connection. Status 0: no answer in time, or the connection was closed."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            async with connection(server) as (reader, writer):
                writer.write(head(method, path, len(raw), key=key, **headers) + raw)
                await writer.drain()
                data = await reader.read(-1)
    except (OSError, TimeoutError) as error:
        return Reply(0, repr(error).encode(), time.monotonic() - began)
    return parse_reply(data, time.monotonic() - began)


def parse_reply(data: bytes, seconds: float) -> Reply:
    """A response with a closed connection; chunks are joined."""
    top, _, body = data.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    if not first.startswith("HTTP/1."):
        return Reply(0, data[:300], seconds)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _join_chunks(body)
    return Reply(int(first.split()[1]), body, seconds, headers)


def _join_chunks(body: bytes) -> bytes:
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


@contextlib.asynccontextmanager
async def connection(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection; reset at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**26)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def sample_memory(server: Server, seconds: float = 0.2) -> list[int]:
    """Append the server's memory to a list until cancelled; returned through `peak_memory`."""
    values: list[int] = []
    try:
        while True:
            values.append(server.memory())
            await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        values.append(server.memory())
        return values


@contextlib.asynccontextmanager
async def peak_memory(server: Server) -> AsyncIterator[dict[str, int]]:
    """The server's memory while the block runs: bytes at the `start`, the `peak` and at the `end`."""
    sampling = asyncio.ensure_future(sample_memory(server))
    await asyncio.sleep(0)
    result: dict[str, int] = {"start": server.memory(), "peak": 0, "end": 0}
    try:
        yield result
    finally:
        sampling.cancel()
        values = await sampling
        result |= {"peak": max(values), "end": values[-1]}


# ---- commands


def run_command(*args: str, timeout: float = 120.0, **env: str) -> subprocess.CompletedProcess[str]:
    """`samewise ARGS...`; exit code -1 if it ran past the timeout and was killed."""
    try:
        return subprocess.run(
            [*COMMAND, *args], env=environment(**env), capture_output=True, text=True, timeout=timeout,
            check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(error.cmd, -1, "", f"ran past {timeout} s")


# ---- the bystander


@dataclass(frozen=True)
class Watched:
    """What a bystander measured."""

    first_token: list[float]
    health: list[float]
    errors: list[str]

    @property
    def median(self) -> float:
        return statistics.median(self.first_token) if self.first_token else float("nan")

    @property
    def worst(self) -> float:
        return max(self.first_token, default=float("nan"))

    @property
    def health_worst(self) -> float:
        return max(self.health, default=float("nan"))

    @property
    def health_p99(self) -> float:
        return sorted(self.health)[int(len(self.health) * 0.99)] if self.health else float("nan")


class Watch:
    """A bystander process, from its start to `end`."""

    def __init__(self, server: Server, least: int = 5) -> None:
        script = str(Path(__file__).with_name("bystander.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, server.url, BYSTANDER, "--least", str(least)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def end(self) -> Watched:
        out, _ = self.process.communicate(timeout=400)
        return Watched(**json.loads(out))


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="samewise-attack-") as folder:
        yield Path(folder)


def tiny_folder(path: Path) -> str:
    """A checkpoint folder with a tiny random model, for trying the script itself."""
    from samewise.testing import byte_tokenizer, tiny_model

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    tiny_model(max_position_embeddings=2048).save_pretrained(path)
    return str(path)


class Bench:
    """The model under attack, a folder for files, and the running server, reused while its options fit."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = tiny_folder(folder / "tiny") if model == "tiny" else model
        self.folder = folder
        self._server: Server | None = None
        self._made_with: tuple[Any, ...] = ()

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def serve(self, options: tuple[str, ...] = (), *, file_limit: int | None = None) -> Server:
        """The running server if it has these options and is alive, else a new one."""
        if self._server is None or not self._server.alive or self._made_with != (options, file_limit):
            self.close()
            self._server = Server(self.model, self.folder, options, file_limit=file_limit)
            self._made_with = (options, file_limit)
        return self._server

    def start(self, options: tuple[str, ...] = (), **settings: Any) -> Server:
        """One more server, which the attack must stop itself."""
        return Server(self.model, self.folder, options, **settings)

    def close(self) -> None:
        if self._server is not None and self._server.alive:
            self._server.stop(seconds=20)
        self._server = None
