"""The rate of one link while training runs, from what its transfers show. Pure.

It is bytes over the seconds in which the link carried them (``worker.transport.peers.busy_time``),
smoothed in the logarithm. Three samples in a row on one side of it replace it, so a link that
falls to a tenth is followed in three steps and noise of +-15 % moves nothing. Where a rate is less
than thought although the quickest bytes were carried as fast as thought, the others waited for an end
that was out of processor time, not for the link: then the quickest tell it. Messages shorter
than ``Adaptation.telling_s`` or half a round trip are bound by latency: they bound the rate from
below and cannot show that a link got slower, which only a step that takes longer can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from coordinator.config import Adaptation
from coordinator.membership.links.table import MAX_BANDWIDTH_BPS, MIN_BANDWIDTH_BPS


@dataclass(frozen=True, slots=True)
class Sample:
    """What one link carried in one committed step."""

    n_bytes: int
    busy_s: float
    rtt_s: float
    messages: int = 1
    compressed: bool = False  # there is a ratio that could be lower
    quickest_bps: float = 0.0  # of the quickest quarter of the bytes; 0 unknown


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two workers. ``assumed_bps``: what its codec was chosen for."""

    assumed_bps: float
    rate_bps: float | None = None  # measured, smoothed
    telling: bool = False  # the newest sample was long enough to bound the rate from above too
    odd: tuple[float, ...] = ()  # newest samples, all far off on one side
    n_bytes: int = 0  # carried but too little to count yet
    busy_s: float = 0.0
    messages: int = 0
    quickest_bps: float = 0.0  # of those


def measure(link: Link, sample: Sample, settings: Adaptation) -> tuple[Link, bool]:
    """The link with a step's transfers taken in, and whether they were enough to count."""
    n_bytes, busy_s = link.n_bytes + sample.n_bytes, link.busy_s + sample.busy_s
    messages = link.messages + max(1, sample.messages)
    quickest_bps = max(link.quickest_bps, sample.quickest_bps)
    if n_bytes < settings.sample_bytes or busy_s <= 0.0:
        waiting = replace(link, n_bytes=n_bytes, busy_s=busy_s, messages=messages, quickest_bps=quickest_bps)
        return replace(waiting, telling=False), False
    if quickest_bps > 0.0:
        busy_s = min(busy_s, n_bytes * 8.0 / min(quickest_bps, link.assumed_bps))
    raw = min(MAX_BANDWIDTH_BPS, max(MIN_BANDWIDTH_BPS, n_bytes * 8.0 / busy_s))
    rate, odd = _smoothed(link, raw, settings)
    telling_s = max(settings.telling_s, sample.rtt_s / 2)
    taken = replace(
        link,
        rate_bps=rate,
        odd=odd,
        telling=busy_s / messages >= telling_s,
    )
    return replace(taken, n_bytes=0, busy_s=0.0, messages=0, quickest_bps=0.0), True


def _smoothed(link: Link, rate: float, settings: Adaptation) -> tuple[float, tuple[float, ...]]:
    """The smoothed rate, and the samples that may become a new one."""
    known = link.rate_bps
    if known is None:
        return rate, ()
    far = math.log1p(settings.jump)
    off = math.log(rate / known)
    same_side = link.odd and (link.odd[-1] > known) == (rate > known)
    odd = ((*link.odd, rate) if same_side else (rate,)) if abs(off) > far else ()
    if len(odd) >= settings.jump_samples:
        return median(odd), ()
    # One sample moves the rate by no more than what still counts as noise.
    return known * math.exp(settings.weight * max(-far, min(far, off))), odd


def why_off(link: Link, sample: Sample, suffers: str, settings: Adaptation, *, counted: bool) -> str:
    """Return why codecs must be chosen anew for the link's measured rate, "" when they need not.

    ``counted``: the newest sample was enough to be one. ``suffers``: why steps take longer than usual, or "".
    """
    if link.rate_bps is None:
        return ""
    slower = link.rate_bps < link.assumed_bps * (1.0 - settings.change)
    faster = link.rate_bps > link.assumed_bps * (1.0 + settings.change)  # a bound from below is enough
    word = "measured" if link.telling else "measured at least"
    reason = f"{word} {mbit(link.rate_bps)}, chosen for {mbit(link.assumed_bps)}"
    if counted and (faster or (slower and link.telling)):
        return reason
    # A silent link may still have become slow: its line is at work longer and the step suffers.
    costs_s = sample.busy_s - sample.n_bytes * 8.0 / link.assumed_bps
    return f"{reason}; {suffers}" if suffers and slower and sample.compressed and costs_s > 0.0 else ""


def mbit(bps: float) -> str:
    """Megabits a second, for people."""
    return f"{bps / 1e6:.3g} Mbit/s"
