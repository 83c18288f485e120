"""Channels to the coordinator, and its refusals as errors that a person can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import (
    AccessDenied,
    AtollError,
    ConnectionFailed,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from protos.app_words import clean
from protos.certificate_words import refused_server
from protos.credentials import COORDINATOR, channel_credentials, name_options
from protos.proxies import proxy_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.credentials import Identity

LOOK_S = 0.2  # between looks whether to go on waiting

# A connection that breaks during a handshake also mentions it: only these are about TLS itself.
_TLS_WORDS = ("certificate", "wrong_version_number", "ssl_error_ssl", "no peer certificate")


def open_channel(
    address: str,
    ca_pem: bytes | None,
    identity: Identity | None,
    max_message_bytes: int,
    *,
    use_proxy: bool,
) -> grpc.Channel:
    """A channel that connects at its first call; ``ca_pem`` None: no TLS."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_reconnect_backoff_ms", 1000),  # a restarted coordinator is found at once
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        proxy_option(use_proxy),
        # Every session is a connection of its own, so that an old one cannot hold up a new one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if ca_pem is None:
        return grpc.insecure_channel(address, options=options)
    options += name_options(COORDINATOR)
    return grpc.secure_channel(address, channel_credentials(ca_pem, identity), options=options)


def answer(call: Any, stopped: Callable[[float], bool]) -> Any:
    """The reply of a call begun with ``future``: whoever stops need not wait for its deadline.

    Raises grpc.RpcError, and ConnectionFailed once ``stopped(0.0)``.
    """
    while True:
        try:
            return call.result(timeout=LOOK_S)
        except grpc.FutureTimeoutError:
            if stopped(0.0):
                call.cancel()
                raise ConnectionFailed("stopped while waiting for an answer") from None


def as_atoll_error(error: grpc.RpcError, address: str, ca_pem: bytes | None = None) -> AtollError:
    """What went wrong with a call to ``address``, and what to do.

    ``ca_pem``: what its certificate was checked against, where why it was refused is to be found out.
    """
    # Every error of a call is also a grpc.Call, which the stubs do not say.
    code = getattr(error, "code", lambda: None)()
    details = str(getattr(error, "details", lambda: error)())
    words = clean(details, 400)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AccessDenied(words)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolMismatch(words)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return StorageError(words)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.NOT_FOUND:
            return UsageError(words)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{address} does not know this call ({words}); update the older side")
    lower = words.lower()
    if "certificate_verify_failed" in lower or "verify failed" in lower:
        return refused_server(address, ca_pem)
    if any(word in lower for word in _TLS_WORDS):
        return AccessDenied(
            f"no TLS session with {address}: {words[:160]}; is it the coordinator's entry port, and was "
            "it started without --insecure?"
        )
    # The transport library's chain of causes: only the last says what happened.
    cause = words.rpartition("remote host: ")[2].rpartition("last error: ")[2].rstrip(") ")
    return ConnectionFailed(
        f"{address} does not answer ({cause[:160] or code}); is `atoll serve` running there, and is the "
        "port open?"
    )
