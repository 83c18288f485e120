"""Weights that a worker's owner adds stay on its disk, under the names that jobs have for them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import Tensor

from atoll.errors import StorageError, UsageError
from coordinator.client.prepare import tensor_blob
from hostos.files.folder_lock import FolderLock
from protos.blob_transfer import Chunk
from worker.blobs import BlobCache
from worker.data import weights as module
from worker.data.weights import Claimed, add_weights, held_hashes, kept_blobs, list_weights, remove_weights

BASE = {"a": torch.arange(600.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
TUNED = {"a": BASE["a"], "b": BASE["b"] * 2}


def saved(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def names(tensors: Mapping[str, Tensor]) -> set[str]:
    return {tensor_blob(tensor).hash for tensor in tensors.values()}


def claimed(state: Path) -> set[str]:
    hashes = held_hashes(state)
    return {hashes[at : at + 32].hex() for at in range(0, len(hashes), 32)}


def test_added_weights_are_blobs_under_the_hashes_of_jobs_and_go_but_for_those_shared(tmp_path: Path) -> None:
    state, seen = tmp_path / "state", list[tuple[int, int]]()
    base = add_weights(state, saved(tmp_path / "base", BASE), progress=lambda *at: seen.append(at))
    assert (base.name, base.whole, set(base.blobs)) == ("base", True, names(BASE))
    assert seen[-1] == (2 * base.n_bytes, 2 * base.n_bytes)
    add_weights(state, saved(tmp_path / "other", TUNED), "tuned")
    assert [held.name for held in list_weights(state)] == ["base", "tuned"]
    assert claimed(state) == kept_blobs(state) == names(BASE) | names(TUNED)
    for blob in kept_blobs(state):
        assert BlobCache(state / "blobs", 1 << 20).held(blob) is None, "its bytes are what the name says"
    freed = remove_weights(state, "base")
    assert freed == tensor_blob(BASE["b"]).size
    assert claimed(state) == names(TUNED)
    with pytest.raises(UsageError, match=r"no weights 'base' were added; there are: tuned"):
        remove_weights(state, "base")


def test_another_checkpoint_under_a_name_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    state = tmp_path / "state"
    add_weights(state, saved(tmp_path / "model", BASE))
    add_weights(state, saved(tmp_path / "model", TUNED))
    assert claimed(state) == names(TUNED)
    assert {path.name for path in (state / "blobs").iterdir()} == names(TUNED)


def test_an_addition_that_broke_off_goes_on_and_is_claimed_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, source = tmp_path / "state", saved(tmp_path / "base", BASE)
    real, written = module._have, list[str]()

    def once(path: Path, *others: object) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        real(path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_have", once)
    with pytest.raises(StorageError, match=r"No space left on device; free space"):
        add_weights(state, source)
    (broken,) = list_weights(state)
    assert not broken.whole
    assert claimed(state) == set()
    assert kept_blobs(state) == names(BASE)
    before = (state / "blobs" / written[0]).stat().st_mtime_ns
    monkeypatch.setattr(module, "_have", real)
    assert add_weights(state, source).whole
    assert (state / "blobs" / written[0]).stat().st_mtime_ns == before, "it is not written again"
    assert claimed(state) == names(BASE)


def test_what_cannot_be_added_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, source = tmp_path / "state", saved(tmp_path / "base", BASE)
    with pytest.raises(UsageError, match=r"holds no \.safetensors"):
        add_weights(state, tmp_path / "nothing")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=module.KEPT_FREE_BYTES + 100))
        with pytest.raises(
            StorageError, match=r"base takes 2\.\d KiB more; .* has 256\.0 MiB free, .*remove NAME"
        ):
            add_weights(state, source)
    with monkeypatch.context() as few:
        few.setattr(module, "MAX_HELD_WEIGHTS", 1)
        with pytest.raises(UsageError, match=r"2 tensors beside 0 others; a worker holds at most 1"):
            add_weights(state, source)
    lock = FolderLock(state / "weights" / "lock", lambda holder: "")
    with pytest.raises(UsageError, match=r"adds or removes weights here now"):
        add_weights(state, source)
    lock.release()
    assert not list_weights(state)
    (state / "weights" / "odd.json").write_text('{"blobs": {"../../etc/passwd": 1}}')
    assert not list_weights(state)


def test_the_cache_never_evicts_them_nor_counts_them(tmp_path: Path) -> None:
    state = tmp_path / "state"
    add_weights(state, saved(tmp_path / "base", BASE))
    cache = BlobCache(state / "blobs", 1000)
    cache.pin(kept_blobs(state))
    blobs = [tensor_blob(torch.full((100,), float(n))) for n in range(4)]
    for blob in blobs:
        cache.write(Chunk(blob.hash, blob.size, 0, b"".join(blob.read(0))))
    cache.trim()
    assert claimed(state) == names(BASE)
    left = [blob for blob in blobs if (state / "blobs" / blob.hash).exists()]
    assert len(left) == 1000 // blobs[0].size
    cache.keep(kept_blobs(state), 0)
    cache.release(kept_blobs(state), 0)
    assert claimed(state) == names(BASE), "copies of a stage that are no longer kept may be of them"


def test_the_coordinator_hears_of_weights_and_once_of_their_end(tmp_path: Path) -> None:
    state, cache = tmp_path / "state", BlobCache(tmp_path / "blobs", 0)
    claimed = Claimed(state)
    assert claimed.told_anew(cache) is None
    add_weights(state, saved(tmp_path / "base", BASE))
    assert claimed.told_anew(cache) == claimed.told_anew(cache) == held_hashes(state), "after each welcome"
    remove_weights(state, "base")
    assert claimed.told_anew(cache) == b""
    assert claimed.told_anew(cache) is None
