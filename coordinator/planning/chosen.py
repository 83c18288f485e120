"""The way that a job is trained on a fleet: exact ones by default, local steps where it asks for them.

``auto`` holds the fastest exact plan against replicas that exchange gradients in a codec, and against peers
with local steps. Each of their micro-batches counts by its rule's measured ``efficiency``; the plan says what
it was held against.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.errors import NotEnoughMemory, PlanError, UsageError
from atoll.exchange import AUTO, EXACT
from atoll.plan import written_buffers
from coordinator.planning import TUNED
from coordinator.planning.peers.local_plans import fastest, peers_plan
from coordinator.planning.peers.replicas import best_plan
from coordinator.planning.planner import remembering
from coordinator.planning.reasons.bottleneck import thin_links
from coordinator.planning.ways import CODED, LOCAL_STEPS, efficiency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.exchange import Exchange
    from atoll.plan import Plan
    from coordinator.planning.peers.local_plans import Known
    from coordinator.planning.peers.sketches import Sharing
    from coordinator.planning.planner import PlanRequest
    from coordinator.planning.search.op_fence import Effort


def chosen_plan(request: PlanRequest, effort: Effort | None = None) -> Plan:
    """Return the plan of a job as its training asks for it; raises what ``best_plan`` does."""
    training = request.training
    if training.exchange != AUTO:
        return best_plan(request, effort)
    request = remembering(request)
    replicas = "auto" if training.replicas == "1" else training.replicas
    exact_request = replace(request, training=replace(training, exchange=EXACT, replicas=replicas))
    exact = _coded_or(best_plan(exact_request, effort), exact_request, effort)
    known: Known = {}
    found = _best_local(request, effort, known)
    if found is None:
        return _explained(
            exact, "no two machines, or groups of them, hold the model and what local steps keep of it"
        )
    sharing, exchange = found
    counts, exact_s, step_s, chosen = efficiency(exchange), exact_step_s(exact), sharing.step_s, exact
    if step_s < counts * exact_s:  # a sketch, which knows nothing of what single machines do beside steps
        chosen = peers_plan(request, exchange, effort, sharing, known)
        step_s = counts * exact_step_s(chosen)
    words = (
        f"{exchange.rule} every {exchange.every} steps among {_peers(sharing.parts)}: "
        f"{step_s:.3g} s a step that counts {counts:.2f} of an exact one; {shape(exact)}: "
        f"{exact_s:.3g} s"
    )
    if step_s >= counts * exact_s:
        return _explained(exact, words)
    return _explained(chosen, words + thin_links(request.fleet, sharing.parts, exact))


def _coded_or(exact: Plan, request: PlanRequest, effort: Effort | None) -> Plan:
    """Return the plan whose replicas exchange gradients in a codec, where a step of it teaches more a second
    than one of the fastest exact plan, which else is it."""
    if len(request.fleet.devices) < 2 or request.training.blocks < 2 or written_buffers(request.dag):
        return exact
    try:
        training = replace(request.training, exchange=CODED.how)
        coded = best_plan(replace(request, training=training), effort)
    except (PlanError, UsageError, NotEnoughMemory):
        return exact
    if exact_step_s(coded) * TUNED.nearly >= exact_step_s(exact):
        return exact
    words = f"{CODED.how}: {exact_step_s(coded):.3g} s; {shape(exact)}: {exact_step_s(exact):.3g} s"
    return _explained(coded, words)


def _best_local(request: PlanRequest, effort: Effort | None, known: Known) -> tuple[Sharing, Exchange] | None:
    """Return the peers and the exchange whose steps teach most a second."""
    if written_buffers(request.dag):
        return None
    found = [
        (sharing, exchange)
        for exchange in (asked.exchange for asked in LOCAL_STEPS)
        if (sharing := fastest(request, exchange, effort, known)) is not None
    ]
    return max(found, key=lambda one: efficiency(one[1]) / one[0].step_s, default=None)


def exact_step_s(plan: Plan) -> float:
    """Return the predicted seconds of what an exact step teaches."""
    step_s = plan.prediction.step_s if plan.prediction is not None else float("inf")
    return step_s / efficiency(plan.exchange)


def grown_fleet(request: PlanRequest, own: Sequence[str]) -> tuple[Plan, Plan]:
    """Return the plans of a running job on all of its ``own`` workers and on the whole fleet, which includes
    them; raises what ``best_plan`` does."""
    alone = replace(request, fleet=request.fleet.subset(own), standbys=0)
    return chosen_plan(alone), chosen_plan(request)


def shape(plan: Plan) -> str:
    """Return in words how many stages and replicas a plan has, and its rule where peers take local steps."""
    if plan.local and plan.exchange is not None:
        among = _peers([replica.stages for replica in plan.replicas])
        return f"{plan.exchange.rule} every {plan.exchange.every} steps among {among}"
    count, stages = len(plan.replicas), len(plan.places)
    if plan.keeps and plan.exchange is not None:
        how = f"{plan.exchange.rule}:{plan.exchange.setting}"
        return f"{count} replicas of {stages} stages in all, {how}"
    return f"{count} replicas of {stages} stages in all" if count > 1 else f"one pipeline of {stages} stages"


def _peers(parts: Sequence[Sequence[object]]) -> str:
    """Peers in words: so many machines, or peers of so many each."""
    if all(len(part) == 1 for part in parts):
        return f"{len(parts)} machines"
    return f"{len(parts)} peers of {', '.join(str(len(part)) for part in parts)} machines"


def _explained(plan: Plan, words: str) -> Plan:
    if plan.prediction is None:
        return plan
    notes = (*plan.prediction.notes, f"exchange auto: {words}")
    return replace(plan, prediction=replace(plan.prediction, notes=notes))
