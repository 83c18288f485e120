"""Renewing this machine's certificate under the one that is still valid, long before it ends."""

from __future__ import annotations

import datetime as dt
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

log = structlog.get_logger()


def renewed(config: WorkerConfig, member: Membership, now: dt.datetime) -> Identity | None:
    """Have a new certificate made for a new key where it is time, and keep both; None where it is not, or
    could not be: then it is tried again at the next look."""
    held = member.identity
    if held is None or now < held.renewal_due():
        return None
    try:
        with member.channel(config) as channel:
            found = _renew(channel, member, held, now)
        found.save(config.identity_dir)
    except AtollError as error:
        log.warning("certificate.not_renewed", until=str(held.expires()), reason=str(error))
        return None
    log.info("certificate.renewed", until=str(found.expires()))
    return found


def _renew(channel: grpc.Channel, member: Membership, held: Identity, now: dt.datetime) -> Identity:
    """Raises AccessDenied, ConnectionFailed."""
    stub: Any = rpc.WorkStub(channel)
    key = new_key()
    request = pb.RenewRequest(csr_pem=signing_request(key, member.worker))
    try:
        reply: pb.RenewReply = answer(stub.Renew.future(request, timeout=CALL_TIMEOUT_S), lambda _: False)
    except grpc.RpcError as error:
        raise to_atoll_error(error, member.work_address) from None
    return identity_from(key, reply.certificate_pem, held.ca_pem, now)


def keep_renewed(
    config: WorkerConfig,
    member: Callable[[], Membership],
    use: Callable[[Identity], None],
    stopped: Callable[[float], bool],
    clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
) -> None:
    """Thread: look now and then, and have a new identity used. ``stopped(seconds)`` waits, and returns True
    at the end."""
    while True:
        found = renewed(config, member(), clock())
        if found is not None:
            use(found)
        if stopped(LOOK_EVERY_S):
            return
