"""What a round of clients that answer for themselves and a population's round each do in their own way. Pure.

``round_of`` is the only place that tells them apart. What a round changes in the job's state is returned; who
calls it goes on: deals what waits, and closes the round once nobody is left (``rounds.go_on``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.secure import Stage
from coordinator.federated import cohorts, flow, population
from coordinator.federated.metrics import measured, outcomes
from coordinator.federated.population import books
from coordinator.federated.secure import books as secure
from coordinator.federated.selection import seed_of
from coordinator.federated.sites import gathering as sites
from coordinator.federated.state import (
    Aggregate,
    Client,
    FederationState,
    Flight,
    Forget,
    Let,
    Order,
    Say,
    Todo,
    Without,
)
from coordinator.messages.events import SecureAnswer, UpdateReady
from coordinator.messages.instructions import Opening, RoundTaken, SecureOrder, TrainRound
from coordinator.messages.jobs import Dropped, Record
from strategies.selection import Outcome as Seen

if TYPE_CHECKING:
    from coordinator.federated.secure.books import Books

MAX_FIGURE = 1e100  # a loss or metric; times the most samples, summed over all clients, it stays finite
MAX_STRIKES = 3  # rounds in a row in which a client failed or sent what cannot be counted

Outcome = tuple[FederationState, list[Todo]]
Told = dict[str, dict[str, Any]]


class Round:
    """Each chosen worker answers for itself. ``name``: of an update; ``covers_late``: the round's verdict
    covers an answer that comes late; ``flows``: no round waits for anybody."""

    covers_late = False
    flows = False

    def size(self, state: FederationState) -> int:
        """Clients that the job knows, here or not."""
        return len(state.clients)

    def drawn(self, state: FederationState) -> int:
        """Clients of the round."""
        return len(state.chosen)

    def left(self, state: FederationState) -> int:
        """Clients that nobody has answered for yet."""
        return len(state.chosen) - len(state.updates) - len(state.dropped)

    def out(self, state: FederationState) -> int:
        """Clients that are not counted."""
        return len(state.dropped)

    def arrived(self, state: FederationState) -> int:
        """Clients in updates."""
        return len(state.updates)

    def sender(self, state: FederationState, name: str) -> str:
        """The worker that sent an update."""
        return name

    def blob(self, state: FederationState, name: str) -> str:
        """The blob of an update that is summed; "" of one that is not."""
        return state.updates[name].update if name in state.updates else ""

    def flight(self, state: FederationState, worker: str) -> Flight:
        """What a worker was given."""
        assert state.model is not None  # noqa: S101 - the aggregator wrote it
        begun_s = state.due_s if state.begun_s is None else state.begun_s
        return Flight(state.round, state.model, begun_s, state.due_s)

    def verdict(self, state: FederationState, worker: str) -> RoundTaken | None:
        """The word on the last update of a worker, to be sent again."""
        if worker not in state.verdicts:
            return None
        why = state.verdicts[worker]
        return RoundTaken(state.job, state.round - 1, not why, why, state.counted.get(worker, ()))

    def awaits(self, state: FederationState, worker: str) -> bool:
        """Whether an answer of this worker is awaited."""
        return worker in state.chosen and worker not in state.updates and worker not in state.dropped

    def words(self, state: FederationState) -> str:
        """What the round waits for, for people."""
        return f"{self.left(state)} of {self.drawn(state)} clients train"

    # Stages, of a round that has more than one.

    def opened(self, state: FederationState, now_s: float) -> FederationState:
        """The state in which the participants, who are fixed now, are asked for what comes first."""
        rule = state.federated.rule
        if rule.gateways:
            return sites.opened(state)
        if rule.secure is None:
            return state
        secret = f"{state.secret}/{state.attempt}/{now_s}"
        held = secure.opened(state.job, state.round, rule.secure, state.chosen, secret)
        return replace(state, secure=held, due_s=now_s + min(secure.EXCHANGE_S, rule.deadline_s))

    def order(self, state: FederationState, worker: str) -> SecureOrder | None:
        """What a participant is asked for now; None: to train."""
        return None

    def staged(self, state: FederationState, now_s: float) -> tuple[FederationState, str] | None:
        """The state at the next stage, or with the reason why the round is to be repeated; None: everything
        is here, and to be summed."""
        return None

    def heard(self, state: FederationState, worker: str, answer: SecureAnswer) -> Outcome:
        """Take an answer that is no update."""
        return state, [Dropped(f"{answer.stage} of {worker}, though nothing is masked here")]

    def waits(self, state: FederationState) -> bool:
        """Whether a client is to be given to a worker yet."""
        return False

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        """Deal who waits; the workers that have something new to train."""
        return state, ()

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        """A worker's message, as this kind of round completes it."""
        return message

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        """Take a worker's answer."""
        client = state.clients[worker]
        if (wrong := impossible(client, update)) is not None:
            struck, let = strike(state, worker, wrong)
            less, said = drop(struck, worker, wrong)
            refused = Say(worker, RoundTaken(state.job, state.round, False, wrong))
            return less, [*let, *said, refused, Forget((update.update,))]
        took_s = now_s - (now_s if state.begun_s is None else state.begun_s)
        heard = with_client(state, holding(measured(client, update, took_s), state))
        return replace(heard, updates={**state.updates, worker: update}), []

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        """Go on without a worker; the same state where nothing of it is awaited."""
        return drop(state, worker, reason) if self.awaits(state, worker) else (state, [])

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        """Go on without an update that cannot be counted."""
        less, said = drop(state, name, why)
        updates = {other: update for other, update in state.updates.items() if other != name}
        return replace(less, updates=updates), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        """Go on without all that is late."""
        why = f"late: no update within {state.federated.rule.deadline_s:g} s"
        todo: list[Todo] = []
        for name in [name for name in state.chosen if self.awaits(state, name)]:
            state, said = drop(state, name, why)
            todo += said
        return state, todo

    def good(self, state: FederationState) -> Mapping[str, UpdateReady]:
        """The updates that are summed."""
        return state.updates

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> Aggregate:
        """What the aggregator is to sum."""
        registered = {name: state.clients[name].n_samples for name in state.updates}
        return Aggregate(state.round, attempt, state.updates, registered, n_clients, least)

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        """The state with what a closed round showed, observations for selectors, and participants and dropped
        clients as RoundClosed has them; ``told``: entries of good updates."""
        return replace(state, counted={}), outcomes(good, state.clients), told, state.dropped


class SecureRound(Round):
    """Members mask their updates, and answer for each other's masks: ``coordinator.federated.secure``."""

    def left(self, state: FederationState) -> int:
        """Members who are waited for: of those who are to sign the connected ones, and for shares all while
        the sum cannot be opened."""
        held, waits = _books(state), [name for name in state.chosen if self.awaits(state, name)]
        if held.stage is Stage.SIGNATURES:
            return sum(state.clients[name].ready for name in waits)
        return 0 if held.stage is Stage.ANSWERS and not held.closed else len(waits)

    def arrived(self, state: FederationState) -> int:
        return 0 if _books(state).void else len(state.updates)

    def awaits(self, state: FederationState, worker: str) -> bool:
        held = _books(state)
        answered = state.updates if held.stage is Stage.VECTORS else held.answered
        return worker in held.asked and worker not in answered and worker not in state.dropped

    def words(self, state: FederationState) -> str:
        held = _books(state)
        if held.stage is Stage.VECTORS:
            return super().words(state)
        return f"{self.left(state)} of {len(held.asked)} members are asked for {held.stage}"

    def order(self, state: FederationState, worker: str) -> SecureOrder | None:
        held = _books(state)
        return None if held.stage is Stage.VECTORS else held.order(worker)

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        held, (count, samples) = _books(state), _weighed(state)
        return replace(
            message,
            order=held.name,  # trained anew in every attempt
            seed=_common_seed(state),
            drawn=count,
            drawn_samples=samples,
            exchange=held.name,
            shared=held.shared,
            parcels=held.parcels_for(worker),
        )

    def staged(self, state: FederationState, now_s: float) -> tuple[FederationState, str] | None:
        held, there = _books(state), frozenset(state.ready)
        if held.stage is Stage.ANSWERS and not held.closed:
            return None
        after, why = secure.next_stage(held, there, tuple(state.updates), state.federated.rule.min_clients)
        if why:
            return state, why
        # Shares are asked of who was away as well: else a sum that was signed would be given up too soon.
        deadline_s = state.federated.rule.deadline_s
        long = after.stage in (Stage.VECTORS, Stage.ANSWERS)
        due_s = now_s + (deadline_s if long else min(secure.EXCHANGE_S, deadline_s))
        staged = replace(state, secure=after, due_s=due_s)
        privacy = state.federated.rule.privacy
        if privacy is not None and after.stage is Stage.VECTORS:
            staged = replace(staged, spent=state.spent.after(privacy))
        if after.stage in (Stage.SHARES, Stage.VECTORS):
            for name in (name for name in held.asked if name not in there and name not in state.dropped):
                staged, _ = drop(staged, name, f"lost before {after.stage}")
        return staged, ""

    def heard(self, state: FederationState, worker: str, answer: SecureAnswer) -> Outcome:
        if not self.awaits(state, worker):
            return state, [Dropped(f"{answer.stage} of {worker}, which is not awaited")]
        held, why = secure.heard(_books(state), worker, answer)
        if why:
            return state, [Dropped(why)]
        after = replace(state, secure=held)
        refused = held.refused.get(worker)
        if refused is None or held.stage in (Stage.SIGNATURES, Stage.ANSWERS):
            return after, []
        return drop(after, worker, f"refused: {refused}")

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        held = _books(state)
        if held.stage is not Stage.VECTORS or update.exchange != held.name:
            why = f"update of {worker} of another exchange"
            return state, [Dropped(why), *forgotten(state, update)]
        return super().taken(state, worker, update, now_s)

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        if _books(state).stage in (Stage.SIGNATURES, Stage.ANSWERS):  # its vector stays in the sum
            return replace(state), []
        return super().without(state, worker, reason)

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        """A vector that cannot be added takes the whole sum with it: the others' masks are for it as well."""
        less, said = drop(state, name, why)
        return replace(less, secure=replace(_books(state), void=why)), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        held, todo = _books(state), list[Todo]()
        if held.stage in (Stage.SIGNATURES, Stage.ANSWERS):
            return state, todo
        if held.stage is Stage.VECTORS:
            return super().expired(state, now_s)
        for name in [name for name in state.chosen if self.awaits(state, name)]:
            state, said = drop(state, name, f"late: no {held.stage} in time")
            todo += said
        return state, todo

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> Aggregate:
        held, plain = _books(state), super().summed(state, attempt, n_clients, least)
        shares, (count, samples) = dict(held.shares), _weighed(state)
        opening = Opening(
            held.name, dict(held.keys), held.shared, shares, count, samples, _common_seed(state)
        )
        return replace(plain, opening=opening)


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
            after, said = self._apart(struck, order.clients, wrong)
            return after, [*let, *forgotten(state, update), *said]
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

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> Aggregate:
        held, most = sites.books(state), sites.drawn(state)
        single = {name: update for name, update in state.updates.items() if name not in held.summed}
        registered = {name: most[name] for name in single}
        return Aggregate(
            state.round, attempt, single, registered, n_clients, least, sites.sums(state), drawn=most
        )


class PopulationRound(Round):
    """Hosts train the clients that were drawn, and answer with sums."""

    covers_late = True

    def size(self, state: FederationState) -> int:
        """Whom a host speaks for shows once it has loaded."""
        known = (client for client in state.clients.values() if client.roster or client.loaded)
        return len({name for client in known for name in client.members})

    def drawn(self, state: FederationState) -> int:
        return len(books(state).drawn)

    def left(self, state: FederationState) -> int:
        return len(books(state).waiting) + len(books(state).at)

    def out(self, state: FederationState) -> int:
        return len(books(state).out)

    def arrived(self, state: FederationState) -> int:
        return sum(len(answer.sums.samples) for answer in books(state).taken.values())

    def sender(self, state: FederationState, name: str) -> str:
        return books(state).taken[name].host

    def awaits(self, state: FederationState, worker: str) -> bool:
        return worker in state.orders

    def waits(self, state: FederationState) -> bool:
        return bool(books(state).waiting)

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        return population.dealt(state, now_s)

    def message(self, state: FederationState, worker: str, message: TrainRound) -> TrainRound:
        order, drawn = state.orders[worker], books(state).drawn
        count, n_samples = len(drawn), sum(drawn.values())
        if state.private:  # who hosts some of the clients shall not know how many others train
            count = n_samples = state.federated.rule.clients
        return replace(message, order=order.key, clients=order.clients, drawn=count, drawn_samples=n_samples)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        order, answer, forget = state.orders.get(worker), update.host, forgotten(state, update)
        heard, why = population.answered(state, worker, update)
        if why or order is None or answer is None:
            return state, [Dropped(f"sum of {worker}: {why}"), *forget]
        client = state.clients[worker]
        if answer.rows:
            wrong = impossible(client, update) or population.impossible(client, answer, MAX_FIGURE)
            if wrong is not None:
                struck, let = strike(state, worker, wrong)
                less, said = self.without(struck, worker, wrong)
                return less, [*let, *forget, *said]
            client = measured(client, update, now_s - order.begun_s)
        return with_client(heard, holding(client, state)), []

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        said: list[Todo] = [Without(state.round, worker, reason)] if worker in state.orders else []
        return population.without(state, worker), said

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        said: list[Todo] = [Without(state.round, self.sender(state, name), why)]
        return population.refused(state, name, why), said

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        why = f"late: not trained within {state.federated.rule.deadline_s:g} s"
        return replace(state, cohort=cohorts.expired(books(state), why), orders={}), []

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> Aggregate:
        found = books(state)
        return Aggregate(state.round, attempt, {}, {}, n_clients, least, found.sums, found.drawn)

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        state = population.learnt(state, good)
        told = population.participants(state, told)
        return state, population.outcomes(state, good), told, books(state).out


class Flow(Round):
    """Clients train each at its own pace; so many updates as the buffer takes are one round. A client has at
    most one update in a sum, however fast it is."""

    flows = True

    def drawn(self, state: FederationState) -> int:
        return len(state.chosen) or state.federated.rule.buffer

    def left(self, state: FederationState) -> int:
        """Updates that are to come; those that are here suffice where nobody could send another."""
        came, rule = len(state.updates), state.federated.rule
        busy = bool(state.flights or state.asked or flow.idle(state))
        enough = came >= rule.buffer or (came >= rule.min_clients and not busy)
        return 0 if enough else max(1, rule.buffer - came)

    def words(self, state: FederationState) -> str:
        return f"{len(state.updates)} of {self.drawn(state)} updates, {len(state.flights)} clients train"

    def arrived(self, state: FederationState) -> int:
        return len(self.good(state) if state.chosen else state.updates)

    def awaits(self, state: FederationState, worker: str) -> bool:
        return worker in state.flights

    def flight(self, state: FederationState, worker: str) -> Flight:
        return state.flights.get(worker) or super().flight(state, worker)

    def verdict(self, state: FederationState, worker: str) -> RoundTaken | None:
        at_round = state.answered.get(worker)
        return None if at_round is None else RoundTaken(state.job, at_round, True)

    def dealt(self, state: FederationState, now_s: float) -> tuple[FederationState, tuple[str, ...]]:
        return flow.begun(state, now_s)

    def taken(self, state: FederationState, worker: str, update: UpdateReady, now_s: float) -> Outcome:
        client, flight = state.clients[worker], state.flights[worker]
        age, most = state.round - flight.round, state.federated.rule.oldest
        wrong = impossible(client, update)
        why = f"its model is {age} models old, at most {most} may be" if age > most else wrong
        if why:
            struck, let = strike(state, worker, why) if wrong else (state, [])
            less, said = self.without(struck, worker, why)
            refused = Say(worker, RoundTaken(state.job, flight.round, False, why))
            return less, [*let, *said, refused, *forgotten(less, update)]
        heard = replace(measured(client, update, now_s - flight.begun_s), model=flight.model.full.hash)
        fact, after = flow.taken(with_client(state, heard), worker, update)
        return after, [Record(fact), Say(worker, RoundTaken(state.job, flight.round, True))]

    def without(self, state: FederationState, worker: str, reason: str) -> Outcome:
        if worker in state.asked:
            state = replace(state, asked=state.asked - {worker})
        if worker not in state.flights:
            return state, []
        flights = {name: flight for name, flight in state.flights.items() if name != worker}
        return drop(replace(state, flights=flights), worker, reason)

    def refused(self, state: FederationState, name: str, why: str) -> Outcome:
        chosen = tuple(other for other in state.chosen if other != name)
        return super().refused(replace(state, chosen=chosen), name, why)

    def expired(self, state: FederationState, now_s: float) -> Outcome:
        why = f"late: no update within {state.federated.rule.deadline_s:g} s"
        late, todo = [name for name, flight in state.flights.items() if now_s >= flight.due_s], list[Todo]()
        for name in sorted(late):
            word = RoundTaken(state.job, state.flights[name].round, False, why)  # ends what it trains
            state, said = self.without(state, name, why)
            todo += [*said, Say(name, word)]
        return state, todo

    def good(self, state: FederationState) -> Mapping[str, UpdateReady]:
        return {name: state.updates[name] for name in state.chosen}

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> Aggregate:
        good = self.good(state)
        plain = super().summed(replace(state, updates=good), attempt, n_clients, least)
        return replace(plain, **flow.ages(state, good))

    def learnt(
        self, state: FederationState, good: Mapping[str, UpdateReady], told: Told
    ) -> tuple[FederationState, Mapping[str, Seen], Told, Mapping[str, str]]:
        aged = {name: {**entry, "staleness": state.round - good[name].round} for name, entry in told.items()}
        return super().learnt(state, good, aged)


def round_of(state: FederationState) -> Round:
    """The kind of the round in flight."""
    if state.federated.rule.asynchronous:
        return Flow()
    if state.secure is not None:
        return SecureRound()
    if state.sites is not None:
        return SiteRound()
    return Round() if state.cohort is None else PopulationRound()


def _books(state: FederationState) -> Books:
    """The books of a secure round. LookupError outside of one."""
    if state.secure is None:
        raise LookupError(f"{state.job}: round {state.round} is none whose updates are masked")
    return state.secure


def _common_seed(state: FederationState) -> int:
    """Seed of a codec that draws the same positions for all members."""
    return seed_of(state.spec.training.seed, "", state.round)


def _weighed(state: FederationState) -> tuple[int, int]:
    """How many members' masks are in the sum, and the samples that they may count: what its grid is of."""
    most, members = state.federated.rule.max_samples, _books(state).shared
    return len(members), sum(min(state.clients[name].n_samples, most) for name in members)


# ---------------------------------------------------------------- what both do


def strike(state: FederationState, worker: str, reason: str) -> Outcome:
    """Count against a client that it failed or sent what cannot be counted.

    Not of a private job: whether a client is barred follows from its data, and all can see it.
    """
    if state.private:
        return state, []
    client = state.clients[worker]
    strikes = client.strikes + 1
    if strikes < MAX_STRIKES:
        return with_client(state, replace(client, strikes=strikes)), []
    out = f"quarantined after {strikes} rounds in a row without a usable update, the last: {reason}"
    barred = replace(client, strikes=strikes, out=out, barred=True)
    return with_client(state, barred), [Let(worker, out)]


def drop(state: FederationState, worker: str, reason: str) -> Outcome:
    """The round in flight goes on without this client."""
    client = replace(state.clients[worker], dropped=reason)
    less = replace(with_client(state, client), dropped={**state.dropped, worker: reason})
    return less, [Without(state.round, worker, reason)]


def with_client(state: FederationState, client: Client) -> FederationState:
    """The state with this client's newer figures."""
    return replace(state, clients={**state.clients, client.worker: client})


def holding(client: Client, state: FederationState) -> Client:
    """The client, which holds the round's model now."""
    assert state.model is not None  # noqa: S101 - a round is in flight
    return replace(client, model=state.model.full.hash)


def forgotten(state: FederationState, update: UpdateReady) -> list[Todo]:
    """Forget the blob of a refused update; a replayed one may name what somebody's good one names too."""
    kept = {"", *(other.update for other in state.updates.values())}
    return [] if update.update in kept else [Forget((update.update,))]


def impossible(client: Client, update: UpdateReady) -> str | None:
    """What shows without a look at the update; the rest the aggregator judges."""
    if not 1 <= update.n_samples <= client.n_samples:
        return f"trained on {update.n_samples} samples, it registered {client.n_samples}"
    if update.steps < 1:
        return f"{update.steps} local steps; at least one"
    if not all(map(math.isfinite, update.scalars.values())):
        return "a figure that is not finite"
    if not 0.0 <= update.square_loss <= MAX_FIGURE:
        return f"a squared loss of {update.square_loss}"
    return large_metric(update.metrics)


def large_metric(metrics: Mapping[str, float]) -> str | None:
    """Name a finite metric that a mean over samples could not hold."""
    found = [name for name, value in metrics.items() if math.isfinite(value) and large(value)]
    if found:
        return f"metric {found[0][:64]!r} is {metrics[found[0]]:g}; at most {MAX_FIGURE:g}"
    return None


def large(value: float) -> bool:
    """Whether a figure is none that a mean over samples could still hold, or is not finite."""
    return not abs(value) <= MAX_FIGURE
