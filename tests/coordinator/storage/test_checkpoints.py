"""A checkpoint counts only as long as each of its blobs is the tensor that the model declares."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from atoll.opdag import StateMeta, TensorMeta
from coordinator.storage import blob_store
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.checkpoints import defect, torn
from tests.coordinator.storage.test_blob_store import counted

STATE = StateMeta(TensorMeta((3, 4), "float32"), True)
VALUE = np.arange(12, dtype=np.float32).reshape(3, 4)


def raw(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (3, 4), span: Any = (0, 48)) -> dict[str, Any]:
    return {"value": {"dtype": dtype, "shape": shape, "data_offsets": span}}


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        ("float32", VALUE),
        ("int64", VALUE.astype(np.int64)),
        ("bool", VALUE > 3),
        ("float64", np.zeros((3, 0))),
    ],
)
def test_a_tensor_of_any_dtype_with_or_without_optimizer_state_is_whole(
    tmp_path: Path, dtype: str, array: Any
) -> None:
    store, state = BlobStore(tmp_path), StateMeta(TensorMeta(array.shape, dtype))
    assert defect(store, "w", store.put(save({"value": array})), state, hashes=True) == ""
    step = {"step": np.array(3.0, np.float32), "exp_avg": np.zeros(array.shape, np.float32)}
    assert defect(store, "w", store.put(save({"value": array, **step}, {"of": "w"})), state) == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (save({"value": VALUE.T.copy()}), r"float32 \(4, 3\), the model has float32 \(3, 4\)"),
        (save({"value": VALUE.astype(np.float64)}), "the model has float32"),
        (save({"weight": VALUE}), "expected 'value'"),
        (save({"value": VALUE, **{f"s{n}": VALUE for n in range(8)}}), "expected 'value'"),
        (save({"value": VALUE, "exp_avg": np.zeros(13, np.float32)}), "13 elements beside a value of 12"),
        (save({"value": VALUE})[:-1], "its header speaks of"),
        (save({"value": VALUE}) + b"x", "its header speaks of"),
        (raw(entry(span=(4, 52)), bytes(52)), "expected from 0"),
        (raw(entry(shape=(-3, -4)), bytes(48)), "has the shape"),
        (raw(entry(shape=(3.0, 4)), bytes(48)), "has the shape"),
        (raw(entry(dtype="F99"), bytes(48)), "no safetensors header"),
        (raw([1], b""), "no safetensors header"),
        (b"[" * 9000, "a header of"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "no safetensors header"),
        (b"short", "no safetensors header"),
        (b"", "no safetensors header"),
    ],
)
def test_a_blob_that_is_not_the_declared_tensor_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(defect(store, "w", store.put(data), STATE))


@given(st.binary(max_size=200), st.integers(0, 120))
def test_no_bytes_end_in_anything_but_an_answer(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    whole = save({"value": VALUE})
    store = BlobStore(tmp_path_factory.mktemp("store"))
    for data in (noise, whole[:at] + noise, struct.pack("<Q", len(noise)) + noise):
        assert data == whole or isinstance(defect(store, "w", store.put(data), STATE), str)


def test_a_flipped_bit_is_found_by_reading_all_and_that_blob_may_be_sent_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    data = save({"value": VALUE})
    name = store.put(data)
    with store.path(name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert torn(store, {"w": name}, {"w": STATE}, ["w"]) == ""
    assert "do not hash" in torn(store, {"w": name}, {"w": STATE}, ["w"], hashes=True)
    assert "not in the store" in torn(store, {"w": name}, {"w": STATE}, ["w"])
    assert counted(store) == 0
    assert store.put(data) == name
    assert torn(store, {"w": name}, {"w": STATE}, ["w"], hashes=True) == ""
    assert "first 'v'" in torn(store, {"w": name}, {"w": STATE}, ["v", "w"])


def test_a_name_is_on_the_disk_before_its_blob_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(blob_store, "sync_folder", synced.append)
    store = BlobStore(tmp_path / "durable")
    name = store.put(b"data")
    assert synced == [store.path(name).parent, store.root]
    BlobStore(tmp_path / "other", durable=False).put(b"data")
    assert len(synced) == 2


def test_a_dtype_that_numpy_lacks_is_known(tmp_path: Path) -> None:
    store, state = BlobStore(tmp_path), StateMeta(TensorMeta((3, 4), "bfloat16"))
    assert defect(store, "w", store.put(raw(entry("BF16", span=(0, 24)), bytes(24))), state) == ""
