"""Blobs from a peer's disk over the links: only what is offered, a piece at a time."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConnectionFailed
from atoll.messages.to_worker import PeerLink
from protos.blob_transfer import Chunk
from tests.patience import HUNG_S, eventually
from tests.worker.transport.hosts import Host
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel
from worker.hosting import TUNED
from worker.hosting.neighbours import peer_blobs
from worker.hosting.neighbours.peer_blobs import ASK, JOB, PeerBlobs
from worker.transport.contract import Paths
from worker.transport.frames import Direction, MessageKey


def blob(seed: str, size: int) -> tuple[str, bytes]:
    data = (seed.encode() * size)[:size]
    return hashlib.sha256(data).hexdigest(), data


BLOBS = dict(
    blob(str(at), size)
    for at, size in enumerate((10, TUNED.peer_piece_bytes, 2 * TUNED.peer_piece_bytes + 17, 1, 333))
)


class Both:
    """A holder of copies, and who fetches from it."""

    def __init__(self, folder: Path, holder: Host, taker: Host) -> None:
        self.folder = folder
        self.offered = set(BLOBS)
        for name, data in BLOBS.items():
            (folder / name).write_bytes(data)
        self.holder = PeerBlobs(holder.network, folder.joinpath, lambda: self.offered)
        self.taker = PeerBlobs(taker.network, folder.joinpath, set)
        self.networks = holder.network, taker.network
        self.near = self.taker.near(PeerLink(holder.network.name, Paths((holder.address,), dial=True)))
        holder.network.admit(taker.network.name)

    def close(self) -> None:
        self.holder.close()
        self.taker.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_blobs, "TUNED", replace(peer_blobs.TUNED, peer_connect_s=HUNG_S))
    monkeypatch.setattr(peer_blobs, "TUNED", replace(peer_blobs.TUNED, peer_answer_s=HUNG_S))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    holder, taker = Host(None, name="w-a"), Host(None, name="w-b")
    made = Both(tmp_path, holder, taker)
    yield made
    made.close()
    taker.network.close()
    holder.network.close()


def test_every_byte_comes_in_order_and_from_where_it_is_wanted(both: Both) -> None:
    offsets = {name: len(data) // 3 for name, data in BLOBS.items()}
    found = dict.fromkeys(BLOBS, b"")
    for chunk in both.near.get(list(offsets.items())):
        assert chunk.offset == offsets[chunk.hash] + len(found[chunk.hash])
        assert chunk.size == len(BLOBS[chunk.hash])
        found[chunk.hash] += chunk.data
    assert found == {name: data[offsets[name] :] for name, data in BLOBS.items()}
    eventually(lambda: not both.holder._under_way)
    assert not both.taker._open


def test_what_is_asked_for_gently_comes_as_the_link_has_time_and_holds_nobody_up(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = PeerLink(both.networks[0].name, both.near.holder.paths)  # type: ignore[attr-defined]
    waits, name = [0.05, 0.0, 0.01, 0.0], next(name for name, data in BLOBS.items() if len(data) == 333)
    monkeypatch.setattr(both.networks[0], "spare", lambda peer: (200, waits.pop(0)))
    chunks = list(both.taker.near(holder, gently=True).get([(name, 0)]))
    assert [len(chunk.data) for chunk in chunks] == [200, 133]
    assert waits == []
    monkeypatch.setattr(both.networks[0], "spare", lambda peer: (200, 1e9))
    both.taker._ask(holder.worker, name, 0, queue.SimpleQueue(), gently=True)
    assert b"".join(chunk.data for chunk in both.near.get([(name, 0)])) == BLOBS[name]


def test_what_is_not_offered_is_not_sent(both: Both) -> None:
    name = next(iter(BLOBS))
    both.offered.remove(name)
    with pytest.raises(ConnectionFailed, match="cannot send"):
        list(both.near.get([(name, 0)]))
    both.offered.add("ab" * 32)
    with pytest.raises(ConnectionFailed, match="cannot send"):
        list(both.near.get([("ab" * 32, 0)]))
    assert not both.taker._open


def test_a_holder_that_says_nothing_or_goes_away_is_given_up(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(BLOBS))
    list(both.near.get([(name, 0)]))
    monkeypatch.setattr(peer_blobs, "TUNED", replace(peer_blobs.TUNED, peer_answer_s=0.2))
    monkeypatch.setattr(peer_blobs, "TUNED", replace(peer_blobs.TUNED, peer_connect_s=0.2))
    both.networks[0].unregister(JOB, both.holder)
    with pytest.raises(ConnectionFailed, match="sent nothing"):
        list(both.near.get([(name, 0)]))
    both.networks[0].close()
    with pytest.raises(ConnectionFailed):
        list(both.near.get([(name, 0)]))
    assert not both.taker._open


def test_answers_that_nobody_asked_for_or_that_are_too_large_take_no_memory(both: Both) -> None:
    taker = both.taker
    assert taker.expect("w-a", MessageKey(JOB, 0, 7, 1, 0, Direction.COPY), 10) is None
    assert taker.expect("w-a", MessageKey(JOB, 0, 7, ASK, 0, Direction.COPY), 10) is None
    assert taker.expect("w-a", MessageKey(JOB, 0, 7, ASK, 0, Direction.FORWARD), 0) is None
    list(both.near.get([(next(iter(BLOBS)), 0)]))
    taker.deliver("w-a", MessageKey(JOB, 0, 7, 1, 0, Direction.COPY), b"", memoryview(b"x"))
    taker.deliver("w-a", MessageKey(JOB, 0, 7, ASK, 0, Direction.COPY), b"short", memoryview(b""))


def test_a_stage_comes_from_a_holder_and_what_that_sends_wrong_from_the_store(
    both: Both, tmp_path: Path
) -> None:
    asked: list[str] = []

    class Store:
        def get(self, wanted: list[tuple[str, int]]) -> Iterator[Chunk]:
            for name, offset in wanted:
                asked.append(name)
                yield Chunk(name, len(BLOBS[name]), offset, BLOBS[name][offset:])

        def changes(self, wanted: list[str]) -> list[Any]:
            return []  # no deltas

    cache = BlobCache(tmp_path / "taker", 1 << 30)
    files = BlobFiles(Store(), cache)  # type: ignore[arg-type]
    files.prefer([both.near])
    wanted = {name: len(data) for name, data in BLOBS.items()}
    files.fetch(wanted, Cancel())
    assert asked == []
    cache.discard(BLOBS)
    spoiled = max(BLOBS, key=lambda name: len(BLOBS[name]))
    (both.folder / spoiled).write_bytes(b"\0" * len(BLOBS[spoiled]))
    files.fetch(wanted, Cancel())
    assert spoiled in asked
    assert all(cache.path(name).read_bytes() == data for name, data in BLOBS.items())


def test_an_update_is_lent_to_the_worker_that_it_is_for_and_to_no_other(both: Both) -> None:
    both.offered.clear()
    one, other, third = list(BLOBS)[:3]
    both.holder.lend(one, both.networks[1].name)
    both.holder.lend(other, "w-0123456789abcdef")
    both.holder.lend(third, "")
    for name in (one, third):
        assert b"".join(chunk.data for chunk in both.near.get([(name, 0)])) == BLOBS[name]
    with pytest.raises(ConnectionFailed, match="cannot send"):
        list(both.near.get([(other, 0)]))


def test_what_the_lender_is_fetching_itself_is_waited_for_and_what_it_gave_up_is_not(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_blobs, "TUNED", replace(peer_blobs.TUNED, lent_within_s=0.0, lent_poll_s=0.01))
    name, data = blob("late", 1000)
    coming = {name}
    both.holder._coming = coming
    both.holder.lend(name, "")
    both.taker.know(both.near.holder)  # type: ignore[attr-defined]
    cancel, asked = Cancel(), 0

    class Watched(Cancel):
        """Has the blob arrive at the lender after three questions for it."""

        def wait(self, seconds: float) -> None:
            nonlocal asked
            asked += 1
            if asked == 3:
                (both.folder / name).write_bytes(data)
            super().wait(seconds)

    lender = both.taker.lender(both.networks[0].name, Watched())
    assert b"".join(chunk.data for chunk in lender.get([(name, 0)])) == data
    assert asked == 3
    (both.folder / name).unlink()
    coming.clear()
    with pytest.raises(ConnectionFailed, match="cannot send"):
        list(both.taker.lender(both.networks[0].name, cancel).get([(name, 0)]))
