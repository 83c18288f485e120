"""Keeping this machine's identity in force: its certificate is renewed under the one that is still valid, and
the authorities are trusted that the coordinator names, two while it exchanges one for another."""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import AtollError
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import Identity, identity_from, new_key, signing_request
from protos.grpc_errors import to_atoll_error
from worker.control.calls import answer

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership

CALL_TIMEOUT_S = 30.0
LOOK_EVERY_S = 900.0
SPREAD = 0.25
"""Share of the time for which two authorities are trusted, in which a worker draws when it renews: by then
every peer that is connected has heard of the new one, and a thousand workers do not come at once."""
LEAST_PAUSE_S = 1.0

log = structlog.get_logger()


def renewed(
    config: WorkerConfig, member: Membership, now: dt.datetime, *, anyway: bool = False
) -> Identity | None:
    """Have a new certificate made for a new key where it is time, or ``anyway``; None where it is not, or
    could not be: then it is tried again at the next look."""
    held = member.identity
    if held is None or not (anyway or now >= held.renewal_due()):
        return None
    try:
        with member.channel(config) as channel:
            return _renew(channel, member, now)
    except AtollError as error:
        log.warning("certificate.not_renewed", until=str(held.expires()), reason=str(error))
        return None


def _renew(channel: grpc.Channel, member: Membership, now: dt.datetime) -> Identity:
    """Raises AccessDenied, ConnectionFailed."""
    stub: Any = rpc.WorkStub(channel)
    key = new_key()
    request = pb.RenewRequest(csr_pem=signing_request(key, member.worker))
    try:
        reply: pb.RenewReply = answer(stub.Renew.future(request, timeout=CALL_TIMEOUT_S), lambda _: False)
    except grpc.RpcError as error:
        raise to_atoll_error(error, member.work_address) from None
    return identity_from(key, reply.certificate_pem, reply.ca_pem, now)


class Renewal:
    """The one place of a daemon where its identity changes. ``use(identity)`` has it shown to whoever
    connects from then on."""

    def __init__(
        self,
        config: WorkerConfig,
        member: Callable[[], Membership],
        use: Callable[[Identity], None],
        clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config, self._member, self._use = config, member, use
        self._clock, self._draw = clock, draw
        self._changing = threading.Lock()
        self._timer: threading.Timer | None = None

    def keep(self, stopped: Callable[[float], bool]) -> None:
        """Thread: look now and then. ``stopped(seconds)`` waits, and returns True at the end."""
        while True:
            self._look(anyway=False)
            if stopped(LOOK_EVERY_S):
                break
        if self._timer is not None:
            self._timer.cancel()

    def trust(self, ca_pem: bytes, left_s: float) -> None:
        """Trust these authorities from now on, and renew within a share of ``left_s`` where the certificate
        is of the older one. Returns at once.

        Raises AccessDenied when none of them issued the certificate; StorageError.
        """
        with self._changing:
            held = self._member().identity
            if held is None:
                return
            found = held.trusting(ca_pem)
            if found is not held:
                found.save(self._config.identity_dir)
                self._use(found)
        if not found.of_newest():
            self._renew_in(self._draw() * SPREAD * left_s, left_s)

    def _renew_in(self, pause_s: float, left_s: float) -> None:
        if self._timer is not None and self._timer.is_alive():
            return

        def renew() -> None:
            self._timer = None
            identity = self._member().identity
            if identity is None or identity.of_newest() or self._look(anyway=True):
                return
            self._renew_in(min(LOOK_EVERY_S, max(LEAST_PAUSE_S, left_s / 10)), left_s)

        self._timer = threading.Timer(pause_s, renew)
        self._timer.name, self._timer.daemon = "atoll-renewal", True
        self._timer.start()

    def _look(self, *, anyway: bool) -> bool:
        """Renew where it is time; True when the certificate was."""
        found = renewed(self._config, self._member(), self._clock(), anyway=anyway)
        if found is None:
            return False
        try:
            with self._changing:
                found.save(self._config.identity_dir)
                self._use(found)
        except AtollError as error:
            log.warning("certificate.not_renewed", until=str(found.expires()), reason=str(error))
            return False
        log.info("certificate.renewed", until=str(found.expires()))
        return True
