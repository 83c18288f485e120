"""One stage of a job: its pieces, its share of the optimizer, and the step's bookkeeping.

A step is begin_step, the plan's forwards and backwards, the folding of tied parameters,
finish_step, then either apply (commit) or discard, which leaves no trace of the step.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.block_sums import fold
from atoll.errors import PlanError, UsageError
from atoll.job import stepwise_groups
from atoll.microbatch import own_blocks
from atoll.ops import check_node
from atoll.program import PiecePrograms
from compressors.moments import restored, round_in_place, rounded
from worker.elsewhere.states import states_elsewhere
from worker.exchange.kept import KeptState
from worker.stage.digests import norms_and_digest
from worker.stage.optimizers import StageOptimizer, make_optimizer, state_dtype
from worker.stage.piece import Held, Keeps, StagePiece, leaf_names
from worker.stage.reports import StageReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from atoll.execute import Executor
    from atoll.held_out import Figures
    from atoll.job import TrainingSpec
    from atoll.microbatch import Action
    from atoll.opdag import StateMeta
    from atoll.program import StageProgram
    from worker.stage.piece import StageShare

LENT_POLL_S = 0.25
MAX_OUTPUT_BYTES = 1 << 35  # of one op; a program that declares more is refused


class Stage:
    """Pieces of a pipeline with their tensors, ready to train; ``programs`` of each. Not thread-safe.

    A tensor of several pieces is held once, and a trained parameter stepped once; each use has a gradient
    of its own. ``tensors[name]["value"]`` is a parameter, buffer or constant; further keys are optimizer
    state (``atoll.optimizers.state_shapes``). ``states`` says which parameters were frozen, which are
    hidden matrices, and which dtype an input has; without it every parameter trains and inputs are taken as
    they come. ``actions`` are those of a step: which micro-batches, all of them unless given, and whether
    backwards leave weights' gradients to ``weight_gradients``. Actions on as many micro-batches as the
    training has, whatever their numbers, are all of a step: a peer's own share where it takes steps by
    itself. ``share``: this process's part of a stage of several; then all else is of that part. ``scratch``:
    folder for what ``keeping`` puts on a disk.
    UnsupportedOp for a node that no honest capture makes, UsageError for missing or misshapen
    tensors, PlanError when an evaluation program needs state that another stage trains.
    """

    def __init__(
        self,
        programs: Sequence[PiecePrograms],
        training: TrainingSpec,
        tensors: Mapping[str, Mapping[str, Tensor]],
        device: torch.device | str = "cpu",
        *,
        states: Mapping[str, StateMeta] | None = None,
        keeps: Keeps | None = None,
        actions: Sequence[Action] = (),
        share: StageShare | None = None,
    ) -> None:
        for each in (every := every_program(programs)):
            for _, node in each.ops:
                check_node(node, MAX_OUTPUT_BYTES)
        self.training = training
        self.device = torch.device(device)
        self._states = states or {}
        self._parameter_names = tuple(dict.fromkeys(n for p in programs for n in p.train.parameters))
        received = [name for p in programs for r in p.train.received for name in r.weights]
        groups = stepwise_groups((*self._parameter_names, *received), training.optimizer)
        self.frozen = frozenset(
            name
            for name in self._parameter_names
            if groups[name].frozen or (name in self._states and not self._states[name].requires_grad)
        )
        _check_evaluation(programs, self._states)
        self._values = self._load(tensors, every)
        self.blocks = _blocks(training, actions)
        keeps = keeps or Keeps()
        frozen = self.frozen | {name for name in received if groups[name].frozen}
        held = Held(self._values, frozen, self._states, self.device, share)
        own = [[action for action in actions if action.piece == at] for at in range(len(programs))]
        self.pieces = tuple(
            StagePiece(both, training, held, keeps, turns, self.blocks)
            for both, turns in zip(programs, own, strict=True)
        )
        self.trainable = tuple(dict.fromkeys(n for piece in self.pieces for n in piece.trainable))
        # The piece with the first use of all, of parameters whose first holder is here. The other holders of
        # frozen ones are sent a total of nothing.
        held_by = ((piece, n) for piece in self.pieces for n in piece.program.parameters)
        self._first = {n: piece for piece, n in held_by if n not in piece.followed}
        self._followed = frozenset(self.trainable) - set(self._first)
        self._optimizer = self._make_optimizer(tensors, keeps)
        self._step = 0
        self._rounded = False  # moments are as a checkpoint in 8 bits gives them back
        self._totals: dict[str, Tensor | None] = {}
        self.kept = KeptState()  # of what other replicas were not told, in units of gradients

    @property
    def program(self) -> StageProgram:
        """The training program of the first piece."""
        return self.pieces[0].program

    @property
    def executors(self) -> tuple[Executor, ...]:
        """What computes, piece by piece: the training program's, then the evaluation programs'."""
        return tuple(executor for piece in self.pieces for executor in piece.executors)

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Buffers that training writes, themselves."""
        executors = [piece.executor for piece in self.pieces]
        return {name: e.buffers[name] for e in executors for name in e.mutated_buffers}

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Parameters of StageReport.square_norms: in order of first use, a tied one only at its
        first holder, so that each is in the norms of one stage whatever the cut."""
        return tuple(n for piece in self.pieces for n in piece.trainable if n not in piece.followed)

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Parameters that the optimizer steps, in the program's order; gradients after ``finish_step``."""
        return self._parameters

    def share(self, actions: Sequence[Action]) -> None:
        """Take these actions for those of a step from now on: other micro-batches, in whole blocks, with the
        step under way discarded. UsageError for others."""
        self.discard()
        self.blocks = _blocks(self.training, actions)
        for piece in self.pieces:
            piece.sums.share(self.blocks)

    def begin_step(self, step: int) -> None:
        """Open ``step``: no gradients, no micro-batches in flight, buffers remembered. A step that
        was begun and neither applied nor discarded is discarded."""
        self.discard()
        self._step = step
        for piece in self.pieces:
            piece.begin_step(step)

    def forward(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor], piece: int = 0
    ) -> dict[int, Tensor]:
        """Forward of one micro-batch on a piece; returns the values that later pieces use, detached."""
        return self.pieces[piece].forward(micro, inputs, received)

    def backward(
        self, micro: int, grads: Mapping[int, Tensor | None], piece: int = 0
    ) -> dict[int, Tensor | None]:
        """Backward of one micro-batch on a piece; None, given or returned, is the zero-gradient mark."""
        return self.pieces[piece].backward(micro, grads)

    @property
    def owing(self) -> tuple[int, int] | None:
        """(piece, micro-batch) whose weight gradients are to be taken next; None where none are owed."""
        found = ((at, piece.owed) for at, piece in enumerate(self.pieces))
        return min(
            ((at, micro) for at, micro in found if micro is not None), key=lambda f: f[1], default=None
        )

    def weight_gradients(self, piece: int = 0) -> None:
        """Take those of one op's weights, the first that a piece owes; nothing when none are."""
        self.pieces[piece].weight_gradients()

    def tied_partial(self, name: str, block: int, later: Tensor | None, piece: int = 0) -> Tensor | None:
        """Later holders' partial sum plus a piece's own uses of a tied parameter in a block; the first
        holder's is the block's sum. Call it for blocks ascending."""
        held = self.pieces[piece]
        partial = held.sums.partial(name, block, None if later is None else later.to(self.device))
        if name not in held.followed:
            held.sums.add(name, block, partial)
        return partial

    def watch_parts(self, notice: Callable[[str, int], None]) -> None:
        """Have ``notice(parameter, block)`` called within backwards when a part is whole, on the thread that
        computes; nowhere but on a CPU, where that is so."""
        if self.device.type == "cpu":
            for piece in self.pieces:
                piece.sums.watch(notice)

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """Blocks of micro-batches whose gradients are summed, but for tied parameters."""
        return min((piece.sums.whole for piece in self.pieces), key=len)

    def parts(self, name: str) -> Mapping[int, Tensor | None]:
        """Return sums of a parameter of ``norm_names`` by block, ascending: what replicas join by adding
        them in this order. Where this stage's blocks begin the step, one under 0 for all of them."""
        return self._own_parts(name)

    def _own_parts(self, name: str) -> Mapping[int, Tensor | None]:
        return self._first[name].sums.parts(name)

    def total(self, name: str) -> Tensor | None:
        """Return a parameter's whole gradient: what an exchange has set, else the sum of ``parts``."""
        return self._totals[name] if name in self._totals else fold(self._own_parts(name).values())

    def set_total(self, name: str, total: Tensor | None) -> None:
        """Take a parameter's whole gradient, as its first holder or an exchange computed it."""
        # The fused optimizers read gradients flat, in the parameters' own order.
        self._totals[name] = None if total is None else total.to(self.device).contiguous()

    def finish_step(self) -> StageReport:
        """Put the step's gradients in place and report; call after every set_total. A parameter without one
        has its gradient from this stage alone."""
        for name in self.trainable:
            self._parameters[name].grad = self._totals[name] if name in self._followed else self.total(name)
        gradients = [self._parameters[name].grad for name in self.norm_names]
        norms, digest = norms_and_digest(gradients, self.device, self._joined_norms)
        squares = tuple(norm**2 for norm in norms)
        computed = (piece.step_losses() for piece in self.pieces if piece.losses)
        losses, weights = next(computed, ((), ()))
        return StageReport(losses, squares, all(map(math.isfinite, squares)), digest, weights)

    def _joined_norms(self, norms: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return norms and sums of bits of the whole gradients: all of them are here."""
        return norms, bits

    def apply(self, gradient_scale: float = 1.0) -> None:
        """Commit: scale the gradients, take the optimizer's step, forget the gradients. A scale of 0 takes no
        step at all: nothing was counted (``atoll.step_loss``)."""
        if self._optimizer is not None and gradient_scale != 0.0:
            if gradient_scale != 1.0:
                self._scale(gradient_scale)
            self._optimizer.step(self.training.learning_rate(self._step))
            self._rounded = False
        if self._optimizer is not None and self.training.rounds_after(self._step):
            for name, state in self._optimizer.state.items():
                round_in_place(state)
                self._optimizer.put_away(name)
            self._rounded = True
        self.kept.commit()
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
        for piece in self.pieces:
            piece.undo()
        self._forget()

    def evaluate_micro(
        self,
        micro: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[int, Tensor],
        *,
        tail: bool = False,
        piece: int = 0,
    ) -> dict[int, Tensor]:
        """Forward of one held-out micro-batch through the evaluation program; ``tail``: the last, with fewer
        rows."""
        return self.pieces[piece].evaluate_micro(micro, inputs, received, tail=tail)

    def held_out_figures(self) -> Figures | None:
        """Means over the rows evaluated since the last call; None without any, and where others have them."""
        found = [piece.held_out_figures() for piece in self.pieces]
        return next((figures for figures in found if figures is not None), None)

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """CPU copies of parameters, their optimizer state and buffers, as safetensors takes them."""
        return cpu_copies(self.state())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameters, their optimizer state and buffers: themselves, which the next ``apply`` changes, but
        copies of the buffers that training writes."""
        written = self.written_buffers
        buffers = dict.fromkeys(n for piece in self.pieces for n in piece.program.buffers)
        followed = {n for piece in self.pieces for n in piece.followed} - set(self._first)
        found = {
            name: {"value": self._values[name].clone() if name in written else self._values[name]}
            for name in (*self._parameter_names, *buffers)
            if name not in followed
        }
        if self._optimizer is not None:
            for name in self.norm_names:
                state = self._optimizer.state.get(name, {})
                found[name] |= rounded(state) if self._rounded else state
        return found

    def _load(
        self, tensors: Mapping[str, Mapping[str, Tensor]], programs: Sequence[StageProgram]
    ) -> dict[str, Tensor]:
        names = leaf_names(programs)
        missing = sorted(name for name in names if "value" not in tensors.get(name, {}))
        if missing:
            raise UsageError(f"stage {programs[0].stage} lacks {len(missing)} tensors: {missing[:5]}")
        values = {}
        for name in names:
            value = tensors[name]["value"].detach()
            expected = self._states.get(name)
            if expected is not None and tuple(value.shape) != expected.meta.shape:
                raise UsageError(f"{name} has shape {tuple(value.shape)}, the model {expected.meta.shape}")
            # Own storage: the caller's may be a read-only file, or shared with another stage.
            values[name] = value.to(self.device, copy=True).contiguous()
        return values

    def _make_optimizer(
        self, tensors: Mapping[str, Mapping[str, Tensor]], keeps: Keeps
    ) -> StageOptimizer | None:
        spec = self.training.optimizer
        self._parameters = {n: torch.nn.Parameter(self._values[n]) for n in self.trainable}
        elsewhere = states_elsewhere(keeps.keeping.state_on, keeps.folder, self.device)
        optimizer = make_optimizer(self._parameters, spec, self._states, elsewhere)
        if optimizer is None:
            return None
        for name in self.trainable:
            self._restore(optimizer, name, tensors[name])
        optimizer.reserve()
        return optimizer

    def _restore(self, optimizer: StageOptimizer, name: str, stored: Mapping[str, Tensor]) -> None:
        expected, own = optimizer.shapes(name), self._values[name]
        stored = restored(stored, tuple(own.shape))
        shapes = {key: tuple(stored[key].shape) for key in expected if key in stored}
        if not shapes:
            return
        if shapes != expected:
            raise UsageError(f"optimizer state of {name} does not fit: {shapes}, expected {expected}")
        optimizer.state[name] = {
            key: stored[key].detach().to(self.device, state_dtype(key, own), copy=True).contiguous()
            for key in expected
        }
        optimizer.put_away(name)

    def _forget(self) -> None:
        for piece in self.pieces:
            piece.forget()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._totals.clear()
        self.kept.discard()


def every_program(programs: Sequence[PiecePrograms]) -> list[StageProgram]:
    """The programs of all pieces, with those of a last held-out micro-batch of fewer rows."""
    found = [each for both in programs for each in both if each is not None]
    return found + [each.last for each in found if each.last is not None]


def _check_evaluation(programs: Sequence[PiecePrograms], states: Mapping[str, StateMeta]) -> None:
    """Raise PlanError where an evaluation reads state that another stage trains."""
    parameters = {name for both in programs for name in both.train.parameters}
    buffers = {name for both in programs for name in both.train.buffers}
    for number, both in ((p.train.stage, p.evaluation) for p in programs):
        if both is None:
            continue
        trained = {name for name in both.parameters if name not in parameters}
        trained |= {n for n in both.buffers if n not in buffers and n in states and states[n].mutated}
        if trained:
            raise PlanError(
                f"stage {number} evaluates with {sorted(trained)[:3]}, which another stage trains; "
                "cut the evaluation DAG where the training DAG is cut"
            )


def _blocks(training: TrainingSpec, actions: Sequence[Action]) -> Mapping[int, range]:
    """Return the blocks of micro-batches of these actions, by number."""
    micros = [action.micro for action in actions] or [0, training.n_micro - 1]
    span = range(min(micros), max(micros) + 1)
    if (len(span), training.blocks) == (training.n_micro, 1):
        return {0: span}
    return own_blocks(training.n_micro, training.blocks, (span.start, span.stop))


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
