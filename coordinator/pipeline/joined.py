"""What the replicas of a plan report of one step, taken together. Pure.

A stage of one replica sees the losses of its share alone, so they come one by one and are added in the order
of the micro-batches, as on one machine. Gradients were joined before: every replica holds all of them and has
the same norms, which count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.step_loss import StepLoss, step_loss
from coordinator.pipeline import periods
from coordinator.pipeline.periods import Disagreement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.plan import Plan
    from coordinator.pipeline.periods import Reports
    from strategies.exchanges.partners import Group


def loss_of(plan: Plan, ready: Reports) -> StepLoss:
    """Return the step's loss, of a period's last step."""
    if plan.local:
        return periods.step_losses(plan, ready)[-1]
    reports = [ready[_teller(plan, number, ready)] for number in range(len(plan.replicas))]
    return step_loss(
        [loss for report in reports for loss in report.losses],
        [weight for report in reports for weight in report.weights],
    )


def square_norms(plan: Plan, ready: Reports) -> list[float]:
    """Return the squared norm of every parameter's gradient once, in canonical order; none where peers clip
    their own."""
    return [square for rank in ranks_of(plan, 0) if rank in ready for square in ready[rank].square_norms]


def disagreement(
    plan: Plan, ready: Reports, groups: Sequence[Group] = (), steps: Sequence[int] = ()
) -> Disagreement | None:
    """Return what does not go together in the reports of a step, None where all of it does; ``groups``: who
    exchanges with whom, where peers take local steps, and ``steps``: so many of each peer's they report.

    Each replica sums the same totals in the same order, whatever its cut, so the norms are equal to the bit.
    """
    if plan.local:
        return periods.disagreement(plan, ready, groups, steps)
    if len(plan.replicas) == 1:
        return None
    for number, replica in enumerate(plan.replicas):
        teller = _teller(plan, number, ready)
        more = tuple(rank for rank in ranks_of(plan, number) if rank != teller and ready[rank].losses)
        if more:
            workers = ", ".join(plan.places[rank].worker for rank in more)
            words = f"losses of replica {number} come from {workers} beside {plan.places[teller].worker}"
            return Disagreement(words, more)
        said, share = len(ready[teller].losses), replica.micros[1] - replica.micros[0]
        if said != share:
            words = f"replica {number} reports {said} losses of {share} micro-batches"
            return Disagreement(words, (teller,))
        if bool(ready[teller].weights) != bool(ready[_teller(plan, 0, ready)].weights):
            words = f"of replicas 0 and {number} one counts what its losses sum over, the other does not"
            return Disagreement(words, (teller,))
    held = [_norms(plan, number, ready) for number in range(len(plan.replicas))]
    others = [number for number, norms in enumerate(held) if norms != held[0]]
    if not others:
        return None
    workers = ", ".join(plan.places[rank].worker for number in others for rank in ranks_of(plan, number))
    odd = periods.odd_ones(dict(enumerate(held)))
    return Disagreement(
        f"replicas have different gradients: those of {workers} are not those of replica 0",
        tuple(rank for number in odd for rank in ranks_of(plan, number)),
    )


def ranks_of(plan: Plan, replica: int) -> tuple[int, ...]:
    """Return the ranks of a replica, in the order of its stages."""
    return tuple(rank for rank, place in enumerate(plan.places) if place.replica == replica)


def _teller(plan: Plan, replica: int, ready: Reports) -> int:
    """Return the rank whose losses are a replica's: the last that reports any, as the loss comes last."""
    ranks = ranks_of(plan, replica)
    return next((rank for rank in reversed(ranks) if ready[rank].losses), ranks[-1])


def _norms(plan: Plan, replica: int, ready: Reports) -> tuple[str, ...]:
    # As text: NaN equals itself. Sorted: a stage of several pieces has its first and its last parameters.
    ranks = ranks_of(plan, replica)
    return tuple(sorted(repr(square) for rank in ranks for square in ready[rank].square_norms))
