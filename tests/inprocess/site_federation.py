"""Rounds of sites with gateways: the product's machine, workers and aggregator in one process.

What passes between workers of a site is counted apart from what goes to and from the coordinator's store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.errors import ConnectionFailed
from atoll.messages import to_worker as asked
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from protos.blob_transfer import Chunk
from tests.inprocess.secure_federation import SecureFederation
from worker.blobs import BlobFiles, NearBlobs
from worker.cancel import Cancel
from worker.compute import reports
from worker.federated.participation import Participation

NAMES = ("w1", "w2", "w3", "w4", "w5", "w6")
SITES = dict(zip(NAMES, ("east",) * 3 + ("west",) * 3, strict=True))


@dataclass
class Peer:
    """``Neighbours`` of one worker, and what it lends to them."""

    name: str
    of: SiteFederation

    def lender(self, worker: str, cancel: Cancel) -> NearBlobs:
        return Lender(self, self.of.peers[worker])

    def lend(self, blob: str, borrower: str) -> None:
        self.of.lent[self.name, blob] = borrower


@dataclass
class Lender:
    borrower: Peer
    peer: Peer

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        federation, source = self.borrower.of, self.peer.name
        federation.asked_near.append((self.borrower.name, source))
        for name, offset in wanted:
            if source in federation.unreachable:
                raise ConnectionFailed(f"{source} does not answer")
            path = federation.clients[source]._context.blobs.path(name)
            if federation.lent.get((source, name)) not in ("", self.borrower.name) or not path.is_file():
                raise ConnectionFailed(f"{source} cannot send blob {name[:12]}")
            data = path.read_bytes()
            federation.near_bytes += len(data) - offset
            yield Chunk(name, len(data), offset, data[offset:])


@dataclass
class SiteFederation(SecureFederation):
    """``site_of``, and the gateways that each worker's owner allows; ``silent``: by (worker, round, "train" |
    "sum"), whose answer never comes."""

    site_of: Mapping[str, str] = field(default_factory=lambda: SITES)
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    silent: frozenset[tuple[str, int, str]] = frozenset()
    unreachable: frozenset[str] = frozenset()
    on_order: Callable[[SiteFederation, str, asked.TrainRound], None] = lambda made, worker, order: None

    def __post_init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.lent: dict[tuple[str, str], str] = {}
        self.asked_near: list[tuple[str, str]] = []
        self.near_bytes = 0
        self.trains: Counter[str] = Counter()
        super().__post_init__()

    def client(self, name: str, seed: int) -> Participation:
        found = super().client(name, seed)
        blobs: Any = found._context.blobs
        assert isinstance(blobs, BlobFiles)
        self.peers[name] = blobs.neighbours = Peer(name, self)
        train = found._trainer.train

        def counted(*args: Any, **options: Any) -> Any:
            self.trains[name] += 1
            return train(*args, **options)

        found._trainer.train = counted  # type: ignore[method-assign]
        return found

    def begin(self) -> None:
        self.step(fed.Begin())
        for at, name in enumerate(self.names):
            n_samples, site = len(self.data(at)["label"]), self.site_of.get(name, "")
            self.step(fed.Invited(name, n_samples, site=site))
        for name in self.names:
            self.load(name)

    def load(self, name: str) -> None:
        allowed = self.allowed.get(name, ("site",))
        self.step(fed.FromClient(name, ev.Loaded("job-1", 1, gateways=allowed)))

    def says(self, worker: str, message: Any) -> None:
        if isinstance(message, asked.TrainRound):
            self.on_order(self, worker, message)
            kind = "sum" if message.gathers else "train"
            if (worker, message.round, kind) in self.silent:
                self.said.append((worker, message))
                return
        super().says(worker, message)

    def trained(self, client: Participation, order: asked.TrainRound) -> Any:
        blob = order.model.full.hash
        self.store.blobs.setdefault(blob, self.server.store.path(blob).read_bytes())
        if not order.gateway:
            return super().trained(client, order)
        update = client.train(order, Cancel())
        assert update.stored is not None
        assert update.stored.hash not in self.store.blobs
        return reports.update_ready(order, update)

    def bytes(self) -> list[tuple[int, int]]:
        """Bytes up to and down from the coordinator, by round."""
        told = [fact.participants.values() for fact in self.facts()]
        return [(sum(t["bytes_up"] for t in each), sum(t["bytes_down"] for t in each)) for each in told]

    def orders(self) -> list[tuple[str, asked.TrainRound]]:
        return [(who, order) for who, order in self.said if isinstance(order, asked.TrainRound)]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(a, other[n]) for n, a in one.items())
