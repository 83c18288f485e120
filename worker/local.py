"""All stages of a plan in one process, exchanging tensors in memory.

The reference of the oracle: the same Stage, programs and action lists as over real workers; a
tensor passes from stage to stage in the form in which it would cross a link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.microbatch import Action, ScheduleName, Work, gpipe, one_f_one_b
from compressors.layout import from_wire, to_wire
from worker.stage import Stage, StageReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta
    from atoll.program import StageProgram

    Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One committed step."""

    loss: float
    square_norms: tuple[float, ...]  # of all stages, in stage order
    gradient_scale: float
    finite: bool


class LocalPipeline:
    """K stages in one process; ``devices`` are used in turn, ``warmups`` default to K - s - 1."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        training: TrainingSpec,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        eval_programs: Sequence[StageProgram] = (),
        devices: Sequence[torch.device | str] = ("cpu",),
        schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
        warmups: Sequence[int] | None = None,
        states: Mapping[str, StateMeta] | None = None,
    ) -> None:
        self.training = training
        self.programs = tuple(programs)
        self.eval_programs = tuple(eval_programs)
        depths = warmups or [len(programs) - stage - 1 for stage in range(len(programs))]
        self._actions = [
            gpipe(training.n_micro)
            if schedule is ScheduleName.GPIPE
            else one_f_one_b(training.n_micro, depths[stage])
            for stage in range(len(programs))
        ]
        self.stages = [
            Stage(
                program,
                eval_programs[at] if eval_programs else None,
                training,
                tensors,
                devices[at % len(devices)],
                states=states,
            )
            for at, program in enumerate(programs)
        ]

    def step(self, step: int, batches: Sequence[Inputs]) -> StepResult:
        """Compute, commit (whatever the loss) and report ``step`` on n_micro micro-batches."""
        reports = self.compute(step, batches)
        norms = tuple(norm for report in reports for norm in report.square_norms)
        scale = self.training.optimizer.gradient_scale(norms)
        for stage in self.stages:
            stage.apply(scale)
        loss = next(report.loss for report in reports if report.loss is not None)
        return StepResult(loss, norms, scale, all(report.finite for report in reports))

    def compute(self, step: int, batches: Sequence[Inputs]) -> list[StageReport]:
        """All forwards and backwards of ``step``, up to the point of commit or ``discard``."""
        for stage in self.stages:
            stage.begin_step(step)
        _Walk(self, batches).run()
        self._fold_tied()
        return [stage.finish_step() for stage in self.stages]

    def discard(self) -> None:
        """Undo the step that was computed or half computed."""
        for stage in self.stages:
            stage.discard()

    def evaluate(self, batches: Sequence[Inputs]) -> float:
        """Mean held-out loss over micro-batches."""
        for micro, batch in enumerate(batches):
            values: dict[int, Tensor] = {}
            for stage, program in zip(self.stages, self.eval_programs, strict=True):
                inputs = {name: batch[name] for name in program.inputs}
                received = {r.op: values[r.op] for r in program.received}
                produced = stage.evaluate_micro(micro, inputs, received)
                values.update({op: _carried(value) for op, value in produced.items()})
        losses = [stage.evaluation_loss() for stage in self.stages]
        return next(loss for loss in losses if loss is not None)

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Every stage's parameters, optimizer state and buffers."""
        merged: dict[str, dict[str, Tensor]] = {}
        for stage in reversed(self.stages):
            merged.update(stage.snapshot())
        return merged

    def _fold_tied(self) -> None:
        tied = {t.name: t.holders for program in self.programs for t in program.tied}
        for name, holders in tied.items():
            total: Tensor | None = None
            for stage in reversed(holders):
                partial = self.stages[stage].tied_partial(name, total)
                total = None if partial is None else _carried(partial)
            for stage in holders:
                self.stages[stage].set_tied_total(name, None if total is None else _carried(total))


class _Walk:
    """One step's walk through every stage's actions, each as soon as what it waits for is here."""

    def __init__(self, pipeline: LocalPipeline, batches: Sequence[Inputs]) -> None:
        self.pipeline = pipeline
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
        if action.work is Work.BACKWARD:
            return all((stage, action.micro, op) in self.grads for op in self.awaited[stage])
        received = self.pipeline.programs[stage].received
        return all((stage, action.micro, r.op) in self.values for r in received)

    def perform(self, stage: int, action: Action) -> None:
        if action.work is Work.FORWARD:
            self.forward(stage, action.micro)
        else:
            self.backward(stage, action.micro)

    def forward(self, stage: int, micro: int) -> None:
        program = self.pipeline.programs[stage]
        inputs = {name: self.batches[micro][name] for name in program.inputs}
        received = {r.op: self.values.pop((stage, micro, r.op)) for r in program.received}
        produced = self.pipeline.stages[stage].forward(micro, inputs, received)
        for p in program.produced:
            for target in p.targets:
                self.values[target, micro, p.op] = _carried(produced[p.op])

    def backward(self, stage: int, micro: int) -> None:
        program = self.pipeline.programs[stage]
        grads = {op: self.grads.pop((stage, micro, op)) for op in self.awaited[stage]}
        answers = self.pipeline.stages[stage].backward(micro, grads)
        for r in program.received:
            if r.requires_grad:
                answer = answers[r.op]
                self.grads[r.grad_to, micro, r.op] = None if answer is None else _carried(answer)


def _gradients_awaited(program: StageProgram) -> tuple[int, ...]:
    """Ops whose gradient must arrive before this stage's backward."""
    own = [p.op for p in program.produced if p.requires_grad]
    return (*own, *(r.op for r in program.received if r.requires_grad and r.grad_from is not None))


def _carried(value: Tensor) -> Tensor:
    """``value`` as it arrives at the other end of a link: own memory, same layout."""
    data, layout = to_wire(value)
    return from_wire(data.clone(), value.shape, layout)
