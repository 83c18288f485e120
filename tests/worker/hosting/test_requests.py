"""What a compute process asks for is done in threads of its own, answered, bounded, and given up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import BadFrame, StorageError
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S
from tests.worker.hosting.scripted import Blobs, batches
from worker.cancel import Cancel
from worker.hosting import requests
from worker.hosting.contained.sandbox import View
from worker.hosting.requests import MAX_REQUESTS, Served
from worker.transport.contract import PeerLost

HASH = "a" * 64


class FakeChild:
    """What requests need of a compute process."""

    def __init__(self, folder: Path) -> None:
        self.scratch, self.own = folder / "scratch", folder / "job"
        self.view = View((folder / "data",), (self.own, self.scratch))
        self.sent: queue.SimpleQueue[pb.ToCompute] = queue.SimpleQueue()
        self.room = threading.Event()
        self.room.set()

    def send(self, message: pb.ToCompute) -> None:
        self.sent.put(message)

    def has_room(self, timeout_s: float) -> bool:
        return self.room.wait(0.01)

    def answer(self) -> pb.Answer:
        while (m := self.sent.get(timeout=HUNG_S)).WhichOneof("body") != "answer":
            pass
        return m.answer


@pytest.fixture
def fake(tmp_path: Path) -> FakeChild:
    for name in ("scratch", "job", "data", "scratch/deeper"):
        (tmp_path / name).mkdir()
    return FakeChild(tmp_path)


def serving(fake: FakeChild, **store: Callable[..., Any]) -> Served:
    """Requests over a blob store with some methods of its own."""
    blobs: Any = Blobs()
    for name, method in store.items():
        setattr(blobs, name, method)
    child: Any = fake
    return Served(child, blobs, batches)


def fetching(number: int) -> pb.FetchBlobs:
    return pb.FetchBlobs(request=number, blobs=[control.BlobRef(hash=HASH, size=9)])


def test_an_answer_names_the_peer_that_was_not_reached(fake: FakeChild) -> None:
    def connect(cancel: Cancel, report: Callable[[int], None]) -> int:
        raise PeerLost("w-n", "w-n did not connect within 30 s")

    serving(fake).start(4, connect)
    assert fake.answer() == pb.Answer(
        request=4, kind="ConnectionFailed", error="w-n did not connect within 30 s", peer="w-n"
    )


def test_what_comes_is_reported_and_counted(fake: FakeChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TUNED", replace(requests.TUNED, report_s=0.0))

    def fetch(wanted: object, cancel: Cancel, progress: Callable[[int], None]) -> None:
        assert wanted == {HASH: 9}
        for nbytes in (4, 5):
            progress(nbytes)

    serving(fake, fetch=fetch).fetch(fetching(3))
    said = [fake.sent.get(timeout=HUNG_S) for _ in range(3)]
    assert [m.transferred.bytes for m in said[:2]] == [4, 9]
    assert said[2].answer == pb.Answer(request=3, bytes=9)


def test_errors_are_answered_with_their_kind_and_faults_of_ours_without_their_words(fake: FakeChild) -> None:
    def full(*_: object) -> None:
        raise StorageError("disk is full")

    def broken(*_: object) -> None:
        raise KeyError("/etc/shadow")

    serving(fake, fetch=full).fetch(fetching(1))
    assert fake.answer() == pb.Answer(request=1, kind="StorageError", error="disk is full")
    serving(fake, fetch=broken).fetch(fetching(2))
    found = fake.answer()
    assert (found.kind, found.error) == ("StorageError", "KeyError in this worker")


def test_a_request_is_given_up_by_its_number_and_all_of_them_at_once(fake: FakeChild) -> None:
    def wait(wanted: object, cancel: Cancel, progress: object) -> None:
        cancel.wait(HUNG_S)

    served = serving(fake, fetch=wait)
    for number in (1, 2, 3):
        served.fetch(fetching(number))
    served.cancel(7)  # nobody has it
    served.cancel(2)
    assert fake.answer().request == 2
    served.cancel_all("leaving")
    assert {fake.answer().request, fake.answer().request} == {1, 3}
    served.fetch(fetching(2))  # a number is free again
    served.cancel(2)
    found = fake.answer()
    assert (found.request, found.kind, found.error) == (2, "ConnectionFailed", "cancelled")


def test_so_many_requests_are_under_way_and_none_twice(fake: FakeChild) -> None:
    served = serving(fake, fetch=lambda wanted, cancel, progress: cancel.wait(HUNG_S))
    served.fetch(fetching(0))
    with pytest.raises(BadFrame, match="request 0 beside 1"):
        served.fetch(fetching(0))
    for number in range(1, MAX_REQUESTS):
        served.fetch(fetching(number))
    with pytest.raises(BadFrame, match=f"beside {MAX_REQUESTS} others"):
        served.fetch(fetching(MAX_REQUESTS))
    served.cancel_all("the test is over")
    for _ in range(MAX_REQUESTS):
        fake.answer()


def test_micro_batches_wait_until_what_was_sent_is_read(fake: FakeChild) -> None:
    served = serving(fake)
    fake.room.clear()
    asked = control.BatchRequest(job="j", inputs=["x"], first_step=4, count=2)
    served.batches(pb.FetchBatches(request=1, batches=asked), "j")
    with pytest.raises(queue.Empty):
        fake.sent.get(timeout=0.05)
    fake.room.set()
    said = [fake.sent.get(timeout=HUNG_S) for _ in range(3)]
    assert [m.batch.batch.step for m in said[:2]] == [4, 5]
    assert said[2].answer.request == 1


def test_micro_batches_that_nobody_reads_are_given_up(fake: FakeChild) -> None:
    served = serving(fake)
    fake.room.clear()
    asked = control.BatchRequest(job="j", inputs=["x"], count=2)
    served.batches(pb.FetchBatches(request=1, batches=asked), "j")
    served.cancel(1)
    assert fake.answer().error == "cancelled"


@pytest.mark.parametrize("place", ["scratch", "job"])
def test_files_directly_in_its_own_folders_are_stored(fake: FakeChild, tmp_path: Path, place: str) -> None:
    (tmp_path / place / "update").write_bytes(b"hello")
    stored: list[Any] = []

    def store(files: list[Any], cancel: Cancel, progress: Callable[[], None], new: bool) -> int:
        stored.extend((file.path, file.hash, file.size, new) for file in files)
        return 5

    path = tmp_path / place / "update"
    file = pb.StoreFile(hash=HASH, size=5, path=str(path))
    serving(fake, store=store).store(pb.StoreFiles(request=1, files=[file], new=True))
    assert fake.answer().bytes == 5
    assert stored == [(path, HASH, 5, True)]


@pytest.mark.parametrize(
    "path", ["data/x", "x", "scratch/deeper/x", "scratch/../x", "scratch", "scratch/..", "job/../data/x", ""]
)
def test_no_other_file_is(fake: FakeChild, tmp_path: Path, path: str) -> None:
    text = f"{tmp_path}/{path}" if path else ""
    file = pb.StoreFile(hash=HASH, size=5, path=text)
    with pytest.raises(BadFrame, match="not the compute process's own"):
        serving(fake).store(pb.StoreFiles(request=1, files=[file]))
    assert fake.sent.empty()


def test_a_name_that_is_no_hash_is_refused(fake: FakeChild) -> None:
    served = serving(fake)
    with pytest.raises(BadFrame):
        served.fetch(pb.FetchBlobs(request=1, blobs=[control.BlobRef(hash="../../key", size=9)]))
    file = pb.StoreFile(hash="", size=5, path=str(fake.scratch / "x"))
    with pytest.raises(BadFrame):
        served.store(pb.StoreFiles(request=1, files=[file]))


def test_an_update_is_lent_to_its_gateway_alone_and_only_from_folders_of_its_own(fake: FakeChild) -> None:
    lent: list[tuple[Any, ...]] = []
    served = serving(
        fake, lend=lambda blob, cancel, file=None, borrower="": lent.append((blob, file, borrower))
    )
    file = pb.StoreFile(hash=HASH, size=7, path=str(fake.own / "update"))
    for borrower, gateway in (("w-2", ""), ("", ""), ("w-2", "w-1"), ("", "w-1")):
        with pytest.raises(BadFrame, match="its gateway is"):
            served.lend(pb.LendBlob(request=1, file=file, borrower=borrower), gateway)
    stolen = pb.StoreFile(hash=HASH, size=7, path="/etc/passwd")
    with pytest.raises(BadFrame, match="not the compute process's own"):
        served.lend(pb.LendBlob(request=1, file=stolen, borrower="w-1"), "w-1")
    served.lend(pb.LendBlob(request=1, file=file, borrower="w-1"), "w-1")
    assert not fake.answer().kind
    served.lend(pb.LendBlob(request=2, file=pb.StoreFile(hash=HASH)), "")
    assert not fake.answer().kind
    (_, held, borrower), model = lent
    assert (held.path, held.size, borrower) == (fake.own / "update", 7, "w-1")
    assert model == (HASH, None, "")
