"""Every strategy by name as one of ``flwr.serverapp``, for stock ``flwr run`` in simulation and deployment.

    from strategies.flower import Scaffold                       # or atoll_strategy("scaffold")
    strategy = Scaffold(server_lr=1.0, trained=trained_names(model), min_train_nodes=4)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=50)

The server half is the strategy's own ``configure`` and ``aggregate``; choosing nodes, averaging metrics and
the loop over rounds are Flower's. The client half is ``local_round`` in the ClientApp. Strategies without
one (``serves_any_client``) also take the replies of an unmodified ClientApp.

What travels follows Flower's conventions: requests hold ``arrays`` and ``config``, replies exactly one
ArrayRecord and one MetricRecord with ``num-examples``. What a strategy sends beside the weights is a record
``atoll.extra`` of the request and keys ``atoll.extra/SLOT/NAME`` of the reply's arrays. Replies carry
weights, as Flower's do; the server subtracts what it sent.

A reply that is not what the strategy declares is left out with the reason, and the round closes without it;
Flower's own strategies drop the whole round instead. ``save`` gives the state after any round as one
ArrayRecord, ``resume`` goes on from it.

Needs the extra ``atoll[flower]``; imports nothing of Flower but its public API.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from atoll.errors import BadUpdate, UsageError
from atoll.federated import COUNTED_SAMPLES, MOST_COUNTED
from strategies import STRATEGIES, Option, make_strategy
from strategies import flower_records as words
from strategies.base import Strategy
from strategies.checking import Limits, check_update
from strategies.files import slot_arrays
from strategies.flower_client import (
    LocalWork,
    correct,
    evaluation_arrays,
    local_round,
    trained_names,
)
from strategies.flower_replies import Counted, common_metrics, read_reply, serves_any_client
from strategies.flower_state import load_state, saved_state
from strategies.layout import SHARED, Layout, Role
from strategies.values import ServerState

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = [
    "AtollStrategy",
    "LocalWork",
    "atoll_strategy",
    "correct",
    "evaluation_arrays",
    "local_round",
    "serves_any_client",
    "trained_names",
]

log = logging.getLogger("flwr")  # where Flower shows what a run does


class AtollStrategy(FlowerFedAvg):
    """A strategy of ours under Flower's loop. ``settings``: of Flower's FedAvg (fractions, minimum nodes,
    keys).

    ``trained``: names that have gradients (``trained_names(module)``); by default every floating array
    but BatchNorm's running statistics. ``averaged``: buffers that training writes; by default those
    statistics. ``n_clients``: of the whole federation; 0 counts the nodes connected at the first round.
    ``max_samples``: a reply that claims more examples is left out, for nobody registers them here.
    """

    def __init__(
        self,
        rule: Strategy,
        *,
        trained: Collection[str] | None = None,
        averaged: Collection[str] | None = None,
        n_clients: int = 0,
        max_samples: int = COUNTED_SAMPLES,
        **settings: Any,
    ) -> None:
        try:
            super().__init__(**settings)
        except TypeError as error:
            raise UsageError(f"{rule.name}: {error}; options are {_options(rule)} and Flower's") from None
        if n_clients < 0:
            raise UsageError(f"n_clients = {n_clients}; 0 counts the nodes of the first round")
        if not 1 <= max_samples <= MOST_COUNTED:
            raise UsageError(f"max_samples = {max_samples}; give a whole number from 1 to {MOST_COUNTED}")
        self.rule, self.n_clients = rule, n_clients
        self._limits = Limits(samples=max_samples)
        self._trained, self._averaged = trained, averaged
        self._held: tuple[ServerState, Layout] | None = None  # and the roles before the strategy changed any
        self._arrays = ArrayRecord()  # the whole model
        self._past = 0  # rounds before ``resume``
        self._resumed = False

    @property
    def state(self) -> ServerState:
        """The strategy's state. UsageError before the first round."""
        if self._held is None:
            raise UsageError(f"{self.rule.name} has no state before its first round")
        return self._held[0]

    @property
    def _roles(self) -> Layout:
        if self._held is None:
            raise UsageError(f"{self.rule.name} has no state before its first round")
        return self._held[1]

    @property
    def arrays(self) -> ArrayRecord:
        """The whole model after the last round: what ``start`` of a resumed run is given."""
        return self._arrays

    def save(self) -> ArrayRecord:
        """All that is needed to go on: model, roles, the strategy's slots and round."""
        return saved_state(self.rule, self.state, self._roles, words.from_record(self._arrays))

    def resume(self, saved: ArrayRecord) -> None:
        """Go on after ``save``; give ``start`` this strategy's ``arrays`` and the rounds that are left.

        UsageError when it was saved by another strategy or with other options.
        """
        state, roles, model = load_state(self.rule, saved)
        self._held, self._arrays = (state, roles), words.to_record(model)
        self._past, self._resumed = state.round, True

    def summary(self) -> None:
        log.info("\t├──> Strategy: %s %s", self.rule.name, words.options_text(_settings(self.rule)))
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message per chosen node: the weights, the strategy's extra arrays, and the strategy's
        name."""
        messages = list(super().configure_train(self._past + server_round, arrays, config, grid))
        if not messages:
            return []
        self._begin(server_round, arrays, grid)
        broadcast = self.rule.configure(self.state)
        self._announce(config)
        weights = self._outgoing(words.to_record(broadcast.weights))
        # Flower chose the nodes; all of them share one content, so that it is stored once.
        records: dict[str, Any] = {self.arrayrecord_key: weights, self.configrecord_key: config}
        if broadcast.extra:
            records[words.EXTRA] = words.to_record(slot_arrays(broadcast.extra))
        content = RecordDict(records)
        for message in messages:
            message.content = content
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's, with the tensors that this strategy sends."""
        if self._held is not None:
            self._announce(config)
            arrays = self._outgoing(arrays)
        return super().configure_evaluate(self._past + server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The whole model after the round, or None when too few replies can be counted."""
        found = self._counted(replies)
        if len(found) < max(1, self.rule.min_updates):
            log.warning("%s needs %d replies, %d count", self.rule.name, self.rule.min_updates, len(found))
            return None, None
        state = self.rule.aggregate(self.state, [update for update, _ in found])
        self._held = state, self._roles
        self._arrays = self._whole()
        return self._arrays, self.train_metrics_aggr_fn(common_metrics(found), self.weighted_by_key)

    def _begin(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """The strategy's state before the first round of a run."""
        if self._held is not None and (server_round > 1 or self._resumed):
            self._resumed = False
            return
        model = words.from_record(arrays)
        trained, averaged = words.roles_of(model, {name: a.dtype for name, a in model.items()})
        if self._trained is not None:
            trained = list(self._trained)
            averaged = [name for name in averaged if name not in self._trained]
        if self._averaged is not None:
            averaged = list(self._averaged)
        roles = Layout.of(model, trained, averaged)
        clients = self.n_clients or len(list(grid.get_node_ids()))
        self._held, self._arrays = (self.rule.init(roles, model, clients), roles), arrays

    def _announce(self, config: ConfigRecord) -> None:
        """Add the entries of a request that the client half reads."""
        config[words.STRATEGY] = self.rule.name
        config[words.OPTIONS] = words.options_text(_settings(self.rule))
        config[words.ROUND] = self.state.round
        config[words.TRAINED] = list(self._roles.names(Role.TRAINED))
        config[words.AVERAGED] = list(self._roles.names(Role.AVERAGED))

    def _outgoing(self, weights: ArrayRecord) -> ArrayRecord:
        """Return the part of the whole model that is sent to clients, ``weights`` where given.

        Tensors that never change go too, since a plain ClientApp loads a whole state dict; not under
        strategies whose wrapper holds large ones (virtual images, frozen copies): there every client has
        them.
        """
        layout, roles = self.state.layout, self._roles.roles
        names = [
            name
            for name, role in layout.roles.items()
            if role in (*SHARED, Role.TOLD)
            or (role is Role.STILL and roles[name] is Role.STILL and not self.rule.facts.changes_loss)
        ]
        return ArrayRecord({n: weights[n] if n in weights else self._arrays[n] for n in names})

    def _whole(self) -> ArrayRecord:
        changed = words.to_record(self.state.weights)
        return ArrayRecord({n: changed.get(n, a) for n, a in self._arrays.items()})

    def _counted(self, replies: Iterable[Message]) -> list[Counted]:
        """The replies that this round may count, with their metrics; every other one is logged."""
        found: dict[str, Counted] = {}
        for reply in replies:
            node = str(reply.metadata.src_node_id)
            try:
                if reply.has_error():
                    raise BadUpdate(f"error {reply.error.code}: {(reply.error.reason or '')[:200]}")
                if node in found:
                    raise BadUpdate("a second reply")
                counted = read_reply(self.rule, self.state, node, reply.content, self.weighted_by_key)
                check_update(self.rule, self.state.layout, self.state.round, counted[0], self._limits)
                found[node] = counted
            except BadUpdate as error:
                log.warning("round %d without node %s: %s", self.state.round + 1, node, error)
        log.info("aggregate_train: counted %d replies", len(found))
        return list(found.values())


def atoll_strategy(name: str, options: Mapping[str, Option] | None = None, **settings: Any) -> AtollStrategy:
    """The strategy ``name`` with ``options`` as a Flower strategy; ``settings`` as AtollStrategy's."""
    return AtollStrategy(make_strategy(name, options), **settings)


def _options(rule: Strategy) -> list[str]:
    return [field.name for field in fields(rule)]


def _settings(rule: Strategy) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in _options(rule)}


def _class(rule: type[Strategy]) -> type[AtollStrategy]:
    names = {field.name for field in fields(rule)}

    def build(self: AtollStrategy, **given: Any) -> None:
        options = {name: value for name, value in given.items() if name in names}
        rest = {name: value for name, value in given.items() if name not in names}
        AtollStrategy.__init__(self, make_strategy(rule.name, options), **rest)

    body = {"__init__": build, "__doc__": f"{rule.FACTS.summary}. Source: {rule.FACTS.source}."}
    return type(rule.__name__, (AtollStrategy,), body)


CLASSES: dict[str, type[AtollStrategy]] = {rule.__name__: _class(rule) for rule in STRATEGIES.values()}
"""Name of the class -> the class; ``from strategies.flower import Scaffold`` finds it here."""


def __getattr__(name: str) -> type[AtollStrategy]:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
