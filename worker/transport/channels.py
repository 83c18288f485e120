"""gRPC set up for long-lived byte streams between workers: options, TLS, one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import grpc._common

from atoll.errors import ConnectionFailed
from protos.credentials import channel_credentials, name_options, server_credentials
from protos.proxies import proxy_option
from worker.transport.bundle import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from protos.credentials import Identity

# gRPC wakes every thread that waits for a call ten times a second, for signal handlers of a main
# thread that Python interrupts by itself. That is for nothing, as what is waited for is notified, and a
# hundred such threads took a tenth of a core, on a host with an eighth of one nearly all.
grpc._common.MAXIMUM_WAIT_TIMEOUT = IDLE_WAKE_S = 5.0

METHOD = "/atoll.v1.Peer/Frames"
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    # Each connection to a peer is a TCP flow of its own.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(
    identity: Identity | None, peer: str, address: tuple[str, int], *, use_proxy: bool
) -> grpc.Channel:
    """A connection of its own to ``address`` that accepts nobody but ``peer`` there."""
    options = [*_OPTIONS, proxy_option(use_proxy)]
    if identity is None:
        return grpc.insecure_channel(_target(address), options=options)
    credentials = channel_credentials(identity.ca_pem, identity)
    return grpc.secure_channel(_target(address), credentials, options=[*options, *name_options(peer)])


class PeerServer:
    """The listening side; each stream runs ``accept`` in a thread of a bounded pool."""

    def __init__(
        self,
        identity: Identity | None,
        listen: tuple[str, int],
        accept: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
        max_connections: int,
    ) -> None:
        """Raises ConnectionFailed when the port cannot be opened."""
        self._pool = futures.ThreadPoolExecutor(max_connections, "peer-serve")
        handler = grpc.method_handlers_generic_handler(
            "atoll.v1.Peer", {"Frames": grpc.stream_stream_rpc_method_handler(accept)}
        )
        self._server = grpc.server(
            self._pool, [handler], options=_OPTIONS, maximum_concurrent_rpcs=max_connections
        )
        target = _target(listen)
        try:
            if identity is not None:
                self.port = self._server.add_secure_port(target, server_credentials(identity, mutual=True))
            else:
                self.port = self._server.add_insecure_port(target)
        except RuntimeError:
            raise ConnectionFailed(f"cannot listen on {target}; choose another port") from None
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(1.0)
        self._pool.shutdown(wait=True, cancel_futures=True)


def _target(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
