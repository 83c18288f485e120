"""Strangers see nothing: no cookie, a wrong Host, another site's call, a wrong key, hostile words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.routing import Mount
from starlette.testclient import TestClient

from atoll.errors import UsageError
from coordinator.client.endpoint import Endpoint
from coordinator.dashboard.access import COOKIE_S, HEADERS, WRONG_KEYS_AT_ONCE, Keys, Listening, listening
from coordinator.dashboard.app import Settings, make_app
from tests.coordinator.dashboard.pictured import HOSTILE

HOST = "http://127.0.0.1:7780"
KEY = "k" * 32
SETTINGS = Settings(wrong_key_delay_s=0.0)


def viewer(settings: Settings = SETTINGS, keys: Keys | None = None) -> TestClient:
    nobody = Endpoint("127.0.0.1", 1)
    return TestClient(make_app(nobody, settings, keys or Keys(KEY)), base_url=HOST, follow_redirects=False)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with viewer() as made:
        yield made


def signed_in(client: TestClient, key: str = KEY, **headers: str) -> Any:
    return client.post("/session", content=key, headers={"origin": HOST, **headers})


def routes(client: TestClient) -> list[str]:
    app: Any = client.app
    paths = [route.path for route in app.routes if not isinstance(route, Mount)]
    return [re.sub(r"\{[^}]*\}", "x", path) for path in paths]


def test_without_a_cookie_every_route_answers_401_and_shows_nothing(client: TestClient) -> None:
    paths = [path for path in routes(client) if path != "/session"]
    assert {"/", "/events", "/stream", "/jobs/x", "/workers/x", "/jobs/x/trace"} <= set(paths)
    for path in [*paths, "/nothing/here", "/static/../session"]:
        for accept in ("text/html", "text/event-stream", "*/*"):
            answer = client.get(f"{path}?topic=fleet", headers={"accept": accept})
            assert answer.status_code in (401, 405), path
            assert "data-topics" not in answer.text


@pytest.mark.parametrize(
    "cookie", ["", "x", "9999999999.", "9999999999." + "0" * 64, "nan.x", "9" * 400 + ".x"]
)
def test_a_forged_cookie_opens_nothing(client: TestClient, cookie: str) -> None:
    assert client.get("/", headers={"cookie": f"atoll-7780={cookie}"}).status_code == 401


def test_the_key_becomes_a_cookie_that_scripts_cannot_read_and_other_sites_do_not_send(
    client: TestClient,
) -> None:
    answer = signed_in(client)
    assert answer.status_code == 200
    made = answer.headers["set-cookie"]
    assert made.startswith("atoll-7780=")
    assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={int(COOKIE_S)}"} <= set(re.split(r"; ", made))
    assert "Secure" not in made
    assert client.get("/").status_code == 200


def test_under_tls_the_cookie_is_secure() -> None:
    settings = replace(
        SETTINGS, listening=Listening("192.0.2.7", tls=("c", "k"), names=frozenset({"atoll.example"}))
    )
    with viewer(settings) as client:
        origin = {"origin": "https://atoll.example", "host": "atoll.example"}
        assert "Secure" in signed_in(client, **origin).headers["set-cookie"]


def test_a_container_may_listen_for_the_loopback_of_its_host_and_for_nobody_else() -> None:
    page = Listening("172.17.0.2", 7780, published=("127.0.0.1", 8080))
    assert page.address(7780) == "http://127.0.0.1:8080/"
    assert not page.secure, "browsers would not send a Secure cookie over http"
    assert page.goes_by("127.0.0.1:8080")
    assert not page.goes_by("fleet.example:8080")
    with pytest.raises(UsageError, match="give the loopback address of the host"):
        Listening("172.17.0.2", published=("192.0.2.7", 8080))
    with pytest.raises(UsageError, match="leave out --tls"):
        listening("172.17.0.2:7780", ("c", "k"), False, (), "127.0.0.1:7780")


def test_a_cookie_ends_after_twelve_hours_and_with_the_process() -> None:
    now = [1000.0]
    keys = Keys(KEY, clock=lambda: now[0])
    cookie = keys.cookie()
    assert keys.holds(cookie)
    assert not Keys(KEY, clock=lambda: now[0]).holds(cookie), "another process has another seal"
    now[0] += COOKIE_S + 1
    assert not keys.holds(cookie)


@pytest.mark.parametrize("key", ["", "K" * 32, KEY + "k", KEY[:-1], "k" * 5000, "\x00\xff"])
def test_a_wrong_key_gets_no_cookie(client: TestClient, key: str) -> None:
    answer = signed_in(client, key)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_wrong_keys_are_answered_late_and_a_flood_of_them_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import asyncio

    from coordinator.dashboard.access import Entrance

    waited: list[float] = []
    entrance = Entrance(Listening(), Keys(KEY), delay_s=0.5)

    async def guesses(count: int) -> None:
        gate = asyncio.Event()

        async def sleep(seconds: float) -> None:
            waited.append(seconds)
            await gate.wait()

        monkeypatch.setattr(asyncio, "sleep", sleep)
        tasks = [asyncio.create_task(entrance._slow_down()) for _ in range(count)]
        await asyncio.wait(tasks, timeout=0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(guesses(WRONG_KEYS_AT_ONCE + 50))
    assert waited == [0.5] * WRONG_KEYS_AT_ONCE


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", "http://127.0.0.1:7780.evil.example", HOST[:-1]]
)
def test_another_sites_page_cannot_sign_in(client: TestClient, origin: str) -> None:
    answer = signed_in(client, origin=origin)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7780", "127.0.0.1.evil.example", "", "[::2]:7780"]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(client: TestClient, host: str) -> None:
    assert signed_in(client).status_code == 200
    for path in ("/", "/static/live.js", "/stream?topic=fleet"):
        assert client.get(path, headers={"host": host}).status_code == 421, path


@pytest.mark.parametrize("host", ["127.0.0.1:7780", "localhost:9", "LOCALHOST", "[::1]:7780"])
def test_the_loopbacks_names_are_served_whatever_the_port_of_a_tunnel(client: TestClient, host: str) -> None:
    assert client.get("/static/live.js", headers={"host": host}).status_code == 200


def test_every_reply_has_the_headers(client: TestClient) -> None:
    replies = [client.get(path) for path in ("/", "/nothing", "/static/live.js", "/stream")]
    replies += [signed_in(client, "wrong"), client.get("/", headers={"host": "evil"}), signed_in(client)]
    replies += [client.get("/"), client.get("/stream"), client.post("/events")]
    for reply in replies:
        for name, value in HEADERS.items():
            assert reply.headers[name] == value, reply.url
        assert "server" not in reply.headers
    assert "default-src 'self'" in HEADERS["content-security-policy"]
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_no_route_changes_anything(client: TestClient) -> None:
    app: Any = client.app
    methods = {route.path: route.methods for route in app.routes if hasattr(route, "methods")}
    writing = {path for path, known in methods.items() if known and known - {"GET", "HEAD"}}
    assert writing == {"/session"}
    signed_in(client)
    for path in routes(client):
        if path not in ("/session", "/stream"):
            assert client.post(path).status_code == 405, path


@pytest.mark.parametrize("subject", [HOSTILE, '"><img src=x>', "a/1"])
def test_words_in_an_address_are_shown_as_words(client: TestClient, subject: str) -> None:
    signed_in(client)
    for path in ("/workers/", "/jobs/"):
        text = client.get(path + subject.replace("/", "%2F").replace("?", "")).text
        assert HOSTILE not in text
        assert "<img src=x" not in text


def test_no_page_has_a_script_or_a_style_of_its_own_or_of_a_third(client: TestClient) -> None:
    signed_in(client)
    for path in ("/", "/events", "/jobs/j", "/workers/w"):
        text = client.get(path).text
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"\bstyle=|\bon\w+=|<style", text)
        assert re.findall(r'(?:src|href)="([^"]+)"', text)
        assert all(
            link.startswith("/") and not link.startswith("//")
            for link in re.findall(r'(?:src|href)="([^"]+)"', text)
        )


def test_another_address_needs_tls_or_a_proxy_and_the_refusal_has_the_tunnel() -> None:
    with pytest.raises(UsageError, match=r"ssh -L 7780:127\.0\.0\.1:7780"):
        listening("0.0.0.0:7780", None, False, ())
    with pytest.raises(UsageError, match="ssh -L"):
        listening("192.0.2.7:7780", None, False, ("atoll.example",))
    assert (
        listening("0.0.0.0:7780", None, True, ("atoll.example",)).address(443) == "https://atoll.example:443/"
    )
    assert listening("127.0.0.1:7781", None, False, ()).address(7781) == "http://127.0.0.1:7781/"
    assert listening("::1", None, False, ()).port == 7780, "the page's own port, not the coordinator's"


def test_a_trace_of_a_coordinator_that_is_away_is_an_error_and_no_traceback(client: TestClient) -> None:
    signed_in(client)
    answer = client.get("/jobs/j/trace")
    assert answer.status_code == 502
    assert "Traceback" not in answer.text
