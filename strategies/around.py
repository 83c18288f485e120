"""A strategy around another: every question goes to the inner one, so that a wrapper answers only its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.base import Strategy

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout, SlotMetas
    from strategies.values import Broadcast, ClientState, ClientUpdate, Done, Phase, Scalar, ServerState


@dataclass(frozen=True)
class Around(Strategy):
    """Another strategy, unchanged: every question goes to ``inner``."""

    @property
    def inner(self) -> Strategy:
        raise TypeError(f"{type(self).__name__} does not say what it is around")

    @property
    def core(self) -> Strategy:
        return self.inner.core

    @property
    def min_updates(self) -> int:
        return self.inner.min_updates

    def adapt(self, layout: Layout) -> Layout:
        return self.inner.adapt(layout)

    def extra_down(self, layout: Layout) -> SlotMetas:
        return self.inner.extra_down(layout)

    def extra_up(self, layout: Layout) -> SlotMetas:
        return self.inner.extra_up(layout)

    def scalars_up(self) -> tuple[Scalar, ...]:
        return self.inner.scalars_up()

    def fit(self, layout: Layout) -> None:
        self.inner.fit(layout)

    def check(self, layout: Layout, update: ClientUpdate) -> None:
        self.inner.check(layout, update)

    def init(self, layout: Layout, weights: Arrays, n_clients: int) -> ServerState:
        return self.inner.init(layout, weights, n_clients)

    def configure(self, state: ServerState) -> Broadcast:
        return self.inner.configure(state)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        return self.inner.aggregate(state, updates)

    def client_init(self, layout: Layout) -> ClientState:
        return self.inner.client_init(layout)

    def begin(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> tuple[Phase, ...]:
        return self.inner.begin(layout, broadcast, state)

    def at_epoch(self, layout: Layout, broadcast: Broadcast, epoch: int) -> Arrays:
        return self.inner.at_epoch(layout, broadcast, epoch)

    def evaluate_with(self, broadcast: Broadcast, state: ClientState) -> Arrays:
        return self.inner.evaluate_with(broadcast, state)

    def end(
        self, layout: Layout, broadcast: Broadcast, done: Sequence[Done], state: ClientState, seed: int = 0
    ) -> tuple[ClientUpdate, ClientState]:
        return self.inner.end(layout, broadcast, done, state, seed)
