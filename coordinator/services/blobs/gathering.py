"""Blobs that a job needs and workers hold: asked of them, so that its owner does not send them.

Each worker is asked for a little at a time, so the fastest send the most. A claim is only that: a worker may
put what it was asked for, of the size that the owner names, and all of it is hashed as an upload is. Who does
not send in time is left out, who sends other bytes is believed no more. What nobody sends is the owner's to
send. All of it belongs to the owner's call, and ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.errors import ConnectionFailed
from coordinator.membership.known_weights import names_of
from coordinator.messages import instructions as do
from protos.telemetry import Event

if TYPE_CHECKING:
    from coordinator.messages.events import CopyStored
    from coordinator.shell import Shell

JOB = "~weights"  # no job's name
WINDOW_BYTES = 16 << 20  # asked of a worker at a time, or one blob
WINDOW_BLOBS = 1024
LOOK_S = 0.5
STALLED_S = 20.0  # without LEAST_BYTES more a worker is left out; its retries of a broken connection fit in
LEAST_BYTES = 500_000  # in that time: 0.2 Mbit/s
MOST_CALLS = 32
MOST_TRIES = 3  # of a blob, before its owner sends it


@dataclass(slots=True)
class _Ask:
    """What a worker was asked to put; ``moved_s``: when it had sent ``moved_bytes`` of it."""

    number: int
    blobs: dict[str, int]
    moved_s: float
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Of what is to come: bytes that are here, bytes in all; workers that send now."""

    done_bytes: int
    total_bytes: int
    workers: int


@dataclass(slots=True)
class _Gather:
    """One call: the blobs that it needs, those that somebody says to hold, and who was asked for which."""

    sizes: Mapping[str, int]
    coming: set[str] = field(default_factory=set)
    asks: dict[str, _Ask] = field(default_factory=dict)  # by worker
    left_out: set[str] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)
    held: dict[bytes, frozenset[str]] = field(default_factory=dict)  # by claim, of what is needed

    def holds(self, claim: bytes) -> frozenset[str]:
        """Return what of the needed blobs is in a claim."""
        if claim not in self.held:
            self.held[claim] = frozenset(name for name in names_of(claim) if name in self.sizes)
        return self.held[claim]

    def part(self, names: Collection[str]) -> dict[str, int]:
        """Return what a worker that holds ``names`` is asked for next."""
        found: dict[str, int] = {}
        total = 0
        for name in names:
            total += self.sizes[name]
            if found and (total > WINDOW_BYTES or len(found) == WINDOW_BLOBS):
                break
            found[name] = self.sizes[name]
        return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """What of a call's blobs is in the store: those that are not whole, what each worker has sent of what it
    was asked for, and how much of that lies in blobs that are not whole."""

    lacking: frozenset[str]
    arrived: Mapping[str, int]
    partial_bytes: int


class Gathering:
    """Every method belongs to the event loop's thread."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._numbers = itertools.count(1)
        self._gathers: list[_Gather] = []
        self._news = asyncio.Event()

    def allowed(self, worker: str, name: str, size: int) -> bool:
        """Return whether a worker was asked to put this blob of this size."""
        return any(ask.blobs.get(name) == size for ask in self._asks_of(worker))

    def wrong(self, worker: str, name: str) -> None:
        """A worker that was asked for a blob has sent other bytes: believe none of its claims."""
        if not any(name in ask.blobs for ask in self._asks_of(worker)):
            return
        self._shell.scheduler.roster.weights.bar(worker)
        self._leave_out(worker, f"what it sent as {name[:12]} has another hash; its claims count no more")

    def answered(self, worker: str, message: CopyStored) -> None:
        """A worker has put what it was asked for, or says why not."""
        for gather in self._gathers:
            ask = gather.asks.get(worker)
            if ask is None or message.name != str(ask.number):
                continue
            if message.error:
                self._leave_out(worker, message.error)
            else:
                del gather.asks[worker]
        self._news.set()

    async def gather(self, sizes: Mapping[str, int]) -> AsyncIterator[Progress]:
        """Have workers put those of these blobs (hash -> bytes) that are not here; ends when no more come.
        ConnectionFailed while too many calls do."""
        if len(self._gathers) >= MOST_CALLS:
            raise ConnectionFailed(f"{MOST_CALLS} submissions take weights from workers now; try again")
        most = self._shell.blobs.max_blob_bytes
        gather = _Gather({name: size for name, size in sizes.items() if 0 < size <= most})
        self._gathers.append(gather)
        before: Progress | None = None
        try:
            while True:
                self._news.clear()
                asks = {worker: list(ask.blobs) for worker, ask in gather.asks.items()}
                seen = await asyncio.to_thread(self._look, gather.sizes, asks)
                self._leave_stalled(gather, seen)
                self._ask(gather, seen.lacking)
                # Known before a caller takes its time over the progress: workers may answer meanwhile.
                ended = not gather.asks and seen.lacking.isdisjoint(self._asked())
                if (progress := _progress(gather, seen)) != before:
                    yield progress
                    before = progress
                if ended:
                    self._say_end(gather, seen)
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_S)
        finally:
            self._gathers.remove(gather)

    def _asks_of(self, worker: str) -> list[_Ask]:
        return [gather.asks[worker] for gather in self._gathers if worker in gather.asks]

    def _asked(self) -> frozenset[str]:
        """Return the blobs that workers were asked for and have not answered, in all calls."""
        asks = [ask for gather in self._gathers for ask in gather.asks.values()]
        return frozenset(name for ask in asks for name in ask.blobs)

    def _look(self, names: Collection[str], asks: Mapping[str, list[str]]) -> _Seen:
        """In any thread."""
        blobs = self._shell.blobs
        lacking = frozenset(name for name in names if not blobs.has(name))
        arrived = {worker: sum(blobs.held(name, worker) for name in asked) for worker, asked in asks.items()}
        pairs = [(name, worker) for worker, asked in asks.items() for name in asked if name in lacking]
        return _Seen(lacking, arrived, sum(blobs.arrived(name, worker) for name, worker in pairs))

    def _ask(self, gather: _Gather, lacking: Collection[str]) -> None:
        """Ask every worker that sends nothing for its next part; one that has a job only for what no other
        holds: its line carries that job's tensors."""
        shell, asked, workers = self._shell, self._asked(), self._shell.scheduler.roster.workers
        sending = {worker for other in self._gathers for worker in other.asks}
        left = {n: None for n in gather.sizes if n in lacking and gather.tries[n] < MOST_TRIES}
        spared: frozenset[str] = frozenset()
        claims = shell.scheduler.roster.weights.claims()
        for worker in sorted(claims, key=lambda worker: worker not in workers or not workers[worker].free):
            holds = gather.holds(claims[worker])
            gather.coming.update(left.keys() & holds)
            if worker in gather.left_out or not self._here(worker):
                continue
            away = asked if workers[worker].free else asked | spared
            spared |= holds if workers[worker].free else frozenset()
            blobs = gather.part([name for name in left if name in holds and name not in away])
            if not blobs or worker in sending:
                continue
            asked |= blobs.keys()
            ask = gather.asks[worker] = _Ask(next(self._numbers), blobs, shell.clock())
            gather.tries.update(blobs.keys())
            shell.tell(worker, do.StoreCopy(JOB, str(ask.number), tuple(blobs)))

    def _here(self, worker: str) -> bool:
        """Return whether a worker can be asked for anything now."""
        known = self._shell.scheduler.roster.workers.get(worker)
        away = known is None or known.member.gone or bool(known.quarantined) or bool(known.guest.paused)
        return not away and worker in self._shell.outboxes

    def _leave_stalled(self, gather: _Gather, seen: _Seen) -> None:
        now_s = self._shell.clock()
        for worker, ask in list(gather.asks.items()):
            arrived = seen.arrived.get(worker, 0)
            if not self._here(worker):
                self._leave_out(worker, "it is away")
            elif arrived >= ask.moved_bytes + LEAST_BYTES:
                ask.moved_bytes, ask.moved_s = arrived, now_s
            elif now_s - ask.moved_s > STALLED_S:
                self._leave_out(worker, f"it has sent nearly nothing for {STALLED_S:g} s")

    def _leave_out(self, worker: str, reason: str) -> None:
        """Ask a worker for nothing more, in the calls that it was asked for."""
        for gather in self._gathers:
            if gather.asks.pop(worker, None) is not None:
                gather.left_out.add(worker)
        self._shell.note(Event.WEIGHTS_NOT_SENT, "warning", worker=worker, reason=reason[:500])
        self._news.set()

    def _say_end(self, gather: _Gather, seen: _Seen) -> None:
        if not gather.coming:
            return
        at, blobs = _progress(gather, seen), len(gather.coming)
        lacking = at.total_bytes - at.done_bytes
        self._shell.note(Event.WEIGHTS_GATHERED, blobs=blobs, bytes=at.done_bytes, not_sent_bytes=lacking)


def _progress(gather: _Gather, seen: _Seen) -> Progress:
    here = sum(gather.sizes[name] for name in gather.coming - seen.lacking)
    total = sum(gather.sizes[name] for name in gather.coming)
    return Progress(min(total, here + seen.partial_bytes), total, len(gather.asks))
