"""The stages of a plan in one process, exchanging tensors in memory.

The reference of the oracle: the same Stage, programs and action lists as over real workers; a
tensor passes from stage to stage in the form in which it would cross a link, through the link's
codec where the plan names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.block_sums import fold
from atoll.microbatch import Action, ScheduleName, Work, gpipe, one_f_one_b
from atoll.program import PiecePrograms
from compressors.base import meta_of, parse_packet
from compressors.layout import from_wire, to_wire
from worker.links.codec_use import CodecUse
from worker.links.codecs import StageCodecs, lossy
from worker.stage.piece import Keeps
from worker.stage.reports import StageReport
from worker.stage.stage import Stage
from worker.transport.frames import Direction, End, MessageKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from atoll.held_out import Figures
    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta, TensorMeta
    from atoll.plan import LinkSpec
    from atoll.program import StageProgram

    Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of a committed step; ``finite``: its gradients are."""

    loss: float
    square_norms: tuple[float, ...]  # of all stages, in stage order
    gradient_scale: float
    finite: bool
    weight: float = 1.0  # that gradients were divided by; see ``atoll.step_loss``


class LocalPipeline:
    """K stages in one process; ``devices`` are used in turn, ``actions`` are every stage's, 1F1B with
    warm-ups of K - s - 1 on the whole step unless given."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        training: TrainingSpec,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        eval_programs: Sequence[StageProgram] = (),
        devices: Sequence[torch.device | str] = ("cpu",),
        actions: Sequence[Sequence[Action]] = (),
        states: Mapping[str, StateMeta] | None = None,
    ) -> None:
        self.training = training
        self.programs = tuple(programs)
        self.eval_programs = tuple(eval_programs)
        self._actions = actions or usual_actions(len(programs), training.n_micro)
        self.stages = [
            Stage(
                [PiecePrograms(program, eval_programs[at] if eval_programs else None)],
                training,
                tensors,
                devices[at % len(devices)],
                states=states,
                keeps=Keeps(training.keeping.decided),
                actions=self._actions[at],
            )
            for at, program in enumerate(programs)
        ]
        self._step = 0
        self.relink(())

    def relink(self, links: Sequence[LinkSpec]) -> None:
        """Exchange with these codecs from the next step on; a pair of stages without one exchanges exact
        tensors, as all do before."""
        ends = [End(str(stage)) for stage in range(len(self.programs))]
        evaluations = self.eval_programs or (None,) * len(self.programs)
        self.lossy = lossy(links)
        self._codecs = [
            StageCodecs([PiecePrograms(*both)], links, ends, self.training.seed)
            for both in zip(self.programs, evaluations, strict=True)
        ]

    def codec_use(self) -> dict[tuple[int, int], CodecUse]:
        """Work of the codecs since the last ``relink``, by pair of stages: bytes and ``encode_s``
        from the first to the second, and ``decode_s`` at the first of what the second sent."""
        return {
            (stage, int(peer)): use
            for stage, codecs in enumerate(self._codecs)
            for peer, use in codecs.use.items()
        }

    def carry(
        self, key: MessageKey, source: int, target: int, value: Tensor | None, meta: TensorMeta
    ) -> Tensor | None:
        """``value`` as ``target`` gets it from ``source``; None is the zero-gradient mark."""
        sender, receiver = self._codecs[source], self._codecs[target]
        coding = receiver.coding(str(source), key, sending=False)
        if coding.exact:
            return None if value is None else carried(value)
        packet = sender.encode(str(target), key, value)
        payload = torch.empty(len(packet.payload), dtype=torch.uint8)  # aligned as at a real receiver
        arrived = memoryview(payload.numpy())  # type: ignore[arg-type]
        arrived[:] = memoryview(packet.payload).cast("B")
        packet = parse_packet(packet.header, arrived)
        coding.check(packet, meta)
        return receiver.decode(str(source), key, packet)

    def step(self, step: int, batches: Sequence[Inputs]) -> StepResult:
        """Compute, commit (whatever the loss) and report ``step`` on n_micro micro-batches."""
        reports = self.compute(step, batches)
        norms = tuple(norm for report in reports for norm in report.square_norms)
        found = next(report.step_loss for report in reports if report.losses)
        scale = self.training.optimizer.gradient_scale(norms, found.weight)
        self.apply(scale)
        return StepResult(found.mean, norms, scale, all(report.finite for report in reports), found.weight)

    def compute(self, step: int, batches: Sequence[Inputs]) -> list[StageReport]:
        """Run all forwards and backwards of ``step``, up to the point of commit or ``discard``."""
        self.accumulate(step, batches)
        tied = {t.name for program in self.programs for t in program.tied}
        return self.finish({n: fold(p.values()) for n, p in self.parts().items() if n in tied})

    def accumulate(self, step: int, batches: Sequence[Inputs]) -> None:
        """Run all forwards and backwards of ``step``, ``batches`` by global micro-batch, and sum what they
        give block by block."""
        for stage in self.stages:
            stage.begin_step(step)
        self._step = step
        _Walk(self, step, batches).run()
        self._fold_tied()
        for codecs in self._codecs:
            codecs.step_done(step)

    def parts(self) -> dict[str, Mapping[int, Tensor | None]]:
        """Return every parameter's sums by block, in order of first use; see ``Stage.parts``."""
        return {name: stage.parts(name) for stage in self.stages for name in stage.norm_names}

    def finish(self, totals: Mapping[str, Tensor | None]) -> list[StageReport]:
        """End the step with these gradients at all who hold the parameters, their own sums for the others."""
        for stage in self.stages:
            for name in stage.trainable:
                if name in totals:
                    total = totals[name]
                    stage.set_total(name, None if total is None else carried(total))
        return [stage.finish_step() for stage in self.stages]

    def apply(self, gradient_scale: float) -> None:
        """Commit the finished step."""
        for stage in self.stages:
            stage.apply(gradient_scale)

    def discard(self) -> None:
        """Undo the step that was computed or half computed."""
        for stage in self.stages:
            stage.discard()

    def evaluate(self, batches: Sequence[Inputs], *, coded: bool = False) -> float:
        """Mean held-out loss over the rows of micro-batches; see ``figures``."""
        return self.figures(batches, coded=coded).loss

    def figures(self, batches: Sequence[Inputs], *, coded: bool = False) -> Figures:
        """Means over the rows of held-out micro-batches, of which the last may be the programs' ``last``.
        ``coded``: with the values that cross a cut through the links' codecs, as they do in training."""
        for micro, batch in enumerate(batches):
            values: dict[tuple[int, int], Tensor] = {}  # (target stage, op)
            for stage, program in enumerate(self.eval_programs):
                inputs = {name: batch[name] for name in program.inputs}
                received = {r.op: values.pop((stage, r.op)) for r in program.received}
                tail = program.last is not None and _rows(batch) == program.last.rows
                produced = self.stages[stage].evaluate_micro(micro, inputs, received, tail=tail)
                for p in program.produced:
                    for target in p.targets:
                        values[target, p.op] = self._evaluated(micro, stage, target, p.op, produced, coded)
        return next(found for stage in self.stages if (found := stage.held_out_figures()) is not None)

    def _evaluated(
        self, micro: int, source: int, target: int, op: int, produced: Mapping[int, Tensor], coded: bool
    ) -> Tensor:
        if not coded:
            return carried(produced[op])
        key = _key(self._step, micro, op, Direction.EVALUATION_CODED)
        value = self.carry(key, source, target, produced[op], meta_of(produced[op]))
        assert value is not None
        return value

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Every stage's parameters, optimizer state and buffers."""
        merged: dict[str, dict[str, Tensor]] = {}
        for stage in reversed(self.stages):
            merged.update(stage.snapshot())
        return merged

    def _fold_tied(self) -> None:
        tied = {t.name: t.holders for program in self.programs for t in program.tied}
        for name, holders in tied.items():
            for block in self.stages[0].blocks:
                later: Tensor | None = None
                for stage in reversed(holders):
                    partial = self.stages[stage].tied_partial(name, block, later)
                    later = None if partial is None else carried(partial)


def usual_actions(
    stages: int, n_micro: int, schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
) -> list[tuple[Action, ...]]:
    """Return every stage's actions with warm-ups of K - s - 1; where weight gradients are deferred, each
    stage holds at most K micro-batches."""
    if schedule is ScheduleName.GPIPE:
        return [gpipe(n_micro)] * stages
    held = stages if schedule is ScheduleName.ZERO_BUBBLE else 0
    return [one_f_one_b(n_micro, stages - stage - 1, held) for stage in range(stages)]


class _Walk:
    """A step's walk through every stage's actions, each as soon as what it waits for is here."""

    def __init__(self, pipeline: LocalPipeline, step: int, batches: Sequence[Inputs]) -> None:
        self.pipeline, self.step = pipeline, step
        self.batches = batches
        self.values: dict[tuple[int, int, int], Tensor] = {}  # (target stage, micro, op)
        self.grads: dict[tuple[int, int, int], Tensor | None] = {}
        self.awaited = [_gradients_awaited(program) for program in pipeline.programs]

    def run(self) -> None:
        left = [list(reversed(actions)) for actions in self.pipeline._actions]
        while any(left):
            moved = False
            for stage, actions in enumerate(left):
                while actions and self.ready(stage, actions[-1]):
                    self.perform(stage, actions.pop())
                    moved = True
            if not moved:
                raise RuntimeError(f"stages wait for each other: {[a[-1:] for a in left]}")

    def ready(self, stage: int, action: Action) -> bool:
        if action.work is Work.WEIGHT:
            return True
        if action.work is not Work.FORWARD:
            return all((stage, action.micro, op) in self.grads for op in self.awaited[stage])
        received = self.pipeline.programs[stage].received
        return all((stage, action.micro, r.op) in self.values for r in received)

    def perform(self, stage: int, action: Action) -> None:
        if action.work is Work.FORWARD:
            self.forward(stage, action.micro)
        elif action.work is Work.WEIGHT:
            while self.pipeline.stages[stage].pieces[0].owed == action.micro:
                self.pipeline.stages[stage].weight_gradients()
        else:
            self.backward(stage, action.micro)

    def forward(self, stage: int, micro: int) -> None:
        program = self.pipeline.programs[stage]
        inputs = {name: self.batches[micro][name] for name in program.inputs}
        received = {r.op: self.values.pop((stage, micro, r.op)) for r in program.received}
        produced = self.pipeline.stages[stage].forward(micro, inputs, received)
        for p in program.produced:
            for target in p.targets:
                key = _key(self.step, micro, p.op, Direction.FORWARD)
                value = self.pipeline.carry(key, stage, target, produced[p.op], meta_of(produced[p.op]))
                assert value is not None
                self.values[target, micro, p.op] = value

    def backward(self, stage: int, micro: int) -> None:
        program = self.pipeline.programs[stage]
        grads = {op: self.grads.pop((stage, micro, op)) for op in self.awaited[stage]}
        answers = self.pipeline.stages[stage].backward(micro, grads)
        for r in program.received:
            if r.requires_grad:
                key = _key(self.step, micro, r.op, Direction.BACKWARD)
                answer = self.pipeline.carry(key, stage, r.grad_to, answers[r.op], r.meta)
                self.grads[r.grad_to, micro, r.op] = answer


def _key(step: int, micro: int, op: int, direction: Direction) -> MessageKey:
    return MessageKey("", 0, step, micro, op, direction)


def _gradients_awaited(program: StageProgram) -> tuple[int, ...]:
    """Ops whose gradient must arrive before this stage's backward."""
    own = [p.op for p in program.produced if p.requires_grad]
    return (*own, *(r.op for r in program.received if r.requires_grad and r.grad_from is not None))


def _rows(batch: Inputs) -> int:
    return int(next(iter(batch.values())).shape[0])


def carried(value: Tensor) -> Tensor:
    """``value`` as it arrives at the other end of a link: own memory, same layout."""
    data, layout = to_wire(value)
    return from_wire(data.clone(), value.shape, layout)
