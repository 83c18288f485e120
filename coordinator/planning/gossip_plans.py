"""Gossip as a plan has it: the table that pairs are drawn by, and what its rounds send and take.

A round's pairs exchange at once and the commit waits for the slowest, so a round's seconds are those of the
resource that is busiest. They differ from round to round, and the plan has their mean over the first ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.exchange import PairTable, Pattern
from coordinator.planning import TUNED
from coordinator.planning.peers import best_threshold
from coordinator.planning.transfers import PHASES, coded, exchange_s, owner_transfers, pair_rates
from strategies.exchanges.catalogue import exchange_facts
from strategies.exchanges.matching import Network
from strategies.exchanges.partners import groups_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from atoll.exchange import Exchange
    from coordinator.planning.costs.fleet import Fleet
    from strategies.exchanges.partners import Group

    Floats = NDArray[np.float64]


def with_table(
    fleet: Fleet, members: list[int], n_bytes: float, exchange: Exchange, seed: int, *, search: bool = True
) -> Exchange:
    """Return the exchange with the rates of its members' pairs and the threshold under which they mix most a
    second, where its rule draws pairs by them; without ``search`` with the median of them, at once."""
    if not exchange_facts(exchange.rule).by_rates:
        return exchange
    sent = exchange_facts(exchange.rule).volume(((round(n_bytes / 4),),), exchange, 2)
    rates = pair_rates(fleet, members, sent)
    network = Network.of(rates)
    known = network.rate[network.rate > 0.0]
    if search:
        threshold = best_threshold(network, seed, 1.0 / exchange.ratio)
    else:
        threshold = float(np.median(known)) if known.size else 0.0
    return replace(exchange, pairs=PairTable(tuple(rates.reshape(-1).tolist()), threshold))


def renewed(fleet: Fleet, ranks: Sequence[int], n_ranks: int, n_bytes: float, before: PairTable) -> PairTable:
    """Return a newer table: of the machines of ``fleet``, which have these ranks, for messages of so many
    bytes. As many pairs are slower than the threshold as before: nobody can wait for a search."""
    rates = np.zeros((n_ranks, n_ranks))
    rates[np.ix_(ranks, ranks)] = pair_rates(fleet, list(range(len(ranks))), n_bytes)
    old, now = np.array(before.rates), np.sort(rates[rates > 0.0])
    slower = float((old[old > 0.0] < before.threshold).mean()) if old.any() else 0.0
    at = min(round(slower * now.size), now.size - 1)
    threshold = float(now[at]) if slower and now.size else 0.0
    return PairTable(tuple(rates.reshape(-1).tolist()), threshold)


def moved_share(before: PairTable, now: PairTable) -> float:
    """Return the share of the pairs that both know which are on the other side of the threshold by now, and
    by a fifth faster or slower beside it than they were: pairs that are alike cross it by chance."""
    if not before.threshold or not now.threshold:
        return 0.0
    old, new = np.array(before.rates) / before.threshold, np.array(now.rates) / now.threshold
    both = (old > 0.0) & (new > 0.0)
    moved = ((old >= 1.0) != (new >= 1.0)) & (np.abs(new - old) > TUNED.rate_moved * old)
    return float(moved[both].mean()) if both.any() else 0.0


def round_of(
    fleet: Fleet, members: list[int], n_bytes: float, exchange: Exchange, seed: int
) -> tuple[Floats, float]:
    """Return the bytes [devices, devices] of a round among ``members`` with so many trained bytes each, and
    its seconds; of gossip their means."""
    if not exchange.gossips:
        sent = _by_owners(fleet, members, n_bytes, exchange)
        return sent, exchange_s(fleet, sent)
    ranks = tuple(range(len(members)))
    sent, seconds = np.zeros((len(fleet.devices),) * 2), 0.0
    owners = exchange_facts(exchange.rule).pattern is Pattern.OWNERS
    for number in range(TUNED.seen_rounds):
        groups = groups_at(exchange, ranks, len(ranks), seed, number)
        moved = _of_groups(fleet, members, n_bytes, exchange, groups)
        seconds += exchange_s(fleet, moved, PHASES if owners else 1) / TUNED.seen_rounds
        sent += moved / TUNED.seen_rounds
    return sent, seconds


def hidden_steps(exchange: Exchange) -> int:
    """Return how many steps pass while a round is under way; a published copy leaves before its burst."""
    published = exchange_facts(exchange.rule).pattern is Pattern.PUBLISHED
    return exchange.every if published else exchange.delay


def _of_groups(
    fleet: Fleet, members: list[int], n_bytes: float, exchange: Exchange, groups: tuple[Group, ...]
) -> Floats:
    sent = np.zeros((len(fleet.devices),) * 2)
    for group in groups:
        ids = [members[rank] for rank in group]
        if exchange_facts(exchange.rule).pattern is Pattern.OWNERS:
            sent += _by_owners(fleet, ids, n_bytes, exchange)
        elif len(ids) > 1:
            volume = exchange_facts(exchange.rule).volume(((round(n_bytes / 4),),), exchange, 2)
            sent[ids[0], ids[1]] = sent[ids[1], ids[0]] = volume
    return sent


def _by_owners(fleet: Fleet, members: list[int], n_bytes: float, exchange: Exchange) -> Floats:
    dense = owner_transfers(fleet, members, n_bytes)
    if len(members) < 2 or not n_bytes:
        return dense
    return coded(dense, n_bytes, exchange, len(members))
