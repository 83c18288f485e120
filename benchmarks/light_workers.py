"""Client process of ``benchmarks.sessions``: many fake workers, each with a certificate and a connection of
its own, all on one event loop.

Reads one JSON object on its standard input (``Orders``), prints one when every session is open or has
failed (``Joined``) and one when its standard input is closed (``Left``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from benchmarks.fake_worker import FakeWorker
from benchmarks.waits import HUNG_S
from hostos.descriptors import raise_limit
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import COORDINATOR, channel_credentials, name_options

EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009 - the type stubs leave it out


@dataclass(frozen=True, slots=True)
class Orders:
    """``workers`` to join, so many ``at_once``."""

    entry: str
    token: str
    first: int
    workers: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Seconds from a worker's first call to its Welcome, one each; ``failed``: reasons of the others."""

    welcome_s: list[float]
    failed: list[str]


@dataclass(frozen=True, slots=True)
class Left:
    """Heartbeats sent, probes answered, and why sessions ended before they were to."""

    heartbeats: int
    answers: int
    ended: list[str]


@dataclass
class LightWorker(FakeWorker):
    """A FakeWorker without a thread: it beats as its Welcome asks for."""

    heartbeats: int = 0
    answers: int = 0
    over: str = ""
    _outgoing: asyncio.Queue[pb.FromWorker] = field(default_factory=asyncio.Queue)

    async def join(self) -> float:
        """Enroll and open the session; return the seconds until its Welcome. Raises RuntimeError."""
        begun_s = time.perf_counter()
        await asyncio.to_thread(self.enroll)
        if self.identity is None:
            raise RuntimeError("these workers need TLS")
        credentials = channel_credentials(self.identity.ca_pem, self.identity)
        self._link: Any = grpc.aio.secure_channel(
            f"{self.entry.rpartition(':')[0]}:{self.work_port}",
            credentials,
            options=[("grpc.use_local_subchannel_pool", 1), *name_options(COORDINATOR)],
        )
        stub: Any = rpc.WorkStub(self._link)
        self._call = stub.Session(metadata=self.metadata)
        await self._call.write(pb.FromWorker(introduction=self.introduction()))
        first = await self._call.read()
        if first is EOF or not first.HasField("welcome"):
            raise RuntimeError(f"no Welcome: {await self._call.details()}")
        took_s = time.perf_counter() - begun_s
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._speak(first.welcome))]
        return took_s

    def say(self, **body: Any) -> None:
        self.answers += 1
        self._outgoing.put_nowait(pb.FromWorker(**body))

    async def leave(self) -> None:
        """Break the connection without a word."""
        for task in self._tasks:
            task.cancel()
        await self._link.close()

    async def _hear(self) -> None:
        try:
            while (message := await self._call.read()) is not EOF:
                self.answer(message)
            self.over = f"{await self._call.code()}: {await self._call.details()}"
        except grpc.aio.AioRpcError as error:
            self.over = f"{error.code()}: {error.details()}"

    async def _speak(self, welcome: pb.Welcome) -> None:
        due_s = time.monotonic() + welcome.heartbeat_s
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # over: ``_hear`` knows why
            while True:
                try:
                    message = await asyncio.wait_for(self._outgoing.get(), due_s - time.monotonic())
                except TimeoutError:
                    due_s = max(due_s + welcome.heartbeat_s, time.monotonic())
                    self.heartbeats += 1
                    message = pb.FromWorker(heartbeat=pb.Heartbeat(worker_time_s=time.monotonic()))
                await self._call.write(message)


async def _main() -> None:
    orders = Orders(**json.loads(sys.stdin.readline()))
    raise_limit(4 * orders.workers + 256)
    turn = asyncio.Semaphore(orders.at_once)
    joined: list[LightWorker] = []
    welcome_s, failed = [], []

    async def join(number: int) -> None:
        worker = LightWorker(orders.entry, orders.token, f"light-{number}")
        async with turn:
            try:
                async with asyncio.timeout(HUNG_S):
                    welcome_s.append(await worker.join())
            except (grpc.RpcError, RuntimeError) as error:
                failed.append(str(error)[:300])
            else:
                joined.append(worker)

    await asyncio.gather(*(join(orders.first + at) for at in range(orders.workers)))
    _say(Joined(welcome_s, failed))
    await asyncio.to_thread(sys.stdin.read)
    ended = [worker.over for worker in joined if worker.over]
    _say(Left(sum(w.heartbeats for w in joined), sum(w.answers for w in joined), ended))
    await asyncio.gather(*(worker.leave() for worker in joined))


def _say(figures: Joined | Left) -> None:
    print(json.dumps(asdict(figures)), flush=True)


def main() -> None:
    """Serve the orders on standard input."""
    asyncio.run(_main())
