"""The data provider serves the micro-batches that the declared order says, from blobs."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save

from atoll.arrays import dtype_name, tensor_of
from atoll.data import ByteText, Materialised, Rows, sample_indices, take
from atoll.errors import StorageError, UsageError
from atoll.job import JobSpec, TrainingSpec
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.data_provider import DataProvider, map_value


def spec_of(store: BlobStore, train: Materialised, held_out: Materialised | None) -> JobSpec:
    def stored(data: Materialised):  # type: ignore[no-untyped-def]
        return data.stored({key: store.put(save({"value": array})) for key, array in data.arrays.items()})

    training = TrainingSpec(steps=5, n_micro=3, eval_batches=2)
    return JobSpec("j", training, "", "", {}, stored(train), stored(held_out) if held_out else None)


def test_windows_of_text_come_in_the_seeded_order(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    text = bytes(np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8))
    train, held_out = ByteText(17, text=text, seed=3).materialise(4)
    served = list(DataProvider(store).batches(spec_of(store, train, held_out), False, ["tokens"], 2, 2))
    assert [(b.step, b.micro) for b in served] == [(s, m) for s in (2, 3) for m in range(3)]
    for b in served:
        samples = sample_indices(train.spec, 3, b.step, b.micro)
        expected = take(train.arrays["text"], train.spec.fields[0], samples)
        np.testing.assert_array_equal(b.array, expected)
        assert b.array.shape == (4, 17)
        assert bytes(b.array[0].tobytes()) in text


def test_evaluation_always_sees_the_same_micro_batches(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    train, held_out = ByteText(17, text=bytes(range(256)) * 40).materialise(4)
    spec, provider = spec_of(store, train, held_out), DataProvider(store)
    first = [b.array for b in provider.batches(spec, True, ["tokens"], 0, 1)]
    later = [b.array for b in provider.batches(spec, True, ["tokens"], 77, 1)]
    assert len(first) == 2
    np.testing.assert_array_equal(first, later)


def test_bfloat16_rows_are_served_bit_for_bit(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(2)).bfloat16()
    train, _ = Rows({"x": values}, seed=None).materialise(4)
    blob = store.put(safetensors.torch.save({"value": values}))
    spec = JobSpec("j", TrainingSpec(5, 2), "", "", {}, train.stored({"x": blob}), None)
    served = [b.array for b in DataProvider(store).batches(spec, False, ["x"], 0, 1)]
    assert {dtype_name(array) for array in served} == {"bfloat16"}
    assert torch.equal(torch.cat([tensor_of(array) for array in served]), values)


def test_every_sample_of_an_epoch_is_served_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    train, _ = Rows({"x": np.arange(24.0), "y": np.arange(24)}, seed=9).materialise(2)
    provider, spec = DataProvider(store), spec_of(store, train, None)
    seen = np.concatenate([b.array for b in provider.batches(spec, False, ["y"], 0, 4)])
    assert sorted(seen) == list(range(24))
    assert list(seen) != list(range(24))


def test_nothing_is_held_of_a_blob_that_was_served_and_deleted(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    train, _ = Rows({"x": np.zeros((8, 2))}).materialise(2)
    provider, spec = DataProvider(store), spec_of(store, train, None)
    assert len(list(provider.batches(spec, False, ["x"], 0, 1))) == 3
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    store.delete([spec.data.fields[0].blob])
    with pytest.raises(StorageError, match="submit the job again"):
        list(provider.batches(spec, False, ["x"], 0, 1))


def test_unknown_inputs_and_impossible_counts_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    train, _ = Rows({"x": np.zeros((8, 2))}).materialise(2)
    spec, provider = spec_of(store, train, None), DataProvider(store)
    for inputs, first, count in ((["z"], 0, 1), (["x"], 0, 0), (["x"], -1, 1), (["x"], 0, 10**9)):
        with pytest.raises(UsageError):
            list(provider.batches(spec, False, inputs, first, count))
    with pytest.raises(UsageError, match="no held-out data"):
        list(provider.batches(spec, True, ["x"], 0, 1))


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{}", save({"other": np.zeros(2)})]
)
def test_a_blob_that_is_no_tensor_is_a_storage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "blob"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"cannot be read|header"):
        map_value(path)
