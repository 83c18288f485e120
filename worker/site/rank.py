"""A rank of a site but the first: it starts a contained process for each life of rank 0's, and ends both
together.

It holds the site's secret and the connection; the process has a pipe. Neither has a key of the fleet.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from atoll.backoff import Backoff
from atoll.errors import AccessDenied, ConnectionFailed
from protos import atoll_compute_pb2 as pb
from protos.child_pipe import framed
from worker.hosting.contained.environment import compute_environment
from worker.hosting.contained.launch import Launched
from worker.hosting.contained.limits import descendants, resident_bytes
from worker.hosting.contained.sandbox import View, chosen
from worker.machine.own_share import RESERVE_BYTES, held_bytes
from worker.ranks.gathering import HANDSHAKE_S, LEAVE, REFUSED, START, WELCOME, joined
from worker.ranks.sealed import Closed, Sealed

log = structlog.get_logger()

COMMAND = (sys.executable, "-P", "-m", "worker.mesh")
GONE_S = 300.0  # rank 0 may be away so long: its host is slow to start
AGAIN_FIRST_S, AGAIN_MOST_S = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What this rank computes with, and where."""

    rank: int
    size: int
    gathers: tuple[str, int]  # rank 0's address
    interface: str
    device: str  # cpu | cuda:N
    threads: int
    memory_bytes: int  # of this process; 0 on a GPU: all that is free there
    gpu_memory_bytes: int
    sandbox: str  # auto | off | require
    versions: str


class Rank:
    """One rank, until rank 0 sends it home or is gone."""

    def __init__(self, terms: Terms, secret: bytes) -> None:
        """UsageError for a sandbox that is required and not to be had."""
        self._terms, self._secret = terms, secret
        self._kind = "cuda" if terms.device.startswith("cuda") else "cpu"
        self._sandbox = chosen(terms.sandbox, self._kind)
        self._stopping = threading.Event()
        self._connection: Sealed | None = None

    def run(self) -> None:
        """Serve. Raises ConnectionFailed where rank 0 is away for long, AccessDenied where it refuses."""
        backoff, seen_s = Backoff(AGAIN_FIRST_S, AGAIN_MOST_S), time.monotonic()
        while not self._stopping.is_set():
            try:
                connection = self._connected()
                seen_s = time.monotonic()
                backoff.reset()
                if self._serve(connection):
                    return
            except (Closed, OSError) as error:
                if time.monotonic() - seen_s > GONE_S:
                    host, port = self._terms.gathers
                    why_not = str(error) or "it hangs up, as it does where its secret is another"
                    raise ConnectionFailed(f"no way to rank 0 at {host}:{port}: {why_not}") from None
            self._stopping.wait(backoff.next_s())

    def leave(self) -> None:
        """End; from any thread."""
        self._stopping.set()
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> Sealed:
        """Return a connection to rank 0, which knows this one."""
        terms = self._terms
        end = socket.create_connection(terms.gathers, HANDSHAKE_S)
        try:
            found = Sealed(end, self._secret, opener=True, timeout_s=HANDSHAKE_S)
            who = {"rank": terms.rank, "size": terms.size, "versions": terms.versions}
            found.send(json.dumps(who).encode())
            answer = found.receive(HANDSHAKE_S)
        except BaseException:
            end.close()
            raise
        if answer.startswith(REFUSED):
            found.close()
            raise AccessDenied(f"rank 0 refuses: {answer[len(REFUSED) :].decode(errors='replace')}")
        if answer != WELCOME:
            raise Closed
        self._connection = found
        return found

    def _serve(self, connection: Sealed) -> bool:
        """Wait for a start, and compute until that life is over; True where rank 0 sends this one home."""
        order = connection.receive()
        if order == LEAVE:
            return True
        if order != START:
            raise AccessDenied("an order of rank 0 that there is not")
        scratch = Path(tempfile.mkdtemp(prefix="atoll-rank-"))
        try:
            return self._live(connection, scratch)
        finally:
            connection.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _live(self, connection: Sealed, scratch: Path) -> bool:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            launched = Launched(
                [*COMMAND, str(theirs.fileno())],
                [theirs.fileno()],
                View((), (scratch,), self._kind, network=True),
                compute_environment(self._terms.threads, network=True),
                sandbox=self._sandbox,
            )
            theirs.close()
            try:
                ours.sendall(framed(pb.ToFollower(setup=self._setup(scratch))))
                connection.send(START)
                return joined(ours, connection, lambda data: self._bound(launched))
            finally:
                launched.kill("rank 0 needs it no more")
                ending = launched.wait()
                log.info("rank.over", rank=self._terms.rank, ending=str(ending))

    def _setup(self, scratch: Path) -> pb.FollowerSetup:
        terms = self._terms
        return pb.FollowerSetup(
            device=terms.device,
            threads=terms.threads,
            memory_bytes=terms.memory_bytes,
            gpu_memory_bytes=terms.gpu_memory_bytes,
            scratch_dir=str(scratch),
            interface=terms.interface,
        )

    def _bound(self, launched: Launched) -> None:
        """Bound what a stage may add to a process, once it has reported its device, idle."""
        if self._terms.memory_bytes and launched.bound is None:
            own = held_bytes() + resident_bytes(descendants(launched.pid)) + RESERVE_BYTES
            launched.limit_added(max(0, self._terms.memory_bytes - own))
