"""Data larger than the memory that there is: stacked, checked, sent and served without being held whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from atoll import spooled
from atoll.arrays import BFLOAT16, tensor_of
from atoll.data import Rows, sample_indices
from atoll.errors import StorageError, UsageError
from atoll.spooled import Spool
from coordinator.client.prepare import _array_blob
from tests.parameters import sampled

LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from torch import nn
from atoll import Job, Optimizer, Rows, TrainingSpec
from coordinator.client.prepare import prepare
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.data_provider import DataProvider

kind, folder = sys.argv[1], Path(sys.argv[2])
N, WIDTH, MIB = 6144, 4096, 2**20  # 192 MiB of inputs in 64-bit numbers

class Numbers:
    def __len__(self):
        return N
    def __getitem__(self, at):
        x = np.arange(WIDTH) * at % 50
        x[:3] = at // 2500, at // 50 % 50, at % 50
        return x, at % 7

def rows():
    for at in range(N):
        x, label = Numbers()[at]
        yield {"ids": x, "label": label}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 7)
    def forward(self, ids, label):
        return nn.functional.cross_entropy(self.out(self.words(ids).mean(1)), label)

def used():
    line = [l for l in open("/proc/self/status") if l.startswith("VmData")][0]
    return int(line.split()[1]) * 1024

if kind == "datasets":
    import datasets

    number = datasets.Value("int64")
    features = datasets.Features({"ids": datasets.Sequence(number, WIDTH), "label": number})
    one = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(folder / "cache"))
else:
    one = Numbers()
examples = {"ids": torch.zeros(2, WIDTH, dtype=torch.long), "label": torch.zeros(2, dtype=torch.long)}
training = TrainingSpec(steps=4, n_micro=2, optimizer=Optimizer(lr=0.1))
small = Rows({"ids": np.zeros((4, WIDTH), np.int64), "label": np.zeros(4, np.int64)})
prepare(Job(Net(), examples, small, training))  # what is loaded and started once
resource.setrlimit(resource.RLIMIT_DATA, (used() + 100 * MIB,) * 2)
try:
    bytearray(110 * MIB)
    print("NO LIMIT")
except MemoryError:
    pass
if kind == "collated":  # as collators pad: to the longest of a call, which one sample in the middle is
    def collate(samples):
        longest = max(WIDTH if at == N // 2 else WIDTH - 1 for at, _ in samples)
        rows = [Numbers()[at] for at, _ in samples]
        labels = torch.tensor([label for _, label in rows])
        return {"ids": torch.from_numpy(np.stack([x[:longest] for x, _ in rows])), "label": labels}

    data = Rows.of([(at, "text") for at in range(N)], collate=collate, seed=3)
    assert data.arrays["ids"].shape == (N, WIDTH)
else:
    data = Rows.of(one, "ids", "label", seed=3)
made = prepare(Job(Net(), examples, data, training))
store, sent = BlobStore(folder / "store"), 0
for blob in made.blobs:
    offset = 0
    for piece in blob.read(0):
        store.write(blob.hash, blob.size, offset, piece)
        offset += len(piece)
    sent += offset
order = []
for batch in DataProvider(store).batches(made.spec, False, ["label", "ids"], 0, 4):
    order.append(batch.array)
    if batch.input == "ids":
        labels = order[-2]
        for row, label in zip(batch.array, labels):
            known, named = Numbers()[int(row[:3] @ (2500, 50, 1))]
            assert named == label and (known == row).all()
print("SENT", sent, "ORDER", [int(one) for array in order if array.ndim == 1 for one in array])
"""


@pytest.mark.parametrize("kind", sampled(1, ["torch", "collated", "datasets"]))
def test_data_beyond_the_memory_that_there_is_are_sent_and_served(tmp_path: Path, kind: str) -> None:
    """192 MiB with 100 MiB of memory, which the owner and the coordinator share here."""
    script = [sys.executable, "-c", LIMITED, kind, str(tmp_path)]
    found = subprocess.run(script, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "NO LIMIT" not in found.stdout
    sent, order = found.stdout.split("ORDER")
    assert int(sent.split("SENT")[1]) > 192 * 2**20
    spec = Rows({"label": np.arange(6144) % 7}, seed=3).materialise(2)[0].spec
    each = (sample_indices(spec, 2, step, micro) for step in range(4) for micro in range(2))
    expected = [int(at) % 7 for samples in each for at in samples]
    assert [int(one) for one in order.strip(" []\n").split(",")] == expected


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool", "float16"])
def test_an_array_is_the_blob_that_safetensors_would_write(dtype: str) -> None:
    for shape in ((5, 3), (7,), (2, 0), (3, 2, 2)):
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        blob = _array_blob(array)
        expected = safetensors.torch.save({"value": tensor_of(array)})
        assert b"".join(blob.read(0)) == expected
        assert b"".join(blob.read(70)) == expected[70:]
    bits = np.arange(6, dtype=np.uint16).view(BFLOAT16).reshape(2, 3)
    assert b"".join(_array_blob(bits).read(0)) == safetensors.torch.save({"value": tensor_of(bits)})


@pytest.mark.parametrize("in_memory", [1 << 20, 100, 0])
def test_rows_are_stacked_alike_in_memory_and_in_a_file(
    in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooled, "IN_MEMORY_BYTES", in_memory)
    kinds = ((1, "int64"), (4, "int64"), (2, "float32"), (5, "int32"))
    parts = [np.full((n, 3), n, kind) for n, kind in kinds]
    spool = Spool()
    assert [spool.add(part) for part in parts] == [None] * 4
    assert spool.add(np.zeros((1, 4))) == (3,)
    found, expected = spool.array(), np.concatenate(parts)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    assert isinstance(found, np.memmap) == (in_memory <= 100)


def test_a_full_disk_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr(spooled.tempfile, "TemporaryFile", _full)
    with pytest.raises(StorageError, match="set TMPDIR"):
        Spool().add(np.zeros((4, 8)))


def _full(**given: object) -> object:
    raise OSError(28, "No space left on device")


def test_rows_of_different_shapes_are_refused_when_they_come() -> None:
    samples = [(torch.zeros(3),), (torch.zeros(4),)]
    with pytest.raises(UsageError, match=r"different shapes, \(3,\) and \(4,\)"):
        Rows.of(samples, "x")
