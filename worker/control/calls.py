"""Channels to the coordinator, and calls that can be given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from atoll.errors import ConnectionFailed
from hostos.net.proxies import proxy_option
from protos.credentials import COORDINATOR, channel_credentials, name_options
from protos.message_sizes import Careful

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.credentials import Identity

LOOK_S = 0.2  # between looks whether to go on waiting


def open_channel(
    address: str,
    ca_pem: bytes | None,
    identity: Identity | None,
    max_message_bytes: int,
    *,
    use_proxy: bool,
) -> grpc.Channel:
    """A channel that connects at its first call; ``ca_pem`` None: no TLS. Replies that cost more than they
    may are not parsed."""
    channel = _open(grpc, address, ca_pem, identity, max_message_bytes, use_proxy)
    return cast("grpc.Channel", Careful(channel))


def open_async_channel(
    address: str,
    ca_pem: bytes | None,
    identity: Identity | None,
    max_message_bytes: int,
    *,
    use_proxy: bool,
) -> grpc.aio.Channel:
    """The same for calls on the event loop that runs."""
    return cast("grpc.aio.Channel", _open(grpc.aio, address, ca_pem, identity, max_message_bytes, use_proxy))


def _open(
    library: Any,
    address: str,
    ca_pem: bytes | None,
    identity: Identity | None,
    max_message_bytes: int,
    use_proxy: bool,
) -> Any:
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
        return library.insecure_channel(address, options=options)
    options += name_options(COORDINATOR)
    return library.secure_channel(address, channel_credentials(ca_pem, identity), options=options)


def answer(call: Any, stopped: Callable[[float], bool]) -> Any:
    """Return the reply of a call begun with ``future``; a worker that stops need not wait for its deadline.

    Raises grpc.RpcError, and ConnectionFailed once ``stopped(0.0)``.
    """
    while True:
        try:
            return call.result(timeout=LOOK_S)
        except grpc.FutureTimeoutError:
            if stopped(0.0):
                call.cancel()
                raise ConnectionFailed("stopped while waiting for an answer") from None
