"""The content-addressed store: resumable, verified, bounded."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenacity import stop_after_attempt

from atoll.errors import StorageError, UsageError
from coordinator.storage.blob_store import BlobStore, Gone, storage_error
from hostos.retries import retrying
from protos.blob_transfer import Chunk, LocalBlob, upload
from tests.patience import HUNG_S


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def counted(store: BlobStore) -> int:
    """The bytes that a store counts as held, as it says where it refuses more."""
    quota, store.quota_bytes = store.quota_bytes, 0
    with pytest.raises(StorageError) as refused:
        store.put(b"one more")
    store.quota_bytes = quota
    found = re.search(r"holds (\d+) of 0 bytes", str(refused.value))
    assert found is not None
    return int(found[1])


def on_disk(root: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_blob_arrives_in_pieces_and_appears_only_when_whole(tmp_path: Path) -> None:
    store, data = BlobStore(tmp_path), os.urandom(3000)
    name = name_of(data)
    assert not store.write(name, 3000, 0, data[:1000])
    assert store.held(name) == 1000
    assert not store.has(name)
    assert store.write(name, 3000, 1000, data[1000:])
    assert store.read(name) == data
    assert b"".join(store.chunks(name, 2900)) == data[2900:]


def test_others_are_written_while_a_blob_is_verified_and_its_own_writer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data, other = BlobStore(tmp_path), os.urandom(3000), os.urandom(10)
    name, verifying, go_on = name_of(data), Event(), Event()
    synced = BlobStore._synced

    def slow(store: BlobStore, partial: Path) -> str:
        if partial.name == name:
            verifying.set()
            assert go_on.wait(HUNG_S)
        return synced(store, partial)

    monkeypatch.setattr(BlobStore, "_synced", slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(store.write, name, 3000, 0, data)
        assert verifying.wait(HUNG_S)
        assert store.put(other) == name_of(other)
        again = pool.submit(store.write, name, 3000, 0, data)
        dropped = pool.submit(store.discard, [name_of(b"another"), name])
        assert store.sweep(set()) == (1, 10)  # the other; what is verified stays
        assert not store.has(name)
        assert not again.done()
        assert not dropped.done()
        go_on.set()
        assert first.result(HUNG_S)
        assert again.result(HUNG_S)
        assert dropped.result(HUNG_S) == 3000
    assert counted(store) == on_disk(tmp_path)


@given(cuts=st.lists(st.integers(0, 500), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_resent_and_overlapping_pieces_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
) -> None:
    store = BlobStore(tmp_path_factory.mktemp("store"))
    data = hashlib.shake_128(bytes([seed])).digest(500)
    for cut in sorted(cuts):
        begin = max(0, min(store.held(name_of(data)), cut - 50))
        store.write(name_of(data), 500, begin, data[begin:cut])
    at = store.held(name_of(data))
    store.write(name_of(data), 500, at, data[at:])
    assert store.read(name_of(data)) == data
    assert counted(store) == 500


def test_a_blob_that_becomes_whole_while_somebody_looks_is_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = BlobStore(tmp_path), b"bytes"
    name = hashlib.sha256(data).hexdigest()
    store.write(name, 5, 0, data[:3])
    find = store._partial

    def finished_meanwhile(name: str, by: str) -> Path:
        monkeypatch.undo()
        found = find(name, by)
        assert store.write(name, 5, 3, data[3:])
        return found

    monkeypatch.setattr(store, "_partial", finished_meanwhile)
    assert store.held(name) == 5


def test_an_upload_resumes_in_a_new_process(tmp_path: Path) -> None:
    data = os.urandom(100)
    BlobStore(tmp_path).write(name_of(data), 100, 0, data[:40])
    again = BlobStore(tmp_path)
    assert again.held(name_of(data)) == 40
    assert again.write(name_of(data), 100, 40, data[40:])


def test_bytes_that_do_not_hash_to_the_name_are_refused_and_dropped(tmp_path: Path) -> None:
    store, data = BlobStore(tmp_path), b"honest"
    with pytest.raises(UsageError, match="hash to"):
        store.write(name_of(data), 6, 0, b"forged")
    assert store.held(name_of(data)) == 0
    assert counted(store) == 0
    store.put(data)
    assert store.has(name_of(data))


@pytest.mark.parametrize("name", ["../../etc/passwd", "AB" * 32, "", "0" * 63])
def test_a_name_that_is_no_hash_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="hexadecimal"):
        BlobStore(tmp_path).held(name)


def test_gaps_oversize_and_quota_are_refused_with_numbers(tmp_path: Path) -> None:
    store, name = BlobStore(tmp_path, max_blob_bytes=100, quota_bytes=60), name_of(b"x")
    with pytest.raises(UsageError, match="missing"):
        store.write(name, 50, 10, b"late")
    with pytest.raises(UsageError, match="at most 100"):
        store.write(name, 101, 0, b"x")
    with pytest.raises(UsageError, match="of 3"):
        store.write(name, 3, 0, b"longer")
    with pytest.raises(StorageError, match="quota"):
        store.write(name, 90, 0, b"x" * 70)


def test_a_sweep_keeps_what_is_named(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    kept, dropped = store.put(b"keep"), store.put(b"drop!")
    assert store.sweep({kept}) == (1, 5)
    assert store.has(kept)
    assert not store.has(dropped)
    assert counted(store) == 4


def test_a_sweep_takes_only_what_was_left_alone_for_long_and_nobody_needs(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    names = [store.put(data) for data in (b"needed", b"stale", b"asked about", b"fresh")]
    needed, stale, asked, fresh = names
    begun = {age: name_of(age.encode()) for age in ("old", "new")}
    for name in begun.values():
        store.write(name, 100, 0, b"half")
    for path in (*map(store.path, names[:3]), store.partial / begun["old"]):
        os.utime(path, (1000.0, 1000.0))
    store.touch(asked)
    assert store.sweep({needed}, before_s=2000.0) == (2, len(b"stale") + len(b"half"))
    assert [store.has(name) for name in (needed, stale, asked, fresh)] == [True, False, True, True]
    assert (store.held(begun["old"]), store.held(begun["new"])) == (0, 4)
    assert counted(store) == on_disk(tmp_path)


def test_what_a_killed_process_left_is_no_blob_and_goes_at_the_next_start(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    scrap = store.partial / ".aggregator-job-1-state.17.part"
    scrap.write_bytes(b"half a state")
    again = BlobStore(tmp_path)
    assert (scrap.exists(), counted(again)) == (False, 0)


class Sender:
    """``BlobPort`` of one sender, in this process; its pieces have 10 bytes."""

    def __init__(self, store: BlobStore, by: str = "") -> None:
        self.store, self.by = store, by
        self.puts = 0

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        raise NotImplementedError

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {name: self.store.resumes(name, self.by) for name in hashes if not self.store.has(name)}

    def put(self, chunks: Iterator[Chunk]) -> set[str]:
        self.puts += 1
        return {c.hash for c in chunks if self.store.write(c.hash, c.size, c.offset, c.data, self.by)}

    def upload(self, data: bytes, name: str = "") -> int:
        attempts = retrying(stop_after_attempt(8), lambda seconds: None)
        blob = LocalBlob.of(lambda: data, 10)
        return upload(self, [replace(blob, hash=name or blob.hash)], attempts)


@pytest.mark.parametrize("n_bytes", [2, 99, 100, 101, 5000])
def test_what_a_power_cut_left_of_an_upload_is_dropped_and_sent_anew(tmp_path: Path, n_bytes: int) -> None:
    store, data = BlobStore(tmp_path), os.urandom(100)
    (store.partial / name_of(data)).write_bytes(bytes(n_bytes))
    store = BlobStore(tmp_path)
    assert Sender(store).upload(data) >= len(data)
    assert (store.read(name_of(data)), counted(store)) == (data, len(data))


def test_bytes_that_are_wrong_from_the_first_one_on_are_sent_once(tmp_path: Path) -> None:
    sender = Sender(BlobStore(tmp_path))
    with pytest.raises(UsageError, match="hash to"):
        sender.upload(b"changed while it was sent", name_of(b"as it was hashed"))
    assert sender.puts == 1


@pytest.mark.parametrize(("n_bytes", "size"), [(101, 102), (40, 100), (99, 100), (60, 60_000)])
def test_no_worker_spoils_what_another_or_the_owner_sends(tmp_path: Path, n_bytes: int, size: int) -> None:
    store, data = BlobStore(tmp_path), os.urandom(100)
    name = name_of(data)
    store.write(name, 100, 0, data[:50], "honest")
    store.write(name, size, 0, bytes(n_bytes), "liar")
    assert [store.held(name, by) for by in ("honest", "liar", "")] == [50, n_bytes, 0]
    assert Sender(store, "honest").upload(data) == 51
    assert store.read(name) == data
    assert list(store.partial.iterdir()) == []
    assert counted(store) == 100
    store.discard([name])
    store.write(name, size, 0, bytes(n_bytes), "liar")
    assert Sender(store).upload(data) == 100
    assert Sender(store, "liar").upload(data) == 0


def test_what_a_worker_began_is_resumed_dropped_and_swept_as_its_own(tmp_path: Path) -> None:
    store, data = BlobStore(tmp_path), os.urandom(100)
    name = name_of(data)
    for by in ("", "a", "b"):
        store.write(name, 100, 0, data[:40], by)
    store = BlobStore(tmp_path)
    assert [store.resumes(name, by) for by in ("", "a", "b")] == [39, 39, 39]
    assert store.discard([name], "a") == 40
    assert [store.held(name, by) for by in ("", "a", "b")] == [40, 0, 40]
    assert store.sweep(()) == (2, 80)
    assert counted(store) == 0


def test_an_empty_blob_is_a_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.read(store.put(b"")) == b""


def test_what_is_not_here_is_gone_and_what_cannot_be_read_is_not(tmp_path: Path) -> None:
    store, name = BlobStore(tmp_path), name_of(b"never sent")
    reads: list[Callable[[], object]] = [
        lambda: store.size(name),
        lambda: store.head(name, 8),
        lambda: store.read(name),
    ]
    for read in reads:
        with pytest.raises(Gone, match="submit the job again"):
            read()
    assert store.rotten(name)
    store.path(name).mkdir(parents=True)  # any error but that nothing is there
    for look in (*reads[1:], lambda: store.rotten(name)):
        with pytest.raises(StorageError, match="cannot read under") as caught:
            look()
        assert not isinstance(caught.value, Gone)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    error = storage_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert "is full" in str(error)


def test_a_blob_whose_last_byte_came_before_the_coordinator_was_killed_becomes_whole(tmp_path: Path) -> None:
    data = b"all of it"
    name = hashlib.sha256(data).hexdigest()
    store = BlobStore(tmp_path)
    store._append(name, data)  # and no more
    again = BlobStore(tmp_path)
    assert not again.has(name)
    at = again.resumes(name)
    assert again.write(name, len(data), at, data[at:])
    assert again.read(name) == data
