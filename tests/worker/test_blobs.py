"""Files to and from the blob store: verified, resumable, bounded, and only what is missing."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from atoll.errors import BadFrame, ConnectionFailed, StorageError
from hostos import retries
from protos.blob_transfer import Change, Chunk, Patch
from worker import blobs
from worker.blobs import BlobCache, BlobFile, BlobFiles
from worker.cancel import Cancel, Cancelled

VALUE = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def blob(**tensors: Tensor) -> tuple[str, bytes]:
    data = save(tensors or {"value": VALUE})
    return hashlib.sha256(data).hexdigest(), data


class Store:
    """A blob store that can break off and lie."""

    def __init__(self, chunk_bytes: int = 40) -> None:
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}
        self.chunk_bytes = chunk_bytes
        self.break_after = 10**9  # chunks
        self.asked: list[list[tuple[str, int]]] = []
        self.received = 0
        self.full = False

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        self.asked.append(wanted)
        for name, offset in wanted:
            data = self.blobs[name]
            for at in range(offset, len(data), self.chunk_bytes):
                self.break_after -= 1
                if self.break_after < 0:
                    self.break_after = 10**9
                    raise ConnectionFailed("reset")
                yield Chunk(name, len(data), at, data[at : at + self.chunk_bytes])

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {h: len(self.parts.get(h, b"")) for h in hashes if h not in self.blobs}

    def patch(self, patches: list[Patch]) -> Collection[str]:
        return ()

    def changes(self, hashes: list[str]) -> list[Change]:
        return []

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        if self.full:
            raise StorageError("disk is full")
        whole: set[str] = set()
        for chunk in chunks:
            self.break_after -= 1
            if self.break_after < 0:
                self.break_after = 10**9
                raise ConnectionFailed("reset")
            self.received += len(chunk.data)
            if chunk.hash in self.blobs:
                whole.add(chunk.hash)
                continue
            part = self.parts.get(chunk.hash, b"")
            assert chunk.offset <= len(part)
            self.parts[chunk.hash] = part + chunk.data[len(part) - chunk.offset :]
            if len(self.parts[chunk.hash]) == chunk.size:
                self.blobs[chunk.hash] = self.parts.pop(chunk.hash)
                whole.add(chunk.hash)
        return whole


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "blobs", 1 << 20)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSE_FIRST_S", 1e-4)
    monkeypatch.setattr(blobs, "PATIENCE_S", 0.001)


def test_a_new_file_goes_up_without_a_question_and_another_time_with_one(
    tmp_path: Path, store: Store
) -> None:
    name, data = blob()
    path = tmp_path / "update"
    path.write_bytes(data)
    questions: list[list[str]] = []
    asked = store.missing
    store.missing = lambda hashes: questions.append(hashes) or asked(hashes)  # type: ignore[method-assign,func-returns-value]
    files, file = BlobFiles(store, cache), BlobFile(path, name, len(data))
    assert files.store([file], Cancel(), new=True) == len(data)
    assert not questions
    assert files.store([file], Cancel()) == 0
    assert questions == [[name]]


def test_a_new_file_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 40)
    name, data = blob()
    path = tmp_path / "update"
    path.write_bytes(data)
    store.break_after = 2
    BlobFiles(store, cache).store([BlobFile(path, name, len(data))], Cancel(), new=True)
    assert store.blobs[name] == data
    assert store.received == len(data), "nothing twice"


def test_a_download_goes_on_where_it_was_cut_off(store: Store, cache: BlobCache) -> None:
    name, data = blob()
    store.blobs[name], store.break_after = data, 2
    BlobFiles(store, cache).fetch({name: 1000}, Cancel())
    assert store.asked == [[(name, 0)], [(name, 80)]]
    assert cache.path(name).read_bytes() == data


def test_what_is_in_the_cache_is_not_asked_for_again(store: Store, cache: BlobCache) -> None:
    name, data = blob()
    store.blobs[name] = data
    BlobFiles(store, cache).fetch({name: 1000}, Cancel())
    BlobFiles(store, cache).fetch({name: 1000}, Cancel())
    assert len(store.asked) == 1


def test_a_blob_that_is_not_what_its_name_says_is_refused(store: Store, cache: BlobCache) -> None:
    name, data = blob()
    store.blobs[name] = data[:-1] + b"x"
    with pytest.raises(BadFrame, match="sha256 differs"):
        BlobFiles(store, cache).fetch({name: 1000}, Cancel())
    assert cache.held(name) == 0


def test_a_blob_larger_than_its_tensor_can_be_is_refused(store: Store, cache: BlobCache) -> None:
    name, data = blob()
    store.blobs[name] = data
    with pytest.raises(BadFrame, match=r"at most 50 fit"):
        BlobFiles(store, cache).fetch({name: 50}, Cancel())


def test_a_blob_nobody_asked_for_is_refused(store: Store, cache: BlobCache) -> None:
    name, _ = blob()
    store.get = lambda wanted: [Chunk("0" * 64, 4, 0, b"abcd")]  # type: ignore[method-assign]
    with pytest.raises(BadFrame):
        BlobFiles(store, cache).fetch({name: 1000}, Cancel())


def test_a_store_that_stays_away_ends_the_download(store: Store, cache: BlobCache) -> None:
    def away(wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        raise ConnectionFailed("away")

    store.get = away  # type: ignore[method-assign]
    with pytest.raises(ConnectionFailed):
        BlobFiles(store, cache).fetch({"0" * 64: 1000}, Cancel())


def test_a_transfer_waits_for_a_coordinator_that_is_away_and_then_fails_as_ever(
    store: Store, cache: BlobCache, tmp_path: Path
) -> None:
    name, data = blob()
    failures = 0
    get, missing, store.blobs[name] = store.get, store.missing, data

    def failing(wanted: Any) -> Any:
        nonlocal failures
        failures += 1
        raise ConnectionFailed("refused")

    def returned(wanted: Any) -> Any:
        return failing(wanted) if failures < 10 else get(wanted)

    store.get = returned  # type: ignore[method-assign]
    files = BlobFiles(store, cache, away=lambda: failures <= 10)
    files.fetch({name: 1000}, Cancel())
    assert cache.path(name).read_bytes() == data
    assert failures == 10
    store.missing = failing  # type: ignore[method-assign]
    path = tmp_path / "state"
    path.write_bytes(data)
    with pytest.raises(ConnectionFailed):
        files.store([BlobFile(path, name, len(data))], Cancel())
    assert 10 < failures < 20
    store.missing = missing  # type: ignore[method-assign]
    assert files.store([BlobFile(path, name, len(data))], Cancel()) == 0


def test_a_download_stops_when_cancelled(store: Store, cache: BlobCache) -> None:
    name, data = blob()
    store.blobs[name] = data
    cancel = Cancel()
    with pytest.raises(Cancelled):
        BlobFiles(store, cache).fetch({name: 1000}, cancel, lambda n: cancel.set("released"))


def test_the_cache_keeps_its_bound_and_what_is_needed_now(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, 250)
    a, b, c = (hashlib.sha256(seed * 100).hexdigest() for seed in (b"a", b"b", b"c"))
    for at, (name, seed) in enumerate(((a, b"a"), (b, b"b"), (c, b"c"))):
        cache.path(name).write_bytes(seed * 100)
        os.utime(cache.path(name), (at, at))
    cache.trim([a])
    assert cache.held(a) is None
    assert cache.held(b) == 0
    assert cache.held(c) is None


@pytest.mark.parametrize("looked_at", [0, 1])
def test_a_file_that_gets_its_name_while_the_cache_is_trimmed_is_no_error(
    looked_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices of a daemon share the cache: one trims while another's last chunk arrives."""
    cache, honest = BlobCache(tmp_path, 250), Path.stat
    name, data = blob()
    cache.write(Chunk(name, len(data), 0, data[:10]))
    looks = itertools.count()

    def look(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.suffix and next(looks) == looked_at:
            cache.write(Chunk(name, len(data), 10, data[10:]))
        return honest(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", look)
    cache.trim()
    monkeypatch.undo()
    assert cache.path(name).exists() == (next(looks) > looked_at)


def test_two_devices_trim_one_cache_at_once(tmp_path: Path) -> None:
    cache, rounds, files = BlobCache(tmp_path, 250), 10, 100
    barrier, failed = threading.Barrier(2), list[BaseException]()

    def trim() -> None:
        for _ in range(rounds):
            if barrier.wait() == 0:
                for at in range(files):
                    (tmp_path / f"{at:064x}").write_bytes(b"x" * 100)
            barrier.wait()
            try:
                cache.trim()
            except OSError as error:
                failed.append(error)
            barrier.wait()

    threads = [threading.Thread(target=trim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_being_fetched_is_not_released(cache: BlobCache) -> None:
    a, b = "a" * 64, "b" * 64
    for name in (a, b):
        cache.path(name).write_bytes(b"x")
    cache.busy.add(a)
    cache.keep((), owner=1)
    cache.release((a, b), owner=1)
    assert [cache.path(name).exists() for name in (a, b)] == [True, False]


def test_a_blob_that_rotted_on_the_disk_is_fetched_again_before_it_is_used(
    store: Store, tmp_path: Path
) -> None:
    name, data = blob()
    store.blobs[name] = data
    folder = tmp_path / "blobs"
    BlobFiles(store, BlobCache(folder, 1 << 20)).fetch({name: 1000}, Cancel())
    before = (folder / name).stat()
    (folder / name).write_bytes(data[:-1] + b"x")
    os.utime(folder / name, (before.st_atime, before.st_mtime))
    BlobFiles(store, BlobCache(folder, 1 << 20)).fetch({name: 1000}, Cancel())
    assert (folder / name).read_bytes() == data
    assert len(store.asked) == 2


def test_an_upload_keeps_to_its_rate() -> None:
    pace = blobs._Pace(100.0)
    assert pace.delay_s(50) == 0.0
    assert pace.delay_s(50) == pytest.approx(0.5, abs=0.05)
    assert pace.delay_s(50) == pytest.approx(1.0, abs=0.05)
    assert blobs._Pace(None).delay_s(10**9) == 0.0


def test_a_disk_that_deletes_nothing_stops_nobody_who_needs_a_blob_no_longer(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, 1 << 20)
    stuck, other = "a" * 64, "b" * 64
    cache.path(stuck).mkdir()  # which no unlink removes
    cache.path(other).with_suffix(".part").touch()
    cache.keep([stuck, other])
    cache.release([stuck, other], 0)
    assert [path.name for path in tmp_path.iterdir()] == [stuck]


def test_a_folder_of_blobs_that_is_there_stays_as_its_owner_made_it(tmp_path: Path) -> None:
    """It may be a disk of its own, where this user can change no mode; the state folder above is closed."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs").chmod(0o755)
    BlobCache(tmp_path / "blobs", 1 << 20)
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o755
    BlobCache(tmp_path / "new", 1 << 20)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
