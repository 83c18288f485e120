"""A compute host of which a script plays the process that computes."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.messages.to_worker import Blob, Model, Paths, PeerLink, RankPeer
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S
from tests.worker.hosting.scripted import Blobs, Network, batches, command, taken
from worker.config import WorkerConfig
from worker.data.registry import add_dataset, known_facts
from worker.federated.owner.consent import Consent
from worker.hosting.contained import child
from worker.hosting.host import ComputeHost
from worker.hosting.requests import HostPorts
from worker.session import events

if TYPE_CHECKING:
    import pytest


def neighbour(name: str) -> RankPeer:
    return RankPeer(1, PeerLink(name, Paths((("192.0.2.1", 1),), dial=True)))


class World:
    """A host with a scripted process, and all that it says to its daemon."""

    def __init__(self, state_dir: Path, handlers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(child, "COMMAND", command(handlers))
        monkeypatch.setattr(child, "TUNED", replace(child.TUNED, ends_within_s=HUNG_S))
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[control.FromWorker] = queue.SimpleQueue()
        self.network, self.blobs = Network(), Blobs()
        network: Any = self.network
        blobs: Any = self.blobs
        self.host = ComputeHost(WorkerConfig("lab", device="cpu", state_dir=state_dir), Consent(state_dir))
        self.ports = HostPorts(network, blobs, batches, self.posted.put, self.sent.put)
        self.state_dir = state_dir

    def start(self) -> control.DeviceFacts:
        self.host.prepare()
        return self.host.start("w-a", self.ports)

    def load(self, job: str = "j", version: int = 1, first_step: int = 0) -> None:
        message = control.Assign(job=job, plan_version=version)
        self.host.do(events.Assign(job, version, (neighbour("w-b"),), first_step, message))

    def join(self, job: str = "f") -> None:
        if not known_facts(self.state_dir):
            table = self.state_dir / "table.csv"
            table.write_text("x,y\n1,0\n2,1\n")
            add_dataset(self.state_dir, "mine", table, ["x:float32=x", "y:int64=y"])
        invitation = control.Participate(job=job, version=2)
        invitation.federated.data = "mine"
        self.host.do(events.Participate(job, 2, invitation))

    def train(self, at_round: int, job: str = "f") -> None:
        self.host.do(events.TrainRound(job, at_round, Model(Blob("a" * 64, 1)), "none", 1.0, 60.0, 7))

    def event(self) -> Any:
        return taken(self.posted)

    @property
    def child(self) -> child.Child:
        with self.host._state.lock:  # whoever reports a death starts the next process before it lets go
            now = self.host._state.now
        assert now is not None
        return now.child
