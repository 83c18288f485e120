"""The arithmetic of the router: first-in-first-out servers in virtual time. No clock, no socket.

A server carries bytes at one rate. A packet of ``n`` bytes whose first bit reaches a server at
``t`` starts at ``max(t, free)``, keeps it busy for ``n * s_per_byte`` and is through at
``start + n * s_per_byte``. Servers in a row work like cut-through switches: the next one gets
the first bit at this one's *start*, and the packet is through a row no sooner than through any
of its servers. So an idle path takes ``n / slowest rate + delay``: serialisation is counted
once, however many limits lie on the way.

Packets of different flows meet at shared servers. The order there is the order in which their
first bits arrive *there*, so a packet that had to wait comes back as an event at that time and
never reserves a later server ahead of others. What never waited is carried on at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush


class Server:
    """One rate limit and its waiting room."""

    __slots__ = ("buffer_s", "bytes", "drops", "free_s", "name", "s_per_byte")

    def __init__(self, name: str, mbit: float, buffer_ms: float) -> None:
        self.name = name
        self.free_s = 0.0  # when its last accepted packet is through
        self.bytes = 0
        self.drops = 0
        self.set(mbit, buffer_ms)

    def set(self, mbit: float, buffer_ms: float) -> None:
        """Change the figures; what is queued keeps its times."""
        self.s_per_byte = 8e-6 / mbit
        self.buffer_s = buffer_ms / 1000


class Flow:
    """One direction of one pair: the servers of its path, its delay, loss and counters."""

    __slots__ = ("_delay_after", "bytes", "cut", "drops", "lags", "loss", "out", "packets", "servers")

    def __init__(
        self, servers: Sequence[Server], delay_after: int, delay_s: float, loss: float, out: int
    ) -> None:
        """The delay lies behind the first ``delay_after`` servers (>= 1); ``out`` is the far end's key."""
        self.servers = tuple(servers)
        self.lags = [0.0] * (len(self.servers) + 1)  # seconds on the way to server i, or out
        self.lags[delay_after] = delay_s
        self._delay_after = delay_after
        self.loss = loss
        self.cut = False
        self.out = out
        self.packets = 0
        self.bytes = 0
        self.drops = 0

    def set(self, delay_s: float, loss: float) -> None:
        """Change the figures; packets on their way keep the delay they left with."""
        self.lags[self._delay_after] = delay_s
        self.loss = loss


# (due time, tie break, flow, next server, earliest finish, packet, size)
Event = tuple[float, int, Flow, int, float, bytes, int]


class Fabric:
    """All packets on their way: a heap of events."""

    def __init__(self, seed: int) -> None:
        self.heap: list[Event] = []
        self._sequence = 0
        self._random = random.Random(seed).random

    def enter(self, flow: Flow, packet: bytes, size: int, now_s: float) -> None:
        """A packet leaves its sender; it may be dropped by a cut, by chance or by a full buffer."""
        if flow.cut or (flow.loss and self._random() < flow.loss):
            flow.drops += 1
        else:
            self._walk(flow, 0, now_s, now_s, packet, size)

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Move everything up to ``now_s``; what leaves, as (out, packet) in order."""
        heap, leaving = self.heap, []
        while heap and heap[0][0] <= now_s:
            at_s, _, flow, hop, finish_s, packet, size = heappop(heap)
            if flow.cut:
                flow.drops += 1
            elif hop == len(flow.servers):
                flow.packets += 1
                flow.bytes += size
                leaving.append((flow.out, packet))
            else:
                self._walk(flow, hop, at_s, finish_s, packet, size)
        return leaving

    def next_s(self) -> float | None:
        """When the next event is due."""
        return self.heap[0][0] if self.heap else None

    def _walk(self, flow: Flow, hop: int, at_s: float, finish_s: float, packet: bytes, size: int) -> None:
        """Serve a packet whose first bit is at server ``hop`` at ``at_s``, and on while it need not wait."""
        servers, lags = flow.servers, flow.lags
        while True:
            server = servers[hop]
            start_s = server.free_s
            if start_s < at_s:
                start_s = at_s
            elif start_s - at_s > server.buffer_s:
                server.drops += 1
                flow.drops += 1
                return
            server.bytes += size
            server.free_s = through_s = start_s + size * server.s_per_byte
            hop += 1
            lag_s = lags[hop]
            finish_s = (through_s if through_s > finish_s else finish_s) + lag_s
            start_s += lag_s
            last = hop == len(servers)
            if last or start_s > at_s:
                self._sequence += 1
                due_s = finish_s if last else start_s
                heappush(self.heap, (due_s, self._sequence, flow, hop, finish_s, packet, size))
                return
