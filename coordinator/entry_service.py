"""The Entry service: a join token for a certificate, and a greeting that needs neither.

Wrong tokens cost their sender a delay, and only so many are looked at in parallel, so guessing
128 random bits is not helped by opening many connections.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import structlog

import atoll
from atoll.errors import AccessDenied, AtollError, StorageError
from coordinator.journal import Record
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import new_worker_id
from protos.telemetry import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.journal import Journal
    from coordinator.tokens import Register
    from protos.credentials import Authority

    Context = grpc.aio.ServicerContext[Any, Any]

ID_DRAWS = 8  # one suffices unless random numbers repeat: of 100,000 workers two draw alike in 4e9 fleets

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Doorkeeping:
    """How entry is slowed against guessing."""

    wrong_token_delay_s: float = 0.5
    wrong_tokens_at_once: int = 16
    max_workers: int = 4096


class EntryService(rpc.EntryServicer):
    """``authority`` None: the coordinator runs without TLS and enrolls whoever comes."""

    def __init__(
        self,
        register: Register,
        journal: Journal,
        authority: Authority | None,
        work_port: int,
        rules: Doorkeeping,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._register = register
        self._journal = journal
        self._authority = authority
        self._work_port = work_port
        self._rules = rules
        self._clock = clock
        self._wrong = 0

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:  # noqa: N802
        """Versions and time, for anybody."""
        return pb.HelloReply(
            protocol=PROTOCOL_VERSION,
            version=atoll.__version__,
            time_s=self._clock(),
            work_port=self._work_port,
        )

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollReply:  # noqa: N802
        """Sign the worker's key when its token opens."""
        if request.protocol != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol mismatch: the coordinator speaks protocol {PROTOCOL_VERSION} (atoll "
                f"{atoll.__version__}), this worker {request.protocol}; update the older of the two",
            )
        try:
            return await self._enroll(request)
        except AccessDenied as error:
            log.warning(Event.TOKEN_REFUSED, peer=context.peer(), reason=str(error))
            await self._slow_down()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except StorageError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except AtollError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _enroll(self, request: pb.EnrollRequest) -> pb.EnrollReply:
        if self._wrong >= self._rules.wrong_tokens_at_once:
            raise AccessDenied("too many wrong tokens at this moment; try again in a few seconds")
        if len(self._register.workers) >= self._rules.max_workers:
            raise StorageError(
                f"{self._rules.max_workers} workers are enrolled already; start `atoll serve` with a larger "
                "--max-workers"
            )
        worker, certificate, ca, token = self._free_id(), b"", b"", ""
        if self._authority is not None:
            token = self._register.admit(request.token, self._clock()).id
            certificate = self._authority.sign(request.csr_pem, worker)
            ca = self._authority.certificate_pem
        name = "".join(c for c in request.name if c.isprintable())[:60] or worker
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

    async def _slow_down(self) -> None:
        self._wrong += 1
        try:
            await asyncio.sleep(self._rules.wrong_token_delay_s)
        finally:
            self._wrong -= 1
