"""Periods of a stage of a peer that takes steps of its own: the steps, and the round that ends them.

A peer of one stage does a period in one go. One of several has each of its steps committed, as its stages
wait for each other; the round goes on meanwhile, and what is left of it is waited for behind the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame
from atoll.messages.from_worker import DIGEST_BYTES
from worker.stage.reports import StageReport, StepReport
from worker.stage.steps.expected import SETTLED
from worker.transport.frames import Direction

if TYPE_CHECKING:
    from worker.cancel import Cancel
    from worker.stage.stage import Stage
    from worker.stage.steps.local_steps import LocalSteps
    from worker.stage.steps.messages import Messages


class Periods:
    """One stage's periods; not thread-safe. ``compute``: what a step has before its commit; ``take``: the
    optimizer's step, with the factor of its gradients."""

    def __init__(
        self,
        local: LocalSteps,
        stage: Stage,
        messages: Messages,
        compute: Callable[[int, Cancel], StepReport],
        take: Callable[[int, float], None],
    ) -> None:
        self._local, self._stage, self._messages = local, stage, messages
        self._compute, self._take = compute, take
        self._own: StepReport | None = None  # of the step that is to be committed

    @property
    def alone(self) -> bool:
        """Whether the peer is this stage."""
        return self._local.alone

    @property
    def joining(self) -> bool:
        """Whether the stage of a peer of several has the round alone left of its period."""
        return not self._local.alone and self._local.joining

    def step(self, done: int, step: int, cancel: Cancel) -> StepReport:
        """Do what a step of a peer of several stages has before its commit, after ``done`` steps."""
        assignment = self._messages.assignment
        last = assignment.plan.last_step(step, assignment.training.steps)
        self._begin(done, last)
        if not self._exchange(last, cancel):
            return self._diverged(step)
        self._own = self._compute(step, cancel)
        return self._own

    def round(self, done: int, last: int, cancel: Cancel) -> StepReport:
        """Exchange what has come of a period's steps. Raises BadFrame before all are committed."""
        if not self._local.joining:
            raise BadFrame(f"the round after step {last} is asked for before its steps are done")
        self._begin(done, last)
        # A neighbour may begin the next step before this stage hears of the commit.
        self._messages.expect_up_to(last + 1)
        if not self._exchange(last, cancel):
            return self._diverged(last)
        return self._joined(last, [], cancel)

    def whole(self, done: int, last: int, cancel: Cancel) -> StepReport:
        """Take the steps of a period that are left, and exchange what has come of them."""
        local = self._local
        local.forget_round()
        reports: list[StepReport] = []
        self._begin(done, last)
        # What is published already, or where all steps were taken.
        if not self._exchange(last, cancel):
            return self._diverged(last)
        for step in local.left:
            report = self._compute(step, cancel)
            if not report.stage.finite:
                return replace(report, step=last)
            found, optimizer = report.stage.step_loss, self._messages.assignment.training.optimizer
            self._take(step, optimizer.gradient_scale(report.stage.square_norms, found.weight))
            local.taken(step, found.mean, found.weight if report.stage.weights else None)
            reports.append(report)
            if not self._exchange(last, cancel):
                return self._diverged(last)
        return self._joined(last, reports, cancel)

    def apply(self, step: int, gradient_scale: float, cancel: Cancel, shares: tuple[float, ...] = ()) -> int:
        """Carry out a commit: of the round, or of one of the peer's own steps, and return the last step that
        is over then. ``shares``: of the peers in the round that begins with what there is."""
        if self._local.alone or self._local.joining:
            self._local.settle()
            _share_settled(self._stage, self._messages, step, cancel)
            return step
        if self._own is None or self._own.step != step:
            raise BadFrame(f"step {step} is committed, which was not computed")
        stage, self._own = self._own.stage, None
        self._take(step, gradient_scale)
        found = stage.step_loss
        weight = found.weight if stage.weights else None
        self._local.taken(step, found.mean if stage.losses else None, weight)
        if not shares:
            return step
        peers = len(self._messages.assignment.plan.replicas)
        if len(shares) != peers:
            raise BadFrame(f"a round of {len(shares)} peers, the plan has {peers}")
        return self._local.end(shares)

    # ---------------------------------------------------------------- inside

    def _begin(self, done: int, last: int) -> None:
        """Begin the period that ends with ``last``, or go on with it."""
        assignment = self._messages.assignment
        later = assignment.plan.last_step(last + 1, assignment.training.steps)
        # A neighbour may end the next period before this one hears of the commit.
        self._messages.expect_rounds(self._local, (last, later))
        self._local.begin(done, last)

    def _exchange(self, last: int, cancel: Cancel) -> bool:
        """Begin the round of a period when it is time, or take what came of it; False: nothing to bring."""
        cancel.check()
        local, plan = self._local, self._messages.assignment.plan
        send = partial(self._messages.send_exchanged, last)
        if not local.contributes:
            local.advance(plan, send, partial(self._messages.arrived, last))
        elif local.joinable:
            local.contribute(plan, send)
        else:
            return False
        return True

    def _joined(self, last: int, reports: Sequence[StepReport], cancel: Cancel) -> StepReport:
        """Wait for the end of a round; ``reports``: of the steps since it was asked for."""
        messages, local = self._messages, self._local
        messages.waited_s = 0.0
        # One moment for all that is to come: who sends a piece now and then keeps nobody longer.
        take, wait = partial(messages.arrived, last), partial(messages.within, last, cancel, messages.clock())
        send = partial(messages.send_exchanged, last)
        receipts = local.finish(messages.assignment.plan, send, take, wait)
        count = max(1, len(reports))
        digests = [bytes.fromhex(receipt.digest) for receipt in receipts.values()]
        digest = digests[0] if len(digests) == 1 else blake2b(b"".join(digests)).digest()
        stage = StageReport(tuple(local.losses), (), True, digest[:DIGEST_BYTES], tuple(local.weights))
        return StepReport(
            last,
            stage,
            sum(report.forward_s for report in reports) / count,
            sum(report.backward_s for report in reports) / count,
            sum(report.waited_s for report in reports) + messages.waited_s,
            sum(report.optimizer_s for report in reports) / count,
            sum(report.handling_s for report in reports) / count,
            receipts=receipts,
        )

    def _diverged(self, step: int) -> StepReport:
        """Report of steps that made a model which is not finite, though their losses were."""
        stage = StageReport(tuple(self._local.losses), (), finite=False)
        return StepReport(step, stage, 0.0, 0.0, 0.0, 0.0)


def _share_settled(stage: Stage, messages: Messages, last: int, cancel: Cancel) -> None:
    """Send tied parameters as a round has left them from the first holder to the others of its peer."""
    assignment = messages.assignment
    tied = {tied.name: tied for program, _ in assignment.pieces for tied in program.tied}.values()
    trained = [each for each in tied if each.name in stage.trained]
    for each in trained:
        if assignment.here(each.holders[0]):
            for target in assignment.total_to(each):
                key = messages.key_to(target, Direction.TIED_TOTAL, last, SETTLED, each.index)
                messages.send(target, key, stage.trained[each.name].detach())
    for each in trained:
        if not assignment.here(each.holders[0]):
            first = next(filter(assignment.here, each.holders))
            key = messages.key_to(first, Direction.TIED_TOTAL, last, SETTLED, each.index)
            value = messages.receive_value_from(each.holders[0], key, cancel)
            with torch.no_grad():
                stage.trained[each.name].copy_(value)
