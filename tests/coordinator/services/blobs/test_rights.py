"""Who may fetch and put which blobs; what nothing needs goes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from tenacity import stop_after_attempt

from atoll.errors import AccessDenied, ConnectionFailed, StorageError
from benchmarks.commit import WIDTH, upload
from benchmarks.fake_worker import FakeWorker
from compressors.deltas import encode
from coordinator.messages import events as ev
from coordinator.server import Running
from coordinator.services.blobs.rights import CHECKPOINTS, Accounts, Allowance, ClientRole, StageRole, role_of
from coordinator.services.blobs.sweep import sweep
from coordinator.shell import Shell
from hostos.retries import retrying
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import blob_transfer
from protos.blob_calls import BlobsOverGrpc
from protos.blob_transfer import LocalBlob
from protos.grpc_errors import to_atoll_error
from tests.coordinator.federated.test_driver import Fleet, spec
from tests.coordinator.serving import Hold, Owner, fleet, refused, start
from tests.coordinator.storage.test_blob_store import counted, on_disk
from tests.patience import HUNG_S, eventually

NO_GRAPHS: Any = None  # a client runs the whole graph


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(worker: FakeWorker, data: bytes, size: int | None = None) -> Any:
    chunk = pb.BlobChunk(hash=name_of(data), size=size or len(data), data=data)
    return worker.blobs().Put(iter([chunk]), timeout=HUNG_S)


def got(blobs: Any, name: str, metadata: Any = ()) -> bytes:
    request = pb.BlobList(blobs=[pb.BlobRef(hash=name)])
    return b"".join(chunk.data for chunk in blobs.Get(request, metadata=metadata, timeout=HUNG_S))


def data_blob(running: Running, job: str) -> str:
    (field,) = running.call(lambda server: server.ledger.jobs[job].submitted.spec.data.fields)
    return str(field.blob)


# ---------------------------------------------------------------- what a worker may put


@given(
    puts=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 140), st.booleans()), max_size=30),
    most=st.integers(1, 3),
)
def test_what_a_worker_put_and_nothing_needs_is_never_more_than_it_was_asked_for(
    puts: list[tuple[str, int, bool]], most: int
) -> None:
    accounts, here, settled = Accounts(), dict[str, int](), set[str]()

    def admit(name: str, size: int) -> dict[str, bool]:
        return accounts.admit("w", name, size, Allowance(100, most), lambda n: here.get(n, 0), settled, ())

    for name, size, counts in puts:
        if not 0 < size <= 100:
            with pytest.raises(StorageError, match="at most 100"):
                admit(name, size)
            continue
        away = admit(name, size)
        assert name not in away
        assert not settled.intersection(away)
        here[name] = max(size, here.get(name, 0))
        assert all(away.values())
        for gone in away:
            del here[gone]
        loose = [n for n in here if n not in settled]
        assert sum(here[n] for n in loose) <= 100
        assert len(loose) <= most
        if counts:
            settled.add(name)


def test_what_somebody_else_began_does_not_go_with_a_workers_other_puts() -> None:
    accounts, here = Accounts(), {"begun by the owner": 5}
    for name, gone in (("begun by the owner", []), ("mine", []), ("newer", ["mine"])):
        away = accounts.admit("w", name, 60, Allowance(100, 1), lambda n: here.get(n, 0), (), ())
        assert [name for name, whole in away.items() if whole] == gone
        here[name] = 60


class Disk:
    """Bytes of the blobs that workers put within one allowance each; what each has sent is its own until the
    blob is whole."""

    MOST = Allowance(4000, 4)

    def __init__(self) -> None:
        self.accounts, self.whole, self.sent = Accounts(), dict[str, int](), dict[tuple[str, str], int]()

    def put(self, worker: str, name: str, size: int, n_bytes: int, reported: Collection[str] = ()) -> None:
        """``n_bytes`` of a blob that ``worker`` says has ``size``."""

        def held(blob: str) -> int:
            return self.whole.get(blob, 0)

        if not self.accounts.counted(worker, name, size):
            away = self.accounts.admit(worker, name, size, self.MOST, held, (), reported)
            for gone, last in away.items():
                self.sent.pop((gone, worker), None)
                if last:
                    self.whole.pop(gone, None)
        if name in self.whole:
            return
        self.sent[name, worker] = max(self.sent.get((name, worker), 0), n_bytes)
        if n_bytes == size:
            self.whole[name] = size
            self.sent = {key: sent for key, sent in self.sent.items() if key[0] != name}

    @property
    def n_bytes(self) -> int:
        return sum(self.whole.values()) + sum(self.sent.values())


def test_what_a_worker_reports_counts_until_it_is_needed() -> None:
    """Or it would report junk for ever, and have its allowance anew with each report."""
    disk = Disk()
    for at in range(20):
        disk.put("w", f"junk {at}", 1000, 1000, reported=[f"junk {n}" for n in range(at - 3, at)])
        assert disk.n_bytes <= Disk.MOST.n_bytes


def test_what_is_reported_does_not_give_way_and_what_comes_beside_it_waits() -> None:
    disk = Disk()
    reported = [f"reported {n}" for n in range(4)]
    for name in reported:
        disk.put("w", name, 1000, 1000)
    with pytest.raises(ConnectionFailed, match="try again"):
        disk.put("w", "more", 1000, 1000, reported=reported)
    assert sorted(disk.whole) == reported
    assert not disk.accounts.counted("w", "more", 1000)
    disk.put("w", "more", 1000, 1000)
    assert sorted(disk.whole) == ["more", *reported[1:]]


@pytest.mark.parametrize("said", [4000, 1])
def test_a_blob_that_several_workers_put_goes_with_the_last_of_them(said: int) -> None:
    """Whoever began it, and however little of it the other says there is."""
    disk = Disk()
    for at in range(20):
        disk.put("a", f"junk {at}", 4000, 1)
        disk.put("b", f"junk {at}", said, said)
        disk.put("a", f"junk {at}", 4000, 4000)
        assert disk.n_bytes <= 2 * Disk.MOST.n_bytes
    for other in range(4):
        disk.put("a", f"of a {other}", 1000, 0)
        disk.put("b", f"of b {other}", 1000, 0)
    assert disk.n_bytes == 0


def test_a_clients_role_is_one_update_and_the_broadcast_of_its_round() -> None:
    world = Fleet()
    world.join("w1")
    assert role_of(world.scheduler, NO_GRAPHS, "w1") is None
    world.submit(what=spec())
    world.loads("w1")
    role = role_of(world.scheduler, NO_GRAPHS, "w1")
    assert isinstance(role, ClientRole)
    model = role.state.model
    assert model is not None
    assert role.named() == {*spec().tensors.values(), model.full.hash}
    assert role.allowance().blobs == 1
    assert model.full.hash in world.scheduler.blobs_in_flight()
    world.says("w1", ev.Leaving("its owner needs the machine"))
    assert role_of(world.scheduler, NO_GRAPHS, "w1") is None
    assert role_of(world.scheduler, NO_GRAPHS, "nobody") is None


# ---------------------------------------------------------------- over the wire


def test_a_worker_fetches_what_its_job_named_and_nothing_else(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (inside,), owner = fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30), Owner(running)
    secret = os.urandom(100)
    upload(owner.blobs, {name_of(secret): secret}, owner.metadata)
    job = owner.submit(steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    assert inside.assigned is not None
    named = inside.assigned.tensors[0].blob
    assert name_of(got(inside.blobs(), named)) == named
    for other in (name_of(secret), "0" * 64, data_blob(running, job)):
        error = refused(lambda other=other: got(inside.blobs(), other))  # type: ignore[misc]
        assert isinstance(error, AccessDenied)
        assert "that your job did not name to you" in str(error)
    (outside,) = fleet(stack, running, 1)
    with pytest.raises(grpc.RpcError, match="no job uses this worker now"):
        got(outside.blobs(), named)


def test_a_keeper_fetches_what_it_is_to_keep_and_puts_nothing(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (inside,), owner = fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30), Owner(running)
    job = owner.submit(steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    (keeper,) = fleet(stack, running, 1, memory_bytes=1 << 30, copy_bytes=1 << 30)
    eventually(lambda: keeper.keeps is not None)
    assert keeper.keeps is not None
    (copy,) = keeper.keeps.copies
    assert inside.assigned is not None
    assert {blob.hash for blob in copy.blobs} == {tensor.blob for tensor in inside.assigned.tensors}
    for blob in copy.blobs:
        data = got(keeper.blobs(), blob.hash)
        assert (name_of(data), len(data) <= blob.size) == (blob.hash, True)
    for other in (data_blob(running, job), "0" * 64):
        assert isinstance(refused(lambda other=other: got(keeper.blobs(), other)), AccessDenied)  # type: ignore[misc]
    assert isinstance(refused(lambda: put(keeper, b"a copy of mine")), StorageError)


def test_a_worker_puts_no_more_than_its_job_asks_for(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (worker,), owner = fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30), Owner(running)
    with pytest.raises(grpc.RpcError, match="no job uses this worker now"):
        put(worker, b"for nobody")
    job = owner.submit(n_ops=2, steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    role = running.call(lambda server: role_of(server.shell.scheduler, server.shell.graphs, worker.worker))
    assert isinstance(role, StageRole)
    most = running.call(lambda server: role.allowance())
    state = 2 * WIDTH * WIDTH * 4 * 4  # two tensors, each with three of the optimizer
    assert CHECKPOINTS * state < most.n_bytes < CHECKPOINTS * (state + 200_000)
    error = refused(lambda: put(worker, b"x", size=most.n_bytes + 1))
    assert isinstance(error, StorageError)
    before = running.call(lambda server: on_disk(server.blobs.root))
    for _ in range(3 * most.blobs):
        put(worker, os.urandom(1000))
        put(worker, b"", size=10)  # counts, but leaves no file
    assert running.call(lambda server: on_disk(server.blobs.root)) - before == (most.blobs - 1) * 1000
    assert len(list((tmp_path / "blobs" / "partial").iterdir())) == 0
    put(worker, b"reported, and not yet looked at")
    reported = name_of(b"reported, and not yet looked at")
    running.call(lambda server: server.shell.reported.update([reported]))
    for _ in range(2 * most.blobs):
        put(worker, os.urandom(1000))
    assert running.call(lambda server: server.blobs.has(reported))


def test_only_a_report_that_may_count_keeps_its_blobs(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(stack, tmp_path)
    (worker,), owner = fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30), Owner(running)
    job = owner.submit(n_ops=2, steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    version = running.call(lambda server: server.shell.scheduler.jobs[job].version)
    kept, handle = list[tuple[str, set[str]]](), Shell._handle

    def looked(shell: Shell, batch: list[Any]) -> None:
        """What is kept for each report while it is handled."""
        messages = [posted.event.message for posted in batch if isinstance(posted.event, ev.Arrived)]
        reports = [message for message in messages if isinstance(message, ev.StateStored)]
        kept.extend((message.job, set(shell.reported)) for message in reports)
        handle(shell, batch)

    monkeypatch.setattr(Shell, "_handle", looked)
    junk = job_pb.TensorBlob(name="w0", blob=name_of(b"junk"))
    for of, plan_version in (("other", version), (job, version + 1), (job, version)):
        worker.say(stored=pb.StateStored(job=of, plan_version=plan_version, step=1, tensors=[junk]))
    eventually(lambda: len(kept) == 3)
    assert kept == [("other", set()), (job, set()), (job, {junk.blob})]


def test_a_worker_that_knows_a_blobs_name_cannot_keep_another_from_storing_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    (liar, honest), owner = fleet(stack, running, 2, ready=Hold(stack, 1)), Owner(running)
    owner.watch(owner.submit(steps=1000), lambda u: u.state == "training")
    data = os.urandom(3000)
    for n_bytes, size in ((2000, 3000), (3500, 3600)):
        chunk = pb.BlobChunk(hash=name_of(data), size=size, data=bytes(n_bytes))
        liar.blobs().Put(iter([chunk]), timeout=HUNG_S)
        begun = pb.BlobList(blobs=[pb.BlobRef(hash=name_of(data))])
        held = [w.blobs().Held(begun, timeout=HUNG_S).blobs[0].offset for w in (liar, honest)]
        assert held == [n_bytes, 0]
    assert honest._channel is not None
    port = BlobsOverGrpc(honest._channel, (), "test")
    blob = LocalBlob.of(lambda: data, 1000)
    assert blob_transfer.upload(port, [blob], retrying(stop_after_attempt(1))) == 3000
    assert running.call(lambda server: server.blobs.read(name_of(data))) == data


def test_no_worker_learns_whether_a_blob_is_here_that_is_not_its_own(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    (worker, idle), owner = (
        fleet(stack, running, 2, ready=Hold(stack, 1), memory_bytes=1 << 30),
        Owner(running),
    )
    job = owner.submit(n_ops=2, steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    if running.call(lambda server: server.shell.scheduler.spec_of(job, worker.worker)) is None:
        worker, idle = idle, worker
    secret = b"another owner's data"
    running.call(lambda server: server.blobs.put(secret))
    here, nowhere = name_of(secret), name_of(b"nobody has this")

    def learned(who: FakeWorker, name: str) -> list[Any]:
        found: list[Any] = []
        ref = pb.BlobList(blobs=[pb.BlobRef(hash=name)])
        for call in (who.blobs().Missing, who.blobs().Held):
            found += [(b.offset, b.size) for b in call(ref, timeout=HUNG_S).blobs]
        for chunk in (
            pb.BlobChunk(hash=name, size=20, data=b""),
            pb.BlobChunk(hash=name, size=20, data=b"a"),
            pb.BlobChunk(hash=name, size=1, data=b"a"),
        ):
            try:
                found.append(len(who.blobs().Put(iter([chunk]), timeout=HUNG_S).blobs))
            except grpc.RpcError as error:
                found.append(str(to_atoll_error(error, "test")).replace(name[:12], "NAME"))
        return found

    assert learned(worker, here) == learned(worker, nowhere)
    assert learned(idle, here) == learned(idle, nowhere)
    chunk = pb.BlobChunk(hash=here, size=len(secret), data=secret)
    assert worker.blobs().Put(iter([chunk]), timeout=HUNG_S).blobs, "who has it may know"
    store = running.call(lambda server: server.blobs)
    assert store.read(here) == secret
    assert counted(store) == on_disk(store.root)


def test_the_owner_fetches_what_jobs_rest_on_and_no_clients_update(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    blob = data_blob(running, owner.submit())
    assert name_of(got(owner.blobs, blob, owner.metadata)) == blob
    update = running.call(lambda server: server.blobs.put(b"one client's update"))
    error = refused(lambda: got(owner.blobs, update, owner.metadata))
    assert isinstance(error, AccessDenied)
    assert "of no job" in str(error)


# ---------------------------------------------------------------- sweeps


def test_a_sweep_at_the_start_takes_what_nothing_needs_and_no_blob_of_a_fact(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    job = Owner(running).submit()
    stale = running.call(lambda server: server.blobs.put(b"nobody came back for this"))
    fresh = running.call(lambda server: server.blobs.put(b"its job will come"))
    running.stop()
    files = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    for path in files:
        if path.parent.name + path.name != fresh:
            os.utime(path, (1000.0, 1000.0))
    again = start(stack, tmp_path)
    eventually(lambda: not again.call(lambda server: server.blobs.has(stale)))
    facts = again.call(lambda server: server.ledger.referenced_blobs())
    assert {path.parent.name + path.name for path in files} == {*facts, stale, fresh}
    assert again.call(lambda server: [name for name in (*facts, fresh) if not server.blobs.has(name)]) == []
    assert Owner(again).job(job).state == "queued"


def test_of_a_replaced_checkpoint_stays_what_another_is_being_stored_with(
    stack: ExitStack, tmp_path: Path
) -> None:
    """A job that goes on from a restored checkpoint stores bytes that are here: whoever sends them counts on
    what it was told."""
    running = start(stack, tmp_path)
    (worker,), owner = fleet(stack, running, 1, ready=Hold(stack, 1), memory_bytes=1 << 30), Owner(running)
    owner.watch(owner.submit(n_ops=2, steps=1000), lambda u: u.state == "training")
    store = running.call(lambda server: server.blobs)
    asked, reported, other = map(store.put, (b"asked about", b"reported", b"of nobody any more"))

    def left() -> set[str]:
        def sweep_now(server: Any) -> Any:
            server.ledger.superseded.update((asked, reported, other))
            return asyncio.ensure_future(server.shell.sweep_superseded())

        work = running.call(sweep_now)
        eventually(work.done)
        work.result()
        return set(filter(store.has, (asked, reported, other)))

    request = pb.BlobList(blobs=[pb.BlobRef(hash=asked)])
    assert worker.blobs().Missing(request, metadata=worker.metadata, timeout=HUNG_S).blobs == request.blobs
    chunk = pb.BlobChunk(hash=asked, size=len(b"asked about"), data=b"asked about")
    assert worker.blobs().Put(iter([chunk]), metadata=worker.metadata, timeout=HUNG_S).blobs
    assert not worker.blobs().Missing(request, metadata=worker.metadata, timeout=HUNG_S).blobs
    running.call(lambda server: server.shell.reported.update([reported]))
    assert left() == {asked, reported}
    running.call(lambda server: server.shell.promises.reported(worker.worker, [asked]))
    running.call(lambda server: server.shell.reported.clear())
    assert left() == set()


def test_an_upload_that_the_owner_asks_about_again_waits_again(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner, data = Owner(running), b"submitted tomorrow"
    name = name_of(data)
    upload(owner.blobs, {name: data}, owner.metadata)
    path = running.call(lambda server: server.blobs.path(name))

    def swept() -> Any:
        work = running.call(lambda server: asyncio.ensure_future(sweep(server.shell)))
        eventually(work.done)
        return work.result()

    os.utime(path, (1000.0, 1000.0))
    asked = pb.BlobList(blobs=[pb.BlobRef(hash=name)])
    assert not owner.blobs.Missing(asked, metadata=owner.metadata).blobs
    assert swept() == (0, 0)
    os.utime(path, (1000.0, 1000.0))
    assert swept() == (1, len(data))


def test_bytes_of_a_worker_are_a_sign_of_life(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (worker,) = fleet(stack, running, 1)

    def unseen_s() -> float:
        def ask(server: Any) -> float:
            known = server.shell.scheduler.roster.workers.get(worker.worker)
            return 0.0 if known is None else server.shell.clock() - known.member.seen_s

        return float(running.call(ask))

    worker.ended.set()  # no heartbeats any more
    eventually(lambda: unseen_s() > 1.0)
    with pytest.raises(grpc.RpcError, match="no job uses this worker now"):
        put(worker, b"x")
    eventually(lambda: unseen_s() < 1.0)


def test_a_worker_has_blobs_made_of_its_own_deltas_against_what_it_may_know(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    (worker, other), owner = fleet(stack, running, 2, ready=Hold(stack, 1)), Owner(running)
    job = owner.submit(steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    base, new = save({"value": torch.zeros(500)}), save({"value": torch.arange(500.0)})
    coded = b"".join(
        encode(np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8), (name_of(base), name_of(new)))
    )
    asked = [pb.BlobPatch(hash=name_of(new), size=len(new), base=name_of(base), delta=name_of(coded))]

    def patched(who: FakeWorker) -> list[str]:
        reply = who.blobs().Patch(pb.BlobPatches(patches=asked), timeout=HUNG_S)
        return [blob.hash for blob in reply.blobs]

    put(worker, base)
    put(worker, coded)
    assert patched(other) == []  # both are another's
    assert patched(worker) == [name_of(new)]
    assert running.call(lambda server: server.blobs.read(name_of(new))) == new
    fetched = pb.BlobList(blobs=[pb.BlobRef(hash=name_of(coded))])
    for who in (worker, other):  # neither's job has named what it leads to
        with pytest.raises(grpc.RpcError, match="did not name to you"):
            list(who.blobs().Get(fetched, timeout=HUNG_S))
        with pytest.raises(grpc.RpcError, match="did not name to you"):
            who.blobs().Changes(pb.BlobList(blobs=[pb.BlobRef(hash=name_of(new))]), timeout=HUNG_S)
    assert patched(worker) == []  # the delta is spent
    with pytest.raises(grpc.RpcError) as refusal:
        owner.blobs.Patch(pb.BlobPatches(patches=asked), metadata=owner.metadata, timeout=HUNG_S)
    assert isinstance(to_atoll_error(refusal.value, "test"), AccessDenied)
