"""Sealed connections: what the secret's holder wrote arrives, and nothing else does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from atoll.errors import AccessDenied
from worker.ranks.sealed import MOST_BYTES, Closed, Sealed

SECRET, OTHER = b"0123456789abcdef", b"another secret 16"
SOON_S = 10.0


def pair(
    first: bytes = SECRET, second: bytes = SECRET
) -> tuple[Sealed, Sealed, socket.socket, socket.socket]:
    """Both ends with their sockets."""
    ours, theirs = socket.socketpair()
    made: list[Sealed] = []
    opening = threading.Thread(
        target=lambda: made.append(Sealed(ours, first, opener=True, timeout_s=SOON_S)), daemon=True
    )
    opening.start()
    accepted = Sealed(theirs, second, opener=False, timeout_s=SOON_S)
    opening.join(SOON_S)
    return made[0], accepted, ours, theirs


@pytest.fixture
def ends() -> Iterator[tuple[Sealed, Sealed, socket.socket, socket.socket]]:
    found = pair()
    yield found
    for end in found[:2]:
        end.close()


def test_frames_arrive_both_ways_in_order(ends: tuple[Sealed, Sealed, socket.socket, socket.socket]) -> None:
    opener, accepter, _, _ = ends
    for content in (b"", b"a", bytes(MOST_BYTES)):
        opener.send(content)
        accepter.send(content + b"!" if len(content) < MOST_BYTES else content)
        assert accepter.receive(SOON_S) == content
        assert opener.receive(SOON_S).startswith(content)


def test_who_has_another_secret_is_refused_by_the_first_frame() -> None:
    opener, accepter, _, _ = pair(second=OTHER)
    opener.send(b"let me in")
    with pytest.raises(AccessDenied, match="not sealed with this site's secret"):
        accepter.receive(SOON_S)
    opener.close()
    accepter.close()


@pytest.mark.parametrize("which", ["changed", "repeated", "reflected", "longer"])
def test_a_frame_that_was_not_written_here_and_now_is_refused(which: str) -> None:
    opener, accepter, ours, theirs = pair()
    opener.send(b"an order")
    frame = theirs.recv(1000)
    ours.close()
    theirs.close()
    between, end = socket.socketpair()
    accepter._socket = end  # the middle writes what it likes from here on
    if which == "repeated":
        between.sendall(frame)
        assert accepter.receive(SOON_S) == b"an order"
    forged = {
        "changed": frame[:-1] + bytes([frame[-1] ^ 1]),
        "repeated": frame,
        "longer": (MOST_BYTES + 17).to_bytes(4) + bytes(100),
    }
    if which == "reflected":
        accepter.send(b"an answer")
        forged[which] = between.recv(1000)
    between.sendall(forged[which])
    with pytest.raises(AccessDenied):
        accepter.receive(SOON_S)
    between.close()
    end.close()


def test_an_end_that_closes_is_noticed(ends: tuple[Sealed, Sealed, socket.socket, socket.socket]) -> None:
    opener, accepter, _, _ = ends
    opener.close()
    with pytest.raises(Closed):
        accepter.receive(SOON_S)


def test_a_short_secret_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="at least 16"):
        Sealed(ours, b"short", opener=True, timeout_s=SOON_S)
