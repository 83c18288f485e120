"""Tensors to and from the blob store: bit-equal, checked, and only what is missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from atoll.errors import BadFrame, StorageError
from atoll.opdag import StateMeta, TensorMeta
from hostos import retries
from tests.worker.test_blobs import VALUE, Store
from worker import blobs
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel, Cancelled
from worker.stage import tensor_blobs
from worker.stage.tensor_blobs import load, store_files, write_tensors

STATE = StateMeta(TensorMeta((2, 3), "float32"), requires_grad=True)


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "blobs", 1 << 20)


@pytest.fixture
def store() -> Store:
    return Store()


def stored(store: Store, cache: BlobCache, snapshot: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    scratch = cache.path("scratch")
    scratch.mkdir(exist_ok=True)
    cancel = Cancel()
    names = store_files(BlobFiles(store, cache), write_tensors(snapshot, scratch, cancel), cancel)
    assert not list(scratch.iterdir())
    return names


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSE_FIRST_S", 1e-4)
    monkeypatch.setattr(blobs, "PATIENCE_S", 0.001)


def test_what_was_stored_comes_back_bit_equal(store: Store, cache: BlobCache) -> None:
    snapshot = {"w": {"value": VALUE, "exp_avg": VALUE * 2, "step": torch.tensor(3.0)}}
    names = stored(store, cache, snapshot)
    BlobFiles(store, cache).fetch({names["w"]: blobs.most_bytes(STATE)}, Cancel())
    found = load(BlobFiles(Store(), cache), "w", names["w"], STATE)
    assert {key: torch.equal(found[key], value) for key, value in snapshot["w"].items()} == {
        "value": True,
        "exp_avg": True,
        "step": True,
    }


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no safetensors at all", "not a safetensors file"),
        (save({"other": VALUE}), "expected 'value'"),
        (save({"value": VALUE.T.contiguous()}), "the model has float32"),
        (save({"value": VALUE.double()}), "the model has float32"),
        (save({"value": VALUE, **{f"k{i}": VALUE + i for i in range(8)}}), "expected 'value'"),
    ],
)
def test_a_file_that_does_not_hold_the_declared_tensor_is_refused(
    cache: BlobCache, data: bytes, says: str
) -> None:
    name = hashlib.sha256(data).hexdigest()
    cache.path(name).write_bytes(data)
    with pytest.raises(BadFrame, match=says):
        load(BlobFiles(Store(), cache), "w", name, STATE)


def test_an_upload_sends_only_what_the_store_lacks(store: Store, cache: BlobCache) -> None:
    first = stored(store, cache, {"a": {"value": VALUE}})
    before = store.received
    second = stored(store, cache, {"a": {"value": VALUE}, "b": {"value": VALUE + 1}})
    assert second["a"] == first["a"]
    assert store.received - before == len(store.blobs[second["b"]])


def test_an_upload_goes_on_where_it_was_cut_off(
    store: Store, cache: BlobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 40)
    store.break_after = 2
    names = stored(store, cache, {"a": {"value": VALUE}})
    assert store.received == len(store.blobs[names["a"]])


def test_equal_tensors_are_stored_once(store: Store, cache: BlobCache) -> None:
    names = stored(store, cache, {"a": {"value": VALUE}, "b": {"value": VALUE.clone()}})
    assert names["a"] == names["b"]
    assert len(store.blobs) == 1


def test_a_full_store_is_reported(store: Store, cache: BlobCache) -> None:
    store.full = True
    with pytest.raises(StorageError, match="disk is full"):
        stored(store, cache, {"a": {"value": VALUE}})


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(7, dtype=torch.bfloat16),
        torch.ones(2, 3, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.ones(3, 5).t(),
        torch.ones(2, dtype=torch.complex64),
        torch.tensor(5),
    ],
    ids=str,
)
def test_what_is_written_piece_by_piece_has_the_bytes_of_safetensors(
    value: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a frozen tensor, which its owner stored so, is never sent again."""
    monkeypatch.setattr(tensor_blobs, "PIECE_BYTES", 5)
    monkeypatch.setattr(tensor_blobs, "UNWRITTEN_BYTES", 16)
    tensors = {"value": value, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    file = write_tensors({"w": tensors}, tmp_path, Cancel())["w"]
    expected = save({key: tensor.contiguous() for key, tensor in tensors.items()})
    assert file.path.read_bytes() == expected
    assert (file.hash, file.size) == (hashlib.sha256(expected).hexdigest(), len(expected))


def test_a_cancelled_writing_leaves_no_file(tmp_path: Path) -> None:
    cancel = Cancel()
    cancel.set("released")
    with pytest.raises(Cancelled):
        write_tensors({"w": {"value": VALUE}}, tmp_path, cancel)
    assert not list(tmp_path.iterdir())
