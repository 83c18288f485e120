"""Copies on this machine's disk: bounded by what its owner lends, fetched while it idles, verified on use."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from atoll.messages.from_worker import CopyHeld
from atoll.messages.to_worker import StageCopy
from tests.patience import HUNG_S
from tests.worker.test_blobs import Store
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel
from worker.hosting.neighbours.copies import Copies

SIZE = 1000


def blob(seed: str) -> tuple[str, bytes]:
    data = seed.encode() * SIZE
    return hashlib.sha256(data).hexdigest(), data


class Kept:
    """What one machine keeps of a store's blobs."""

    def __init__(self, folder: Path, lent_bytes: int = 100 * SIZE, cache_bytes: int = 1 << 20) -> None:
        self.store = Store(chunk_bytes=SIZE)
        self.cache = BlobCache(folder, cache_bytes)
        self.said: queue.SimpleQueue[CopyHeld] = queue.SimpleQueue()
        self.files = BlobFiles(self.store, self.cache)
        self.copies = Copies(
            self.files,
            self.cache,
            folder,
            lent_bytes,
            self.said.put,  # type: ignore[arg-type]
            lambda holder: self.store,
        )

    def asked(self, name: str, *seeds: str) -> StageCopy:
        found = dict(map(blob, seeds))
        self.store.blobs |= found
        return StageCopy("job", name, dict.fromkeys(found, 10 * SIZE))

    def heard(self) -> CopyHeld:
        return self.said.get(timeout=HUNG_S)

    def here(self, *seeds: str) -> list[bool]:
        return [self.cache.path(blob(seed)[0]).exists() for seed in seeds]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path / "blobs")
    made.copies.may_work(True)
    yield made
    made.copies.close()


def test_a_copy_is_fetched_once_and_said_with_what_it_took(kept: Kept) -> None:
    copy = kept.asked("one", "a", "b")
    kept.copies.keep([copy])
    first = kept.heard()
    assert (first.job, first.name, first.n_bytes, first.fetched_bytes) == ("job", "one", 2 * SIZE, 2 * SIZE)
    assert kept.copies.held == [first]
    assert kept.copies.offered == set(copy.blobs)
    kept.copies.keep([copy])
    again = kept.heard()
    assert (again.n_bytes, again.fetched_bytes) == (2 * SIZE, 0)


def test_nothing_is_fetched_while_there_is_work(kept: Kept) -> None:
    kept.copies.may_work(False)
    kept.copies.keep([kept.asked("one", "a")])
    assert kept.copies.held == []
    assert kept.store.asked == []
    kept.copies.may_work(True)
    assert kept.heard().name == "one"


def test_work_ends_a_fetch_that_goes_on_where_it_was(kept: Kept) -> None:
    began, stopped, honest = threading.Event(), threading.Event(), kept.files.fetch

    def fetch(
        wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None], near: object
    ) -> None:
        def held(nbytes: int) -> None:
            began.set()
            assert stopped.wait(HUNG_S)
            progress(nbytes)

        honest(wanted, cancel, held)

    kept.files.fetch = fetch  # type: ignore[assignment,method-assign]
    kept.copies.keep([kept.asked("one", "abc")])
    assert began.wait(HUNG_S)
    kept.copies.may_work(False)
    kept.files.fetch = honest  # type: ignore[method-assign]
    stopped.set()
    kept.copies.may_work(True)
    assert kept.heard().n_bytes == 3 * SIZE
    assert kept.store.asked[-1][0][1] == SIZE, "the first piece had come"


def test_never_more_than_the_owner_lends(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "blobs", lent_bytes=5 * SIZE)
    kept.copies.may_work(True)
    kept.copies.keep([kept.asked("one", "a", "b", "c"), kept.asked("two", "d", "e", "f")])
    assert [kept.heard().error[:6] for _ in range(2)] == ["", "copies"]
    assert kept.here("a", "b", "c") == [True] * 3
    assert not any(kept.here("d", "e", "f")), "the beginning of what did not fit is gone"
    assert [held.name for held in kept.copies.held] == ["one"]
    kept.copies.close()
    nothing = Kept(tmp_path / "none", lent_bytes=0)
    nothing.copies.may_work(True)
    nothing.copies.keep([nothing.asked("one", "a")])
    assert nothing.heard().error
    nothing.copies.close()


def test_what_is_kept_is_not_deleted_to_make_room_and_what_was_kept_goes_later(tmp_path: Path) -> None:
    """Not at once: a stage that is assigned now may be about to load it."""
    kept = Kept(tmp_path / "blobs", cache_bytes=2 * SIZE)
    kept.copies.may_work(True)
    for name, seeds in (("one", "ab"), ("two", "cd"), ("three", "de")):
        kept.copies.keep([kept.asked(name, *seeds)])
        assert kept.heard().name == name
    assert kept.here("a", "b") == [False, False]
    assert kept.here("d", "e") == [True, True]
    kept.copies.close()


def test_the_first_error_of_a_copy_does_not_end_the_others(kept: Kept) -> None:
    lost = kept.asked("lost", "a")
    kept.store.blobs[blob("a")[0]] = b"x" * SIZE
    kept.copies.keep([lost, kept.asked("next", "b")])
    assert "sha256 differs" in kept.heard().error
    assert kept.heard().name == "next"


def test_an_error_that_nobody_thought_of_does_not_end_the_thread(kept: Kept) -> None:
    honest = kept.files.fetch

    def fetch(
        wanted: Mapping[str, int], cancel: Cancel, progress: Callable[[int], None], near: object
    ) -> None:
        kept.files.fetch = honest  # type: ignore[method-assign]
        raise FileNotFoundError(2, "a secret path")

    kept.files.fetch = fetch  # type: ignore[assignment,method-assign]
    kept.copies.keep([kept.asked("lost", "a"), kept.asked("next", "b")])
    assert kept.heard().error == "FileNotFoundError in this worker"
    assert kept.heard().name == "next"
    assert [held.name for held in kept.copies.held] == ["next"]
