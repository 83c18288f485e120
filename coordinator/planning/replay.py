"""Timeline of a plan as it stands: from its own stages, links and orders, not from a search's candidate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.compression import OFF
from atoll.mesh.layout import Inside
from atoll.microbatch import one_f_one_b
from coordinator.planning.costs.timeline import simulate
from coordinator.planning.costs.workload import Wire
from coordinator.planning.problem import Problem, candidate_of

if TYPE_CHECKING:
    from atoll.plan import Plan, Replica
    from coordinator.planning.costs.timeline import Timeline
    from coordinator.planning.costs.workload import Workload
    from coordinator.planning.planner import PlanRequest


def timelines(request: PlanRequest, plan: Plan) -> tuple[Timeline, ...]:
    """Return each replica's step with its spans, micro-batches numbered as in the whole step.

    Each replica is simulated on its own: what replicas exchange, and links that two of them share, are not
    in it. ``request`` is the one that ``plan`` was made for.
    """
    training = request.training
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    keepings = {stage.worker: stage.keeping for stage in stages}
    kinds = {stage.worker: Inside(stage.inside) for stage in stages if stage.inside}
    wire = request.wire or Wire()
    problem = Problem(
        request.dag, training, request.fleet, None, wire, training.compression, keepings=keepings, kinds=kinds
    )
    found = []
    for replica in plan.replicas:
        timeline = simulate(_workload(problem, replica), keep_spans=True)
        first = replica.micros[0]
        spans = tuple(
            span if span.kind in ("opt", "send-tied") else replace(span, micro=span.micro + first)
            for span in timeline.spans
        )
        found.append(replace(timeline, spans=spans))
    return tuple(found)


def _workload(problem: Problem, replica: Replica) -> Workload:
    share = replica.micros[1] - replica.micros[0]
    candidate, depths = candidate_of(replica, problem.fleet)
    sending = problem.workload(candidate, depths).routes
    specs = [link for link in replica.links if (link.source, link.target) in sending]
    work = problem.workload(candidate, depths, specs if problem.compression.mode != OFF else ())
    # GPipe's warm-up is all of the step's micro-batches, which acts as all of the replica's.
    return replace(work, n_micro=share).with_actions([one_f_one_b(share, *depth) for depth in depths])
