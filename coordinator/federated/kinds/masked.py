"""A round whose members mask their updates: the coordinator opens the sum alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.secure import Stage
from coordinator.federated.kinds.round import Outcome, Round, drop, forgotten
from coordinator.federated.secure import books as secure
from coordinator.federated.selection import seed_of
from coordinator.federated.state import FederationState, Todo
from coordinator.messages.events import SecureAnswer, UpdateReady
from coordinator.messages.instructions import AggregateRound, Opening, SecureOrder, TrainRound
from coordinator.messages.jobs import Dropped

if TYPE_CHECKING:
    from coordinator.federated.secure.books import Books


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

    def summed(self, state: FederationState, attempt: int, n_clients: int, least: int) -> AggregateRound:
        held, plain = _books(state), super().summed(state, attempt, n_clients, least)
        shares, (count, samples) = dict(held.shares), _weighed(state)
        opening = Opening(
            held.name, dict(held.keys), held.shared, shares, count, samples, _common_seed(state)
        )
        return replace(plain, opening=opening)


def _books(state: FederationState) -> Books:
    """The books of a secure round. LookupError outside of one."""
    if state.secure is None:
        raise LookupError(f"{state.job}: round {state.round} does not mask its updates")
    return state.secure


def _common_seed(state: FederationState) -> int:
    """Seed of a codec that draws the same positions for all members."""
    return seed_of(state.spec.training.seed, "", state.round)


def _weighed(state: FederationState) -> tuple[int, int]:
    """How many members' masks are in the sum, and the samples that they may count: what its grid is of."""
    most, members = state.federated.rule.max_samples, _books(state).shared
    return len(members), sum(min(state.clients[name].n_samples, most) for name in members)
