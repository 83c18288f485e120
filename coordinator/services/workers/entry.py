"""The Entry service: a join token for a certificate, and a greeting that needs neither.

Calls come here once ``access`` has found that their token opens; what is raised here it tells the caller.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import ProtocolMismatch, StorageError
from atoll.version import __version__
from coordinator.messages.facts import Record
from coordinator.services.workers.relay_ways import relay_addresses
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import new_worker_id, presented_in
from protos.telemetry import Event
from protos.text_limits import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from coordinator.messages.instructions import Addresses
    from coordinator.services.access.authorities import Authorities
    from coordinator.services.access.register import Register
    from coordinator.storage.journal import Journal

    Context = grpc.aio.ServicerContext[Any, Any]

ID_DRAWS = 8  # one suffices unless random numbers repeat: of 100,000 workers two draw alike in 4e9 fleets

log = structlog.get_logger()


class EntryService(rpc.EntryServicer):
    """``authority`` None: the coordinator runs without TLS and enrolls whoever comes."""

    def __init__(
        self,
        register: Register,
        journal: Journal,
        authority: Authorities | None,
        work_port: int,
        max_workers: int,
        clock: Callable[[], float] = time.time,
        relays: Addresses = (),
    ) -> None:
        self._register = register
        self._journal = journal
        self._authority = authority
        self._work_port = work_port
        self._max_workers = max_workers
        self._clock = clock
        self._relays = relays

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:  # noqa: N802
        """Versions and time, for anybody."""
        return pb.HelloReply(
            protocol=PROTOCOL_VERSION,
            version=__version__,
            time_s=self._clock(),
            work_port=self._work_port,
            relays=relay_addresses(self._relays),
            authorities=self._authorities(),
        )

    def _authorities(self) -> pb.Authorities | None:
        authority = self._authority
        if authority is None:
            return None
        return pb.Authorities(ca_pem=authority.trusted_pem, left_s=authority.left_s(self._clock()))

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollReply:  # noqa: N802
        """Sign the worker's key when its token opens."""
        if request.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"protocol mismatch: the coordinator speaks protocol {PROTOCOL_VERSION} (atoll "
                f"{__version__}), this worker {request.protocol}; update the older of the two"
            )
        return self._enroll(request, presented_in(context.invocation_metadata()))

    def _enroll(self, request: pb.EnrollRequest, secret: str) -> pb.EnrollReply:
        if len(self._register.workers) >= self._max_workers:
            raise StorageError(
                f"{self._max_workers} workers are enrolled already; start `atoll serve` with a larger "
                "--max-workers"
            )
        worker, certificate, ca, token = self._free_id(), b"", b"", ""
        if self._authority is not None:
            token = self._register.admit(secret, self._clock()).id
            certificate = self._authority.sign(request.csr_pem, worker)
            ca = self._authority.trusted_pem
        name = clean(request.name, 60).strip() or worker
        record = Record(
            Event.WORKER_ENROLLED, self._clock(), {"worker": worker, "name": name, "token": token}
        )
        self._journal.append([record])
        self._register.apply(record)
        log.info(Event.WORKER_ENROLLED, worker=worker, name=name, token=token)
        return pb.EnrollReply(
            worker=worker, certificate_pem=certificate, ca_pem=ca, work_port=self._work_port
        )

    def _free_id(self) -> str:
        """A new worker's id, which nobody here has or ever had."""
        for _ in range(ID_DRAWS):
            if (worker := new_worker_id()) not in self._register.workers:
                return worker
        raise StorageError(
            f"{ID_DRAWS} random worker ids were all taken; this machine's random source repeats"
        )
