"""What web pages of other sites can do to a server without a key; how keys are compared; clocks; sockets."""

import hmac
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from served_app import COMPLETIONS, error_of, run, served_app

from samewise.cli.serve import _hosts
from samewise.errors import BadParameter
from samewise.serve import settings as serve_settings
from samewise.serve.listen import Listen
from samewise.serve.settings import LOCAL_HOSTS, Keys, ServeSettings

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://served"}, 200),  # the server's own page
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://served.evil.example"}, 403),
        ({"Origin": "http://served:81"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_drive_a_server_without_a_key(
    headers: dict[str, str], status: int
) -> None:
    async def work() -> None:
        async with served_app() as served:
            response = await served.client.post(COMPLETIONS, json=BODY, headers=headers)
            assert response.status_code == status
            if status == 403:
                assert error_of(response)["code"] == "wrong_origin"
            # As a form or a script sends it without asking first.
            plain = headers | {"Content-Type": "text/plain"}
            response = await served.client.post(COMPLETIONS, json=BODY, headers=plain)
            assert response.status_code == (415 if status == 200 else status)

    run(work())


def test_allowed_origins_and_keys_open_the_server_to_pages() -> None:
    async def work() -> None:
        origin = {"Origin": "https://a.example"}
        async with served_app(ServeSettings(allowed_origins=("https://a.example",))) as served:
            allowed = await served.client.post(COMPLETIONS, json=BODY, headers=origin)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://a.example"
            other = await served.client.post(COMPLETIONS, json=BODY, headers={"Origin": "https://b.example"})
            assert other.status_code == 403
        async with served_app(ServeSettings(keys=Keys.of(["k"]))) as served:
            assert (await served.client.post(COMPLETIONS, json=BODY, headers=origin)).status_code == 401
            keyed = origin | {"Authorization": "Bearer k"}
            assert (await served.client.post(COMPLETIONS, json=BODY, headers=keyed)).status_code == 200

    run(work())


def test_a_name_that_is_not_the_servers_is_refused() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(allowed_hosts=LOCAL_HOSTS)) as served:
            for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
                assert (await served.client.get("/health", headers={"Host": host})).status_code == 200
            for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil"):
                response = await served.client.get("/health", headers={"Host": host})
                assert (response.status_code, error_of(response)["code"]) == (421, "wrong_host")

    run(work())


def test_hosts_are_checked_on_local_addresses_without_a_key() -> None:
    no_keys, keys = Keys(), Keys.of(["k"])
    assert _hosts(Listen(), no_keys, ()) == (*LOCAL_HOSTS, "127.0.0.1")
    assert _hosts(Listen(host="localhost"), no_keys, ("box",)) == (*LOCAL_HOSTS, "localhost", "box")
    assert _hosts(Listen(host="0.0.0.0"), no_keys, ()) is None
    assert _hosts(Listen(unix_socket=Path("s")), no_keys, ()) is None
    assert _hosts(Listen(), keys, ()) is None


def test_an_origin_is_written_as_browsers_write_it() -> None:
    for origin in ("https://a.example/", "a.example", "https://a.example/page", ""):
        with pytest.raises(BadParameter, match="allowed_origins"):
            ServeSettings(allowed_origins=(origin,))


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        (Listen(), True),
        (Listen(host="::1"), True),
        (Listen(host="127.9.9.9"), True),
        (Listen(unix_socket=Path("s")), True),
        (Listen(host="0.0.0.0"), False),
        (Listen(host="::"), False),
        (Listen(host="box.example"), False),
    ],
)
def test_local_addresses_are_known(listen: Listen, local: bool) -> None:
    assert listen.is_local is local


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(serve_settings, "hmac", Watched)
    keys = Keys.of(["first", "second", "third"])
    for key in ("first", "third", "firs", "", "x" * 10000):
        compared.clear()
        keys.match(key)
        assert compared == [(32, 32)] * 3  # digests, whatever was sent and whether one matched


def test_a_clock_that_jumps_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9))

    def jumping() -> float:
        return 1.7e9 + (-1) ** next(jumps) * 1e8  # years back and forth at every call

    async def work() -> None:
        async with served_app(on_port=True) as served:
            before = await served.complete(max_tokens=20)
            monkeypatch.setattr(time, "time", jumping)
            for _ in range(3):
                after: dict[str, Any] = await served.complete(max_tokens=20)
                assert after["choices"] == before["choices"]
            assert (await served.client.get("/metrics")).status_code == 200
            await served.check_idle()

    run(work())


def test_a_socket_of_another_server_is_told_apart(tmp_path: Path) -> None:
    listen = Listen(unix_socket=tmp_path / "s")
    assert listen.file_id() is None
    with listen.open():
        bound = listen.file_id()
        assert bound is not None
        (tmp_path / "s").rename(tmp_path / "old")
        with listen.open():
            assert listen.file_id() not in (None, bound)


def test_a_server_on_another_address_without_a_key_warns(caplog: pytest.LogCaptureFixture) -> None:
    from samewise.serve.process import run as run_process

    def fail() -> Any:
        raise BadParameter("no model here")

    for host, keys, warned in (
        ("0.0.0.0", Keys(), 1),
        ("0.0.0.0", Keys.of(["k"]), 0),
        ("127.0.0.1", Keys(), 0),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(BadParameter):
            run_process(fail, ServeSettings(keys=keys), Listen(host=host, port=0), version="0")
        lines = [record.getMessage() for record in caplog.records if "no key" in record.getMessage()]
        assert len(lines) == warned
