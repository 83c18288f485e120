"""Hot standbys of running jobs: idle workers that repeat a rank's steps until they take its place. Pure.

A standby costs the job nothing: one that fails, lags or dies is given up, and another may be chosen.
Nothing of it is journalled; after a restart of the coordinator standbys are chosen anew. One may be to
replace a rank's worker although nobody is lost (``newcomers``): it does so after the commit of a step, when
only a few are left to repeat. Where it comes no nearer, as on lines that training keeps busy, it takes the
place all the same. Training waits until it has repeated the rest.

A standby costs its neighbours' uplinks the rank's messages a second time, and its volunteer the stage's
memory and computing. It is chosen first for the rank whose loss costs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import (
    RUNNING,
    STEPPING,
    Cause,
    JobState,
    Phase,
    PlanChange,
    Price,
    Standby,
    moved,
)
from coordinator.pipeline import history
from coordinator.pipeline.assigning import assignment, beside, neighbours, rank_peer, reconfiguration
from coordinator.pipeline.changes import recovery
from coordinator.pipeline.changes.recovery import loss_prices
from coordinator.pipeline.changes.successors import Successors, repeated_s
from coordinator.pipeline.history import not_repeatable
from coordinator.planning.costs.losses import UPLINK_SHARE, WORTH_S
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from coordinator.membership.effects import Effects
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord

FEWEST_STEPS = 3  # measured, and left to do
LOOK_S = 1.0  # between two looks for standbys
STALLED_S = 60.0  # behind, and no sign of progress for so long: it is given up
LOADING_S = 1800.0  # the same where it has not caught up in so long
MOST_BEHIND = 64  # steps, of one that had caught up: the neighbours' logs grow by as many
REST_S = 120.0  # before a worker that failed as a standby is asked again, ...
SHORT_REST_S = 3.0  # ... or lost a neighbour that it waited for
CLOSE_STEPS = 2  # behind: it has caught up
CLOSE_S = 15.0  # training may wait so long while it repeats the rest
MOVES_S = 5.0  # or three steps: in which somebody that computes shows progress


# ---------------------------------------------------------------- who may stand by for what


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker for a rank, and why."""

    worker: str
    rank: int
    why: str


def wanted(state: JobState) -> int:
    """Return how many standbys the job may have now."""
    steps_left = state.steps - state.step
    if state.phase not in STEPPING or state.run.moving or steps_left < FEWEST_STEPS or state.plan is None:
        return 0
    if len(state.run.step_times_s) < FEWEST_STEPS or state.plan.absent:  # whose places are to be taken first
        return 0
    asked, ranks = state.spec.standbys, len(repeatable_ranks(state))
    return ranks if asked is None else min(asked, ranks)


def repeatable_ranks(state: JobState) -> list[int]:
    """Return the ranks whose committed steps somebody can repeat as they come: of one pipeline all, of peers
    with steps of their own those whose steps are committed."""
    plan = state.adopted
    if state.repeats_own:
        return [rank for rank in plan.present if plan.in_pipe(rank)]
    return list(range(state.n_ranks)) if len(plan.replicas) == 1 else []


def behind(state: JobState, standby: Standby) -> int:
    """Return how many steps of its rank a standby has not repeated."""
    return max(0, state.steps_of(standby.rank) - standby.step)


def choose(state: JobState, record: JobRecord, roster: Roster, resting: frozenset[str]) -> Chosen | None:
    """Return the next standby: for the most expensive loss among ranks that some idle worker can repeat;
    ``resting``: workers that are not to be asked now."""
    if len(state.standbys) >= wanted(state) or not_repeatable(state, record):
        return None
    pauses_s = [price.pause_s for price in loss_prices(state, record, roster)]
    notice_s = roster.liveness.dead_after_s
    ranks = [rank for rank in repeatable_ranks(state) if rank not in state.standbys]
    for rank in sorted(ranks, key=lambda rank: -pauses_s[rank]):
        saved_s = pauses_s[rank] - notice_s
        if state.spec.standbys is None and saved_s < WORTH_S:
            continue
        worker = best(state, roster, rank, resting)
        if worker:
            why = f"a loss would cost {pauses_s[rank]:.1f} s without it, {notice_s:.1f} s with it"
            return Chosen(worker, rank, why)
    return None


def best(state: JobState, roster: Roster, rank: int, resting: frozenset[str]) -> str:
    """Return the idle worker that repeats a rank's steps best, "" where none can: of the same class first, so
    that its state has the same bits, then who keeps up, then the fastest in the rank's place."""
    by_number = state.spec.standbys is not None  # then the owner answers for what links and machines do
    if not (by_number or _links_allow(state, roster, rank)):
        return ""
    most_s = state.median_step_s or inf  # who takes longer for each falls behind
    fit, successors = [], Successors(state, roster, frozenset())
    for successor in successors.of(rank):
        if successor.worker not in resting:
            lags = repeated_s(state, roster, rank, successor.worker, successors.fleet) >= most_s
            if by_number or not lags:
                fit.append((successor.other_bits, lags, successor.step_s, successor.worker))
    return min(fit)[-1] if fit else ""


def sent_bytes(state: JobState, source: int, target: int) -> int:
    """Return the bytes that one rank sends another in a step: as the last one had it, else as predicted."""
    places, report, prediction = state.adopted.places, state.run.reports.get(source), state.adopted.prediction
    if report is not None and report.links:
        return sum(link.n_bytes for link in report.links if link.peer == places[target].worker)
    pair = (places[source].worker, places[target].worker)
    links = prediction.links if prediction is not None else ()
    return sum(link.bytes_per_step for link in links if (link.source, link.target) == pair)


def repeated_bytes(state: JobState, rank: int) -> int:
    """Return the bytes a step that a rank's neighbours send once more for who repeats it."""
    return sum(sent_bytes(state, other, rank) for other in neighbours(state.adopted, rank))


def standby_words(state: JobState, standby: Standby) -> str:
    """Return how far a standby is, what it costs its volunteer, and what it is for."""
    steps = behind(state, standby)
    prediction = state.adopted.prediction
    memory = f", {prediction.stages[standby.rank].memory_bytes / 2**20:.0f} MiB" if prediction else ""
    loaded = f"{steps} steps behind" if standby.loaded else f"loading, {steps} steps to repeat"
    sent_mb = repeated_bytes(state, standby.rank) / 1e6
    what = f"it is to take the stage: {standby.swap}" if standby.swap else standby.why
    return f"{loaded}; takes {sent_mb:.3g} MB a step{memory} of its machine; {what}"


def _links_allow(state: JobState, roster: Roster, rank: int) -> bool:
    """Whether the neighbours' uplinks have room for the rank's messages once more, beside what they carry for
    the plan and for other standbys."""
    places, step_s = state.adopted.places, state.median_step_s
    if not step_s:
        return False
    sites = {w: x.introduction.site for w, x in roster.workers.items() if not x.member.gone}
    uplinks = roster.links.uplinks(sites)
    ranks = [rank, *state.standbys]
    for other in neighbours(state.adopted, rank):
        worker = places[other].worker
        groups = [frozenset({worker})] + [frozenset(u.members) for u in uplinks if worker in u.members]
        estimates = roster.links.table.estimates
        shown = (estimates[pair].bandwidth_bps for pair in estimates.of(worker) if pair[0] == worker)
        rates = [max(shown, default=0.0)]
        rates += [u.up_bps for u in uplinks if worker in u.members]
        for group, bps in zip(groups, rates, strict=True):
            senders = [at for at, place in enumerate(places) if place.worker in group]
            carried = sum(
                sent_bytes(state, source, target) * (1 + ranks.count(target))
                for source in senders
                for target in neighbours(state.adopted, source)
            )
            if bps > 0 and 8 * carried / step_s > UPLINK_SHARE * bps:
                return False
    return True


# ---------------------------------------------------------------- those who do


@dataclass(slots=True)
class Standbys:
    """Standbys of all jobs; ``put``: keep a job's state."""

    effects: Effects
    put: Callable[[JobState], None]
    _resting: dict[str, float] = field(default_factory=dict)  # worker -> until when
    _looked_s: dict[str, float] = field(default_factory=dict)  # by job
    _said: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)  # (job, worker) -> standbys

    # ------------------------------------------------------------ come and go

    def tick(self, state: JobState, *, others_wait: bool, untimed: frozenset[str] = frozenset()) -> None:
        """Let time pass; ``others_wait``: the pool is wanted for something else; ``untimed`` workers are not
        asked yet."""
        if state.standbys and (others_wait or state.spec.standbys == 0):
            self.give_up(state, "the pool is wanted for another job")
            return
        if state.local and state.adopted.absent:
            self.give_up(state, "a peer is missing whose place is to be taken")
            return
        state = self._measured(state)
        now_s = self.effects.now_s
        for standby in list(state.standbys.values()):
            steps = behind(state, standby)
            stalled = steps > 0 and now_s - standby.moved_s > STALLED_S
            stalled |= not standby.loaded and now_s - standby.since_s > LOADING_S
            lags = standby.nearest is None or self._stays_behind(state, standby)
            lags &= standby.loaded and steps > self._most_behind(state)
            if stalled or lags:
                state = self.drop(state, standby, f"it is {steps} steps behind")
        if others_wait or now_s - self._looked_s.get(state.job, -LOOK_S) < LOOK_S:
            return
        if not self.effects.roster.idle_count or self.effects.storage or len(state.standbys) >= wanted(state):
            return
        self._looked_s[state.job] = now_s
        record = self.effects.ledger.jobs[state.job]
        found = choose(state, record, self.effects.roster, self.resting() | untimed)
        if found is not None:
            self.begin(state, found)

    def resting(self) -> frozenset[str]:
        """Return the workers that are not to be asked now."""
        now_s = self.effects.now_s
        self._resting = {worker: until_s for worker, until_s in self._resting.items() if until_s > now_s}
        return frozenset(self._resting)

    def _most_behind(self, state: JobState) -> float:
        """Of steps that are over in no time, those since its last heartbeat count for nothing."""
        beats_s = 4 * self.effects.roster.liveness.heartbeat_s
        return MOST_BEHIND + beats_s / max(1e-3, state.median_step_s or 1e-3)

    def begin(self, state: JobState, chosen: Chosen, swap: str = "", saved_s: float = 0.0) -> None:
        """Have an idle worker stand by for a rank; ``swap``: why it is to take its place, which saves
        ``saved_s`` a step."""
        now_s, roster = self.effects.now_s, self.effects.roster
        source, record = state.checkpoint, self.effects.ledger.jobs[state.job]
        standby = Standby(
            chosen.worker,
            chosen.rank,
            now_s,
            source.step,
            now_s,
            why=chosen.why,
            swap=swap,
            saved_s=saved_s,
            source=source,
        )
        state = replace(state, standbys={**state.standbys, chosen.rank: standby})
        self.put(state)
        self.effects.move(
            chosen.worker, members.AssignedTo(state.job, members.NO_RANK, f"stands by in {state.job}")
        )
        self._notify(state)
        replay = history.standing_by(state, record, chosen.rank, source)
        seen = self._as_it_sees(state, standby)
        self.effects.send(chosen.worker, assignment(seen, chosen.rank, roster, source, replay))
        self.effects.log(
            Name.STANDBY_CHOSEN,
            job=state.job,
            worker=chosen.worker,
            rank=chosen.rank,
            reason=swap or chosen.why,
        )
        self.effects.emit(do.Notify(state.job))

    @staticmethod
    def _as_it_sees(state: JobState, standby: Standby) -> JobState:
        """The job as if the standby had its rank."""
        return replace(state, plan=beside(state.adopted, standby.rank, standby.worker, state.run.assigned))

    def drop(self, state: JobState, standby: Standby, reason: str, rest_s: float = REST_S) -> JobState:
        """Give a standby up: it goes back to the pool."""
        state = replace(state, standbys={r: s for r, s in state.standbys.items() if s is not standby})
        self.put(state)
        self._resting[standby.worker] = self.effects.now_s + rest_s
        known = self.effects.roster.workers.get(standby.worker)
        if known is not None and known.member.job == state.job and not known.member.gone:
            version = max(state.version, state.run.assigned)
            self.effects.send(standby.worker, do.Release(state.job, version, reason))
            self.effects.move(standby.worker, members.Released(f"stood by in {state.job}: {reason}"))
        self.effects.log(
            Name.STANDBY_DROPPED, job=state.job, worker=standby.worker, rank=standby.rank, reason=reason
        )
        self._notify(state)
        self.effects.emit(do.SweepBlobs())
        self.effects.emit(do.Notify(state.job))
        return state

    def give_up(self, state: JobState, reason: str) -> None:
        """Give all standbys of a job up, for no fault of theirs."""
        for standby in list(state.standbys.values()):
            state = self.drop(state, standby, reason, rest_s=0.0)

    def over(self, state: JobState) -> None:
        """A job's plan is over."""
        self.give_up(state, f"{state.job} is {state.phase.value}")
        self._said = {key: said for key, said in self._said.items() if key[0] != state.job}
        self._looked_s.pop(state.job, None)

    def lost(self, state: JobState, worker: str, reason: str) -> bool:
        """Note that a worker is gone; False where it is no standby."""
        standby = state.standby_of(worker)
        if standby is not None:
            self.drop(state, standby, reason)
        return standby is not None

    # ------------------------------------------------------------ what they say

    def heard(self, state: JobState, standby: Standby, message: ev.StageMessage) -> None:
        """Handle a message of a standby."""
        match message:
            case ev.Loaded():
                loaded = replace(standby, loaded=True, heard=True, moved_s=self.effects.now_s)
                self.put(replace(state, standbys={**state.standbys, standby.rank: loaded}))
                self.effects.emit(do.SweepBlobs())  # it has what it began with
                self.effects.emit(do.Notify(state.job))
            case ev.StageFailed(reason=reason, lost_peer=lost_peer):
                self.drop(state, standby, reason, SHORT_REST_S if lost_peer else REST_S)
            case _:
                self.effects.drop(type(message).__name__, f"of {standby.worker}, which stands by", state.job)

    def _measured(self, state: JobState) -> JobState:
        """Take in how far they are, as their heartbeats say."""
        found = dict(state.standbys)
        for rank, standby in state.standbys.items():
            beat = self.effects.roster.beat_of(standby.worker, state.job)
            if beat is None:
                continue
            # One that was just asked has repeated nothing; its last words may be about another rank.
            heard = standby.heard or beat.step == 0
            step = max(standby.step, min(beat.step, state.steps_of(rank))) if heard else standby.step
            if (step, beat.progress, heard) != (standby.step, standby.progress, standby.heard):
                now_s = self.effects.now_s
                moved = replace(standby, step=step, progress=beat.progress, heard=heard, moved_s=now_s)
                found[rank] = replace(moved, nearest=_nearest(state, moved))
        if found != state.standbys:
            state = replace(state, standbys=found)
            self.put(state)
        return state

    def reconnected(self, state: JobState, worker: str) -> None:
        """Say the last commit again to a standby that may have missed it; one that misses more is given up.
        A rank's worker hears again of the standbys beside it."""
        self._said.pop((state.job, worker), None)
        standby = state.standby_of(worker)
        if standby is None:
            self._notify(state)
            return
        held = self.effects.roster.workers[worker].introduction.held
        if held is None or held.job != state.job or state.step - held.step > 1 or state.local:
            self.drop(state, standby, "it was away", rest_s=0.0)
        elif held.step < state.step and state.run.last_commit is not None:
            self.effects.send(worker, self._said_to(state.run.last_commit))

    # ------------------------------------------------------------ steps and other workers

    def committed(self, state: JobState, commit: do.StepCommit, rank: int | None) -> None:
        """Have the standbys repeat a step; of one that a peer alone has committed, the ``rank``'s."""
        for standby in state.standbys.values():
            if rank is None or (commit.own and rank == standby.rank):
                self.effects.send(standby.worker, self._said_to(commit))

    @staticmethod
    def _said_to(commit: do.StepCommit) -> do.StepCommit:
        return replace(commit, store=False, evaluate=False, evaluate_coded=False)

    def candidates(self, state: JobState) -> Iterator[PlanChange]:
        """Yield right after a commit that a standby takes its rank's place that is to, where that still
        pays."""
        if state.phase is not Phase.TRAINING or state.run.ready:
            return
        for standby in list(state.standbys.values()):
            if not standby.swap or not self._takes_it(state, standby):
                continue
            left_s, steps = self._left_s(state, standby), state.steps - state.step
            price = Price(left_s, saved_s=standby.saved_s, left=steps)
            if not price.pays():
                state = self.drop(state, standby, f"too few steps are left: {standby.swap}")
                continue
            workers = [place.worker for place in state.adopted.places]
            workers[standby.rank] = standby.worker
            if all(self.effects.roster.workers[w].session is not None for w in workers):
                change = moved(state, workers, (), Cause.CHOSEN, standby.swap)
                yield replace(change, price=price)

    def _takes_it(self, state: JobState, standby: Standby) -> bool:
        """Whether one that is to take a place holds a state, moves on, and is close or comes no nearer."""
        if not (standby.loaded or standby.nearest):
            return False
        moves_s = max(MOVES_S, 3.0 * (state.median_step_s or 0.0))
        if self.effects.now_s - standby.moved_s > moves_s:
            return False  # it may be frozen, or hang
        close = behind(state, standby) <= CLOSE_STEPS + self._unseen(state)
        close |= self._left_s(state, standby) <= CLOSE_S
        ready = recovery.standing_by_for(state, self.effects.roster, {standby.rank})
        return bool(ready) and (close or self._stays_behind(state, standby))

    def _left_s(self, state: JobState, standby: Standby) -> float:
        """Return the seconds for which training would wait while a standby repeats the rest."""
        return behind(state, standby) * repeated_s(state, self.effects.roster, standby.rank, standby.worker)

    def _stays_behind(self, state: JobState, standby: Standby) -> bool:
        """Whether one that holds a state has come no nearer for some steps."""
        _, since = standby.nearest or (0, state.step)
        return state.step - since >= CLOSE_STEPS + self._unseen(state)

    def _unseen(self, state: JobState) -> float:
        """Return the steps that may be over since a heartbeat."""
        return 2 * self.effects.roster.liveness.heartbeat_s / max(1e-3, state.median_step_s or 1e-3)

    def reassigned(self, state: JobState, replaced: set[int]) -> JobState:
        """Drop those that have a rank now from the standbys of a plan that was reconfigured, and give up
        those that were repeating steps beside a neighbour that is replaced. What it sent of them goes with
        it, and they would wait for that. ``replaced``: ranks that others had before."""
        plan = state.adopted
        if len(plan.replicas) > 1 and not plan.local:
            self.give_up(state, "the plan has a replica more")
            return replace(state, standbys={})
        placed = {place.worker for place in plan.places}
        for worker in placed:
            self._said.pop((state.job, worker), None)
        if any(standby.worker in placed for standby in state.standbys.values()):
            left = {rank: s for rank, s in state.standbys.items() if s.worker not in placed}
            state = replace(state, standbys=left)
            self.put(state)
        for standby in list(state.standbys.values()):
            late = behind(state, standby) > 0
            if late and replaced.intersection(neighbours(plan, standby.rank)):
                state = self.drop(state, standby, "its neighbour is replaced", rest_s=0.0)
            elif state.local and state.run.alike_from == state.step and (late or not standby.loaded):
                state = self.drop(state, standby, "rounds are among other peers now", rest_s=0.0)
        return state

    def follow(self, state: JobState) -> None:
        """Have the standbys of a plan that was reconfigured go on with it."""
        for standby in list(state.standbys.values()):
            seen = self._as_it_sees(state, standby)
            message = reconfiguration(seen, standby.rank, self.effects.roster, 0)
            self.effects.send(standby.worker, replace(message, standby=True))
        self._notify(state, always=True)

    def _notify(self, state: JobState, *, always: bool = False) -> None:
        """Say to the ranks whose neighbours have other standbys than they have heard of."""
        if state.plan is None or state.phase not in RUNNING:
            return
        roster = self.effects.roster
        for rank, place in enumerate(state.plan.places):
            near = [s for r, s in sorted(state.standbys.items()) if r in neighbours(state.plan, rank)]
            names = tuple(standby.worker for standby in near)
            if self._said.get((state.job, place.worker), ()) == names and not (always and names):
                continue
            if place.worker not in roster.workers:
                continue
            self._said[state.job, place.worker] = names
            peers = tuple(rank_peer(roster, place.worker, s.rank, s.worker, rank) for s in near)
            self.effects.send(place.worker, do.StandbysHere(state.job, state.run.assigned, peers))

    def uses(self, state: JobState, worker: str) -> bool:
        """Whether a worker stands by in a job."""
        return state.phase in RUNNING and state.standby_of(worker) is not None


def _nearest(state: JobState, standby: Standby) -> tuple[int, int] | None:
    """Return how near a standby has come since it holds a state that it repeats steps on, and when."""
    if standby.source is None or standby.step <= standby.source.step:
        return None
    steps = behind(state, standby)
    return standby.nearest if standby.nearest and standby.nearest[0] <= steps else (steps, state.step)
