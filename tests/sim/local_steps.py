"""Peers with local steps in a simulated world: a hash chain for each peer's steps, one hash for a round.

What a peer brings to a round depends on the state that the period began with, its rank and the steps it took.
So a peer's state after a round is a function of who was in its group, which the journal says, and of their
states before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from coordinator.messages import events as ev
from tests.sim.clock import digest

if TYPE_CHECKING:
    from atoll.plan import Plan
    from strategies.exchanges.partners import Group

LOCAL_STEP_S = 0.1


def begun(tensors: Mapping[str, str], rank: int) -> str:
    """Return a peer's own state as a period begins."""
    return digest("peer", rank, sorted(tensors.items()))


def stepped(value: str, step: int) -> str:
    """Return it after a local step."""
    return digest("local", value, step)


def brought(tensors: Mapping[str, str], rank: int, first: int, last: int) -> str:
    """Return what a rank brings to the round of a period."""
    value = begun(tensors, rank)
    for step in range(first, last + 1):
        value = stepped(value, step)
    return value


def total(parts: Collection[str]) -> str:
    """Return a round's result."""
    return digest("round", *sorted(parts))


def after(
    states: Mapping[int, Mapping[str, str]],
    groups: Collection[Group],
    first: int,
    last: int,
    joins: bool,
    late: Mapping[int, int],
) -> dict[int, dict[str, str]]:
    """Return the states by rank after a round of these groups; ``joins``: it makes one model of all;
    ``late``: the steps of ranks that have taken fewer."""
    found = {}
    for group in groups:
        ends = {rank: first + late[rank] - 1 if rank in late else last for rank in group}
        result = total([brought(states[rank], rank, first, ends[rank]) for rank in group])
        found.update({rank: used(states[rank], last, result, joins) for rank in group})
    return found


def used(tensors: Mapping[str, str], last: int, result: str, joins: bool) -> dict[str, str]:
    """Return the state after a round with that result."""
    return {name: digest(name if joins else value, last, result) for name, value in tensors.items()}


def receipt(plan: Plan, group: Group, last: int, result: str) -> ev.RoundReceipt:
    """Return what a peer says of a round."""
    assert plan.exchange is not None
    return ev.RoundReceipt(plan.exchange.round_of(last), group, 1.0, 1000, 1000, result)
