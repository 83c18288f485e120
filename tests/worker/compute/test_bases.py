"""States that are sent as what changed: which files get a delta, and how they come to the store."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.errors import ConnectionFailed, UsageError
from coordinator.storage.blob_store import BlobStore as Store
from protos.blob_transfer import Change, Chunk, Patch
from worker.blobs import BlobCache, BlobFile, BlobFiles
from worker.cancel import Cancel, Cancelled
from worker.compute.bases import Bases, DeltaRule
from worker.stage.tensor_blobs import store_files, write_tensors

GO = Cancel()
ALWAYS = DeltaRule()


class Port:
    """``BlobPort`` of a store in this process, which may take no deltas."""

    def __init__(self, store: Store, refuse: Exception | None = None) -> None:
        self.store, self.refuse = store, refuse
        self.patches: list[Patch] = []
        self.came = 0

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        raise NotImplementedError

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {name: 0 for name in hashes if not self.store.has(name)}

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        whole = set()
        for c in chunks:
            self.came += len(c.data)
            if self.store.write(c.hash, c.size, c.offset, c.data):
                whole.add(c.hash)
        return whole

    def changes(self, hashes: list[str]) -> list[Change]:
        return []

    def patch(self, patches: list[Patch]) -> Collection[str]:
        if self.refuse is not None:
            raise self.refuse
        self.patches += patches
        return {p.hash for p in patches if self.store.patch(p.hash, p.size, p.base, p.delta)}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0  # a second between any two looks
        return self.now_s


class Storing:
    """A stage's way to the store, as ``Snapshots`` goes it."""

    def __init__(self, folder: Path, port: Port, rule: DeltaRule = ALWAYS) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.bases = Bases(self.scratch, Clock(), rule)
        self.blobs = BlobFiles(port, BlobCache(folder / "cache", 1 << 30))

    def store(self, job: str, tensors: dict[str, dict[str, Tensor]]) -> dict[str, str]:
        files = write_tensors(tensors, self.scratch, GO)
        coded = self.bases.coded(job, files, GO)
        return store_files(self.blobs, coded, GO, self.bases.taker(job))


def state(step: int) -> dict[str, dict[str, Tensor]]:
    """A layer that is trained a little, with a moment, one that is not, and one that is drawn anew."""
    draw = torch.Generator().manual_seed(3)
    weight, moment = torch.randn(40_000, generator=draw), torch.randn(40_000, generator=draw)
    frozen = torch.randn(40_000, generator=draw)
    for _ in range(step):
        weight = weight + torch.randn(40_000, generator=draw) * 1e-5
    seed = torch.Generator().manual_seed(step)
    anew = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=seed, dtype=torch.int32)
    return {
        "layer": {"value": weight.bfloat16(), "exp_avg": moment},
        "frozen": {"value": frozen},
        "anew": {"value": anew},
    }


def sums(names: dict[str, str], store: Store) -> bool:
    return all(hashlib.sha256(store.read(name)).hexdigest() == name for name in names.values())


def test_a_second_state_sends_what_changed_and_nothing_of_what_did_not(tmp_path: Path) -> None:
    port = Port(Store(tmp_path / "store"))
    storing = Storing(tmp_path, port)
    first = storing.store("j", state(0))
    whole, port.came = port.came, 0
    second = storing.store("j", state(1))
    assert first["frozen"] == second["frozen"]
    assert [p.base for p in port.patches] == [first["layer"]]
    assert sums(second, port.store)
    anew = port.store.size(second["anew"])
    layer = port.store.size(second["layer"])
    assert whole > port.came
    assert anew < port.came < anew + layer / 4  # the moment is as it was
    kept = sorted(path.name for path in storing.scratch.iterdir())
    assert len(kept) == 3
    assert not any(name.endswith(".delta") for name in kept)
    third = storing.store("j", state(2))
    assert [p.base for p in port.patches] == [first["layer"], second["layer"]]
    assert sums(third, port.store)
    storing.bases.forget()
    assert list(storing.scratch.iterdir()) == []


@pytest.mark.parametrize("refuse", [UsageError("older"), ConnectionFailed("no such call")])
def test_a_store_that_takes_no_deltas_gets_all_bytes(tmp_path: Path, refuse: Exception) -> None:
    port = Port(Store(tmp_path / "store"), refuse)
    storing = Storing(tmp_path, port)
    storing.store("j", state(0))
    found = storing.store("j", state(1))
    assert sums(found, port.store)
    assert not port.patches


def test_a_base_that_the_store_has_lost_costs_a_whole_file(tmp_path: Path) -> None:
    class Losing(Port):
        def patch(self, patches: list[Patch]) -> Collection[str]:
            self.store.discard([p.base for p in patches])
            self.patches += patches
            return ()

    port = Losing(Store(tmp_path / "store"))
    storing = Storing(tmp_path, port)
    storing.store("j", state(0))
    assert sums(storing.store("j", state(1)), port.store)
    assert len(port.patches) == 1


def test_another_job_and_a_fast_line_get_whole_files(tmp_path: Path) -> None:
    port = Port(Store(tmp_path / "store"))
    storing = Storing(tmp_path, port)
    storing.store("j", state(0))
    storing.store("k", state(1))
    assert not port.patches
    (tmp_path / "fast").mkdir()
    fast = Storing(tmp_path / "fast", port, DeltaRule(most_bytes_per_s=100.0))
    fast.store("l", state(3))
    fast.store("l", state(4))
    assert not port.patches


def test_a_delta_that_saves_little_is_not_made(tmp_path: Path) -> None:
    storing = Storing(tmp_path, Port(Store(tmp_path / "store")))
    storing.store("j", state(0))
    files = write_tensors(state(1), storing.scratch, GO)
    coded = storing.bases.coded("j", files, GO)
    assert {name for name, file in coded.items() if file.delta is not None} == {"layer"}
    assert {name: replace(file, delta=None) for name, file in coded.items()} == files


def test_what_is_cancelled_leaves_no_delta_behind(tmp_path: Path) -> None:
    storing = Storing(tmp_path, Port(Store(tmp_path / "store")))
    storing.store("j", state(0))
    files: dict[str, BlobFile] = write_tensors(state(1), storing.scratch, GO)
    cancel = Cancel()
    cancel.set("released")
    with pytest.raises(Cancelled):
        storing.bases.coded("j", files, cancel)
    assert not list(storing.scratch.glob("*.delta"))
