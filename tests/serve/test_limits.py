"""Clients that hold what others need: connections, memory, places, the event loop."""

import asyncio
import encodings.idna  # noqa: F401 - loaded by the first connection, also where no more files can be opened
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from served_app import CHAT, COMPLETIONS, ServedApp, error_of, listening, run, served_app, wait_until

from samewise.errors import BadParameter
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.replies import encode_slices
from samewise.openai.stream import StreamWriter
from samewise.schedule import owners, scheduler
from samewise.serve import answers
from samewise.serve.connections import RateLimitedWarning
from samewise.serve.http import EventStream, is_crowded, refuse_crowded
from samewise.serve.limits import ServeLimits
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.threads import FairThreads
from samewise.shares import SharedBudget
from samewise.testing import tiny_engine

SHORT = {"prompt": "hello", "temperature": 0, "max_tokens": 2}

JSON_TYPE = "Content-Type: application/json\r\n"


def port_of(served: ServedApp) -> int:
    return int(served.url.rpartition(":")[2])


async def connect(served: ServedApp) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port_of(served))


async def is_closed(reader: asyncio.StreamReader, seconds: float = 20) -> bytes:
    """What the server sent before it closed the connection."""
    data = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(seconds):
            while part := await reader.read(65536):
                data += part
    return data


async def send_endless_head(writer: asyncio.StreamWriter) -> None:
    """16 MB of fields; raises where the server closes the connection."""
    writer.write(b"GET / HTTP/1.1\r\n")
    for i in range(2000):
        writer.write(b"X-%d: " % i + b"a" * 8000 + b"\r\n")
        await writer.drain()


def unread_stream(served: ServedApp, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is never read."""
    raw = json.dumps(body | {"stream": True}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port_of(served)))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}Content-Length: {len(raw)}\r\n\r\n".encode()
    sock.sendall(head + raw)
    return sock


# ---- connections


def test_silent_connections_do_not_keep_others_out() -> None:
    async def work() -> None:
        limits = ServeLimits(max_connections=8, head_timeout=300)
        async with served_app(ServeSettings(limits=limits), on_port=True) as served:
            silent = [await connect(served) for _ in range(40)]
            for _ in range(3):
                assert (await served.client.get("/health")).status_code == 200
            for reader, _ in silent[:30]:  # the idlest were closed to make room
                await is_closed(reader)
            for _, writer in silent:
                writer.close()

    run(work())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on files")
def test_connections_are_accepted_again_once_there_are_files(caplog: pytest.LogCaptureFixture) -> None:
    import resource

    began = time.monotonic()

    async def work() -> None:
        async with served_app(on_port=True) as served:
            waiting = [socket.socket() for _ in range(10)]
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            os.close(first_free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
            try:
                for sock in waiting:
                    sock.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port_of(served)))
                await wait_until(lambda: "could not be accepted" in caplog.text)
                await asyncio.sleep(0.5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert (await served.client.get("/health")).status_code == 200
            for sock in waiting:
                sock.close()

    run(work())
    refused = [one for one in caplog.records if "could not be accepted" in one.getMessage()]
    assert len(refused) <= 1 + (
        time.monotonic() - began
    )  # though there is an attempt every tenth of a second
    assert not any(one.exc_info for one in caplog.records)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_a_connection_is_closed_at_the_deadline_of_a_head(sent: bytes, answered: bool) -> None:
    async def work() -> None:
        limits = ServeLimits(head_timeout=0.3, idle_timeout=60)
        async with served_app(ServeSettings(limits=limits), on_port=True) as served:
            reader, writer = await connect(served)
            if answered:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readuntil(b"}")
            writer.write(sent)
            await is_closed(reader)
            writer.close()

    run(work())


def test_a_body_has_a_deadline() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(limits=ServeLimits(body_timeout=0.3)), on_port=True) as served:
            reader, writer = await connect(served)
            writer.write(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}Content-Length: 100\r\n\r\n{{".encode()
            )
            answer = await is_closed(reader)
            assert b" 408 " in answer.splitlines()[0]
            assert b"body_timeout" in answer
            writer.close()
            await served.check_idle()

    run(work())


def test_an_endless_head_is_refused() -> None:
    async def work() -> None:
        limits = ServeLimits(head_timeout=300)
        async with served_app(ServeSettings(limits=limits), on_port=True) as served:
            reader, writer = await connect(served)
            writer.write(b"GET / HTTP/1.1\r\n")
            with suppress(ConnectionError):
                for i in range(200):
                    writer.write(b"X-%d: " % i + b"a" * 8000 + b"\r\n")
                    await writer.drain()
            with suppress(ConnectionError):
                await is_closed(reader)
            writer.close()

    run(work())


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_both_parsers_of_http_keep_the_limits(http: str) -> None:
    async def work() -> None:
        limits = ServeLimits(max_connections=8, head_timeout=0.5)
        async with served_app(ServeSettings(limits=limits)) as inner, listening(
            inner.app, limits, http=http
        ) as url:  # fmt: skip
            served = ServedApp(inner.client, inner.llm, inner.app, url)
            silent = [await connect(served) for _ in range(20)]
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.post(COMPLETIONS, json=SHORT)).status_code == 200
            for reader, _ in silent:  # displaced, or at the deadline of a head
                await is_closed(reader)
            _, writer = await connect(served)
            with pytest.raises(ConnectionError):
                await send_endless_head(writer)
            for _, one in silent:
                one.close()

    run(work())


def test_warnings_of_one_kind_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warn = RateLimitedWarning(clock=lambda: now)
    for _ in range(100):
        warn("no place: %d", 7)
    now = 1.5
    warn("no place: %d", 8)
    assert [record.getMessage() for record in caplog.records] == [
        "no place: 7",
        "no place: 8 (99 such messages were left out)",
    ]


def test_requests_of_one_key_leave_connections_to_others_and_to_public_paths() -> None:
    async def work() -> None:
        settings = ServeSettings(
            keys=Keys.of(["greedy", "modest"]), limits=ServeLimits(max_connections=16, max_listeners=64)
        )
        async with served_app(settings, on_port=True) as served:
            request = b"GET /samewise/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer greedy\r\n\r\n"
            heads = []
            for _ in range(20):
                reader, writer = await connect(served)
                writer.write(request)
                heads.append((await reader.readline(), writer))
            answered = [head for head, _ in heads].count(b"HTTP/1.1 200 OK\r\n")
            assert 1 < answered <= 11  # three times of what is free, of 14
            assert all(b" 429 " in head for head, _ in heads[answered:])
            assert (await served.client.get("/health")).status_code == 200
            response = await served.client.post(
                COMPLETIONS, json=SHORT, headers={"Authorization": "Bearer modest"}
            )
            assert response.status_code == 200
            for _, writer in heads:
                writer.transport.abort()

    run(work())


def test_public_paths_are_answered_while_requests_without_keys_fill_the_server() -> None:
    async def work() -> None:
        settings = ServeSettings(limits=ServeLimits(max_connections=16, max_listeners=64))
        async with served_app(settings, on_port=True) as served:
            writers = []
            for _ in range(16):
                reader, writer = await connect(served)
                writer.write(b"GET /samewise/live HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readline()
                writers.append(writer)
            for path in ("/health", "/live", "/metrics"):
                assert (await served.client.get(path)).status_code == 200
            status, error = await served.refusal(COMPLETIONS, SHORT)
            assert (status, error["code"]) == (429, "queue_full")
            for writer in writers:
                writer.transport.abort()
            await wait_until(lambda: not served.app.state.service.worker.num_active)

    run(work())


def test_one_key_cannot_take_every_listener_of_the_live_feed() -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["greedy", "modest"]), limits=ServeLimits(max_listeners=8))
        async with served_app(settings, on_port=True) as served:

            async def listen(key: str) -> tuple[bytes, asyncio.StreamWriter]:
                reader, writer = await connect(served)
                writer.write(
                    f"GET /samewise/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
                )
                return await reader.readline(), writer

            listening = [await listen("greedy") for _ in range(8)]
            assert [b" 200 " in head for head, _ in listening] == [True] * 6 + [False] * 2
            listening.append(await listen("modest"))
            assert b" 200 " in listening[-1][0]
            for _, writer in listening:
                writer.transport.abort()

    run(work())


# ---- places and unread answers


def test_places_are_given_back_when_the_engine_is_done_though_answers_are_unread() -> None:
    async def work() -> None:
        settings = ServeSettings(limits=ServeLimits(write_timeout=900))
        async with served_app(settings, on_port=True, max_queued=32, max_num_seqs=16) as served:
            body = SHORT | {"n": 16, "max_tokens": 450, "logprobs": 20, "ignore_eos": True}
            counters = served.llm._engine.scheduler.counters
            with unread_stream(served, body), unread_stream(served, body):
                await wait_until(lambda: counters.requests == 32)
                await wait_until(lambda: not served.worker._num_choices, 400)
                assert served.worker.num_active  # answers are still being sent
                assert (await served.complete())["choices"]
            await served.check_idle()

    run(work(), 900)


def test_a_client_that_does_not_read_is_closed_at_the_deadline() -> None:
    async def work() -> None:
        limits = ServeLimits(write_timeout=0.3)
        async with served_app(ServeSettings(limits=limits), on_port=True) as served:
            with unread_stream(
                served, SHORT | {"n": 16, "max_tokens": 450, "logprobs": 20, "ignore_eos": True}
            ):
                await wait_until(lambda: served.worker.num_active == 1)
                await wait_until(lambda: served.worker.num_active == 0)
            await served.check_idle()

    run(work())


def test_the_largest_unread_answer_is_dropped_where_they_fill_the_memory() -> None:
    dropped = []
    budget = UnreadBudget(100)
    small, large = (
        budget.account(lambda: dropped.append("small")),
        budget.account(lambda: dropped.append("large")),
    )
    large.add(60)
    small.add(30)
    assert dropped == []
    small.add(20)
    assert dropped == ["large"]
    assert budget.used == 50
    large.add(1000)  # of a closed account: nothing waits
    small.remove(50)
    assert (budget.used, dropped) == (0, ["large"])


def test_many_small_unread_answers_of_one_key_cost_no_other_key_an_answer() -> None:
    dropped: list[str] = []
    budget = UnreadBudget(100)
    modest = budget.account(lambda: dropped.append("modest"), owner=b"modest")
    modest.add(30)
    for _ in range(8):
        budget.account(lambda: dropped.append("greedy"), owner=b"greedy").add(10)
    assert dropped == ["greedy"]
    modest.add(20)
    assert dropped == ["greedy"] * 3
    modest.add(40)
    assert (dropped, budget.used) == (["greedy"] * 3 + ["modest"], 50)  # it had most


def test_a_large_answer_counts_for_the_key_it_was_made_with() -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["greedy", "modest"]))
        async with served_app(settings) as served:
            owners = []
            unread = served.app.state.service.unread
            account = unread.account
            unread.account = lambda drop, owner: owners.append(owner) or account(drop, owner=owner)
            body = SHORT | {"n": 4, "max_tokens": 40, "logprobs": 20, "ignore_eos": True}
            for key in ("greedy", "modest"):
                headers = {"Authorization": f"Bearer {key}"}
                for path, sent in (
                    (COMPLETIONS, body),
                    (COMPLETIONS, body | {"stream": True}),
                    ("/tokenize", SHORT),
                ):
                    assert (await served.client.post(path, json=sent, headers=headers)).status_code == 200
            first, second = settings.keys.digests
            assert set(owners) == {first, second}
            assert owners == sorted(owners, key=(first, second).index)
            assert unread.used == 0

    run(work())


def test_an_answer_that_is_not_read_ends_and_its_memory_is_free() -> None:
    async def work() -> None:
        limits = ServeLimits(max_unread=2**18)
        async with served_app(ServeSettings(limits=limits), on_port=True) as served:
            body = SHORT | {"n": 16, "max_tokens": 450, "logprobs": 20, "ignore_eos": True}
            with unread_stream(served, body):
                await wait_until(lambda: served.worker.num_active == 1)
                await wait_until(lambda: served.llm._engine.scheduler.counters.aborted > 0)
                assert served.app.state.service.unread.used <= 2**18
                assert (await served.complete())["choices"]
            await served.check_idle()

    run(work())


def test_one_key_cannot_take_every_place() -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["greedy", "modest"]))
        async with served_app(settings, max_queued=8, max_num_seqs=4) as served:

            async def ask(key: str, **body: Any) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                return await served.client.post(COMPLETIONS, json=SHORT | body, headers=headers)

            long = [asyncio.create_task(ask("greedy", max_tokens=400, ignore_eos=True)) for _ in range(12)]
            await wait_until(lambda: any(task.done() for task in long))
            refused = [task.result() for task in long if task.done()]
            assert {error_of(response)["code"] for response in refused} == {"share_used"}
            assert (await ask("modest")).status_code == 200
            assert not all(task.done() for task in long)  # it did not wait for the others
            answers = await asyncio.gather(*long)
            assert sum(answer.status_code == 200 for answer in answers) == 9
            await served.check_idle()

    run(work())


def test_keys_do_not_share_compiled_grammars() -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["one", "other"]))
        async with served_app(settings, eos=True) as served:
            body = SHORT | {"max_tokens": 20, "structured_outputs": {"regex": "[ab]{2}"}}
            answers = []
            for key in ("one", "other", "one"):
                response = await served.client.post(
                    COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"}
                )
                assert response.status_code == 200, response.text
                answers.append(response.json()["choices"][0]["text"])
            assert len(set(answers)) == 1
            kept = served.llm.intake._grammars._kept
            assert {owner for owner, _ in kept} == set(settings.keys.digests)

    run(work())


def test_grammars_of_one_key_do_not_delay_those_of_another() -> None:
    """One key's compiling stands still until the other one's answers are there."""

    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["greedy", "modest"]))
        greedy, _ = settings.keys.digests
        async with served_app(settings, eos=True) as served:
            start, gate, begun = served.llm.intake.start_compiling, threading.Event(), threading.Event()

            def held(grammar: Any, *, owner: bytes | None = None) -> Any:
                if owner == greedy:
                    begun.set()
                    gate.wait(240)
                return start(grammar, owner=owner)

            async def ask(key: str, regex: str) -> int:
                body = SHORT | {"structured_outputs": {"regex": regex}}
                headers = {"Authorization": f"Bearer {key}"}
                return (await served.client.post(COMPLETIONS, json=body, headers=headers)).status_code

            assert await ask("modest", "[ab]{2}") == 200
            served.llm.intake.start_compiling = held  # type: ignore[method-assign]
            asking = [asyncio.create_task(ask("greedy", f"[ab]{{{i + 1}}}")) for i in range(40)]
            try:
                await wait_until(begun.is_set)
                async with asyncio.timeout(120):
                    assert await ask("modest", "[ab]{2}") == 200  # compiled before
                    assert await ask("modest", "[ab]{3}") == 200
            finally:
                gate.set()
            assert set(await asyncio.gather(*asking)) <= {200, 429}
            served.llm.intake.start_compiling = None  # type: ignore[method-assign,assignment]
            assert await ask("modest", "[ab]{3}") == 200  # in no thread

    run(work())


# ---- bodies


def test_bodies_share_a_budget() -> None:
    budget = SharedBudget(100)
    assert budget.take("a", 60)
    assert not budget.take("a", 30)  # more than three times of what would be left
    assert budget.take("b", 40)  # the first of an owner takes what is free
    assert not budget.take("c", 1)
    budget.give_back("a", 60)
    budget.give_back("b", 40)
    assert budget.used == 0


def test_held_bodies_do_not_fill_the_memory() -> None:
    async def work() -> None:
        limits = ServeLimits(max_bodies=2**20)
        settings = ServeSettings(max_body=2**19, limits=limits)
        async with served_app(settings, on_port=True) as served:
            fields = f"Host: x\r\n{JSON_TYPE}Content-Length: {2**19}\r\n"
            head = f"POST {COMPLETIONS} HTTP/1.1\r\n{fields}\r\n".encode()
            held = []
            for _ in range(8):
                _, writer = await connect(served)
                writer.write(head + b" " * (2**19 - 1))
                held.append(writer)
            bodies = served.app.state.service._bodies
            await wait_until(lambda: bodies.used > 2**17)
            assert bodies.used <= 2**20
            assert (await served.complete())["choices"]  # a small body finds room
            for writer in held:
                writer.transport.abort()
            await wait_until(lambda: bodies.used == 0)

    run(work())


def test_parts_of_a_body_that_are_kept_count_until_the_answer_ends() -> None:
    async def work() -> None:
        async with served_app(on_port=True) as served:
            bodies = served.app.state.service._bodies
            large = {"prediction": {"type": "content", "content": "a" * 300_000}}
            for more, kept in ((large, 300_005), ({}, 0)):
                with unread_stream(served, SHORT | {"max_tokens": 450, "ignore_eos": True} | more):
                    await wait_until(lambda: any(one.readers for one in served.worker._active))
                    assert bodies.used == kept
                await served.check_idle()
                assert bodies.used == 0
            raw = SHORT | {"max_tokens": 450, "ignore_eos": True, "stream": True} | large
            bodies.limit = 310_000  # the body itself has more, and a second one finds no room
            assert (await served.refusal(COMPLETIONS, raw))[1]["code"] == "bodies_full"
            assert bodies.used == 0

    run(work())


@pytest.mark.parametrize(("limit", "complete"), [(2**21, True), (2**19, False)])
def test_large_events_are_sent_in_slices_and_counted(limit: int, complete: bool) -> None:
    event, sent, unread = b"x" * 2**20, [], UnreadBudget(limit)

    async def events() -> AsyncGenerator[bytes]:
        yield b"first"
        yield event

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 4:
            assert unread.used == 2**20 - 2**16
        await asyncio.sleep(0)

    async def receive() -> Any:
        await asyncio.sleep(100)

    async def work() -> None:
        closed: list[bool] = []
        stream = EventStream(events(), close=lambda: closed.append(True), unread=unread, owner=None)
        await stream({"type": "http"}, receive, send)
        assert (unread.used, closed) == (0, [True])

    run(work())
    assert (b"".join(sent) == b"first" + event) == complete
    assert max(map(len, sent)) <= 2**16


def test_a_body_of_too_many_values_is_refused() -> None:
    refuse_crowded(b'{"prompt": "' + b"a" * 5000 + b'"}', 1000)
    with pytest.raises(Exception, match="more than 1000 values"):
        refuse_crowded(b"[" + b"1," * 2000 + b"1]", 1000)


@pytest.mark.parametrize(
    ("value", "crowded"),
    [
        ([1] * 1000, False),
        ([1] * 1100, True),
        ({str(i): i for i in range(200)}, False),
        ({str(i): i for i in range(210)}, True),
        ([[]] * 300, True),
        ([{}] * 300, True),
        ({"prompt": ",:[{" * 5000}, False),
        ({"prompt": json.dumps([json.dumps({"\\": "\\"})] * 500)}, False),  # quotes within quotes
        ({'"' * 5 + "\\": ",:[{" * 500, "then": [1] * 1100}, True),
    ],
)
def test_keys_and_lists_count_more_than_numbers_and_texts_do_not_count(value: Any, crowded: bool) -> None:
    assert is_crowded(json.dumps(value).encode(), 1024) == crowded


def test_texts_of_other_encodings_count() -> None:
    text = json.dumps(['"', [1] * 2000, ",:[{" * 10])
    assert is_crowded(text.encode("utf-16"), 1024)
    assert not is_crowded(json.dumps(["a" * 2000]).encode("utf-16"), 1024)


def test_values_of_what_is_not_json_are_counted_in_linear_time() -> None:
    for raw in (b'"a\\' * 100_000, b'""' * 200_000, b'"' + b",:" * 200_000, b'{"a' + b'\\"' * 300_001):
        is_crowded(b"[" * 300 + raw, 1024)


@pytest.mark.parametrize("digits", [64, 65])
def test_integers_of_many_digits_are_refused(digits: int) -> None:
    async def work() -> None:
        async with served_app() as served:
            raw = json.dumps(SHORT | {"unknown": [-int("9" * (digits - 1))]})
            response = await served.client.post(
                COMPLETIONS, content=raw, headers={"Content-Type": "application/json"}
            )
            if digits == 64:
                assert response.status_code == 200
            else:
                assert "65 digits" in error_of(response)["message"]

    run(work())


def test_limits_that_are_no_numbers_above_0_are_refused() -> None:
    for name in ("max_connections", "head_timeout", "max_bodies"):
        with pytest.raises(BadParameter, match=name):
            ServeLimits(**{name: 0})
    with pytest.raises(BadParameter, match="max_bodies"):
        ServeSettings(max_body=2**30)


# ---- the event loop


def test_prompts_are_refused_by_their_characters_first() -> None:
    async def work() -> None:
        async with served_app() as served:
            text = "a" * (32 * 512 + 1)
            status, error = await served.refusal(COMPLETIONS, {"prompt": text})
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
            assert "characters" in error["message"]
            assert await served.refusal("/tokenize", {"prompt": text}) == (status, error)

    run(work())


def test_health_is_answered_while_large_answers_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering stands still until `/health` was answered."""
    rendering, answered = threading.Event(), threading.Event()

    def encode_later(body: Any) -> Iterator[bytes]:
        rendering.set()
        assert answered.wait(60)
        yield from encode_slices(body)

    async def work() -> None:
        async with served_app(on_port=True) as served:
            body = SHORT | {"n": 16, "max_tokens": 100, "logprobs": 20, "ignore_eos": True}
            monkeypatch.setattr(answers, "encode_slices", encode_later)
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=body))
            await wait_until(rendering.is_set)
            assert (await served.client.get("/health")).status_code == 200
            answered.set()
            answer = (await asking).json()
            assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [100] * 16

    run(work())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 400, "echo": True, "logprobs": 20, "n": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400}], "return_token_ids": True, "n": 6}),
    ],
)
def test_events_that_repeat_a_long_prompt_are_made_in_threads(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    events = StreamWriter.events

    def noted(self: Any, *given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return events(self, *given)

    monkeypatch.setattr(StreamWriter, "events", noted)

    async def work() -> None:
        async with served_app() as served:
            body_ = body | {"max_tokens": 3, "temperature": 0}
            whole = await served.post(path, body_)
            streamed = await served.events(path, body_)
            assert threads
            assert not any(threads)
            if path == COMPLETIONS:
                first = [one["choices"][0] for one in streamed if one["choices"][0]["text"][:1] == "a"]
                tables = [choice["logprobs"]["top_logprobs"] for choice in whole["choices"]]
                assert [choice["logprobs"]["top_logprobs"][:400] for choice in first] == [
                    table[:400] for table in tables
                ]

    run(work())


def test_threads_are_shared_between_owners() -> None:
    async def work() -> None:
        threads, gate, ran = FairThreads(2), asyncio.Event(), []
        loop = asyncio.get_running_loop()

        def wait(name: str) -> None:
            ran.append(name)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)

        greedy = [asyncio.ensure_future(threads.run(lambda: wait("greedy"), owner=b"g")) for _ in range(5)]
        await wait_until(lambda: bool(ran))
        modest = asyncio.ensure_future(threads.run(lambda: wait("modest"), owner=b"m"))
        await wait_until(lambda: "modest" in ran)
        assert ran.count("greedy") == 1
        greedy.pop().cancel()  # one that waits
        gate.set()
        await asyncio.gather(modest, *greedy)
        assert ran.count("greedy") == 4

    run(work())


def test_sequences_of_many_owners_give_the_same_bits() -> None:
    async def work() -> None:
        body = SHORT | {"prompt": "the same bits", "max_tokens": 40, "n": 6, "temperature": 1, "seed": 3}
        async with served_app() as served:
            alone = [choice["text"] for choice in (await served.complete(**body))["choices"]]
        settings = ServeSettings(keys=Keys.of(["a", "b", "c"]))
        async with served_app(settings, max_num_seqs=8) as served:

            async def ask(key: str) -> list[str]:
                response = await served.client.post(
                    COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"}
                )
                return [choice["text"] for choice in response.json()["choices"]]

            answers = await asyncio.gather(*(ask(key) for key in "abcabcab"))
            assert all(answer == alone for answer in answers)
            await served.check_idle()

    run(work())


def test_tiny_engines_have_places_for_several_owners() -> None:
    assert tiny_engine().limits.max_rows // 4 > 1


def test_answers_whose_grammars_wait_for_each_other_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        pattern = {"structured_outputs": {"regex": "[a-f]{3,40}"}}
        body = SHORT | pattern | {"prompt": "the same", "max_tokens": 30, "n": 3, "temperature": 1, "seed": 3}
        async with served_app() as served:
            alone = [choice["text"] for choice in (await served.complete(**body))["choices"]]
        monkeypatch.setattr(owners, "SLOW", -1.0)
        monkeypatch.setattr(owners, "SLOW_SECONDS", 0.0)  # one of them in a frame
        stood_back = []
        without = scheduler.without_slow_grammars

        def noted(running: list[Any]) -> list[Any]:
            left = without(running)
            stood_back.append(len(running) - len(left))
            return left

        monkeypatch.setattr(scheduler, "without_slow_grammars", noted)
        async with served_app(ServeSettings(keys=Keys.of(["a", "b"])), max_num_seqs=8) as served:

            async def ask(key: str) -> list[str]:
                headers = {"Authorization": f"Bearer {key}"}
                response = await served.client.post(COMPLETIONS, json=body, headers=headers)
                return [choice["text"] for choice in response.json()["choices"]]

            answers = await asyncio.gather(*(ask(key) for key in "abab"))
            assert max(stood_back) > 0
            assert all(answer == alone for answer in answers)
            await served.check_idle()

    run(work())
