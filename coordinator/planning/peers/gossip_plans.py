"""Rounds of peers as a plan has them: the table that gossip draws pairs by, what rounds send and take.

Of peers of several stages a round joins ranges: parameters with the same first holders in all peers. All
ranges are under way at once. A round of gossip's pairs exchange at once and the commit waits for the slowest,
so its seconds are those of the resource that is busiest. They differ from round to round, and the plan has
their mean over the first ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.collective import Send
from atoll.exchange import AUTO, SITE_RULES, PairTable, Pattern
from atoll.gateways import grouped, of_units
from atoll.opdag import Source, leaf_refs
from coordinator.planning import TUNED
from coordinator.planning.costs.op_seconds import is_trained
from coordinator.planning.peers.selection import best_threshold
from coordinator.planning.peers.transfers import (
    PHASES,
    coded,
    exchange_s,
    owner_transfers,
    pair_rates,
    rank_rates,
)
from coordinator.planning.search.clusters import groups
from strategies.exchanges.catalogue import exchange_facts
from strategies.exchanges.matching import Network
from strategies.exchanges.partners import groups_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from atoll.exchange import Exchange
    from atoll.gateways import Sites
    from atoll.job import Optimizer
    from atoll.opdag import OpDag, TensorMeta
    from atoll.plan import Plan, Replica
    from coordinator.planning.costs.fleet import Fleet
    from strategies.exchanges.catalogue import Shapes
    from strategies.exchanges.partners import Group

    Floats = NDArray[np.float64]

UNITS = 1 << 20  # into which a vector is cut to count what is sent of it


def with_table(fleet: Fleet, held: Held, exchange: Exchange, seed: int, *, search: bool = True) -> Exchange:
    """Return the exchange with the rates of its peers' pairs and the threshold under which they mix most a
    second, where its rule draws pairs by them; without ``search`` with the median of them, at once."""
    if not exchange_facts(exchange.rule).by_rates:
        return exchange
    rates = _peer_rates(fleet, held, exchange)
    network = Network.of(rates)
    known = network.rate[network.rate > 0.0]
    if search:
        threshold = best_threshold(network, seed, 1.0 / exchange.ratio)
    else:
        threshold = float(np.median(known)) if known.size else 0.0
    return replace(exchange, pairs=PairTable(tuple(rates.reshape(-1).tolist()), threshold))


def _peer_rates(fleet: Fleet, held: Held, exchange: Exchange) -> Floats:
    """[peers, peers] bytes/s of a round of each ordered pair: all ranges at once, until the last is there."""
    peers = len(held.ranges[0].holders)
    volume = exchange_facts(exchange.rule).volume
    by_range = [volume(range_.shapes, exchange, 2) for range_ in held.ranges]
    found = np.zeros((peers, peers))
    for a, b in permutations(range(peers), 2):
        sent: dict[tuple[int, int], float] = {}
        for range_, n_bytes in zip(held.ranges, by_range, strict=True):
            link = range_.holders[a], range_.holders[b]
            sent[link] = sent.get(link, 0.0) + n_bytes
        last_s = max(
            8.0 * n_bytes / fleet.effective_bps[link] + fleet.latency_s[link]
            for link, n_bytes in sent.items()
        )
        found[a, b] = sum(by_range) / last_s
    return found


def renewed(plan: Plan, fleet: Fleet, ranks: Sequence[int], n_bytes: float, before: PairTable) -> PairTable:
    """Return a newer table of a plan's peers: of the machines of ``fleet``, which have these ranks, for
    messages of so many bytes. As many pairs are slower than the threshold as before: nobody can wait for a
    search."""
    rates = _rates_of(plan, ranks, pair_rates(fleet, list(range(len(ranks))), n_bytes))
    old, now = np.array(before.rates), np.sort(rates[rates > 0.0])
    slower = float((old[old > 0.0] < before.threshold).mean()) if old.any() else 0.0
    at = min(round(slower * now.size), now.size - 1)
    threshold = float(now[at]) if slower and now.size else 0.0
    return PairTable(tuple(rates.reshape(-1).tolist()), threshold)


def _rates_of(plan: Plan, ranks: Sequence[int], by_rank: Floats) -> Floats:
    """[peers, peers] rates: of two peers those of the slowest two ranks that have ops in common; 0 of a peer
    that is not there."""
    found = np.zeros((len(plan.replicas),) * 2)
    spans = []
    for rank in ranks:
        place = plan.places[rank]
        pieces = plan.replicas[place.replica].stages[place.stage].pieces
        spans.append((place.replica, [range(piece.start, piece.stop) for piece in pieces]))
    for (at, (a, mine)), (to, (b, theirs)) in permutations(enumerate(spans), 2):
        if a != b and any(max(x.start, y.start) < min(x.stop, y.stop) for x in mine for y in theirs):
            known = found[a, b]
            found[a, b] = min(known, by_rank[at, to]) if known else by_rank[at, to]
    return found


def moved_share(before: PairTable, now: PairTable) -> float:
    """Return the share of the pairs that both know which are on the other side of the threshold by now, and
    by a fifth faster or slower beside it than they were: pairs that are alike cross it by chance."""
    if not before.threshold or not now.threshold:
        return 0.0
    old, new = np.array(before.rates) / before.threshold, np.array(now.rates) / now.threshold
    both = (old > 0.0) & (new > 0.0)
    moved = ((old >= 1.0) != (new >= 1.0)) & (np.abs(new - old) > TUNED.rate_moved * old)
    return float(moved[both].mean()) if both.any() else 0.0


class Range(NamedTuple):
    """Trained parameters that the same devices hold first, one in each peer."""

    n_bytes: float
    holders: tuple[int, ...]  # devices, by peer
    rates: tuple[float, ...] = ()  # bytes/s of each towards those it exchanges with; none: among themselves
    tensors: tuple[tuple[int, ...], ...] = ()  # their shapes; none: taken for one tensor

    @property
    def shapes(self) -> Shapes:
        """Shapes of what is exchanged."""
        return self.tensors or ((round(self.n_bytes / 4),),)


class Held(NamedTuple):
    """Ranges that peers exchange, and the bytes [devices, devices] of settled values that first holders of
    tied parameters send to the other holders in their peer."""

    ranges: tuple[Range, ...]
    settled: Floats
    sites: tuple[int, ...] = ()  # of each device, where rounds go by gateways between them; none: they do not


def whole_models(fleet: Fleet, members: Sequence[int], n_bytes: float) -> Held:
    """Return what peers hold that each are one device with all of so many trained bytes."""
    return Held((Range(n_bytes, tuple(members)),), np.zeros((len(fleet.devices),) * 2))


def held_by(fleet: Fleet, replicas: Sequence[Replica], dag: OpDag, optimizer: Optimizer) -> Held:
    """Return what the stages of peers hold first, and send on of tied parameters."""
    shared: dict[tuple[int, ...], list[TensorMeta]] = {}
    settled = np.zeros((len(fleet.devices),) * 2)
    stage_at = [_devices_by_op(fleet, replica) for replica in replicas]
    uses: dict[str, list[int]] = {}
    for op, node in enumerate(dag.ops):
        for leaf in leaf_refs(node):
            if leaf.source is Source.PARAMETER and is_trained(dag, leaf.name, optimizer):
                uses.setdefault(leaf.name, []).append(op)
    for name, ops in uses.items():
        meta = dag.parameters[name].meta
        holders = tuple(of[ops[0]] for of in stage_at)
        shared.setdefault(holders, []).append(meta)
        for of, first in zip(stage_at, holders, strict=True):
            for other in {of[op] for op in ops} - {first}:
                settled[first, other] += meta.nbytes
    rates = _rates_between(fleet, list(shared))
    ranges = (
        Range(
            float(sum(meta.nbytes for meta in metas)),
            holders,
            tuple(rates[at] for at in holders) if len(shared) > 1 else (),
            tuple(meta.shape for meta in metas),
        )
        for holders, metas in shared.items()
    )
    return Held(tuple(ranges), settled)


def rates_by_rank(fleet: Fleet, members: list[int], held: Held) -> list[float]:
    """Return bytes/s of each member over its slowest link to one it exchanges with; who exchanges nothing has
    the slowest of all its links."""
    rates = _rates_between(fleet, [range_.holders for range_ in held.ranges])
    all_of_them = rank_rates(fleet, members)
    return [rates.get(at, slowest) for at, slowest in zip(members, all_of_them, strict=True)]


def _rates_between(fleet: Fleet, together: Sequence[Sequence[int]]) -> dict[int, float]:
    """Bytes/s of each device over its slowest link to one that is with it in any of the tuples."""
    found: dict[int, float] = {}
    for holders in together:
        for at, rate in zip(holders, rank_rates(fleet, list(holders)), strict=True):
            found[at] = min(found.get(at, rate), rate)
    return found


def _devices_by_op(fleet: Fleet, replica: Replica) -> list[int]:
    """[ops] the device that computes each."""
    found: list[int] = []
    for piece, stage, _ in replica.pieces:
        found += [fleet.index[replica.stages[stage].worker]] * (piece.stop - piece.start)
    return found


def round_of(fleet: Fleet, held: Held, exchange: Exchange, seed: int) -> tuple[Floats, float]:
    """Return the bytes [devices, devices] of a round in which peers join what they hold, and its seconds; of
    gossip their means."""
    settled = held.settled / exchange.fragments
    settled_s = exchange_s(fleet, settled, 1)
    sent = np.zeros((len(fleet.devices),) * 2)
    if not exchange.gossips:
        for range_ in held.ranges:
            sent += _of_all(fleet, range_, exchange, held.sites)
        # Gateways begin with what their sites have sent, and end with what these wait for.
        numbers = np.array(held.sites or range(len(sent)))
        inside = sent * (numbers[:, None] == numbers[None, :])
        return sent + settled, exchange_s(fleet, sent - inside) + exchange_s(fleet, inside) + settled_s
    peers, seconds = tuple(range(len(held.ranges[0].holders))), 0.0
    owners = exchange_facts(exchange.rule).pattern is Pattern.OWNERS
    for number in range(TUNED.seen_rounds):
        groups = groups_at(exchange, peers, len(peers), seed, number)
        moved = np.zeros_like(sent)
        for range_ in held.ranges:
            moved += _of_groups(fleet, range_, exchange, groups)
        seconds += exchange_s(fleet, moved, PHASES if owners else 1) / TUNED.seen_rounds
        sent += moved / TUNED.seen_rounds
    return sent + settled, seconds + settled_s


def through_gateways(fleet: Fleet, held: Held, exchange: Exchange, numbers: tuple[int, ...]) -> Held:
    """Return what peers hold with the sites of their devices (``site_numbers``), where a round is shorter by
    gateways between them."""
    if exchange.rule not in SITE_RULES or not any(map(partial(_sites_of, numbers), held.ranges)):
        return held
    within = held._replace(sites=numbers)
    dense = replace(exchange, codec="none") if exchange.codec == AUTO else exchange
    flat_s, within_s = (round_of(fleet, each, dense, 0)[1] for each in (held, within))
    return within if TUNED.nearly * within_s < flat_s else held


def site_numbers(fleet: Fleet) -> tuple[int, ...]:
    """Return the site of each device, as its links show them."""
    return _numbers(len(fleet.devices), fleet.bandwidth_bps.tobytes())


@lru_cache(maxsize=16)
def _numbers(count: int, rates: bytes) -> tuple[int, ...]:
    """A search asks for the same fleet's many times, and finding them takes 50 ms of 64 devices."""
    sites = groups(np.frombuffer(rates).reshape(count, count))
    found = {device: number for number, site in enumerate(sites) for device in site}
    return tuple(found[at] for at in range(count))


def _sites_of(numbers: Sequence[int], range_: Range) -> Sites:
    return grouped({peer: numbers[at] for peer, at in enumerate(range_.holders)}) if numbers else ()


def _of_all(fleet: Fleet, range_: Range, exchange: Exchange, numbers: Sequence[int]) -> Floats:
    """Bytes [devices, devices] of a range that all peers join, by gateways where some share a site."""
    holders, sites = range_.holders, _sites_of(numbers, range_)
    if not sites:
        return _by_owners(fleet, list(holders), range_, exchange, range_.rates)
    facts, sent = exchange_facts(exchange.rule), np.zeros((len(fleet.devices),) * 2)
    sums = facts.pattern is Pattern.OWNERS
    rates = dict(enumerate(range_.rates or rank_rates(fleet, list(holders))))
    collective = of_units(sites, rates, UNITS, sums=sums)
    # A volume is 2 (R - 1) / R of a vector by owners, R - 1 times a peer's parts where those go to all.
    plain = range_.n_bytes / exchange.fragments
    packet = facts.volume(range_.shapes, exchange, 2)
    for peer, actions in collective.actions.items():
        for action in actions:
            if isinstance(action, Send):
                share = collective.segments[action.segment].size / UNITS
                whole = plain if collective.plain(peer, action.to, action.label) else packet
                sent[holders[peer], holders[action.to]] += share * whole
    return sent


def hidden_steps(exchange: Exchange) -> int:
    """Return how many steps pass while a round is under way; a published copy leaves before its burst."""
    published = exchange_facts(exchange.rule).pattern is Pattern.PUBLISHED
    return exchange.every if published else exchange.delay


def _of_groups(fleet: Fleet, range_: Range, exchange: Exchange, groups: tuple[Group, ...]) -> Floats:
    sent = np.zeros((len(fleet.devices),) * 2)
    for group in groups:
        ids = [range_.holders[rank] for rank in group]
        if exchange_facts(exchange.rule).pattern is Pattern.OWNERS:
            sent += _by_owners(fleet, ids, range_, exchange)
        elif len(ids) > 1:
            volume = exchange_facts(exchange.rule).volume(range_.shapes, exchange, 2)
            sent[ids[0], ids[1]] = sent[ids[1], ids[0]] = volume
    return sent


def _by_owners(
    fleet: Fleet, members: list[int], range_: Range, exchange: Exchange, rates: Sequence[float] = ()
) -> Floats:
    dense = owner_transfers(fleet, members, range_.n_bytes, rates)
    if len(members) < 2 or not range_.n_bytes:
        return dense
    return coded(dense, range_.shapes, exchange, len(members))
