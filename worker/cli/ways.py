"""Part of the doctor: by which way this machine would be joined with others that may be closed themselves."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from hostos.addresses import join_address
from protos import atoll_control_pb2 as pb
from protos import bounds
from protos.relay_tickets import GREETING_BYTES, nonce_of
from protos.text_limits import clean

if TYPE_CHECKING:
    from worker.config import WorkerConfig

RELAY_TIMEOUT_S = 3.0
MAX_RELAYS = 16


def relays_of(config: WorkerConfig, reply: pb.HelloReply) -> list[tuple[str, int]]:
    """The coordinator's relays as this machine dials them. Raises BadFrame."""
    listed = bounds.count("relays", list(reply.relays), MAX_RELAYS)
    return [
        (
            bounds.host("relay's host", a.host) if a.host else config.host,
            bounds.within("relay's port", a.port, 1, 65535),
        )
        for a in listed
    ]


def greeted(relay: tuple[str, int]) -> tuple[float, str]:
    """Seconds until a relay greeted, and "" or why it did not."""
    started_s = time.perf_counter()
    try:
        with socket.create_connection(relay, RELAY_TIMEOUT_S) as connection:
            connection.settimeout(RELAY_TIMEOUT_S)
            first = b""
            while len(first) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES - len(first))):
                first += more
            nonce_of(first)
    except TimeoutError:
        return 0.0, f"no answer within {RELAY_TIMEOUT_S:.0f} s: a firewall drops it"
    except (OSError, BadFrame) as error:
        return 0.0, clean(getattr(error, "strerror", None) or str(error), 80)
    return time.perf_counter() - started_s, ""


def relay_name(relay: tuple[str, int]) -> str:
    """HOST:PORT."""
    return join_address(*relay)
