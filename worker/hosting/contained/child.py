"""One compute process: its pipe, its arenas, and how it ended."""

from __future__ import annotations

import contextlib
import queue
import re
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from hostos.files.refusals import disk, refusal
from protos import atoll_compute_pb2 as pb
from protos.child_pipe import Gone, Pipe, framed
from worker.hosting import TUNED
from worker.hosting.contained.environment import compute_environment
from worker.hosting.contained.launch import Ending, Launched
from worker.pipe.arena import Allocator, Arena
from worker.pipe.status import ComputeStatus, DaemonStatus

if TYPE_CHECKING:
    from worker.hosting.contained.sandbox import Sandbox, View

log = structlog.get_logger()

ARENA_BYTES = 2 << 30
"""Of addresses, each way; memory is taken as far as tensors are under way."""
MAX_UNREAD_BYTES = 256 << 20
SCRATCH = "compute"
"""The folder of compute processes' own files, each in one named by its daemon's process and a number."""
_SCRATCH_NAME = re.compile(r"[0-9]+-[0-9]+")
COMMAND = (sys.executable, "-P", "-m", "worker.compute")


class Child:
    """A compute process that was started for ``view``; ``alive`` until ``ended`` was called."""

    def __init__(
        self,
        view: View,
        sandbox: Sandbox,
        threads: int,
        scratch: Path,
        heard: Callable[[Child, pb.FromCompute], None],
        ended: Callable[[Child, Ending], None],
        followers: Sequence[socket.socket] = (),
    ) -> None:
        """``followers``: ends of pipes to processes that it leads, which are the process's from now on.
        ``heard`` is called with each message, in the child's own thread; an AtollError that it raises ends
        the process. ``ended`` is called once, in that thread. Raises StorageError."""
        self.view, self.scratch = view, scratch
        self._heard, self._ended = heard, ended
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._over = False
        self._freed: deque[int] = deque()
        self._freed_bytes = 0
        self.alive = True
        try:
            self._launch(sandbox, threads, followers)
        except OSError as error:  # descriptors, processes or memory are short; later they may not be
            with contextlib.suppress(OSError):
                scratch.rmdir()  # which takes no descriptor
            raise refusal(error, "start a compute process") from error
        for name, run in (("read", self._read), ("write", self._write)):
            threading.Thread(target=run, name=f"atoll-compute-{name}", daemon=True).start()

    def _launch(self, sandbox: Sandbox, threads: int, followers: Sequence[socket.socket]) -> None:
        """Start the process with its arenas and its pipe. OSError, after which every descriptor is closed."""
        with contextlib.ExitStack() as inherited, contextlib.ExitStack() as kept:
            for follower in followers:
                inherited.callback(follower.close)
            self.followers = [follower.fileno() for follower in followers]
            incoming = Arena.make(ARENA_BYTES)
            inherited.callback(incoming.close_descriptor)
            outgoing = Arena.make(ARENA_BYTES)
            inherited.callback(outgoing.close_descriptor)
            ours, theirs = socket.socketpair()
            inherited.callback(theirs.close)
            kept.callback(ours.close)
            given = [theirs.fileno(), incoming.descriptor, outgoing.descriptor, *self.followers]
            command = [*COMMAND, str(given[0])]
            for arena in (incoming, outgoing):
                command += [str(arena.descriptor), str(arena.size)]
            environment = compute_environment(threads, network=self.view.network)
            self.launched = Launched(command, given, self.view, environment, sandbox=sandbox)
            kept.pop_all()
        self.incoming, self.outgoing = Allocator(incoming), outgoing
        self.status = ComputeStatus(outgoing.head)
        self._daemon = DaemonStatus(incoming.head)
        self._pipe = Pipe(ours)

    def send(self, message: pb.ToCompute) -> None:
        """Send a message; never waits. A process that does not read is ended."""
        with self._lock:
            self._send(message)
            full = self._unread_bytes > MAX_UNREAD_BYTES
        if full and not self._over:
            self._over = True
            self.end("it does not read what it is sent")

    def freed(self, offset: int, size: int) -> None:
        """A block of the process's arena was read. Takes no lock: the interpreter may call this anywhere."""
        self._freed.append(offset)
        self._freed_bytes += size
        if len(self._freed) >= TUNED.freed_at_once or self._freed_bytes >= TUNED.freed_bytes:
            self._freed_bytes = 0
            self._wake.put(True)

    def _send(self, message: pb.ToCompute) -> None:
        """The lock is held, so that frames keep their order."""
        while self._freed:
            message.freed.append(self._freed.popleft())
        frame = framed(message)
        self._daemon.write(time.process_time())
        sent = 0
        if not self._unsent:
            with contextlib.suppress(Gone):  # whoever reads notices
                sent = self._pipe.offer(frame)
        if sent < len(frame):
            self._unsent.append(memoryview(frame)[sent:])
            self._unread_bytes += len(frame) - sent
            self._wake.put(True)

    def has_room(self, timeout_s: float) -> bool:
        """Wait until less than half of what may be unread is; False after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self.alive and self._unread_bytes > MAX_UNREAD_BYTES // 2:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(TUNED.arena_room_s)
        return True

    def end(self, cause: str) -> None:
        """As ``kill``, without waiting for it."""
        threading.Thread(target=self.kill, args=(cause,), daemon=True).start()

    def kill(self, cause: str) -> None:
        """End the process and all that it started."""
        self.launched.kill(cause)

    def close(self, timeout_s: float) -> None:
        """Ask it to end, end it after ``timeout_s``."""
        self.send(pb.ToCompute(stop=True))
        if self.launched.wait(timeout_s) is None:
            self.kill("the worker needs it no more")

    # ------------------------------------------------------------ the threads

    def _read(self) -> None:
        cause = ""
        try:
            while True:
                self._heard(self, self._pipe.receive(pb.FromCompute()))
        except Gone:
            if self.launched.wait(TUNED.ends_within_s) is None:
                cause = "it closed its pipe"
        except AtollError as error:
            cause = f"it broke the rules of its pipe: {error}"
        except Exception as error:  # the next process must not suffer from this one's
            log.exception("compute.fault")
            cause = f"{type(error).__name__} in this worker"
        if cause:
            self.launched.kill(cause)
        self._finish()

    def _finish(self) -> None:
        self.alive = False
        self._wake.put(False)
        self._pipe.close()
        ending = self.launched.wait()
        assert ending is not None  # noqa: S101 - waited without an end
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._ended(self, ending)

    def _write(self) -> None:
        """Thread: what did not fit into the pipe at once."""
        while self._wake.get():
            if self._freed:
                self.send(pb.ToCompute())
            while self._unsent:
                frame = self._unsent[0]
                try:
                    self._pipe.write(frame)
                except Gone:
                    return
                with self._lock:
                    self._unsent.popleft()
                    self._unread_bytes -= len(frame)


def make_scratch(state_dir: Path, name: str) -> Path:
    """Make an empty folder for what a compute process stores. Raises StorageError."""
    folder = state_dir / SCRATCH / name
    with disk(f"create {folder}", "choose another --state-dir"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
    return folder


def clear_scratch(state_dir: Path) -> None:
    """Remove the folders that compute processes of earlier daemons left: a kill -9 of a daemon leaves a
    stage's whole state. The folder is locked by its only daemon."""
    for folder in (state_dir / SCRATCH).glob("*"):
        if _SCRATCH_NAME.fullmatch(folder.name):  # other names may be anybody's: the user chose the folder
            shutil.rmtree(folder, ignore_errors=True)
