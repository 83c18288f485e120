"""A worker that an actor of Ray keeps on its node: `atoll-worker join` as a process of its own.

The actor computes nothing. The daemon is started as a user would start it, so its limits, its sandbox and
its compute process are those of any machine. A guard ends it with the actor, also where that was killed.
Nothing here imports Ray: what the actor is given comes as values.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from atoll.backoff import Backoff
from atoll.errors import AtollError, StorageError
from coordinator.cli.on_ray.shipped import ShippedFile, linked, unpacked
from hostos.app_guard import Guarded
from hostos.files.file_locks import lock
from hostos.files.private_files import private_folder

ENDS = (0, 2, 6, 7)  # codes of a daemon that another start does not cure: left, usage, access, protocol
PAUSE_FIRST_S, PAUSE_MOST_S = 1.0, 60.0
STEADY_S = 60.0  # a daemon that ran so long begins with short pauses again
LEAVE_S = 5.0  # daemons leave within 2 s; whoever is still there is killed
LOOK_EVERY_S = 0.2  # at what somebody else is to end
SHOWN_LINES = 5  # of the log, with a status
PROGRAM = ("-P", "-m", "worker.cli", "join")  # of this Python
JOINED = "worker.joined"


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to keep. ``arguments`` and ``environment``: of its `atoll-worker join`, beyond the node's.

    ``folder``: below ``base``, or below the user's state folder on the node, and of the node's name: for the
    daemon's state. ``data``: of a population, held once by each node. ``passing``: the folder goes when the
    worker leaves.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)  # with the token
    folder: str
    base: str = ""
    data: tuple[ShippedFile, ...] = ()
    passing: bool = False

    def place(self) -> Path:
        """The folder on this node; its name keeps nodes apart that share a home."""
        base = Path(self.base).expanduser() if self.base else Path.home() / ".local" / "state" / "atoll-ray"
        return base / (socket.gethostname() or "node") / self.folder


@dataclass
class Seen:
    """What is known of the worker, for a status."""

    state: str = "starting"  # or: joined, pausing, ended
    starts: int = 0
    code: int | None = None  # of the last end
    lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=SHOWN_LINES))


class Kept:
    """Keeps the worker of an ``Order`` running; an actor's class, and one for tests without Ray.

    The constructor returns at once. ``fetch`` reads what a reference of ``Order.data`` stands for.
    """

    def __init__(self, order: Order, fetch: Callable[[Any], bytes] | None = None) -> None:
        self._order, self._fetch, self._folder = order, fetch or _fetched, order.place()
        self._seen, self._begun_s = Seen(), time.time()
        self._lock, self._leaving, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._guarded: Guarded | None = None
        self._thread = threading.Thread(target=self._keep, name="atoll-kept", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the worker's state, where it is, and the end of its log."""
        with self._lock:
            running = self._guarded is not None
        return {
            "state": self._seen.state,
            "host": socket.gethostname(),
            "folder": str(self._folder),
            "process": os.getpid(),
            "running": running,
            "starts": self._seen.starts,
            "exit_code": self._seen.code,
            "since_s": self._begun_s,
            "log": "\n".join(self._seen.lines),
        }

    def leave(self, remove: bool = False) -> None:
        """Have the worker leave; returns when nothing of it runs. ``remove``: its state goes too."""
        self._leaving.set()
        with self._lock:
            guarded = self._guarded
        if guarded is not None:
            with suppress(psutil.Error):
                for daemon in psutil.Process(guarded.process.pid).children():
                    daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                guarded.process.wait(LEAVE_S)
            guarded.end()
        self._thread.join()
        if remove or self._order.passing:
            self._remove()

    def ended(self) -> dict[str, Any]:
        """Wait until the worker has ended for good; returns its status."""
        self._over.wait()
        return self.status()

    def _keep(self) -> None:
        """Thread: start the worker, again whenever it ends in a way that another start may cure."""
        pauses = Backoff(PAUSE_FIRST_S, PAUSE_MOST_S)
        try:
            while not self._leaving.is_set():
                begun_s = time.monotonic()
                try:
                    self._seen.code = self._run()
                except (AtollError, OSError) as error:
                    self._seen.code = getattr(error, "exit_code", StorageError.exit_code)
                    self._note(str(error))
                if self._seen.code in ENDS:
                    break
                if time.monotonic() - begun_s > STEADY_S:
                    pauses.reset()
                self._seen.state = "pausing"
                self._leaving.wait(pauses.next_s())
        finally:
            self._seen.state = "ended"
            self._over.set()

    def _run(self) -> int:
        """Run the daemon once; returns its exit code, negative for a signal's."""
        private_folder(self._folder)
        state = self._folder / "state"
        # The daemon inherits the lock: an actor that comes after a killed one waits until that one's is gone.
        held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not self._alone(held):
                return 0
            if self._order.data and not (state / "data").is_dir():
                self._bring_data(state)
            command = [sys.executable, *PROGRAM, *self._order.arguments]
            command += ["--state-dir", str(state), "--log-json"]
            with self._lock:
                if self._leaving.is_set():
                    return 0
                self._seen.state, self._seen.starts = "starting", self._seen.starts + 1
                guarded = self._guarded = Guarded(
                    command,
                    [held],
                    {**os.environ, **self._order.environment},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
        finally:
            os.close(held)
        assert guarded.process.stderr is not None  # noqa: S101 - it was started with a pipe
        try:
            self._follow(guarded.process.stderr)
            return guarded.process.wait()
        finally:
            guarded.end()
            guarded.process.stderr.close()
            with self._lock:
                self._guarded = None

    def _alone(self, held: int) -> bool:
        """Wait for the lock; False where the worker is to leave meanwhile."""
        while True:
            try:
                lock(held, wait=False)
                return True
            except BlockingIOError:
                if self._leaving.wait(LOOK_EVERY_S):
                    return False

    def _bring_data(self, state: Path) -> None:
        """Give the worker the population's data, which all hosts of this node share on the disk."""
        shared, part = self._folder.parent / "data", state / "data.part"
        unpacked(self._order.data, shared, self._fetch)
        private_folder(state)
        shutil.rmtree(part, ignore_errors=True)
        linked(shared, part)
        part.rename(state / "data")

    def _follow(self, stream: IO[bytes]) -> None:
        """Hand the daemon's log on to the actor's, until it ends."""
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            self._note(line)
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == JOINED:
                    self._seen.state = "joined"

    def _note(self, line: str) -> None:
        self._seen.lines.append(line[:1000])
        print(line, file=sys.stderr, flush=True)

    def _remove(self) -> None:
        """Remove the folder, and what the hosts of its node shared when this was the last of them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        parent = self._folder.parent
        with suppress(OSError):
            if {each.name for each in parent.iterdir()} <= {"data"}:
                shutil.rmtree(parent, ignore_errors=True)


def _fetched(reference: Any) -> bytes:
    import ray

    try:
        return bytes(ray.get(reference))
    except ray.exceptions.RayError as error:
        raise StorageError(f"Ray has lost data of this population: {str(error).strip()[:300]}") from None
