"""When a running job's links deserve other codecs: what training's own transfers show, held
against what the codecs in use were chosen for. Pure: steps and seconds come in.

``link_rates`` judges one link; here are all links of a job, how long its steps take, when a
decision may be made at all, and the guard: a model trained through lossy codecs adapts to them.
So its loss through the codecs hides what they cost. Where the loss without them is worse by more
than a bound, no link may compress as hard as it does; a codec that its owner named stays, and
what it costs is logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from atoll.compression import ADATOPK, AUTO
from atoll.job import TrainingSpec
from atoll.plan import Plan
from coordinator.config import Adaptation
from coordinator.pipeline.tuning.link_rates import Link, Sample, measure, why_off
from coordinator.planning.costs.fleet import Pair

USUAL_RISE = 0.02  # of the difference, a step
LOOKS = 20  # of the guard in a run, where the job names no interval: at most, ...
FEWEST_LOOKS = 4  # ... and, where that leaves steps enough between them, at least
LEAST_STEPS = 20  # from one look to the next
LOOK_SHARE = 0.1  # of the training time: what looks may cost before they become rarer
FORWARD_SHARE = 1 / 3  # of a micro-batch's compute; the backward is the rest
CAPS: Mapping[str, tuple[float, ...]] = {AUTO: (8.0, 3.9, 1.95, 1.0), ADATOPK: (8.0, 1.95, 1.0)}
"""By mode, what the cap falls to below 8. Each is a little less than what the next milder codec reaches:
eden, int8_block, 16 bits an element, nothing that loses precision. A cap in between would leave them out
and the planner with top-k, which at a few times fewer bytes loses more than what it stands in for."""
LOWER = 0.9  # of the ratio in use: a cap above that might leave the codec as it is


@dataclass(frozen=True, slots=True)
class State:
    """All links of a job, and how long its steps take under the codecs in use."""

    links: Mapping[Pair, Link] = field(default_factory=dict)
    changed_step: int = -1_000_000
    usual_s: float | None = None  # step time under the codecs in use
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
    links = {pair: Link(bps) for pair, bps in assumed_bps.items()}
    return State(links, changed_step=step - 1_000_000, cap=cap)


# ---------------------------------------------------------------- a step, an evaluation


def observe(
    state: State, step: int, step_s: float, samples: Mapping[Pair, Sample], settings: Adaptation
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
    reasons = _reasons(state, samples, counted, settings)
    if not reasons:
        return _learnt(state, settings), None
    rates = {
        pair: link.rate_bps if pair in reasons and link.rate_bps else _believed(link)
        for pair, link in links.items()
    }
    links = {pair: replace(link, assumed_bps=rates[pair]) for pair, link in links.items()}
    # Steps will take another time with other codecs.
    after = replace(state, links=links, changed_step=step, usual_s=None, recent_s=())
    return after, Decision(rates, reasons, _summary(reasons), state.cap)


def _reasons(
    state: State, samples: Mapping[Pair, Sample], counted: set[Pair], settings: Adaptation
) -> dict[Pair, str]:
    suffers, found = _suffers(state, settings), {}
    for pair, sample in samples.items():
        link = state.links.get(pair)
        # A jump under way is neither the old rate nor yet the new one.
        if link is not None and not (link.odd and pair in counted):
            found[pair] = why_off(link, sample, suffers, settings, counted=pair in counted)
    return {pair: reason for pair, reason in found.items() if reason}


def _believed(link: Link) -> float:
    """Where codecs are chosen anew anyway, every link counts as it was measured last."""
    known = link.rate_bps is not None and link.telling and not link.odd
    return link.rate_bps if known and link.rate_bps else link.assumed_bps


def proven(state: State) -> dict[Pair, float]:
    """Return what every link is known to carry."""
    return {pair: _believed(link) for pair, link in state.links.items()}


def _suffers(state: State, settings: Adaptation) -> str:
    """Why steps take longer than usual, "" where they do not or it is not known yet."""
    if len(state.recent_s) < settings.jump_samples or state.usual_s is None:
        return ""
    recent_s = median(state.recent_s)
    longer = recent_s > state.usual_s * (1.0 + settings.suffers)
    return f"steps take {recent_s:.3g} s instead of {state.usual_s:.3g} s" if longer else ""


def _learnt(state: State, settings: Adaptation) -> State:
    """The step time of the newest codecs becomes the usual one."""
    if len(state.recent_s) < settings.jump_samples:
        return state
    now_s = median(state.recent_s)
    if state.usual_s is not None and now_s > state.usual_s:
        # A device may have become slower for good, but what a slow link costs must not add up unseen.
        now_s = state.usual_s + (now_s - state.usual_s) * USUAL_RISE
    return replace(state, usual_s=now_s)


def answered(state: State, changed: bool, settings: Adaptation) -> State:
    """The planner has chosen for a Decision. Where it changed nothing, the next decision need not wait."""
    return state if changed else replace(state, changed_step=state.changed_step - settings.effect_steps)


# ---------------------------------------------------------------- the guard


@dataclass(frozen=True, slots=True)
class Watch:
    """A job whose codec its owner named: what the evaluations showed, and whether it was reported."""

    gaps: tuple[float, ...] = ()
    told: bool = False


def look_every(training: TrainingSpec, plan: Plan) -> int:
    """Steps between the guard's evaluations of a job that names no interval, >= 20.

    A function of job and plan: who goes on with the job evaluates after the same steps. Doubled while
    looks are predicted to cost more than a tenth of the training time, as long as four remain.
    """
    every, cost = max(LEAST_STEPS, math.ceil(training.steps / LOOKS)), look_steps(training, plan)
    while cost > LOOK_SHARE * every and 2 * every * FEWEST_LOOKS <= training.steps:
        every *= 2
    return every


def look_steps(training: TrainingSpec, plan: Plan) -> float:
    """How many steps' time one look takes, as predicted: each micro-batch forward through the codecs
    and once more dense, which on a link that a codec made fast enough is what takes long."""
    at = {place.worker: place.stage for place in plan.places}
    prediction, dense = plan.prediction, 0.0
    if prediction is not None and prediction.step_s > 0:
        for link in prediction.links:
            if link.bytes_per_step and at.get(link.source, 0) < at.get(link.target, 0):
                dense_s = link.busy_s * link.dense_bytes_per_step / link.bytes_per_step
                dense = max(dense, dense_s / prediction.step_s)
    return training.eval_batches / training.n_micro * (2 * FORWARD_SHARE + dense)


def evaluated(
    state: State,
    step: int,
    loss: float,
    coded_loss: float,
    largest_ratio: float,
    settings: Adaptation,
    caps: Sequence[float] = CAPS[AUTO],
) -> tuple[State, Decision | None]:
    """The guard: the held-out loss without codecs and through them, after ``step`` steps.

    ``largest_ratio``: of the links that lose precision; 1 where none does. ``caps``: of the job's mode.
    """
    gaps, wrong = _judged(state.gaps, loss, coded_loss, settings)
    state = replace(state, gaps=gaps)
    if largest_ratio <= 1.0 or not wrong:
        return state, None
    cap = min(_lower(largest_ratio, caps, settings), math.inf if state.cap is None else state.cap)
    then = f"no ratio above {cap:.3g}" if cap > 1.0 else "nothing that loses precision any more"
    reason = f"{wrong}; {then}"
    # What was measured before the change says nothing of the codecs after it.
    capped = replace(state, cap=cap, changed_step=step, recent_s=(), usual_s=None, gaps=())
    rates = {pair: link.assumed_bps for pair, link in capped.links.items()}
    return capped, Decision(rates, dict.fromkeys(capped.links, reason), reason, cap)


def watched(watch: Watch, loss: float, coded_loss: float, settings: Adaptation) -> tuple[Watch, str]:
    """The guard where the owner named the codec, which stays: what is wrong, "" where it was reported.

    Once reported it is not reported again until the gap has fallen to half the bound.
    """
    gaps, wrong = _judged(watch.gaps, loss, coded_loss, settings)
    told = watch.told and gaps[-1] > settings.gap / 2
    return Watch(gaps, told or bool(wrong)), "" if told else wrong


def _judged(
    gaps: tuple[float, ...], loss: float, coded_loss: float, settings: Adaptation
) -> tuple[tuple[float, ...], str]:
    """The newest three gaps, and what is wrong with them, "" where nothing is."""
    if not (math.isfinite(loss) and math.isfinite(coded_loss) and coded_loss > 0):
        return gaps, ""
    gap = (loss - coded_loss) / coded_loss
    gaps = (*gaps, gap)[-3:]
    grows = len(gaps) == 3 and gaps[0] < gaps[1] < gaps[2] and gap > settings.gap / 2
    if not (gap > settings.gap or grows):
        return gaps, ""
    why = f"over {settings.gap:.0%}" if gap > settings.gap else "and grows"
    losses = f"held-out loss without codecs {loss:.4g}, through them {coded_loss:.4g}"
    return gaps, f"{losses}: a gap of {gap:.1%}, {why}"


def _lower(ratio: float, caps: Sequence[float], settings: Adaptation) -> float:
    """What a ratio that costs too much is capped at."""
    cap = ratio * settings.gap_cap
    return cap if cap >= caps[0] else max((c for c in caps if c < LOWER * ratio), default=1.0)


def _summary(reasons: Mapping[Pair, str]) -> str:
    return "; ".join(f"{a} > {b}: {reason}" for (a, b), reason in sorted(reasons.items()))
