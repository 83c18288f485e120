"""Checkpoints over a real coordinator: forged ones cost who sent them, torn ones fall back."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from atoll.job import TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta
from benchmarks.commit import WIDTH, chain, submission, upload
from benchmarks.fake_worker import FakeWorker
from coordinator.cli.main import app
from coordinator.config import CoordinatorConfig
from coordinator.pipeline.tuning import profiling
from coordinator.server import Running, serve
from coordinator.storage import mirrored_blobs
from hostos.command_line import run
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos.convert import content_hash, dag_bytes, to_proto
from tests.coordinator.serving import FAST, Hold, Owner, fleet, start
from tests.coordinator.storage.objects_in_memory import MemoryObjects
from tests.patience import HUNG_S, eventually


class Forger(FakeWorker):
    """A worker whose snapshots are not what its stage holds; ``stored``: its blobs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stored: set[str] = set()

    names: tuple[str, ...] | None = None  # None: its stage's own
    shape: tuple[int, ...] | None = (WIDTH, WIDTH)  # None: that of each

    def _names(self, program: Any) -> Sequence[str]:
        return program.parameters if self.names is None else self.names

    def _put_state(self, commit: pb.StepCommit) -> None:
        assigned = self.assigned
        if assigned is None:
            return
        shapes = {named.name: tuple(named.meta.shape) for named in assigned.metas}
        tensors = []
        for name in self._names(assigned.program):
            shape = self.shape or shapes[name]
            data = save({"value": np.ones(shape, np.float32)}, {"of": self.worker})
            blob = hashlib.sha256(data).hexdigest()
            chunks = iter([pb.BlobChunk(hash=blob, size=len(data), data=data)])
            self.blobs().Put(chunks, metadata=self.metadata, timeout=HUNG_S)
            tensors.append(job_pb.TensorBlob(name=name, blob=blob))
            self.stored.add(blob)
        stored = pb.StateStored(
            job=commit.job, plan_version=commit.plan_version, step=commit.step, tensors=tensors
        )
        self.say(stored=stored)


@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        (None, (4,), "the model has float32"),
        (("w0", "w1", "w2", "w3"), (WIDTH, WIDTH), "not a tensor that its stage stores"),
        ((), (WIDTH, WIDTH), "tensors of its stage are not in it"),
    ],
)
def test_a_forged_snapshot_costs_its_worker_and_not_the_checkpoint(
    stack: ExitStack, tmp_path: Path, names: tuple[str, ...] | None, shape: tuple[int, ...], words: str
) -> None:
    running = start(stack, tmp_path)
    (first,), owner = fleet(stack, running, 1), Owner(running)
    forger = Forger(f"127.0.0.1:{running.started.entry_port}", running.started.join_token, "forger")
    forger.names, forger.shape, forger.memory_bytes = names, shape, first.memory_bytes
    stack.callback(forger.stop)
    forger.start()
    job = owner.submit(steps=2)  # too large for one of them

    def reason() -> str:
        status = owner.call("Status", pb.StatusRequest())
        return next((w.reason for w in status.workers if w.worker == forger.worker), "")

    eventually(lambda: words in reason())
    fleet(stack, running, 1)
    assert owner.watch(job).state == "finished"
    assert words in reason()


def joined_stages() -> OpDag:
    """Two stages that share a weight (w0), which the first one stores, and a buffer that no step writes (b);
    the second reads a constant (c)."""
    plain, meta, row = chain(4), TensorMeta((8, WIDTH), "float32"), TensorMeta((WIDTH,), "float32")
    first, second, third, fourth, loss = plain.ops
    tied = replace(fourth, args=(OpRef(3), LeafRef(Source.PARAMETER, "w0")))

    def added(name: str, to: int, leaf: LeafRef) -> OpNode:
        return OpNode(
            name, Kind.NON_PARAMETRIC, "aten.add.Tensor", (OpRef(to), leaf), (), (meta,), requires_grad=True
        )

    shared, constant = LeafRef(Source.BUFFER, "b"), LeafRef(Source.CONSTANT, "c")
    ops = (
        first,
        added("add0", 0, shared),
        replace(second, args=(OpRef(1), second.args[1])),
        replace(third, args=(OpRef(2), third.args[1])),
        tied,
        added("add1", 4, shared),
        added("add2", 5, constant),
        replace(loss, args=(OpRef(6),)),
    )
    weights = {name: plain.parameters[name] for name in ("w0", "w1", "w2")}
    return OpDag(ops, plain.inputs, weights, {"b": StateMeta(row)}, {"c": row}, loss=7)


class Replacing(Forger):
    """A worker whose second stage stores ``added`` as well as what it is to store."""

    added: tuple[str, ...] = ()
    shape = None

    def _names(self, program: Any) -> list[str]:
        followed = {tied.name for tied in program.tied if tied.holders[0] != program.stage}
        stored = [name for name in (*program.parameters, *program.buffers) if name not in followed]
        return [*stored, *(self.added if program.stage else ())]


@pytest.mark.parametrize("added", [("w0",), ("c",), ()])
def test_no_stage_replaces_what_another_stores(
    stack: ExitStack, tmp_path: Path, added: tuple[str, ...]
) -> None:
    running = start(stack, tmp_path)
    owner, dag = Owner(running), dag_bytes(joined_stages())
    weight, row = (save({"value": np.zeros(shape, np.float32)}) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    plain, blobs = submission(4, TrainingSpec(steps=2, n_micro=2))
    blobs |= {content_hash(data): data for data in (dag, weight, row)}
    upload(owner.blobs, blobs, owner.metadata)
    tensors = dict.fromkeys(("w0", "w1", "w2"), content_hash(weight)) | dict.fromkeys("bc", content_hash(row))
    spec = replace(plain, dag_hash=content_hash(dag), tensors=tensors, partitioner="cut:3")
    workers = []
    for name in ("one", "two"):
        worker = Replacing(f"127.0.0.1:{running.started.entry_port}", running.started.join_token, name)
        worker.added = added
        stack.callback(worker.stop)
        workers.append(worker.start())
    job = owner.call("Submit", pb.SubmitRequest(spec=to_proto(spec))).job

    def put_out() -> list[str]:
        status = owner.call("Status", pb.StatusRequest())
        return [w.reason for w in status.workers if "stored what is not a checkpoint" in w.reason]

    if added:
        eventually(lambda: len(put_out()) == 1)
        assert f"{added[0]!r} is not a tensor that its stage stores" in put_out()[0]
        return
    assert owner.watch(job).state == "finished"
    places = running.call(lambda server: server.shell.scheduler.jobs[job].plan.places)
    stored = running.call(lambda server: server.ledger.jobs[job].last_checkpoint.tensors)
    of = {worker.worker: worker.stored for worker in workers}
    first, second = (of[place.worker] for place in places)
    assert {name for name, blob in stored.items() if blob in first} == {"w0", "w1", "b"}
    assert {name for name, blob in stored.items() if blob in second} == {"w2"}
    assert stored["c"] == content_hash(row)


def test_of_a_torn_checkpoint_the_one_before_is_used(stack: ExitStack, tmp_path: Path) -> None:
    config = CoordinatorConfig(state_dir=tmp_path, entry_port=0, probing=FAST)
    first = serve(config)
    hold = Hold(stack, 20, 40, 70)
    workers, owner = fleet(stack, first, 2, ready=hold), Owner(first)
    job = owner.submit(steps=90, checkpoint_every=20)
    owner.watch(job, lambda u: u.checkpoint_step == 20)
    hold.release()
    owner.watch(job, lambda u: u.checkpoint_step == 40)
    hold.release()
    owner.watch(job, lambda u: u.checkpoint_step == 60)
    first.stop()
    hold.release()
    assert first.server is not None
    record = first.server.shell.scheduler.ledger.jobs[job]
    before, newest = record.checkpoints
    path = first.server.blobs.path(newest.tensors["w1"])
    path.write_bytes(path.read_bytes()[:100])
    second = start(stack, tmp_path)
    owner = Owner(second)
    again = Hold(stack, 80)
    for worker in workers:
        worker.vanish()
        worker.ready = again
        worker.entry = owner.address
        worker.work_port = second.started.work_port
        worker.start()
    owner.watch(job, lambda u: u.plan_version == 2 and u.state == "training")
    assert all(worker.assigned and worker.assigned.first_step == before.step for worker in workers)
    again.release()
    update = owner.watch(job)
    assert (update.state, update.step) == ("finished", 90)


def bucket_behind(
    stack: ExitStack, folder: Path, patch: pytest.MonkeyPatch, objects: MemoryObjects
) -> Running:
    patch.setattr(mirrored_blobs, "S3Objects", lambda url: objects)
    return start(stack, folder, blobs_url="s3://bucket/prefix")


def test_a_bucket_that_does_not_answer_costs_no_checkpoint_and_the_job_waits_for_it(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "READ_AGAIN_S", 0.2)
    objects = MemoryObjects()
    with ExitStack() as first:
        running = bucket_behind(first, tmp_path, monkeypatch, objects)
        hold = Hold(first, 10, 25)
        workers, owner = fleet(first, running, 2, ready=hold), Owner(running)
        job = owner.submit(steps=30, checkpoint_every=10)
        owner.watch(job, lambda u: u.checkpoint_step == 10)
        hold.release()
        owner.watch(job, lambda u: u.checkpoint_step == 20)
    shutil.rmtree(tmp_path / "blobs")
    running = bucket_behind(stack, tmp_path, monkeypatch, objects)
    held, objects.away = dict(objects.held), True
    owner = Owner(running)
    for worker in workers:  # without their stages, so nobody is waited for
        worker.ready = None
        worker.entry, worker.work_port = owner.address, running.started.work_port
        stack.callback(worker.start().stop)
    paused = owner.watch(job, lambda u: u.state == "paused" and "does not answer" in u.reason)
    assert (paused.checkpoint_step, objects.held) == (20, held)
    objects.away = False
    assert owner.watch(job).state == "finished"
    assert all(c.first_step == 20 for worker in workers if (c := worker.assigned))


class Claimant(FakeWorker):
    """A worker whose first snapshot lies in the bucket alone, which does not answer just then."""

    objects: MemoryObjects
    blob: str

    def _put_state(self, commit: pb.StepCommit) -> None:
        names = self.assigned.program.parameters if self.assigned else ()
        blob, self.blob = self.blob, ""
        self.objects.away = bool(blob)
        if not blob:
            super()._put_state(commit)
            return
        tensors = [job_pb.TensorBlob(name=name, blob=blob) for name in names]
        stored = pb.StateStored(
            job=commit.job, plan_version=commit.plan_version, step=commit.step, tensors=tensors
        )
        self.say(stored=stored)


def test_a_worker_is_not_blamed_for_a_bucket_that_does_not_answer(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()
    running = bucket_behind(stack, tmp_path, monkeypatch, objects)
    assert running.server is not None
    blob = running.server.blobs.put(save({"value": np.ones((WIDTH, WIDTH), np.float32)}))
    running.server.blobs.path(blob).unlink()
    worker = Claimant(f"127.0.0.1:{running.started.entry_port}", running.started.join_token, "claimant")
    worker.objects, worker.blob, worker.memory_bytes = objects, blob, 1 << 30
    stack.callback(worker.stop)
    worker.start()
    owner = Owner(running)
    job = owner.submit(steps=2)
    assert owner.watch(job).state == "finished"
    lines = owner.stub.Logs(pb.LogsRequest(job=job), metadata=owner.metadata, timeout=HUNG_S)
    assert any("could not store its state: s3://bucket does not answer" in x.fields_json for x in lines)


def test_checkpoints_are_listed_verified_and_gone_back_to(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = start(stack, tmp_path)
    workers, owner = fleet(stack, running, 2), Owner(running)
    job = owner.submit(steps=6, checkpoint_every=2)
    assert owner.watch(job).state == "finished"
    here = ["--coordinator", owner.address, "--token", str(running.started.owner_token), "--json"]

    def said(*command: str) -> Any:
        assert run(app, ["checkpoints", *command, *here]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    listed = said(job)
    older = listed[0]["step"]  # stored once the one before was whole, so that there is one at a time
    assert 2 <= older < 6
    assert [(c["step"], c["whole"], c["tensors"]) for c in listed] == [(older, True, 4), (6, True, 4)]
    assert all(c["bytes"] > 4 * WIDTH * WIDTH * 4 and c["at_s"] > 1e9 for c in listed)
    assert said("verify", job) == listed
    assert run(app, ["checkpoints", "restore", job, "--step", "1", *here]) == 2
    assert f"kept are: {older}, 6" in capsys.readouterr().err
    assert run(app, ["checkpoints", "restore", job, "--step", "6", *here]) == 2
    assert "raise --steps" in capsys.readouterr().err
    restored = said("restore", job, "--step", str(older), "--steps", "9")["job"]
    update = owner.watch(restored)
    assert (update.state, update.step) == ("finished", 9)
    assert min(c.step for worker in workers for c in worker.commits if c.job == restored) == older

    assert running.server is not None
    newest = running.server.shell.scheduler.ledger.jobs[job].checkpoints[-1]
    path = running.server.blobs.path(newest.tensors["w2"])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert all(c["whole"] for c in said(job))  # its header is as it was
    assert run(app, ["checkpoints", "verify", job, *here]) == 9
    printed = capsys.readouterr()
    assert [c["whole"] for c in json.loads(printed.out.splitlines()[-1])] == [True, False]
    assert f"restore {job} --step {older}" in printed.err
    assert run(app, ["checkpoints", "restore", job, "--step", "6", "--steps", "9", *here]) == 9
    assert "not in the store" in capsys.readouterr().err
