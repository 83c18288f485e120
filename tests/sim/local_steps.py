"""Peers with local steps in a simulated world: a hash chain of each tensor, and a loss that all of them make.

What a peer brings to a round depends on the state that the period began with, its number, and the steps that
it took, whatever its cut. So a peer's state after a round is a function of who was in its group, which the
journal says, and of their states before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.messages import events as ev
from tests.sim.clock import digest

if TYPE_CHECKING:
    from atoll.plan import Plan
    from strategies.exchanges.partners import Group

LOCAL_STEP_S = 0.1

Own = Mapping[str, str]
"""By tensor, what a peer's own steps have led to."""


def begun(tensors: Mapping[str, str], peer: int) -> dict[str, str]:
    """Return a peer's own state as a period begins."""
    return {name: digest("peer", peer, name, value) for name, value in tensors.items()}


def batch(step: int, peer: int) -> str:
    """Return the data of a peer's share of a step."""
    return digest("own batch", step, peer)


def forward(given: str, own: Own, names: Iterable[str]) -> str:
    """Return what some of a peer's tensors make of what they are given; the last makes the loss."""
    for name in names:
        given = digest(given, own[name])
    return given


def stepped(own: Own, step: int, loss: str) -> dict[str, str]:
    """Return it after a local step in which the peer's pipeline computed ``loss``."""
    return {name: digest("local", value, step, loss) for name, value in own.items()}


def taken(tensors: Mapping[str, str], peer: int, first: int, last: int) -> dict[str, str]:
    """Return what a peer of all these tensors brings to the round of a period."""
    own = begun(tensors, peer)
    for step in range(first, last + 1):
        own = stepped(own, step, forward(batch(step, peer), own, sorted(own)))
    return own


def total(parts: Collection[str]) -> str:
    """Return a round's result of one tensor."""
    return digest("round", *sorted(parts))


def totals(parts: Sequence[Own], names: Iterable[str]) -> dict[str, str]:
    """Return the results of a round, of those tensors that all of these bring."""
    return {name: total([part[name] for part in parts if name in part]) for name in names}


def after(
    states: Mapping[int, Mapping[str, str]],
    groups: Collection[Group],
    first: int,
    last: int,
    joins: bool,
    late: Mapping[int, int],
) -> dict[int, dict[str, str]]:
    """Return the states by peer after a round of these groups; ``joins``: it makes one model of all;
    ``late``: the steps of peers that have taken fewer."""
    found = {}
    for group in groups:
        ends = {peer: first + late[peer] - 1 if peer in late else last for peer in group}
        brought = [taken(states[peer], peer, first, ends[peer]) for peer in group]
        results = totals(brought, sorted(brought[0]))
        found.update({peer: used(states[peer], last, results, joins) for peer in group})
    return found


def used(tensors: Mapping[str, str], last: int, results: Own, joins: bool) -> dict[str, str]:
    """Return the state after a round with these results."""
    return {name: digest(name if joins else value, last, results[name]) for name, value in tensors.items()}


def coded(own: Own) -> str:
    """Return what a rank brings as one message."""
    return json.dumps(own, sort_keys=True)


def read(message: str) -> dict[str, str]:
    """Return what ``coded`` made a message of."""
    return dict(json.loads(message))


def receipts(plan: Plan, rank: int, group: Group, last: int, results: Own) -> tuple[ev.RoundReceipt, ...]:
    """Return what a rank says of a round: one receipt of each part of the model that no cut divides."""
    place = plan.places[rank]
    mine = plan.replicas[place.replica].stages[place.stage]
    starts = sorted({piece.start for replica in plan.replicas for piece, *_ in replica.pieces})
    names, said = sorted(results), []
    for at in range(mine.start, mine.stop):
        if at in starts or at == mine.start:
            stop = next((start for start in starts if start > at), mine.stop)
            part = [results[name] for name in names[at - mine.start : min(stop, mine.stop) - mine.start]]
            said.append(receipt(plan, group, last, digest(*part)[:32], at))
    return tuple(said)


def receipt(plan: Plan, group: Group, last: int, result: str, at: int = 0) -> ev.RoundReceipt:
    """Return what a rank says of the round of one part."""
    assert plan.exchange is not None
    return ev.RoundReceipt(plan.exchange.round_of(last), group, 1.0, 1000, 1000, result, slice=at)
