"""Who is stuck: a job that comes no further within its deadlines loses the worker that is to blame.

Heartbeats come from a process that lives even where what it should compute does not. They count progress and
name whom a worker waits for. Following these claims leads to a worker that waits for nobody and does nothing,
or to two of which one waits for what the other claims to have sent, or to a cycle. A claim is held against
what is known without it: who has reported its part, and since when the job stands still. Between two workers
nothing tells a lost link from a lie, so one of them goes, first the one that waits (``evidence``). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from coordinator.messages.jobs import RUNNING, STEPPING, JobState, Phase
from coordinator.pipeline.health.deadlines import Deadlines, deadlines, storing_s
from coordinator.pipeline.health.evidence import Culprit, Evidence, Guilt

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.messages.events import Waits

LONGEST_TICK_S = 0.5  # what passes between two ticks beyond this was our own stall

Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker of a plan as its job sees it; ``waits`` None: it says that it waits for nobody."""

    worker: str
    done: bool  # it has reported its part of what is under way
    still_s: float  # since its count last moved
    waits: Waits | None = None


def culprit(
    seats: Mapping[str, Seat], silent_s: float, trouble: Mapping[str, int], label: Callable[[str], str] = str
) -> Culprit | None:
    """Return who keeps a job from going on, None where everybody has done its part.

    ``silent_s``: since the job came no further, so nobody has waited for longer. ``trouble``: by worker, how
    often it was one of two before.
    """
    idle: list[Seat] = []
    pairs: list[
        tuple[float, list[str]]
    ] = []  # how long the wait lasts; who waits for whom, the last for the first
    for seat in seats.values():
        if not seat.done:
            path = _followed(seats, seat)
            last = seats[path[-1]]
            if last.waits is None or last.waits.peer not in seats or last.waits.peer == last.worker:
                idle.append(last)
            else:
                pairs.append((min(last.waits.seconds, silent_s), path))
    if idle:
        seat = max(idle, key=lambda found: found.still_s)
        return Culprit(seat.worker, _idle_words(seat, silent_s, label))
    if not pairs:
        return None
    circle = max(pairs, key=lambda found: found[0])[1]
    return _of_two(seats, circle, silent_s, trouble, label)


def _followed(seats: Mapping[str, Seat], seat: Seat) -> list[str]:
    """Follow who waits for whom: up to one that waits for nobody of the plan, or for one that has done its
    part; of a cycle, all of it, beginning with whom the last one waits for."""
    path = [seat.worker]
    while True:
        waits = seats[path[-1]].waits
        if waits is None or waits.peer not in seats or waits.peer == path[-1] or seats[waits.peer].done:
            return path
        if waits.peer in path:
            return path[path.index(waits.peer) :]
        path.append(waits.peer)


def _of_two(
    seats: Mapping[str, Seat],
    path: list[str],
    silent_s: float,
    trouble: Mapping[str, int],
    label: Callable[[str], str],
) -> Culprit:
    """Choose between the two ends of the wait that a path ends with; of a cycle, of its longest wait."""

    def waited_s(worker: str) -> float:
        waits = seats[worker].waits
        return min(waits.seconds, silent_s) if waits is not None else 0.0

    end = seats[path[-1]].waits
    assert end is not None  # noqa: S101 - the path ends with a wait
    cyclic = not seats[end.peer].done
    waiting = max(path, key=waited_s) if cyclic else path[-1]
    waits = seats[waiting].waits
    assert waits is not None  # noqa: S101 - so do all of a path
    what = f"{label(waiting)} waits {waited_s(waiting):.0f} s for {_message(waits)} from {label(waits.peer)}"
    if not cyclic:
        words = f"{what}, which has done its part"
    elif len(path) == 2:
        words = f"{what}, which waits for {label(waiting)}: nothing passes between them"
    else:
        words = f"{what}, in a cycle of waits of {', '.join(map(label, path))}"
    worker, other = waiting, waits.peer
    if trouble.get(other, 0) > trouble.get(worker, 0):
        worker, other = other, worker
        words += f"; {label(worker)} was part of such before"
    return Culprit(worker, words, other)


def _message(waits: Waits) -> str:
    what = "room for a message" if waits.what == "room" else f"a {waits.what} message"
    return f"{what} of step {waits.step + 1}"


def _idle_words(seat: Seat, silent_s: float, label: Callable[[str], str]) -> str:
    if seat.waits is None:
        waits = "waits for nobody"
    elif seat.waits.what == "data":
        waits = f"waits {min(seat.waits.seconds, silent_s):.0f} s for data"
    else:
        waits = f"waits for {seat.waits.peer or 'nobody'}, which is not one of its neighbours"
    return (
        f"{label(seat.worker)} {waits} and delivers nothing; it has made no progress for {seat.still_s:.0f} s"
    )


# ---------------------------------------------------------------- over time


@dataclass(slots=True)
class _Watched:
    """A running job: since when it came no further, and since when each of its workers counts the same."""

    stamp: Stamp = ()
    since_s: float = 0.0
    counts: dict[str, tuple[Stamp, float]] = field(default_factory=dict)
    evaluated: set[int] = field(default_factory=set)  # ranks that have evaluated after ``evaluating``
    evaluating: int | None = None
    parts: dict[tuple[int, int, str], float] = field(default_factory=dict)  # since when a part is awaited: of
    # the oldest checkpoint under way, by its step, rank and worker


@dataclass(slots=True)
class Stuck:
    """All running jobs of stages. Its clock counts what passes between ticks, so that our own stalls and a
    machine's sleep are nobody's fault."""

    effects: Effects
    guilt: Guilt
    _jobs: dict[str, _Watched] = field(default_factory=dict)
    _clock_s: float = 0.0
    _tick_s: float | None = None

    def evaluated(self, state: JobState, rank: int) -> None:
        """A rank has evaluated, whether or not it is the one that knows the loss."""
        if state.run.awaiting_eval is not None and state.job in self._jobs:
            self._jobs[state.job].evaluated.add(rank)

    def tick(self, jobs: Mapping[str, JobState]) -> None:
        """Have jobs that stand still lose who is to blame."""
        now_s = self.effects.now_s
        longest_s = max(LONGEST_TICK_S, self.effects.roster.liveness.heartbeat_s)
        self._clock_s += min(longest_s, now_s - self._tick_s) if self._tick_s is not None else 0.0
        self._tick_s = now_s
        running = {job: state for job, state in jobs.items() if state.phase in RUNNING}
        for job in self._jobs.keys() - running.keys():
            del self._jobs[job]
        for blamed in list(filter(None, map(self._look, running.values()))):
            self.guilt.found(Evidence.STILL, blamed)

    # ------------------------------------------------------------ one job

    def _look(self, state: JobState) -> Culprit | None:
        watched = self._jobs.setdefault(state.job, _Watched())
        self._note(watched, state)
        places = [state.plan.places[rank] for rank in state.present] if state.plan is not None else ()
        slowdown = self.effects.roster.slowdown(state.job, (place.worker for place in places))
        silent_s, allowed = self._clock_s - watched.since_s, deadlines(state, slowdown)
        seats = self._seats(watched, state)
        still_s = min((seat.still_s for seat in seats.values() if not seat.done), default=silent_s)
        if silent_s > allowed.silent_s or (still_s > allowed.still_s and not _await_data(seats)):
            blamed = culprit(seats, silent_s, self.guilt.trouble, self.effects.label)
            if blamed or (blamed := self._withheld(state, silent_s, allowed)):
                return blamed
        return self._unstored(watched, state)

    def _note(self, watched: _Watched, state: JobState) -> None:
        """Keep since when the job stands where it does."""
        if state.run.awaiting_eval != watched.evaluating:
            watched.evaluating, watched.evaluated = state.run.awaiting_eval, set()
        stored = sum(map(len, state.storing.parts.values()))
        stamp: Stamp = (
            state.version, state.step, len(state.run.loaded), len(state.run.ready), stored,
            state.phase is Phase.STORING, state.run.awaiting_eval, len(watched.evaluated),
        )  # fmt: skip
        if stamp != watched.stamp:
            watched.stamp, watched.since_s = stamp, self._clock_s
        watched.parts = {
            part: watched.parts.get(part, self._clock_s) if part[1] in state.run.loaded else self._clock_s
            for part in _late_parts(state)
        }

    def _seats(self, watched: _Watched, state: JobState) -> dict[str, Seat]:
        done, seats = _done(state, watched.evaluated), {}
        for rank in state.present:
            place = state.plan.places[rank]  # type: ignore[union-attr]
            known = self.effects.roster.workers[place.worker]
            beat = known.beat
            uploads = known.uploads if state.phase is Phase.STORING else 0  # else they go on beside a hang
            counts: Stamp = (beat.progress if beat is not None else 0, uploads)
            before, since_s = watched.counts.get(place.worker, ((), 0.0))
            if counts != before:
                since_s = self._clock_s
                watched.counts[place.worker] = counts, since_s
            still_s = self._clock_s - max(since_s, watched.since_s)
            waits = beat.waits if beat is not None and beat.job == state.job else None
            seats[place.worker] = Seat(place.worker, rank in done, still_s, waits)
        return seats

    def _withheld(self, state: JobState, silent_s: float, allowed: Deadlines) -> Culprit | None:
        """All have evaluated, and the one that computes the loss has not reported it."""
        if state.plan is None or state.phase is not Phase.EVALUATING:
            return None
        worker = state.plan.places[state.plan.evaluator].worker
        return Culprit(
            worker, f"{self.effects.label(worker)} has not reported the held-out loss for {silent_s:.0f} s; "
            f"{allowed.silent_s:.0f} s are allowed",
        )  # fmt: skip

    def _unstored(self, watched: _Watched, state: JobState) -> Culprit | None:
        """A part of a checkpoint never comes, whether or not training goes on."""
        if not watched.parts:
            return None
        (done, _, worker), since_s = min(watched.parts.items(), key=itemgetter(1))
        waited_s = self._clock_s - since_s
        if waited_s <= storing_s(state):
            return None
        reason = f"{self.effects.label(worker)} has not stored its part of step {done} for {waited_s:.0f} s"
        return Culprit(worker, reason)


def _done(state: JobState, evaluated: set[int]) -> set[int]:
    """Return the ranks that have reported their part of what the job waits for now."""
    if state.phase is Phase.LOADING:
        return set(state.run.loaded)
    if state.phase is Phase.STORING:
        idle = set(range(state.n_ranks)) - state.store_ranks
        return idle | set(state.storing.parts[max(state.storing.parts)]) if state.storing.parts else set()
    if state.phase in STEPPING and state.step < state.steps:
        return set(state.run.ready).union(*(own.ready for own in state.run.own.values()))
    return set(evaluated)


def _late_parts(state: JobState) -> list[tuple[int, int, str]]:
    """Return what the oldest checkpoint under way lacks: its step, the rank and the worker of each part."""
    if state.plan is None or not state.storing.parts:
        return []
    done = min(state.storing.parts)
    late = sorted(state.store_ranks - state.storing.parts[done].keys())
    return [(done, rank, state.plan.places[rank].worker) for rank in late]


def _await_data(seats: Mapping[str, Seat]) -> bool:
    """Whether somebody says that data is on its way: it counts no progress while it arrives."""
    return any(s.waits is not None and s.waits.what == "data" for s in seats.values() if not s.done)
