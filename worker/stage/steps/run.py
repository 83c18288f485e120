"""A stage's work: the micro-batches of its steps, replayed ones as well.

Runs in one thread; its waits are those of ``worker.stage.steps.messages``.
Sums, order and exchange follow DESIGN section 3; what travels is queued as soon as it is computed, and
the transport lets gradients pass activations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from atoll.errors import BadFrame
from atoll.messages.to_worker import StepCommit
from atoll.microbatch import Work
from worker.cancel import Cancel
from worker.links.codecs import StageCodecs, lossy
from worker.machine.cpu import CpuMeter
from worker.machine.malloc import give_back
from worker.spans import Spans
from worker.stage.reports import LongWait, Progress, StepReport
from worker.stage.stage import Lent, cpu_copies
from worker.stage.steps.expected import gradient_sources
from worker.stage.steps.held_out import evaluate
from worker.stage.steps.joining import GradientExchange, stored
from worker.stage.steps.messages import Messages
from worker.stage.steps.periods import Periods
from worker.stage.steps.ports import HeldOut, MicroBatches, TensorLinks
from worker.stage.steps.replay import Asks, CommitAsks
from worker.stage.steps.tied import fold_tied, share_tied
from worker.transport.frames import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.held_out import Figures
    from atoll.microbatch import Action
    from atoll.plan import LinkSpec
    from worker.exchange.slices import Which
    from worker.stage.assignment import Assignment
    from worker.stage.stage import Stage
    from worker.stage.steps.local_steps import LocalSteps

PIECE_S = 0.005
"""What arrives waits about so long while weights' gradients fill the time."""
T = TypeVar("T")


@dataclass(frozen=True)
class Meters:
    """What a run's work is recorded with."""

    spans: Spans
    progress: Progress
    cpu: CpuMeter = field(default_factory=CpuMeter)


class StageRun:
    """One stage of one plan, from its first step to its release; not thread-safe."""

    def __init__(
        self,
        assignment: Assignment,
        stage: Stage,
        links: TensorLinks,
        feed: MicroBatches,
        held_out: HeldOut,
        meters: Meters,
        notice: Callable[[LongWait], None] = lambda _: None,
        local: LocalSteps | None = None,
    ) -> None:
        """``notice`` hears of waits that last suspiciously long; ``local`` of a peer that takes steps of its
        own, where steps in between two commits are a period."""
        self.spans, self._progress, self._cpu = meters.spans, meters.progress, meters.cpu
        self._stage, self._links, self._feed, self._held_out = stage, links, feed, held_out
        self._cpu.forget()
        self.messages = Messages(
            assignment, links, self.spans, self._progress, self._cpu, notice, stage, self._weight_gradients
        )
        self.stood_by = [0, 0]  # steps that were repeated beside the plan, bytes that came for them
        self._actions = assignment.plan.actions(assignment.rank)
        self._local = local
        self._periods = (
            None if local is None else Periods(local, stage, self.messages, self._computed, self._take_step)
        )
        self._joining: GradientExchange | None = None  # of the step under way, where there are other replicas
        self._joining_s = 0.0  # sending parts within the backward that runs
        self._watches = False
        if assignment.buckets:
            self._watch()
        self._steps, self._lent = 0, Lent()  # whose updates the stage has; its tensors that are being read
        self._busy = {Work.FORWARD: 0.0, Work.BACKWARD: 0.0}
        self._optimizer_s = 0.0
        self._finish_s = 0.0

    @property
    def assignment(self) -> Assignment:
        """The newest that it was given."""
        return self.messages.assignment

    def at(self, step: int) -> Assignment:
        """The assignment under the plan version of ``step``."""
        return self.messages.at(step)

    def _watch(self) -> None:
        """Hear of parts that are whole within backwards; once, as leaves call whoever was named first."""
        self._watches = True
        self._stage.watch_parts(self._part_whole)

    def open(self, first_step: int) -> None:
        """Take messages of the first step; before anybody hears that this stage is loaded."""
        self._steps = first_step
        self.messages.expect_first(first_step, self._local)
        self._feed.start(first_step)

    def relink(self, version: int, first_step: int, links: Sequence[LinkSpec]) -> None:
        """From ``first_step`` on exchange under ``version`` with these codecs.

        ValueError when messages of that step are awaited already; UsageError or BadFrame for links
        that cannot be.
        """
        self.messages.check_not_begun(first_step)
        later = self.assignment.relinked(version, links)
        self._links.relink(version, first_step, codecs_of(later, self._cpu))
        self.messages.change(first_step, later)

    def reconfigure(self, later: Assignment, feed: MicroBatches | None = None) -> None:
        """Go on at ``later.first_step`` under its plan, with other neighbours; ``feed``: with these
        micro-batches of a step from now on.

        BadFrame when the stage has another number of steps.
        """
        step = later.first_step
        done = self._steps - (self._periods is not None and self._periods.joining)
        if done != step:
            raise BadFrame(f"the stage has {done} steps, and is to go on after {step}")
        self.discard()
        actions = later.plan.actions(later.rank)
        if actions != self._actions:
            self._stage.share(actions)
            self._actions = actions
        if later.buckets and not self._watches:
            self._watch()
        if feed is not None:
            self._feed.close()
            self._feed = feed
            feed.start(step)
        self._links.reconfigure(later.version, step, codecs_of(later, self._cpu), sends=not later.standby)
        self.messages.reconfigure(later, self._local)
        self._cpu.forget()

    def replay(
        self, cancel: Cancel, stored: Callable[[int], None], notice: Callable[[StepReport], None]
    ) -> None:
        """Repeat the steps of the assignment's ``replay`` from the neighbours' send logs, after ``open`` of
        its first step. ``stored(step)`` is called where the state is to be stored, ``notice`` with each
        step's report. Raises StorageError when a neighbour does not have a step, and what ``run_step`` does.
        """
        asked = self.assignment.replay
        if asked is None:
            return
        if self._local is not None:
            by_commit = self._asks_of(self._local)
            for at, commit in enumerate(asked.commits):
                by_commit.up_to(asked.commits, at)
                notice(self._again(commit, cancel))
                if commit.store:
                    stored(commit.step)
            if not self.assignment.standby:
                self.messages.reconfigure(self.assignment, self._local)
            self._cpu.forget()
            return
        asks = self.messages.asks = Asks(
            self.assignment, self._links, asked.first_step, self.assignment.first_step
        )
        for step, scale in enumerate(asked.scales, asked.first_step):
            self.messages.expect_up_to(min(step + asks.ahead, self.assignment.first_step))
            asks.up_to(step + asks.ahead)
            version = self.at(step).version
            commit = StepCommit(asks.job, version, step, scale, store=False, evaluate=False, last=False)
            notice(self._again(commit, cancel))
            if step + 1 in asked.stores:
                stored(step)
        self.messages.asks = None
        self._cpu.forget()

    def repeat(self, commit: StepCommit, newest: int, cancel: Cancel) -> None:
        """Do a committed step, or round, of the rank that this one stands by for; ``newest``: the last step
        that is committed.

        Raises as ``replay``, and BadFrame for another step than the next.
        """
        step = commit.step
        if self._steps != step + (self._local is not None and not commit.own):
            raise BadFrame(f"step {step} is to be repeated on the state after {self._steps} steps")
        if self._local is not None:
            self._asks_of(self._local).up_to((commit,), 0)
        else:
            asks = self.messages.asks
            if not isinstance(asks, Asks):
                asks = Asks(self.assignment, self._links, step, sys.maxsize, lambda at: self.at(at).version)
                self.messages.asks = asks
            # No further ahead: links may change with the step after.
            ahead = min(step + 1, newest)
            self.messages.expect_up_to(ahead)
            asks.up_to(ahead)
        self._again(commit, cancel)

    def _asks_of(self, local: LocalSteps) -> CommitAsks:
        """Return what other commits than before are repeated with."""
        asks = self.messages.asks
        if not isinstance(asks, CommitAsks):
            asks = self.messages.asks = CommitAsks(self.assignment, self._links, local)
        asks.begin()
        return asks

    def _again(self, commit: StepCommit, cancel: Cancel) -> StepReport:
        step = commit.step
        if self.at(step).version != commit.version:
            self.messages.change(step, self.assignment.relinked(commit.version, ()))
        joins = self._local is not None and not commit.own
        report = self.run_round(step, cancel) if joins else self.run_step(step, cancel)
        self.apply(step, commit.gradient_scale, cancel, commit.shares)
        taken = self.spans.take()  # these steps are in the timeline already
        if self.assignment.standby:
            self.stood_by[0] += 1
            self.stood_by[1] += sum(span.bytes for span in taken if span.kind == "recv")
        return report

    def run_step(self, step: int, cancel: Cancel) -> StepReport:
        """Forwards, backwards, tied parameters; ends where the commit decides. Of a peer with steps of its
        own that is one stage: those of the period that ``step`` ends, and the round.

        Raises Cancelled, PeerLost, or what an op raised.
        """
        if self._periods is not None and self._periods.alone:
            self._links.step_done(self._steps - 1)
            return self._periods.whole(self._steps, step, cancel)
        # A neighbour may begin the next step before this stage hears of the commit.
        self.messages.expect_up_to(step + 1)
        self._links.step_done(step - 1)
        self.messages.forget_before(step)
        if self._periods is not None:
            return self._periods.step(self._steps, step, cancel)
        return self._computed(step, cancel)

    def _computed(self, step: int, cancel: Cancel) -> StepReport:
        """Do what a step has before its commit."""
        self._busy = {Work.FORWARD: 0.0, Work.BACKWARD: 0.0}
        self.messages.waited_s = 0.0
        self._stage.begin_step(step)
        self.messages.begin()
        self._joining = self._begin_exchange(step)
        self._links.take_digest()  # of a step that was given up
        started_s, computed_s = self.messages.clock(), self._cpu.computed_s
        for action in self._actions:
            cancel.check()
            if action.work is Work.FORWARD:
                self._forward(step, action, cancel)
            elif action.work is Work.WEIGHT:
                while self._stage.pieces[action.piece].owed == action.micro:
                    cancel.check()
                    self._weight_gradients(step, action.piece)
            else:
                self._backward(step, action, cancel)
            self._progress.tick()
            if self._joining is not None:
                self._joining.advance(partial(self.messages.arrived, step))
        computed_s = self._cpu.computed_s - computed_s  # codecs' work, too
        self.messages.step_s = self.messages.clock() - started_s
        handling_s = self.messages.step_s - computed_s - self.messages.waited_s
        fold_tied(self._stage, self.messages, step, cancel)
        if self._joining is not None:
            self._joining.finish(
                partial(self.messages.arrived, step), partial(self.messages.awaited, step, cancel)
            )
            self._joining = None
        share_tied(self._stage, self.messages, step, cancel)
        with self._cpu.computing() as taken:
            report = self._stage.finish_step()
        optimizer_s, self._optimizer_s = self._optimizer_s, 0.0
        self._finish_s = taken.seconds
        # On a part of a core, messages that other threads handle keep the computing waiting as if it did.
        handling_s = max(0.0, handling_s, self._cpu.beside_s())
        return StepReport(
            step,
            report,
            self._busy[Work.FORWARD],
            self._busy[Work.BACKWARD],
            self.messages.waited_s,
            optimizer_s,
            handling_s,
            self._links.take_digest(),
        )

    def run_round(self, last: int, cancel: Cancel) -> StepReport:
        """End the period of a peer of several stages whose steps are all committed: exchange what has come
        of them. Raises as ``run_step``."""
        if self._periods is None:
            raise BadFrame(f"the round after step {last} is asked for, where no peer has steps of its own")
        return self._periods.round(self._steps, last, cancel)

    def apply(
        self, step: int, gradient_scale: float, cancel: Cancel | None = None, shares: tuple[float, ...] = ()
    ) -> None:
        """Commit: the optimizer's step, or the use of a round's result. ``shares``: a round of these peers'
        shares begins, of the steps that there are. Raises Cancelled or PeerLost where a tied parameter does
        not come from its first holder."""
        self._lent.wait(self._progress.tick)
        if self._periods is not None:
            step = self._periods.apply(step, gradient_scale, cancel or Cancel(), shares)
            self._feed.step_done(step)
        else:
            self._take_step(step, gradient_scale)
        self._steps = step + 1
        self._progress.tick()

    def _take_step(self, step: int, gradient_scale: float) -> None:
        self._update(step, gradient_scale)
        self._feed.step_done(step)

    def _update(self, step: int, gradient_scale: float) -> None:
        self._lent.wait(self._progress.tick)
        with self.spans.timed("opt", step), self._cpu.computing() as taken:
            self._stage.apply(gradient_scale)
            self._synchronize()
            give_back()  # small blocks that the step leaves scattered over the heap
        self._optimizer_s = self._finish_s + taken.seconds

    def discard(self) -> None:
        """Leave no trace of the step under way."""
        self._stage.discard()
        if self._local is not None:
            self._local.forget_round()

    def evaluate(self, step: int, cancel: Cancel, *, coded: bool = False) -> Figures | None:
        """Means over the held-out rows, None where another stage computes them. ``coded``: through the links'
        codecs; then None everywhere when none of them loses anything."""
        self._cpu.forget()  # what this takes is not the next step's
        if coded and not lossy(self.at(step).pipeline.links):
            return None
        return evaluate(
            self._stage, self.messages, self._held_out, self.spans, self._progress, step, cancel, coded=coded
        )

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """CPU copies of what this stage holds, with optimizer state."""
        return cpu_copies(self._held())

    def lend(self) -> tuple[dict[str, dict[str, Tensor]], Callable[[], None]]:
        """Return ``snapshot``'s originals, and what their reader calls at the end; no update before that."""
        return self._held(), self._lent.lend()

    def _held(self) -> dict[str, dict[str, Tensor]]:
        found = stored(self.assignment, self._stage)
        return found if self._local is None else self._local.with_own(found)

    def close(self) -> None:
        self._feed.close()
        self._links.close()

    # ---------------------------------------------------------------- one micro-batch

    def _forward(self, step: int, action: Action, cancel: Cancel) -> None:
        (program, _), micro, messages = self.assignment.pieces[action.piece], action.micro, self.messages
        inputs = messages.take(self._feed, program, step, micro, cancel)
        received: dict[int, Tensor] = {}
        for r in program.received:
            key = messages.key_to(program.stage, Direction.FORWARD, step, micro, r.op)
            received[r.op] = messages.receive_value_from(r.source, key, cancel)
        with messages.blaming_sources(program):
            produced = self._timed(
                Work.FORWARD, step, micro, lambda: self._stage.forward(micro, inputs, received, action.piece)
            )
        messages.send_all(
            (target, messages.key_to(target, Direction.FORWARD, step, micro, p.op), produced[p.op])
            for p in program.produced
            for target in p.targets
        )

    def _backward(self, step: int, action: Action, cancel: Cancel) -> None:
        (program, _), micro, messages = self.assignment.pieces[action.piece], action.micro, self.messages
        grads: dict[int, Tensor | None] = {}
        for op, source in gradient_sources(program):
            key = messages.key_to(program.stage, Direction.BACKWARD, step, micro, op)
            grads[op] = messages.receive_from(source, key, cancel)
        answers = self._timed(
            action.work, step, micro, lambda: self._stage.backward(micro, grads, action.piece)
        )
        messages.send_all(
            (r.grad_to, messages.key_to(r.grad_to, Direction.BACKWARD, step, micro, r.op), answers[r.op])
            for r in program.received
            if r.requires_grad
        )

    def _weight_gradients(self, step: int, piece: int) -> None:
        """Of the first micro-batch that a piece owes any of, for about PIECE_S."""
        held, until_s = self._stage.pieces[piece], self.messages.clock() + PIECE_S
        micro = held.owed

        def take() -> None:
            while held.owed == micro:
                self._stage.weight_gradients(piece)
                self._synchronize()  # or the clock would count launches
                if self.messages.clock() >= until_s:
                    break

        if micro is not None:
            self._timed(Work.WEIGHT, step, micro, take)
            self._progress.tick()

    # ---------------------------------------------------------------- tied parameters, other replicas

    def _begin_exchange(self, step: int) -> GradientExchange | None:
        assignment = self.at(step)
        if not assignment.buckets:
            return None

        def send(peer: str, which: Which, value: Tensor) -> None:
            with self._progress.waiting(peer, "room", step):
                self._links.send(peer, self.messages.key_of(step, which), value)

        return GradientExchange(assignment, self._stage, send, step)

    def _part_whole(self, name: str, label: int) -> None:
        if self._joining is not None:
            begun_s = self._cpu.at_work_s()
            self._joining.part_whole(name, label)
            self._joining_s += self._cpu.at_work_s() - begun_s

    # ---------------------------------------------------------------- clocks

    def _timed(self, work: Work, step: int, micro: int, run: Callable[[], T]) -> T:
        with self.spans.timed(work.value, step, micro), self._cpu.computing() as taken:
            result = run()
            self._synchronize()
        joining_s, self._joining_s = self._joining_s, 0.0
        self._busy[Work.FORWARD if work is Work.FORWARD else Work.BACKWARD] += taken.seconds - joining_s
        return result

    def _synchronize(self) -> None:
        """A GPU's work is measured where it ends, not where it was queued."""
        if self._stage.device.type == "cuda":
            torch.cuda.synchronize(self._stage.device)


def codecs_of(assignment: Assignment, cpu: CpuMeter | None = None) -> StageCodecs:
    """The codecs of a stage's links under one plan version; ``cpu``: of the thread that computes."""
    return StageCodecs(
        assignment.pieces,
        assignment.pipeline.links,
        assignment.ends,
        assignment.training.seed,
        cpu,
        exchanges_bytes=assignment.plan.local or assignment.plan.keeps,
    )
