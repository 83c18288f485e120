"""Rank 0 gathers the others of its site, and nobody else."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from atoll.errors import AccessDenied, UsageError
from tests.patience import eventually
from worker.ranks import gathering
from worker.ranks.gathering import LEAVE, REFUSED, START, WELCOME, Gathering, Reached
from worker.ranks.sealed import Closed, Sealed

SECRET, VERSIONS = b"0123456789abcdef", "atoll 1, torch 2"
SOON_S = 20.0


OPEN: list[socket.socket | Sealed] = []  # of the test that runs


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gathering]:
    monkeypatch.setattr(gathering, "AGAIN_S", 0.2)
    found = Gathering(3, SECRET, Reached("127.0.0.1", 0, "lo"), VERSIONS)
    yield found
    found.close()
    while OPEN:
        OPEN.pop().close()


def pipes_of(at: Gathering) -> list[socket.socket]:
    """Pipes to all ranks."""
    found = at.pipes()
    OPEN.extend(found)
    return found


def knock(at: Gathering, rank: int, secret: bytes = SECRET, **other: object) -> tuple[Sealed, bytes]:
    """Connect as a rank; the connection, and how it was answered."""
    end = socket.create_connection(("127.0.0.1", at.port), SOON_S)
    found = Sealed(end, secret, opener=True, timeout_s=SOON_S)
    OPEN.append(found)
    found.send(json.dumps({"rank": rank, "size": 3, "versions": VERSIONS} | other).encode())
    return found, found.receive(SOON_S)


def test_a_pipe_reaches_its_rank_both_ways_and_ends_with_it(three: Gathering) -> None:
    pipes = pipes_of(three)
    ranks = {}
    for rank in (2, 1):
        ranks[rank], answer = knock(three, rank)
        assert answer == WELCOME
    for rank, pipe in enumerate(pipes, 1):
        assert ranks[rank].receive(SOON_S) == START
        ranks[rank].send(START)
        pipe.sendall(b"order %d" % rank)
        assert ranks[rank].receive(SOON_S) == b"order %d" % rank
        ranks[rank].send(b"done %d" % rank)
        pipe.settimeout(SOON_S)
        assert pipe.recv(100) == b"done %d" % rank
    ranks[1].close()
    assert pipes[0].recv(1) == b""
    pipes[1].close()  # the process that leads has ended
    with pytest.raises(Closed):
        ranks[2].receive(SOON_S)


def test_a_rank_that_does_not_come_again_closes_its_pipe_and_the_others_go_on(three: Gathering) -> None:
    pipes_of(three)
    for pipe in pipes_of(three):
        pipe.settimeout(SOON_S)
        assert pipe.recv(1) == b""


def test_a_connection_of_an_earlier_life_is_passed_over(three: Gathering) -> None:
    old, _ = knock(three, 1)
    eventually(lambda: 1 in three._idle)
    old.close()
    pipe = pipes_of(three)[0]
    new, _ = knock(three, 1)
    assert new.receive(SOON_S) == START
    new.send(START)
    pipe.sendall(b"order")
    assert new.receive(SOON_S) == b"order"


@pytest.mark.parametrize(
    ("rank", "other", "why"),
    [
        (0, {}, "rank 0 of 3 in a site of 3"),
        (3, {}, "rank 3 of 3 in a site of 3"),
        (1, {"size": 4}, "rank 1 of 4 in a site of 3"),
        (1, {"versions": "atoll 2"}, "rank 1 has atoll 2, rank 0 has atoll 1, torch 2"),
        (1, {"size": "none"}, "does not say which rank"),
    ],
)
def test_who_is_no_rank_of_it_hears_why(
    three: Gathering, rank: int, other: dict[str, object], why: str
) -> None:
    _, answer = knock(three, rank, **other)
    assert answer.startswith(REFUSED)
    assert why in answer.decode()


def test_a_stranger_is_not_answered(three: Gathering) -> None:
    with pytest.raises((Closed, AccessDenied)):
        knock(three, 1, secret=b"another secret 16")
    assert not three._idle


def test_ranks_are_sent_home_at_the_end(three: Gathering) -> None:
    rank, _ = knock(three, 1)
    eventually(lambda: 1 in three._idle)
    three.close()
    assert rank.receive(SOON_S) == LEAVE


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot gather a site at 127.0.0.1:{port}"):
            Gathering(2, SECRET, Reached("127.0.0.1", port, "lo"), VERSIONS)
