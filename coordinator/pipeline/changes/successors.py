"""Which idle workers fit the ranks that are lost, the best first. Pure.

Who takes over has the memory, a way to each neighbour and links that are known to work. Among workers that
would repeat the same bits the best makes the job the least late in ten minutes. That counts seconds until it
has the stage's tensors, seconds of the steps that it repeats, and what it adds to those that follow. Of
several ranks each goes to a worker of its own; a neighbour that is lost too counts as who takes its place.
Who stands by for another rank is asked after those that are idle. A stage's part of the newest checkpoint is
on a worker's disk, on another's or in the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from coordinator.membership.links.table import MIN_BANDWIDTH_BPS
from coordinator.membership.op_probing import NOMINAL
from coordinator.messages.jobs import JobState
from coordinator.pipeline.assigning import neighbours
from coordinator.planning.costs.fleet import UNKNOWN

if TYPE_CHECKING:
    from atoll.device_class import DeviceClass
    from atoll.plan import Plan
    from coordinator.membership.roster import Roster
    from coordinator.messages.jobs import JobState
    from coordinator.planning.costs.fleet import Device

MOST_TRIED = 2000  # choices for several ranks at once
HORIZON_S = 600.0  # in which steps that a slow worker makes longer are counted: then it may be replaced
MOST_HOLDERS = 2  # that a stage is fetched from, before the store is asked


@dataclass(frozen=True, slots=True)
class Fetch:
    """Seconds until a part is on a worker's disk. ``here``: it is; else it comes from the first of the
    ``holders``, from the store where there is none."""

    seconds: float
    here: bool = False
    holders: tuple[str, ...] = ()


def copy_name(job: str, plan: Plan, rank: int, step: int) -> str:
    """Name a rank's part of the state after ``step`` committed steps: it is the same whoever holds the stage;
    peers with local steps each have a state of its own."""
    place = plan.places[rank]
    cut = plan.replicas[place.replica].stages[place.stage]
    ops = "+".join(f"{p.start}-{p.stop}.{p.eval_start}-{p.eval_stop}" for p in cut.pieces)
    own = f".{rank}" if plan.local else ""
    return f"{job}.{step}.{ops}{own}"


def stored_name(state: JobState, rank: int) -> str:
    """Name a rank's part of the newest checkpoint."""
    return copy_name(state.job, state.adopted, rank, state.checkpoint.step)


def store_bps(roster: Roster, worker: str) -> float:
    """Return the rate at which a worker fetches from the store: measured, else as home lines have it."""
    known = roster.workers.get(worker)
    if known is None:  # not back since our restart
        return NOMINAL.bandwidth_bps
    return min(known.store_bps or NOMINAL.bandwidth_bps, known.guest.download_bps)


@dataclass(slots=True)
class Fetching:
    """Of one job; to be made anew for each question, as what it has looked up changes."""

    state: JobState
    roster: Roster
    _holders: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def holders(self, rank: int) -> tuple[str, ...]:
        """Return who keeps a copy of a rank's part and is here."""
        if rank not in self._holders:
            name = stored_name(self.state, rank)
            self._holders[rank] = tuple(
                worker
                for worker, known in self.roster.workers.items()
                if name in known.copies and known.session is not None and not known.member.gone
            )
        return self._holders[rank]

    def part_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's part, 0 where neither its worker nor who keeps a copy has said so."""
        name = stored_name(self.state, rank)
        said = (self.roster.workers[worker].copies[name].n_bytes for worker in self.holders(rank))
        return self.state.storing.part_bytes.get(rank, 0) or max(said, default=0)

    def by(self, rank: int, worker: str) -> Fetch:
        """Return how a worker comes by a rank's part in the least time."""
        roster = self.roster
        if worker in self.holders(rank):
            return Fetch(0.0, here=True)
        best_bps, rates = store_bps(roster, worker), dict[str, float]()
        for holder in self.holders(rank):
            link = roster.links.table.get(holder, worker)
            if link is not None and link.bandwidth_bps > best_bps and roster.connectable(worker, holder):
                rates[holder] = link.bandwidth_bps
        holders = tuple(sorted(rates, key=rates.__getitem__, reverse=True)[:MOST_HOLDERS])
        seconds = 8 * self.part_bytes(rank) / max(best_bps, *rates.values(), 1.0)
        return Fetch(seconds, holders=holders)


@dataclass(frozen=True, slots=True)
class Successor:
    """A worker for a rank; the smallest is the best."""

    again: bool  # it has just lost that rank itself
    spare: bool  # it stands by for another rank
    other_bits: bool  # of another class than the worker before: what it repeats has other bits
    late_s: float  # that the job would be after HORIZON_S
    step_s: float  # that it would compute a step, and its messages travel
    fetch: Fetch
    worker: str

    @property
    def order(self) -> tuple[bool, bool, bool, float, bool, float]:
        return self.again, self.spare, self.other_bits, self.late_s, not self.fetch.here, self.step_s


@dataclass(slots=True)
class Successors:
    """Choices for a job's ranks; ``again``: workers of lost ranks that may have theirs once more, ``ready``:
    by rank who takes one as it is, ``spare``: who stands by."""

    state: JobState
    roster: Roster
    lost: frozenset[int]
    again: Collection[str] = ()
    ready: Mapping[int, str] = field(default_factory=dict)
    spare: Collection[str] = ()
    _plan: Plan = field(init=False)
    _workers: list[str] = field(init=False)  # by rank, before
    _free: list[str] = field(init=False)
    fleet: Mapping[str, Device] = field(init=False)  # of all of these
    _fetching: Fetching = field(init=False)
    _tries: int = 0

    def __post_init__(self) -> None:
        self._plan, roster = self.state.adopted, self.roster
        self._workers = [place.worker for place in self._plan.places]
        precision = self.state.spec.training.precision.value
        idle = roster.plannable(roster.idle(), precision)
        taken = {*self._workers, *self.ready.values()}
        self._free = [worker for worker in (*idle, *self.spare) if worker not in taken]
        known = (*idle, *self.spare, *self._workers, *_predicted_workers(self._plan))
        self.fleet = devices_of(roster, known, precision, self.state.job)
        self._fetching = Fetching(self.state, roster)

    def chosen(self) -> dict[int, str] | tuple[int, ...]:
        """Return who takes over each lost rank, or the ranks that too few workers fit."""
        fitting = {rank: len(self.of(rank)) for rank in sorted(self.lost)}
        nobody = tuple(rank for rank, count in fitting.items() if not count)
        if nobody:
            return nobody
        # Who is hardest to replace chooses first.
        self._tries = 0
        found = self._settled(sorted(fitting, key=lambda rank: (fitting[rank], rank)), {})
        return tuple(fitting) if found is None else found

    def _settled(self, ranks: Sequence[int], given: dict[int, str]) -> dict[int, str] | None:
        if not ranks:
            return given
        rank, *rest = ranks
        for successor in self.of(rank, given):
            self._tries += 1
            if self._tries > MOST_TRIED:
                return None
            found = self._settled(rest, {**given, rank: successor.worker})
            if found is not None:
                return found
        return None

    def of(self, rank: int, given: Mapping[int, str] | None = None) -> list[Successor]:
        """Return who fits a rank, the best first; ``given``: lost ranks that have a worker again."""
        given = {**self.ready, **(given or {})}
        before = self._workers[rank]
        own = [worker for worker in self.again if worker == before and worker in self.fleet]
        was = self.fleet.get(before)
        found = []
        for worker in dict.fromkeys((*self._free, *own)):
            step_s = inf if worker in given.values() else self._step_s(rank, worker, given)
            if step_s < inf:
                other_bits = self.fleet[worker].device_class != (was.device_class if was else None)
                fetch = self._fetching.by(rank, worker)
                late_s = fetch.seconds + self._late_s(step_s)
                again, spare = worker in self.again, worker in self.spare
                found.append(Successor(again, spare, other_bits, late_s, step_s, fetch, worker))
        return sorted(found, key=lambda successor: successor.order)

    def slower(self, worker: str, than: str) -> float:
        """Return how many times as long as another worker one of them computes."""
        return slower(self.roster, self.fleet, worker, than)

    def _late_s(self, step_s: float) -> float:
        """Return the seconds that a worker repeats steps, and by which it makes those longer that follow."""
        state, usual_s = self.state, self.state.usual_step_s
        left = state.steps - state.step
        if usual_s > 0:
            left = min(left, int(HORIZON_S / usual_s))
        return (state.step - state.checkpoint.step) * step_s + left * max(0.0, step_s - usual_s)

    def _step_s(self, rank: int, worker: str, given: Mapping[int, str]) -> float:
        peers = {
            given.get(other, self._workers[other]): self._workers[other]
            for other in neighbours(self._plan, rank)
            if other in given or other not in self.lost
        }
        return seconds_of(self.state, self.roster, rank, self.fleet, worker, peers)


def alike(state: JobState, roster: Roster, rank: int, wanted: DeviceClass) -> list[str]:
    """Return the idle workers of a class of device that could hold a rank, the quickest first."""
    if state.plan is None:
        return []
    fit = [
        successor
        for successor in Successors(state, roster, frozenset()).of(rank)
        if roster.workers[successor.worker].introduction.device_class == wanted
    ]
    return [successor.worker for successor in sorted(fit, key=lambda successor: successor.step_s)]


def seconds_of(
    state: JobState,
    roster: Roster,
    rank: int,
    fleet: Mapping[str, Device],
    worker: str,
    peers: Mapping[str, str] | None = None,
) -> float:
    """Return the seconds a step that a worker would compute in a rank, and its messages travel; infinite
    where it has not the memory, no way to a neighbour, or not the data that the rank reads.

    ``peers``: who is in the neighbouring ranks then, with who is in each now; None: the same.
    """
    plan = state.adopted
    workers, prediction = [place.worker for place in plan.places], plan.prediction
    before = workers[rank]
    if before == state.spec.data_of != worker:
        return inf
    if peers is None:
        peers = {workers[other]: workers[other] for other in neighbours(plan, rank)}
    here = [peer for peer in peers if peer in roster.workers]  # others may be on their way back
    if not all(roster.connectable(worker, peer) for peer in here):
        return inf
    seconds = 0.0
    if prediction is not None:
        stage = prediction.stages[rank]
        if stage.model_bytes > fleet[worker].stage_limit_bytes:
            return inf
        usual = [_unit_s(fleet[w]) for w in (stage.figures_of or before, *workers) if w in fleet]
        reference = next(filter(None, usual), 0.0)
        seconds = stage.compute_s * (_unit_s(fleet[worker]) / reference if reference else 1.0)
    sent = (
        {(link.source, link.target): link.bytes_per_step for link in prediction.links} if prediction else {}
    )
    for peer, was in peers.items():
        for pair, old in (((worker, peer), (before, was)), ((peer, worker), (was, before))):
            link = roster.links.table.get(*pair) or UNKNOWN
            if link.bandwidth_bps <= MIN_BANDWIDTH_BPS:
                return inf
            seconds += 8 * sent.get(old, 0) / link.bandwidth_bps + link.latency_s
    return seconds


def devices_of(roster: Roster, workers: Iterable[str], precision: str, job: str = "") -> dict[str, Device]:
    """Return the devices of those workers that are known; ``job``: as of ``Roster.fleet``."""
    known = [worker for worker in dict.fromkeys(workers) if worker in roster.workers]
    return {device.worker: device for device in roster.fleet(known, precision, job=job).devices}


def computed_s(state: JobState, rank: int) -> float:
    """Return the seconds that a rank computed in its last step, as predicted where it has not reported one; 0
    where neither is known."""
    report = state.run.reports.get(rank)
    busy_s = report.computed_s if report is not None else 0.0
    return busy_s or (state.predicted[rank].compute_s if state.predicted else 0.0)


def slower(roster: Roster, fleet: Mapping[str, Device], worker: str, than: str) -> float:
    """Return how many times as long as another a worker computes for the same, 1 where that is not known. Who
    has not trained yet is compared by its timings: what steps have shown of the other may be true of both."""
    if worker not in fleet or than not in fleet:
        return 1.0
    shown = all(roster.workers[name].computing.samples for name in (worker, than))
    both = [op for op in fleet[worker].timings if op in fleet[than].timings]

    def unit_s(name: str) -> float:
        timed_s = sum(sum(fleet[name].timings[op]) for op in both)
        return fleet[name].scale * timed_s / (1.0 if shown else roster.workers[name].computing.value)

    one_s, other_s = unit_s(worker), unit_s(than)
    return one_s / other_s if one_s > 0 and other_s > 0 else 1.0


def loaded_s(state: JobState, roster: Roster, rank: int, worker: str) -> tuple[float, str]:
    """Return the seconds until a worker has loaded a rank's stage, and where its tensors are until then."""
    fetching, measured_s = Fetching(state, roster), state.run.load_s.get(rank, 0.0)
    found, n_bytes = fetching.by(rank, worker), fetching.part_bytes(rank)
    if found.here:
        return measured_s - state.run.fetched_s.get(rank, 0.0), f"on the disk of {worker}"
    place = f"on the disk of {found.holders[0]}" if found.holders else "in the store"
    if not n_bytes:
        return measured_s, place
    load_s = measured_s - state.run.fetched_s.get(rank, 0.0) + found.seconds
    return load_s, f"{place}, {found.seconds:.1f} s from {worker}"


def repeated_s(
    state: JobState, roster: Roster, rank: int, worker: str, fleet: Mapping[str, Device] | None = None
) -> float:
    """Return what a step takes that a worker repeats of a rank: computing, or the messages that it is sent
    where they take longer. Its own messages are not sent again. ``fleet``: the devices of both, where the
    caller has them."""
    plan = state.adopted
    busy_s, has_it = computed_s(state, rank), plan.places[rank].worker
    if worker != has_it:
        both = fleet or devices_of(roster, (worker, has_it), state.spec.training.precision.value)
        busy_s *= slower(roster, both, worker, has_it)
    sent_s = 0.0
    for other in neighbours(plan, rank):
        theirs, sender = state.run.reports.get(other), plan.places[other].worker
        known = roster.links.table.get(sender, worker) or roster.links.table.get(sender, has_it)
        for link in theirs.links if theirs is not None else ():
            if link.peer == has_it and known is not None:
                sent_s = max(sent_s, 8 * link.n_bytes / known.bandwidth_bps)
    return max(busy_s, sent_s)


def _predicted_workers(plan: Plan) -> list[str]:
    """Return the workers whose seconds a plan's prediction has."""
    stages = plan.prediction.stages if plan.prediction is not None else ()
    return [stage.figures_of or stage.worker for stage in stages]


def _unit_s(device: Device) -> float:
    """Return the seconds of all timed ops, the same ones on every device of a job; 0 where none were."""
    return device.scale * sum(forward + backward for forward, backward in device.timings.values())
