"""What a device has open beside its session: links to peers, the coordinator's store, copies for others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from protos.session import to_coordinator
from worker.blobs import BlobFiles
from worker.control.bulk import Bulk
from worker.control.remote_store import metered
from worker.hosting.neighbours.copies import Copies
from worker.hosting.neighbours.peer_blobs import PeerBlobs
from worker.hosting.requests import HostPorts
from worker.machine.cpu import beside_computing
from worker.transport.contract import TransportConfig, Way
from worker.transport.local import DeviceNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos import atoll_control_pb2 as pb
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership
    from worker.session import events
    from worker.shared import Shared


class Connections:
    """``host`` is what the compute process gets of them."""

    def __init__(
        self,
        config: WorkerConfig,
        shared: Shared,
        member: Membership,
        post: Callable[[events.Event], None],
        send: Callable[[pb.FromWorker], None],
        lost: Callable[[str, str], None],
        joined: Callable[[str, Way | None, str], None],
        away: Callable[[], bool],
    ) -> None:
        """``away``: True while there is no session. Raises ConnectionFailed."""
        listen = config.listen if not config.number else None
        transport = TransportConfig(
            use_proxy=config.use_proxy,
            coordinator=config.host,
            max_connections=TransportConfig().max_connections * (shared.devices if listen else 1),
        )
        self.network = DeviceNetwork(
            shared.links,
            member.identity,
            listen,
            lost,
            transport,
            name=member.name,
            traffic=shared.traffic,
            joined=joined,
        )
        self._bulk = Bulk(lambda member: member.channel(config), member)
        blobs = BlobFiles(self._bulk, shared.cache, config.max_upload_bytes_per_s, shared.traffic, away)
        self.copies = Copies(
            blobs,
            shared.cache,
            config.blob_dir,
            config.copy_bytes,
            lambda said: send(to_coordinator(said)),
            lambda holder: self.peers.near(holder, gently=True),  # it trains, and so do we
            owner=config.number,
        )
        offered, coming = lambda: self.copies.offered, shared.cache.busy
        self.peers = blobs.neighbours = PeerBlobs(self.network, shared.cache.path, offered, coming)
        self.host = HostPorts(
            self.network,
            blobs,
            metered(self._bulk.batches, shared.traffic),
            post,
            send,
            lambda holders: blobs.prefer(list(map(self.peers.near, holders))),
            beside_computing(),
            self.copies.take,
        )

    def renewed(self, member: Membership, *, key: bool) -> None:
        """Use another identity for every connection from now on; those that are open stay."""
        if member.identity is not None:
            self.network.renew(member.identity)
        if key:
            self._bulk.renewed(member)

    def moved(self) -> None:
        """Go on from another address of this machine."""
        self.network.moved()
        self._bulk.reopen()

    def end_copies(self) -> None:
        """Store and send no more for others."""
        self.copies.close()
        self.peers.close()

    def close(self, within_s: float) -> None:
        """Close the links, waiting so long for them, and the store."""
        closing = threading.Thread(target=self.network.close, name="atoll-close", daemon=True)
        closing.start()
        closing.join(within_s)
        self._bulk.close()
