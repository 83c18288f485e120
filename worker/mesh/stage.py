"""A stage that several processes compute together, each its part: the same calls in the same order.

The leader's is a ``Stage`` to whoever runs it: it takes whole tensors and returns them. Each call that the
others have a part in goes to them first (``MeshWork``); then its tensors are shared out, and every process
makes the call on what it has.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.errors import AtollError
from atoll.execute import DTYPES
from atoll.mesh.calls import parts_of, shards_of, stored_whole
from atoll.mesh.layout import Inside, Lent, Split
from atoll.microbatch import Action, Work
from protos import atoll_compute_pb2 as pb
from worker.mesh.handing import as_bytes
from worker.mesh.share import ProcessShare, metas_of
from worker.stage.piece import Keeps
from worker.stage.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from atoll.held_out import Figures
    from atoll.mesh.group import Processes
    from atoll.mesh.layout import Layout
    from atoll.opdag import TensorMeta
    from atoll.program import StageProgram
    from worker.mesh.handing import Handing
    from worker.stage.assignment import Assignment
    from worker.stage.reports import StageReport

    Tell = Callable[[pb.MeshWork], None]
    Exchanges = Callable[[], AbstractContextManager[object]]


class MeshBroken(AtollError):
    """A process of the mesh has failed in the midst of a call: the others cannot go on with the stage."""


class MeshStage(Stage):
    """One process's part of an assignment's stage. ``tell`` has the others make a call, None in those."""

    def __init__(
        self,
        assignment: Assignment,
        tensors: Mapping[str, Mapping[str, Tensor]],
        device: torch.device,
        processes: Processes,
        tell: Tell | None,
        scratch: Path,
        exchanges: Exchanges = nullcontext,
        handing: Handing | None = None,
    ) -> None:
        """``scratch``: folder for whole tensors on their way to the store; ``exchanges`` is around what moves
        between processes beside ops. ``handing``: where others cannot read the leader's files."""
        self._processes, self._tell, self._scratch = processes, tell, scratch
        self._exchanges = exchanges
        self._broken = self._within = False
        training, states = assignment.own_training, assignment.states
        inside = inside_of(assignment)
        self._whole = assignment.pieces
        self.shares = ProcessShare(self._whole, training, states, processes, inside)
        if handing is None:
            own: Mapping[str, Mapping[str, Tensor]] = {
                name: self.shares.part(name, given) for name, given in tensors.items()
            }
        else:
            with exchanges():
                own = handing.parts(self.shares, tensors)
        super().__init__(
            self.shares.pieces,
            training,
            own,
            device,
            states=self.shares.states,
            keeps=Keeps(assignment.keeping, scratch),
            actions=assignment.plan.actions(assignment.rank),
            share=self.shares,
        )
        self._whole_states = states

    @property
    def broken(self) -> bool:
        """True where a call has failed in the midst: the processes may wait for each other for ever."""
        return self._broken

    # ---------------------------------------------------------------- the leader's calls

    def share(self, actions: Sequence[Action]) -> None:
        micros = [action.micro for action in actions]
        with self._together("share", step=min(micros, default=0), micro=max(micros, default=0)):
            super().share(actions)

    def begin_step(self, step: int) -> None:
        with self._together("begin_step", step=step):
            super().begin_step(step)

    def forward(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor], piece: int = 0
    ) -> dict[int, Tensor]:
        self.pieces[piece].check(received)
        with self._together("forward", micro=micro, piece=piece):
            return self._forward(micro, inputs, received, piece)

    def _forward(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor], piece: int
    ) -> dict[int, Tensor]:
        program = self.pieces[piece].program
        given = self._given(program, inputs, received)
        return self._collected(program, super().forward(micro, *given, piece))

    def backward(
        self, micro: int, grads: Mapping[int, Tensor | None], piece: int = 0
    ) -> dict[int, Tensor | None]:
        there = sorted(op for op, gradient in grads.items() if gradient is not None)
        with self._together("backward", micro=micro, piece=piece, ops=there):
            return self._backward(micro, grads, there, piece)

    def _backward(
        self, micro: int, grads: Mapping[int, Tensor | None], there: Sequence[int], piece: int
    ) -> dict[int, Tensor | None]:
        program = self.pieces[piece].program
        layouts, metas = self.shares.shared(program).layouts, self._metas(program)
        own: dict[int, Tensor | None] = {op: None for op, _ in self._gradient_ops(program)}
        for op in there:
            own[op] = self._shared_out(grads.get(op), metas[op], layouts.get(op))
        answers = super().backward(micro, own, piece)
        return {
            op: None if value is None else self._collect(value, layouts.get(op))
            for op, value in answers.items()
        }

    def evaluate_micro(
        self,
        micro: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[int, Tensor],
        *,
        tail: bool = False,
        piece: int = 0,
    ) -> dict[int, Tensor]:
        with self._together("evaluate_micro", micro=micro, piece=piece, tail=tail):
            return self._evaluate(micro, inputs, received, tail, piece)

    def _evaluate(
        self, micro: int, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor], tail: bool, piece: int
    ) -> dict[int, Tensor]:
        program = self.shares.pieces[piece].evaluation
        if program is None:
            return {}
        program = program.last or program if tail else program
        given = self._given(program, inputs, received)
        return self._collected(program, super().evaluate_micro(micro, *given, tail=tail, piece=piece))

    def held_out_figures(self) -> Figures | None:
        with self._together("held_out_figures"):
            return super().held_out_figures()

    def parts(self, name: str) -> Mapping[int, Tensor | None]:
        if name not in self.shares.stored and name not in self.shares.summed:
            return self._own_parts(name)
        with self._together("parts", name=name):
            return self._whole_parts(name)

    def _whole_parts(self, name: str) -> dict[int, Tensor | None]:
        """The parts of a gradient, whole at the leader."""
        join = self._summed if name in self.shares.summed else partial(self._whole_of, name)
        return {label: None if part is None else join(part) for label, part in self._own_parts(name).items()}

    def _summed(self, part: Tensor) -> Tensor:
        with self._exchanges():
            return self._processes.sum(part)

    def set_total(self, name: str, total: Tensor | None) -> None:
        with self._together("set_total", name=name, labels=() if total is None else (1,)):
            super().set_total(name, self._total_part(name, total, total is not None))

    def _total_part(self, name: str, total: Tensor | None, there: bool) -> Tensor | None:
        if not there:
            return None
        meta, stored = self._whole_states[name].meta, self.shares.stored.get(name)
        if stored is None or isinstance(stored, Split):
            return self._shared_out(total, meta, stored)
        shards = None
        if total is not None:
            whole = total.to(self.device, DTYPES[meta.dtype]).reshape(meta.shape)
            shards = shards_of(whole, self._processes.size)
        own = torch.empty(
            stored.local(meta.shape, self._processes.size), dtype=DTYPES[meta.dtype], device=self.device
        )
        return self._scattered(None if shards is None else tuple(shards), own)

    def finish_step(self) -> StageReport:
        if self._tell is not None:
            tied = {tied.name for piece in self.pieces for tied in piece.program.tied}
            for name in sorted(tied & set(self._first) & set(self.trainable) - set(self._totals)):
                self.set_total(name, self.total(name))  # sums of tied parameters are the leader's alone
        with self._together("finish_step"):
            return self._finish()

    def _finish(self) -> StageReport:
        for name in self.trainable:
            if name in self.shares.summed and name not in self._totals:
                total = self.total(name)
                super().set_total(name, None if total is None else self._summed(total))
        return super().finish_step()

    def _joined_norms(self, norms: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        stored = [name in self.shares.stored for name in self.norm_names]
        apart = torch.tensor(stored, device=norms.device)
        with self._exchanges():
            squares = self._processes.sum(torch.where(apart, norms * norms, 0.0))
            sums = self._processes.sum(torch.where(apart, bits, 0))
        return torch.where(apart, squares.sqrt(), norms), torch.where(apart, sums, bits)

    def apply(self, gradient_scale: float = 1.0) -> None:
        with self._together("apply", scale=gradient_scale):
            super().apply(gradient_scale)

    def discard(self) -> None:
        if self._broken:
            return
        with self._together("discard"):
            super().discard()

    def watch_parts(self, notice: Callable[[str, int], None]) -> None:
        """Nothing: a part of a gradient is whole where all processes have computed theirs."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As ``Stage.state``, tensors that are stored in parts as copies that lie in files, not in memory."""
        with self._together("state"):
            return self._state()

    def _state(self) -> dict[str, dict[str, Tensor]]:
        found = super().state()
        for name in self.shares.stored:
            if name in found:
                own = tuple(self._values[name].shape)
                found[name] = {
                    key: self._whole_of(name, tensor, apart=True) if tuple(tensor.shape) == own else tensor
                    for key, tensor in found[name].items()
                }
        return found

    # ---------------------------------------------------------------- a follower's

    def follow(self, work: pb.MeshWork) -> None:
        """Make a call of the leader's. UsageError for one that there is not."""
        match work.call:
            case "share":
                super().share([Action(Work.FORWARD, micro) for micro in (work.step, work.micro)])
            case "begin_step":
                super().begin_step(work.step)
            case "forward":
                self._forward(work.micro, {}, {}, work.piece)
            case "backward":
                self._backward(work.micro, {}, tuple(work.ops), work.piece)
            case "evaluate_micro":
                self._evaluate(work.micro, {}, {}, work.tail, work.piece)
            case "parts":
                self._whole_parts(work.name)
            case "set_total":
                super().set_total(work.name, self._total_part(work.name, None, bool(work.labels)))
            case "apply":
                super().apply(work.scale)
            case "state":
                self._state()
            case "finish_step":
                self._finish()
            case "held_out_figures" | "discard":
                getattr(super(), work.call)()
            case _:
                raise AtollError(f"no call of a stage: {work.call[:40]!r}")

    # ---------------------------------------------------------------- between processes

    @contextmanager
    def _together(self, call: str, **fields: object) -> Iterator[None]:
        """Have the followers make the call that is made within; where it fails, the mesh cannot go on."""
        if self._tell is None or self._within:
            yield
            return
        if self._broken:
            raise MeshBroken("a process of this mesh failed during a call; the stage is loaded again")
        self._within = True
        try:
            self._tell(pb.MeshWork(call=call, **fields))  # type: ignore[arg-type]
            yield
        except BaseException:
            self._broken = True
            raise
        finally:
            self._within = False

    def _metas(self, program: StageProgram) -> dict[int, TensorMeta]:
        """Shapes of a program's values for all processes together."""
        whole, _ = self.shares.whole(program)
        return {r.op: r.meta for r in whole.received} | {op: node.outputs[0] for op, node in whole.ops}

    @staticmethod
    def _gradient_ops(program: StageProgram) -> list[tuple[int, bool]]:
        """Values whose gradients come from other pieces."""
        found = [(p.op, True) for p in program.produced if p.requires_grad]
        return found + [
            (r.op, False) for r in program.received if r.requires_grad and r.grad_from is not None
        ]

    def _given(
        self, program: StageProgram, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor]
    ) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """This process's part of what a forward takes; the leader has all of it."""
        whole, states = self.shares.whole(program)
        shared, metas = self.shares.shared(program), metas_of(whole, states)
        given = {
            name: self._shared_out(inputs.get(name), metas[name], shared.inputs.get(name))
            for name in whole.inputs
        }
        values = {
            r.op: self._shared_out(received.get(r.op), r.meta, shared.layouts.get(r.op))
            for r in whole.received
        }
        return given, values

    def _shared_out(self, value: Tensor | None, meta: TensorMeta, layout: Layout) -> Tensor:
        """Every process's part of a value of the leader's."""
        dtype = DTYPES[meta.dtype]
        if self._tell is not None and value is None:
            raise AtollError(f"a value of {meta.shape} that is not there")
        whole = None if value is None else value.to(self.device, dtype).reshape(meta.shape)
        if not isinstance(layout, Split):
            own = torch.empty(meta.shape, dtype=dtype, device=self.device) if whole is None else whole.clone()
            with self._exchanges():
                self._processes.broadcast(as_bytes(own))
            return own
        size = self._processes.size
        own = torch.empty(layout.local(meta.shape, size), dtype=dtype, device=self.device)
        return self._scattered(None if whole is None else parts_of(whole, layout, size), own)

    def _scattered(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        given = None if parts is None else [as_bytes(part.contiguous()) for part in parts]
        with self._exchanges():
            self._processes.scatter(given, as_bytes(own))
        return own

    def _collected(self, program: StageProgram, out: Mapping[int, Tensor]) -> dict[int, Tensor]:
        layouts = self.shares.shared(program).layouts
        return {op: self._collect(value, layouts.get(op)) for op, value in sorted(out.items())}

    def _collect(self, value: Tensor, layout: Layout) -> Tensor:
        """The whole of a value at the leader; elsewhere what there is."""
        if layout is None or isinstance(layout, Lent):
            return value
        own = value.detach().contiguous()
        parts = self._collected_parts(own)
        if parts is None:
            return own
        return stored_whole(parts, layout) if isinstance(layout, Split) else parts.sum(0, dtype=own.dtype)

    def _collected_parts(self, own: Tensor) -> Tensor | None:
        with self._exchanges():
            found = self._processes.collect(as_bytes(own))
        return None if found is None else found.view(own.dtype).view(self._processes.size, *own.shape)

    def _whole_of(self, name: str, part: Tensor, *, apart: bool = False) -> Tensor:
        """The whole of a parameter's tensor at the leader; ``apart``: in a file of its own."""
        own = part.detach().contiguous()
        parts = self._collected_parts(own)
        if parts is None:
            return own
        whole = stored_whole(parts, self.shares.stored[name])
        return self._in_file(whole) if apart else whole

    def _in_file(self, whole: Tensor) -> Tensor:
        """The tensor in a file without a name, which the system keeps in memory as long as there is room."""
        path = self._scratch / f"whole-{id(whole)}"
        kept = torch.from_file(str(path), shared=True, size=whole.numel(), dtype=whole.dtype)
        path.unlink()
        return kept.copy_(whole.reshape(-1).cpu()).view(whole.shape)


def inside_of(assignment: Assignment) -> Inside:
    """Return the inside plan of a mesh's stage; shards, which need the least memory, where there is none."""
    named = assignment.pipeline.stages[assignment.stage].inside
    return Inside(named) if named else Inside.SHARDS
