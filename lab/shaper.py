"""Slow, distant links on loopback, without root: rate and delay per peer, from a small file.

``{"self": "w1", "peers": {"w2": {"mbit": 8, "ms": 40}, "127.0.1.3": {...}}, "uplink": {"mbit": 20}}``
describes what this process sends: each peer by the name in its own file or by the address dialled
(``"names": {"127.0.1.3": "w3"}`` makes them one), all of them through the optional uplink.
``lab.shaped_worker`` hooks it into a worker's ``PeerNetwork``. Approximate: TCP and TLS overhead, loss
and router buffers are not modelled; the lab's namespaces are the real thing.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker.transport.aio.pipes import Pipe as MessagePipe
    from worker.transport.grpc_streams import Wire

MAX_FILE_BYTES = 1 << 20
HANDING_S = 2.0  # for the wire to take a message, before we ask whether it still should


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

    def shaped(self, wire: Wire, *names: str) -> Wire:
        """Return ``wire`` at the pace of the pipe to the peer under one of ``names``, if there is one."""
        pipe = self.pipe(*names)
        return wire if pipe is None else ShapedWire(pipe, wire)

    def shaped_pipe(self, pipe: MessagePipe, *names: str) -> MessagePipe:
        """Return ``pipe`` at the pace of the pipe to the peer under one of ``names``, if there is one."""
        way = self.pipe(*names)
        return pipe if way is None else ShapedPipe(way, pipe)

    def pipe(self, *names: str) -> Pipe | None:
        """Return the pipe to the peer known under any of ``names``; None: not shaped."""
        return next((self._pipes[name] for name in names if name in self._pipes), None)


class Line:
    """Messages on a pipe, in order. Times come in as arguments."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._under_way: deque[tuple[float, bytes]] = deque()  # (when it arrives, message)
        self._free_s: float | None = None  # when the last one has left, until that is told

    def enter(self, now_s: float, message: bytes) -> None:
        self._free_s = self._pipe.depart(now_s, len(message))
        self._under_way.append((self._free_s + self._pipe.delay_s, message))

    def left(self, now_s: float) -> bool:
        """The last one has left, which is told once."""
        if self._free_s is None or self._free_s > now_s:
            return False
        self._free_s = None
        return True

    def arrived(self, now_s: float) -> bytes | None:
        """The next one that has."""
        if self._under_way and self._under_way[0][0] <= now_s:
            return self._under_way.popleft()[1]
        return None

    @property
    def next_s(self) -> float | None:
        """When something happens next; None: nothing will."""
        times = [at_s for at_s, _ in list(self._under_way)[:1]]
        return min([*times, *([] if self._free_s is None else [self._free_s])], default=None)


class ShapedWire:
    """A wire at a pipe's pace: it is free for the next message when the pipe is, so urgent ones overtake."""

    def __init__(self, pipe: Pipe, wire: Wire) -> None:
        self._wire, self._line = wire, Line(pipe)
        self._changed = threading.Condition()
        self._sent: Callable[[], None] | None = None
        self._ending = False
        threading.Thread(target=self._run, name="peer-shaper", daemon=True).start()

    def send(self, message: bytes, sent: Callable[[], None]) -> bool:
        with self._changed:
            self._line.enter(time.monotonic(), message)
            self._sent = sent
            self._changed.notify()
            return not self._ending

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def _run(self) -> None:
        """Thread: hand on what has arrived, and tell when the pipe is free."""
        handed = threading.Event()
        alive = True
        while True:
            with self._changed:
                now_s = time.monotonic()
                message = self._line.arrived(now_s)
                free, sent = self._line.left(now_s), self._sent
                next_s = self._line.next_s
                if message is None and not free:
                    if next_s is None and self._ending:
                        break
                    self._changed.wait(None if next_s is None else max(0.0, next_s - now_s))
                    continue
            if message is not None and alive:
                handed.clear()
                alive = self._wire.send(message, handed.set)
                while alive and not handed.wait(HANDING_S):
                    alive = not self._ending
            if free and sent is not None:
                sent()
        self._wire.end()


class ShapedPipe:
    """The same for a transport on an event loop."""

    def __init__(self, way: Pipe, pipe: MessagePipe) -> None:
        self._way, self._pipe = way, pipe
        self._under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()  # (arrival, message)
        self._handing = asyncio.create_task(self._hand_on())

    async def send(self, message: bytes) -> None:
        if self._handing.done():
            await self._handing  # raises what broke it
        left_s = self._way.depart(time.monotonic(), len(message))
        self._under_way.put_nowait((left_s + self._way.delay_s, message))
        await asyncio.sleep(left_s - time.monotonic())

    async def receive(self) -> bytes | None:
        return await self._pipe.receive()

    async def finish(self) -> None:
        self._under_way.put_nowait((0.0, None))
        await self._handing

    async def close(self) -> None:
        self._handing.cancel()
        await asyncio.gather(self._handing, return_exceptions=True)
        await self._pipe.close()

    async def _hand_on(self) -> None:
        while True:
            at_s, message = await self._under_way.get()
            await asyncio.sleep(at_s - time.monotonic())
            if message is None:
                await self._pipe.finish()
                return
            await self._pipe.send(message)


def _positive(value: object) -> float:
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"a rate must be above zero Mbit/s, not {value!r}")
    return float(value)
