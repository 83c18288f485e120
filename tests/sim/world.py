"""A world: one coordinator, some workers, jobs, faults, and the checks that watch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, TypeVar

from atoll.dataset_spec import DataSpec
from atoll.federated import Federated, FederatedSpec
from atoll.job import JobSpec, Optimizer, TrainingSpec
from atoll.secure import LEAST_MEMBERS
from coordinator.messages import events as ev
from coordinator.messages.facts import from_record
from tests.sim.checks import Checks, Violation
from tests.sim.clock import Clock, digest
from tests.sim.coordinator import NAME, NEEDS, OPS, Coordinator, Folder
from tests.sim.faults import Fault, KilledForMemory, TakeOver, drawn
from tests.sim.network import Network
from tests.sim.secure import SECURE, Vectors
from tests.sim.worker import Worker

F = TypeVar("F")
FAULTS_WITHIN_S = 20.0
ENDS_WITHIN_S = 600.0
TAKEN_OVER = 0.1  # share of the runs in which a second coordinator starts on the first one's database
SHORT_LOGS = 0.05  # share of the runs in which send logs do not reach back to the checkpoint
WITH_STANDBYS = 0.4  # share of the runs
KILLED = 0.15  # share of the runs in which a stage is killed for memory
REPLICATED = 0.1  # share of the runs in which pipelines are replicated
FOLD_EVERY = 50  # events between two looks at whether the ledger is its journal's fold


def pipeline_job(
    steps: int = 16,
    tensors: int = 6,
    spot_checks: float = 0.2,
    standbys: int | None = 0,
    replicas: int = 1,
    local_steps: int = 0,
    exchange: str = "diloco",
    quorum: int = 0,
) -> JobSpec:
    """Return a job of so many steps that can be cut into as many stages as it has tensors."""
    names = {f"w{at:02}": digest("initial", at) for at in range(tensors)}
    clipped = Optimizer(clip_norm=1.5)
    training = TrainingSpec(
        steps, 2, optimizer=clipped, checkpoint_every=3, eval_every=4, eval_batches=1, spot_checks=spot_checks
    )
    if replicas > 1:
        count = max(4, replicas)
        training = replace(training, n_micro=count, blocks=count, replicas=str(replicas))
    if local_steps:
        training = replace(training, exchange=exchange, local_steps=local_steps, quorum=quorum)
    data = DataSpec((), 8, 1)
    return JobSpec("job", training, "ab" * 32, "cd" * 32, names, data, data, standbys=standbys)


def federated_job(rounds: int = 6, buffer: int = 0, **options: Any) -> JobSpec:
    """Return a federated job of so many rounds; ``buffer``: asynchronous, of so many updates each;
    ``options``: others of ``Federated``."""
    wanted = {"deadline_s": 20.0, "min_clients": min(2, buffer or 2), "evaluate_every": 1, **options}
    rule = Federated(buffer=buffer, **wanted)
    federated = FederatedSpec(rule, "digits", {"x": "image"})
    names = {"w": digest("initial", "federated")}
    training = TrainingSpec(rounds, n_micro=1)
    return JobSpec(
        "fed", training, "ab" * 32, "cd" * 32, names, DataSpec((), 0, 4), None, federated=federated
    )


@dataclass(frozen=True)
class Scenario:
    """Everything a run depends on."""

    seed: int
    workers: int = 4
    pipeline: int = 1  # jobs
    federated: int = 0
    faults: tuple[Fault, ...] = ()
    log_steps: int = 1000  # that a send log has room for
    stages: int = 3  # of a plan, at most
    standbys: int | None = 0  # as of ``JobSpec``
    steps: int = 16
    replicas: int = 1  # of a pipeline
    local_steps: int = 0  # of each replica between two exchanges, which is a peer then
    exchange: str = "diloco"  # of peers
    peer_stages: int = 1  # of such a peer, at most
    quorum: int = 0  # of them, that a round waits for; 0: all
    buffer: int = 0  # of federated jobs that are asynchronous
    secure: bool = False  # whose updates are masked
    sites: int = 0  # that workers stand in by turns, whose gateways sum updates
    populations: int = 0  # that workers speak for by turns; every fourth has data of its own
    rings: bool = False  # pipelines whose first stage has the last piece, too

    def names(self) -> list[str]:
        return [f"w{at}" for at in range(self.workers)]


def scenario(seed: int) -> Scenario:
    """Draw a run from its seed."""
    random = Random(seed)
    workers = random.randint(3, 6)
    pipeline, federated = random.choice(((1, 0), (1, 0), (2, 0), (0, 1), (1, 1)))
    found = Scenario(seed, workers, pipeline, federated)
    faults = drawn(random, found.names(), FAULTS_WITHIN_S)
    if random.random() < TAKEN_OVER:
        faults += (TakeOver(round(2.0 + 14.0 * random.random(), 2), round(1.0 + 3.0 * random.random(), 2)),)
    log_steps = 2 if random.random() < SHORT_LOGS else found.log_steps
    standbys = random.randint(1, 2) if random.random() < WITH_STANDBYS else 0
    replicas = random.choice((2, 3)) if random.random() < REPLICATED else 1
    local_steps = random.choice((0, 3, 7)) if replicas > 1 else 0
    if random.random() < KILLED:
        at_s = round(2.0 + 10.0 * random.random(), 2)
        faults += (KilledForMemory(at_s, 0.0, random.choice(found.names())),)
    faults = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return replace(
        found,
        faults=faults,
        log_steps=log_steps,
        standbys=standbys,
        replicas=replicas,
        local_steps=local_steps,
    )


@dataclass
class World:
    """``run`` until every job has ended; raises Violation when something does not hold."""

    scenario: Scenario
    clock: Clock = field(init=False)
    network: Network = field(init=False)
    coordinator: Coordinator = field(init=False)
    workers: dict[str, Worker] = field(default_factory=dict)
    specs: dict[str, JobSpec] = field(default_factory=dict)
    checks: Checks = field(init=False)
    former: list[Coordinator] = field(default_factory=list)  # that another machine's took the place of
    vectors: Vectors = field(default_factory=Vectors)  # of secure rounds
    doubtful_until_s: float = 0.0  # until then workers find now the one, now the other

    def __post_init__(self) -> None:
        self.clock = Clock(self.scenario.seed)
        self.network = Network(self.clock)
        self.checks = Checks(self)
        self.coordinator = self._coordinator(NAME, Folder())
        for name in self.scenario.names():
            self.workers[name] = Worker(
                self.clock,
                name,
                network=self.network,
                coordinator=self._found,
                peers=self.workers.get,
                applied=self.checks.applied_step,
                said=self.checks.said,
                missed=self.checks.missed,
                obeyed=self.checks.obeyed,
                log_steps=self.scenario.log_steps,
                vectors=self.vectors,
                site=f"site{int(name[1:]) % self.scenario.sites}" if self.scenario.sites else "",
                population=self._population(int(name[1:])),
            )

    def _population(self, at: int) -> str:
        count = self.scenario.populations
        return f"people{at % count}" if count and at % 4 < 3 else ""

    def _coordinator(self, name: str, folder: Folder) -> Coordinator:
        made = Coordinator(
            self.clock,
            name,
            network=self.network,
            folder=folder,
            stages=self.scenario.stages,
            peer_stages=self.scenario.peer_stages,
            rings=self.scenario.rings,
        )
        made.recorded = partial(self.checks.recorded, made)
        made.performed = partial(self.checks.performed, made)
        return made

    def facts(self, kind: type[F]) -> list[F]:
        """What the journal holds of a kind, in order."""
        return [fact for fact in map(from_record, self.coordinator.folder.records) if isinstance(fact, kind)]

    def _found(self) -> Coordinator:
        """Return the coordinator that answers whoever connects now."""
        both = self.clock.now_s < self.doubtful_until_s and self.former[-1].alive
        return self.former[-1] if both and self.clock.random.random() < 0.5 else self.coordinator

    def take_over(self, seconds: float) -> None:
        """Start a coordinator elsewhere, on the same database; the one before knows nothing of it."""
        self.former.append(self.coordinator)
        self.doubtful_until_s = self.clock.now_s + seconds
        self.coordinator = self._coordinator(f"{NAME}-{len(self.former) + 1}", self.coordinator.folder)
        self.coordinator.start()
        for worker in self.workers.values():  # their addresses are not the same any more
            for _ in range(2):
                moved = partial(self.network.break_streams, worker, False)
                self.clock.after(seconds * self.clock.random.random(), moved)

    def restart(self, coordinator: Coordinator) -> None:
        """Start a killed coordinator again, unless another has taken its place."""
        if coordinator is self.coordinator and not coordinator.alive:
            coordinator.start()

    def begin(self) -> None:
        """Start everybody, submit the jobs, and plan the faults."""
        self.coordinator.start()
        for at, worker in enumerate(self.workers.values()):
            self.clock.after(0.1 * at, worker.start)
        scenario = self.scenario
        spec = pipeline_job(
            scenario.steps,
            standbys=scenario.standbys,
            replicas=scenario.replicas,
            local_steps=scenario.local_steps,
            quorum=scenario.quorum,
            exchange=scenario.exchange,
        )
        jobs = [spec] * scenario.pipeline
        options: dict[str, Any] = {"gateways": "auto"} if scenario.sites else {}
        if scenario.secure:
            options = {"secure": SECURE, "evaluate_every": 0, "min_clients": LEAST_MEMBERS}
        jobs += [federated_job(buffer=scenario.buffer, **options) for _ in range(scenario.federated)]
        for at, spec in enumerate(jobs):
            self.submit(f"job-{at + 1}", spec, 1.0 + at)
        for fault in self.scenario.faults:
            self.clock.after(fault.at_s, partial(self._strike, fault))

    def submit(self, job: str, spec: JobSpec, after_s: float) -> None:
        """Have the owner submit a job, as soon as somebody answers."""
        self.specs[job] = spec
        self.checks.expect(job)
        self.coordinator.folder.blobs |= set(spec.tensors.values())

        def ask() -> None:
            coordinator = self.coordinator
            if job in coordinator.shadow.jobs:
                return
            if coordinator.alive and not coordinator.frozen and not coordinator.folder.full:
                coordinator.post(ev.Submitted(job, job, spec, OPS, needs=NEEDS))
            self.clock.after(3.0, ask)

        self.clock.after(after_s, ask)

    def _strike(self, fault: Fault) -> None:
        self.clock.tell(f"FAULT {fault}")
        fault.strike(self)

    @property
    def short_logs(self) -> bool:
        """Whether send logs may not reach back to the newest checkpoint."""
        return self.scenario.log_steps < 10

    @property
    def misled(self) -> bool:
        """Whether a worker computes wrong and does not say so."""
        return any(worker.misleads for worker in self.workers.values())

    @property
    def over(self) -> bool:
        """Whether every job has ended."""
        jobs = self.coordinator.shadow.jobs
        return all(job in jobs and jobs[job].outcome for job in self.specs)

    def run(self, seconds: float = ENDS_WITHIN_S) -> None:
        """Let time pass until every job has ended."""
        self.begin()
        until_s, looked = self.clock.now_s + seconds, 0
        quiet_s = self.clock.now_s + FAULTS_WITHIN_S
        while self.clock.step(until_s):
            looked += 1
            self.checks.current()
            if looked % FOLD_EVERY == 0:
                self.checks.folded()
            if self.over and self.clock.now_s > quiet_s:
                break
        self.checks.folded()
        if not self.coordinator.alive:
            raise Violation("the coordinator did not come back")
        self.checks.ended()


def violation_of(found: Scenario) -> tuple[str, World]:
    """Run a scenario; returns what did not hold, "" when all did."""
    world = World(found)
    try:
        world.run()
    except Violation as broken:
        return str(broken), world
    except Exception as error:  # noqa: BLE001 - whatever our own machines raise is what we look for
        return f"{type(error).__name__}: {error}", world
    return "", world


def told(world: World, last: int | None = None) -> str:
    """Return a run's story as lines."""
    lines: Sequence[tuple[float, str]] = world.clock.story if last is None else world.clock.story[-last:]
    return "\n".join(f"{at_s - 1000.0:9.3f} {text}" for at_s, text in lines)
