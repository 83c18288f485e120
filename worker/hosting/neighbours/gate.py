"""A job's way in and out between the transport and the compute process.

The transport asks at once where a message goes, so the keys that are wanted, and their sizes, are known
here before any comes. What is neither from a neighbour that the coordinator named nor of the job that it
assigned does not pass, either way. What a training step sends is logged, for who takes over a neighbour.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from worker.hosting import TUNED
from worker.hosting.neighbours.replays import Replays
from worker.pipe.keys import from_key, to_key
from worker.transport.contract import PeerLost
from worker.transport.frames import NOT_HERE, Direction

if TYPE_CHECKING:
    from worker.hosting.neighbours.send_log import SendLog
    from worker.pipe.arena import Allocator, Block
    from worker.transport.frames import MessageKey
    from worker.transport.network import PeerNetwork

MAX_WANTED = 1 << 20
MAX_BESIDE_BYTES = 1 << 30


@dataclass(slots=True)
class _Wanted:
    peer: str
    max_bytes: int
    blocks: int = 0


class Gate:
    """``Receiver`` of one job, and what it sends. ``tell`` must not wait."""

    def __init__(
        self,
        job: str,
        version: int,
        ranks: Mapping[str, int],
        network: PeerNetwork,
        incoming: Allocator,
        tell: Callable[[pb.ToCompute], object],
        sent: SendLog,
        end: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``ranks``: of the neighbours in plan ``version``, by their workers. ``end(cause)`` ends the
        process; like ``tell`` it must not wait. ``sent`` logs what is, and is closed with the gate."""
        self.job, self._version, self._ranks = job, version, ranks
        self._oldest = 0  # version that passes: steps may be repeated under those before
        self._former: Mapping[str, int] = {}  # neighbours before, whose steps are still repeated
        self._beside: dict[bool, Mapping[str, int]] = {False: {}, True: {}}  # by whether they compare
        self._standbys: Mapping[str, int] = {}  # both: whose steps workers beside the plan repeat
        self._network, self._incoming, self._tell, self._end = network, incoming, tell, end
        self._sent = sent
        self._replays = Replays(sent, network, lambda peer: peer not in self._ranks)
        self._beside_bytes = 0  # of messages that the arena has no room for
        self._lock = threading.RLock()
        self._wanted: dict[MessageKey, _Wanted] = {}
        self._begun_s: dict[tuple[str, MessageKey], float] = {}
        self._waiting: list[tuple[pb.Arrived, Block]] = []  # whole, and no room yet
        self._lent: dict[int, Block] = {}  # offset -> block that the compute process reads

    @property
    def logged_from(self) -> int:
        """See ``SendLog``."""
        return self._sent.logged_from

    def reconfigure(
        self, ranks: Mapping[str, int], version: int, step: int, *, repeating: bool = False
    ) -> None:
        """Be among other neighbours from ``step`` on, under plan ``version``; nothing of the versions before
        passes any more, and what was logged of the step is forgotten. ``repeating``: here steps before it are
        still being repeated under the versions before."""
        with self._lock:
            # Who repeats through several changes does so among the neighbours of any of them.
            self._former = {**self._former, **self._ranks} if repeating else {}
            self._ranks, self._version = ranks, version
            if not repeating:
                self._oldest = version
                self._wanted.clear()
                self._waiting.clear()
        if not repeating:
            self._network.forget(self.job, version - 1)
        self._replays.forget_but({**self._standbys, **ranks})
        self._sent.drop_from(step)

    def stand_by(self, ranks: Mapping[str, int], *, checks: bool = False) -> None:
        """Have these workers repeat the steps of neighbours' ranks, and no others."""
        with self._lock:
            self._beside[checks] = ranks
            self._standbys = {**self._beside[False], **self._beside[True]}
        self._replays.forget_but({**self._standbys, **self._ranks})

    def trim_log(self, step: int) -> None:
        """Nobody will ask for messages of steps before ``step``."""
        self._sent.trim(step)

    # ------------------------------------------------------------ the compute process

    def want(self, entries: Iterable[pb.Wanted]) -> None:
        """Take these messages from now on. Raises BadFrame."""
        with self._lock:
            for entry in entries:
                key = from_key(entry.key)
                if key.plan_version < self._oldest:
                    continue  # it has not heard yet
                self._check(entry.peer, key)
                if entry.max_bytes > self._incoming.arena.size:
                    raise BadFrame(f"a message of {entry.max_bytes} bytes wanted")
                self._wanted.setdefault(key, _Wanted(entry.peer, entry.max_bytes))
            if len(self._wanted) > MAX_WANTED:
                raise BadFrame(f"more than {MAX_WANTED} messages wanted")

    def step_over(self, step: int) -> None:
        """Messages of steps before ``step`` are not wanted any more."""
        with self._lock:
            self._wanted = {key: wanted for key, wanted in self._wanted.items() if key.step >= step}

    def send(self, m: pb.Outgoing, block: Block) -> None:
        """Send a message that lies in the compute process's arena. Raises BadFrame."""
        key = from_key(m.key)
        if key.plan_version < self._oldest and not m.log_only:
            return  # of a step that it has not heard to leave
        rank = self._check(m.peer, key)
        if not m.log_only:
            self._send(m, key, block)
        # Nobody waits for the end of a step that is repeated, so its messages may.
        payload = memoryview(block)  # type: ignore[arg-type]
        self._sent.append(rank, key, m.header, payload, wait=m.log_only)
        self._replays.logged()

    def _send(self, m: pb.Outgoing, key: MessageKey, block: Block) -> None:
        try:
            self._network.send(m.peer, key, m.header, memoryview(block), TUNED.full_s, m.more)  # type: ignore[arg-type]
        except PeerLost as lost:
            self.lost(lost.peer, lost.reason)
        except TimeoutError:
            raise BadFrame(f"more is queued for {m.peer} than may be") from None

    def freed(self, offsets: Iterable[int]) -> None:
        """The compute process has read these blocks."""
        with self._lock:
            for offset in offsets:
                self._lent.pop(offset, None)
            while self._waiting and self._lend(*self._waiting[0]):
                del self._waiting[0]

    def close(self) -> None:
        """Nothing passes any more."""
        self._network.unregister(self.job, self)
        self._network.forget(self.job)
        self._replays.close()
        self._sent.close()
        with self._lock:
            self._wanted.clear()
            self._waiting.clear()
            self._lent.clear()

    def _check(self, peer: str, key: MessageKey) -> int:
        """Return the rank that ``peer`` has. Raises BadFrame."""
        rank = self._ranks.get(peer, self._former.get(peer))
        if key.job != self.job or rank is None:
            raise BadFrame(f"a message of job {key.job[:60]!r} with {peer[:60]!r}, none of which is here")
        return rank

    # ------------------------------------------------------------ the transport

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        with self._lock:
            if _asks(key):
                return None if total or not self._may_ask(peer, key) else memoryview(bytearray())
            wanted = self._wanted.get(key)
            if (
                wanted is None
                or wanted.peer != peer
                or total > wanted.max_bytes
                or wanted.blocks >= TUNED.blocks_a_key
            ):
                return None
            self._begun_s[peer, key] = time.monotonic()
            if not total:
                return memoryview(bytearray())
            wanted.blocks += 1
            offset = self._incoming.allocate(total)
            # Where the arena is full, it is moved there as soon as there is room.
            block = np.empty(total, np.uint8) if offset is None else self._incoming.owned(offset, total)
            beside = total if offset is None else 0
            self._beside_bytes += beside
            weakref.finalize(block, self._over, wanted, beside).atexit = False
            if self._beside_bytes > MAX_BESIDE_BYTES:
                self._end("it does not read what its peers send")
            return memoryview(block)  # type: ignore[arg-type]

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        with self._lock:
            if _asks(key):
                if self._may_ask(peer, key):
                    rank = self._ranks.get(peer, self._standbys.get(peer, -1))
                    self._replays.ask(peer, rank, key)
                return
            now_s = time.monotonic()
            lasted_s = now_s - self._begun_s.pop((peer, key), now_s)
            arrived = pb.Arrived(
                peer=peer, key=to_key(key), header=header, size=len(payload), lasted_s=lasted_s
            )
            if not payload:
                self._tell(pb.ToCompute(arrived=arrived))
            elif not self._lend(arrived, payload.obj):  # type: ignore[arg-type]
                self._waiting.append((arrived, payload.obj))  # type: ignore[arg-type]

    def lost(self, peer: str, reason: str) -> None:
        self._tell(pb.ToCompute(lost=pb.LostPeer(peer=peer, reason=reason)))
        with self._lock:
            for entry in [entry for entry in self._begun_s if entry[0] == peer]:
                del self._begun_s[entry]

    def _may_ask(self, peer: str, key: MessageKey) -> bool:
        """Who is in a later plan than this worker has heard of asks again."""
        if peer in self._ranks:
            return key.plan_version <= self._version
        return peer in self._standbys

    def _lend(self, arrived: pb.Arrived, block: Block) -> bool:
        """Hand a message over; the lock is held. False when there is no room in the arena."""
        offset = self._incoming.arena.offset_of(block)
        if offset is None:
            offset = self._incoming.allocate(len(block))
            if offset is None:
                return False
            moved = self._incoming.owned(offset, len(block))
            moved[:] = block
            # The block that it came in counts until this one is freed.
            weakref.finalize(moved, _nothing, block).atexit = False
            block = moved
        arrived.offset = offset
        self._lent[offset] = block
        self._tell(pb.ToCompute(arrived=arrived))
        return True

    def _over(self, wanted: _Wanted, beside: int) -> None:
        with self._lock:
            wanted.blocks -= 1
            self._beside_bytes -= beside


def _asks(key: MessageKey) -> bool:
    """True for a neighbour's wish to have a step's messages again."""
    return key.direction is Direction.REPLAY and key.micro != NOT_HERE


def _nothing(_: object) -> None:
    """Keep a reference."""
