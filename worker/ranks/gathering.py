"""The ranks of a site as rank 0 gathers them: each keeps a sealed connection here, which is joined to a pipe
of the process that leads for one life of that process.

A rank says in its first frame who it is; ``START`` has it start its process, which it confirms; from then on
frames are the bytes of the pipe, both ways. When either end closes, so does the other; then the rank connects
again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import structlog

from atoll.errors import AccessDenied, UsageError
from worker.ranks.sealed import MOST_BYTES, Closed, Sealed

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

START, WELCOME, REFUSED = b"start", b"welcome", b"refused "
LEAVE = b""  # a frame that no pipe sends
HANDSHAKE_S = 5.0
STARTS_S = 10.0
FIRST_S, AGAIN_S = 240.0, 10.0  # until every rank is there, at first and after a loss
AT_ONCE = 64  # handshakes; who knocks beyond is sent away
MOST_RANKS = 1024


class Reached(NamedTuple):
    """Where rank 0 takes connections, and the network device of the site there."""

    host: str
    port: int
    interface: str


class Gathering:
    """Ranks 1 to ``size`` - 1 of a site; any thread."""

    def __init__(self, size: int, secret: bytes, at: Reached, versions: str) -> None:
        """``versions``: of what has to be the same everywhere. UsageError where the address cannot be had."""
        if not 2 <= size <= MOST_RANKS:
            raise UsageError(f"a site of {size} processes; from 2 to {MOST_RANKS}")
        self.size, self.interface = size, at.interface
        self._secret, self._versions = secret, versions
        self._changed = threading.Condition()
        self._idle: dict[int, Sealed] = {}
        self._busy: set[Sealed] = set()
        self._wait_s = FIRST_S
        self._closed = False
        self._knocking = threading.Semaphore(AT_ONCE)
        try:
            self._listening = socket.create_server((at.host, at.port))
        except OSError as error:
            raise UsageError(
                f"cannot gather a site at {at.host}:{at.port}: {error.strerror}; give another --site-port"
            ) from None
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._take_in, name="atoll-ranks", daemon=True).start()

    def pipes(self) -> list[socket.socket]:
        """Return an end of a pipe to each rank's process, which is started; the end closes where a rank does
        not come in time, and when its process ends."""
        found, wait_s = [], self._wait_s
        self._wait_s = AGAIN_S
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            found.append(theirs)
            arguments, name = (rank, ours, time.monotonic() + wait_s), f"atoll-rank-{rank}"
            threading.Thread(target=self._serve, args=arguments, name=name, daemon=True).start()
        return found

    def close(self) -> None:
        """Send the ranks home."""
        with self._changed:
            self._closed = True
            there = [*self._idle.values(), *self._busy]
            self._idle.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in there:
            with contextlib.suppress(Closed):
                connection.send(LEAVE)
            connection.close()

    # ------------------------------------------------------------ who comes

    def _take_in(self) -> None:
        """Thread: connections."""
        while True:
            try:
                end, address = self._listening.accept()
            except OSError:
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, 0.1):
                        return
                continue  # descriptors are short
            if not self._knocking.acquire(blocking=False):
                end.close()
                continue
            arguments = (end, str(address[0]))
            threading.Thread(target=self._greet, args=arguments, name="atoll-rank-in", daemon=True).start()

    def _greet(self, end: socket.socket, address: str) -> None:
        try:
            connection = Sealed(end, self._secret, opener=False, timeout_s=HANDSHAKE_S)
            rank, reason = self._who(connection.receive(HANDSHAKE_S))
            connection.send(REFUSED + reason.encode() if reason else WELCOME)
        except (Closed, TimeoutError, AccessDenied) as error:
            log.warning("rank.refused", address=address, reason=str(error) or "it closed the connection")
            end.close()
            return
        finally:
            self._knocking.release()
        if reason:
            log.warning("rank.refused", address=address, reason=reason)
            return connection.close()
        with self._changed:
            before = self._idle.pop(rank, None)
            if not self._closed:
                self._idle[rank] = connection
            self._changed.notify_all()
        for left in (before, connection if self._closed else None):
            if left is not None:
                left.close()
        return None

    def _who(self, first: bytes) -> tuple[int, str]:
        """Return the rank that speaks, and why it is refused ("": it is not)."""
        try:
            m = json.loads(first)
            rank, size, versions = int(m["rank"]), int(m["size"]), str(m["versions"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return 0, "it does not say which rank it is"
        if size != self.size or not 1 <= rank < size:
            return rank, f"rank {rank} of {size} in a site of {self.size}"
        if versions != self._versions:
            return rank, f"rank {rank} has {versions[:200]}, rank 0 has {self._versions}"
        return rank, ""

    # ------------------------------------------------------------ one life of a process

    def _serve(self, rank: int, pipe: socket.socket, until_s: float) -> None:
        """Thread: join a rank's connection to a pipe."""
        try:
            connection = self._started(rank, pipe, until_s)
            if connection is None:
                log.warning("rank.missing", rank=rank)
                return
            with self._changed:
                self._busy.add(connection)
            try:
                joined(pipe, connection)
            finally:
                with self._changed:
                    self._busy.discard(connection)
                connection.close()
        finally:
            pipe.close()

    def _started(self, rank: int, pipe: socket.socket, until_s: float) -> Sealed | None:
        """Return a connection whose rank has started its process; None where none has in time."""
        while (connection := self._awaited(rank, pipe, until_s)) is not None:
            try:
                connection.send(START)
                if connection.receive(STARTS_S) == START:
                    return connection
            except (Closed, TimeoutError, AccessDenied):
                pass
            connection.close()  # it was of an earlier life
        return None

    def _awaited(self, rank: int, pipe: socket.socket, until_s: float) -> Sealed | None:
        with self._changed:
            while rank not in self._idle:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._closed or _over(pipe):
                    return None
                self._changed.wait(min(left_s, 1.0))
            return self._idle.pop(rank)


def joined(
    pipe: socket.socket, connection: Sealed, passed: Callable[[bytes], None] = lambda data: None
) -> bool:
    """Carry bytes both ways until either end closes, then close both; ``passed`` sees what leaves the pipe.
    Return whether the other end has sent this one home."""

    def outward() -> None:
        with contextlib.suppress(Closed, OSError):
            while data := pipe.recv(MOST_BYTES):
                passed(data)
                connection.send(data)
        _end(pipe, connection)

    threading.Thread(target=outward, name="atoll-rank-out", daemon=True).start()
    try:
        while (data := connection.receive()) != LEAVE:
            pipe.sendall(data)
        return True
    except (Closed, OSError):
        pass
    except AccessDenied as error:
        log.warning("rank.refused", reason=str(error))
    finally:
        _end(pipe, connection)
    return False


def _end(pipe: socket.socket, connection: Sealed) -> None:
    with contextlib.suppress(OSError):
        pipe.shutdown(socket.SHUT_RDWR)
    connection.close()


def _over(pipe: socket.socket) -> bool:
    """Return whether the process at the pipe's other end is gone; what it has sent stays."""
    with contextlib.suppress(BlockingIOError):
        return not pipe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False
