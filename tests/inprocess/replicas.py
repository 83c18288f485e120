"""A plan's replicas in one process: each a pipeline of its own, gradients joined block by block.

With an exchange that adds exact gradients at every step, parameters and losses have the bits of one machine
that sums as many blocks, whatever the cuts, the shares and the schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.block_sums import fold
from atoll.collective import even_shares, owner_shares
from atoll.errors import PlanError
from atoll.exchange import ExchangeRound
from atoll.gradient_exchange import Bucket, buckets, trained_elements
from atoll.plan import validate
from atoll.program import stage_programs
from atoll.step_loss import step_loss
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat, Kept, State
from tests.inprocess.exchange import run_round
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
        exchange = plan.exchange
        if exchange is not None and not exchange.keeps and (exchange.rule, exchange.every) != ("sum", 1):
            raise PlanError(
                f"replicas exchange gradients here, at every step, not by {exchange.rule} every "
                f"{exchange.every}"
            )
        self.rule = RuleInOneProcess(plan, dag, training) if plan.keeps else None
        self.training, self._plan = training, plan
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
        parts = [replica.parts() for replica in self.replicas]
        totals = joined(parts) if self.rule is None else self.rule.joined(step, parts)
        reports = [replica.finish(totals) for replica in self.replicas]
        norms = [tuple(norm for report in one for norm in report.square_norms) for one in reports]
        if len({repr(one) for one in norms}) > 1:  # as text: NaN equals itself
            raise RuntimeError(f"replicas have different gradients at step {step}")
        of_micros = [report for one in reports for report in one if report.losses]
        found = step_loss(
            [loss for report in of_micros for loss in report.losses],
            [weight for report in of_micros for weight in report.weights],
        )
        scale = self.training.optimizer.gradient_scale(norms[0], self._plan.divisor(found.weight))
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


class RuleInOneProcess:
    """A rule's rounds among the replicas of a plan, bucket by bucket; ``kept`` of each, by parameter."""

    def __init__(self, plan: Plan, dag: OpDag, training: TrainingSpec) -> None:
        assert plan.exchange is not None
        self._plan, self._seed, self._rule = plan, training.seed, make_rule(plan.exchange)
        self._shapes = {name: state.meta.shape for name, state in dag.parameters.items()}
        programs = stage_programs(dag, [stage.start for stage in plan.replicas[0].stages])
        elements = trained_elements(dag.parameters, dag.parameters, training.optimizer)
        self._buckets = [b for program in programs for b in buckets(plan, 0, [program], elements)]
        self.kept: list[dict[str, Kept]] = [{} for _ in plan.replicas]
        self._states: dict[tuple[int, tuple[str, ...]], State] = {}  # of replicas' buckets

    def joined(self, step: int, parts: Sequence[Parts]) -> dict[str, Tensor | None]:
        """Every parameter's total."""
        sums = [{n: fold(p for _, p in sorted(of.items())) for n, of in one.items()} for one in parts]
        found: dict[str, Tensor | None] = {}
        for bucket in self._buckets:
            found.update(self._round(step, bucket, sums))
        return found

    def _round(
        self, step: int, bucket: Bucket, sums: Sequence[Mapping[str, Tensor | None]]
    ) -> dict[str, Tensor | None]:
        exchange, names = self._rule.exchange, bucket.names
        micros = [float(stop - start) for start, stop in (r.micros for r in self._plan.replicas)]
        at = ExchangeRound(step, tuple(range(len(micros))), self._seed, tuple(micros))
        flat = Flat(tuple(self._shapes[name] for name in names))
        begun = {
            n: self._rule.resumed([kept.get(m, {}) for m in names], flat)
            if any(kept.get(m) for m in names)
            else self._rule.init(flat, torch.zeros(flat.size))
            for n, kept in enumerate(self.kept)
        }
        states = {n: self._states.get((n, names), state) for n, state in begun.items()}
        own = {
            number: torch.cat([_flat(one[name], self._shapes[name]) for name in names])
            * (self._plan.n_micro / micros[number])
            for number, one in enumerate(sums)
        }
        rates = [exchange.rates[rank] for rank in bucket.holders] if exchange.rates else []
        shares = dict(enumerate(owner_shares(rates) if rates else even_shares(len(micros))))
        answers = run_round(self._rule, own, states, at, [at.ranks], shares=shares)
        for number, answer in answers.items():
            self._states[number, names] = answer.state
            self.kept[number].update(zip(names, self._rule.stored(answer.state, flat), strict=True))
        assert all(torch.equal(answers[0].result, answer.result) for answer in answers.values())
        nothing = {name for name in names if all(one[name] is None for one in sums)}
        tensors = zip(names, flat.tensors(answers[0].result), strict=True)
        return {name: None if name in nothing and not total.any() else total for name, total in tensors}


def _flat(value: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape).reshape(-1) if value is None else value.reshape(-1)


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
