"""One link while training runs: what its transfers show, and what that asks for. Pure.

A link's rate is bytes over the seconds in which the line carried them (``worker.transport.line_time``),
smoothed in the logarithm; three samples in a row on one side of it replace it, so a link that
falls to a tenth is followed in three steps and noise of +-15 % moves nothing. Where a rate is less
than thought although the quickest bytes were carried as fast as thought, the others waited for an end
that was out of processor time, not for the line: then the quickest tell it. Messages shorter
than ``Adaptation.telling_s`` or half a round trip are bound by latency: they bound the rate from
below and cannot show that a link got faster. A link that is silent in this way is asked by
spending more on it: its rate is taken for a little higher, so its ratio falls. Either the larger
messages then show the rate, or the step suffers and the old figure returns, for twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from coordinator.config import Adaptation
from coordinator.membership.link_table import MAX_BANDWIDTH_BPS, MIN_BANDWIDTH_BPS


@dataclass(frozen=True, slots=True)
class Sample:
    """What one link carried in one committed step."""

    n_bytes: int
    busy_s: float
    rtt_s: float
    messages: int = 1
    compressed: bool = False  # there is a ratio that could be lower
    quickest_bps: float = 0.0  # of the quickest quarter of the bytes; 0 unknown


class Phase(StrEnum):
    """What is being done about a link."""

    FOLLOWING = "following"  # its measured rate
    PROBING = "probing"  # more is spent on it than it was measured to carry


class Sign(StrEnum):
    """What a step says of a link against what its codec was chosen for."""

    SLOWER = "slower"
    FASTER = "faster"
    AS_THOUGHT = "as thought"
    SILENT = "silent"  # too little to tell


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two workers. ``assumed_bps``: what its codec was chosen for."""

    assumed_bps: float
    phase: Phase = Phase.FOLLOWING
    rate_bps: float | None = None  # measured, smoothed
    ceiling_bps: float = MAX_BANDWIDTH_BPS  # the line cannot carry more, whatever its messages waited for
    telling: bool = False  # the newest sample was long enough to bound the rate from above too
    odd: tuple[float, ...] = ()  # newest samples, all far off on one side
    n_bytes: int = 0  # carried but too little to count yet
    busy_s: float = 0.0
    messages: int = 0
    quickest_bps: float = 0.0  # of those
    proven_bps: float = 0.0  # the last rate before or in a probe at which no step took longer
    probes: int = 0  # in a row
    fruitless: int = 0  # probes for which the planner found no other codec
    wait_steps: int = 0  # before the next probe, longer after each one that hurt
    since_step: int = 0  # of the last move


# ---------------------------------------------------------------- measuring


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
    least_s = busy_s - messages * telling_s * settings.overhead_share
    taken = replace(
        link,
        rate_bps=rate,
        odd=odd,
        ceiling_bps=n_bytes * 8.0 / least_s if least_s > 0.0 else MAX_BANDWIDTH_BPS,
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


def sign_of(link: Link, sample: Sample, settings: Adaptation) -> Sign:
    """What the link's rate says against ``assumed_bps``."""
    if link.rate_bps is None:
        return Sign.SILENT
    if link.rate_bps > link.assumed_bps * (1.0 + settings.change):
        return Sign.FASTER  # a bound from below is enough
    if not link.telling:
        return Sign.SILENT
    return Sign.SLOWER if link.rate_bps < link.assumed_bps * (1.0 - settings.change) else Sign.AS_THOUGHT


# ---------------------------------------------------------------- moves


Move = Callable[[Link, "Sight"], tuple[Link, str]]
"""(link, sight) -> the link after it, and why codecs must be chosen anew; "" when they need not."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a move may look at."""

    step: int
    sample: Sample
    settings: Adaptation
    suffers: str  # why the step is said to suffer, "" when it does not
    free: bool  # the step takes no longer than usual, as far as can be told


def _stay(link: Link, sight: Sight) -> tuple[Link, str]:
    return link, ""


def _follow(link: Link, sight: Sight) -> tuple[Link, str]:
    """The measured rate is the new assumption."""
    measured = link.rate_bps or link.assumed_bps
    word = "measured" if link.telling else "measured at least"
    reason = f"{word} {mbit(measured)}, chosen for {mbit(link.assumed_bps)}"
    followed = replace(link, phase=Phase.FOLLOWING, assumed_bps=measured, probes=0, wait_steps=0)
    return replace(followed, since_step=sight.step), reason


def _settle(link: Link, sight: Sight) -> tuple[Link, str]:
    """Larger messages confirm what was spent on the link: no more need to guess."""
    return replace(link, phase=Phase.FOLLOWING, probes=0, wait_steps=0, since_step=sight.step), ""


def _perhaps_slower(link: Link, sight: Sight) -> tuple[Link, str]:
    """A silent link may still have become slow: its line is at work longer and the step suffers."""
    if not sight.suffers or link.rate_bps is None or not sight.sample.compressed:
        return _perhaps_probe(link, sight)
    lower = link.rate_bps < link.assumed_bps * (1.0 - sight.settings.change)
    costs_s = sight.sample.busy_s - sight.sample.n_bytes * 8.0 / link.assumed_bps
    if not lower or costs_s <= 0.0:
        return _perhaps_probe(link, sight)
    moved, reason = _follow(link, sight)
    return moved, f"{reason}; {sight.suffers}"


def _perhaps_probe(link: Link, sight: Sight) -> tuple[Link, str]:
    wait = max(sight.settings.probe_after_steps, link.wait_steps)
    if not sight.sample.compressed or sight.step - link.since_step < wait:
        return link, ""
    return _grow(replace(link, proven_bps=link.assumed_bps, probes=0), sight)


def _grow(link: Link, sight: Sight) -> tuple[Link, str]:
    growth = sight.settings.probe_growth
    factor = min(growth[min(link.probes, len(growth) - 1)], link.ceiling_bps / link.assumed_bps)
    if factor < 1.0 + sight.settings.change / 2:
        # It may be all that the line carries; what no codec has used was not tried.
        tried = link.proven_bps if link.fruitless else link.assumed_bps
        return _settle(replace(link, assumed_bps=tried, fruitless=0), sight)
    reason = (
        f"its messages are too short to show more than {mbit(link.assumed_bps)}: "
        f"spending {factor - 1:.0%} more to see"
    )
    grown = replace(link, phase=Phase.PROBING, assumed_bps=link.assumed_bps * factor)
    return replace(grown, probes=link.probes + 1, since_step=sight.step), reason


def _judge(link: Link, sight: Sight) -> tuple[Link, str]:
    """A probe after which nothing suffered goes on; one that hurts is taken back."""
    if sight.suffers:
        wait = max(2 * link.wait_steps, 4 * sight.settings.probe_after_steps)
        wait = min(wait, sight.settings.probe_wait_most_steps)
        reason = f"{sight.suffers} since more was sent: back to {mbit(link.proven_bps)} for {wait} steps"
        back = replace(link, phase=Phase.FOLLOWING, assumed_bps=link.proven_bps, probes=0)
        return replace(back, wait_steps=wait, since_step=sight.step), reason
    if not sight.sample.compressed:
        return _settle(link, sight)  # nothing is left to spend
    if sight.step - link.since_step < sight.settings.probe_after_steps:
        return link, ""
    if sight.free and not link.fruitless:
        link = replace(link, proven_bps=link.assumed_bps)
    return _grow(link, sight)


MOVES: dict[tuple[Phase, Sign], Move] = {
    (Phase.FOLLOWING, Sign.SLOWER): _follow,
    (Phase.FOLLOWING, Sign.FASTER): _follow,
    (Phase.FOLLOWING, Sign.AS_THOUGHT): _stay,
    (Phase.FOLLOWING, Sign.SILENT): _perhaps_slower,
    (Phase.PROBING, Sign.SLOWER): _follow,
    (Phase.PROBING, Sign.FASTER): _follow,
    (Phase.PROBING, Sign.AS_THOUGHT): _settle,
    (Phase.PROBING, Sign.SILENT): _judge,
}


def mbit(bps: float) -> str:
    """Megabits a second, for people."""
    return f"{bps / 1e6:.3g} Mbit/s"
