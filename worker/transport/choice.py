"""Choice between the two transports, for as long as there are two: ATOLL_TRANSPORT, "threads" by default.

Both speak the same messages, so a worker of one kind works with a worker of the other.
"""

from __future__ import annotations

import os

from atoll.errors import UsageError
from worker.transport import network as threads
from worker.transport.aio import network as aio

VARIABLE = "ATOLL_TRANSPORT"

Network = threads.PeerNetwork | aio.PeerNetwork


def network_class(kind: str | None = None) -> type[threads.PeerNetwork] | type[aio.PeerNetwork]:
    """The transport of this ``kind``, of the environment's for None. Raises UsageError."""
    kind = kind if kind is not None else os.environ.get(VARIABLE, "threads")
    if kind == "threads":
        return threads.PeerNetwork
    if kind == "asyncio":
        return aio.PeerNetwork
    raise UsageError(f"{VARIABLE}={kind!r}; give threads or asyncio")
