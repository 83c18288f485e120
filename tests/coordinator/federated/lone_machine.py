"""A federated job's machine alone, without the scheduler and sessions through which tests/sim drives it: a
test gives it any event at any time, and sees what it wants done before anything is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.dataset_spec import DataSpec
from atoll.federated import Federated, FederatedSpec
from atoll.job import JobSpec, TrainingSpec
from atoll.opdag import TensorMeta
from coordinator.federated import machine
from coordinator.federated import state as fed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import JobSubmitted, Ledger
from coordinator.messages.jobs import Point, Record

HASH = "ab" * 32
UP = (TensorMeta((100, 100), "float32"), TensorMeta((100,), "float32"))


def name_of(*what: object) -> str:
    return f"{abs(hash(what)):064x}"[:64]


def spec(rounds: int = 3, eval_batches: int = 0, **options: Any) -> JobSpec:
    rule = Federated(**{"deadline_s": 60.0, "min_clients": 1, **options})
    training = TrainingSpec(steps=rounds, n_micro=1, eval_batches=eval_batches, seed=5)
    held = DataSpec((), 8, 4) if eval_batches else None
    federated = FederatedSpec(rule, "digits", {"x": "image"})
    return JobSpec("job", training, HASH, HASH, {"w": HASH}, DataSpec((), 0, 4), held, federated=federated)


@dataclass
class LoneMachine:
    """An aggregator answers at once; the test speaks for the clients."""

    spec: JobSpec = field(default_factory=spec)
    now_s: float = 100.0
    aggregator: bool = True
    up: tuple[TensorMeta, ...] = UP  # what an update holds
    bad: set[str] = field(default_factory=set)  # whose updates the aggregator refuses
    said: list[tuple[str, Any]] = field(default_factory=list)
    todo: list[fed.Todo] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.state = fed.FederationState("job-1", self.spec, 0.0)
        self.ledger.apply(JobSubmitted("job-1", "", self.spec, 0, {}, 0.0))

    def step(self, event: fed.Event) -> list[fed.Todo]:
        self.state, todo = machine.step(self.state, event, self.now_s)
        self.todo += todo
        for item in todo:
            self.obey(item)
        return todo

    def obey(self, item: fed.Todo) -> None:
        match item:
            case fed.Say(worker, message):
                self.said.append((worker, message))
            case Record(fact):
                self.ledger.apply(fact)
            case do.OpenAggregator() if self.aggregator:
                self.open()
            case do.AggregateRound() if self.aggregator:
                self.sum(item)
            case do.EvaluateModel(_, at_round) if self.aggregator:
                self.step(ev.CentrallyEvaluated("job-1", at_round, 0.25, {"accuracy": 0.75}, 8))

    def open(self) -> None:
        inputs = {"x": TensorMeta((4, 8, 8), "float32")}
        self.step(
            ev.AggregatorOpened("job-1", self.state.round, self.model(self.state.round), inputs, self.up)
        )

    def model(self, at_round: int) -> ev.Blob:
        return ev.Blob(name_of("model", at_round), 1000)

    def sum(self, asked: do.AggregateRound) -> None:
        named = dict.fromkeys(asked.updates, 1) | {n: len(s.samples) for n, s in asked.sums.items()}
        dropped = {name: "1 non-finite elements" for name in named if name in self.bad}
        enough = sum(count for name, count in named.items() if name not in dropped) >= asked.least
        state = ev.Blob(name_of("state", asked.round), 2000) if enough else None
        model = self.model(asked.round + 1) if enough else None
        self.step(ev.Aggregated("job-1", asked.round, asked.attempt, state, model, None, dropped))

    def begin(self, *clients: str, **latency_s: float) -> None:
        """The job's turn comes; these clients join and load."""
        self.step(fed.Begin())
        for name in clients:
            self.step(fed.Invited(name, 100, latency_s.get(name, 0.0)))
        for name in clients:
            self.says(name, ev.Loaded("job-1", 1))

    def says(self, worker: str, message: Any) -> list[fed.Todo]:
        return self.step(fed.FromClient(worker, message))

    def updates(self, *names: str, at_round: int | None = None, **figures: Any) -> None:
        for name in names:
            self.says(name, update(name, self.state.round if at_round is None else at_round, **figures))

    def evaluates(self, *names: str, loss: float = 1.0) -> None:
        for name in names:
            told = ev.ClientEvaluated("job-1", self.state.round, 10, loss, {"accuracy": 0.5})
            self.says(name, told)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.step(fed.Tick())

    def heard(self, worker: str, kind: type) -> list[Any]:
        return [m for name, m in self.said if name == worker and isinstance(m, kind)]

    def facts(self, kind: type) -> list[Any]:
        return [item.fact for item in self.todo if isinstance(item, Record) and isinstance(item.fact, kind)]

    def points(self) -> dict[str, float]:
        return {item.name: item.value for item in self.todo if isinstance(item, Point)}


def update(name: str, at_round: int, **figures: Any) -> ev.UpdateReady:
    known: dict[str, Any] = {"n_samples": 90, "steps": 3, "metrics": {"loss": 0.5}, "train_s": 1.0}
    known |= {"upload_bytes": 40_000, "upload_s": 0.1, "download_bytes": 50_000} | figures
    return ev.UpdateReady("job-1", at_round, name_of(name, at_round), 40_000, **known)
