"""A coordinator whose workers a test speaks for, so that they say what no real session would; only
waiting takes time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from atoll.dataset_spec import DataSpec
from atoll.job import JobSpec, TrainingSpec
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import Fact
from coordinator.messages.jobs import JobState, Phase
from tests.sim.clock import Clock, Process
from tests.sim.coordinator import NAME, OPS, Coordinator, Folder
from tests.sim.network import End, Network, Stream
from tests.sim.worker import introduction

if TYPE_CHECKING:
    from atoll.plan import Plan

HASH = "ab" * 32


def spec(name: str = "job", **changes: Any) -> JobSpec:
    """Return a job of two tensors; ``changes``: to how it trains."""
    training = TrainingSpec(**{"steps": 3, "n_micro": 2, **changes})
    return JobSpec(name, training, HASH, "", {"w0": HASH, "w1": HASH}, DataSpec((), 8, 1), None)


@dataclass
class Scripted(Coordinator):
    """Workers answer probes by themselves and beat while a test waits, but for the ``silent``."""

    clock: Clock = field(default_factory=lambda: Clock(0))
    name: str = NAME
    network: Network = field(init=False)
    folder: Folder = field(default_factory=lambda: Folder(write_s=0.0), kw_only=True)
    fewest: int = field(default=2, kw_only=True)
    stages: int = field(default=2, kw_only=True)
    slowness: float = field(default=0.0, kw_only=True)
    bandwidth_bps: float = field(default=1e9, kw_only=True)
    silent: set[str] = field(default_factory=set, kw_only=True)
    guests: dict[str, ev.Guest] = field(default_factory=dict)  # limits that workers state
    altered: Callable[[Plan, do.MakePlan], Plan] = field(default=lambda plan, asked: plan, kw_only=True)
    facts: list[Fact] = field(default_factory=list, init=False)
    done: list[do.Instruction] = field(default_factory=list, init=False)
    streams: dict[str, Stream] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.network = Network(self.clock, delay_s=0.0, jitter_s=0.0, rate_bps=math.inf, loss=0.0)
        self.recorded, self.performed = self.facts.append, self.done.append
        self.start()

    def restart(self) -> None:
        """Kill it and start it anew from its folder; nothing is ``done``, nobody has reconnected."""
        self.kill()
        self.streams.clear()
        self.done.clear()
        self.start()

    def plan(self, asked: do.MakePlan) -> ev.Event:
        """Plan as every simulated coordinator does, and let the test alter it."""
        made = super().plan(asked)
        return replace(made, plan=self.altered(made.plan, asked)) if isinstance(made, ev.PlanMade) else made

    # ------------------------------------------------------------ time

    def settle(self, seconds: float = 0.0) -> None:
        """Let everything happen that is due by then."""
        until_s = self.clock.now_s + seconds
        while self.clock.step(until_s):
            pass

    def handle(self, event: ev.Event) -> None:
        """Handle an event and everything that follows from it at once."""
        self.post(event)
        self.settle()

    def wait(self, seconds: float) -> None:
        """Let time pass; whoever is connected and not silent beats."""
        beat_s, until_s = self.config.liveness.heartbeat_s / 2, self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.settle(min(beat_s, until_s - self.clock.now_s))
            for worker, stream in self.streams.items():
                if worker not in self.silent:
                    guest = self.guests.get(worker, ev.UNLIMITED)
                    stream.send(1, ev.Heartbeat(self.clock.now_s, "", 0, 0, 0, 0, guest=guest))
            self.settle()

    # ------------------------------------------------------------ workers

    def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
        """Return how a worker introduces itself."""
        return introduction(worker, incarnation)

    def join(self, *workers: str, incarnation: int = 1) -> None:
        """Have workers open a session, one after another."""
        for worker in workers:
            process = Process(self.clock, worker)
            process.start()
            end = End(process, partial(self._heard, worker), lambda reason: None)
            welcome = partial(self.streams.__setitem__, worker)
            self.accept(end, worker, self.introduced(worker, incarnation), welcome)
            self.settle()

    def says(self, worker: str, message: ev.PeerMessage) -> None:
        """Have a worker say something in its session."""
        stream = self.streams[worker]
        assert stream.ends[1].open, f"{worker} has no session"
        stream.send(1, message)
        self.settle()

    def lose(self, worker: str) -> None:
        """Break a worker's connection."""
        self.streams[worker].end("the connection broke")
        self.settle()

    def _heard(self, worker: str, message: do.Message) -> None:
        match message:
            case _ if worker in self.silent:
                pass
            case do.ProbeOps(request, _, signatures, _):
                timings = dict.fromkeys(signatures, (0.001, 0.002))
                self.streams[worker].send(1, ev.OpsProbed(request, timings))
            case do.ProbeLink():
                self.probed(worker, message)

    def probed(self, worker: str, probe: do.ProbeLink) -> None:
        """Answer a link's probe."""
        answer = ev.LinkProbed(probe.request, probe.link.peer, 1e-3, self.bandwidth_bps)
        self.streams[worker].send(1, answer)

    # ------------------------------------------------------------ jobs

    def submit(self, job: str = "job-1", what: JobSpec | None = None) -> None:
        """Have the owner submit a job."""
        self.handle(ev.Submitted(job, "", what or spec(), OPS))

    def state(self, job: str = "job-1") -> JobState:
        """Return where a job stands."""
        return self.scheduler.jobs[job]

    def holders(self, job: str = "job-1") -> list[str]:
        """Return who holds a job's stages, the first stage's worker first."""
        plan = self.state(job).plan
        assert plan is not None
        return [place.worker for place in plan.places]

    def load(self, job: str = "job-1") -> None:
        """Have all stages loaded."""
        for worker in self.holders(job):
            self.says(worker, ev.Loaded(job, self.state(job).version))

    def ready(self, worker: str, job: str = "job-1", **changes: Any) -> None:
        """Have a stage report the step in flight."""
        state = self.state(job)
        losses = (1.0,) if worker == self.holders(job)[-1] else ()
        self.says(worker, replace(ev.StepReady(job, state.version, state.step, losses), **changes))

    def step(self, job: str = "job-1") -> None:
        """Have all stages report the step in flight."""
        for worker in self.holders(job):
            self.ready(worker, job)

    def training(self, *workers: str, **changes: Any) -> Self:
        """Have workers join (none named: three), and the first two of them train a job."""
        self.join(*(workers or ("a", "b", "c")))
        self.submit(what=spec(**changes))
        self.load()
        assert self.state().phase is Phase.TRAINING
        return self

    # ------------------------------------------------------------ what was done

    def messages(self, kind: type) -> list[tuple[str, Any]]:
        """Return the messages of a kind that were sent, each with its receiver."""
        sent = (i for i in self.done if isinstance(i, do.SendTo) and isinstance(i.message, kind))
        return [(i.worker, i.message) for i in sent]

    def to(self, worker: str, kind: type) -> list[Any]:
        """Return the messages of a kind that were sent to a worker."""
        return [message for receiver, message in self.messages(kind) if receiver == worker]

    def all(self, kind: type) -> list[Any]:
        """Return the instructions of a kind."""
        return [i for i in self.done if isinstance(i, kind)]
