"""Forms in which stages keep what they need again: those that a job leaves open, and which stages need.

One search over all of them, mildest first: {off, selective, full} x {exact, int8, int4} x where activations
lie x where optimizer state lies. What each costs is in the timeline; what it saves is in the memory model.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from atoll.job import EXACTLY, Activations, Keeping, Place, Recompute
from coordinator.planning.costs.memory import Together
from coordinator.planning.problem import kept_as, memory_on, state_away_s
from hostos.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from atoll.job import TrainingSpec
    from coordinator.planning.problem import Problem, Scored

FURTHER = 1
"""Forms that are tried beyond the mildest that fits: a dearer one may allow a better cut."""


def forms(training: TrainingSpec, *, cheap: bool) -> list[Keeping]:
    """Return the forms that the job leaves open; ``cheap``: some results are cheap to compute again, but not
    from few bits; whole forwards that are run again store nothing to put elsewhere."""
    asked = training.keeping
    again = (Recompute.OFF, *((Recompute.SELECTIVE,) if cheap else ()), Recompute.FULL)
    places = (Place.DEVICE, Place.HOST)
    found = []
    for recompute, activations, saved_on, state_on in product(
        again if asked.recompute is Recompute.AUTO else (asked.recompute,),
        (Activations.EXACT, Activations.INT8, Activations.INT4)
        if asked.activations is Activations.AUTO
        else (asked.activations,),
        places if asked.saved_on is Place.AUTO else (asked.saved_on,),
        places if asked.state_on is Place.AUTO else (asked.state_on,),
    ):
        keeping = Keeping(recompute, activations, saved_on, state_on)
        less = (asked.activations is Activations.AUTO and keeping.bits > 0) or (
            asked.saved_on is Place.AUTO and saved_on is not Place.DEVICE
        )
        twice = recompute is Recompute.FULL and less
        twice |= asked.recompute is Recompute.AUTO and recompute is Recompute.SELECTIVE and keeping.bits > 0
        if not twice:
            found.append(keeping)
    return found


def mildest_first(problem: Problem, keepings: Sequence[Keeping]) -> list[Problem]:
    """Return the problem under each of these forms, by the seconds of a step on the fastest device alone."""
    under = [kept_as(problem, keeping) for keeping in keepings]
    return sorted(under, key=_alone_s)


def _alone_s(problem: Problem) -> float:
    fastest = int(problem.compute[:, -1].argmin())
    away_s = state_away_s(problem, fastest, Together(problem.memory, [(0, problem.n_ops)]))
    return problem.n_micro * float(problem.compute[fastest, -1]) + away_s


def may_fit(problem: Problem) -> bool:
    """Return whether the fleet's memory holds the model at all, one micro-batch in flight."""
    return problem.memory.bytes(0, problem.n_ops, 1) <= float(problem.limits.sum())


def eased(problem: Problem, scored: Scored, milder: Sequence[Keeping]) -> tuple[Problem, Scored]:
    """Return the same cut with each stage in the mildest form that it has room for, as long as the step takes
    no longer; ``milder``: forms, mildest first. Where several processes are one stage, theirs stays."""
    for device in dict.fromkeys(scored.candidate.devices):
        worker = problem.fleet.devices[device].worker
        if problem.inside[device] is not None:
            continue
        for keeping in milder:
            if keeping == problem.kept_by(problem.fleet.devices[device]):
                break
            trial = kept_as(problem, problem.keeping, {**problem.keepings, worker: keeping})
            found = trial.scheduled(scored.candidate, scored.specs)
            if found is not None and (found := trial.deferring(found)).step_s <= scored.step_s:
                problem, scored = trial, found
                break
    return problem, scored


def words(keeping: Keeping) -> str:
    """Return what is kept otherwise than as it is, in words."""
    found = []
    if keeping.recompute is Recompute.FULL:
        found.append("forwards are run again")
    elif keeping.selective:
        found.append("cheap results are computed again")
    if keeping.bits:
        found.append(f"activations are stored in {keeping.activations.value}")
    if keeping.saved_on is not Place.DEVICE:
        found.append(f"activations are put on the {keeping.saved_on.value}")
    if keeping.state_on is not Place.DEVICE:
        found.append(f"optimizer state is put on the {keeping.state_on.value}")
    return " and ".join(found)


def why_kept(problem: Problem, scored: Scored, otherwise_s: float | None) -> list[str]:
    """Return for each stage what it keeps otherwise than as it is, and why; ``otherwise_s``: the step where
    all is kept as it is, None where that does not fit."""
    found, bounds = [], scored.candidate.bounds(problem.n_ops)
    whole = kept_as(problem, EXACTLY)
    for number, those in enumerate(scored.candidate.together):
        at = scored.candidate.devices[those[0]]
        device = problem.fleet.devices[at]
        said = words(problem.kept_by(device))
        if not said:
            continue
        held = Together(memory_on(whole, at)[0], [bounds[piece] for piece in those])
        need = held.bytes([problem.in_flight(scored.depths[piece]) for piece in those])
        limit = float(problem.limits[at] / problem.times[at])
        why = f"kept as it is the stage would need {need / MIB:.0f} MiB of the {limit / MIB:.0f} there are"
        if otherwise_s is not None and need <= limit:
            why = f"with all kept as it is a step would take {otherwise_s:.3g} s"
        found.append(f"stage {number} on {device.label}: {said}, as {why}")
    return found


def would_fit(problem: Problem, fits: Callable[[Problem], bool]) -> str:
    """Return the settings of a job that leaves less open than it could under which the model would fit, ""
    where none would."""
    keeping = problem.training.keeping
    options: list[tuple[str, Keeping]] = []
    for name, value in (
        ("recompute", Recompute.FULL),
        ("state_on", Place.HOST),
        ("saved_on", Place.HOST),
        ("activations", Activations.INT8),
        ("activations", Activations.INT4),
    ):
        if getattr(keeping, name).value not in (value.value, "auto"):
            options.append((f"{name}={value.value}", _least(problem, {name: value})))
    found = [said for said, option in options if fits(kept_as(problem, option))]
    return f"it fits with {' or '.join(found)}; " if found else ""


def _least(problem: Problem, given: dict[str, object]) -> Keeping:
    """The form that takes the least of what the job leaves open, with some of it given."""
    asked = problem.training.keeping
    open_ = {
        "recompute": Recompute.SELECTIVE,
        "activations": Activations.INT4,
        "saved_on": Place.HOST,
        "state_on": Place.HOST,
    }
    values = {
        name: least if getattr(asked, name).value == "auto" else getattr(asked, name)
        for name, least in open_.items()
    }
    return Keeping(**{**values, **given})  # type: ignore[arg-type]
