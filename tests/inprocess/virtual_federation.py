"""A federated job's real machine in virtual time: clients that train for real, seconds that are a model.

Rounds and asynchronous jobs are run by the same code as on a coordinator (``coordinator.federated.machine``),
with the worker's own trainer and the strategies' own sums. Network, files and clock are left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from atoll.dataset_spec import DataSpec
from atoll.federated import NO_FLOORS, Federated, FederatedSpec
from atoll.job import JobSpec
from atoll.sampling import client_key
from coordinator.federated import machine
from coordinator.federated import state as fed
from coordinator.federated.checks import check_federated
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed
from coordinator.messages.instructions import TrainRound
from coordinator.messages.jobs import Phase, Record
from strategies import make_strategy
from strategies.aged import VersionSums, aged
from strategies.fixed import Accumulator, FixedSums
from strategies.layout import own_parts
from strategies.linear import Linear
from strategies.values import Broadcast, ClientState, ClientUpdate, ServerState
from worker.federated.local_model import Client, LocalData, LocalModel
from worker.federated.trainer import LocalTrainer

if TYPE_CHECKING:
    from strategies.layout import Arrays

JOB = "job-1"
HASH = "ab" * 32
Seconds = Callable[[str, int], float]
"""(client, local steps) -> seconds from the order to the answer."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A model, when it was made, and of what."""

    at_s: float
    fact: RoundClosed
    weights: Arrays


@dataclass
class VirtualFederation:
    """Clients by name, each with its arrays by field; ``run`` yields every model that is made. ``hosts``: so
    many workers that all speak for all of them; 0: each client for itself."""

    model: LocalModel
    rule: Federated
    clients: Mapping[str, Mapping[str, Any]]
    seconds: Seconds
    hosts: int = 0
    now_s: float = 0.0
    trained: int = 0  # updates that clients have sent
    _events: list[tuple[float, int, fed.Event]] = field(default_factory=list)
    _updates: dict[str, ClientUpdate] = field(default_factory=dict)
    _sums: dict[str, FixedSums] = field(default_factory=dict)
    _broadcasts: dict[str, Broadcast] = field(default_factory=dict)
    _made: list[Closed] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_federated(self.rule, self.model.training)
        self._strategy = make_strategy(self.rule.strategy, self.rule.options)
        self._trainer = LocalTrainer(self.model, self._strategy, self.rule, "cpu", floors=NO_FLOORS)
        fields = {name: name for name in self.model.inputs}
        seed = self.model.training.seed
        self._clients = {
            name: Client.of(name, LocalData(data, fields, self.model.inputs), self.rule.held_out, seed)
            for name, data in self.clients.items()
        }
        weights = {n: self.model.tensors[n].detach().numpy().copy() for n in self._trainer.layout.metas}
        parts = own_parts(self.model.layout(), self.rule.local)
        self._server: ServerState = self._strategy.init(parts, weights, len(self.clients))
        training = self.model.training
        spec = FederatedSpec(self.rule, "data", fields)
        job = JobSpec("job", training, HASH, "", {"w": HASH}, DataSpec((), 0, 1), None, federated=spec)
        self.state = fed.FederationState(JOB, job, 0.0)
        self._ids = itertools.count()

    def run(self) -> Iterator[Closed]:
        """Train until the job has ended. RuntimeError where it ended otherwise than finished."""
        self._step(fed.Begin())
        roster = {name: client.data.n_samples for name, client in self._clients.items()}
        workers = {f"host-{at}": sum(roster.values()) for at in range(self.hosts)} or roster
        loaded = ev.Loaded(JOB, 1, population=HASH, clients=roster) if self.hosts else ev.Loaded(JOB, 1)
        for name, samples in workers.items():
            self._step(fed.Invited(name, samples))
        for name in workers:
            self._step(fed.FromClient(name, loaded))
        while self._events and not self.state.ended:
            yield from self._taken()
            self.now_s, _, event = heapq.heappop(self._events)
            self._step(event)
        yield from self._taken()
        if self.state.phase is not Phase.FINISHED:
            raise RuntimeError(f"the job is {self.state.phase.value}: {self.state.reason}")

    def _taken(self) -> list[Closed]:
        made, self._made = self._made, []
        return made

    def _step(self, event: fed.Event) -> None:
        self.state, todo = machine.step(self.state, event, self.now_s)
        for item in todo:
            self._obey(item)

    def _after(self, seconds: float, event: fed.Event) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._ids), event))

    def _obey(self, item: fed.Todo) -> None:
        match item:
            case do.OpenAggregator():
                self._step(ev.AggregatorOpened(JOB, self.state.round, self._broadcast(), {}, ()))
            case fed.Say(worker, TrainRound() as order) if order.clients:
                self._train_clients(worker, order)
            case fed.Say(worker, TrainRound() as order):
                self._train(worker, order)
            case do.AggregateRound():
                self._sum(item)
            case Record(RoundClosed() as fact):
                self._made.append(Closed(self.now_s, fact, dict(self._server.weights)))

    def _broadcast(self) -> ev.Blob:
        blob = f"{client_key(f'model/{self._server.round}'):064x}"[-64:]
        self._broadcasts[blob] = self._strategy.configure(self._server)
        return ev.Blob(blob, 1)

    def _train(self, name: str, order: TrainRound) -> None:
        began = self._broadcasts[order.model.full.hash]
        found = self._trainer.train(self._clients[name], began, ClientState())
        update = found.update
        blob = f"{client_key(f'{name}/{order.round}'):064x}"[-64:]
        self._updates[blob] = replace(update, client=name)
        self.trained += 1
        took_s = self.seconds(name, update.steps)
        answer = ev.UpdateReady(
            JOB,
            order.round,
            blob,
            1,
            update.n_samples,
            update.steps,
            update.scalars,
            update.metrics,
            found.square_loss,
            took_s,
        )
        self._after(took_s, fed.FromClient(name, answer))

    def _train_clients(self, host: str, order: TrainRound) -> None:
        core, began = self._core, self._broadcasts[order.model.full.hash]
        held, rows = Accumulator(core.round_grid(order.drawn, order.drawn_samples)), {}
        for name in order.clients:
            found = self._trainer.train(self._clients[name], began, ClientState())
            held.add(core.contribute(self._trainer.layout, found.update))
            n_samples, steps = found.update.n_samples, found.update.steps
            took_s = self.seconds(host, steps)
            rows[name] = ev.Row(n_samples, steps, found.update.metrics["loss"], found.square_loss, took_s)
        self.trained += len(rows)
        sums, blob = held.sums(), f"{client_key(f'{host}/{order.round}/{order.order}'):064x}"[-64:]
        self._sums[blob] = sums
        n_samples, steps = sum(r.n_samples for r in rows.values()), sum(r.steps for r in rows.values())
        told = ev.HostRows(rows, {}, sums.loads, sums.scalars, order=order.order)
        took_s = sum(row.seconds for row in rows.values())
        answer = ev.UpdateReady(JOB, order.round, blob, 1, n_samples, steps, train_s=took_s, host=told)
        self._after(took_s, fed.FromClient(host, answer))

    @property
    def _core(self) -> Linear:
        core = self._strategy.core
        assert isinstance(core, Linear)
        return core

    def _sum(self, asked: do.AggregateRound) -> None:
        if asked.drawn is not None:
            return self._sum_whole(asked, asked.drawn)
        updates = []
        for name, told in asked.updates.items():
            update = replace(self._updates.pop(told.update), round=self._server.round)
            base = self._broadcasts[asked.bases[name]].weights if name in asked.bases else None
            now = None if base is None else self._server.weights
            updates.append(aged(update, asked.weights.get(name, 1.0), base, now))
        return self._made_of(asked, self._strategy.aggregate(self._server, updates))

    def _sum_whole(self, asked: do.AggregateRound, drawn: Mapping[str, int]) -> None:
        core, layout = self._core, self._trainer.layout
        grid = core.round_grid(len(drawn), sum(drawn.values()))
        held = VersionSums(grid, layout, self.rule.weight)
        for told in sorted(asked.sums.values(), key=lambda told: (-told.age, told.grid)):
            own = core.round_grid(*told.grid) if any(told.grid) else grid
            held.add(self._sums.pop(told.blob), told.age, own)
        after = core.finish(self._server, held.total(lambda sums: core.released(sums, layout)))
        return self._made_of(asked, after)

    def _made_of(self, asked: do.AggregateRound, after: ServerState) -> None:
        self._server = after
        state = ev.Blob(f"{client_key(f'state/{self._server.round}'):064x}"[-64:], 1)
        self._step(ev.Aggregated(JOB, asked.round, asked.attempt, state, self._broadcast()))
