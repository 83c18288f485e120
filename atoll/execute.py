"""Runs a StageProgram on torch tensors: the only interpreter of an OpDag.

Each node is compiled once into a call on slots of a list, so that a run costs a list copy and
one indexed call per op. Autograd across stages follows DESIGN section 3: sums over the uses of a
tensor or parameter are taken in descending op order whatever the cut, because torch's engine
runs backward nodes in descending creation order and

- a received value enters through its own graph node, so that the gradient folded by later
  stages joins it as a root, before this stage's own uses;
- each (parameter, op) use is a leaf of its own, summed in descending op order at the step's end;
- an op that returned its argument unchanged (`to`, `contiguous`, `dropout` with p = 0) gets a
  node of its own, or two names of one tensor would fold in an order that depends on the cut.
"""

from __future__ import annotations

import struct
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.block_sums import fold
from atoll.deferred import Debt, by_rows, deferring, has_rows
from atoll.effects import effects
from atoll.errors import UsageError
from atoll.job import EXACTLY, Keeping, Precision, Recompute
from atoll.opdag import Autocast, LeafRef, Source, TorchLiteral, leaf_refs
from atoll.ops import weights_may_wait
from atoll.program import given_by_others
from atoll.repeats import Repeats, repeatable
from atoll.saved import Saved, context_of, largest_of
from atoll.slots import Compiler, segments
from atoll.standing import standing
from atoll.value_guards import index_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from atoll.indices import Range
    from atoll.mesh.calls import MeshCalls
    from atoll.opdag import OpNode
    from atoll.program import StageProgram
    from atoll.saved import Shelf
    from atoll.slots import Call, Segment, Step, Values

    Observer = Callable[[int, Any], None]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8",
        "bool", "complex64",
    )
}  # fmt: skip
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
BACKWARD = -1  # Executor.at while a micro-batch's backward runs
# The generators are the process's own: two stages in one process must not interleave
# "set the seed" and "draw".
_DRAWING = threading.Lock()


def _unwatched(at: int | None) -> None:
    """Nobody wants to know."""


def op_seed(seed: int, step: int, micro: int, op: int) -> int:
    """Generator seed in [0, 2^63) of a random op: a pure function of its four arguments."""
    key = struct.pack("<QQQQ", seed & (2**64 - 1), step, micro, op)
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


def torch_literal(literal: TorchLiteral, device: torch.device) -> object:
    """The torch object a literal names; UsageError for a name outside the tables."""
    tables: dict[str, Mapping[str, object]] = {
        "dtype": DTYPES,
        "layout": _LAYOUTS,
        "memory_format": _MEMORY_FORMATS,
        "device": {literal.name: device},
    }
    found = tables.get(literal.kind, {}).get(literal.name)
    if found is None:
        raise UsageError(f"unknown torch literal {literal.kind}={literal.name!r} in an op's arguments")
    return found


@dataclass(slots=True)
class _Micro:
    """Values that a micro-batch keeps from its forward for its backward."""

    step: int
    loss: Tensor | None = None
    roots: list[tuple[int, Tensor]] = field(default_factory=list)  # descending op order
    sink: dict[int, Tensor] = field(default_factory=dict)
    repeats: Repeats | None = None  # selective recomputation only
    # full recomputation only
    inputs: dict[str, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _Notes:
    """Record of how the running forward computed cheap results. Its ops refer to this, not to the executor,
    which would then be part of a reference cycle with its weights."""

    repeats: Repeats | None = None


def _noting(call: Call, needed: int, notes: _Notes) -> Call:
    def noting(*args: Any) -> Any:
        result = call(*args)
        known = [arg for arg in args[:needed] if isinstance(arg, Tensor) and arg.requires_grad]
        if notes.repeats is not None and len(known) == needed:
            notes.repeats.note(call, args, result)
        return result

    return noting


def _saving(call: Call, leaves: list[Tensor], notes: _Notes) -> Call:
    """``call``, whose weights and sizes those who pack what it saves look at."""
    context = context_of(leaves)

    def saving(*args: Any) -> Any:
        if isinstance(notes.repeats, Saved):
            notes.repeats.op = replace(context, largest=largest_of(args))
        return call(*args)

    return saving


def _noting_standing(call: Call, notes: _Notes) -> Call:
    def noting(*args: Any) -> Any:
        result = call(*args)
        if notes.repeats is not None and isinstance(result, Tensor):
            memory = result.untyped_storage()._cdata
            if all(not isinstance(arg, Tensor) or arg.untyped_storage()._cdata != memory for arg in args):
                notes.repeats.note(call, args, result)
        return result

    return noting


class _Boundary(torch.autograd.Function):
    """A received value's own graph node; its whole gradient lands in ``sink[op]``.

    Unlike ``leaf.grad`` the gradient keeps the memory layout it was computed in, which is the
    one that the producing op meets when nothing is cut.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, sink: dict[int, Tensor], op: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.op = sink, op
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None:
            ctx.sink[ctx.op] = grads[0]
        return None, None, None, None


class Executor:
    """Interpreter of a stage: its ops, its leaves, and the graphs of the micro-batches in flight.

    ``differentiate=False`` is for evaluation: no graph, no recompute. ``seed`` None draws from the
    process's generator as it stands, as a plain module would. ``keeping``: form in which a forward keeps what
    its backward reads, and what is run again. ``defer``: backwards leave weight gradients to
    ``weight_gradients``. ``shelves``: makes a place for what a micro-batch saves, where that is not to stay
    on the device. Not thread-safe.
    """

    def __init__(
        self,
        program: StageProgram,
        device: torch.device | str = "cpu",
        precision: Precision = Precision.FP32,
        seed: int | None = 0,
        *,
        keeping: Keeping = EXACTLY,
        differentiate: bool = True,
        defer: bool = False,
        shelves: Callable[[], Shelf] | None = None,
    ) -> None:
        self.program = program
        self.mesh: MeshCalls | None = None  # set before ``load`` where several processes share it
        self.device = torch.device(device)
        self._autocast = Autocast(True, "bfloat16") if precision is Precision.BF16 else None
        self._seed = seed
        self._differentiate = differentiate
        # What is left to the planner is decided in the plan; who runs without one keeps everything.
        self._recompute = keeping.recompute is Recompute.FULL and differentiate
        self._bits, self._shelves = keeping.bits, shelves
        self._packs = differentiate and (keeping.bits > 0 or shelves is not None)
        self._selective = keeping.selective and differentiate
        self._key = (0, 0)
        self._defer = defer and differentiate
        self._indices: Mapping[int, tuple[tuple[str, Range], ...]] = {}
        self._live: dict[int, _Micro] = {}
        self._fresh: tuple[int, _Micro] | None = None
        self._anchor = torch.zeros((), device=self.device, requires_grad=differentiate)
        self._debt = Debt(self._anchor, self._selective or self._packs)
        self._notes = _Notes()
        self._effects = effects(program)
        self.uses: dict[str, list[tuple[int, Tensor]]] = {}
        self.late: set[int] = set()  # ops that leave their weight gradients to be taken
        self.standing: frozenset[int] = frozenset()  # ops whose results no micro-batch keeps
        self._given: frozenset[int] = frozenset()  # of earlier stages, whose results are received
        self.buffers: dict[str, Tensor] = {}
        self._segments: tuple[Segment, ...] = ()
        self._template: Values = []
        self.at: int | None = None  # the op whose forward runs, or BACKWARD
        self.watch: Callable[[int | None], object] = _unwatched  # is called with ``at`` before an op begins
        self.failed_at: int | None = None  # the op that raised last

    def bound_indices(self, indices: Mapping[int, tuple[tuple[str, Range], ...]]) -> None:
        """Compare arguments, by op, with these bounds before the op runs on a GPU, from the next ``load`` on:
        there a bad index costs the process the device, where a CPU's kernel raises."""
        self._indices = indices if self.device.type == "cuda" else {}

    @property
    def mutated_buffers(self) -> tuple[str, ...]:
        """Names of buffers that the ops may write, in program order."""
        written = self._effects.leaves
        return tuple(n for n in self.program.buffers if LeafRef(Source.BUFFER, n) in written)

    def load(
        self,
        tensors: Mapping[str, Tensor],
        frozen: Collection[str] = (),
        observe: Observer | None = None,
    ) -> None:
        """Bind parameters, buffers and constants (already on the device, shared, not copied).

        Floating parameters outside ``frozen`` get one gradient leaf per use. ``observe(position, value)``
        sees every constant op's value, as ``forward``'s does the others'. UsageError when a tensor is
        missing.
        """
        program = self.program
        missing = [n for n in (*program.parameters, *program.buffers, *program.constants) if n not in tensors]
        if missing:
            raise UsageError(f"stage {program.stage} lacks {len(missing)} tensors: {missing[:5]}")
        self.reset()
        self.buffers = {name: tensors[name] for name in program.buffers}
        self.uses, self.late = {}, set()
        trained = {
            name
            for name in program.parameters
            if self._differentiate and name not in frozen and tensors[name].is_floating_point()
        }
        compiler = Compiler(program, self._effects.cached, _Host(self, tensors, trained))
        self._template, constants, steps = compiler.compile()
        self._input_slots = compiler.leaf_slots(Source.INPUT)
        self._buffer_slots = compiler.leaf_slots(Source.BUFFER)
        self._constant_slots = compiler.leaf_slots(Source.CONSTANT)
        self._op_slots = compiler.op_slots
        for sites in self.uses.values():
            sites.sort(key=lambda use: -use[0])
        nodes = dict(program.ops)
        constants, steps = self._on_mesh(constants, nodes), self._on_mesh(steps, nodes)
        constants, steps = self._looked_at(constants, nodes), self._looked_at(steps, nodes)
        self.standing = self._untrained(trained, frozen)
        if self._selective or self.standing:
            steps = self._noted(steps)
        steps = self._apart(steps, nodes)
        if self._packs:
            steps = [self._with_context(step, nodes[step.position], tensors) for step in steps]
        self._constants = segments(constants, nodes, self._autocast)
        self._segments = segments(steps, nodes, self._autocast)
        self._run(self._template, self._constants, grad=False, observe=observe)

    def reseed(self, seed: int | None) -> None:
        """Draw by another seed from the next forward on."""
        self._seed = seed

    def refresh(self) -> None:
        """Compute the constant ops again: after a buffer that no op writes was set from outside."""
        self._run(self._template, self._constants, grad=False)

    def forward(
        self,
        step: int,
        micro: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[int, Tensor],
        observe: Observer | None = None,
    ) -> dict[int, Tensor]:
        """Run one micro-batch; return the produced values, and the loss, its weight and metrics where they
        are computed, detached, by op position. ``observe(position, value)`` sees every op's value but those
        of constant ops, which ran at ``load``."""
        record = _Micro(step)
        if self._recompute:
            self._fresh = None
            record.inputs, record.received = dict(inputs), dict(received)
            record.buffers = {name: self.buffers[name].clone() for name in self.mutated_buffers}
        graph = self._forward(step, micro, inputs, received, {}, observe)
        out = {p.op: self._value(p.op).detach() for p in self.program.produced}
        if self.program.loss is not None:
            out[self.program.loss] = self._value(self.program.loss).detach()
        if self.program.weight is not None:
            out[self.program.weight] = self._value(self.program.weight).detach()
        out.update((op, self._value(op).detach()) for _, op in self.program.metrics)
        self._values: Values = []
        if self._recompute:
            self._live[micro], self._fresh = record, (micro, graph)
        elif self._differentiate:
            self._live[micro] = graph
        return out

    def bind(self, inputs: Mapping[str, Tensor], received: Mapping[int, Tensor]) -> Callable[[], Any]:
        """The first op as a call on these very tensors, in the caller's gradient mode: what a
        timing of that op repeats."""
        values = self._template.copy()
        for name, slot in self._input_slots.items():
            values[slot] = inputs[name]
        for op, value in received.items():
            values[self._op_slots[op]] = value
        segment = (self._segments or self._constants)[0]
        call, get, _, _ = segment.steps[0]
        setting = segment.autocast
        if setting is None:
            return lambda: call(*get(values))

        def under_autocast() -> Any:
            with self._autocast_mode(setting):
                return call(*get(values))

        return under_autocast

    def backward(
        self, micro: int, grads: Mapping[int, Tensor | None], loss_divisor: float = 1.0
    ) -> dict[int, Tensor | None]:
        """Backward of ``micro`` from loss / ``loss_divisor`` and the gradients of crossing values.

        ``grads[op]`` None marks a zero gradient, as does None in the answer, which has one entry
        for every received value that requires a gradient. KeyError when a gradient is absent.
        """
        graph = self._graph(micro)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if graph.loss is not None and graph.loss.requires_grad:
            with torch.enable_grad():
                roots.append(graph.loss / loss_divisor)
            gradients.append(None)
        for op, value in graph.roots:
            gradient = grads[op]
            if gradient is not None and value.requires_grad:
                roots.append(value)
                gradients.append(gradient)
        graph.roots, graph.loss = [], None
        if roots:
            with self._watched():
                self.at = BACKWARD
                self.watch(BACKWARD)
                torch.autograd.backward(roots, gradients)
        if graph.repeats is not None:
            graph.repeats.forget()
        return {r.op: graph.sink.get(r.op) for r in self.program.received if r.requires_grad}

    @property
    def owed(self) -> int | None:
        """The first micro-batch with weights whose gradients are still to be taken."""
        return self._debt.owed[0].micro if self._debt.owed else None

    def weight_gradients(self) -> None:
        """Take those of one op's weights, the first that are owed; nothing when none are."""
        if self._debt.owed:
            self._debt.owed.popleft().take()

    def gradient(self, name: str, later: Tensor | None = None) -> Tensor | None:
        """``later`` plus this stage's uses of a parameter in descending op order; None = zero.

        Without ``later`` the sum is taken in place on the last use's accumulator.
        """
        return fold((leaf.grad for _, leaf in self.uses.get(name, ())), later)

    def zero_gradients(self) -> None:
        """Drop every accumulator."""
        for sites in self.uses.values():
            for _, leaf in sites:
                leaf.grad = None

    def reset(self) -> None:
        """Drop the graphs of all micro-batches in flight."""
        self._live.clear()
        self._debt.owed.clear()
        self._fresh = None

    def _graph(self, micro: int) -> _Micro:
        """The micro-batch's graph, run again when only its inputs were kept."""
        record = self._live.pop(micro)
        fresh, self._fresh = self._fresh, None
        if not self._recompute:
            return record
        # Nothing ran since this micro-batch's forward: its graph is still the one at hand.
        if fresh is not None and fresh[0] == micro:
            return fresh[1]
        del fresh
        graph = self._forward(record.step, micro, record.inputs, record.received, record.buffers, None)
        self._values = []
        return graph

    def _forward(
        self,
        step: int,
        micro: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[int, Tensor],
        buffers: Mapping[str, Tensor],
        observe: Observer | None,
    ) -> _Micro:
        self._key = (step, micro)
        self._debt.micro = micro
        graph = _Micro(step)
        if self.mesh is not None:
            self.mesh.begin()
        values = self._values = self._template.copy()
        written = self._effects.leaves
        for name, slot in self._input_slots.items():
            copied = LeafRef(Source.INPUT, name) in written
            values[slot] = inputs[name].clone() if copied else inputs[name]
        for name, slot in self._constant_slots.items():
            if LeafRef(Source.CONSTANT, name) in written:
                values[slot] = values[slot].clone()
        for name, buffer in buffers.items():
            values[self._buffer_slots[name]] = buffer
        for r in self.program.received:
            value = received[r.op].detach()
            if r.requires_grad and self._differentiate:
                value = _Boundary.apply(self._anchor, value, graph.sink, r.op)  # type: ignore[no-untyped-call]
                if r.grad_from is not None:
                    graph.roots.append((r.op, value))
            values[self._op_slots[r.op]] = value
        # Who observes has hooks of its own, and autograd applies the innermost pair alone.
        with self._remembering(graph) if observe is None or self._selective or self._packs else nullcontext():
            self._run(values, self._segments, grad=self._differentiate, observe=observe)
        if self._differentiate:
            graph.roots.extend((p.op, self._value(p.op)) for p in self.program.produced if p.requires_grad)
            graph.roots.sort(key=lambda root: -root[0])
            graph.loss = None if self.program.loss is None else self._value(self.program.loss)
        return graph

    @contextmanager
    def _remembering(self, graph: _Micro) -> Iterator[None]:
        """The forward's ops keep how cheap results came about, in place of them."""
        notes = self._selective or self._packs or self.standing
        if not (notes or (self.mesh is not None and self.mesh.fetches)):
            yield
            return
        shelf = self._shelves() if self._shelves is not None else None
        weights = context_of([self._value(op) for op in self._given]).storages
        found = Saved(self.device, self._bits, shelf, weights) if self._packs else Repeats(self.device)
        graph.repeats = self._notes.repeats = found
        try:
            with graph.repeats.hooks():
                yield
        finally:
            self._notes.repeats = None
            graph.repeats.close()

    def _on_mesh(self, steps: list[Step], nodes: Mapping[int, OpNode]) -> list[Step]:
        """The steps with what this process does of them."""
        mesh = self.mesh
        if mesh is None:
            return steps
        return [
            replace(s, call=mesh.wrapped(s.position, nodes[s.position], s.call, self._notes)) for s in steps
        ]

    def _looked_at(self, steps: Iterable[Step], nodes: Mapping[int, OpNode]) -> list[Step]:
        """The steps, those that index by what the program computes looking at it first."""
        return [
            replace(step, call=index_guarded(nodes[step.position], step.call, self._indices[step.position]))
            if step.position in self._indices
            else step
            for step in steps
        ]

    def _untrained(self, trained: Collection[str], frozen: Collection[str]) -> frozenset[int]:
        """Positions of ops that read nothing but weights outside ``trained`` and what stays as it is."""
        if not self._differentiate:
            return frozenset()
        effects, self._given = self._effects, given_by_others(self.program, frozen)
        return standing(self.program.ops, effects.fixed(trained), effects.cached, effects.values, self._given)

    def _noted(self, steps: Iterable[Step]) -> list[Step]:
        """The steps, those whose results are computed again noting how they came about."""
        cheap = repeatable(self.program, self._effects.values) if self._selective else {}

        def noted(step: Step) -> Step:
            if step.position in self.standing:
                return replace(step, call=_noting_standing(step.call, self._notes))
            if step.position in cheap:
                return replace(step, call=_noting(step.call, cheap[step.position], self._notes))
            return step

        return [noted(step) for step in steps]

    def _apart(self, steps: Iterable[Step], nodes: Mapping[int, OpNode]) -> list[Step]:
        """The steps, whose weights wait where they can and tables have their gradients by rows."""
        leaves: dict[int, list[Tensor]] = {}
        for op, leaf in chain.from_iterable(self.uses.values()):
            leaves.setdefault(op, []).append(leaf)

        def compiled(step: Step) -> Step:
            node, own = nodes[step.position], tuple(leaves.get(step.position, ()))
            waits = len(own) > 0 and self._defer and weights_may_wait(node)
            if waits:
                self.late.add(step.position)
            if self.mesh is None and has_rows(node, own):
                return replace(step, call=by_rows(step.call, self._debt, later=waits))
            return replace(step, call=deferring(node, step.call, own, self._debt)) if waits else step

        return [compiled(step) for step in steps]

    def _with_context(self, step: Step, node: OpNode, tensors: Mapping[str, Tensor]) -> Step:
        """The step, which first tells what it reads."""
        leaves = [tensors[leaf.name] for leaf in leaf_refs(node) if leaf.source is not Source.INPUT]
        return replace(step, call=_saving(step.call, leaves, self._notes))

    def _value(self, op: int) -> Tensor:
        value: Tensor = self._values[self._op_slots[op]]
        return value

    def _run(
        self, values: Values, segments: Iterable[Segment], grad: bool, observe: Observer | None = None
    ) -> None:
        watch = self.watch
        for segment in segments:
            with ExitStack() as modes:
                modes.enter_context(self._watched())
                modes.enter_context(torch.set_grad_enabled(grad and segment.grad_enabled))
                modes.enter_context(self._autocast_mode(segment.autocast))
                for position, (call, get, out, dead) in zip(segment.positions, segment.steps, strict=True):
                    self.at = position
                    watch(position)
                    values[out] = call(*get(values))
                    if observe is not None:
                        observe(position, values[out])
                    for slot in dead:
                        values[slot] = None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed_at = self.at
            raise
        finally:
            self.at = None
            self.watch(None)

    def _autocast_mode(self, setting: Autocast | None) -> AbstractContextManager[object]:
        if setting is None:
            return nullcontext()
        # No cast cache: its hits depend on which ops share a stage.
        return torch.autocast(
            self.device.type, DTYPES[setting.dtype], enabled=setting.enabled, cache_enabled=False
        )


class _Host:
    """The executor as its compiled calls see it (``atoll.slots.Host``)."""

    def __init__(self, owner: Executor, tensors: Mapping[str, Tensor], trained: set[str]) -> None:
        self.owner = owner
        self.tensors = tensors
        self.trained = trained

    def own_leaf(self, leaf: LeafRef) -> bool:
        return leaf.source is Source.PARAMETER and leaf.name in self.trained

    def leaf_value(self, op: int, leaf: LeafRef) -> Tensor | None:
        if leaf.source is Source.INPUT:
            return None
        value = self.tensors[leaf.name].detach()
        if leaf.source is Source.CONSTANT and leaf in self.owner._effects.leaves:
            return value.clone()
        if self.own_leaf(leaf):
            self.owner.uses.setdefault(leaf.name, []).append((op, value.requires_grad_()))
        return value

    def literal(self, literal: TorchLiteral) -> object:
        return torch_literal(literal, self.owner.device)

    def draw(self, position: int, call: Call, *args: Any) -> Any:
        owner = self.owner
        if owner._seed is None:
            return call(*args)
        seed = op_seed(owner._seed, *owner._key, position)
        with _DRAWING:
            if owner.device.type == "cuda":
                index = owner.device.index
                index = torch.cuda.current_device() if index is None else index
                torch.cuda.default_generators[index].manual_seed(seed)
            torch.default_generator.manual_seed(seed)
            return call(*args)
