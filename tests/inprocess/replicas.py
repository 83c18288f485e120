"""A plan's replicas in one process: each a pipeline of its own, gradients joined block by block.

With an exchange that adds exact gradients at every step, parameters and losses have the bits of one machine
that sums as many blocks, whatever the cuts, the shares and the schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.block_sums import fold
from atoll.errors import PlanError
from atoll.plan import validate
from atoll.program import stage_programs
from atoll.step_loss import step_loss
from tests.inprocess.pipeline import LocalPipeline, StepResult, carried

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from atoll.job import TrainingSpec
    from atoll.opdag import OpDag, StateMeta
    from atoll.plan import Plan
    from tests.inprocess.pipeline import Inputs

    Parts = Mapping[str, Mapping[int, Tensor | None]]  # parameter -> block -> sum


class LocalReplicas:
    """Replicas of a plan that train together. PlanError for a plan that does not fit the DAG or training."""

    def __init__(
        self,
        plan: Plan,
        dag: OpDag,
        training: TrainingSpec,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        devices: Sequence[torch.device | str] = ("cpu",),
        states: Mapping[str, StateMeta] | None = None,
    ) -> None:
        validate(plan, dag, training)
        if plan.exchange is not None and (plan.exchange.rule, plan.exchange.every) != ("sum", 1):
            raise PlanError(
                f"replicas exchange exact sums at every step here, not {plan.exchange.rule} every "
                f"{plan.exchange.every}"
            )
        self.training = training
        self.replicas = []
        for number, replica in enumerate(plan.replicas):
            pipeline = LocalPipeline(
                stage_programs(dag, [stage.start for stage in replica.stages]),
                training,
                tensors,
                devices=devices,
                actions=[plan.actions(at) for at, place in enumerate(plan.places) if place.replica == number],
                states=states,
            )
            pipeline.relink(replica.links)
            self.replicas.append(pipeline)
        self._shares = [(stop - start) / plan.n_micro for start, stop in (r.micros for r in plan.replicas)]

    def step(self, step: int, batches: Sequence[Inputs]) -> StepResult:
        """Compute, commit (whatever the loss) and report ``step`` on n_micro micro-batches.

        RuntimeError when the replicas' gradients differ after they were joined.
        """
        before = {name: value.clone() for name, value in _written(self.replicas[0]).items()}
        for replica in self.replicas:
            replica.accumulate(step, batches)
        totals = joined([replica.parts() for replica in self.replicas])
        reports = [replica.finish(totals) for replica in self.replicas]
        norms = [tuple(norm for report in one for norm in report.square_norms) for one in reports]
        if len({repr(one) for one in norms}) > 1:  # as text: NaN equals itself
            raise RuntimeError(f"replicas have different gradients at step {step}")
        of_micros = [report for one in reports for report in one if report.losses]
        found = step_loss(
            [loss for report in of_micros for loss in report.losses],
            [weight for report in of_micros for weight in report.weights],
        )
        scale = self.training.optimizer.gradient_scale(norms[0], found.weight)
        for replica in self.replicas:
            replica.apply(scale)
        self._average_buffers(before)
        finite = all(report.finite for one in reports for report in one)
        return StepResult(found.mean, norms[0], scale, finite, found.weight)

    def _average_buffers(self, before: Mapping[str, Tensor]) -> None:
        """Weigh what replicas wrote by their micro-batches; counters add up. Not the bits of one machine,
        where a buffer goes through all micro-batches: hence only where the owner allows it."""
        if len(self.replicas) == 1:
            return
        held = [_written(replica) for replica in self.replicas]
        for name, old in before.items():
            values = [buffers[name].to(old.device) for buffers in held]
            if old.is_floating_point():
                new = sum((s * v for s, v in zip(self._shares, values, strict=True)), torch.zeros_like(old))
            else:
                new = sum((value - old for value in values), old)
            for buffers in held:
                buffers[name].copy_(new)

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Parameters, optimizer state and buffers, the same at every replica."""
        return self.replicas[0].snapshot()


def _written(replica: LocalPipeline) -> dict[str, Tensor]:
    """Return the buffers that training writes."""
    return {name: value for stage in replica.stages for name, value in stage.written_buffers.items()}


def joined(replicas: Sequence[Parts]) -> dict[str, Tensor | None]:
    """Add every parameter's sums over all blocks in ascending order, as the owner of a segment does.

    ``replicas`` ascend by their blocks; each parameter has the same order of first use in all of them.
    """
    totals: dict[str, Tensor | None] = {}
    for name in replicas[0]:
        parts = (part for replica in replicas for _, part in sorted(replica[name].items()))
        totals[name] = fold(None if part is None else carried(part) for part in parts)
    return totals
