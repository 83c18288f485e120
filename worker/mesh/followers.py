"""Followers as their leader sees them: processes of its own, or the ends of pipes to other hosts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from protos import atoll_compute_pb2 as pb
from protos.child_pipe import Gone, Pipe, pipe_from
from worker.machine.device import devices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.mesh.meeting import Board

PROGRAM = (sys.executable, "-P", "-m", "worker.mesh")


class Follower:
    """A process that follows, by its leader's end of the pipe; ``process`` is None on another host."""

    def __init__(self, pipe: Pipe, device: str = "", process: subprocess.Popen[bytes] | None = None) -> None:
        self.device, self.process = device, process
        self.rank = 0  # once it is one of the mesh
        self.found: pb.FollowerFound | None = None
        self.error = ""
        self._ready = self._over = False
        self._changed = threading.Condition()
        self._pipe = pipe

    def begin(self, board: Board, ended: Callable[[Follower], None]) -> None:
        """Begin to hear what it says; ``ended`` is called in that thread when there is no more of it."""
        arguments = (board, ended)
        threading.Thread(target=self._hear, args=arguments, name="atoll-mesh", daemon=True).start()

    def send(self, message: pb.ToFollower) -> None:
        """Send it a message. Raises Gone."""
        self._pipe.send(message)

    def is_there(self, until_s: float) -> bool:
        """Wait until it has found its device; False where it ends before, or is late."""
        return self._wait(lambda: self.found is not None, until_s)

    def is_ready(self, until_s: float) -> bool:
        """Wait until it has met the others; False as above."""
        return self._wait(lambda: self._ready, until_s)

    @property
    def over(self) -> bool:
        """True once nothing more comes from it."""
        return self._over

    def ending(self) -> str:
        """Return how it ended, in words."""
        if self.process is None:
            return "gone"
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"code {code}"

    def kill(self) -> None:
        """End it; on another host its guardian does so when the pipe closes."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._pipe.close()

    def _wait(self, there: Callable[[], bool], until_s: float) -> bool:
        with self._changed:
            while not there():
                left_s = until_s - time.monotonic()
                if self._over or left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def _hear(self, board: Board, ended: Callable[[Follower], None]) -> None:
        with contextlib.suppress(Gone, AtollError):
            while not self.error:
                self._take(self._pipe.receive(pb.FromFollower()), board)
        with self._changed:
            self._over = True
            self._changed.notify_all()
        ended(self)

    def _take(self, m: pb.FromFollower, board: Board) -> None:
        if m.WhichOneof("body") == "store":
            self.send(pb.ToFollower(answer=board.call(m.store)))
            return
        with self._changed:
            self.error = m.error
            self._ready = self._ready or m.ready
            if m.HasField("found"):
                self.found = m.found
            self._changed.notify_all()


def start_followers(devices: str) -> list[Follower]:
    """Start a process for each device but the first; they wait for their setup."""
    return [_started(device) for device in devices_of(devices)[1:]]


def followers_elsewhere(descriptors: Sequence[int]) -> list[Follower]:
    """Return the followers at the other ends of these pipes."""
    return [Follower(pipe_from(descriptor)) for descriptor in descriptors]


def _started(device: str) -> Follower:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [*PROGRAM, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Follower(Pipe(ours), device, process)
