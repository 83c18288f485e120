"""A round in which a gateway of each site sends one sum for its neighbours."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from atoll.transitions import first
from coordinator.federated.kinds.round import Outcome, Round, drop, forgotten, strike, with_client
from coordinator.federated.sites import gathering as sites
from coordinator.federated.state import FederationState, Order, Todo
from coordinator.messages.events import UpdateReady
from coordinator.messages.instructions import AggregateRound, TrainRound
from coordinator.messages.jobs import Dropped


class SiteRound(Round):
    """Clients of one site keep their updates for a gateway of it, which answers with their sum: who sends for
    itself joins on the same grid (``coordinator.federated.sites``)."""

    covers_late = True

    def left(self, state: FederationState) -> int:
        """Clients who train, and gateways whose sums are to come."""
        return super().left(state) + len(sites.pending(state))

    def sender(self, state: FederationState, name: str) -> str:
        return sites.gateway_called(name)

    def blob(self, state: FederationState, name: str) -> str:
        held = sites.sum_called(state, name)
        return super().blob(state, name) if held is None else held.update.update

    def awaits(self, state: FederationState, worker: str) -> bool:
        return super().awaits(state, worker) or worker in state.orders

    def words(self, state: FederationState) -> str:
        train, gather = super().left(state), len(sites.pending(state))
        return f"{train} of {self.drawn(state)} clients train, {gather} gateways have updates to sum"

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        """Have gateways sum whose clients have all answered; ask those who are to send for themselves."""
        orders = dict(state.orders)
        for gateway, names in sites.pending(state).items():
            others = [name for name, other in sites.books(state).via.items() if other == gateway]
            if not sites.sums_for(state, gateway):
                state, _ = self._apart(state, names, f"gone, as was its gateway {gateway}")
            elif gateway not in orders and not any(Round.awaits(self, state, name) for name in others):
                orders[gateway] = Order(names, now_s)
        given = {*(orders.keys() - state.orders.keys()), *sites.books(state).again}
        if not given:
            return state, ()
        asked = replace(sites.books(state), again=frozenset())
        due_s = max(state.due_s, now_s + state.federated.rule.deadline_s)
        after = replace(state, orders=orders, sites=asked, due_s=due_s)
        return after, tuple(sorted(name for name in given if after.clients[name].ready))

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        most, gateway = sites.drawn(state), sites.books(state).via.get(worker, "")
        if (order := state.orders.get(worker)) is None:
            return replace(message, order=gateway, gateway=gateway)
        gathers, total = sites.gathers(state, order.clients), sum(most.values())
        return replace(message, order=order.key, gathers=gathers, drawn=len(most), drawn_samples=total)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        if update.host is not None:
            return self._gathered(state, worker, update)
        gateway = sites.books(state).via.get(worker, "")
        if not Round.awaits(self, state, worker) or update.gateway != gateway:
            what = f"for {update.gateway}" if update.gateway else "of its own"
            forget = [] if update.gateway else forgotten(state, update)
            return state, [Dropped(f"an update {what} of {worker}, which is not awaited"), *forget]
        return super().taken(state, worker, update, now_s)

    def _gathered(self, state: FederationState, gateway: str, update: UpdateReady) -> Outcome:
        """Take a sum; whoever is not in it sends for itself, and from now on in every round."""
        order, host = state.orders.get(gateway), update.host
        if order is None or host is None or host.order != order.key:
            return state, [Dropped(f"sum of {gateway}: not awaited"), *forgotten(state, update)]
        heard = replace(state, orders={name: o for name, o in state.orders.items() if name != gateway})
        if not host.rows.keys() <= {*order.clients}:
            wrong = f"a sum with {sorted(host.rows.keys() - {*order.clients})[:3]}, who are not of its site"
            struck, let = strike(heard, gateway, wrong)
            return first([*let, *forgotten(state, update)], self._apart(struck, order.clients, wrong))
        heard = sites.taken(heard, gateway, update)
        missing = [name for name in order.clients if name not in host.rows]
        after, said = self._apart(heard, missing, f"not in the sum of {gateway}")
        for name in missing:
            after = with_client(after, replace(after.clients[name], site=""))
        return after, said

    def _apart(self, state: FederationState, names: Collection[str], why: str) -> Outcome:
        """Have clients send for themselves; those who are gone are dropped."""
        said: list[Todo] = []
        after, gone = sites.directly(state, names)
        for name in gone:
            after, more = drop(after, name, why)
            said += more
        return after, said

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        """Go on without a worker; what it was to sum, its clients are asked for."""
        held, said = sites.books(state), list[Todo]()
        if Round.awaits(self, state, worker):
            state, said = drop(state, worker, reason)
        if worker in held.via.values() and worker not in held.sums:
            orders = {name: order for name, order in state.orders.items() if name != worker}
            client = replace(state.clients[worker], site="")  # another one sums from now on, until it is back
            return with_client(replace(state, orders=orders), client), said
        summing = {name for order in state.orders.values() for name in order.clients}
        waiting = worker in state.updates and worker in held.via and worker not in held.summed | summing
        if waiting and not state.clients[worker].present:
            state, said = self.refused(state, worker, reason)
        return state, said

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        """Go on without an update; a sum that cannot be added takes those of all its clients along."""
        held = sites.sum_called(state, name)
        if held is None:
            return super().refused(state, name, why)
        gateway, said = self.sender(state, name), list[Todo]()
        for member in held.members:
            state, more = super().refused(state, member, f"{name}: {why}")
            said += more
        client = replace(state.clients[gateway], site="")
        sums = {other: s for other, s in sites.books(state).sums.items() if other != gateway}
        return replace(with_client(state, client), sites=replace(sites.books(state), sums=sums)), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        """Go on without what is late: clients that train, and gateways that sum."""
        orders, said = state.orders, list[Todo]()
        late = [name for name in state.chosen if Round.awaits(self, state, name)]
        for name in late:
            state, more = drop(state, name, f"late: no update within {state.federated.rule.deadline_s:g} s")
            said += more
        for gateway in sorted(orders):
            state, more = self.without(state, gateway, f"late: no sum by {gateway}")
            said += more
        return state, said

    def staged(self, state: FederationState, now_s: float) -> tuple[FederationState, str] | None:
        return None if not self.left(state) else (state, "")

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        held, most = sites.books(state), sites.drawn(state)
        single = {name: update for name, update in state.updates.items() if name not in held.summed}
        registered = {name: most[name] for name in single}
        codecs, sums = {name: state.ratios[name] for name in single}, sites.sums(state)
        return AggregateRound(
            state.job, state.round, attempt, single, codecs, registered, n_clients, least, sums, drawn=most
        )
