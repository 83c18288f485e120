"""Bytes on the wire from a client to a server, counted by a relay on loopback that passes them on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

READ_BYTES = 1 << 16


@dataclass(slots=True)
class Counted:
    """``port`` of the relay, and bytes that clients have sent to it."""

    port: int
    sent_bytes: int = 0


@contextmanager
def counted(host: str, port: int) -> Iterator[Counted]:
    """A relay to ``host:port``, for as long as the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Counted(listener.getsockname()[1])
        threading.Thread(target=_accept, args=(listener, (host, port), found), daemon=True).start()
        yield found


def _accept(listener: socket.socket, server: tuple[str, int], found: Counted) -> None:
    with suppress(OSError):  # the block has ended
        while True:
            client, _ = listener.accept()
            other = socket.create_connection(server)
            for pair, count in (((client, other), found), ((other, client), None)):
                threading.Thread(target=_pass, args=(*pair, count), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, count: Counted | None) -> None:
    with suppress(OSError):
        while data := source.recv(READ_BYTES):
            if count is not None:
                count.sent_bytes += len(data)
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
