"""Estimates for pairs of a large fleet that were never measured, from those that were. Pure.

Between two places, and within one, the median of what was measured there. Else the slower of what the source
has shown to send and the target to receive, a worker that has shown nothing counting as its place's median,
and one of a place without figures as ``unknown``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from coordinator.membership.links.table import MIN_BANDWIDTH_BPS
from coordinator.planning.costs.fleet import LinkEstimate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.membership.links.table import LinkTable

    Floats = NDArray[np.float64]


def guesses(
    workers: Sequence[str], place_of: Mapping[str, str], table: LinkTable, unknown: LinkEstimate
) -> tuple[Floats, Floats]:
    """Return bit/s and one-way seconds [source, target]; the diagonal has no meaning."""
    places = [place_of.get(worker, worker) for worker in workers]
    up, down, latency = _shown(workers, table)
    for shown, otherwise in (
        (up, unknown.bandwidth_bps),
        (down, unknown.bandwidth_bps),
        (latency, unknown.latency_s),
    ):
        _fill(shown, places, otherwise)
    bandwidth_bps = np.minimum.outer(up, down)
    latency_s = np.add.outer(latency, latency) / 2.0
    members: dict[str, list[int]] = defaultdict(list)
    for at, place in enumerate(places):
        members[place].append(at)
    for (a, b), links in _between(place_of, members, table).items():
        block = np.ix_(members[a], members[b])
        bandwidth_bps[block] = median(link.bandwidth_bps for link in links)
        latency_s[block] = median(link.latency_s for link in links)
    return bandwidth_bps, latency_s


def _shown(workers: Sequence[str], table: LinkTable) -> tuple[Floats, Floats, Floats]:
    """Best rate out, best rate in, and median latency of each worker; NaN where nothing was measured."""
    up, down, latency = (np.full(len(workers), np.nan) for _ in range(3))
    for at, worker in enumerate(workers):
        links = [(pair, table.estimates[pair]) for pair in table.estimates.of(worker)]
        links = [(pair, link) for pair, link in links if link.bandwidth_bps > MIN_BANDWIDTH_BPS]
        up[at] = max((k.bandwidth_bps for pair, k in links if pair[0] == worker), default=np.nan)
        down[at] = max((k.bandwidth_bps for pair, k in links if pair[1] == worker), default=np.nan)
        latency[at] = median(k.latency_s for _, k in links) if links else np.nan
    return up, down, latency


def _fill(values: Floats, places: Sequence[str], otherwise: float) -> None:
    shown: dict[str, list[float]] = defaultdict(list)
    for place, value in zip(places, values.tolist(), strict=True):
        if value == value:  # not NaN
            shown[place].append(value)
    usual = {place: median(found) for place, found in shown.items()}
    for at in np.flatnonzero(np.isnan(values)).tolist():
        values[at] = usual.get(places[at], otherwise)


def _between(
    place_of: Mapping[str, str], members: Mapping[str, Sequence[int]], table: LinkTable
) -> dict[tuple[str, str], list[LinkEstimate]]:
    """Return what was measured from one place with several members to another, or within one."""
    found: dict[tuple[str, str], list[LinkEstimate]] = defaultdict(list)
    for (source, target), link in table.estimates.items():
        a, b = place_of.get(source, source), place_of.get(target, target)
        several = a in members and b in members and max(len(members[a]), len(members[b])) > 1
        if several and link.bandwidth_bps > MIN_BANDWIDTH_BPS:
            found[a, b].append(link)
    return found
