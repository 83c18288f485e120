"""What the devices of one daemon have in common: the machine's membership, cache and traffic."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from worker.control.enroll import find_work_address
from worker.manners.traffic import Traffic
from worker.transport.local import LocalLinks

if TYPE_CHECKING:
    from worker.blobs import BlobCache
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership
    from worker.control.renewal import Renewal
    from worker.ranks.gathering import Gathering

log = structlog.get_logger()


class Shared:
    """One a daemon."""

    membership: Membership  # of the machine, once it has joined
    renewal: Renewal  # the same
    cache: BlobCache  # the same
    port: int = 0  # where peers reach any of the devices

    def __init__(self, config: WorkerConfig, devices: int, ranks: Gathering | None = None) -> None:
        """``config``: of the machine; ``ranks``: the other hosts of a site."""
        self.config, self.devices, self.ranks = config, devices, ranks
        self.traffic, self.links = Traffic(), LocalLinks()
        self.stopping = threading.Event()
        self.lock = threading.Lock()  # of the membership

    def find_coordinator(self) -> None:
        """Find where the coordinator takes sessions now. Raises as ``find_work_address``."""
        found = find_work_address(self.config, self.membership)
        with self.lock:
            self.membership = replace(found, identity=self.membership.identity)
        self.trust(found)

    def trust(self, member: Membership) -> None:
        """Trust the authorities that the coordinator's greeting named."""
        if member.identity is not None:
            self.trust_authorities(member.identity.ca_pem, member.overlap_s)

    def trust_authorities(self, ca_pem: bytes, left_s: float) -> None:
        """Trust these authorities from now on."""
        try:
            self.renewal.trust(ca_pem, left_s)
        except AtollError as error:
            # What is open stays open: a job may end in peace. The next connection is refused in these words.
            log.warning("authority.not_trusted", reason=str(error))
