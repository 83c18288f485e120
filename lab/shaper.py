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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from worker.transport.pipes import Pipe as MessagePipe

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

    def shaped(self, pipe: MessagePipe, *names: str) -> MessagePipe:
        """Return ``pipe`` at the pace of the pipe to the peer under one of ``names``, if there is one."""
        way = self.pipe(*names)
        return pipe if way is None else ShapedPipe(way, pipe)

    def pipe(self, *names: str) -> Pipe | None:
        """Return the pipe to the peer known under any of ``names``; None: not shaped."""
        return next((self._pipes[name] for name in names if name in self._pipes), None)


class ShapedPipe:
    """A pipe at a way's pace: it is free for the next message when the way is, so urgent ones overtake."""

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
