"""Getting in: greet the coordinator, reuse the stored identity or exchange the token for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from atoll.errors import AccessDenied, ConnectionFailed
from hostos.net.addresses import join_address
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.certificate_words import clock_words
from protos.credentials import (
    Identity,
    JoinToken,
    identity_from,
    new_key,
    of_one_coordinator,
    opened,
    read_token,
    signing_request,
    verify_certificate,
)
from protos.devices import device_metadata, device_name
from protos.grpc_errors import to_atoll_error
from protos.short_tokens import ShortToken
from worker.config import WorkerConfig
from worker.control.calls import answer, open_async_channel, open_channel
from worker.control.greeting import CALL_TIMEOUT_S, greet
from worker.control.pinned import opened_token

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOCK_OFF_S = 3600.0  # an hour: certificates bear a day, and last a third of their time beyond their renewal

log = structlog.get_logger()
RETRY_S = 0.4


@dataclass(frozen=True, slots=True)
class Membership:
    """Our identity at the coordinator, and where it takes sessions."""

    worker: str
    identity: Identity | None  # None: no TLS
    work_address: str
    clock_offset_s: float  # coordinator's wall clock minus ours
    overlap_s: float = 0.0  # for which two authorities are trusted yet; 0: there is one
    device: int = 0  # of the machine ``worker``, for which calls are made

    @property
    def name(self) -> str:
        """The worker id of the device."""
        return device_name(self.worker, self.device)

    def channel(self, config: WorkerConfig) -> grpc.Channel:
        ca = self.identity.ca_pem if self.identity else None
        return open_channel(
            self.work_address, ca, self.identity, config.max_message_bytes, use_proxy=config.use_proxy
        )

    def async_channel(self, config: WorkerConfig) -> grpc.aio.Channel:
        """The same for calls on the event loop that runs."""
        ca = self.identity.ca_pem if self.identity else None
        return open_async_channel(
            self.work_address, ca, self.identity, config.max_message_bytes, use_proxy=config.use_proxy
        )

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """Names us where no certificate does, and the device that calls."""
        machine = () if self.identity else (("atoll-worker", self.worker),)
        return (*machine, *device_metadata(self.device))


def join(
    config: WorkerConfig,
    stopped: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> Membership:
    """Become a member; tries again while there is no answer, up to ``connect_timeout_s``.

    ``stopped(seconds)`` waits and returns True when we should give up. Raises AccessDenied (wrong token,
    wrong CA), ProtocolMismatch, ConnectionFailed.
    """
    deadline_s = clock() + config.connect_timeout_s
    while True:
        try:
            identity, token = _credentials(config, stopped)
            ca = None if config.insecure else (identity.ca_pem if identity else _token_ca(token))
            with open_channel(
                config.entry_address, ca, None, config.max_message_bytes, use_proxy=config.use_proxy
            ) as channel:
                return _enter(config, rpc.EntryStub(channel), identity, token, ca, stopped)
        except ConnectionFailed:
            if clock() >= deadline_s:
                raise
        if stopped(RETRY_S):
            raise ConnectionFailed(f"gave up waiting for {config.entry_address}")


def find_work_address(config: WorkerConfig, member: Membership) -> Membership:
    """Find where the coordinator takes sessions now: a restarted one may have moved.

    Raises ConnectionFailed while it is away, AccessDenied when it or our certificate's time is another,
    ProtocolMismatch.
    """
    if member.identity is not None:
        # The work port ends a session under a certificate that has ended without a word.
        verify_certificate(member.identity.certificate_pem, member.identity.ca_pem)
    ca = member.identity.ca_pem if member.identity else None
    with open_channel(
        config.entry_address, ca, None, config.max_message_bytes, use_proxy=config.use_proxy
    ) as channel:
        reply, took_s = greet(rpc.EntryStub(channel), config.entry_address, ca)
    offset_s = reply.time_s + took_s / 2 - time.time()
    address = join_address(config.host, reply.work_port)
    identity = _trusting(member.identity, reply)
    return Membership(member.worker, identity, address, offset_s, reply.authorities.left_s)


def _trusting(identity: Identity | None, reply: pb.HelloReply) -> Identity | None:
    """The identity, trusting the authorities that the coordinator's greeting names. Raises AccessDenied when
    none of them issued its certificate."""
    named = reply.authorities.ca_pem
    return identity.trusting(named) if identity is not None and named else identity


def note_clock(offset_s: float) -> None:
    """Log a clock that is off by so much that certificates would soon, or do, look invalid. ``offset_s``: the
    coordinator's clock minus ours."""
    if abs(offset_s) > CLOCK_OFF_S:
        log.warning("clock.wrong", reason=f"{clock_words(offset_s)}: set the clock, or the coordinator's")


def _credentials(
    config: WorkerConfig, stopped: Callable[[float], bool]
) -> tuple[Identity | None, JoinToken | None]:
    """The stored identity where it fits the token, and the token. Raises AccessDenied without both, and as
    ``opened_token``."""
    if config.insecure:
        return None, None
    given = read_token(config.token) if config.token else None
    try:
        identity = Identity.load(config.identity_dir)
    except AccessDenied:
        if given is None:
            raise
        identity = None
    token = _opened(config, given, identity, stopped) if isinstance(given, ShortToken) else given
    if identity is not None and token is not None and not _fits(identity, token):
        identity = None  # a token of another coordinator, or of its next authority: enroll there
    if identity is None and token is None:
        raise AccessDenied(
            f"no join token given and no identity in {config.identity_dir}; run `atoll-worker join "
            f"{config.entry_address} --token TOKEN` (or set ATOLL_TOKEN); `atoll token create` makes one"
        )
    return identity, token


def _opened(
    config: WorkerConfig, given: ShortToken, identity: Identity | None, stopped: Callable[[float], bool]
) -> JoinToken:
    """The long form of a short token, by an authority that is trusted already, else by the coordinator's."""
    if identity is not None:
        with suppress(AccessDenied):
            return opened(given, identity.ca_pem)
    return opened_token(config, given, stopped)


def _fits(identity: Identity, token: JoinToken) -> bool:
    """True when both are of one coordinator, and an authority of the token, or the newest one, issued the
    certificate."""
    if not of_one_coordinator(identity.ca_pem, token.ca_pem):
        return False
    try:
        return identity.of_newest() or bool(identity.trusting(token.ca_pem))
    except AccessDenied:
        return False


def _token_ca(token: JoinToken | None) -> bytes:
    if token is None:
        raise AccessDenied("no join token given")
    return token.ca_pem


def _enter(
    config: WorkerConfig,
    stub: Any,
    identity: Identity | None,
    token: JoinToken | None,
    ca: bytes | None,
    stopped: Callable[[float], bool],
) -> Membership:
    reply, took_s = greet(stub, config.entry_address, ca, stopped=stopped)
    offset_s = reply.time_s + took_s / 2 - time.time()
    note_clock(offset_s)
    if identity is not None:
        address = join_address(config.host, reply.work_port)
        found = _trusting(identity, reply)
        if found is not None and found is not identity:
            found.save(config.identity_dir)
        return Membership(identity.name, found, address, offset_s, reply.authorities.left_s)
    key = new_key()
    request = pb.EnrollRequest(
        protocol=PROTOCOL_VERSION,
        csr_pem=signing_request(key, config.shown_name),
        name=config.shown_name,
    )
    try:
        call = stub.Enroll.future(request, timeout=CALL_TIMEOUT_S, metadata=token.metadata if token else ())
        enrolled: pb.EnrollReply = answer(call, stopped)
    except grpc.RpcError as error:
        raise to_atoll_error(error, config.entry_address) from None
    address = join_address(config.host, enrolled.work_port or reply.work_port)
    if ca is None:
        return Membership(enrolled.worker, None, address, offset_s)
    if not of_one_coordinator(enrolled.ca_pem, ca):
        raise AccessDenied(f"{config.entry_address} has another CA than the token's; get a new token")
    made = identity_from(key, enrolled.certificate_pem, enrolled.ca_pem)
    made.save(config.identity_dir)
    return Membership(made.name, made, address, offset_s)
