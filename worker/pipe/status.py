"""A page that both processes map: what computes now, how far it is, whom it waits for, and what the daemon
takes of the cores.

The compute process writes the op that it begins, before it begins, so that the daemon can name it when
the process has died or does not end. Each field has one writer; a torn read shows an op's name beside
another's number, once in a very long while, in a message for people.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from protos.text_limits import clean

NAME_BYTES = 240
PEER_BYTES, WHAT_BYTES = 96, 24
STALE_S = 2.0  # a process that has not written for so long waits for nobody: it has stopped
_OP = struct.Struct(f"=Qdi{NAME_BYTES}s")  # begun, allowed seconds, bytes of name, name
_BEGUN = struct.Struct("=Q")
_COUNTS = struct.Struct("=QQQd")  # progress, memory bytes, the most of them, joules of GPUs
# Written, since, step, bytes of what and peer, both.
_WAITS = struct.Struct(f"=ddQBB{WHAT_BYTES}s{PEER_BYTES}s")
_DAEMON = struct.Struct("=d")
_OP_AT, _COUNTS_AT, _WAITS_AT, _DAEMON_AT = 0, 512, 640, 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """An op as the page shows it: its name and the seconds that nothing honest takes for it."""

    name: str
    allowed_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is awaited, and since when (``time.monotonic``, which both processes share); ``peer`` "": of the
    coordinator."""

    peer: str
    what: str  # a message's direction, "room", or "data"
    step: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Running:
    """What computes: ``begun`` counts ops; ``mark`` None: nothing does."""

    begun: int
    mark: Mark | None


class ComputeStatus:
    """The page of the compute process's arena."""

    def __init__(self, page: memoryview) -> None:
        self._page = page
        self._begun = 0

    # ------------------------------------------------------------ the compute process

    @staticmethod
    def encoded(mark: Mark) -> bytes:
        """What ``begin`` takes; made once for each op."""
        name = mark.name.encode(errors="replace")[:NAME_BYTES]
        return _OP.pack(0, mark.allowed_s, len(name), name)[_BEGUN.size :]

    def begin(self, encoded: bytes) -> None:
        """An op begins."""
        self._begun += 1
        page = self._page
        page[_BEGUN.size : _BEGUN.size + len(encoded)] = encoded
        _BEGUN.pack_into(page, _OP_AT, self._begun)

    def end(self) -> None:
        """Nothing computes."""
        self.begin(_NOTHING)

    def count(self, progress: int, memory_bytes: int, peak_bytes: int = 0, gpu_j: float = 0.0) -> None:
        """Signs of life so far, what is held on the device, and the most that its allocator has held since
        the stage was loaded (0 on a CPU, where the daemon asks the kernel). ``gpu_j``: energy counter of the
        GPUs, 0 without one."""
        _COUNTS.pack_into(self._page, _COUNTS_AT, progress, memory_bytes, peak_bytes, gpu_j)

    def wait(self, waiting: Waiting | None, now_s: float) -> None:
        """What is awaited now, None: nothing. Written again and again: see ``STALE_S``."""
        found = waiting or _NO_WAIT
        what, peer = found.what.encode()[:WHAT_BYTES], found.peer.encode()[:PEER_BYTES]
        _WAITS.pack_into(
            self._page, _WAITS_AT, now_s, found.since_s, found.step, len(what), len(peer), what, peer
        )

    # ------------------------------------------------------------ the daemon

    def waiting(self, now_s: float) -> Waiting | None:
        """What is awaited, None: nothing, or the process does not say so any more."""
        written_s, since_s, step, n_what, n_peer, what, peer = _WAITS.unpack_from(self._page, _WAITS_AT)
        if not n_what or not abs(now_s - written_s) <= STALE_S or not math.isfinite(since_s):
            return None
        words = [clean(text.decode(errors="replace"), PEER_BYTES) for text in (peer[:n_peer], what[:n_what])]
        return Waiting(words[0], words[1], step, min(since_s, now_s))

    def running(self) -> Running:
        """What computes now."""
        begun, allowed_s, length, name = _OP.unpack_from(self._page, _OP_AT)
        if length <= 0:
            return Running(begun, None)
        return Running(begun, Mark(clean(name[:length].decode(errors="replace"), NAME_BYTES), allowed_s))

    @property
    def progress(self) -> int:
        return int(_COUNTS.unpack_from(self._page, _COUNTS_AT)[0])

    @property
    def memory_bytes(self) -> int:
        return int(_COUNTS.unpack_from(self._page, _COUNTS_AT)[1])

    @property
    def peak_bytes(self) -> int:
        return int(_COUNTS.unpack_from(self._page, _COUNTS_AT)[2])

    @property
    def gpu_j(self) -> float:
        return float(_COUNTS.unpack_from(self._page, _COUNTS_AT)[3])


class DaemonStatus:
    """The page of the daemon's arena: seconds of CPU time that the daemon has taken."""

    def __init__(self, page: memoryview) -> None:
        self._page = page

    def write(self, cpu_s: float) -> None:
        _DAEMON.pack_into(self._page, _DAEMON_AT, cpu_s)

    @property
    def cpu_s(self) -> float:
        return float(_DAEMON.unpack_from(self._page, _DAEMON_AT)[0])


_NO_WAIT = Waiting("", "", 0, 0.0)
_NOTHING = ComputeStatus.encoded(Mark("", 0.0))
