"""How long a step's commit takes: last StepReady said to last StepCommit heard, over TLS.

    python benchmarks/commit.py --workers 4 --steps 200 --json

The coordinator is a process of its own with its journal on full synchronisation; the workers
compute nothing. Prints milliseconds; ``--json`` ends with one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.job import JobSpec, Optimizer, TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta
from benchmarks.fake_worker import FakeWorker
from benchmarks.harness import execute
from benchmarks.waits import HUNG_S
from coordinator.client.endpoint import find_endpoint
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.convert import content_hash, dag_bytes, to_proto

if TYPE_CHECKING:
    import grpc

WIDTH = 256
# Each fits a fifth more than its share of the model, so all are needed.
SHARE_BYTES = int(WIDTH * WIDTH * 4 * 4 * 2.4) + 2**21


def chain(n_ops: int) -> OpDag:
    """``n_ops`` linear layers and a loss, too large for one machine's budget."""
    meta = TensorMeta((8, WIDTH), "float32")
    ops = [
        OpNode(
            f"linear{i}",
            Kind.PARAMETRIC,
            "aten.linear.default",
            (OpRef(i - 1) if i else LeafRef(Source.INPUT, "x"), LeafRef(Source.PARAMETER, f"w{i}")),
            (),
            (meta,),
            requires_grad=True,
            flops_forward=2 * 8 * WIDTH * WIDTH,
            flops_backward=4 * 8 * WIDTH * WIDTH,
            bytes_moved=meta.nbytes * 2,
            bytes_saved=meta.nbytes,
        )
        for i in range(n_ops)
    ]
    scalar = TensorMeta((), "float32")
    ops.append(
        OpNode("loss", Kind.LOSS, "aten.mean.default", (OpRef(n_ops - 1),), (), (scalar,), requires_grad=True)
    )
    weight = StateMeta(TensorMeta((WIDTH, WIDTH), "float32"), True)
    return OpDag(tuple(ops), {"x": meta}, {f"w{i}": weight for i in range(n_ops)}, {}, {}, loss=n_ops)


def submission(
    n_ops: int, training: TrainingSpec, evaluate: bool = False
) -> tuple[JobSpec, dict[str, bytes]]:
    """A job over ``chain`` and its blobs."""
    dag = dag_bytes(chain(n_ops))
    weight = save({"value": np.zeros((WIDTH, WIDTH), np.float32)})
    rows = save({"value": np.zeros((64, WIDTH), np.float32)})
    blobs = {content_hash(data): data for data in (dag, weight, rows)}
    data = DataSpec((DataField("x", content_hash(rows), Layout.ROWS),), 64, 8)
    spec = JobSpec(
        name="chain",
        training=training,
        dag_hash=content_hash(dag),
        eval_dag_hash=content_hash(dag) if evaluate else "",
        tensors={f"w{i}": content_hash(weight) for i in range(n_ops)},
        data=data,
        eval_data=data if evaluate else None,
        partitioner="even",
    )
    return spec, blobs


def upload(stub: rpc.BlobsStub, blobs: dict[str, bytes], metadata: Any) -> None:
    """Put every blob."""
    chunks = [pb.BlobChunk(hash=name, size=len(data), data=data) for name, data in blobs.items()]
    stub.Put(iter(chunks), metadata=metadata, timeout=HUNG_S)


def submitted(channel: grpc.Channel, metadata: Any, workers: int, steps: int) -> str:
    """Submit a job that takes all of ``workers`` workers of SHARE_BYTES; return its name."""
    training = TrainingSpec(steps=steps, n_micro=2, optimizer=Optimizer(clip_norm=1.0))
    spec, blobs = submission(2 * workers, training)
    upload(rpc.BlobsStub(channel), blobs, metadata)
    request = pb.SubmitRequest(spec=to_proto(spec))
    return str(rpc.OwnerStub(channel).Submit(request, metadata=metadata, timeout=HUNG_S).job)


@contextlib.contextmanager
def serving(
    state_dir: Path, *options: str, python: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a coordinator on a free port of loopback; yields its process and a join token. ``options`` are
    those of `atoll serve`, ``python`` those of its interpreter."""
    command = [sys.executable, *python, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0"]
    with (state_dir / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--state-dir", str(state_dir), "--json", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["join_token"]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # so busy that it does not hear: its figures are wanted still
                process.kill()
                process.wait()


class Stopwatch:
    """Last StepReady said to last StepCommit heard, by step."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._said: dict[int, float] = {}
        self._heard: dict[int, int] = {}
        self.took_s: list[float] = []

    def said(self, worker: FakeWorker, step: int) -> pb.StepReady:
        report = worker.report(step)
        with self._lock:
            self._said[step] = max(self._said.get(step, 0.0), time.perf_counter())
        return report

    def heard(self, worker: FakeWorker, commit: pb.StepCommit) -> None:
        now = time.perf_counter()
        with self._lock:
            self._heard[commit.step] = self._heard.get(commit.step, 0) + 1
            if self._heard[commit.step] == self._workers:
                self.took_s.append(now - self._said[commit.step])


def run(workers: int, steps: int, state_dir: Path, step_s: float = 0.02) -> dict[str, float]:
    """Figures in milliseconds; raises when the run does not finish."""
    fakes: list[FakeWorker] = []
    with contextlib.ExitStack() as stack:
        _, token = stack.enter_context(serving(state_dir))
        stack.callback(lambda: [fake.stop() for fake in fakes])
        endpoint = find_endpoint(state_dir=state_dir)
        watch = Stopwatch(workers)
        fakes = [
            FakeWorker(
                endpoint.address, token, f"fake-{i}", memory_bytes=SHARE_BYTES, compute_s=step_s,
                ready=watch.said, on_commit=watch.heard,
            ).start()
            for i in range(workers)
        ]  # fmt: skip
        channel = endpoint.channel()
        owner = rpc.OwnerStub(channel)
        job = submitted(channel, endpoint.metadata(), workers, steps)
        updates = owner.Watch(pb.JobRequest(job=job), metadata=endpoint.metadata(), timeout=HUNG_S)
        (update,) = deque(updates, maxlen=1)
        if update.state != "finished" or len(update.stages) != workers:
            raise SystemExit(f"{update.state} on {len(update.stages)} stages: {update.reason}")
        took_ms = sorted(1e3 * s for s in watch.took_s[steps // 10 :])
        return {
            "workers": workers,
            "steps": steps,
            "commit_ms_median": round(statistics.median(took_ms), 3),
            "commit_ms_p90": round(took_ms[int(0.9 * len(took_ms))], 3),
            "commit_ms_max": round(took_ms[-1], 3),
            "coordinator_ms_median": round(1e3 * update.commit_s, 3),
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="unused: nothing here is random")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(options.workers, options.steps, Path(folder))
    print(
        f"{options.workers} workers, {options.steps} steps: last ready to last commit "
        f"{figures['commit_ms_median']} ms median, {figures['commit_ms_p90']} ms p90; of it in the "
        f"coordinator {figures['coordinator_ms_median']} ms"
    )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    execute(main)
