"""Blobs made of older ones that are here and of the deltas since: the same bytes, or all are fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from atoll.errors import ConnectionFailed
from compressors.deltas import encode
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.delta_chains import LONGEST, DeltaChains
from hostos import retries
from protos.blob_transfer import Change, Chunk, Patch
from worker.blobs import MOST_CHANGES, BlobCache, BlobFiles
from worker.cancel import Cancel, Cancelled

GO = Cancel()
WORDS = 40_000


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def states(count: int, changed: int) -> list[bytes]:
    """A tensor's blobs after so many steps, of which each changes ``changed`` words."""
    draw = torch.Generator().manual_seed(5)
    value, found = torch.randn(WORDS, generator=draw), []
    for _ in range(count):
        found.append(save({"value": value}))
        value = value.clone()
        value[torch.randperm(WORDS, generator=draw)[:changed]] += 1.0
    return found


class Port:
    """``BlobPort`` of a store in this process that keeps deltas; pieces of 1,000 bytes."""

    def __init__(self, folder: Path) -> None:
        self.store, self.chains = BlobStore(folder), DeltaChains()
        self.came = 0
        self.asked: list[str] = []
        self.break_after = 10**9  # bytes

    def stored(self, files: Iterable[bytes]) -> None:
        """Have each of these, and the delta from each to the next."""
        for data in files:
            self.store.put(data)
        for before, after in pairwise(files):
            names = name_of(before), name_of(after)
            old, new = (np.frombuffer(data, np.uint8) for data in (before, after))
            delta = b"".join(encode(old, new, names))
            change = Change(names[1], names[0], self.store.put(delta), len(delta))
            self.store.discard(self.chains.add(change, len(after)))

    def get(self, wanted: list[tuple[str, int]]) -> Iterator[Chunk]:
        for name, offset in wanted:
            self.asked.append(name)
            data = self.store.read(name)
            for at in range(offset, len(data), 1000):
                if self.came >= self.break_after:
                    self.break_after = 10**9
                    raise ConnectionFailed("reset")
                self.came += len(data[at : at + 1000])
                yield Chunk(name, len(data), at, data[at : at + 1000])

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {name: 0 for name in hashes if not self.store.has(name)}

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        return ()

    def patch(self, patches: list[Patch]) -> Collection[str]:
        return ()

    def changes(self, hashes: list[str]) -> list[Change]:
        return [change for name in hashes for change in self.chains.to(name)]


class Receiver:
    """A worker's blobs, with one state already here."""

    def __init__(self, folder: Path, port: Port, base: bytes | None = None) -> None:
        self.folder = folder / "cache"
        self.cache = BlobCache(self.folder, 1 << 30)
        self.files = BlobFiles(port, self.cache)
        if base is not None:
            self.cache.write(Chunk(name_of(base), len(base), 0, base))

    def fetch(self, data: bytes, cancel: Cancel = GO) -> None:
        self.files.fetch({name_of(data): len(data)}, cancel)

    def here(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSE_FIRST_S", 1e-4)


@pytest.mark.parametrize("behind", [1, 2, 5, LONGEST])
def test_who_has_an_older_blob_fetches_the_deltas_since_and_no_more(tmp_path: Path, behind: int) -> None:
    port, files = Port(tmp_path / "store"), states(LONGEST + 3, 300)
    port.stored(files)
    base, newest = files[-1 - behind], files[-1]
    receiver = Receiver(tmp_path, port, base)
    receiver.fetch(newest)
    assert receiver.here() == {name_of(base): base, name_of(newest): newest}
    sizes = [change.size for change in port.chains.to(name_of(newest))[:behind]]
    assert len(sizes) == behind
    assert port.came == sum(sizes) < 0.02 * behind * len(newest)


def test_a_chain_has_at_most_eight_deltas_and_is_shorter_than_what_it_leads_to(tmp_path: Path) -> None:
    port, files = Port(tmp_path / "store"), states(LONGEST + 3, 300)
    assert LONGEST == MOST_CHANGES
    port.stored(files)
    held = [path for path in (tmp_path / "store").glob("??/*") if path.is_file()]
    assert len(held) == len(files) + LONGEST
    receiver = Receiver(tmp_path, port, files[0])
    receiver.fetch(files[-1])
    assert port.came == len(files[-1])
    port, files = Port(tmp_path / "long"), states(6, WORDS // 4)  # each a good quarter of the blob
    port.stored(files)
    chain = port.chains.to(name_of(files[-1]))
    assert [change.hash for change in chain] == [name_of(files[at]) for at in (5, 4, 3)]
    assert port.chains.deltas([name_of(files[1])]) == frozenset(), "nobody gains by it any more"


def test_a_store_that_forgot_its_chains_costs_only_who_was_behind_one_whole_blob(tmp_path: Path) -> None:
    port, files = Port(tmp_path / "store"), states(4, 300)
    port.stored(files[:3])
    port.chains = DeltaChains()  # the coordinator was restarted
    port.stored(files[2:])
    for base, whole in ((files[2], False), (files[1], True)):
        port.came = 0
        receiver = Receiver(tmp_path / str(whole), port, base)
        receiver.fetch(files[3])
        assert receiver.here()[name_of(files[3])] == files[3]
        assert port.came == len(files[3]) if whole else port.came < 0.02 * len(files[3])


def test_who_has_no_base_or_a_rotten_one_gets_all_bytes(tmp_path: Path) -> None:
    port, files = Port(tmp_path / "store"), states(2, 300)
    port.stored(files)
    without = Receiver(tmp_path / "without", port)
    without.fetch(files[1])
    assert port.came == len(files[1])
    rotten = Receiver(tmp_path / "rotten", port, files[0])
    path = rotten.cache.path(name_of(files[0]))
    path.write_bytes(files[0][:-1] + b"\0")
    BlobFiles(port, again := BlobCache(rotten.folder, 1 << 30)).fetch({name_of(files[1]): len(files[1])}, GO)
    assert port.came == 2 * len(files[1])
    assert again.held(name_of(files[1])) is None
    assert rotten.here() == {name_of(files[1]): files[1]}


def test_a_delta_that_is_gone_or_wrong_costs_all_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    for number, spoil in enumerate(("gone", "other", "noise")):
        port, files = Port(tmp_path / f"store{number}"), states(3, 300)
        port.stored(files)
        (last,) = port.chains.to(name_of(files[2]))[:1]
        if spoil == "gone":
            port.store.discard([last.delta])
        else:
            wrong = port.store.read(last.delta) if spoil == "other" else b"x" * 500
            change = Change(name_of(files[2]), name_of(files[0]), port.store.put(wrong), len(wrong))
            port.changes = lambda hashes, change=change: [change]  # type: ignore[method-assign,misc]
        receiver = Receiver(tmp_path / spoil, port, files[0 if spoil != "gone" else 1])
        receiver.fetch(files[2])
        assert sorted(receiver.here().values()) == sorted([files[0 if spoil != "gone" else 1], files[2]])


@pytest.mark.parametrize("at", [0, 1000, 2000, 4000, 7000])
def test_a_line_that_breaks_off_costs_no_byte_twice(tmp_path: Path, at: int) -> None:
    port, files = Port(tmp_path / "store"), states(4, 300)
    port.stored(files)
    port.break_after = at
    receiver = Receiver(tmp_path, port, files[0])
    receiver.fetch(files[3])
    assert receiver.here()[name_of(files[3])] == files[3]
    assert port.came == sum(change.size for change in port.chains.to(name_of(files[3])))


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", range(14))
def test_killed_at_any_point_the_next_life_has_the_blob_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    port, files = Port(tmp_path / "store"), states(3, 300)
    port.stored(files)
    receiver, writes = Receiver(tmp_path, port, files[0]), 0
    write = receiver.cache.write

    def dying(chunk: Chunk) -> None:
        nonlocal writes
        writes += 1
        if writes > point:
            raise Killed
        write(chunk)

    monkeypatch.setattr(receiver.cache, "write", dying)
    monkeypatch.setattr(receiver.cache, "discard", lambda names: None)  # nothing is tidied any more
    try:
        receiver.fetch(files[2])
        assert writes <= point
    except Killed:
        pass
    again = Receiver(tmp_path, port)
    again.fetch(files[2])
    assert again.here()[name_of(files[2])] == files[2]
    assert again.here()[name_of(files[0])] == files[0]


def test_a_fetch_that_is_cancelled_goes_on_with_what_has_come_of_a_delta(tmp_path: Path) -> None:
    port, files = Port(tmp_path / "store"), states(2, 600)
    port.stored(files)
    receiver, cancel = Receiver(tmp_path, port, files[0]), Cancel()
    wanted = {name_of(files[1]): len(files[1])}
    with pytest.raises(Cancelled):
        receiver.files.fetch(wanted, cancel, lambda nbytes: cancel.set("work"))
    receiver.fetch(files[1])
    assert receiver.here() == {name_of(data): data for data in files}
    (change,) = port.chains.to(name_of(files[1]))
    assert change.size <= port.came <= change.size + 1000


def test_deltas_to_what_nobody_needs_go(tmp_path: Path) -> None:
    port = Port(tmp_path / "store")
    one, other = states(3, 300), states(3, 200)
    port.stored(one)
    port.stored(other)
    needed = name_of(one[2])
    gone = port.chains.prune([needed])
    assert len(gone) == 2
    assert port.chains.to(name_of(other[2])) == []
    assert port.chains.deltas([needed]) == {change.delta for change in port.chains.to(needed)}
    assert len(port.chains.to(needed)) == 2


def test_states_that_come_back_to_where_they_were_make_no_endless_chain(tmp_path: Path) -> None:
    port, (one, other) = Port(tmp_path / "store"), states(2, 300)
    port.stored([one, other, one, other])
    assert len(port.chains.to(name_of(other))) <= LONGEST
    receiver = Receiver(tmp_path, port, one)
    receiver.fetch(other)
    assert receiver.here()[name_of(other)] == other


def test_nothing_is_kept_in_a_store_that_is_half_full(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, quota_bytes=1000)
    store.put(b"a" * 400)
    assert store.roomy
    store.put(b"b" * 200)
    assert not store.roomy
