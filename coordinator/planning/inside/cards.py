"""A fleet with a site as one worker per card, and with cards that are joined fast as one worker.

Both are the same machines: devices, their memory and the rates between them stay. Workers change.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from atoll.messages.from_worker import MAX_PROCESSES
from coordinator.planning import TUNED
from coordinator.planning.costs.fleet import Fleet, Mesh, Uplink

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from coordinator.planning.costs.fleet import Device


def card_fleet(fleet: Fleet, sites: Collection[str]) -> Fleet:
    """Return the fleet with each card of these sites a worker named SITE/0, SITE/1, ..., linked as inside."""
    made, home = [], []
    for at, one in enumerate(fleet.devices):
        mesh = one.mesh if one.worker in sites else None
        each = one.memory_limit_bytes // (mesh.size if mesh else 1)
        for number in range(mesh.size if mesh else 1):
            name = f"{one.worker}/{number}"
            card = replace(one, worker=name, name=name, memory_limit_bytes=each, mesh=None)
            made.append(card if mesh else one)
            home.append(at)
    return placed_fleet(tuple(made), home, fleet)


def placed_fleet(devices: tuple[Device, ...], home: Sequence[int], fleet: Fleet) -> Fleet:
    """Return these devices as a fleet, each at a device of ``fleet`` whose links it shares with others there.

    ``home``: places in ``fleet``. Within a home they are joined at the rate that each card has inside, times
    the cards of the smaller one. The result has no relays and no rates of probes.
    """
    n = len(devices)
    rate, delay = np.full((n, n), inf), np.zeros((n, n))
    for a, b in permutations(range(n), 2):
        mesh = fleet.devices[home[a]].mesh
        if home[a] == home[b] and mesh is not None:
            cards_at_once = min(devices[a].processes, devices[b].processes)
            rate[a, b] = 8.0 * mesh.bytes_per_s * cards_at_once / fleet.payload_share
            delay[a, b] = mesh.latency_s
        else:
            ends = home[a], home[b]
            rate[a, b], delay[a, b] = fleet.bandwidth_bps[ends], fleet.latency_s[ends]
    own = [
        tuple(d.worker for d, where in zip(devices, home, strict=True) if where == at)
        for at in range(len(fleet.devices))
    ]
    uplinks = [
        replace(
            line,
            members=tuple(w for name in line.members if name in fleet.index for w in own[fleet.index[name]]),
        )
        for line in fleet.uplinks
    ]
    held = {frozenset(line.members) for line in uplinks}
    for at, site in enumerate(fleet.devices):
        # What one worker sent over its links, its cards send over the same ones.
        if len(own[at]) > 1 and len(fleet.devices) > 1 and frozenset(own[at]) not in held:
            up, down = (
                float(np.delete(rates, at).max())
                for rates in (fleet.bandwidth_bps[at], fleet.bandwidth_bps[:, at])
            )
            uplinks.append(Uplink(site.worker, own[at], up, down))
    return Fleet(devices, rate, delay, tuple(uplinks), fleet.payload_share, losses_per_s=fleet.losses_per_s)


def near_cards(fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """Return workers of one card by their group that may be one site: alike, and joined by links of a machine
    or cluster, at least 8 Gbit/s and at most 1 ms."""
    behind = {line.members[0] for line in fleet.uplinks if len(line.members) == 1}
    single = [d for d in fleet.devices if d.site and d.mesh is None and d.worker not in behind]
    found: dict[str, tuple[str, ...]] = {}
    for site in dict.fromkeys(device.site for device in single):
        for cards in alike_devices([device for device in single if device.site == site]):
            pairs = list(permutations([fleet.index[card.worker] for card in cards], 2))
            near = all(
                fleet.bandwidth_bps[p] >= TUNED.near_bps and fleet.latency_s[p] <= TUNED.near_s for p in pairs
            )
            if near and len(found.get(site, (0,))) < len(cards) <= MAX_PROCESSES:
                found[site] = tuple(card.worker for card in cards)
    return found


def alike_devices(devices: Iterable[Device]) -> list[list[Device]]:
    """Return devices in groups whose members differ only in names and groups."""
    found: list[tuple[Device, list[Device]]] = []
    for device in devices:
        unnamed = replace(device, worker="", name="", site="")
        own = next((group for other, group in found if other == unnamed), None)
        if own is None:
            found.append((unnamed, own := []))
        own.append(device)
    return [group for _, group in found]


def joined_fleet(fleet: Fleet, groups: dict[str, tuple[str, ...]]) -> Fleet:
    """Return the fleet with the cards of each group as one worker, in the place and with the links of its
    first card. Inside, a collective of D cards takes 2 (D - 1) delays of their slowest link, as in a ring."""
    later = {worker for cards in groups.values() for worker in cards[1:]}
    left = fleet.subset([device.worker for device in fleet.devices if device.worker not in later])
    names = {cards[0]: (site, cards) for site, cards in groups.items()}
    devices = list(left.devices)
    for at, first in enumerate(left.devices):
        if first.worker not in names:
            continue
        site, cards = names[first.worker]
        pairs = list(permutations([fleet.index[worker] for worker in cards], 2))
        rate = min(float(fleet.effective_bps[pair]) for pair in pairs) / 8.0
        delay = 2 * (len(cards) - 1) * max(float(fleet.latency_s[pair]) for pair in pairs)
        limit = first.memory_limit_bytes * len(cards)
        devices[at] = replace(
            first, worker=site, name=site, memory_limit_bytes=limit, mesh=Mesh(len(cards), delay, rate)
        )
    renamed = {first: site for first, (site, _) in names.items()}
    uplinks = tuple(
        replace(
            line, members=tuple(renamed.get(worker, worker) for worker in line.members if worker not in later)
        )
        for line in left.uplinks
    )
    return replace(left, devices=tuple(devices), uplinks=uplinks)
