"""The contract of every federated strategy: a client half and a server half, state in, state out.

One round, whatever runs it (the workers of this project, a Flower app, a simulation):

    broadcast = strategy.configure(state)                               server
    phases = strategy.begin(layout, broadcast, mine)                    client
        local training from phase.start, each gradient through phase.correction   (per step)
        buffers of strategy.at_epoch(layout, broadcast, epoch)          (per local epoch)
    update, mine = strategy.end(layout, broadcast, done, mine)          client
    state = strategy.aggregate(state, updates)                          server

Everything is arrays by state-dict name and small numbers: a ServerState or a ClientState goes to
disk or over a wire without code for each strategy. numpy alone: the process that aggregates never loads
torch. Only ``Correction`` meets the trainer's own tensors, with plain operators, so it works on
either. Nothing here keeps a clock, a file or a generator; what is drawn comes from a seed.

A strategy is a frozen dataclass; its fields are its options,
``bounded`` ones are checked as it is made. It declares what it needs (``Facts``) and
what travels beside the weights (``extra_down``, ``extra_up``, ``scalars_up``), so that traffic can
be planned and an update be refused before it is counted (``strategies.checking``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import JobFailed, UsageError
from strategies.checking import check_updates
from strategies.layout import SHARED, Layout, Role
from strategies.options import check_bounds
from strategies.values import (
    LOCAL_SLOT,
    Broadcast,
    ClientState,
    ClientUpdate,
    Correction,
    Done,
    Facts,
    Phase,
    Scalar,
    ServerState,
    Uploads,
    Work,
)

if TYPE_CHECKING:
    from atoll.flow.walk import Walked
    from strategies.layout import Arrays, SlotMetas, Slots


@dataclass(frozen=True)
class Strategy:
    """A strategy. Subclasses override the hooks below the public methods; ``_aggregate`` is the least."""

    name: ClassVar[str]
    FACTS: ClassVar[Facts]

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def facts(self) -> Facts:
        return self.FACTS

    @property
    def core(self) -> Strategy:
        """The strategy that sums: where ``facts.linear``, its ``contribute`` and ``finish`` take partial
        sums."""
        return self

    @property
    def min_updates(self) -> int:
        """With fewer a round cannot be aggregated."""
        return 1

    # What travels.

    def adapt(self, layout: Layout) -> Layout:
        """The model's layout with the roles this strategy gives its tensors; ``init`` applies it."""
        return layout

    def extra_down(self, layout: Layout) -> SlotMetas:
        """Arrays beside the weights in every broadcast."""
        return {}

    def extra_up(self, layout: Layout) -> SlotMetas:
        """Arrays beside the delta in every update."""
        return {}

    def scalars_up(self) -> tuple[Scalar, ...]:
        """Numbers in every update beside samples and steps."""
        return ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """Buffers in which the method itself measures the data, and which go home for it alone."""
        return ()

    def check_statistics(self, walked: Sequence[Walked], least: int) -> None:
        """Raise UnsupportedOp unless a job's programs, training first, measure in the buffers ``statistics``
        what the method does, each figure of at least ``least`` samples."""

    def fit(self, layout: Layout) -> None:
        """Raise UnsupportedOp unless what this strategy computes runs on the tensors of ``layout``."""

    def check(self, layout: Layout, update: ClientUpdate) -> None:
        """Raise BadUpdate for what only this strategy can judge, after names, shapes and bounds."""

    # The server half.

    def init(self, layout: Layout, weights: Arrays, n_clients: int) -> ServerState:
        """The state before round 0. ``weights``: at least the tensors that ``adapt`` shares or tells."""
        if n_clients < 1:
            raise UsageError(f"a federation of {n_clients} clients; register data on a worker first")
        layout = self.adapt(layout)
        held = {name: weights[name] for name in layout.names(*SHARED, Role.TOLD)}
        return ServerState(0, layout, held, self._slots(layout, held), n_clients)

    def configure(self, state: ServerState) -> Broadcast:
        """Return the message to every participant of round ``state.round``."""
        return Broadcast(state.round, {**state.weights, **self._told(state)}, self._extra(state))

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        """The state after this round. The order of ``updates`` has no effect on a single bit.

        BadUpdate when one of them is not what this strategy declares, or comes twice from one client;
        UsageError for fewer than ``min_updates``; JobFailed when the result is not finite.
        """
        ordered = check_updates(self, state, updates)
        if len(ordered) < self.min_updates:
            raise UsageError(
                f"{self.name} needs {self.min_updates} updates a round, {len(ordered)} arrived; "
                "let more clients take part"
            )
        return self._aggregate(state, ordered)

    # The client half.

    def client_init(self, layout: Layout) -> ClientState:
        """Return the state of a client before its first round."""
        return ClientState()

    def begin(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> tuple[Phase, ...]:
        """Return the phases to train, in this order; the delta of the first is uploaded."""
        start = {**broadcast.weights, **state.slots.get(LOCAL_SLOT, {})}
        start.update(self._own_start(layout, broadcast, state))
        return (Phase(start, self._correction(layout, broadcast, state)),)

    def at_epoch(self, layout: Layout, broadcast: Broadcast, epoch: int) -> Arrays:
        """Buffers to set at the start of local epoch ``epoch``, from 0."""
        return {}

    def evaluate_with(self, broadcast: Broadcast, state: ClientState) -> Arrays:
        """The tensors to set before this client evaluates on its own data."""
        return {**broadcast.weights, **state.slots.get(LOCAL_SLOT, {})}

    def end(
        self, layout: Layout, broadcast: Broadcast, done: Sequence[Done], state: ClientState, seed: int = 0
    ) -> tuple[ClientUpdate, ClientState]:
        """The answer to ``broadcast`` and the client's next state; commit it once the answer is taken.

        ``seed``: of what a strategy draws on the client (noise), known to this client alone.
        """
        first = done[0]
        delta = {n: first.weights[n] - broadcast.weights[n] for n in layout.names(*SHARED)}
        own = self._uploads(Work(layout, broadcast, done, delta, state, seed))
        kept = dict(own.kept)
        local = layout.names(Role.LOCAL)
        if local:
            kept[LOCAL_SLOT] = {name: first.weights[name].copy() for name in local}
        update = ClientUpdate(
            broadcast.round, first.n_samples, first.steps, delta, own.extra, own.scalars, first.metrics
        )
        return update, ClientState(kept)

    # Hooks.

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        return {}

    def _told(self, state: ServerState) -> Arrays:
        return {}

    def _extra(self, state: ServerState) -> Slots:
        return {}

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        return Correction()

    @property
    def trains_plainly(self) -> bool:
        """True where none of the client half's hooks is the strategy's own."""
        hooks = ("begin", "at_epoch", "evaluate_with", "_correction", "_own_start", "_uploads")
        return all(getattr(type(self), hook) is getattr(Strategy, hook) for hook in hooks)

    def _own_start(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Arrays:
        """Further tensors that this client sets before it trains."""
        return {}

    def _uploads(self, work: Work) -> Uploads:
        return Uploads()

    def _aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        raise TypeError(f"{type(self).__name__} does not say how it aggregates")


def advance(state: ServerState, weights: Arrays, slots: Slots | None = None) -> ServerState:
    """The next round's state: ``weights`` where given, in the dtypes the layout declares.

    JobFailed when one is not finite: updates were, so a sum has overflowed or a rate is too large.
    """
    after = dict(state.weights)
    for name, array in weights.items():
        with np.errstate(over="ignore"):  # judged below, with the tensor's name
            cast = np.asarray(array, state.layout.metas[name].dtype)
        if not np.all(np.isfinite(cast)):
            raise JobFailed(
                f"round {state.round}: {name!r} is not finite after aggregation; lower the server's "
                "learning rate"
            )
        after[name] = cast
    return replace(state, round=state.round + 1, weights=after, slots=state.slots if slots is None else slots)
