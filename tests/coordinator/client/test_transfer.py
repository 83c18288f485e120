"""Blobs between a client and the coordinator: only what is missing travels, and goes on where it broke."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from threading import Barrier, Event
from typing import TYPE_CHECKING

import grpc
import pytest

from atoll.errors import ConnectionFailed, StorageError
from coordinator.client.transfer import PIECE_BYTES, download
from hostos.retries import retrying, stop_after_pauses
from protos.blob_calls import BlobsOverGrpc
from protos.blob_transfer import Chunk, LocalBlob, fetch, upload
from tests.coordinator.client.fake_owner import FakeOwnerServer, Script
from tests.patience import HUNG_S

if TYPE_CHECKING:
    from tenacity import Retrying


def quick() -> Retrying:
    return retrying(stop_after_pauses(5.0), sleep=lambda seconds: None)


def local(data: bytes) -> LocalBlob:
    return LocalBlob.of(lambda: data, PIECE_BYTES)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def store(script: Script) -> Iterator[BlobsOverGrpc]:
    with FakeOwnerServer(script) as server, server.endpoint.channel() as channel:
        yield BlobsOverGrpc(channel, (), server.endpoint.address)


def test_only_missing_blobs_are_sent_and_an_interrupted_one_goes_on(script: Script, store: BlobsOverGrpc):
    data = bytes(range(256)) * 20_000
    have, new = local(b"already there"), local(data)
    script.blobs[have.hash] = b"already there"
    script.partial[new.hash] = data[:3_000_000]
    seen: list[tuple[int, int]] = []
    sent = upload(store, [have, new, new], quick(), lambda done, total: seen.append((done, total)))
    assert script.blobs[new.hash] == data
    assert sent == len(data) - 3_000_000
    assert seen[0] == (3_000_013, len(data) + 13)
    assert seen[-1][0] == seen[-1][1]


def test_an_upload_survives_a_restart_of_the_coordinator(script: Script, store: BlobsOverGrpc):
    script.fail_first = {"Missing": 2, "Put": 1}
    script.break_after_chunks = 2
    blob = local(bytes(5_000_000))
    upload(store, [blob], quick())
    assert len(script.blobs[blob.hash]) == 5_000_000


class Streams:
    """A store that answers a stream of blobs once ``at_once`` of them have begun; ``refuses`` one of them."""

    def __init__(self, at_once: int, refuses: str = "") -> None:
        self.begun, self.refuses = Barrier(at_once, timeout=HUNG_S), refuses
        self.blobs: dict[str, bytes] = {}
        self.streams = 0

    def get(self, wanted: list[tuple[str, int]]) -> Iterator[Chunk]:
        raise AssertionError

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {name: len(self.blobs.get(name, b"")) for name in hashes}

    def put(self, chunks: Iterator[Chunk]) -> set[str]:
        self.streams += 1
        whole = set()
        for number, chunk in enumerate(chunks):
            if number == 0:
                self.begun.wait()
            if chunk.hash == self.refuses:
                self.refuses = ""
                raise StorageError("the disk is full")
            held = self.blobs.get(chunk.hash, b"")
            assert chunk.offset == len(held)
            self.blobs[chunk.hash] = held + chunk.data
            if len(self.blobs[chunk.hash]) == chunk.size:
                whole.add(chunk.hash)
        return whole


def test_several_blobs_are_sent_at_a_time_each_in_one_stream() -> None:
    data = [bytes([at]) * (at + 1) * PIECE_BYTES for at in range(7)]
    store = Streams(3)
    seen: list[tuple[int, int]] = []
    sent = upload(store, map(local, data), quick(), lambda done, total: seen.append((done, total)), streams=3)
    assert store.streams == 3
    assert sorted(store.blobs.values()) == data
    assert sent == sum(map(len, data)) == seen[-1][0]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_stream_that_is_refused_stops_the_others_and_says_why() -> None:
    blobs = [local(bytes([at]) * 40 * PIECE_BYTES) for at in range(3)]
    store = Streams(3, refuses=blobs[1].hash)
    before: list[int] = []

    def slowly(n_bytes: int) -> None:
        before.append(n_bytes)
        if len(before) > 3:
            Event().wait(0.01)

    with pytest.raises(StorageError, match="disk is full"):
        upload(store, blobs, quick(), before=slowly, streams=3)
    assert sum(before) < sum(blob.size for blob in blobs)


def test_an_empty_blob_is_stored_too(script: Script, store: BlobsOverGrpc):
    blob = local(b"")
    assert upload(store, [blob], quick()) == 0
    assert script.blobs[blob.hash] == b""


def test_a_full_disk_ends_the_upload_with_the_servers_words(script: Script, store: BlobsOverGrpc):
    script.refuse["Put"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the disk is full")
    with pytest.raises(StorageError, match="disk is full"):
        upload(store, [local(b"x")], quick())


def test_an_unreadable_blob_ends_the_upload_with_its_own_error(store: BlobsOverGrpc):
    def broken(offset: int) -> Iterator[bytes]:
        raise StorageError("cannot read it")
        yield b""

    with pytest.raises(StorageError, match="cannot read it"):
        upload(store, [LocalBlob("0" * 64, 3, broken)], quick())


def test_a_store_that_never_keeps_a_blob_is_not_asked_for_ever(script: Script, store: BlobsOverGrpc):
    asked = 0

    def put(chunks: Iterator[Chunk]) -> set[str]:
        nonlocal asked
        asked += 1
        return {chunk.hash for chunk in chunks} - {blob.hash}

    blob = local(b"x")
    store.put = put  # type: ignore[method-assign]
    with pytest.raises(ConnectionFailed, match="did not keep 1 blobs"):
        upload(store, [blob], quick())
    assert 2 < asked < 10


def test_a_download_goes_on_where_it_broke_and_empty_blobs_arrive(script: Script, store: BlobsOverGrpc):
    parts = [bytes([n]) * 2500 for n in range(3)] + [b""]
    hashes = [hashlib.sha256(part).hexdigest() for part in parts]
    script.blobs = dict(zip(hashes, parts, strict=True))
    script.break_after_chunks = 4
    assert [data for _, data in download(store, hashes, quick())] == parts


def test_a_damaged_blob_is_refused(script: Script, store: BlobsOverGrpc):
    name = hashlib.sha256(b"right").hexdigest()
    script.blobs[name] = b"wrong"
    with pytest.raises(StorageError, match="copy is damaged"):
        list(download(store, [name], quick()))


def test_a_store_that_sends_nothing_is_not_asked_for_ever():
    asked: list[list[tuple[str, int]]] = []
    with pytest.raises(ConnectionFailed, match="nothing of 1 blobs"):
        list(fetch(lambda wanted: asked.append(wanted) or (), lambda: [("0" * 64, 0)], quick()))
    assert 2 < len(asked) < 10
