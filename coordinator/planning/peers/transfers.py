"""Seconds of an exchange among machines of a fleet, whatever else their links do.

Transfers of one exchange share what they pass: pairs, uplinks, downlinks. All at once they take as long as
the resource that is busiest, and the latencies of the phases on top; nothing of an exchange waits for
another link's turn, so the busiest resource is also the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.collective import owner_shares
from strategies.exchanges.catalogue import EXCHANGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from atoll.exchange import Exchange
    from coordinator.planning.costs.fleet import Fleet
    from strategies.exchanges.catalogue import Shapes

    Floats = NDArray[np.float64]

PHASES = 2  # latencies of an exchange by owners: parts there, totals back


def rank_rates(fleet: Fleet, members: list[int]) -> list[float]:
    """Bytes/s that each member gets over its slowest link to another one."""
    rate = fleet.effective_bps[np.ix_(members, members)] / 8.0
    np.fill_diagonal(rate, np.inf)
    return [float(min(rate[i].min(), rate[:, i].min())) for i in range(len(members))]


def pair_rates(fleet: Fleet, members: list[int], n_bytes: float) -> Floats:
    """[members, members] bytes/s that a message of so many bytes gets of each ordered pair, its latency
    included; 0 on the diagonal."""
    at = np.ix_(members, members)
    seconds = 8.0 * n_bytes / fleet.effective_bps[at] + fleet.latency_s[at]
    np.fill_diagonal(seconds, np.inf)
    return np.asarray(n_bytes / seconds)


def shares_of(units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole units in proportion to ``speeds``, at least one each: whoever would be done first takes the
    next."""
    shares = [1] * len(speeds)
    for _ in range(units - len(speeds)):
        at = min(range(len(speeds)), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[at] += 1
    return tuple(shares)


def owner_transfers(fleet: Fleet, members: list[int], n_bytes: float, rates: Sequence[float] = ()) -> Floats:
    """[devices, devices] bytes of an exchange of ``n_bytes`` a member, owners' shares by their rates: those
    among themselves, unless others are given."""
    sent = np.zeros((len(fleet.devices),) * 2)
    if len(members) < 2:
        return sent
    shares = np.array(owner_shares(rates or rank_rates(fleet, members)))
    block = n_bytes * (shares[None, :] + shares[:, None])  # a part to its owner, and the own total to all
    np.fill_diagonal(block, 0.0)
    sent[np.ix_(members, members)] = block
    return sent


def seconds(fleet: Fleet, sent: Floats) -> float:
    """Seconds of all of ``sent`` [source, target] bytes at once, latencies aside."""
    worst = float((sent * 8.0 / fleet.bandwidth_bps).max(initial=0.0))
    for uplink, inside in fleet.behind:
        worst = max(
            worst,
            8.0 * float(sent[np.ix_(inside, ~inside)].sum()) / uplink.up_bps,
            8.0 * float(sent[np.ix_(~inside, inside)].sum()) / uplink.down_bps,
        )
    for relay in fleet.relays:
        known = [(fleet.index[a], fleet.index[b]) for a, b in relay.pairs if {a, b} <= fleet.index.keys()]
        worst = max(worst, 8.0 * float(sum(sent[pair] for pair in known)) / relay.bps)
    return worst / fleet.payload_share


def coded(dense: Floats, shapes: Shapes, exchange: Exchange, count: int) -> Floats:
    """[devices, devices] bytes of a round by the exchange's rule among ``count`` members with tensors of
    these shapes each, who send ``dense`` where it is by owners and without a codec."""
    volume = EXCHANGES[exchange.rule].volume(shapes, exchange, count)
    return dense * (volume / (float(dense.sum()) / count))


def latency_s(fleet: Fleet, sent: Floats) -> float:
    """Longest delay of a pair that sends anything."""
    return float(np.where(sent > 0.0, fleet.latency_s, 0.0).max(initial=0.0))


def exchange_s(fleet: Fleet, sent: Floats, phases: int = PHASES) -> float:
    """Seconds of an exchange that transfers ``sent``, in so many latencies."""
    return seconds(fleet, sent) + phases * latency_s(fleet, sent)
