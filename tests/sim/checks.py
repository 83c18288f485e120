"""What must hold after every event, whatever goes wrong; a breach is raised with its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import peer_tensors
from coordinator.messages.facts import (
    CheckpointStored,
    CoordinatorStarted,
    Fact,
    JobRecord,
    PlanAdopted,
    Reconfigured,
    RoundClosed,
    RoundMet,
    StepCommitted,
    UpdateTaken,
)
from coordinator.messages.jobs import ENDED, RUNNING, Phase
from coordinator.pipeline.driver import PipelineDriver
from coordinator.pipeline.history import version_at
from strategies.exchanges.partners import groups_of, joins
from tests.sim import local_steps
from tests.sim.values import exact_step, reference

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from tests.sim.coordinator import Coordinator
    from tests.sim.world import World


EXCUSES = (
    "no idle worker can take over",  # which is looked at
    "too few idle workers can take over",  # and so is this
    "all stages are lost at once",
    "no peer is left that holds its state",
    "not all stages were loaded",
    "(lost ",  # a peer that is still there: the link between two is cut
    "the disk is full",
    "wrong: ",  # two others agree that a worker computed a step wrong
    "killed before, while it repeated steps",
)
"""Reasons for which a job may go back to its checkpoint."""

SHARED_ANEW = ("codecs or shares of step",)
"""Another, once replicas were lost: until the state of then is stored, nobody can repeat the steps before."""

EXCUSES_OF_REPLICAS = ("not all stages were loaded", "the disk is full", "wrong: ", "gave up after")
"""Those for which it may though one of its replicas is whole."""


class Violation(AssertionError):
    """An invariant that does not hold."""


@dataclass
class Checks:
    """Watches a world; the reference of every job is computed without it."""

    world: World
    plans: dict[str, int] = field(default_factory=dict)  # job -> next step of its plan
    ready: dict[tuple[str, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    applied: dict[tuple[str, str, int], int] = field(default_factory=dict)  # worker life, job -> next step
    counted: dict[tuple[str, str], int] = field(default_factory=dict)  # job, update -> round
    models: dict[tuple[str, str, int], int] = field(default_factory=dict)  # job, client, model -> round
    taken: dict[str, dict[str, str]] = field(default_factory=dict)  # by job: updates that wait, by name
    sums: set[str] = field(default_factory=set)  # of sites, that were counted
    closed: dict[str, int] = field(default_factory=dict)
    summed: set[tuple[str, str, int]] = field(default_factory=set)
    """Job, client and the round that its update began in."""
    committed: dict[str, int] = field(default_factory=dict)
    states: dict[str, Phase] = field(default_factory=dict)
    joint: dict[str, dict[int, dict[int, dict[str, str]]]] = field(default_factory=dict)
    """Job -> steps -> peer -> its state."""
    present: dict[str, set[int]] = field(default_factory=dict)
    """Job -> its peers that are there."""
    references: dict[str, tuple[Mapping[str, str], list[float]]] = field(default_factory=dict)
    events: int = 0

    def expect(self, job: str) -> None:
        """Compute what a job's undisturbed run ends with."""
        spec = self.world.specs[job]
        if spec.federated is None:
            self.references[job] = reference(spec, spec.training.steps)

    # ------------------------------------------------------------ what workers do

    def said(self, worker: str, message: Any) -> None:
        """Note what a worker reports."""
        if isinstance(message, ev.StepReady):
            self.ready[message.job, message.version, message.step].add(worker)

    def applied_step(self, worker: str, job: str, version: int, step: int) -> None:
        """A rank applies each step of an assignment once, and none is left out."""
        bench = self.world.workers[worker].bench
        held = bench.held or bench.repeats
        assert held is not None
        key = (f"{worker}/{self.world.workers[worker].life}", job, held.serial)
        awaited = held.plan.last_step(self.applied.get(key, held.first), self.world.specs[job].training.steps)
        if step != awaited:
            raise Violation(f"{worker} applies step {step} of {job}, version {version}; next is {awaited}")
        self.applied[key] = step + 1

    def missed(self, worker: str, work: do.Assign, blob: str) -> None:
        """Only an assignment that is out of date may name a blob that was deleted."""
        coordinator = self.world.coordinator
        state = coordinator.scheduler.jobs.get(work.job)
        awaited = state is not None and (state.phase, state.version) == (Phase.LOADING, work.plan.version)
        if coordinator.alive and awaited:
            raise Violation(f"{worker} is to load blob {blob[:8]} of {work.job}, which was deleted")

    def obeyed(self, worker: str, message: Any, term: int, newest: int) -> None:
        """Of two coordinators a worker obeys the one that commands, once it knows of it."""
        if term < newest and hasattr(message, "job"):
            what = f"{type(message).__name__} of {message.job}"
            raise Violation(f"{worker} obeys a {what} of term {term} after one of term {newest}")

    # ------------------------------------------------------------ what the coordinator does

    def recorded(self, coordinator: Coordinator, fact: Fact) -> None:
        """Look at a fact that has just become durable."""
        self._commands(coordinator, fact)
        match fact:
            case PlanAdopted(job, plan):
                self.plans[job] = coordinator.shadow.jobs[job].steps
                self._given(coordinator, job, range(len(plan.replicas)))
                self.present[job] = set(range(len(plan.replicas)))
            case Reconfigured(job, newcomers=newcomers):
                plan = coordinator.shadow.jobs[job].plan
                if plan is not None and plan.local:  # within a pipeline a newcomer repeats what stays done
                    peers = {plan.places[rank].replica for rank in newcomers}
                    self._given(coordinator, job, peers - self.present.get(job, peers))
                    self.present[job] = set(plan.present_replicas)
            case StepCommitted():
                self._committed(coordinator, fact)
            case RoundMet():
                self._met(coordinator, fact)
            case CheckpointStored(job, step, tensors):
                self._stored(job, step, tensors)
            case UpdateTaken(job):
                self.taken.setdefault(job, {})[fact.name] = fact.update.update
            case RoundClosed():
                self._closed(fact)

    def _commands(self, coordinator: Coordinator, fact: Fact) -> None:
        newest = self._newest(coordinator)
        if coordinator.term != newest:
            what = f"{type(fact).__name__} of {getattr(fact, 'job', '')}"
            raise Violation(f"term {coordinator.term} records a {what} after term {newest} began")

    @staticmethod
    def _newest(coordinator: Coordinator) -> int:
        """Return the term of the coordinator that commands."""
        records = coordinator.folder.records
        return max((r.payload["term"] for r in records if r.kind == CoordinatorStarted.__name__), default=0)

    def performed(self, coordinator: Coordinator, instruction: do.Instruction) -> None:
        """Look at what the coordinator does."""
        self.events += 1
        match instruction:
            case do.SendTo(_, do.StepCommit() as commit):
                self._commit(coordinator, commit)
            case do.SendTo(worker, do.Release(job)):
                self._released(coordinator, worker, job)
            case do.AggregateRound():
                self._counted(instruction)
            case do.Log("worker.quarantined", fields=fields) if str(fields["reason"]).startswith("wrong: "):
                if not self.world.misled:
                    raise Violation(f"{fields['worker']} is honest: {fields['reason']}")
            case do.Log("job.state", job=job, fields=fields) if coordinator.term == self._newest(coordinator):
                before, self.states[job] = self.states.get(job), fields["state"]
                if fields["state"] == Phase.FAILED:
                    self._failed(coordinator, job, str(fields["reason"]))
                if fields["state"] == Phase.PAUSED and before in RUNNING:
                    self._paused(coordinator, job, str(fields["reason"]))

    def _failed(self, coordinator: Coordinator, job: str, reason: str) -> None:
        """None ends on one word. Looked at as it ends: a coordinator that starts anew has forgotten earlier
        tries."""
        if "step was repeated" in reason and coordinator.scheduler.jobs[job].doubt is None:
            raise Violation(f"{job} ends as diverged after one try: {reason}")

    def _paused(self, coordinator: Coordinator, job: str, reason: str) -> None:
        """Committed steps are done again only where nobody could take over what was lost."""
        record = coordinator.shadow.jobs[job]
        if record.steps <= max(record.last_checkpoint.step, self._unwritten(coordinator, job)):
            return
        whole = self._whole(coordinator, job, record)
        if whole and not any(known in reason for known in EXCUSES_OF_REPLICAS):
            raise Violation(f"{job} takes back steps though {whole} have a whole replica: {reason}")
        if self.world.short_logs:
            return
        if record.plan is not None and record.plan.piped and "the coordinator was restarted" in reason:
            return  # how far its peers were the journal does not say
        known_to_excuse = EXCUSES + (SHARED_ANEW if self.world.scenario.replicas > 1 else ())
        excuse = next((known for known in known_to_excuse if known in reason), "")
        if not excuse:
            raise Violation(f"{job} takes back {record.steps - record.last_checkpoint.step} steps: {reason}")
        if excuse in EXCUSES[:2]:
            known, now_s = coordinator.scheduler.roster, self.world.clock.now_s
            mine = {place.worker for place in record.plan.places} if record.plan is not None else set()
            spare = [
                w for w in known.idle() if w not in mine and known.workers[w].member.since_s < now_s - 0.5
            ]
            if len(spare) > EXCUSES.index(excuse):
                raise Violation(f"{job} takes back steps though {spare} could take over: {reason}")

    @staticmethod
    def _unwritten(coordinator: Coordinator, job: str) -> int:
        """Return the step of the newest checkpoint whose record is not on the disk yet, 0 for none."""
        facts = [f for f in coordinator.unwritten if isinstance(f, CheckpointStored) and f.job == job]
        return max((fact.step for fact in facts), default=0)

    def _released(self, coordinator: Coordinator, worker: str, job: str) -> None:
        """Who holds what is trained lets go of it once the checkpoint that it was stored for is durable."""
        state = coordinator.scheduler.jobs.get(job)
        if state is None or state.plan is None or state.rank_of(worker) is None:
            return
        step = self._unwritten(coordinator, job)
        if step and not any(known in state.reason for known in EXCUSES):
            raise Violation(f"{worker} of {job} lets go before step {step} is recorded: {state.reason}")

    def _whole(self, coordinator: Coordinator, job: str, record: JobRecord) -> list[str]:
        """Return the workers of a replica that is whole among several, none where none is."""
        plan, known = record.plan, coordinator.scheduler.roster.workers
        if plan is None or plan.local or len(plan.replicas) == 1:
            return []
        lost = set()
        for rank, place in enumerate(plan.places):
            worker = known.get(place.worker)
            loading = record.moving and record.given(rank) == record.assigned
            empty = self.world.workers[place.worker].session.job != job  # its process is another one
            if worker is None or worker.member.gone or not worker.idle or loading or empty:
                lost.add(place.replica)
        left = [number for number in range(len(plan.replicas)) if number not in lost]
        return [stage.worker for stage in plan.replicas[left[0]].stages] if left else []

    def _commit(self, coordinator: Coordinator, commit: do.StepCommit) -> None:
        if commit.own:  # of one peer, within its period
            return
        driver: Any = coordinator.scheduler.driver_of(commit.job)
        state = driver.jobs[commit.job]
        ranks = {state.plan.places[rank].worker for rank in state.plan.present}
        missing = ranks - self.ready[commit.job, commit.version, commit.step]
        if missing and self.committed.get(commit.job, -1) < commit.step:
            raise Violation(f"{commit.job} commits step {commit.step} without {sorted(missing)}")
        durable = coordinator.shadow.jobs[commit.job]
        if durable.steps <= commit.step:
            raise Violation(f"{commit.job} sends the commit of step {commit.step} before it is durable")

    def _committed(self, coordinator: Coordinator, fact: StepCommitted) -> None:
        plan = coordinator.shadow.jobs[fact.job].plan  # the scheduler may know of another by now
        awaited = self.plans.get(fact.job, fact.step)
        if plan is not None:
            awaited = plan.last_step(awaited, self.world.specs[fact.job].training.steps)
        if fact.step != awaited:
            raise Violation(f"{fact.job} records step {fact.step} of its plan, next is {awaited}")
        self.plans[fact.job] = fact.step + 1
        losses = self.references[fact.job][1]
        local = self.world.specs[fact.job].training.local_exchange is not None
        if fact.loss != losses[fact.step] and not (self.world.misled or local):
            raise Violation(f"{fact.job}: step {fact.step} is not that of an undisturbed run")
        if local and plan is not None and not plan.local:  # one pipeline is left
            states = self._joint(fact.job, fact.step)
            after, _ = exact_step(self.world.specs[fact.job], states[fact.step][0], fact.step)
            states[fact.step + 1] = {0: after}
        ranks = {plan.places[rank].worker for rank in plan.present} if plan is not None else set()
        missing = ranks - self.ready[fact.job, fact.version, fact.step]
        if missing:
            raise Violation(f"{fact.job} records step {fact.step} without {sorted(missing)}")
        self.committed[fact.job] = max(self.committed.get(fact.job, -1), fact.step)

    def _met(self, coordinator: Coordinator, met: RoundMet) -> None:
        """What peers have after a round follows from who was in it, and from nothing else."""
        record = coordinator.shadow.jobs[met.job]
        assert record.plan is not None
        plan, states = record.plan, self._joint(met.job, met.step)
        first, training = max(states), self.world.specs[met.job].training
        groups = groups_of(plan, training, met.step)
        if (met.groups or (plan.present_replicas,)) != groups:
            raise Violation(f"{met.job}: a round of {met.groups}, from the journal follow {groups}")
        joined = joins(plan, training, met.step)
        begins = [replica.stages[0].worker for replica in plan.replicas]
        late = {peer: met.late[worker] for peer, worker in enumerate(begins) if worker in met.late}
        states[met.step + 1] = local_steps.after(states[first], groups, first, met.step, joined, late)
        if met.included != tuple(plan.places[rank].worker for rank in plan.present):
            raise Violation(f"{met.job}: a round of {met.included}, the plan has ranks {plan.present}")
        absent = {record.plan.places[rank].worker for rank in record.plan.absent}
        if absent != met.missing.keys() or not all(met.missing.values()):
            raise Violation(f"{met.job}: {dict(met.missing)} are missing in a round, {absent} are lost")

    def _given(self, coordinator: Coordinator, job: str, peers: Collection[int]) -> None:
        """A peer that joins begins with what the newest checkpoint has of it."""
        checkpoint = coordinator.shadow.jobs[job].last_checkpoint
        if peers and self.world.specs[job].training.local_exchange is not None:
            states = self._joint(job, checkpoint.step).setdefault(checkpoint.step, {})
            states.update({peer: peer_tensors.own(checkpoint.tensors, peer) for peer in peers})

    def _joint(self, job: str, step: int) -> dict[int, dict[int, dict[str, str]]]:
        """Return the states of a job of peers up to a step; newer ones are of a plan that has gone back."""
        states = self.joint.setdefault(job, {})
        for later in [done for done in states if done > step]:
            del states[later]
        return states

    def _expected(self, job: str, step: int) -> Mapping[str, str]:
        """Return the state that a job has after so many steps."""
        if self.world.specs[job].training.local_exchange is not None:
            states = self.joint.get(job, {}).get(step)
            return states[min(states)] if states else self.world.specs[job].tensors
        return reference(self.world.specs[job], step)[0]

    def _stored(self, job: str, step: int, tensors: Mapping[str, str]) -> None:
        wanted = [self._expected(job, step)]
        if self.world.specs[job].training.local_exchange is not None:  # whichever of them stored it
            wanted += self.joint[job][step].values()
        absent = set(tensors.values()) - self.world.coordinator.folder.blobs
        tensors = peer_tensors.model(tensors)
        if dict(tensors) not in wanted and not self.world.misled:
            raise Violation(f"{job}: the checkpoint of step {step} is not that of an undisturbed run")
        if absent:
            raise Violation(f"{job}: {len(absent)} blobs of the checkpoint of step {step} are not there")

    def _counted(self, asked: do.AggregateRound) -> None:
        names = [*asked.updates, *(name for held in asked.sums.values() for name in held.samples)]
        self.sums |= asked.sums.keys()
        if wrong := self.world.vectors.wrong(asked):
            raise Violation(f"{asked.job}: round {asked.round} opens to {wrong}")
        if len(names) != len({*names}):
            raise Violation(f"{asked.job}: round {asked.round} counts one of {sorted(names)} twice")
        for known in (self.counted, self.models):  # an earlier sum of this round was never durable
            for key in [k for k, at in known.items() if k[0] == asked.job and at >= asked.round]:
                del known[key]
        blobs = {name: update.update for name, update in asked.updates.items()}
        for name, blob in (blobs | {name: held.blob for name, held in asked.sums.items()}).items():
            before = self.counted.get((asked.job, blob), asked.round)
            if before != asked.round:
                raise Violation(f"an update of {name} is counted in rounds {before} and {asked.round}")
            if blob in self.world.coordinator.folder.blobs:  # else it cannot be read, and is refused
                self.counted[asked.job, blob] = asked.round
        for held in asked.sums.values():
            for client in held.samples if held.blob in self.world.coordinator.folder.blobs else ():
                key = (asked.job, client, asked.round - held.age)
                if (before := self.models.setdefault(key, asked.round)) != asked.round:
                    raise Violation(f"an update of {client} is counted in rounds {before} and {asked.round}")

    def _closed(self, fact: RoundClosed) -> None:
        if fact.round != self.closed.get(fact.job, 0):
            raise Violation(f"{fact.job} closes round {fact.round}, next is {self.closed.get(fact.job, 0)}")
        self.closed[fact.job] = fact.round + 1
        if fact.waits is not None:
            held = self.taken.setdefault(fact.job, {})
            for name in held.keys() - {*fact.waits}:
                blob = held.pop(name)
                here = blob in self.world.coordinator.folder.blobs
                if here and self.counted.get((fact.job, blob)) != fact.round:
                    raise Violation(f"an update of {name} is neither counted in round {fact.round} nor waits")
        for worker, told in fact.participants.items():
            if "clients" in told:
                continue
            begun = fact.round - told.get("staleness", 0)
            if (fact.job, worker, begun) in self.summed:
                raise Violation(f"the update of {worker} of round {begun} is counted again in {fact.round}")
            self.summed.add((fact.job, worker, begun))

    def current(self) -> None:
        """What counts for the step in flight was said of it, under the plan that it runs with."""
        driver = self.world.coordinator.scheduler.drivers[0]
        assert isinstance(driver, PipelineDriver)
        for job, state in driver.jobs.items():
            for rank, report in state.run.ready.items():
                said = (report.version, report.step)
                if said != (version_at(state.run.lineage, state.step, state.version), state.due):
                    raise Violation(f"{job} counts a report of {said} of rank {rank}")

    def folded(self) -> None:
        """The ledger is the fold of what is on the disk."""
        coordinator = self.world.coordinator
        if coordinator.settled and coordinator.scheduler.ledger.jobs != coordinator.shadow.jobs:
            raise Violation("the ledger is not the fold of its journal")

    def _could_go_on(self, spec: JobSpec) -> bool:
        """Whether enough workers are here for a job that has not ended."""
        here = [worker for worker in self.world.workers.values() if worker.alive and not worker.hung]
        return len(here) >= (spec.federated.rule.min_clients if spec.federated is not None else 1)

    # ------------------------------------------------------------ the end

    def ended(self) -> None:
        """Every job has ended as an undisturbed one does, or says what it waits for."""
        for job, spec in self.world.specs.items():
            state = self.world.coordinator.scheduler.jobs[job]
            if state.phase not in ENDED and self._could_go_on(spec):
                raise Violation(f"{job} is still {state.phase.value} ({state.reason})")
        self.finished()

    def finished(self) -> None:
        """Every job that has finished ends as an undisturbed one does."""
        for job, state in self.world.coordinator.scheduler.jobs.items():
            spec = self.world.specs[job]
            if state.phase is not Phase.FINISHED:
                continue
            if spec.federated is not None:
                if self.closed.get(job, 0) != spec.training.steps:
                    raise Violation(f"{job} finished after {self.closed.get(job, 0)} rounds")
            elif peer_tensors.model(state.checkpoint.tensors) != dict(
                self._expected(job, spec.training.steps)
            ):
                raise Violation(f"{job} does not end with the weights of an undisturbed run")
