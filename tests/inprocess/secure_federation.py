"""Secure rounds with the product's machine, wire, workers and aggregator in one process, without a network.

Messages go through their encoding both ways. ``lost``: by (round, stage), workers whose answer never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import AtollError
from atoll.federated import NO_FLOORS, Floors
from atoll.messages import to_worker as asked
from atoll.secure import Stage
from coordinator.aggregation.process import Aggregating
from coordinator.federated import machine
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import RoundClosed
from coordinator.messages.jobs import Dropped, Record
from coordinator.services.workers.wire import to_worker
from coordinator.storage.graph_store import GraphStore
from protos.session import from_worker, said_to_worker, to_coordinator
from protos.session import to_worker as read_by_worker
from strategies.fixed import Accumulator, real
from strategies.secure.vector import secured, with_bits
from tests.coordinator.aggregation.test_server_half import Server, made
from tests.worker.federated.test_participation import KEY
from tests.worker.test_blobs import Store
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel
from worker.compute import reports
from worker.context import ComputeContext, ComputeSettings
from worker.federated.participation import Participation
from worker.machine.cpu import CpuMeter
from worker.machine.device import Device
from worker.pipe.arena import HEAD_BYTES
from worker.pipe.status import ComputeStatus
from worker.spans import Spans
from worker.stage.reports import Progress

Lost = Mapping[tuple[int, Stage], Collection[str]]


def data_of(seed: int, samples: int = 24) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"image": draw.normal(size=(samples, 6)).astype(np.float32), "label": draw.integers(0, 3, samples)}


@dataclass
class SecureFederation:
    """``run`` until the job has ended. ``make``: the submitted job; ``data``: of a client, by its number."""

    folder: Path
    names: tuple[str, ...]
    options: Mapping[str, Any]
    lost: Lost = field(default_factory=dict)
    floors: Floors = NO_FLOORS
    make: Callable[..., Server] = made
    data: Callable[[int], dict[str, Any]] = data_of
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.server: Server = self.make(self.folder, **{"evaluate_every": 0, **self.options})
        self.store = Store(chunk_bytes=1 << 20)
        self.spec = self.server.job.spec
        self.state = fed.FederationState("job-1", self.spec, 0.0)
        store = self.server.store
        self.aggregating = Aggregating(store.partial.parent, "", store.partial)
        self.todo: list[fed.Todo] = []
        self.said: list[tuple[str, Any]] = []
        self.asks: list[do.AggregateRound] = []
        self.queue: list[fed.Event] = []
        self.clients = {name: self.client(name, at) for at, name in enumerate(self.names)}

    def client(self, name: str, seed: int) -> Participation:
        spec, graphs = self.spec, GraphStore(self.server.store)
        message = to_worker(do.Participate("job-1", 1, spec, dict(spec.tensors), "owner"), graphs)
        joining = read_by_worker(message)
        for blob in set(spec.tensors.values()):
            self.store.blobs[blob] = self.server.store.path(blob).read_bytes()
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        unused: Any = None
        context = ComputeContext(
            name,
            Device("cpu", 0, "test", 1, 1 << 34, 1 << 34),
            ComputeSettings(folder, "cpu", 1, 1 << 34, 2, 1 << 30, 1 << 30, self.floors),
            network=unused,
            blobs=BlobFiles(self.store, BlobCache(folder / "blobs", 1 << 30)),
            fetch_of=unused,
            open_data={"set": self.data(seed)}.__getitem__,
            open_population=lambda data: None,
            scratch=folder,
            spans=Spans(),
            progress=Progress(),
            cpu=CpuMeter(),
            status=ComputeStatus(memoryview(bytearray(HEAD_BYTES))),
        )
        return Participation(joining, context, Cancel(), KEY)

    # ------------------------------------------------------------ the machine

    def begin(self) -> None:
        self.step(fed.Begin())
        for at, name in enumerate(self.names):
            self.step(fed.Invited(name, len(self.data(at)["label"])))
        for name in self.names:
            self.step(fed.FromClient(name, ev.Loaded("job-1", 1)))

    def run(self, most: int = 400) -> None:
        """Let everything happen that is under way; where nothing is, time passes."""
        if self.state.phase.value == "queued":
            self.begin()
        for _ in range(most):
            if self.state.ended:
                return
            if self.queue:
                self.step(self.queue.pop(0))
                continue
            self.now_s = max(self.now_s + 1.0, self.state.due_s)
            self.step(fed.Tick())
        raise AssertionError(f"{self.state.phase}: {self.state.reason}")

    def step(self, event: fed.Event) -> None:
        self.state, todo = machine.step(self.state, event, self.now_s)
        self.todo += todo
        for item in todo:
            self.obey(item)

    def obey(self, item: fed.Todo) -> None:
        match item:
            case do.OpenAggregator():
                self.answered(replace(item, n_clients=len(self.names)))
            case do.AggregateRound():
                self.asks.append(item)
                self.answered(from_json(do.AggregateRound, to_json(item)))
            case fed.Say(worker, message):
                self.says(worker, message)

    def answered(self, request: Any) -> None:
        event, files = self.aggregating.answer(request)
        for file in files:
            self.server.store.adopt(file.path, file.stored.hash, file.stored.size)
        self.queue.append(event)

    # ------------------------------------------------------------ workers

    def says(self, worker: str, message: Any) -> None:
        self.said.append((worker, message))
        told = read_by_worker(said_to_worker(message))
        client = self.clients[worker]
        match told:
            case asked.RoundTaken(_, at_round, taken):
                client.settle(at_round, taken)
            case asked.SecureOrder(_, at_round, _, stage):
                if worker not in self.lost.get((at_round, stage), ()):
                    self.tells(worker, client.secure(told))
            case asked.TrainRound(_, at_round):
                if worker not in self.lost.get((at_round, Stage.VECTORS), ()):
                    self.tells(worker, self.trained(client, told))

    def trained(self, client: Participation, order: asked.TrainRound) -> Any:
        blob = order.model.full.hash
        self.store.blobs.setdefault(blob, self.server.store.path(blob).read_bytes())
        try:
            update = client.train(order, Cancel())
        except AtollError as error:
            return ev.ClientFailed("job-1", order.round, str(error), "train")
        assert update.stored is not None
        self.server.store.put(self.store.blobs[update.stored.hash])
        return reports.update_ready(order, update)

    def tells(self, worker: str, message: Any) -> None:
        self.queue.append(fed.FromClient(worker, from_worker(to_coordinator(message))))

    # ------------------------------------------------------------ what came of it

    def facts(self) -> list[RoundClosed]:
        return [i.fact for i in self.todo if isinstance(i, Record) and isinstance(i.fact, RoundClosed)]

    def dropped(self) -> list[str]:
        return [i.why for i in self.todo if isinstance(i, Dropped)]

    def weights(self) -> dict[str, Any]:
        half = self.aggregating._half
        assert half is not None
        assert half.state is not None
        return {name: np.array(array) for name, array in half.state.weights.items()}


class Plain(SecureFederation):
    """The same job without masks, summed in whole numbers of ``bits``: of those alone whom ``counted`` names
    by round, on the grid of ``members``."""

    counted: Mapping[int, Collection[str]]
    members: Mapping[int, Collection[str]]
    bits: int

    def answered(self, request: Any) -> None:
        super().answered(request)
        half = self.aggregating._half
        if isinstance(request, do.OpenAggregator) and half is not None:
            summed: Any = self._whole
            half._summed = summed  # type: ignore[method-assign]

    def _whole(self, state: Any, came: Any, least: int) -> Any:
        half = self.aggregating._half
        assert half is not None
        core = secured(half.rule)
        names = sorted(self.counted[state.round])
        members = self.members[state.round]
        samples = sum(came.offered[name].registered for name in members)
        sums = Accumulator(with_bits(core.round_grid(len(members), samples), self.bits))
        for name in names:
            sums.add(core.contribute(half.layout, half._judged(name, came.offered[name], state.round)))
        return core.finish(state, real(sums.sums(), half.layout))
