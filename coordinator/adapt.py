"""Whether links deserve other codecs: what training's own transfers show, held against what the
codecs in use were chosen for. Pure: a table of (phase, sign) -> move; steps and seconds come in.

A link's rate is bytes over the seconds in which the line carried them (``worker.linetime``),
smoothed in the logarithm; three samples in a row on one side of it replace it, so a link that
falls to a tenth is followed in three steps and noise of +-15 % moves nothing. Messages shorter
than ``Settings.telling_s`` or half a round trip are bound by latency: they bound the rate from
below and cannot show that a link got faster. A link that is silent in this way is asked by
spending more on it: its rate is taken for a little higher, so its ratio falls. Either the larger
messages then show the rate, or the step suffers and the old figure returns, for twice as long.

The guard: a model trained through lossy codecs adapts to them, so its loss through the codecs hides
what they cost. Where the loss without them is worse by more than a bound, no link may compress as
hard as it does (papers/compression.md, convergence of what is exported).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from coordinator.links import MAX_BANDWIDTH_BPS, MIN_BANDWIDTH_BPS, Pair

USUAL_RISE = 0.02  # of the difference, a step


@dataclass(frozen=True, slots=True)
class Settings:
    """When a change counts."""

    change: float = 0.2  # against what the codecs were chosen for
    weight: float = 0.25  # of one sample in the smoothed rate
    jump: float = 0.25  # samples this far off, all on one side, ...
    jump_samples: int = 3  # ... so many in a row, are a new rate, not noise
    telling_s: float = 0.02  # a message must keep the line at work so long to tell its rate
    overhead_share: float = 0.25  # of that time: the most a message may wait for other than the line
    sample_bytes: int = 64 * 1024  # steps that carry less are taken together
    effect_steps: int = 3  # from a decision to the first step with its codecs
    distance_steps: int = 6  # between decisions: the rest is for seeing what the last one did
    probe_after_steps: int = 6
    probe_growth: tuple[float, ...] = (1.15, 1.25, 1.5, 2.0)
    probe_wait_most_steps: int = 256
    fruitless_most: int = 5  # probes in a row that changed no codec: nothing can be spent
    suffers: float = 0.1  # of the step time: more than this is too much for a probe
    free: float = 0.03  # less than this is no price at all
    gap: float = 0.02  # loss without codecs over loss through them, less one
    gap_cap: float = 0.7  # of the largest ratio in use

    def __post_init__(self) -> None:
        if not (0 < self.change < 1 and 0 < self.weight <= 1 and self.gap > 0 and 0 < self.gap_cap < 1):
            raise ValueError(f"{self}: shares lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one link carried in one committed step."""

    n_bytes: int
    busy_s: float
    rtt_s: float
    messages: int = 1
    compressed: bool = False  # there is a ratio that could be lower


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
    proven_bps: float = 0.0  # the last rate before or in a probe at which no step took longer
    probes: int = 0  # in a row
    fruitless: int = 0  # probes for which the planner found no other codec
    wait_steps: int = 0  # before the next probe, longer after each one that hurt
    since_step: int = 0  # of the last move


@dataclass(frozen=True, slots=True)
class State:
    """All links of a job, and how long its steps take under the codecs in use."""

    links: Mapping[Pair, Link] = field(default_factory=dict)
    changed_step: int = -1_000_000
    usual_s: float | None = None  # step time under the codecs before a probe
    recent_s: tuple[float, ...] = ()  # step times since the last change had its effect
    cap: float | None = None  # largest ratio that the guard allows
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Choose codecs anew for these rates, and why: by link, and all together."""

    rates_bps: Mapping[Pair, float]
    reasons: Mapping[Pair, str]
    reason: str
    cap: float | None = None


def begin(assumed_bps: Mapping[Pair, float], step: int = 0, cap: float | None = None) -> State:
    """A plan was adopted that was made with these rates."""
    links = {pair: Link(bps, since_step=step) for pair, bps in assumed_bps.items()}
    return State(links, changed_step=step - 1_000_000, cap=cap)


# ---------------------------------------------------------------- measuring


def measure(link: Link, sample: Sample, settings: Settings) -> tuple[Link, bool]:
    """The link with a step's transfers taken in, and whether they were enough to count."""
    n_bytes, busy_s = link.n_bytes + sample.n_bytes, link.busy_s + sample.busy_s
    messages = link.messages + max(1, sample.messages)
    if n_bytes < settings.sample_bytes or busy_s <= 0.0:
        return replace(link, n_bytes=n_bytes, busy_s=busy_s, messages=messages, telling=False), False
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
    return replace(taken, n_bytes=0, busy_s=0.0, messages=0), True


def _smoothed(link: Link, rate: float, settings: Settings) -> tuple[float, tuple[float, ...]]:
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


def sign_of(link: Link, sample: Sample, settings: Settings) -> Sign:
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
    settings: Settings
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


# ---------------------------------------------------------------- a step, an evaluation


def observe(
    state: State, step: int, step_s: float, samples: Mapping[Pair, Sample], settings: Settings
) -> tuple[State, Decision | None]:
    """Take in committed step ``step``; a Decision when codecs should be chosen anew."""
    links = dict(state.links)
    counted = set()
    for pair, sample in samples.items():
        if pair in links:
            links[pair], counts = measure(links[pair], sample, settings)
            counted |= {pair} if counts else set()
    state = replace(state, links=links)
    if step - state.changed_step >= settings.effect_steps:
        state = replace(state, recent_s=(*state.recent_s, step_s)[-settings.jump_samples :])
    if step - state.changed_step < settings.distance_steps:
        return state, None
    moved, reasons = _moves(state, step, samples, counted, settings)
    if not reasons:
        return replace(_learnt(state, settings), links=moved), None
    rates = {pair: _believed(link) for pair, link in moved.items()}
    moved = {pair: replace(link, assumed_bps=rates[pair]) for pair, link in moved.items()}
    # Steps will take another time with other codecs, except where a probe only tries some.
    trying = any(link.phase is Phase.PROBING or link.wait_steps for link in moved.values())
    usual_s = _learnt(state, settings).usual_s if trying else None
    after = replace(state, links=moved, changed_step=step, usual_s=usual_s, recent_s=())
    return after, Decision(rates, reasons, _summary(reasons), state.cap)


def _moves(
    state: State, step: int, samples: Mapping[Pair, Sample], counted: set[Pair], settings: Settings
) -> tuple[dict[Pair, Link], dict[Pair, str]]:
    suffers, links, reasons = _suffers(state, settings), dict(state.links), {}
    free = bool(state.recent_s) and not _longer(state, settings.free)
    for pair, sample in samples.items():
        link = links.get(pair)
        if link is None:
            continue
        # A jump under way is neither the old rate nor yet the new one.
        if link.odd and pair in counted:
            continue
        sign = sign_of(link, sample, settings) if pair in counted else Sign.SILENT
        links[pair], reason = MOVES[link.phase, sign](link, Sight(step, sample, settings, suffers, free))
        if reason:
            reasons[pair] = reason
    return links, reasons


def _believed(link: Link) -> float:
    """Where codecs are chosen anew anyway, every link counts as it was measured last."""
    known = link.rate_bps is not None and link.telling and link.phase is Phase.FOLLOWING and not link.odd
    return link.rate_bps if known and link.rate_bps else link.assumed_bps


def proven(state: State) -> dict[Pair, float]:
    """What every link is known to carry: without what a probe only hopes for."""
    return {
        pair: link.proven_bps if link.phase is Phase.PROBING else _believed(link)
        for pair, link in state.links.items()
    }


def _suffers(state: State, settings: Settings) -> str:
    """Why steps take longer than usual, "" where they do not or it cannot be said yet."""
    if len(state.recent_s) < settings.jump_samples or not _longer(state, settings.suffers):
        return ""
    return f"steps take {median(state.recent_s):.3g} s instead of {state.usual_s:.3g} s"


def _longer(state: State, share: float) -> bool:
    return state.usual_s is not None and median(state.recent_s) > state.usual_s * (1.0 + share)


def _learnt(state: State, settings: Settings) -> State:
    """Without a probe under way, the step time of the newest codecs is the usual one."""
    probing = any(link.phase is Phase.PROBING for link in state.links.values())
    if probing or len(state.recent_s) < settings.jump_samples:
        return state
    now_s = median(state.recent_s)
    if state.usual_s is not None and now_s > state.usual_s:
        # A device may have become slower for good, but what probes cost must not add up unseen.
        now_s = state.usual_s + (now_s - state.usual_s) * USUAL_RISE
    return replace(state, usual_s=now_s)


def answered(state: State, step: int, changed: bool, settings: Settings) -> State:
    """The planner has chosen for a Decision: whether anything that matters is another now.

    Where nothing is, the next decision need not wait; and a link on which more was to be spent
    several times to no effect is left alone for long.
    """
    links = {}
    for pair, link in state.links.items():
        fruitless = link.fruitless + 1 if link.phase is Phase.PROBING and not changed else 0
        if fruitless < settings.fruitless_most:
            links[pair] = replace(link, fruitless=fruitless)
            continue
        links[pair] = replace(
            link,
            phase=Phase.FOLLOWING,
            assumed_bps=link.proven_bps,
            probes=0,
            fruitless=0,
            wait_steps=settings.probe_wait_most_steps,
            since_step=step,
        )
    changed_step = state.changed_step if changed else state.changed_step - settings.effect_steps
    return replace(state, links=links, changed_step=changed_step)


def evaluated(
    state: State, step: int, loss: float, coded_loss: float, largest_ratio: float, settings: Settings
) -> tuple[State, Decision | None]:
    """The guard: the held-out loss without codecs and through them, after ``step`` steps."""
    if not (math.isfinite(loss) and math.isfinite(coded_loss) and coded_loss > 0):
        return state, None
    gap = (loss - coded_loss) / coded_loss
    gaps = (*state.gaps, gap)[-3:]
    grows = len(gaps) == 3 and gaps[0] < gaps[1] < gaps[2] and gap > settings.gap / 2
    state = replace(state, gaps=gaps)
    if largest_ratio <= 1.0 or not (gap > settings.gap or grows):
        return state, None
    cap = max(1.0, largest_ratio * settings.gap_cap)
    why = "and grows" if grows and gap <= settings.gap else f"over {settings.gap:.0%}"
    reason = (
        f"held-out loss without codecs {loss:.4g}, through them {coded_loss:.4g}: a gap of {gap:.1%}, {why}; "
        f"no ratio above {cap:.3g}"
    )
    # What was measured before the change says nothing of the codecs after it.
    capped = replace(state, cap=cap, changed_step=step, recent_s=(), usual_s=None, gaps=())
    rates = {pair: link.assumed_bps for pair, link in capped.links.items()}
    return capped, Decision(rates, dict.fromkeys(capped.links, reason), reason, cap)


def mbit(bps: float) -> str:
    """Megabits a second, for people."""
    return f"{bps / 1e6:.3g} Mbit/s"


def _summary(reasons: Mapping[Pair, str]) -> str:
    return "; ".join(f"{a} > {b}: {reason}" for (a, b), reason in sorted(reasons.items()))
