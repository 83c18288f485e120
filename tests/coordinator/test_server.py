"""A coordinator over real gRPC with TLS, and workers that compute nothing."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from atoll.errors import AccessDenied, StorageError, UsageError
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.opdag import OpDag, StateMeta, TensorMeta
from benchmarks import fake_worker
from benchmarks.commit import WIDTH, chain, submission, upload
from benchmarks.fake_worker import FakeWorker
from coordinator.client.endpoint import find_endpoint
from coordinator.config import CoordinatorConfig, Liveness
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.scheduler import Scheduler
from coordinator.server import Server, Started, serve
from coordinator.storage import mirrored_blobs
from coordinator.storage.journal import Fenced, Journal, StoredJournal
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.convert import content_hash, dag_bytes, to_proto
from protos.credentials import (
    JoinToken,
)
from tests.coordinator.serving import FAST, Hold, Owner, Served, fleet, refused, start
from tests.coordinator.storage.objects_in_memory import MemoryObjects
from tests.interrupts import interrupted, own_session
from tests.patience import HUNG_S, eventually


def test_a_job_trains_over_two_workers_is_evaluated_stored_and_fetched(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    workers, owner = fleet(stack, running, 2), Owner(running)
    job = owner.submit(evaluate=True, eval_batches=1, checkpoint_every=2)
    update = owner.watch(job)
    assert (update.state, update.step, len(update.stages)) == ("finished", 3, 2), update.reason
    assert update.eval_loss == 1.5
    assert update.loss == pytest.approx(2.0 / 3)
    assert [c.store for c in workers[0].commits] == [False, True, True]
    result = owner.call("Result", pb.ResultRequest(job=job))
    assert result.step == 3
    assert [t.name for t in result.tensors] == ["w0", "w1", "w2", "w3"]
    chunks = list(
        owner.blobs.Get(pb.BlobList(blobs=[pb.BlobRef(hash=result.tensors[0].blob)]), metadata=owner.metadata)
    )
    assert sum(len(c.data) for c in chunks) > 0
    metrics = tmp_path / "runs" / job / "metrics.csv"
    lines = metrics.read_text().splitlines()
    assert lines[0] == "step,name,value,time_s"
    assert any(line.startswith("3,eval_loss,1.5") for line in lines)


def test_watchers_get_every_point_once(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 2)
    owner = Owner(running)
    job = owner.submit(steps=40)
    stream = owner.stub.Watch(pb.JobRequest(job=job), metadata=owner.metadata, timeout=HUNG_S)
    steps = [point.step for update in stream for point in update.metrics if point.name == "loss"]
    assert steps == list(range(1, 41))


def test_data_is_served_to_the_workers_of_the_job_alone(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    (inside, _), owner = fleet(stack, running, 2, ready=Hold(stack, 1)), Owner(running)
    job = owner.submit(steps=1000)
    owner.watch(job, lambda u: u.state == "training")
    (outside,) = fleet(stack, running, 1)
    request = pb.BatchRequest(job=job, inputs=["x"], first_step=1, count=2)
    assert inside._channel is not None
    batches = list(rpc.DataStub(inside._channel).Batches(request, timeout=HUNG_S))
    assert [(b.step, b.micro, tuple(b.shape)) for b in batches] == [
        (1, 0, (8, WIDTH)),
        (1, 1, (8, WIDTH)),
        (2, 0, (8, WIDTH)),
        (2, 1, (8, WIDTH)),
    ]
    assert outside._channel is not None
    stranger = rpc.DataStub(outside._channel)
    error = refused(lambda: list(stranger.Batches(request, timeout=HUNG_S)))
    assert isinstance(error, AccessDenied)
    assert "holds no stage" in str(error)


def test_a_vanished_worker_is_replaced_and_the_job_finishes(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    hold = Hold(stack, 15)
    workers, owner = fleet(stack, running, 3, ready=hold), Owner(running)
    job = owner.submit(steps=60, checkpoint_every=10)
    owner.watch(job, lambda u: u.step == hold.at)
    next(w for w in workers if w.assigned is not None).vanish()
    paused = owner.watch(job, lambda u: u.state == "paused" or u.plan_version == 2)
    assert paused.plan_version == 2 or "is lost: connection lost" in paused.reason
    hold.release()
    update = owner.watch(job)
    assert (update.state, update.step, update.plan_version) == ("finished", 60, 2), update.reason


def test_a_worker_that_reconnects_at_once_goes_on(stack: ExitStack, tmp_path: Path) -> None:
    liveness = Liveness(0.5, 1800.0, 3600.0, return_within_s=3600.0)
    running = start(stack, tmp_path, liveness=liveness)
    hold = Hold(stack, 5)
    workers, owner = fleet(stack, running, 2, ready=hold), Owner(running)
    job = owner.submit(steps=50)
    owner.watch(job, lambda u: u.step == hold.at)
    worker = workers[0]
    eventually(lambda: len(worker.commits) == hold.at)
    worker.vanish()
    worker.start()
    assert worker.assigned is not None
    # As a real worker does, it says its last word again; the answer may have been lost.
    worker.say(ready=worker.report(len(worker.commits)))
    hold.release()
    update = owner.watch(job)
    assert (update.state, update.plan_version) == ("finished", 1), update.reason


def test_a_restarted_coordinator_goes_on_where_it_was(stack: ExitStack, tmp_path: Path) -> None:
    first = serve(CoordinatorConfig(state_dir=tmp_path, entry_port=0, probing=FAST))
    hold = Hold(stack, 20, 50)
    workers, owner = fleet(stack, first, 2, ready=hold), Owner(first)
    job = owner.submit(steps=100, checkpoint_every=20)
    owner.watch(job, lambda u: u.checkpoint_step == 20)
    hold.release()
    owner.watch(job, lambda u: u.checkpoint_step == 40)
    first.stop()
    hold.release()
    second = start(stack, tmp_path)
    assert second.started.owner_token == first.started.owner_token
    assert second.started.join_token == first.started.join_token
    owner = Owner(second)
    assert "restarted" in owner.job(job).reason
    for worker in workers:
        worker.vanish()
        worker.entry = owner.address
        worker.work_port = second.started.work_port
        worker.start()
    update = owner.watch(job, lambda u: u.plan_version == 2 and u.state == "training")
    assert update.step >= 40
    assert owner.watch(job).state == "finished"


def test_a_second_job_waits_and_says_so(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    hold = Hold(stack, 1)
    fleet(stack, running, 2, ready=hold)
    owner = Owner(running)
    first, second = owner.submit(steps=1000), owner.submit(steps=3, name="Second job!")
    assert second == "second-job-1"
    update = owner.watch(second, lambda u: u.state == "queued" and "waits for" in u.reason)
    assert f"waits for {first}" in update.reason
    assert owner.call("Cancel", pb.JobRequest(job=first)).state == "cancelled"
    hold.release()
    assert owner.watch(second).state == "finished"


def test_a_repeated_submission_is_one_job(stack: ExitStack, tmp_path: Path) -> None:
    owner = Owner(start(stack, tmp_path))
    spec, blobs = submission(4, TrainingSpec(steps=3, n_micro=2))
    upload(owner.blobs, blobs, owner.metadata)
    request = pb.SubmitRequest(spec=to_proto(spec), submission="abc")
    assert owner.call("Submit", request).job == owner.call("Submit", request).job


def test_a_job_without_its_blobs_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    owner = Owner(start(stack, tmp_path))
    spec, blobs = submission(4, TrainingSpec(steps=3, n_micro=2))
    error = refused(lambda: owner.call("Submit", pb.SubmitRequest(spec=to_proto(spec))))
    assert isinstance(error, StorageError)
    upload(owner.blobs, {h: b for h, b in blobs.items() if h == spec.dag_hash}, owner.metadata)
    error = refused(lambda: owner.call("Submit", pb.SubmitRequest(spec=to_proto(spec))))
    assert isinstance(error, UsageError)
    assert "2 blobs are not here" in str(error)


def test_a_job_that_goes_on_with_another_model_or_optimizer_is_refused(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 2)
    owner = Owner(running)
    job = owner.submit()
    assert owner.watch(job).state == "finished"

    def resumed(dag: OpDag, optimizer: OptimizerName = OptimizerName.ADAMW) -> str:
        data = dag_bytes(dag)
        upload(owner.blobs, {content_hash(data): data}, owner.metadata)
        spec, _ = submission(4, TrainingSpec(6, 2, optimizer=Optimizer(optimizer)))
        spec = replace(spec, dag_hash=content_hash(data), resume_of=job)
        return str(owner.call("Submit", pb.SubmitRequest(spec=to_proto(spec))).job)

    same = chain(4)
    wide = StateMeta(TensorMeta((2 * WIDTH, WIDTH), "float32"), True)
    error = refused(lambda: resumed(replace(same, parameters={**same.parameters, "w2": wide})))
    assert isinstance(error, UsageError)
    assert "first w2, there float32 (256, 256), here float32 (512, 256)" in str(error)
    error = refused(lambda: resumed(same, OptimizerName.SGD))
    assert isinstance(error, UsageError)
    assert "holds the state of adamw, this one sgd" in str(error)
    assert owner.watch(resumed(same)).step == 6


def test_a_coordinator_with_an_empty_folder_goes_on_with_what_the_bucket_has(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()
    monkeypatch.setattr(mirrored_blobs, "S3Objects", lambda url: objects)
    with ExitStack() as first:
        running = start(first, tmp_path, blobs_url="s3://bucket/prefix")
        fleet(first, running, 2)
        owner = Owner(running)
        job = owner.submit()
        assert owner.watch(job).state == "finished"
    shutil.rmtree(tmp_path / "blobs")
    running = start(stack, tmp_path, blobs_url="s3://bucket/prefix")
    fleet(stack, running, 2)
    owner = Owner(running)
    spec, _ = submission(4, TrainingSpec(6, 2))
    resumed = owner.call("Submit", pb.SubmitRequest(spec=to_proto(replace(spec, resume_of=job)))).job
    assert owner.watch(str(resumed)).step == 6
    assert objects.reads


def test_a_fleet_without_enough_memory_is_told_by_how_much(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 1)
    owner = Owner(running)
    job = owner.submit(n_ops=8)
    update = owner.watch(job, lambda u: "suffices" in u.reason)
    assert "MiB" in update.reason
    fleet(stack, running, 3)
    assert owner.watch(job).state == "finished"


def test_the_best_checkpoint_is_kept_and_exported_by_name_or_step(stack: ExitStack, tmp_path: Path) -> None:
    running, hold = start(stack, tmp_path), Hold(stack, 2, 4, 6)
    fleet(stack, running, 2, ready=hold)
    owner = Owner(running)
    job = owner.submit(steps=8, evaluate=True, eval_batches=1, eval_every=2, checkpoint_every=2)
    for step in (2, 4, 6):  # each is stored before the next begins
        owner.watch(job, lambda u, at=step: u.checkpoint_step == at)
        hold.release()
    update = owner.watch(job)
    # Every evaluation gives the same loss: the first is the best.
    assert (update.best_eval_loss, update.best_step, update.best_checkpoint) == (1.5, 2, 2), update.reason
    listed = owner.call("Checkpoints", pb.CheckpointsRequest(job=job, verify=True)).checkpoints
    assert [(c.step, c.torn, c.best) for c in listed] == [(2, "", True), (6, "", False), (8, "", False)]
    best = owner.call("Result", pb.ResultRequest(job=job, best=True))
    assert best.tensors == owner.call("Result", pb.ResultRequest(job=job, step=2)).tensors
    wanted = pb.BlobList(blobs=[pb.BlobRef(hash=tensor.blob) for tensor in best.tensors])
    assert sum(len(c.data) for c in owner.blobs.Get(wanted, metadata=owner.metadata)) > 0
    assert owner.call("Result", pb.ResultRequest(job=job)).step == 8
    error = refused(lambda: owner.call("Result", pb.ResultRequest(job=job, step=3)))
    assert isinstance(error, UsageError)
    assert "no checkpoint of step 3; kept are: 2, 6, 8. " in str(error)
    plain = owner.submit()
    owner.watch(plain)
    error = refused(lambda: owner.call("Result", pb.ResultRequest(job=plain, best=True)))
    assert isinstance(error, UsageError)
    assert "no held-out loss to be the best by" in str(error)


def test_a_job_ends_early_with_its_reason_and_has_the_workers_back(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    fleet(stack, running, 2)
    owner = Owner(running)
    job = owner.submit(steps=1000, evaluate=True, eval_batches=1, eval_every=1, patience=2)
    update = owner.watch(job)  # every evaluation gives the same loss, and the evaluator's word comes in order
    assert (update.state, update.step, update.best_step) == ("finished", 3, 1), update.reason
    assert (
        "stopped after 3 of 1000 steps: 2 evaluations without a held-out loss below 1.5000" in update.reason
    )
    best, last = (owner.call("Result", pb.ResultRequest(job=job, best=at)) for at in (True, False))
    assert best.step == update.best_checkpoint
    assert 1 <= best.step <= last.step <= 3
    again = owner.submit()
    assert owner.watch(again).state == "finished"


def test_a_loss_that_becomes_nan_stops_the_job_with_its_checkpoint(stack: ExitStack, tmp_path: Path) -> None:
    hold = Hold(stack, 5, 12)

    def ready(worker: FakeWorker, step: int) -> pb.StepReady:
        has_loss = worker.assigned is not None and worker.assigned.program.HasField("loss")
        report = hold(worker, step)
        if step == 12:  # what is not finite flows from the loss to all gradients
            report.finite = False
            report.losses[:] = [float("nan")] * has_loss
        return report

    running = start(stack, tmp_path)
    fleet(stack, running, 2, ready=ready)
    owner = Owner(running)
    job = owner.submit(steps=100, checkpoint_every=5)
    owner.watch(job, lambda u: u.checkpoint_step == 5)
    hold.release()
    owner.watch(job, lambda u: u.checkpoint_step == 10)
    hold.release()
    update = owner.watch(job)
    assert update.state == "failed"
    assert "loss became nan at step 13" in update.reason
    assert owner.call("Result", pb.ResultRequest(job=job)).step == 10


def test_impossible_figures_set_a_worker_aside_and_the_job_goes_on(stack: ExitStack, tmp_path: Path) -> None:
    liars: list[str] = []
    first = threading.Lock()  # of the stages' holders, the first to report step 5; never released

    def ready(worker: FakeWorker, step: int) -> pb.StepReady:
        if step != 5 or not first.acquire(blocking=False):
            return worker.report(step)
        liars.append(worker.name)
        return worker.report(step, forward_s=-1.0)

    running = start(stack, tmp_path)
    fleet(stack, running, 3, ready=ready)
    owner = Owner(running)
    update = owner.watch(owner.submit(steps=10))
    assert (update.state, update.step, update.plan_version) == ("finished", 10, 2), update.reason
    workers = {w.name: w for w in owner.call("Status", pb.StatusRequest()).workers}
    assert [name for name, worker in workers.items() if "quarantined" in worker.reason] == liars
    assert "-1 s of forward" in workers[liars[0]].reason
    assert workers[liars[0]].worker not in {stage.worker for stage in update.stages}


def test_a_plan_is_shown_without_starting_anything(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    spec, blobs = submission(4, TrainingSpec(steps=3, n_micro=2))
    upload(owner.blobs, blobs, owner.metadata)
    request = pb.PlanRequest(dag_hash=spec.dag_hash, training=to_proto(spec.training), partitioner="even")
    assert "no worker" in str(refused(lambda: owner.call("MakePlan", request)))
    workers = fleet(stack, running, 2)
    eventually(lambda: len(owner.call("Status", pb.StatusRequest()).workers) == 2)
    reply = owner.call("MakePlan", request)
    assert len(reply.plan.stages) == 2
    assert len(reply.fleet) == 2
    assert all(worker.assigned is None for worker in workers)


def test_spans_and_logs_of_workers_are_kept(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    hold = Hold(stack, 2)
    workers, owner = fleet(stack, running, 2, ready=hold), Owner(running)
    job = owner.submit(steps=3)
    owner.watch(job, lambda u: u.step == hold.at)
    span = pb.Span(kind="F", step=1, micro=0, start_s=1.0, end_s=2.0)
    workers[0].say(spans=pb.Spans(job=job, plan_version=1, stage=0, spans=[span]))
    workers[0].say(log=pb.WorkerLog(level="info", event="hello\x1b[31m", job=job, fields_json="{}"))
    eventually(lambda: bool(list(owner.stub.Trace(pb.TraceRequest(job=job), metadata=owner.metadata))))
    lines = list(owner.stub.Logs(pb.LogsRequest(job=job), metadata=owner.metadata, timeout=HUNG_S))
    said = [line.fields_json for line in lines if line.event == "worker.log"]
    assert len(said) == 1
    assert "\\u001b" not in said[0]


def test_spans_before_the_first_heartbeat_are_drawn_when_they_came(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's steady clock began when its machine did, decades off ours."""
    monkeypatch.setattr(fake_worker, "BEAT_S", HUNG_S)
    running = start(stack, tmp_path, liveness=Liveness(0.5, 1800.0, 3600.0))
    hold = Hold(stack, 1)
    (worker, _), owner = fleet(stack, running, 2, ready=hold), Owner(running)
    job = owner.submit(steps=2)
    owner.watch(job, lambda u: u.step == hold.at)
    spans = [pb.Span(kind="F", start_s=1.0, end_s=end_s) for end_s in (2.0, 5.0, math.inf)]
    before_s = time.time()
    worker.say(spans=pb.Spans(job=job, plan_version=1, stage=0, spans=spans))
    request = pb.TraceRequest(job=job)
    eventually(lambda: bool(list(owner.stub.Trace(request, metadata=owner.metadata))))
    (chunk,) = owner.stub.Trace(request, metadata=owner.metadata)
    assert before_s <= chunk.clock_offset_s + 5.0 <= time.time()


def test_the_doctor_measures_and_reaches_back_with_a_token_only(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    owner = Owner(running)
    assert running.started.join_token is not None
    metadata = JoinToken.decode(running.started.join_token).metadata
    chunks = [pb.EchoChunk(wanted_bytes=3_000_000), pb.EchoChunk(data=bytes(1000))]
    replies = list(owner.entry.Echo(iter(chunks), timeout=HUNG_S, metadata=metadata))
    assert sum(len(r.data) for r in replies) == 3_000_000
    assert replies[-1].received_bytes == 1000
    request = pb.ReachRequest(port=running.started.work_port)
    reached = owner.entry.Reach(request, timeout=HUNG_S, metadata=metadata)
    assert (reached.host, reached.reachable) == ("127.0.0.1", True)
    wrong = (("authorization", "Bearer " + "x" * 22),)
    refusal = refused(lambda: owner.entry.Reach(request, timeout=HUNG_S, metadata=wrong))
    assert isinstance(refusal, AccessDenied)


def test_an_insecure_coordinator_works_and_says_what_it_is(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path, insecure=True)
    fleet(stack, running, 2)
    owner = Owner(running)
    assert "--insecure" in running.started.join_command
    assert owner.watch(owner.submit()).state == "finished"
    assert "insecure" in owner.call("Status", pb.StatusRequest()).version


def test_a_full_disk_pauses_the_job_and_it_goes_on_by_itself(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(stack, tmp_path)
    hold = Hold(stack, 5)
    fleet(stack, running, 2, ready=hold)
    owner = Owner(running)
    job = owner.submit(steps=30, checkpoint_every=10)
    owner.watch(job, lambda u: u.step == hold.at)
    assert running.server is not None
    plain = running.server.journal.append

    def full(records: Any) -> None:
        raise StorageError("the journal refuses 1 events: database or disk is full; free some disk space")

    running.call(lambda server: setattr(server.journal, "append", full))
    hold.release()
    paused = owner.watch(job, lambda u: u.state == "paused")
    assert "disk is full" in paused.reason
    assert owner.call("Status", pb.StatusRequest()).jobs[0].state == "paused"
    running.call(lambda server: setattr(server.journal, "append", plain))
    assert owner.watch(job).state == "finished"


def test_workers_keep_the_result_until_its_record_is_on_the_disk(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    hold = Hold(stack, 2)
    fleet(stack, running, 2, ready=hold)
    owner = Owner(running)
    job = owner.submit(steps=3)
    owner.watch(job, lambda u: u.step == hold.at)
    assert running.server is not None
    plain, seen = running.server.journal.append, list[do.Instruction]()

    def full(records: Any) -> None:
        if any(record.kind == "JobEnded" for record in records):
            raise StorageError("the journal refuses 2 events: database or disk is full")
        plain(records)

    def released() -> int:
        return sum(isinstance(i, do.SendTo) and isinstance(i.message, do.Release) for i in list(seen))

    running.call(lambda server: setattr(server.journal, "append", full))
    running.call(lambda server: setattr(server.shell, "observe", seen.append))
    hold.release()
    eventually(lambda: not running.call(lambda server: server.shell.settled))
    assert running.call(lambda server: released()) == 0
    running.call(lambda server: setattr(server.journal, "append", plain))
    assert owner.watch(job).state == "finished"
    eventually(lambda: released() == 2)


def test_a_taken_port_and_secrets_on_disk(stack: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    running = start(stack, tmp_path / "a")
    with pytest.raises(UsageError, match="cannot listen on"):
        serve(CoordinatorConfig(state_dir=tmp_path / "b", entry_port=running.started.entry_port))
    with pytest.raises(UsageError, match="give another --work-port or --listen"):
        serve(CoordinatorConfig(state_dir=tmp_path / "b", entry_port=0, work_port=running.started.work_port))
    for name, mode in (("owner-token", 0o600), ("journal.sqlite", 0o600), ("blobs", 0o700), (".", 0o700)):
        assert stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) == mode, name


def test_one_folder_has_one_coordinator_even_at_another_port(stack: ExitStack, tmp_path: Path) -> None:
    first = start(stack, tmp_path)
    parts = tmp_path / "app-parts"
    (parts / "of-a-run").touch()
    said = rf"process {os.getpid()} on 127.0.0.1:{first.started.entry_port}\).*--state-dir"
    with pytest.raises(UsageError, match=said):
        serve(CoordinatorConfig(state_dir=tmp_path, entry_port=0))
    assert (parts / "of-a-run").exists(), "the second one swept the first one's files"
    assert Owner(first).call("Status", pb.StatusRequest()).workers == []
    first.stop()
    assert start(stack, tmp_path).started.owner_token == first.started.owner_token


def test_a_failed_start_leaves_the_folder_to_the_next(stack: ExitStack, tmp_path: Path) -> None:
    taken = start(stack, tmp_path / "a").started.entry_port
    with pytest.raises(UsageError, match="cannot listen on"):
        serve(CoordinatorConfig(state_dir=tmp_path / "b", entry_port=taken))
    (tmp_path / "b" / "ca" / "ca-key.pem").rename(tmp_path / "key")
    with pytest.raises(StorageError, match="ca-key"):
        serve(CoordinatorConfig(state_dir=tmp_path / "b", entry_port=0))
    (tmp_path / "key").rename(tmp_path / "b" / "ca" / "ca-key.pem")
    start(stack, tmp_path / "b")


def test_a_second_serve_command_ends_with_a_remedy_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--state-dir", str(tmp_path), "--max-workers", "5000"]
    with serving(tmp_path) as served:
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        where = f"process {served.process.pid} on 127.0.0.1:{served.started.entry_port}"
        assert where in refused.stderr
        assert "stop it, or give this one its own --state-dir" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
    with serving(tmp_path):
        pass


def test_the_coordinator_never_imports_torch() -> None:
    code = "import sys, coordinator.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with own_session([*command, "--state-dir", str(folder)], **pipes) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "atoll-worker join" in line)
        endpoint = find_endpoint(state_dir=folder)
        assert endpoint.token is not None
        token = (folder / "join-token").read_text().strip()
        yield Served(process, Started(endpoint.port, 0, line, token, endpoint.token.encode()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_command_ends_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert interrupted(served.process, number) == 0


def test_ctrl_c_ends_a_coordinator_whose_workers_train_and_whose_owner_watches(
    stack: ExitStack, tmp_path: Path
) -> None:
    served = stack.enter_context(serving(tmp_path))
    fleet(stack, served, 2, compute_s=0.01)
    owner = Owner(served)
    job = owner.submit(steps=10_000)
    stream = owner.stub.Watch(pb.JobRequest(job=job), metadata=owner.metadata, timeout=HUNG_S)
    assert any(update.step >= 2 for update in stream)
    assert interrupted(served.process) == 0


async def test_a_coordinator_whose_event_loop_died_ends_instead_of_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(shell: object, batch: object) -> None:
        raise RuntimeError("a mistake of ours")

    server = Server(CoordinatorConfig(tmp_path / "state", entry_port=0, insecure=True))
    await server.start()
    monkeypatch.setattr(type(server.shell), "_handle", broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        await asyncio.wait_for(server.broken(), HUNG_S)
    await server.stop()


def test_a_running_coordinator_keeps_snapshots_and_starts_from_the_newest(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.server.SNAPSHOT_EVERY", 5)
    monkeypatch.setattr("coordinator.server.FOLD_CHECK_S", 0.02)
    first = start(stack, tmp_path)
    fleet(stack, first, 2)
    owner = Owner(first)
    job = owner.submit(steps=20)
    assert owner.watch(job).state == "finished"
    eventually(lambda: first.call(lambda server: len(server.journal.snapshots()) == 2))
    ledger, register = first.call(lambda server: (server.ledger.copy(), server.register))
    first.stop()
    with closing(StoredJournal(tmp_path / "journal.sqlite")) as journal:
        newest, older = (snapshot.number for snapshot in journal.snapshots())
        assert older < newest <= next(journal.rows(older)).number + 100
        assert next(journal.rows()).number == older + 1
    second = start(stack, tmp_path)
    found = second.call(lambda server: (server.ledger.jobs, server.register))
    assert found == (ledger.jobs, register)
    assert Owner(second).job(job).state == "finished"


def test_a_fact_that_is_in_memory_is_in_the_journal_though_the_scheduler_broke_after_it(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(stack, tmp_path)
    handle = Scheduler.handle

    def breaking(scheduler: Scheduler, event: ev.Event, now_s: float) -> list[do.Instruction]:
        done = handle(scheduler, event, now_s)
        if isinstance(event, ev.Submitted):
            raise KeyError("a mistake of ours")
        return done

    monkeypatch.setattr(Scheduler, "handle", breaking)
    with capture_logs() as logged, pytest.raises(grpc.RpcError):
        Owner(first).submit(steps=20)
    assert "scheduler.broke" in [entry["event"] for entry in logged]
    monkeypatch.undo()
    (job,) = first.call(lambda server: list(server.ledger.jobs))
    first.stop()
    second = start(stack, tmp_path)
    assert second.call(lambda server: list(server.ledger.jobs)) == [job]


@pytest.mark.parametrize("noticed", ["by an append", "by looking"])
async def test_a_coordinator_that_does_not_command_any_more_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    """The journal was claimed by another, where locks do not reach: of two machines with one disk."""
    if noticed == "by looking":
        monkeypatch.setattr("coordinator.server.COMMAND_CHECK_S", 0.05)

    server = Server(CoordinatorConfig(tmp_path / "state", entry_port=0, insecure=True))
    await server.start()
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as connection:
        connection.execute("UPDATE command SET term = term + 1")
    connection.close()
    if noticed == "by an append":
        server.shell.post(ev.Submitted("j", "", submission(4, TrainingSpec(3, 2), False)[0], {}))
    with pytest.raises(Fenced, match="does not command its journal any more"):
        await asyncio.wait_for(server.broken(), HUNG_S)
    await server.stop()
    assert "j" not in [record.payload.get("job") for record in Journal(server.config.journal_url).replay()]


@pytest.mark.parametrize(("seen", "address"), [("127.0.0.1", "127.0.0.1:9"), ("203.0.114.9", "")])
def test_a_worker_from_afar_cannot_have_others_dial_their_own_machine(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, address: str
) -> None:
    monkeypatch.setattr("coordinator.services.workers.work.host_of", lambda context: seen)
    running = start(stack, tmp_path)
    owner = Owner(running)
    fleet(stack, running, 1)
    eventually(lambda: [w.state for w in owner.call("Status", pb.StatusRequest()).workers] == ["pool"])
    assert [w.address for w in owner.call("Status", pb.StatusRequest()).workers] == [address]
