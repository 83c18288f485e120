"""A bucket behind the folder: a blob counts once both have it, and either may lose its copy."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from atoll.errors import StorageError, UsageError
from atoll.opdag import StateMeta, TensorMeta
from coordinator.config import CoordinatorConfig
from coordinator.storage import mirrored_blobs
from coordinator.storage.blob_store import BlobStore, Gone
from coordinator.storage.checkpoints import defect, torn
from coordinator.storage.mirrored_blobs import MirroredBlobStore, blob_store
from tests.coordinator.storage.objects_in_memory import WRITTEN_S, MemoryObjects
from tests.coordinator.storage.test_blob_store import on_disk


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def local(store: BlobStore, name: str) -> Path:
    return store.root / name[:2] / name[2:]


def test_a_blob_counts_once_the_bucket_has_it_too(tmp_path: Path) -> None:
    objects, data = MemoryObjects(), os.urandom(3000)
    store, name = MirroredBlobStore(tmp_path, objects), name_of(data)
    assert not store.write(name, 3000, 0, data[:2000])
    assert (objects.held, store.has(name), store.held(name)) == ({}, False, 2000)
    assert store.write(name, 3000, 2000, data[2000:])
    assert objects.held == {name: data}
    assert (store.has(name), store.size(name), store.read(name)) == (True, 3000, data)
    assert objects.reads == []
    assert store.write(name, 3000, 0, data[:10])  # whole is whole


def test_while_the_bucket_is_away_nothing_counts_and_the_last_byte_again_is_enough(tmp_path: Path) -> None:
    objects, data = MemoryObjects(), os.urandom(100)
    store, name = MirroredBlobStore(tmp_path, objects), name_of(data)
    objects.away = True
    for _ in range(2):
        with pytest.raises(StorageError, match="once it does"):
            store.write(name, 100, store.resumes(name), data[store.resumes(name) :])
        assert not store.has(name)
        assert store.resumes(name) == 99
    objects.away = False
    assert store.write(name, 100, 99, data[99:])
    assert store.has(name)
    assert on_disk(store.root) == 100


def test_what_a_killed_coordinator_had_not_sent_is_sent_at_the_next_start(tmp_path: Path) -> None:
    name = BlobStore(tmp_path).put(b"not sent yet")
    objects = MemoryObjects()
    objects.away = True
    with pytest.raises(StorageError):
        MirroredBlobStore(tmp_path, objects)
    objects.away = False
    assert MirroredBlobStore(tmp_path, objects).has(name)
    assert objects.held == {name: b"not sent yet"}


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 35])
def test_another_machine_fetches_in_ranges_what_is_asked_for(
    tmp_path: Path, size: int, reading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_blobs, "PART_BYTES", 10)
    objects, data = MemoryObjects(), os.urandom(size)
    name = MirroredBlobStore(tmp_path / "a", objects).put(data)
    elsewhere = MirroredBlobStore(tmp_path / "b", objects, reading=reading)
    assert reading or (elsewhere.has(name) and elsewhere.size(name) == size)
    assert not local(elsewhere, name).exists()
    assert elsewhere.path(name).read_bytes() == data
    assert [length for _, _, length in objects.reads] == [min(10, size - at) for at in range(0, size, 10)]
    asked = len(objects.reads)
    assert elsewhere.head(name, 4) == data[:4]
    assert b"".join(elsewhere.chunks(name, size // 2)) == data[size // 2 :]
    assert len(objects.reads) == asked
    assert on_disk(elsewhere.root) == size
    assert objects.lists == (1 if reading else 2)


def test_what_neither_has_is_missing_as_ever(tmp_path: Path) -> None:
    store = MirroredBlobStore(tmp_path, MemoryObjects())
    assert not store.path(name_of(b"?")).exists()
    with pytest.raises(StorageError, match="not in the store"):
        store.size(name_of(b"?"))
    with pytest.raises(UsageError, match="64 hexadecimal"):
        store.path("../etc/passwd")


def test_an_object_whose_bytes_are_not_its_names_is_never_taken_for_it(tmp_path: Path) -> None:
    objects = MemoryObjects({name_of(b"right"): b"wrong"})
    store = MirroredBlobStore(tmp_path, objects)
    assert not store.path(name_of(b"right")).exists()
    assert list(store.partial.iterdir()) == []


def test_a_copy_that_rotted_is_fetched_anew_and_a_blob_that_rotted_in_both_places_is_dropped(
    tmp_path: Path,
) -> None:
    objects = MemoryObjects()
    store = MirroredBlobStore(tmp_path, objects)
    name = store.put(b"healthy")
    assert not store.rotten(name)
    local(store, name).write_bytes(b"rotten!")
    assert not store.rotten(name)
    assert store.read(name) == b"healthy"
    local(store, name).write_bytes(b"rotten!")
    objects.held[name] = b"rotten!"
    assert store.rotten(name)
    assert not store.has(name)
    assert objects.held == {}
    store.put(b"healthy")  # whoever has it may send it again
    assert objects.held == {name: b"healthy"}


@pytest.mark.parametrize("left", [{}, {"rotten": True}])
@pytest.mark.parametrize("look", ["path", "rotten", "defect", "chunks"])
def test_an_object_that_is_gone_or_rotten_is_dropped_where_the_folder_is_empty(
    tmp_path: Path, left: dict[str, bool], look: str
) -> None:
    data, state = save({"value": np.zeros(3, np.float32)}), StateMeta(TensorMeta((3,), "float32"))
    objects = MemoryObjects({name_of(data): data})
    store, name = MirroredBlobStore(tmp_path, objects), name_of(data)
    objects.held = {name: data[::-1]} if left else {}
    assert store.has(name)
    if look == "path":
        assert not store.path(name).exists()
    elif look == "rotten":
        assert store.rotten(name)
    elif look == "defect":
        assert "it is dropped" in defect(store, "w", name, state)
    else:
        with pytest.raises(Gone, match="not in the store"):
            store.read(name)
    assert (store.has(name), store.resumes(name), objects.held) == (False, 0, {})
    assert store.write(name, len(data), 0, data)  # whoever has it may send it again
    assert (objects.held, defect(store, "w", name, state)) == ({name: data}, "")


def test_one_that_only_reads_drops_no_object(tmp_path: Path) -> None:
    objects = MemoryObjects({name_of(b"right"): b"wrong"})
    assert not MirroredBlobStore(tmp_path, objects, reading=True).path(name_of(b"right")).exists()
    assert objects.held == {name_of(b"right"): b"wrong"}


def test_a_store_that_gives_nothing_now_makes_no_blob_damaged(tmp_path: Path) -> None:
    data, state = save({"value": np.zeros(3, np.float32)}), StateMeta(TensorMeta((3,), "float32"))
    objects, name = MemoryObjects({name_of(data): data}), name_of(data)
    store = MirroredBlobStore(tmp_path, objects, quota_bytes=10)
    for hashes in (False, True):
        with pytest.raises(StorageError, match="--blob-quota"):
            torn(store, {"w": name}, {"w": state}, ["w"], hashes=hashes)
        objects.away = True
        with pytest.raises(StorageError, match="does not answer"):
            torn(store, {"w": name}, {"w": state}, ["w"], hashes=hashes)
        objects.away = False
    assert (store.has(name), objects.held) == (True, {name: data})
    store.quota_bytes = 1000
    assert torn(store, {"w": name}, {"w": state}, ["w"], hashes=True) == ""


def test_a_rotten_object_that_cannot_be_deleted_now_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects({name_of(b"right"): b"wrong"})
    store = MirroredBlobStore(tmp_path, objects)

    def refused(names: object) -> None:
        raise StorageError("s3://bucket deletes nothing")

    with monkeypatch.context() as away:
        away.setattr(objects, "delete", refused)
        with pytest.raises(StorageError, match="deletes nothing"):
            store.rotten(name_of(b"right"))
    assert store.has(name_of(b"right"))
    assert store.rotten(name_of(b"right"))
    assert objects.held == {}


def test_deleting_deletes_both_copies_and_spares_what_is_needed(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = MirroredBlobStore(tmp_path, objects)
    gone, kept, discarded = (store.put(data) for data in (b"gone", b"kept", b"discarded"))
    assert store.delete([gone, kept], unless=lambda name: name == kept) == 4
    assert store.discard([discarded]) == 9
    assert set(objects.held) == {kept}
    assert [store.has(name) for name in (gone, kept, discarded)] == [False, True, False]


def test_what_could_not_be_deleted_is_swept_after_the_next_start(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = MirroredBlobStore(tmp_path, objects)
    name, needed = store.put(b"superseded"), store.put(b"needed")
    objects.away = True
    store.delete([name])
    objects.away = False
    assert set(objects.held) == {name, needed}
    again = MirroredBlobStore(tmp_path, objects)
    again.sweep({needed}, before_s=WRITTEN_S + 1.0)
    assert set(objects.held) == {needed}


def test_a_sweep_takes_old_objects_that_have_no_copy_here_and_none_that_was_asked_about(
    tmp_path: Path,
) -> None:
    old, touched, kept = (name_of(data) for data in (b"old", b"touched", b"kept"))
    objects = MemoryObjects({old: b"old", touched: b"touched", kept: b"kept"})
    store = MirroredBlobStore(tmp_path, objects)
    store.touch(touched)
    store.sweep({kept}, before_s=time.time() - 60.0)
    assert set(objects.held) == {touched, kept}


@given(st.lists(st.tuples(st.sampled_from("wfdrna"), st.integers(0, 3)), max_size=30))
@settings(deadline=None, max_examples=30)
def test_whatever_happens_what_the_store_has_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]]
) -> None:
    """Writes, forgotten copies, deletions, restarts, another machine, outages."""
    objects, root = MemoryObjects(), tmp_path_factory.mktemp("store")
    store = MirroredBlobStore(root, objects)
    blobs = [bytes([at]) * (at + 1) for at in range(4)]
    for what, at in events:
        name = name_of(blobs[at])
        if what == "w":
            try:
                store.put(blobs[at])
            except StorageError:
                assert objects.away
                assert not store.has(name)
        elif what == "f":
            local(store, name).unlink(missing_ok=True)
        elif what == "d":
            store.delete([name])
            assert not store.has(name)
        elif what == "a":
            objects.away = not objects.away
        elif not objects.away:
            root = root if what == "r" else tmp_path_factory.mktemp("store")
            store = MirroredBlobStore(root, objects)
        if not objects.away:
            for data in blobs:
                assert not store.has(name_of(data)) or store.read(name_of(data)) == data


def test_the_url_says_where_blobs_lie(tmp_path: Path) -> None:
    def config(url: str) -> CoordinatorConfig:
        return CoordinatorConfig(state_dir=tmp_path, blobs_url=url)

    assert config("").blob_dir == config("s3://bucket/prefix").blob_dir == tmp_path / "blobs"
    assert config("/mnt/blobs").blob_dir == config("file:///mnt/blobs").blob_dir == Path("/mnt/blobs")
    with pytest.raises(UsageError, match="s3://BUCKET/PREFIX"):
        config("gs://bucket")
    assert type(blob_store(tmp_path / "blobs", "/mnt/blobs")) is BlobStore
    for url in ("s3://", "s3:///prefix", "s3://key:secret@bucket"):
        with pytest.raises(UsageError, match="names no bucket"):
            blob_store(tmp_path / "blobs", url)
