"""Who exchanges with whom in each round of a plan's exchange: the same at every peer and at the coordinator.

Peers are a plan's replicas, by number; those that are there have all their workers.

    all      everybody that is there
    pairs    ``matching`` under the plan's table of rates, at random without one; one is alone where n is odd
    groups   ``matching.grid_groups``, about sqrt(n) in each; all of them every ``everybody_every``-th round

The last round of a training joins the models of everybody, so that it ends with one.

A round derives from what the journal has: the table and the threshold in the plan, the job's seed, the number
of the round, the ranks that are there. Pairs see the rounds before them within an epoch alone: so no round is
more than an epoch's work to derive, and whoever comes late need not know what happened. Over the border of an
epoch windows connect in twice as many rounds, and a peer may be alone twice running.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from atoll.collective import group_size
from atoll.exchange import Exchange, PairTable, Partners
from strategies.exchanges.catalogue import exchange_facts
from strategies.exchanges.matching import PAIRS, Network, Pairs, grid_groups, match, random_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.job import TrainingSpec
    from atoll.plan import Plan

EPOCH = 32  # rounds; a window is 11 with 64 peers
JOINING_RULE = "wagma"  # the mean of models, of whoever is in a group

Group = tuple[int, ...]
"""Peers, ascending."""


def joins(plan: Plan, training: TrainingSpec, last: int) -> bool:
    """Whether the round that ends with step ``last`` makes one model of those that peers have by then."""
    return plan.exchange is not None and plan.exchange.gossips and last + 1 == training.steps


def groups_of(plan: Plan, training: TrainingSpec, last: int) -> tuple[Group, ...]:
    """Return the groups of the round that ends with step ``last``, by their first peer; every peer that is
    there is in one, perhaps alone."""
    exchange, present = plan.exchange, plan.present_replicas
    if exchange is None or not exchange.gossips or joins(plan, training, last):
        return (present,)
    return groups_at(exchange, present, len(plan.replicas), training.seed, exchange.round_of(last))


def groups_at(
    exchange: Exchange, present: tuple[int, ...], n_ranks: int, seed: int, number: int
) -> tuple[Group, ...]:
    """Return the groups of round ``number`` among the ranks that are ``present``, of so many."""
    facts = exchange_facts(exchange.rule)
    everybody = facts.everybody_every and (number + 1) % facts.everybody_every == 0
    if facts.partners is Partners.ALL or everybody:
        return (present,)
    if facts.partners is Partners.GROUPS:
        found: Pairs | tuple[Group, ...] = grid_groups(len(present), group_size(len(present)), seed, number)
    else:
        epoch, at = divmod(number, EPOCH)
        found = _pairs(exchange.pairs, present, n_ranks, seed, epoch)[at]
    groups = [tuple(sorted(present[at] for at in group)) for group in found]
    met = {rank for group in groups for rank in group}
    return tuple(sorted([*groups, *((rank,) for rank in present if rank not in met)]))


def group_of(rank: int, groups: Sequence[Group]) -> Group:
    """Return the group that a rank is in."""
    return next(group for group in groups if rank in group)


@lru_cache(maxsize=16)
def _pairs(
    table: PairTable | None, present: tuple[int, ...], n_ranks: int, seed: int, epoch: int
) -> tuple[Pairs, ...]:
    """Return the pairs of an epoch's rounds, as places in ``present``."""
    if table is None:
        network = Network.of(np.ones((len(present), len(present))))
    else:
        rates = np.array(table.rates).reshape(n_ranks, n_ranks)
        network = Network.of(rates[np.ix_(present, present)], table.threshold)
    past: list[Pairs] = []
    for number in range(epoch * EPOCH, (epoch + 1) * EPOCH):
        past.append(match(network, random_words(seed, number, PAIRS, 2 * network.n), past))
    return tuple(past)
