"""A slow, distant link on loopback, without root: rate and delay per peer, from a small file.

``{"self": "w1", "peers": {"w2": {"mbit": 8, "ms": 40}, "127.0.1.3": {...}}, "uplink": {"mbit": 20}}``
describes what this process sends: each peer by the name in its own file or by the address dialled
(``"names": {"127.0.1.3": "w3"}`` makes them one), all of them through the optional uplink.
Approximate: TCP and TLS overhead, loss and router buffers are not modelled; the lab's namespaces
are the real thing.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAX_FILE_BYTES = 1 << 20


class Rate:
    """A serial resource of ``mbit`` Mbit/s; several links may share one."""

    def __init__(self, mbit: float) -> None:
        self._bytes_per_s = mbit * 125_000
        self._free_s = 0.0
        self._lock = threading.Lock()

    def occupy(self, now_s: float, nbytes: int) -> float:
        """Queue ``nbytes``; returns when the last of them has left."""
        with self._lock:
            self._free_s = max(now_s, self._free_s) + nbytes / self._bytes_per_s
            return self._free_s


@dataclass(frozen=True, slots=True)
class Pipe:
    """The way to one peer: rates in series, then a one-way delay."""

    rates: tuple[Rate, ...]
    delay_s: float

    def depart(self, now_s: float, nbytes: int) -> float:
        """When the last byte has left this end."""
        return max((rate.occupy(now_s, nbytes) for rate in self.rates), default=now_s)


class Shaper:
    """The pipes of one process."""

    def __init__(self, label: str, pipes: dict[str, Pipe]) -> None:
        self.label = label
        self._pipes = pipes

    @classmethod
    def load(cls, path: Path) -> Shaper:
        """Read a shaper file. Raises UsageError naming what is wrong in it."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"shaper file {path} is larger than {MAX_FILE_BYTES} bytes")
            spec = json.loads(path.read_text())
            uplink = spec.get("uplink")
            shared = (Rate(_positive(uplink["mbit"])),) if uplink else ()
            pipes = {}
            for name, link in spec["peers"].items():
                own = (Rate(_positive(link["mbit"])),) if "mbit" in link else ()
                pipes[str(name)] = Pipe((*own, *shared), float(link.get("ms", 0)) / 1000)
            for address, name in spec.get("names", {}).items():
                pipes[str(name)] = pipes[str(address)]
            return cls(str(spec["self"]), pipes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"shaper file {path} is not usable ({type(error).__name__}: {error}); expected "
                '{"self": NAME, "peers": {NAME_OR_ADDRESS: {"mbit": 8, "ms": 40}}}'
            ) from None

    def pipe(self, *names: str) -> Pipe | None:
        """The pipe to the peer known under any of ``names``; None: not shaped."""
        return next((self._pipes[name] for name in names if name in self._pipes), None)


class Source(Protocol):
    """Where frames come from: one connection's sending half."""

    @property
    def ended(self) -> bool:
        """Nothing more will come than what is queued."""

    def next_frame(self, timeout_s: float | None) -> bytes | None:
        """The next frame; b"" when none came in time, None at the end."""

    def rest(self, seconds: float) -> None:
        """Wait, less when the source ends."""


def shaped(pipe: Pipe, source: Source, clock: Callable[[], float]) -> Iterator[bytes]:
    """The source's frames at the pipe's pace.

    A frame is pulled only when the link is free, so urgent ones still overtake.
    """
    line: deque[tuple[float, bytes]] = deque()  # (when it arrives, frame)
    free_s = clock()
    while True:
        now_s = clock()
        while line and line[0][0] <= now_s:
            yield line.popleft()[1]
        arrival_s = line[0][0] if line else None
        if free_s > now_s:
            source.rest((free_s if arrival_s is None else min(free_s, arrival_s)) - now_s)
            if not source.ended:
                continue
        frame = source.next_frame(None if arrival_s is None else max(0.0, arrival_s - now_s))
        if frame is None:
            break
        if frame:
            free_s = pipe.depart(clock(), len(frame))
            line.append((free_s + pipe.delay_s, frame))
    yield from (frame for _, frame in line)


def _positive(value: object) -> float:
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"a rate must be above zero Mbit/s, not {value!r}")
    return float(value)
