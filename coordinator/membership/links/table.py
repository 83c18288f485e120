"""Newest bandwidth and latency of every ordered pair of workers, smoothed; and what is impossible.

Rates are payload bits per second (TCP, TLS and framing already paid); latencies are one way.
Samples come from probes at joining and from what training itself sends; nothing here measures.
A probe is one long stream; training's messages are short, meet others and share the machine with
computing. ``drag`` is how much longer they take than the timeline says from the probed rate.
Who reports an impossible figure is judged here, in words, so that the caller can log and show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from coordinator.membership.links.pairs import PairMap
from coordinator.planning.costs.fleet import UNKNOWN, Fleet, LinkEstimate, Pair, RelayLine, Uplink

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from coordinator.planning.costs.fleet import Device

    Floats = NDArray[np.float64]

PROBE_WEIGHT = 0.5  # a probe fills the link on purpose: trust it
GOODPUT_WEIGHT = 0.1  # training's own traffic may be limited by the sender (decentralized.md 1.5)
SLOWER_LINE = 0.25  # of the rate: less than this is another link, more is drag
DRAG_RANGE = (1.0, 1.1)  # short bursts of TCP; what ends take is predicted around their actions
MIN_GOODPUT_BYTES = 64 * 1024  # less than this measures latency, not rate

MAX_BANDWIDTH_BPS = 1e12  # no host's network card is faster today
MIN_BANDWIDTH_BPS = 1e3  # below this no step would ever end
MAX_RTT_S = 30.0
MAX_FLOPS_PER_S = 2e15  # dense bf16 of one accelerator
MAX_OP_S = 600.0
NOISE_FLOOR_S = 2e-6  # shorter timings are all overhead; their implied rate says nothing


@dataclass
class LinkTable:
    """Estimates by ordered pair; ``None`` where nothing is known yet."""

    estimates: PairMap[LinkEstimate] = field(default_factory=PairMap)
    _drag: PairMap[tuple[float, int]] = field(default_factory=PairMap)  # with how many samples

    def probed(self, source: str, target: str, bandwidth_bps: float, rtt_s: float) -> str | None:
        """Take in a probe; returns why it was refused, None when it was taken."""
        wrong = judge_link(source, target, bandwidth_bps, rtt_s)
        if wrong is None:
            self._blend((source, target), bandwidth_bps, rtt_s / 2.0, PROBE_WEIGHT)
        return wrong

    def carried(
        self, source: str, target: str, n_bytes: int, busy_s: float, rtt_s: float, quickest_bps: float = 0.0
    ) -> str | None:
        """Take in what training sent; returns why it was refused.

        Too little traffic refreshes the latency only, and so does a rate somewhat below the
        probed one, which is drag, as is what keeps all but the quickest bytes waiting: of those
        ``quickest_bps``. rtt_s <= 0 means not measured.
        """
        if not isfinite(busy_s) or busy_s < 0.0 or n_bytes < 0:
            return f"{source} reports {n_bytes} bytes to {target} in {busy_s} s"
        if not isfinite(quickest_bps) or quickest_bps < 0.0:
            return f"{source} reports {quickest_bps} bit/s of its quickest bytes to {target}"
        old = self.estimates.get((source, target))
        enough = n_bytes >= MIN_GOODPUT_BYTES and busy_s > 0.0
        if not enough and old is None:
            return None
        rate = n_bytes * 8.0 / busy_s if enough else old.bandwidth_bps if old else 0.0
        if old is not None and rate < old.bandwidth_bps:
            rate = max(rate, min(quickest_bps, old.bandwidth_bps))
            rate = old.bandwidth_bps if rate > SLOWER_LINE * old.bandwidth_bps else rate
        delay = rtt_s if rtt_s > 0.0 else 2.0 * old.latency_s if old else 0.0
        wrong = judge_link(source, target, rate, delay)
        if wrong is None:
            self._blend((source, target), rate, delay / 2.0, GOODPUT_WEIGHT)
        return wrong

    def dragged(self, pair: Pair, planned: float, predicted_s: float, measured_s: float) -> None:
        """A step's messages were ``predicted_s`` under way, with ``planned`` as their drag, and took
        ``measured_s``: the mean of the first such ratios, then their moving average."""
        if not (isfinite(measured_s) and measured_s > 0.0 and predicted_s > 0.0):
            return
        known, samples = self._drag.get(pair, (1.0, 0))
        weight = max(GOODPUT_WEIGHT, 1.0 / (samples + 1))
        blended = known + weight * (planned * measured_s / predicted_s - known)
        self._drag[pair] = (min(max(blended, DRAG_RANGE[0]), DRAG_RANGE[1]), samples + 1)

    def usual_drag(self) -> float:
        """The median of the known ones."""
        return median(d for d, _ in self._drag.values()) if self._drag else 1.0

    def drags(self) -> dict[Pair, float]:
        """Those of pairs that have trained."""
        return {pair: drag for pair, (drag, _) in self._drag.items()}

    def dragged_line(self, line: Uplink) -> Uplink:
        """The uplink as messages get it: with the least drag known of the pairs that pass it."""

        def rate(bps: float, direction: int) -> float:
            members = frozenset(line.members)
            through = [d for pair, (d, _) in self._drag.items() if _crosses(pair, members, direction)]
            return bps / min(through, default=1.0)

        return replace(line, up_bps=rate(line.up_bps, 0), down_bps=rate(line.down_bps, 1))

    def believe(self, pair: Pair, bandwidth_bps: float) -> None:
        """A rate that training's own messages showed: no drag comes on top of it."""
        self.estimates[pair] = LinkEstimate(bandwidth_bps, self.estimates[pair].latency_s)
        self._drag[pair] = (1.0, 0)

    def get(self, source: str, target: str) -> LinkEstimate | None:
        """The estimate of this direction, else that of the other one, else None."""
        return self.estimates.get((source, target)) or self.estimates.get((target, source))

    def best_bps(self, worker: str) -> float | None:
        """The highest rate that is known of a worker's links, None while there is none."""
        return max((self.estimates[pair].bandwidth_bps for pair in self.estimates.of(worker)), default=None)

    def forget(self, worker: str) -> None:
        """Drop every pair of a worker that left."""
        self.estimates.forget(worker)
        self._drag.forget(worker)

    def _blend(self, pair: Pair, bandwidth_bps: float, latency_s: float, weight: float) -> None:
        old = self.estimates.get(pair)
        if old is not None and old.bandwidth_bps > MIN_BANDWIDTH_BPS:  # not given up before
            bandwidth_bps = old.bandwidth_bps + weight * (bandwidth_bps - old.bandwidth_bps)
            latency_s = old.latency_s + weight * (latency_s - old.latency_s)
        self.estimates[pair] = LinkEstimate(bandwidth_bps, latency_s)


def judge_link(source: str, target: str, bandwidth_bps: float, rtt_s: float) -> str | None:
    """Return why these figures cannot be true, None when they can."""
    if not isfinite(bandwidth_bps) or not MIN_BANDWIDTH_BPS <= bandwidth_bps <= MAX_BANDWIDTH_BPS:
        return (
            f"{source} reports {bandwidth_bps:.3g} bit/s to {target}; "
            f"possible are {MIN_BANDWIDTH_BPS:.0e} to {MAX_BANDWIDTH_BPS:.0e}"
        )
    if not isfinite(rtt_s) or not 0.0 <= rtt_s <= MAX_RTT_S:
        return (
            f"{source} reports a round trip of {rtt_s:.3g} s to {target}; possible are 0 to {MAX_RTT_S:.0f}"
        )
    return None


def judge_timing(worker: str, op: str, seconds: float, flops: int) -> str | None:
    """Return why ``worker`` cannot have run ``flops`` of ``op`` in ``seconds``, None when it can."""
    if not isfinite(seconds) or not 0.0 <= seconds <= MAX_OP_S:
        return f"{worker} reports {seconds:.3g} s for {op}; possible are 0 to {MAX_OP_S:.0f}"
    if flops / max(seconds, NOISE_FLOOR_S) > MAX_FLOPS_PER_S:
        return (
            f"{worker} reports {seconds:.3g} s for {op} of {flops / 1e9:.3g} GFLOP, "
            f"{flops / max(seconds, NOISE_FLOOR_S) / 1e12:.0f} TFLOP/s; no device does more than "
            f"{MAX_FLOPS_PER_S / 1e12:.0f}"
        )
    return None


def judge_step(worker: str, busy_s: float, elapsed_s: float) -> str | None:
    """Return why a stage cannot have been busy for ``busy_s`` of a step that took ``elapsed_s``."""
    if not isfinite(busy_s) or busy_s < 0.0:
        return f"{worker} reports {busy_s:.3g} busy seconds in a step"
    if busy_s > 1.5 * elapsed_s + 0.1:  # clocks differ a little, and a report may be late
        return f"{worker} reports {busy_s:.3g} busy seconds in a step of {elapsed_s:.3g}"
    return None


# Sharing shows when flows that each reach the rate alone reach it together only in sum.
SHARED_BELOW = 0.75  # of the sum of the solo rates
CONTRADICTED_ABOVE = 1.25  # of a uplink's rate: a single flow out of it shows that it is none


def infer_shared(
    solo: Mapping[Pair, float], together: Iterable[Mapping[Pair, float]], sites: Mapping[str, str]
) -> tuple[Uplink, ...]:
    """Shared uplinks, from concurrent probes and from declared sites.

    ``solo``: bit/s of each pair probed alone; ``together``: bit/s of pairs probed at once;
    ``sites``: worker -> site, "" for none. A concurrent probe whose sum stays below 75 % of the
    solo sum shows that its sources (or, when those differ in nothing, its targets) share a
    rate. The rate is the sum, or what one of these flows reached alone, where that is more. Another flow
    alone that was faster than that shows that the uplink is another's. Members of a site that no concurrent
    probe covers share the best rate that any of them reached alone, towards and from outside.
    """
    rates: dict[frozenset[str], list[float]] = {}
    for probe in together:
        alone = sum(solo.get(pair, 0.0) for pair in probe)
        total = sum(probe.values())
        if len(probe) < 2 or total >= SHARED_BELOW * alone:
            continue
        members, direction = _sharing(list(probe), sites)
        # Flows that begin together hinder each other: their sum may stay far below what one had alone.
        carried = max(total, *(solo.get(pair, 0.0) for pair in probe))
        crossing = (bps for pair, bps in solo.items() if _crosses(pair, members, direction))
        if max(crossing, default=0.0) <= CONTRADICTED_ABOVE * carried:
            known = rates.setdefault(members, [0.0, 0.0])
            known[direction] = max(known[direction], carried)
    members_of: dict[str, list[str]] = {}
    for worker, name in sites.items():
        members_of.setdefault(name, []).append(worker)
    best: dict[str, list[float]] = {name: [0.0, 0.0] for name in members_of}
    for (source, target), bps in solo.items():
        a, b = sites.get(source, ""), sites.get(target, "")
        if a != b:
            for name, direction in ((a, 0), (b, 1)):
                if name:
                    best[name][direction] = max(best[name][direction], bps)
    for name in sorted(best.keys() - {""}):
        known = rates.setdefault(frozenset(members_of[name]), [0.0, 0.0])
        known[0] = known[0] or best[name][0]
        known[1] = known[1] or best[name][1]
    return tuple(
        Uplink(_uplink_name(members, sites), tuple(sorted(members)), up or float("inf"), down or float("inf"))
        for members, (up, down) in sorted(rates.items(), key=lambda item: sorted(item[0]))
        if up or down
    )


def _crosses(pair: Pair, members: frozenset[str], direction: int) -> bool:
    """Return whether a flow passes the members' uplink outwards (0) or inwards (1)."""
    inside, outside = (pair[0], pair[1]) if direction == 0 else (pair[1], pair[0])
    return inside in members and outside not in members


def _sharing(pairs: Sequence[Pair], sites: Mapping[str, str]) -> tuple[frozenset[str], int]:
    """(members, 0 for up or 1 for down) of the uplink that these concurrent pairs share, which all pass."""
    sources = {a for a, _ in pairs}
    targets = {b for _, b in pairs}
    shares_down = len(targets) == 1 or len({sites.get(b, "") or b for b in targets}) == 1
    shares_up = len(sources) == 1 or len({sites.get(a, "") or a for a in sources}) == 1
    ends, direction = (targets, 1) if shares_down and not shares_up else (sources, 0)
    members = frozenset(_neighbours(ends, sites))
    if all(_crosses(pair, members, direction) for pair in pairs):
        return members, direction
    # Inside one site it is the uplink of the one end that they have in common.
    return (frozenset(targets), 1) if len(targets) == 1 else (frozenset(sources), 0)


def _neighbours(ends: set[str], sites: Mapping[str, str]) -> set[str]:
    """Everybody at the site that several ends have in common, else these ends."""
    named = {sites.get(w, "") for w in ends}
    if len(ends) > 1 and len(named) == 1 and "" not in named:
        return {w for w, s in sites.items() if s in named}
    return ends


def _uplink_name(members: frozenset[str], sites: Mapping[str, str]) -> str:
    named = {sites.get(w, "") for w in members}
    only = named.pop() if len(named) == 1 else ""
    return only if only and len(members) > 1 else "+".join(sorted(members)[:3])


def measured_fleet(
    devices: Sequence[Device],
    table: LinkTable,
    uplinks: Sequence[Uplink] = (),
    unknown: LinkEstimate = UNKNOWN,
    guessed: tuple[Floats, Floats] | None = None,
    relays: tuple[RelayLine, ...] = (),
) -> Fleet:
    """Return the live fleet: estimates of ``table``, ``unknown`` where a pair was never probed (or what is
    ``guessed`` of it: bit/s and seconds [source, target]); rates as training's messages get them.
    """
    n = len(devices)
    if guessed is None:
        alone, latency = np.full((n, n), unknown.bandwidth_bps), np.full((n, n), unknown.latency_s)
    else:
        alone, latency = guessed
    drag = np.full((n, n), table.usual_drag())
    index = {device.worker: at for at, device in enumerate(devices)}
    for device in devices:
        for a, b in table.estimates.of(device.worker):
            if a == device.worker and b in index:
                i, j, link = index[a], index[b], table.estimates[a, b]
                alone[i, j], latency[i, j] = link.bandwidth_bps, link.latency_s
                if (b, a) not in table.estimates:
                    alone[j, i], latency[j, i] = link.bandwidth_bps, link.latency_s
    for (a, b), known in table.drags().items():
        if a in index and b in index:
            drag[index[a], index[b]] = known
    np.fill_diagonal(alone, np.inf)
    np.fill_diagonal(latency, 0.0)
    bandwidth = alone / drag
    dragged = tuple(map(table.dragged_line, uplinks))
    probed = Fleet(tuple(devices), alone, latency, tuple(uplinks), relays=relays)
    return Fleet(tuple(devices), bandwidth, latency, dragged, relays=relays, probed=probed)
