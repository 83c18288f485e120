"""Peers with local steps in a simulated world: a hash chain for each peer's steps, one hash for a round.

What a peer brings to a round depends on the state that the period began with, its rank and the steps it took.
So the state after a round is a function of the ranks that were in it, which the journal says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from coordinator.messages import events as ev
from tests.sim.clock import digest

if TYPE_CHECKING:
    from atoll.plan import Plan

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


def after(tensors: Mapping[str, str], ranks: Collection[int], first: int, last: int) -> dict[str, str]:
    """Return the state after a round of these ranks."""
    result = total([brought(tensors, rank, first, last) for rank in ranks])
    return used(tensors, last, result)


def used(tensors: Mapping[str, str], last: int, result: str) -> dict[str, str]:
    """Return the state after a round with that result."""
    return {name: digest(value, last, result) for name, value in tensors.items()}


def receipt(plan: Plan, last: int, result: str) -> ev.RoundReceipt:
    """Return what a peer says of a round."""
    assert plan.exchange is not None
    return ev.RoundReceipt(plan.exchange.round_of(last), plan.present, 1.0, 1000, 1000, result)
