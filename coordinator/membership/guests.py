"""What limits that workers' owners set mean for plans and deadlines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from coordinator.messages.events import UNLIMITED, Guest
from coordinator.planning.costs.fleet import UNKNOWN, Fleet, Uplink


def slower(before: Guest, now: Guest, best_bps: float | None) -> float:
    """Return how much longer at most a worker's part of a step takes than under its limits ``before``; at
    least 1. ``best_bps``: the highest rate known of its links, None: of none."""
    open_bps = best_bps or UNKNOWN.bandwidth_bps
    rates = ((before.upload_bps, now.upload_bps), (before.download_bps, now.download_bps))
    ratios = [min(was, open_bps) / new for was, new in rates if isfinite(new)]
    return max(1.0, before.compute_share / now.compute_share, *ratios)


def within_limits(fleet: Fleet, guests: Mapping[str, Guest]) -> Fleet:
    """Return the fleet with every link at most at the rates of its ends' limits, which all links of a worker
    share."""
    found = [guests.get(device.worker, UNLIMITED) for device in fleet.devices]
    up = np.array([guest.upload_bps for guest in found])
    down = np.array([guest.download_bps for guest in found])
    if np.isinf(up).all() and np.isinf(down).all():
        return fleet
    most = np.minimum(up[:, None], down[None, :])
    np.fill_diagonal(most, inf)
    shared = tuple(
        Uplink(f"limit of {device.label}", (device.worker,), guest.upload_bps, guest.download_bps)
        for device, guest in zip(fleet.devices, found, strict=True)
        if isfinite(guest.upload_bps) or isfinite(guest.download_bps)
    )

    def limited(one: Fleet) -> Fleet:
        rates = np.minimum(one.bandwidth_bps, most)
        return replace(one, bandwidth_bps=rates, uplinks=(*one.uplinks, *shared), probed=None)

    probed = None if fleet.probed is None else limited(fleet.probed)
    return replace(limited(fleet), probed=probed)
