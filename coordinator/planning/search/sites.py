"""Inside plans of sites beyond the one for an equal part of the model: what a search is repeated with.

How a site divides its stage is decided before a cut is found: by what suits an equal part of the model on
each device. A cut may give a site more, where the others have less memory, or all; then a kind has to fit
that divides more. And it may give a site less, so that a faster kind fits after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.planning.problem import divided_as

if TYPE_CHECKING:
    from atoll.mesh.layout import Inside
    from coordinator.planning.problem import Problem, Scored


def divided(problem: Problem) -> list[Problem]:
    """Return the problem and, where sites would divide otherwise if each held the whole model, that one."""
    kinds: dict[str, Inside] = {}
    for device, now in zip(problem.fleet.devices, problem.inside, strict=True):
        if now is None or device.mesh is None:
            continue
        alone = problem.table.costs(device, problem.kept_by(device))
        best = problem.insides.best(device, device.mesh, alone, among=1)
        if best.kind is not now.kind:
            kinds[device.worker] = best.kind
    return [problem, divided_as(problem, {**problem.kinds, **kinds})] if kinds else [problem]


def suited(problem: Problem, scored: Scored) -> tuple[Problem, Scored]:
    """Return the same cut with each site dividing by the kind that makes the step the shortest, of those
    that fit the stage which it has."""
    for at in dict.fromkeys(scored.candidate.devices):
        device, now = problem.fleet.devices[at], problem.inside[at]
        if now is None or device.mesh is None:
            continue
        alone = problem.table.costs(device, problem.kept_by(device))
        for _, option in problem.insides.fastest(device.mesh, alone):
            if option.kind is now.kind:
                break
            trial = divided_as(problem, {**problem.kinds, device.worker: option.kind})
            found = trial.scheduled(scored.candidate, scored.specs)
            if found is not None and (found := trial.deferring(found)).step_s < scored.step_s:
                problem, scored = trial, found
                break
    return problem, scored


def settled_kinds(problem: Problem) -> Problem:
    """Return the problem with its sites' kinds given, so that they stay as they are on another fleet."""
    sites = zip(problem.fleet.devices, problem.inside, strict=True)
    kinds = {device.worker: inside.kind for device, inside in sites if inside is not None}
    return divided_as(problem, kinds) if kinds else problem
