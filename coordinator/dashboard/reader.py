"""The one reader of a fleet: asks the coordinator what is looked at, and nothing else, however many look.

One ``Status`` a second, one ``Watch`` for each job that somebody looks at, one stream of ``Logs``. A
coordinator that is away is waited for; the page keeps what it showed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog

from atoll.errors import AtollError, ConnectionFailed, UsageError
from coordinator.client.client import ENDED
from coordinator.client.overrides import settings
from coordinator.dashboard.curves import Curves
from coordinator.dashboard.model import Row, View
from coordinator.dashboard.public import public_run, public_view
from coordinator.dashboard.rows import JobSeen, contributions_view, event_row, fleet_view
from coordinator.dashboard.spans import LAST_STEPS, timeline_view
from coordinator.dashboard.topic import Pulse, Topic
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.convert import from_proto
from protos.grpc_errors import to_atoll_error
from protos.text_limits import clean

if TYPE_CHECKING:
    from coordinator.client.endpoint import Endpoint

FLEET, EVENTS, GIVEN, JOB, TIMELINE = "fleet", "events", "contributions", "job:", "timeline:"
PUBLIC, PUBLIC_RUN = "public", "public-run:"
MAX_EVENTS = 2_000  # the newest are shown
MAX_TOPICS = 200
MAX_CSV_BYTES = 64 << 20  # of a job's metrics.csv
MAX_NAME_CHARS = 200

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the coordinator is asked, and how long what nobody looks at is still read."""

    status_every_s: float = 1.0
    checkpoints_every_s: float = 10.0
    timeline_every_s: float = 3.0
    contributions_every_s: float = 20.0
    linger_s: float = 10.0  # after the last viewer left: a page that is loaded again finds all there
    pause_least_s: float = 0.5  # between two tries while the coordinator is away
    pause_most_s: float = 2.0
    answer_within_s: float = 30.0


class Reader:
    """What viewers of one fleet look at. Use it within a running event loop, and ``close`` it there."""

    def __init__(self, endpoint: Endpoint, pace: Pace | None = None) -> None:
        self.pulse = Pulse()
        self._endpoint, self._pace = endpoint, pace or Pace()
        self._channel: grpc.aio.Channel | None = None
        self._topics: dict[str, Topic] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.TimerHandle] = {}
        self._workers: Mapping[str, Row] = {}

    async def close(self) -> None:
        """End all reading and the connection."""
        for handle in self._ends.values():
            handle.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._channel is not None:
            await self._channel.close(None)

    @asynccontextmanager
    async def looking(self, names: Iterable[str]) -> AsyncIterator[list[Topic]]:
        """Have topics read while the block lasts; UsageError for one that there is not, or too many."""
        wanted = list(dict.fromkeys(names))
        with ExitStack() as held:
            for name in dict.fromkeys(
                [*wanted, FLEET]
            ):  # every page names workers, whose names are the fleet's
                held.callback(self._release, self._hold(name))
            yield [self._topics[name] for name in wanted]

    async def stub(self) -> rpc.OwnerStub:
        """Return the owner's calls; the connection is made by the first."""
        if self._channel is None:
            self._channel = self._endpoint.async_channel()
        return rpc.OwnerStub(self._channel)

    def words(self, error: grpc.aio.AioRpcError) -> AtollError:
        """Return the error that a failed call stands for."""
        return to_atoll_error(error, self._endpoint.address)

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of every short call."""
        return {"metadata": self._endpoint.metadata(), "timeout": self._pace.answer_within_s}

    # ------------------------------------------------------------ who looks

    def _hold(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            read = self._reading(name)
            if len(self._topics) >= MAX_TOPICS:
                raise UsageError(f"{MAX_TOPICS} pages are read already; close some")
            topic = self._topics[name] = Topic(name, self.pulse)
            self._tasks[name] = asyncio.create_task(self._again_and_again(topic, read), name=f"reads {name}")
        topic.viewers += 1
        if (handle := self._ends.pop(name, None)) is not None:
            handle.cancel()
        return topic

    def _reading(self, name: str) -> Callable[[Topic], Awaitable[None]]:
        if name == FLEET:
            return self._read_fleet
        if name == EVENTS:
            return self._read_events
        if name == GIVEN:
            return self._read_contributions
        if name == PUBLIC:
            return self._read_public
        prefixes = (
            (JOB, self._read_job),
            (TIMELINE, self._read_timeline),
            (PUBLIC_RUN, self._read_public_run),
        )
        for prefix, read in prefixes:
            if name.startswith(prefix) and name != prefix and len(name) <= MAX_NAME_CHARS:
                return read
        raise UsageError(f"no page reads {clean(name, 80)!r}")

    def _release(self, topic: Topic) -> None:
        topic.viewers -= 1
        if not topic.viewers:
            loop = asyncio.get_running_loop()
            self._ends[topic.name] = loop.call_later(self._pace.linger_s, self._end, topic.name)

    def _end(self, name: str) -> None:
        self._ends.pop(name, None)
        self._tasks.pop(name).cancel()
        del self._topics[name]

    # ------------------------------------------------------------ what is read

    async def _again_and_again(self, topic: Topic, read: Callable[[Topic], Awaitable[None]]) -> None:
        """Read for ever; between two tries the page says since when nobody answers."""
        pause_s, away_since_s = self._pace.pause_least_s, 0.0
        while True:
            began_at = topic.version
            try:
                await read(topic)
                return  # all of it has been read
            except grpc.aio.AioRpcError as error:
                why = self.words(error)
            except AtollError as error:
                why = error
            if topic.version > began_at:
                pause_s, away_since_s = self._pace.pause_least_s, 0.0
            away_since_s = away_since_s or time.time()
            away = {"since_s": away_since_s, "why": clean(str(why), 400), "kind": type(why).__name__}
            if topic.name.startswith(PUBLIC):  # words of errors hold addresses
                away |= {"why": "it is restarted, or its network is down", "kind": ""}
            topic.publish(replace(topic.view, facts={**topic.view.facts, "away": away}))
            log.info("dashboard.waits", topic=topic.name, reason=clean(str(why), 400))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pace.pause_most_s)

    async def _read_fleet(self, topic: Topic) -> None:
        owner = await self.stub()
        while True:
            began_s = time.monotonic()
            view = fleet_view(await owner.Status(pb.StatusRequest(), **self.call))
            self._workers = view.tables["workers"]
            topic.publish(view)
            await asyncio.sleep(max(0.0, began_s + self._pace.status_every_s - time.monotonic()))

    async def _read_events(self, topic: Topic) -> None:
        owner = await self.stub()
        rows: dict[str, Row] = dict(topic.view.tables.get("events", {}))
        number = max(map(int, rows), default=0)
        seen = deque((_key(row) for row in rows.values()), maxlen=MAX_EVENTS)
        lines = owner.Logs(pb.LogsRequest(follow=True), metadata=self._endpoint.metadata())
        async for batch in _gathered(lines):
            for line in batch:
                row = event_row(line, line.source if line.source in self._workers else "")
                if (key := _key(row)) in seen:  # after an interruption all that is kept comes again
                    continue
                seen.append(key)
                number += 1
                rows[str(number)] = row
            while len(rows) > MAX_EVENTS:
                del rows[next(iter(rows))]
            topic.publish(View({"events": number}, {"events": dict(rows)}))
        raise ConnectionFailed("the coordinator ended its log")

    async def _read_job(self, topic: Topic) -> None:
        job = topic.name.removeprefix(JOB)
        owner, seen = await self.stub(), JobSeen()
        while not self._topics[FLEET].version:  # names first
            await self.pulse.next.wait()
        curves = await self._stored_curves(job)
        kept, kept_at_s = await self._checkpoints(job), time.monotonic()
        updates = owner.Watch(pb.JobRequest(job=job), metadata=self._endpoint.metadata())
        async for batch in _gathered(updates):
            for update in batch:
                curves.add(update.metrics)
                training = from_proto(update.training) if update.HasField("training") else None
                seen.take(update, settings(training) if training is not None else ())
            if time.monotonic() - kept_at_s > self._pace.checkpoints_every_s:
                kept, kept_at_s = await self._checkpoints(job), time.monotonic()
            topic.publish(seen.view(self._workers, curves.seen(), kept))
        if seen.state not in ENDED:  # a coordinator that stops may end its streams without an error
            raise ConnectionFailed("the coordinator ended its updates")
        topic.publish(seen.view(self._workers, curves.seen(), await self._checkpoints(job)))

    async def _read_timeline(self, topic: Topic) -> None:
        job, owner = topic.name.removeprefix(TIMELINE), await self.stub()
        request = pb.TraceRequest(job=job, last_steps=LAST_STEPS)
        while True:
            topic.publish(timeline_view([chunk async for chunk in owner.Trace(request, **self.call)]))
            await asyncio.sleep(self._pace.timeline_every_s)

    async def _read_contributions(self, topic: Topic) -> None:
        owner = await self.stub()
        while True:
            found = await owner.Credits(pb.CreditsRequest(), **self.call)
            topic.publish(contributions_view(found.credits))
            await asyncio.sleep(self._pace.contributions_every_s)

    async def _read_public(self, topic: Topic) -> None:
        owner, given, given_at_s = await self.stub(), list[pb.Credit](), 0.0
        while True:
            if time.monotonic() - given_at_s > self._pace.contributions_every_s or not given_at_s:
                found = await owner.Credits(pb.CreditsRequest(), **self.call)
                given, given_at_s = list(found.credits), time.monotonic()
            topic.publish(public_view(await owner.Status(pb.StatusRequest(), **self.call), given))
            await asyncio.sleep(self._pace.status_every_s)

    async def _read_public_run(self, topic: Topic) -> None:
        async with self.looking([JOB + topic.name.removeprefix(PUBLIC_RUN)]) as [job]:
            while True:
                following = self.pulse.next
                topic.publish(public_run(job.view))
                await following.wait()

    async def _stored_curves(self, job: str) -> Curves:
        """Return what the job's metrics.csv holds: a coordinator that was restarted has no older points."""
        owner, curves = await self.stub(), Curves()
        chunks = owner.Metrics(pb.JobRequest(job=job), **self.call)
        read, rest = 0, b""
        async for chunk in chunks:
            read += len(chunk.data)
            *lines, rest = (rest + chunk.data).split(b"\n")
            for line in lines:
                curves.line(line.decode(errors="replace"))
            if read > MAX_CSV_BYTES:
                chunks.cancel()
                break
        return curves

    async def _checkpoints(self, job: str) -> list[pb.Checkpoint]:
        owner = await self.stub()
        return list((await owner.Checkpoints(pb.CheckpointsRequest(job=job), **self.call)).checkpoints)


def _key(row: Row) -> tuple[Any, ...]:
    return row["time_s"], row["event"], row["source"], row["job"], tuple(row["fields"].items())


async def _gathered(messages: AsyncIterator[Any], most: int = 500) -> AsyncIterator[list[Any]]:
    """Yield messages of a stream, those together that have come while the ones before were looked at."""
    waiting: deque[Any] = deque()
    came, room = asyncio.Event(), asyncio.Event()

    async def receive() -> None:
        async for message in messages:
            while len(waiting) >= most:
                room.clear()
                await room.wait()
            waiting.append(message)
            came.set()

    task = asyncio.create_task(receive())
    task.add_done_callback(lambda _: came.set())
    try:
        while True:
            await came.wait()
            came.clear()
            batch = list(waiting)
            waiting.clear()
            room.set()
            if batch:
                yield batch
            if task.done() and not waiting:
                await task  # raises what ended the stream
                return
    finally:
        task.cancel()
