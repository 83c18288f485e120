"""How the processes of a mesh meet: a file that all of them see, or the leader's board through their pipes.

The board is a store of torch.distributed whose calls travel on the same pipes as the leader's orders, so that
whoever is not of the mesh can neither read nor write what its processes agree on.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from atoll.errors import AtollError
from atoll.mesh.group import Processes
from protos import atoll_compute_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_KEYS = 65_536  # a pair of processes takes two
POLL_S = 0.01
MEETS_WITHIN = timedelta(seconds=300)


class Board:
    """Values by key, which every process of a mesh may read and write; thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def call(self, m: pb.StoreCall) -> pb.StoreAnswer:
        """Do what a process asks for. AtollError for a call that there is not, and a full board."""
        with self._lock:
            held = self._values.get(m.key)
            if m.call != "get" and held is None and len(self._values) >= MOST_KEYS:
                raise AtollError(f"a mesh with more than {MOST_KEYS} keys on its board")
            match m.call:
                case "get":
                    return pb.StoreAnswer(request=m.request, found=held is not None, value=held or b"")
                case "set":
                    self._values[m.key] = m.value
                    return pb.StoreAnswer(request=m.request, found=True)
                case "add":
                    amount = int(held or b"0") + m.amount
                    self._values[m.key] = str(amount).encode()
                    return pb.StoreAnswer(request=m.request, found=True, amount=amount)
        raise AtollError(f"no call of a board: {m.call[:40]!r}")


class BoardStore(dist.Store):  # type: ignore[name-defined,misc]
    """The board as a store of torch.distributed; ``call`` asks it."""

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def call(self, m: pb.StoreCall) -> pb.StoreAnswer:
        """Ask the board."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.call(
            pb.StoreCall(call="set", key=key, value=value.encode() if isinstance(value, str) else value)
        )

    def get(self, key: str) -> bytes:
        """Return a value, once it is there. TimeoutError."""
        self.wait([key])
        return self.call(pb.StoreCall(call="get", key=key)).value

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""
        return self.call(pb.StoreCall(call="add", key=key, amount=value)).amount

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these are there."""
        return all(self.call(pb.StoreCall(call="get", key=key)).found for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = MEETS_WITHIN) -> None:
        """Wait until all of these are there. TimeoutError."""
        until_s = time.monotonic() + min(timeout, MEETS_WITHIN).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise TimeoutError(f"processes of this mesh did not meet within {MEETS_WITHIN}")
            time.sleep(POLL_S)


class LeadersStore(BoardStore):
    """The leader's own way to its board."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def call(self, m: pb.StoreCall) -> pb.StoreAnswer:
        return self._board.call(m)


class FollowersStore(BoardStore):
    """A follower's way to the board: ``send`` asks, ``answered`` takes what comes back in another thread."""

    def __init__(self, send: Callable[[pb.FromFollower], None]) -> None:
        super().__init__()
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[pb.StoreAnswer]] = {}

    def call(self, m: pb.StoreCall) -> pb.StoreAnswer:
        m.request = next(self._numbers)
        answer: queue.SimpleQueue[pb.StoreAnswer] = queue.SimpleQueue()
        self._waiting[m.request] = answer
        try:
            self._send(pb.FromFollower(store=m))
            return answer.get()
        finally:
            del self._waiting[m.request]

    def answered(self, m: pb.StoreAnswer) -> None:
        """Give an answer to who asked for it."""
        if (waiting := self._waiting.get(m.request)) is not None:
            waiting.put(m)


def joined(store: BoardStore | Path, rank: int, size: int, interface: str = "") -> Processes:
    """Return the group of processes that meet in a store or a file; waits for all of them.

    ``interface``: the network device by which they reach each other; "": the loopback device, which in a
    sandbox is its own.
    """
    for library in ("GLOO", "NCCL"):
        name = f"{library}_SOCKET_IFNAME"
        if interface:
            os.environ[name] = interface
        else:
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    found = dist.FileStore(str(store), size) if isinstance(store, Path) else store  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=found, rank=rank, world_size=size)
    world = dist.group.WORLD
    if world is None:
        raise AtollError("torch.distributed has no group")
    return Processes(world)
