"""Blobs made of deltas: whole and verified, or not there, whatever was sent and whenever it ends."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from atoll.errors import UsageError
from compressors.deltas import encode
from coordinator.storage.blob_store import BlobStore, Gone


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def state(step: int) -> bytes:
    """A tensor's blob after a step, three pieces large."""
    draw = torch.Generator().manual_seed(1)
    value = torch.randn(600_000, generator=draw) * 0.02
    for _ in range(step):
        value = value + torch.randn(600_000, generator=draw) * 1e-5
    return save({"value": value})


def delta(base: bytes, new: bytes) -> bytes:
    files = (np.frombuffer(data, np.uint8) for data in (base, new))
    return b"".join(encode(*files, (name_of(base), name_of(new))))


STATES = [state(step) for step in range(3)]
DELTAS = [delta(before, after) for before, after in pairwise(STATES)]


def patched(store: BlobStore, step: int, by: str = "w") -> bool:
    base, new = STATES[step - 1], STATES[step]
    coded = store.put(DELTAS[step - 1])
    return store.patch(name_of(new), len(new), name_of(base), coded, by)


def test_a_blob_of_a_delta_is_the_blob_itself_and_rests_on_no_other(tmp_path: Path) -> None:
    """So a chain of checkpoints restores from any of them: none lies on the disk as a delta."""
    store = BlobStore(tmp_path)
    store.put(STATES[0])
    assert patched(store, 1)
    assert patched(store, 2)
    store.discard([name_of(STATES[0]), name_of(STATES[1]), *map(name_of, DELTAS)])
    assert BlobStore(tmp_path).read(name_of(STATES[2])) == STATES[2]
    assert all(len(coded) < 0.85 * len(STATES[1]) for coded in DELTAS)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", range(8))
def test_killed_at_any_point_the_blob_is_whole_or_the_one_before_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    store = BlobStore(tmp_path)
    store.put(STATES[0])
    coded = store.put(DELTAS[0])
    calls = 0

    def dying(original: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:
                raise Killed
            return original(*args, **more)

        return call

    for name in ("_append", "_synced", "_name"):
        monkeypatch.setattr(store, name, dying(getattr(store, name)))
    new = STATES[1]
    try:
        store.patch(name_of(new), len(new), name_of(STATES[0]), coded, "w")
        assert calls <= point
    except Killed:
        pass
    again = BlobStore(tmp_path)
    assert again.read(name_of(STATES[0])) == STATES[0]
    if again.has(name_of(new)):
        assert again.read(name_of(new)) == new
    assert again.patch(name_of(new), len(new), name_of(STATES[0]), coded, "w")
    assert again.read(name_of(new)) == new


def test_a_delta_that_is_none_leaves_nothing_and_the_whole_blob_is_taken(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    base, other, new = store.put(STATES[0]), store.put(STATES[2]), STATES[1]
    cut = store.put(DELTAS[0][: len(DELTAS[0]) // 2])
    wrong = store.put(DELTAS[0][:-1] + bytes([DELTAS[0][-1] ^ 1]))
    good = store.put(DELTAS[0])
    for before, coded, words in (
        (base, cut, "delta|piece"),
        (base, wrong, "hash|frame|delta"),
        (other, good, "of other blobs"),
        (base, store.put(b"x"), "not a delta"),
    ):
        with pytest.raises(UsageError, match=words):
            store.patch(name_of(new), len(new), before, coded, "w")
        assert not store.has(name_of(new))
        assert store.arrived(name_of(new), "w") == 0
    with pytest.raises(UsageError, match="other blobs"):
        store.patch(name_of(new), len(new) - 1, base, good, "w")
    with pytest.raises(Gone):
        store.patch(name_of(new), len(new), base, "ab" * 32, "w")
    assert store.write(name_of(new), len(new), 0, new, "w")
