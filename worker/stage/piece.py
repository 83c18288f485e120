"""A piece of a stage: the ops of one interval with their executors, and what they sum up in a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from atoll.block_sums import BlockSums
from atoll.calls import Shapes
from atoll.errors import BadFrame, JobFailed, UsageError
from atoll.execute import DTYPES, Executor
from atoll.held_out import Figures, HeldOutMeans
from atoll.indices import IndexRanges, index_ranges
from atoll.job import EXACTLY, Keeping
from atoll.microbatch import Work
from atoll.rows import inputs_at
from atoll.value_guards import out_of_range, sound_bools
from worker.elsewhere.shelf import shelves

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from atoll.job import TrainingSpec
    from atoll.mesh.calls import MeshCalls
    from atoll.microbatch import Action
    from atoll.opdag import StateMeta
    from atoll.program import PiecePrograms, StageProgram


class UnusableValue(BadFrame):
    """A value from another stage that no op may index by; ``op`` names the one that made it."""

    def __init__(self, op: int, why: str) -> None:
        super().__init__(f"the value of op {op}, from another stage, {why}")
        self.op = op


class Held(NamedTuple):
    """What a stage has for all of its pieces: tensors on its device, by name."""

    values: Mapping[str, Tensor]
    frozen: Collection[str]  # of the parameters
    states: Mapping[str, StateMeta]
    device: torch.device
    share: StageShare | None = None  # where several processes compute the stage


class Keeps(NamedTuple):
    """Form in which a stage keeps what it needs again, and the folder for what goes to a disk."""

    keeping: Keeping = EXACTLY
    folder: Path | None = None  # None: the system's own for temporary files


class StageShare(Protocol):
    """Part of a stage that this process computes; programs are those of a process."""

    def calls(self, program: StageProgram) -> MeshCalls:
        """Return how a program's ops are called."""
        ...

    def whole(self, program: StageProgram) -> tuple[StageProgram, Mapping[str, StateMeta]]:
        """Return the program as it is for all processes together, and what it says of its leaves."""
        ...


class StagePiece:
    """Programs of a piece on what its stage holds; not thread-safe.

    ``actions``: this piece's of a step. ``blocks`` of micro-batches, whose gradients are summed one by one.
    """

    def __init__(
        self,
        programs: PiecePrograms,
        training: TrainingSpec,
        held: Held,
        keeps: Keeps,
        actions: Sequence[Action],
        blocks: Mapping[int, range],
    ) -> None:
        program, eval_program = programs
        values, device = held.values, held.device
        tail = eval_program.last if eval_program else None
        self.program = program
        self.training, self.device = training, device
        self._states, self._share = held.states, held.share
        self._ranges = self._index_ranges(program)
        self.executor = Executor(
            program,
            device,
            training.precision,
            training.seed,
            keeping=keeps.keeping,
            defer=held.share is None and any(action.work is Work.INPUT for action in actions),
            shelves=shelves(keeps.keeping.saved_on, keeps.folder, device),
        )
        self.executor.bound_indices(self._ranges.computed)
        if held.share is not None:
            self.executor.mesh = held.share.calls(program)
        self.executor.load(values, held.frozen)
        self.trainable = tuple(n for n in program.parameters if n in self.executor.uses)
        self.followed = frozenset(t.name for t in program.tied if t.holders[0] != program.stage)
        tied = {t.name for t in program.tied}
        self.sums = BlockSums(self.executor.uses, self.executor.late, blocks, tied)
        self._evaluator = self._make_evaluator(eval_program, values) if eval_program else None
        self._tail = self._make_evaluator(tail, values) if tail else None
        self._step = 0
        self.losses: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}  # of the same micro-batches, where losses are sums over counts
        self._held_out = HeldOutMeans(eval_program) if eval_program else None
        self._rollback: dict[str, Tensor] = {}
        self._eval_rollback: dict[str, Tensor] = {}

    @property
    def executors(self) -> tuple[Executor, ...]:
        """What computes: of the training program, and of the evaluation programs where there are some."""
        return tuple(e for e in (self.executor, self._evaluator, self._tail) if e is not None)

    def check(self, received: Mapping[int, Tensor]) -> None:
        """Raise UnusableValue for what a forward must not be given."""
        check_indices(received, self._ranges)

    @property
    def owed(self) -> int | None:
        """The first micro-batch with weights whose gradients are still to be taken."""
        return self.executor.owed

    def begin_step(self, step: int) -> None:
        """Open ``step``: buffers are remembered."""
        self._step = step
        self._rollback = {n: self.executor.buffers[n].clone() for n in self.executor.mutated_buffers}

    def forward(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Forward of one micro-batch; returns the values that later pieces use, detached."""
        out = self.executor.forward(
            self._step, micro, self._on_device(inputs), self._taken(received, self._ranges)
        )
        self._take_loss(out, micro)
        return out

    def backward(self, micro: int, grads: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """Backward of one micro-batch; None, given or returned, is the zero-gradient mark."""
        moved = {op: None if g is None else g.to(self.device) for op, g in grads.items()}
        self.sums.backward_begins(micro)
        # Gradients of sums are divided as the step is committed: what later micro-batches count is not known.
        divisor = self.training.n_micro if self.program.weight is None else 1
        answers = self.executor.backward(micro, moved, divisor)
        self.sums.backward_done(micro, self.owed)
        return answers

    def weight_gradients(self) -> None:
        """Take those of one op's weights, the first that are owed; nothing when none are."""
        self.executor.weight_gradients()
        self.sums.weights_done(self.owed)

    def step_losses(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Losses by micro-batch, and their weights where the losses are sums."""
        divisor = self.training.n_micro if self.program.weight is None else 1
        losses = tuple(float(self.losses[micro]) / divisor for micro in sorted(self.losses))
        return losses, tuple(counted(self.weights[micro]) for micro in sorted(self.weights))

    def evaluate_micro(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor], *, tail: bool
    ) -> dict[int, Tensor]:
        """Forward of one held-out micro-batch through the evaluation program."""
        evaluator, means = self._tail if tail else self._evaluator, self._held_out
        if evaluator is None or means is None:
            raise UsageError("this job has no evaluation program; give it held-out data at submit")
        if not self._eval_rollback:
            self._eval_rollback = {n: evaluator.buffers[n].clone() for n in evaluator.mutated_buffers}
        ranges = self._index_ranges(evaluator.program)
        out = evaluator.forward(self._step, micro, self._on_device(inputs), self._taken(received, ranges))
        if evaluator.program.loss is not None:
            means.add(out, evaluator.program.rows)
        return {p.op: out[p.op] for p in evaluator.program.produced}

    def held_out_figures(self) -> Figures | None:
        """Means over the rows evaluated since the last call; None without any, and where others have them."""
        found = None if self._held_out is None else self._held_out.take()
        self._undo_evaluation()
        return found

    def undo(self) -> None:
        """Buffers as they were before the step, and before an evaluation that did not end."""
        self._undo_evaluation()
        for name, value in self._rollback.items():
            self.executor.buffers[name].copy_(value)

    def forget(self) -> None:
        """Forget the step: its graphs, sums and losses."""
        self.executor.reset()
        self.executor.zero_gradients()
        self.sums.clear()
        self.losses.clear()
        self.weights.clear()
        self._rollback = {}

    def _undo_evaluation(self) -> None:
        """Buffers as they were before it, no figures."""
        for name, value in self._eval_rollback.items():
            self._evaluator.buffers[name].copy_(value)  # type: ignore[union-attr]
        self._eval_rollback = {}
        if self._held_out is not None:
            self._held_out.take()

    def _make_evaluator(self, program: StageProgram, values: Mapping[str, Tensor]) -> Executor:
        evaluator = Executor(
            program,
            self.device,
            self.training.precision,
            self.training.seed,
            differentiate=False,
        )
        if self._share is not None:
            evaluator.mesh = self._share.calls(program)
        evaluator.load(values)
        return evaluator

    def _on_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {}
        for name, value in inputs.items():
            state = self._states.get(name)
            dtype = DTYPES[state.meta.dtype] if state is not None else value.dtype
            # A copy of our own, aligned like every other tensor: kernels may look at that.
            moved[name] = value.to(self.device, dtype, copy=True)
        return moved

    def _index_ranges(self, program: StageProgram) -> IndexRanges:
        """Bounds of the values that the program indexes by; none where the leaves' shapes are not known."""
        states = self._states
        if self._share is not None:
            program, states = self._share.whole(program)
        names = (*leaf_names([program]), *program.inputs)
        if any(name not in states for name in names):
            return IndexRanges({}, {}, {})
        metas = {name: states[name].meta for name in names}
        if program.rows:
            metas |= inputs_at({name: metas[name] for name in program.inputs}, program.rows)
        return index_ranges(program, Shapes(program, metas, {}))

    def _taken(self, received: Mapping[int, Tensor], ranges: IndexRanges) -> dict[int, Tensor]:
        """Other stages' values on this device, after a look at what an op will index by. UnusableValue."""
        check_indices(received, ranges)
        return {op: sound_bools(value).to(self.device) for op, value in received.items()}

    def _take_loss(self, out: dict[int, Tensor], micro: int) -> None:
        program = self.program
        if program.loss is None:
            return
        self.losses[micro] = out[program.loss]
        if program.weight is not None:
            self.weights[micro] = out.pop(program.weight)
        if all(p.op != program.loss for p in program.produced):
            del out[program.loss]


def check_indices(received: Mapping[int, Tensor], ranges: IndexRanges) -> None:
    """Raise UnusableValue for a value that some op would index by, and must not."""
    for op, bounds in ranges.received.items():
        if (why := out_of_range(received[op], bounds)) is not None:
            raise UnusableValue(op, why)


def leaf_names(programs: Iterable[StageProgram]) -> dict[str, None]:
    """Parameters, buffers and constants of programs, each once."""
    return dict.fromkeys(n for p in programs for n in (*p.parameters, *p.buffers, *p.constants))


def counted(weight: Tensor) -> float:
    """Return a micro-batch's weight; JobFailed for one that is no count."""
    found = float(weight)
    if not (math.isfinite(found) and found >= 0.0):
        raise JobFailed(f"the model returned a weight of {found}; return how much the loss sums over, from 0")
    return found
