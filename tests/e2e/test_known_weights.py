"""Weights that workers have are not sent by a job's owner, and the job ends in the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from atoll import Job, Optimizer, ParamGroup, Rows, TrainingSpec
from benchmarks.counted import counted
from benchmarks.real_workers import LoopbackFleet, cut_at
from coordinator.client.client import Client
from coordinator.client.prepare import Prepared, prepare
from coordinator.membership.known_weights import names_of
from protos.telemetry import Event
from tests.patience import eventually
from worker.data.weights import held_hashes

WIDTH = 512

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """4 MB in four layers, of which the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def prepared(checkpoint: Path) -> Prepared:
    """The job, whose weights are the checkpoint's."""
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    groups = (ParamGroup(("layers.0.*",), frozen=True),)
    training = TrainingSpec(3, 2, optimizer=Optimizer(lr=0.01, groups=groups), eval_batches=0)
    with torch.device("meta"):
        module = Net()
    job = Job(module, {"x": rows[:4]}, Rows({"x": rows}), training, "known", weights=checkpoint)
    found = prepare(job)
    cuts = [position for position in found.graphs.dag.cuttable() if position]
    return replace(found, spec=replace(found.spec, partitioner=cut_at((0, cuts[len(cuts) // 2]))))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    safetensors.torch.save_file(Net().state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def holding(checkpoint: Path) -> Iterator[LoopbackFleet]:
    """Two workers of which the second has the weights."""
    with LoopbackFleet(2) as fleet:
        fleet.add_weights([1], checkpoint)

        def told() -> bool:
            return any(line.event == Event.WEIGHTS_HELD for line in fleet.client.logs(""))

        eventually(told)
        yield fleet


@pytest.mark.slow
def test_a_submission_of_weights_that_a_worker_has_sends_less_than_a_megabyte(
    holding: LoopbackFleet, checkpoint: Path
) -> None:
    job, endpoint = prepared(checkpoint), holding.client.endpoint
    assert job.upload_bytes > 4_000_000
    with counted(endpoint.host, endpoint.port) as wire, Client(replace(endpoint, port=wire.port)) as client:
        uploaded = client.upload(job, from_workers=True)
        reply = client.queue(job)
        sent = wire.sent_bytes
    tensors = sum(blob.size for blob in job.blobs if blob.hash in job.spec.tensors.values())
    assert uploaded.from_workers == tensors
    assert uploaded.sent == job.upload_bytes - tensors
    assert uploaded.sent < sent < 1_000_000, "on the wire, TLS and questions too"
    holding.client.wait(reply.job)
    found = holding.result(reply.job, {})
    with LoopbackFleet(2) as fleet:
        other = fleet.train(job)
    assert found.state.keys() == other.state.keys() == Net().state_dict().keys()
    assert all(torch.equal(found.state[n]["value"], other.state[n]["value"]) for n in found.state)
    assert "Traceback" not in holding.log("coordinator") + holding.log("worker1")


@pytest.mark.slow
def test_weights_that_are_rotten_on_the_worker_are_sent_by_the_owner(
    holding: LoopbackFleet, checkpoint: Path
) -> None:
    hashes = held_hashes(holding.folder(1))
    rotten = max(names_of(hashes), key=lambda name: (holding.folder(1) / "blobs" / name).stat().st_size)
    path = holding.folder(1) / "blobs" / rotten
    path.write_bytes(bytes(path.stat().st_size))
    job = prepared(checkpoint)
    uploaded = holding.client.upload(job, from_workers=True)
    assert uploaded.sent >= next(blob.size for blob in job.blobs if blob.hash == rotten)
    assert not holding.client.send(job.blobs), "all of it is there"
