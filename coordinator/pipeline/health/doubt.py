"""Doubt: a step whose gradients are not finite is done again before anybody believes it. Pure.

A loss that is not finite raises no doubt by itself: a micro-batch without a target has such a mean and no
gradient (``atoll.step_loss``). A diverged model and a worker that computes nonsense, or only claims to, look
the same in one plan's reports. Steps are deterministic, so another fleet that computes the same step tells
them apart: the suspects are the workers that took part in every try. The likeliest is left out first; where
that does not help, all of them, or as many as the fleet can spare. The model has diverged once nobody took
part in every try, or where nobody could be left out and the same came of it twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coordinator.messages.events import StageFailed
from coordinator.messages.jobs import Doubt

if TYPE_CHECKING:
    from atoll.plan import Place, Plan
    from coordinator.messages.events import StepReady
    from coordinator.messages.jobs import JobState

OFTEN = 2  # failures of one worker's stage without a committed step: plans are made without it from then on


def as_failure(state: JobState, report: StepReady) -> StepReady | StageFailed:
    """Return a peer's report of local steps that are not finite as the failure of its stage: the others go on
    without it, as they wait for what it will not bring."""
    if not state.local or report.finite:
        return report
    if report.step != state.due and state.plan is not None and not state.plan.piped:
        return report
    words = f"diverged in the steps to {report.step + 1}; lower the learning rate"
    return StageFailed(report.job, report.version, report.step, words)


def doubted(before: Doubt | None, plan: Plan, step: int, ready: Mapping[int, StepReady]) -> Doubt:
    """Return what is known of a step once every rank has reported it, some as not finite.

    Gradients flow from the loss downwards, and so does what is not finite: of those that report it the stage
    nearest to the loss is the likeliest source.
    """
    said = {plan.places[rank]: report for rank, report in ready.items() if not report.finite}
    source = max(said, key=_nearness)
    tries = before.tries if before is not None and before.step == step else ()
    tries = (*tries, frozenset(place.worker for place in plan.places))
    shared = frozenset.intersection(*tries)
    order = (*sorted(said, key=_nearness, reverse=True), *sorted(plan.places, key=_nearness, reverse=True))
    suspects = dict.fromkeys(place.worker for place in order if place.worker in shared)
    return Doubt(step, tries, tuple(suspects), f"{_what(said[source])} at step {step + 1} on {words(source)}")


def _nearness(place: Place) -> tuple[int, int]:
    return place.stage, -place.replica


def _what(report: StepReady) -> str:
    odd = [loss for loss in report.losses if not math.isfinite(loss)]
    if odd:
        return f"loss became {odd[0]}"
    return "a gradient became not finite"


def words(place: Place) -> str:
    """Name a place's stage and worker for people."""
    return f"stage {place.stage} on {place.worker}"


def diverged(doubt: Doubt) -> bool:
    """Whether it is the model: no worker could have caused every try, or nobody else can try."""
    if not doubt.suspects:
        return True
    earlier = doubt.tries[:-1]
    return bool(earlier) and frozenset.intersection(*earlier) == frozenset(doubt.suspects)


def left_out(state: JobState) -> tuple[tuple[str, ...], ...]:
    """Return sets of workers that the job's next plan is to do without, the best first; the last is empty.

    After one try a single suspect, so that a step which is finite then shows who it was; later as many as
    the fleet can spare. Workers whose stages fail often are left out as well where it can spare them, too.
    """
    doubt = state.doubt
    suspects = doubt.suspects if doubt is not None else ()
    single = doubt is None or len(doubt.tries) == 1
    found = [] if single else [suspects[:most] for most in range(len(suspects), 1, -1)]
    found += [(suspect,) for suspect in suspects]
    often = tuple(worker for worker, times in Counter(state.failed).items() if times >= OFTEN)
    return (*((*some, *often) for some in found), *found, often, ())


def cleared(doubt: Doubt, plan: Plan) -> tuple[str, ...]:
    """Return who is to blame once a plan's try was finite: the suspects that had no part in it."""
    return tuple(worker for worker in doubt.suspects if plan.rank_of(worker) is None)
