"""Whether the last machine of a fleet is worth more in the plan or idle: the expected step decides. Pure.

What a step takes is not what a job takes: where every machine is in the plan, a loss costs a plan anew and
steps that all do again; one that is idle takes over. So the fastest plan of all machines is held against
plans of one fewer, at the fleet's rate of losses (``costs.losses``; decision 061).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.plan import Outlook
from coordinator.planning import TUNED
from coordinator.planning.costs.losses import LossCosts, loss_costs
from coordinator.planning.costs.memory import Together
from coordinator.planning.costs.snapshots import Rank, in_hours, part_bytes
from coordinator.planning.costs.timeline import between_devices, expected_step_s
from coordinator.planning.search.op_fence import without_one

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.planning.costs.fleet import Device
    from coordinator.planning.problem import Problem, Scored
    from coordinator.planning.search.op_fence import Effort


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan with what losses cost it, and with what it was held against."""

    scored: Scored
    costs: LossCosts
    other: LossCosts | None = None
    standby: Device | None = None  # left idle on purpose

    @property
    def outlook(self) -> Outlook:
        """What a plan says of it."""
        return Outlook(
            self.costs.expected_s,
            self.costs.loss_s,
            self.costs.losses_per_s,
            self.standby.worker if self.standby is not None else "",
            self.other.expected_s if self.other is not None else 0.0,
        )

    @property
    def notes(self) -> list[str]:
        """What a plan says of it to its owner."""
        again = self.costs.again.words if self.costs.again is not None else ""
        return [words for words in (again, self.words) if words]

    @property
    def words(self) -> str:
        """Why a machine is idle, or why none is; "" where that was no question."""
        if self.other is None:
            return ""
        own, other = self.costs, self.other
        if self.standby is None:
            return (
                f"with what losses cost a step takes {own.expected_s:.3g} s, and with one machine left idle "
                f"as a standby {other.expected_s:.3g} s"
            )
        return (
            f"{self.standby.label} is worth more as a standby: in the plan {_figures(other)}; as a standby "
            f"{_figures(own)}: in all {other.expected_s:.3g} s a step with it, {own.expected_s:.3g} s without"
        )


def _figures(costs: LossCosts) -> str:
    often = in_hours(1.0 / (costs.workers * costs.losses_per_s))
    return f"a step takes {costs.step_s:.3g} s and a loss, one in {often}, {costs.loss_s:.0f} s"


def costs_of(problem: Problem, scored: Scored, beside: Sequence[Device]) -> LossCosts:
    """Return what losses cost a candidate; ``beside``: idle workers that the problem's fleet lacks."""
    work, timeline = problem.timeline(scored, keep_spans=False)
    used = set(scored.candidate.devices)
    idle = [device for at, device in enumerate(problem.fleet.devices) if at not in used]
    limits = [device.model_limit_bytes for device in (*idle, *beside)]
    ranks = []
    bounds = scored.candidate.bounds(problem.n_ops)
    for those in scored.candidate.together:
        held = Together(problem.memory, [bounds[at] for at in those])
        needed = held.bytes([problem.in_flight(scored.depths[at]) for at in those])
        stored = part_bytes(problem.dag, problem.training.optimizer, [bounds[at] for at in those])
        compute_s = sum(timeline.compute_s[at] for at in those)
        takers = sum(limit >= needed for limit in limits)
        ranks.append(Rank(scored.candidate.devices[those[0]], stored, compute_s, takers))
    step_s = expected_step_s(work, timeline.step_s)
    links = between_devices(timeline.links, scored.candidate.together)
    return loss_costs(step_s, ranks, links, problem.fleet, problem.training)


def best_expected(
    problem: Problem,
    fastest: Scored,
    beside: Sequence[Device],
    effort: Effort,
    finished: Callable[[Scored], Scored],
) -> Ranked:
    """Return ``fastest``, or a plan of one machine fewer whose expected step is shorter; ``finished``: a
    candidate with its codecs and the order of its work settled."""
    costs = costs_of(problem, fastest, beside)
    if costs.again is None:
        return Ranked(fastest, costs)  # somebody is idle anyway, or it is one machine
    # A plan of one fewer has to come below that, even if its losses cost nothing; as the search sees both,
    # codecs and the order of work not settled yet.
    seen = problem.score(fastest.candidate) or fastest
    found = without_one(problem, fastest, costs.expected_s * seen.step_s / fastest.step_s, effort)
    fewer = [finished(scored) for scored in dict.fromkeys(found[: TUNED.compared])]
    others = [Ranked(scored, costs_of(problem, scored, beside), costs) for scored in fewer]
    others = [other for other in others if other.costs.again is None]  # who is idle can take any stage over
    if not others:
        return Ranked(fastest, costs)
    best = min(others, key=lambda other: other.costs.expected_s)
    if best.costs.expected_s >= costs.expected_s:
        return Ranked(fastest, costs, best.costs)
    (left,) = set(fastest.candidate.devices) - set(best.scored.candidate.devices)
    return Ranked(best.scored, best.costs, costs, problem.fleet.devices[left])
