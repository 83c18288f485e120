"""Workers put what they claim to hold and an owner's job needs, and nothing else follows from a claim."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.errors import AccessDenied, ConnectionFailed
from benchmarks.fake_worker import FakeWorker
from coordinator.membership.member import Phase
from coordinator.server import Running, Server
from coordinator.services.blobs import gathering
from protos import atoll_control_pb2 as pb
from tests.coordinator.serving import Owner, fleet, has_joined, refused, start
from tests.patience import HUNG_S, eventually


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


WEIGHTS = {name_of(data): data for data in (os.urandom(1000 + n) for n in range(6))}
SIZES = {name: len(data) for name, data in WEIGHTS.items()}


@dataclass
class Holder(FakeWorker):
    """Holds ``weights`` as it says, and puts what ``sent`` makes of each; None: nothing, without a word."""

    weights: Mapping[str, bytes] = field(default_factory=lambda: WEIGHTS)
    sent: Callable[[bytes], bytes | None] = lambda data: data
    asked: list[str] = field(default_factory=list)

    def claim(self) -> None:
        hashes = b"".join(sorted(map(bytes.fromhex, self.weights)))
        self.say(held_weights=pb.HeldWeights(hashes=hashes))

    def answer(self, message: pb.ToWorker) -> None:
        super().answer(message)
        if message.WhichOneof("body") == "store_copy":
            self._put(message.store_copy)

    def _put(self, wanted: pb.StoreCopy) -> None:
        error = ""
        for name in wanted.blobs:
            self.asked.append(name)
            data = self.sent(self.weights[name])
            if data is None:
                return
            chunk = pb.BlobChunk(hash=name, size=len(data), data=data)
            try:
                self.blobs().Put(iter([chunk]), metadata=self.metadata, timeout=HUNG_S)
            except grpc.RpcError as failed:
                error = str(failed)
        self.say(copy_stored=pb.CopyStored(job=wanted.job, name=wanted.name, error=error))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        yield start(stack, tmp_path)


def holders(running: Running, stack: ExitStack, *each: Mapping[str, Any]) -> list[Holder]:
    """Workers that have joined, and whose claims were heard."""
    found = []
    for number, options in enumerate(each):
        started = running.started
        worker = Holder(f"127.0.0.1:{started.entry_port}", started.join_token, name=f"h{number}", **options)
        stack.callback(worker.stop)
        worker.start()
        eventually(lambda: has_joined(running, worker))  # noqa: B023
        worker.claim()
        eventually(lambda: worker.worker in claims(running))  # noqa: B023
        found.append(worker)
    return found


def claims(running: Running) -> dict[str, bytes]:
    return running.call(lambda server: server.shell.scheduler.roster.weights.claims())


def logged(running: Running) -> str:
    _, lines = running.call(lambda server: server.shell.logs.after(0, ""))
    return "\n".join(line.fields_json for line in lines)


def gathered(owner: Owner, sizes: Mapping[str, int] = SIZES) -> list[pb.Gathered]:
    refs = [pb.BlobRef(hash=name, size=size) for name, size in sizes.items()]
    return list(owner.blobs.Gather(pb.BlobList(blobs=refs), metadata=owner.metadata, timeout=HUNG_S))


def missing(owner: Owner) -> set[str]:
    refs = [pb.BlobRef(hash=name) for name in SIZES]
    reply = owner.blobs.Missing(pb.BlobList(blobs=refs), metadata=owner.metadata, timeout=HUNG_S)
    return {blob.hash for blob in reply.blobs}


def test_what_workers_hold_comes_from_them_and_what_nobody_does_is_the_owners(running: Running) -> None:
    names = list(WEIGHTS)
    first, second = ({n: WEIGHTS[n] for n in part} for part in (names[:3], names[2:5]))
    owner = Owner(running)
    with ExitStack() as stack:
        workers = holders(running, stack, {"weights": first}, {"weights": second})
        last = gathered(owner)[-1]
        total = sum(SIZES[n] for n in names[:5])
        assert (last.done_bytes, last.total_bytes, last.workers) == (total, total, 0)
        assert missing(owner) == {names[5]}
        asked = [name for worker in workers for name in worker.asked]
        assert sorted(asked) == sorted(names[:5]), "each was asked of one"
        before = len(asked)
        gathered(owner)
        assert sum(len(worker.asked) for worker in workers) == before, "what is here is asked of nobody"
    eventually(lambda: not claims(running))


def test_who_has_a_job_is_asked_only_for_what_no_idle_worker_holds(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "WINDOW_BLOBS", 1)  # others are left while the idle one sends
    alone, *others = WEIGHTS
    with ExitStack() as stack:
        busy, idle = holders(running, stack, {}, {"weights": {name: WEIGHTS[name] for name in others}})

        def lend(server: Server) -> None:
            known = server.shell.scheduler.roster.workers[busy.worker]
            known.member = replace(known.member, phase=Phase.ASSIGNED, job="app")

        running.call(lend)
        gathered(Owner(running))
        assert busy.asked == [alone]
        assert sorted(idle.asked) == sorted(others)
    assert not missing(Owner(running))


def test_who_sends_other_bytes_is_asked_no_more_and_another_sends_them(running: Running) -> None:
    owner = Owner(running)
    with ExitStack() as stack:
        liar, honest = holders(running, stack, {"sent": lambda data: bytes(len(data))}, {})
        gathered(owner)
        assert missing(owner) == set()
        assert liar.asked
        assert set(claims(running)) == {honest.worker}
        liar.claim()
        eventually(lambda: "it has sent other bytes than it claimed" in logged(running))
        assert set(claims(running)) == {honest.worker}
    with ExitStack() as stack:
        (again,) = holders(running, stack, {"sent": lambda data: data + b"more"})
        other = {name_of(b"other"): 5}
        again.weights = {name_of(b"other"): b"other"}
        again.claim()
        eventually(lambda: len(claims(running).get(again.worker, b"")) == 32)
        gathered(owner, other)
        assert again.asked == list(other), "more bytes than the owner said are not taken"
        assert again.worker in claims(running), "nor looked at"
        assert not running.call(lambda server: server.blobs.has(name_of(b"other")))


def test_who_sends_nothing_is_left_out_and_the_call_ends(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "STALLED_S", 0.3)
    owner = Owner(running)
    with ExitStack() as stack:
        (silent,) = holders(running, stack, {"sent": lambda data: None})
        last = gathered(owner)[-1]
        assert (last.done_bytes, last.total_bytes) == (0, sum(SIZES.values()))
        assert missing(owner) == set(SIZES)
        assert silent.worker in claims(running), "it may be slow, and no liar"


def test_a_worker_that_goes_away_is_waited_for_no_longer(running: Running) -> None:
    with ExitStack() as stack:
        (leaving,) = holders(running, stack, {})
        leaving.sent = lambda data: leaving.vanish()
        gathered(Owner(running))
    assert missing(Owner(running)) == set(SIZES)


def test_nobody_puts_what_was_not_asked_for_nor_asks_who_is_no_owner(running: Running) -> None:
    with ExitStack() as stack:
        (holder,) = holders(running, stack, {})
        (name, data), *_ = WEIGHTS.items()
        chunk = pb.BlobChunk(hash=name, size=len(data), data=data)
        call = holder.blobs()
        error = refused(lambda: call.Put(iter([chunk]), metadata=holder.metadata, timeout=HUNG_S))
        assert isinstance(error, ConnectionFailed), "a claim gives no right"
        refs = pb.BlobList(blobs=[pb.BlobRef(hash=name, size=len(data))])
        error = refused(lambda: list(call.Gather(refs, metadata=holder.metadata, timeout=HUNG_S)))
        assert isinstance(error, AccessDenied)
        stranger = Owner(running, secret="0" * 32)
        error = refused(lambda: list(stranger.blobs.Gather(refs, metadata=stranger.metadata, timeout=HUNG_S)))
        assert isinstance(error, AccessDenied)
        assert not holder.asked


def test_claims_that_are_no_hashes_are_a_malformed_message(running: Running) -> None:
    with ExitStack() as stack:
        (worker,) = fleet(stack, running, 1)
        worker.say(held_weights=pb.HeldWeights(hashes=b"b" * 32 + b"a" * 32))
        eventually(worker.ended.is_set)
    assert not claims(running)
