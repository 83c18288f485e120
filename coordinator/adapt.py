"""Whether a running job's links deserve other codecs: what training's own transfers show, held
against what the codecs in use were chosen for. Pure: steps and seconds come in.

``linkmoves`` judges one link by a table of (phase, sign) -> move; here are all links of a job, how
long its steps take, when a decision may be made at all, and the guard: a model trained through
lossy codecs adapts to them, so its loss through the codecs hides what they cost. Where the loss
without them is worse by more than a bound, no link may compress as hard as it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from coordinator.linkmoves import MOVES, Link, Phase, Sample, Settings, Sight, Sign, measure, sign_of
from coordinator.links import Pair

USUAL_RISE = 0.02  # of the difference, a step


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


def _summary(reasons: Mapping[Pair, str]) -> str:
    return "; ".join(f"{a} > {b}: {reason}" for (a, b), reason in sorted(reasons.items()))
