"""New codecs and ratios for the links of a plan that runs on: same stages, newer estimates.

Pure, and light enough to be called wherever plans are made: the costs of the DAG, a few
simulations for ``auto``, none for the other forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.plan import LinkSpec
from coordinator.planning.codecs.auto_codecs import specs_for
from coordinator.planning.codecs.ratios import check_compression
from coordinator.planning.costs.timeline import step_seconds
from coordinator.planning.problem import Candidate, Problem, candidate_of

if TYPE_CHECKING:
    from atoll.compression import Compression
    from atoll.job import TrainingSpec
    from atoll.microbatch import Depth
    from atoll.opdag import OpDag
    from atoll.plan import Plan
    from coordinator.planning.costs.fleet import Fleet


def respec(
    plan: Plan,
    dag: OpDag,
    training: TrainingSpec,
    fleet: Fleet,
    *,
    compression: Compression | None = None,
) -> tuple[LinkSpec, ...]:
    """A LinkSpec for every link of ``plan``, in its order, from the estimates in ``fleet``.

    ``fleet`` holds every worker of the plan (others are ignored); ``compression``, when given,
    stands in for ``training.compression``, as when a guard asks for a lower ratio. UsageError when
    links cannot do what it says; KeyError when a worker of the plan is not in ``fleet``.
    """
    wanted = compression or training.compression
    check_compression(wanted)
    problem, candidate, depths = _problem_of(plan, dag, training, fleet)

    def judge(specs: tuple[LinkSpec, ...]) -> float:
        return step_seconds(problem.workload(candidate, depths, specs))

    links = problem.links_between(candidate)
    found = specs_for(links, wanted, problem.unnoticed_s(candidate), judge)
    by_pair = {(spec.source, spec.target): spec for spec in found}
    # Pairs that only evaluate have no load here: what they send stays exact.
    return tuple(
        by_pair.get((link.source, link.target), LinkSpec(link.source, link.target)) for link in plan.links
    )


def step_with(
    plan: Plan,
    dag: OpDag,
    training: TrainingSpec,
    fleet: Fleet,
    specs: tuple[LinkSpec, ...],
) -> float:
    """Predicted step seconds of ``plan`` on ``fleet`` with its links as in ``specs``."""
    problem, candidate, depths = _problem_of(plan, dag, training, fleet)
    return step_seconds(problem.workload(candidate, depths, specs))


def _problem_of(
    plan: Plan, dag: OpDag, training: TrainingSpec, fleet: Fleet
) -> tuple[Problem, Candidate, list[Depth]]:
    """Return the plan's problem on its workers alone, and the plan as a candidate for it."""
    workers = fleet.subset([stage.worker for stage in plan.stages])
    keepings = {stage.worker: stage.keeping for stage in plan.stages}
    problem = Problem(dag, training, workers, keepings=keepings)
    return problem, *candidate_of(plan.only, workers)
