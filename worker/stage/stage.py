"""One stage of a job: its executor, its share of the optimizer, and the step's bookkeeping.

A step is begin_step, the plan's forwards and backwards, the folding of tied parameters,
finish_step, then either apply (commit) or discard, which leaves no trace of the step.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.block_sums import BlockSums, fold
from atoll.calls import Shapes
from atoll.errors import BadFrame, JobFailed, PlanError, UsageError
from atoll.execute import DTYPES, Executor
from atoll.held_out import Figures, HeldOutMeans
from atoll.indices import IndexRanges, index_ranges
from atoll.job import OptimizerName, Recompute, stepwise_groups
from atoll.microbatch import Work, own_blocks
from atoll.ops import check_node
from atoll.rows import inputs_at
from atoll.value_guards import out_of_range, sound_bools
from worker.stage.digests import norms_and_digest
from worker.stage.optimizers import FusedOptimizer, make_optimizer
from worker.stage.reports import StageReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from atoll.job import TrainingSpec
    from atoll.microbatch import Action
    from atoll.opdag import StateMeta
    from atoll.program import StageProgram

LENT_POLL_S = 0.25
MAX_OUTPUT_BYTES = 1 << 35  # of one op; a program that declares more is refused
STATE_KEYS = {
    OptimizerName.ADAMW: ("exp_avg", "exp_avg_sq", "step"),
    OptimizerName.SGD: ("momentum_buffer",),
}


class UnusableValue(BadFrame):
    """A value from another stage that no op may index by; ``op`` names the one that made it."""

    def __init__(self, op: int, why: str) -> None:
        super().__init__(f"the value of op {op}, from another stage, {why}")
        self.op = op


class Stage:
    """A StageProgram with its tensors, ready to train; not thread-safe.

    ``tensors[name]["value"]`` is a parameter, buffer or constant; further keys are optimizer
    state (``STATE_KEYS``). ``states`` says which parameters were frozen and which dtype an input
    has; without it every parameter trains and inputs are taken as they come. ``actions``
    are those of a step: which micro-batches, all of them unless given, and whether backwards leave weights'
    gradients to ``weight_gradients``. Actions on as many micro-batches as the training has, whatever their
    numbers, are all of a step: a peer's own share where it takes steps by itself.
    UnsupportedOp for a node that no honest capture makes, UsageError for missing or misshapen
    tensors, PlanError when the evaluation program needs state that another stage trains.
    """

    def __init__(
        self,
        program: StageProgram,
        eval_program: StageProgram | None,
        training: TrainingSpec,
        tensors: Mapping[str, Mapping[str, Tensor]],
        device: torch.device | str = "cpu",
        *,
        states: Mapping[str, StateMeta] | None = None,
        recompute: Recompute = Recompute.OFF,
        actions: Sequence[Action] = (),
    ) -> None:
        tail = eval_program.last if eval_program else None
        for each in (program, eval_program, tail):
            for _, node in each.ops if each else ():
                check_node(node, MAX_OUTPUT_BYTES)
        self.program = program
        self.training = training
        self.device = torch.device(device)
        self._states = states or {}
        groups = stepwise_groups(program.parameters, training.optimizer)
        self.frozen = frozenset(
            name
            for name in program.parameters
            if groups[name].frozen or (name in self._states and not self._states[name].requires_grad)
        )
        leaves = _leaf_names(program) | (_leaf_names(eval_program) if eval_program else set())
        self._values = self._load(tensors, leaves)
        self._ranges = self._index_ranges(program)
        self._executor = Executor(
            program,
            self.device,
            training.precision,
            training.seed,
            recompute=recompute,
            defer=any(action.work is Work.INPUT for action in actions),
            indices=self._ranges.computed,
        )
        self._executor.load(self._values, self.frozen)
        self.trainable = tuple(n for n in program.parameters if n in self._executor.uses)
        self.blocks = _blocks(training, actions)
        self._sums = BlockSums(
            self._executor.uses, self._executor.late, self.blocks, {t.name for t in program.tied}
        )
        self._followed = {t.name for t in program.tied if t.holders[0] != program.stage}
        self._optimizer = self._make_optimizer(tensors)
        self._evaluator = self._make_evaluator(eval_program) if eval_program else None
        self._tail = self._make_evaluator(tail) if tail else None
        self._step = 0
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}  # of the same micro-batches, where losses are sums over counts
        self._held_out = HeldOutMeans(eval_program) if eval_program else None
        self._totals: dict[str, Tensor | None] = {}
        self._rollback: dict[str, Tensor] = {}
        self._eval_rollback: dict[str, Tensor] = {}

    @property
    def executors(self) -> tuple[Executor, ...]:
        """What computes: of the training program, and of the evaluation programs where there are some."""
        return tuple(e for e in (self._executor, self._evaluator, self._tail) if e is not None)

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Buffers that training writes, themselves."""
        return {name: self._executor.buffers[name] for name in self._executor.mutated_buffers}

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Parameters of StageReport.square_norms: in order of first use, a tied one only at its
        first holder, so that the norms of all stages in a row do not depend on the cut."""
        return tuple(n for n in self.trainable if n not in self._followed)

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Parameters that the optimizer steps, in the program's order; gradients after ``finish_step``."""
        return self._parameters

    def share(self, actions: Sequence[Action]) -> None:
        """Take these actions for those of a step from now on: other micro-batches, in whole blocks, with the
        step under way discarded. UsageError for others."""
        self.discard()
        self.blocks = _blocks(self.training, actions)
        self._sums.share(self.blocks)

    def begin_step(self, step: int) -> None:
        """Open ``step``: no gradients, no micro-batches in flight, buffers remembered. A step that
        was begun and neither applied nor discarded is discarded."""
        self.discard()
        self._step = step
        self._rollback = {n: self._executor.buffers[n].clone() for n in self._executor.mutated_buffers}

    def forward(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Forward of one micro-batch; returns the values that later stages use, detached."""
        out = self._executor.forward(
            self._step, micro, self._on_device(inputs), self._taken(received, self._ranges)
        )
        self._take_loss(out, self.program, micro)
        return out

    def backward(self, micro: int, grads: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """Backward of one micro-batch; None, given or returned, is the zero-gradient mark."""
        moved = {op: None if g is None else self._moved(g) for op, g in grads.items()}
        self._sums.backward_begins(micro)
        # Gradients of sums are divided as the step is committed: what later micro-batches count is not known.
        divisor = self.training.n_micro if self.program.weight is None else 1
        answers = self._executor.backward(micro, moved, divisor)
        self._sums.backward_done(micro, self.owed)
        return answers

    @property
    def owed(self) -> int | None:
        """The first micro-batch with weights whose gradients are still to be taken."""
        return self._executor.owed

    def weight_gradients(self) -> None:
        """Take those of one op's weights, the first that are owed; nothing when none are."""
        self._executor.weight_gradients()
        self._sums.weights_done(self.owed)

    def tied_partial(self, name: str, block: int, later: Tensor | None) -> Tensor | None:
        """Later holders' partial sum plus this stage's own uses of a tied parameter in a block; the first
        holder's is the block's sum. Call it for blocks ascending."""
        partial = self._sums.partial(name, block, None if later is None else self._moved(later))
        if name not in self._followed:
            self._sums.add(name, block, partial)
        return partial

    def watch_parts(self, notice: Callable[[str, int], None]) -> None:
        """Have ``notice(parameter, block)`` called within backwards when a part is whole, on the thread that
        computes; nowhere but on a CPU, where that is so."""
        if self.device.type == "cpu":
            self._sums.watch(notice)

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """Blocks of micro-batches whose gradients are summed, but for tied parameters."""
        return self._sums.whole

    def parts(self, name: str) -> Mapping[int, Tensor | None]:
        """Return sums of a parameter of ``norm_names`` by block, ascending: what replicas join by adding
        them in this order. Where this stage's blocks begin the step, one under 0 for all of them."""
        return self._sums.parts(name)

    def total(self, name: str) -> Tensor | None:
        """Return a parameter's whole gradient: what an exchange has set, else the sum of ``parts``."""
        return self._totals[name] if name in self._totals else fold(self._sums.parts(name).values())

    def set_total(self, name: str, total: Tensor | None) -> None:
        """Take a parameter's whole gradient, as its first holder or an exchange computed it."""
        # The fused optimizers read gradients flat, in the parameters' own order.
        self._totals[name] = None if total is None else self._moved(total).contiguous()

    def finish_step(self) -> StageReport:
        """Put the step's gradients in place and report; call after every set_total. A parameter without one
        has its gradient from this stage alone."""
        for name in self.trainable:
            self._parameters[name].grad = self._totals[name] if name in self._followed else self.total(name)
        gradients = [self._parameters[name].grad for name in self.norm_names]
        norms, digest = norms_and_digest(gradients, self.device)
        squares = tuple(norm**2 for norm in norms)
        losses, weights = self._step_losses()
        return StageReport(losses, squares, all(map(math.isfinite, squares)), digest, weights)

    def apply(self, gradient_scale: float = 1.0) -> None:
        """Commit: scale the gradients, take the optimizer's step, forget the gradients. A scale of 0 takes no
        step at all: nothing was counted (``atoll.step_loss``)."""
        if self._optimizer is not None and gradient_scale != 0.0:
            if gradient_scale != 1.0:
                self._scale(gradient_scale)
            self._optimizer.step(self.training.learning_rate(self._step))
        self._forget()

    def _scale(self, factor: float) -> None:
        for name in self.trainable:
            parameter = self._parameters[name]
            if parameter.grad is None:
                continue
            if self._totals.pop(name, None) is not None:
                # A link may still hold the total, to send it again.
                parameter.grad = parameter.grad * factor
            else:
                parameter.grad.mul_(factor)

    def discard(self) -> None:
        """Leave no trace of the step, nor of an evaluation that did not end: gradients dropped, mutated
        buffers as before."""
        self._undo_evaluation()
        for name, value in self._rollback.items():
            self._executor.buffers[name].copy_(value)
        self._forget()

    def evaluate_micro(
        self,
        micro: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[int, Tensor],
        *,
        tail: bool = False,
    ) -> dict[int, Tensor]:
        """Forward of one held-out micro-batch through the evaluation program; ``tail``: the last, with fewer
        rows."""
        evaluator, means = self._tail if tail else self._evaluator, self._held_out
        if evaluator is None or means is None:
            raise UsageError("this job has no evaluation program; give it held-out data at submit")
        if not self._eval_rollback:
            self._eval_rollback = {n: evaluator.buffers[n].clone() for n in evaluator.mutated_buffers}
        ranges = self._index_ranges(evaluator.program)
        out = evaluator.forward(self._step, micro, self._on_device(inputs), self._taken(received, ranges))
        if evaluator.program.loss is not None:
            means.add(out, evaluator.program.rows)
        return _produced_only(out, evaluator.program)

    def held_out_figures(self) -> Figures | None:
        """Means over the rows evaluated since the last call; None without any, and where others have them."""
        found = None if self._held_out is None else self._held_out.take()
        self._undo_evaluation()
        return found

    def _undo_evaluation(self) -> None:
        """Buffers as they were before it, no figures."""
        for name, value in self._eval_rollback.items():
            self._evaluator.buffers[name].copy_(value)  # type: ignore[union-attr]
        self._eval_rollback = {}
        if self._held_out is not None:
            self._held_out.take()

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """CPU copies of parameters, their optimizer state and buffers, as safetensors takes them."""
        return cpu_copies(self.state())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameters, their optimizer state and buffers: themselves, which the next ``apply`` changes, but
        copies of the buffers that training writes."""
        written = self.written_buffers
        found = {
            name: {"value": self._values[name].clone() if name in written else self._values[name]}
            for name in (*self.program.parameters, *self.program.buffers)
            if name not in self._followed
        }
        if self._optimizer is not None:
            for name in self.norm_names:
                for key, value in self._optimizer.state.get(name, {}).items():
                    found[name][key] = value
        return found

    def _load(self, tensors: Mapping[str, Mapping[str, Tensor]], names: Collection[str]) -> dict[str, Tensor]:
        missing = sorted(name for name in names if "value" not in tensors.get(name, {}))
        if missing:
            raise UsageError(f"stage {self.program.stage} lacks {len(missing)} tensors: {missing[:5]}")
        values = {}
        for name in names:
            value = tensors[name]["value"].detach()
            expected = self._states.get(name)
            if expected is not None and tuple(value.shape) != expected.meta.shape:
                raise UsageError(f"{name} has shape {tuple(value.shape)}, the model {expected.meta.shape}")
            # Own storage: the caller's may be a read-only file, or shared with another stage.
            values[name] = value.to(self.device, copy=True).contiguous()
        return values

    def _make_optimizer(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> FusedOptimizer | None:
        spec = self.training.optimizer
        self._parameters = {n: torch.nn.Parameter(self._values[n]) for n in self.trainable}
        optimizer = make_optimizer(self._parameters, spec)
        if optimizer is None:
            return None
        for name in self.trainable:
            self._restore(optimizer, name, tensors[name])
        optimizer.reserve()
        return optimizer

    def _restore(self, optimizer: FusedOptimizer, name: str, stored: Mapping[str, Tensor]) -> None:
        keys = STATE_KEYS[self.training.optimizer.name]
        present = [key for key in keys if key in stored]
        if not present:
            return
        parameter = self._parameters[name]
        shapes = {key: tuple(stored[key].shape) for key in present if key != "step"}
        if len(present) != len(keys) or any(s != tuple(parameter.shape) for s in shapes.values()):
            raise UsageError(f"optimizer state of {name} does not fit: {shapes}, expected {keys}")
        optimizer.state[name] = {
            key: stored[key].detach().to(self.device, torch.float32, copy=True).contiguous() for key in keys
        }

    def _make_evaluator(self, program: StageProgram) -> Executor:
        trained = {n for n in program.parameters if n not in self.program.parameters}
        trained |= {
            n
            for n in program.buffers
            if n not in self.program.buffers and n in self._states and self._states[n].mutated
        }
        if trained:
            raise PlanError(
                f"stage {program.stage} evaluates with {sorted(trained)[:3]}, which another stage trains; "
                "cut the evaluation DAG where the training DAG is cut"
            )
        evaluator = Executor(
            program, self.device, self.training.precision, self.training.seed, differentiate=False
        )
        evaluator.load(self._values)
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
        names = (*_leaf_names(program), *program.inputs)
        if any(name not in self._states for name in names):
            return IndexRanges({}, {}, {})
        metas = {name: self._states[name].meta for name in names}
        if program.rows:
            metas |= inputs_at({name: metas[name] for name in program.inputs}, program.rows)
        return index_ranges(program, Shapes(program, metas, {}))

    def _taken(self, received: Mapping[int, Tensor], ranges: IndexRanges) -> dict[int, Tensor]:
        """Other stages' values on this device, after a look at what an op will index by. UnusableValue."""
        for op, bounds in ranges.received.items():
            if (why := out_of_range(received[op], bounds)) is not None:
                raise UnusableValue(op, why)
        return {op: self._moved(sound_bools(value)) for op, value in received.items()}

    def _moved(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def _take_loss(self, out: dict[int, Tensor], program: StageProgram, micro: int) -> None:
        if program.loss is None:
            return
        self._losses[micro] = out[program.loss]
        if program.weight is not None:
            self._weights[micro] = out.pop(program.weight)
        if all(p.op != program.loss for p in program.produced):
            del out[program.loss]

    def _step_losses(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Losses by micro-batch, and their weights where the losses are sums."""
        divisor = self.training.n_micro if self.program.weight is None else 1
        losses = tuple(float(self._losses[micro]) / divisor for micro in sorted(self._losses))
        return losses, tuple(counted(self._weights[micro]) for micro in sorted(self._weights))

    def _forget(self) -> None:
        self._executor.reset()
        self._executor.zero_gradients()
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._losses.clear()
        self._weights.clear()
        self._totals.clear()
        self._rollback = {}


def _blocks(training: TrainingSpec, actions: Sequence[Action]) -> Mapping[int, range]:
    """Return the blocks of micro-batches of these actions, by number."""
    micros = [action.micro for action in actions] or [0, training.n_micro - 1]
    span = range(min(micros), max(micros) + 1)
    if (len(span), training.blocks) == (training.n_micro, 1):
        return {0: span}
    return own_blocks(training.n_micro, training.blocks, (span.start, span.stop))


def counted(weight: Tensor) -> float:
    """Return a micro-batch's weight; JobFailed for one that is no count."""
    found = float(weight)
    if not (math.isfinite(found) and found >= 0.0):
        raise JobFailed(f"the model returned a weight of {found}; return how much the loss sums over, from 0")
    return found


def _leaf_names(program: StageProgram) -> set[str]:
    return {*program.parameters, *program.buffers, *program.constants}


def _produced_only(out: dict[int, Tensor], program: StageProgram) -> dict[int, Tensor]:
    return {p.op: out[p.op] for p in program.produced}


def cpu_copies(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return copies on the CPU, contiguous."""
    return {
        name: {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in found.items()}
        for name, found in tensors.items()
    }


class Lent:
    """Loans of a stage's tensors that another thread reads: nothing changes them until it has. One thread
    lends and waits, any returns."""

    def __init__(self) -> None:
        self._loans: list[threading.Event] = []

    def __bool__(self) -> bool:
        return bool(self._loans)

    def lend(self) -> Callable[[], None]:
        """Return what is to be called once the tensors have been read."""
        self._loans.append(threading.Event())
        return self._loans[-1].set

    def wait(self, waiting: Callable[[], None]) -> None:
        """Return once all were read; ``waiting`` is called now and then, as a disk may be slow."""
        while self._loans:
            while not self._loans[0].wait(LENT_POLL_S):
                waiting()
            del self._loans[0]
