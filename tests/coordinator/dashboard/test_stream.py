"""Viewers over a real socket: everybody is sent the newest, and who takes nothing is ended."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from coordinator.dashboard.access import Listening, cookie_name
from coordinator.dashboard.app import Settings
from coordinator.dashboard.stream import Patience
from coordinator.dashboard.topic import GZIP_HEAD, deflated
from tests.coordinator.dashboard.pictured import PicturedCoordinator, World, pictured
from tests.coordinator.dashboard.serving import KEY, ServedPage, served_page
from tests.coordinator.dashboard.test_reader import QUICK
from tests.patience import HUNG_S, eventually

HASTY = Patience(slow_viewer_s=0.3, sign_of_life_s=0.1, viewers=8)


@pytest.fixture(scope="module")
def world() -> World:
    return pictured()


@pytest.fixture(scope="module")
def page(world: World) -> Iterator[ServedPage]:
    settings = Settings(Listening(port=0), QUICK, HASTY, wrong_key_delay_s=0.0)
    with PicturedCoordinator(world) as coordinator, served_page(coordinator.endpoint, settings) as served:
        yield served


def netloc(page: ServedPage) -> str:
    return page.root.removeprefix("http://")


def cookie(page: ServedPage) -> str:
    connection = http.client.HTTPConnection(netloc(page), timeout=HUNG_S)
    connection.request("POST", "/session", KEY, {"origin": page.root})
    answer = connection.getresponse()
    assert answer.status == 200
    made = answer.headers["set-cookie"].partition(";")[0]
    assert made.startswith(cookie_name(Listening(port=int(netloc(page).rpartition(":")[2]))))
    connection.close()
    return made


@contextmanager
def stream(page: ServedPage, topics: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    made = cookie(page)
    connection = http.client.HTTPConnection(netloc(page), timeout=HUNG_S)
    with closing(connection):
        connection.request("GET", f"/stream?{topics}", headers={"cookie": made, **headers})
        with closing(connection.getresponse()) as answer:
            yield answer


def event(answer: http.client.HTTPResponse) -> tuple[str, dict]:
    kind = ""
    while line := answer.readline().decode().rstrip("\n"):
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        if name == "data":
            answer.readline()
            return kind, json.loads(value)
    return event(answer)  # the end of a sign of life


def test_the_first_event_is_whole_and_then_come_changes(page: ServedPage, world: World) -> None:
    with stream(page, "topic=fleet") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        kind, found = event(answer)
        assert (kind, found["topic"], len(found["tables"]["workers"])) == ("whole", "fleet", 118)
        world.status.workers[3].state = "suspect"
        kind, found = event(answer)
        assert kind == "change"
        assert list(found["rows"]["workers"].values()) == [{"state": "suspect"}]


def test_a_compressed_stream_holds_the_same_events(page: ServedPage) -> None:
    with stream(page, "topic=fleet", **{"accept-encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        press, text = zlib.decompressobj(wbits=31), b""
        while b"\n\n" not in text:
            text += press.decompress(answer.read1(1 << 16))
    assert len(json.loads(text.partition(b"data: ")[2].partition(b"\n\n")[0])["tables"]["workers"]) == 118


def test_blocks_of_different_viewers_fit_into_any_stream() -> None:
    parts = [deflated(f"event {number} ".encode() * 50) for number in range(5)]
    press = zlib.decompressobj(wbits=31)
    found = b"".join(press.decompress(part) for part in [GZIP_HEAD, parts[3], parts[0], parts[4]])
    assert found == b"event 3 " * 50 + b"event 0 " * 50 + b"event 4 " * 50


def test_a_viewer_that_never_reads_is_closed_and_others_go_on(page: ServedPage, world: World) -> None:
    made, (host, _, port) = cookie(page), netloc(page).partition(":")
    with socket.socket() as hung, ExitStack() as stack:
        hung.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hung.connect((host, int(port)))
        request = f"GET /stream?topic=fleet HTTP/1.1\r\nHost: {netloc(page)}\r\nCookie: {made}\r\n\r\n"
        hung.sendall(request.encode())
        eventually(lambda: page.viewers.count == 1)
        other = stack.enter_context(stream(page, "topic=fleet"))
        event(other)
        for flips in itertools.count():
            for worker in world.status.workers:  # much to send
                worker.reason = f"reason {flips} " * 20
            event(other)
            if page.viewers.count == 1:
                break
    eventually(lambda: page.viewers.count == 0)


def test_viewers_beyond_the_bound_are_refused_and_those_who_leave_make_room(page: ServedPage) -> None:
    with ExitStack() as stack:
        for _ in range(HASTY.viewers):
            assert stack.enter_context(stream(page, "topic=fleet")).status == 200
        assert stack.enter_context(stream(page, "topic=fleet")).status == 503
    eventually(lambda: page.viewers.count == 0)
    with stream(page, "topic=fleet") as again:
        assert again.status == 200


@pytest.mark.parametrize(
    ("topics", "status"),
    [
        ("", 400),
        ("topic=a&topic=b&topic=c&topic=d&topic=e", 400),
        ("topic=nothing", 404),
        ("topic=job:", 404),
    ],
)
def test_topics_that_there_are_not_are_refused(page: ServedPage, topics: str, status: int) -> None:
    with stream(page, topics) as answer:
        assert answer.status == status


def test_a_silent_topic_shows_a_sign_of_life(page: ServedPage) -> None:
    with stream(page, "topic=job:bert-tiny-3") as answer:
        assert event(answer)[0] == "whole"
        while answer.readline() != b": here\n":
            pass
