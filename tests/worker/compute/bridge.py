"""A compute process's network and its daemon's gate in one process: two arenas, two queues as the pipe."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos import atoll_compute_pb2 as pb
from tests.patience import HUNG_S
from worker.compute.ports import Arenas, DaemonNetwork, QueueBounds, Requests
from worker.hosting.neighbours.gate import Gate
from worker.hosting.neighbours.send_log import SendLog
from worker.pipe.arena import Allocator, Arena
from worker.spans import Spans

if TYPE_CHECKING:
    from tests.worker.links.hub import Hub

BOUNDS = QueueBounds(1 << 20, 64)


class Bridge:
    """Worker ``name`` of a hub, computing for one job; ``close`` ends its threads."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        stages: Mapping[str, int],
        room: int = 1 << 20,
        bounds: QueueBounds = BOUNDS,
        folder: Path | None = None,
        version: int = 1,
        first_step: int = 0,
    ) -> None:
        """``stages``: of the peers. ``folder``: of the send log; None: nothing is logged."""
        incoming, outgoing = Arena.make(room), Arena.make(room)
        self.arenas, self.spans = Arenas(incoming, outgoing), Spans()
        self._to_compute: queue.SimpleQueue[pb.ToCompute | None] = queue.SimpleQueue()
        self._to_daemon: queue.SimpleQueue[pb.FromCompute | None] = queue.SimpleQueue()
        self.requests = Requests(self._to_daemon.put)
        self.network = DaemonNetwork(self._to_daemon.put, self.requests, self.arenas, bounds, self.spans)
        self._port: Any = hub.port(name)
        self._stages, self._allocator = stages, Allocator(incoming)
        self._log = folder, version, first_step
        self.open_gate()
        self.held: list[object] = []
        """Blocks that a transport has not sent yet, where ``slow``."""
        self.slow = False
        self._threads = [
            threading.Thread(target=_serve, args=(self._to_compute, self._compute_hears)),
            threading.Thread(target=_serve, args=(self._to_daemon, self._daemon_hears)),
        ]
        for thread in self._threads:
            thread.start()
        for arena in (incoming, outgoing):
            arena.close_descriptor()

    def open_gate(self) -> None:
        """As when a job is assigned (again): the process stays."""
        folder, version, first_step = self._log
        log = SendLog(folder or Path(), "job", 1 << 24 if folder else 0, first_step)
        tell = self._to_compute.put
        self.gate = Gate("job", version, self._stages, self._port, self._allocator, tell, log)
        self._port.register("job", self.gate)

    def close(self) -> None:
        self.gate.close()
        self._to_compute.put(None)
        self._to_daemon.put(None)
        for thread in self._threads:
            thread.join(HUNG_S)

    def _compute_hears(self, message: pb.ToCompute) -> None:
        m = pb.ToCompute.FromString(message.SerializeToString())
        if m.freed:
            self.network.freed(m.freed)
        match m.WhichOneof("body"):
            case "arrived":
                self.network.arrived(m.arrived)
            case "lost":
                self.network.lost(m.lost.peer, m.lost.reason)
            case "answer":
                self.requests.answered(m.answer.request, m.answer)

    def _daemon_hears(self, message: pb.FromCompute) -> None:
        m = pb.FromCompute.FromString(message.SerializeToString())
        if m.freed:
            self.gate.freed(m.freed)
        match m.WhichOneof("body"):
            case "wanted":
                self.gate.want(m.wanted.messages)
            case "outgoing":
                block = self.arenas.outgoing.block(m.outgoing.offset, m.outgoing.size)
                weakref.finalize(block, self._not_needed, m.outgoing.offset)
                self.gate.send(m.outgoing, block)
                if self.slow:
                    self.held.append(block)
            case "connect":
                self._to_compute.put(pb.ToCompute(answer=pb.Answer(request=m.connect.request)))

    def _not_needed(self, offset: int) -> None:
        self._to_compute.put(pb.ToCompute(freed=[offset]))


def _serve(messages: queue.SimpleQueue[Any], heard: Callable[[Any], None]) -> None:
    while (message := messages.get()) is not None:
        heard(message)
        del message
