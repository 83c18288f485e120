"""Compiles a StageProgram's nodes into calls on the slots of a list.

Knows nothing of tensors: the executor that runs the result says what a leaf's value, a literal
and a random draw are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from atoll.effects import may_alias, references
from atoll.errors import UsageError
from atoll.kernels import resolve
from atoll.opdag import Arg, Autocast, LeafRef, OpNode, OpRef, Source, TorchLiteral, op_refs
from atoll.ops import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from atoll.program import StageProgram

    Values = list[Any]
    Getter = Callable[[Values], tuple[Any, ...]]
    Call = Callable[..., Any]


class Host(Protocol):
    """Interface of the executor that compiled calls need."""

    def own_leaf(self, leaf: LeafRef) -> bool:
        """Return whether every use of the leaf has a slot of its own."""
        ...

    def leaf_value(self, op: int, leaf: LeafRef) -> object:
        """Return the initial content of a leaf's slot, read by ``op``."""
        ...

    def literal(self, literal: TorchLiteral) -> object:
        """The torch object that a literal names."""
        ...

    def draw(self, position: int, call: Call, *args: Any) -> Any:
        """Run a random op under its own seed."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """Compiled op: ``values[out] = call(*get(values))``, then free ``dead``."""

    position: int
    call: Call
    get: Getter
    out: int
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive ops that run under the same gradient and autocast setting."""

    grad_enabled: bool
    autocast: Autocast | None
    steps: tuple[tuple[Call, Getter, int, tuple[int, ...]], ...]
    positions: tuple[int, ...]


class Compiler:
    """Turns nodes into steps over slots; every argument, literal or not, is a slot, so that the
    arguments of an op are one ``itemgetter`` call."""

    def __init__(self, program: StageProgram, cached: frozenset[int], host: Host) -> None:
        self.program = program
        self.cached = cached
        self.host = host
        self.template: Values = []
        self.op_slots: dict[int, int] = {}
        self.leaves: dict[tuple[LeafRef, int], int] = {}

    def compile(self) -> tuple[Values, list[Step], list[Step]]:
        """Template of slot values, the steps run once, and the steps run per micro-batch."""
        for r in self.program.received:
            self.op_slots[r.op] = self.slot(None)
        for op, _ in self.program.ops:
            self.op_slots[op] = self.slot(None)
        dead = self.last_uses()
        steps = [
            Step(op, *self.call(op, node), self.op_slots[op], tuple(self.op_slots[d] for d in dead[op]))
            for op, node in self.program.ops
        ]
        constants = [s for s in steps if s.position in self.cached]
        return self.template, constants, [s for s in steps if s.position not in self.cached]

    def leaf_slots(self, source: Source) -> dict[str, int]:
        return {leaf.name: slot for (leaf, _), slot in self.leaves.items() if leaf.source is source}

    def last_uses(self) -> dict[int, list[int]]:
        """Op -> ops whose values nothing in this stage reads after it."""
        kept = {p.op for p in self.program.produced} | self.cached
        kept |= {op for _, op in self.program.metrics}
        kept |= {op for op in (self.program.loss, self.program.weight) if op is not None}
        last: dict[int, int] = {}
        for op, node in self.program.ops:
            if op not in self.cached:
                last[op] = op
                last.update((r, op) for r in op_refs(node))
        dead: dict[int, list[int]] = {op: [] for op, _ in self.program.ops}
        for op, user in last.items():
            if op not in kept:
                dead[user].append(op)
        return dead

    def slot(self, value: object) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def call(self, op: int, node: OpNode) -> tuple[Call, Getter]:
        function = resolve(node.target)
        call: Call = function
        literal = {n: self.literal(v) for n, v in node.kwargs if not references(v)}
        variable = [(n, v) for n, v in node.kwargs if references(v)]
        if literal:
            call = partial(call, **literal)
        if variable:
            call = _with_keywords(call, tuple(n for n, _ in variable))
        declared = schema(node.target)
        if declared is not None and not declared.is_mutable and not node.is_tuple and may_alias(node):
            call = _own_node(call)
        if node.random:
            call = partial(self.host.draw, op, call)
        return call, self.getter(op, (*node.args, *(v for _, v in variable)))

    def getter(self, op: int, args: tuple[Arg, ...]) -> Getter:
        if any(isinstance(arg, tuple) and references(arg) for arg in args):
            parts = tuple(self.part(op, arg) for arg in args)
            return lambda values: tuple([part(values) for part in parts])
        slots = [self.argument_slot(op, arg) for arg in args]
        if len(slots) == 1:
            only = slots[0]
            return lambda values: (values[only],)
        return itemgetter(*slots) if slots else lambda values: ()

    def part(self, op: int, arg: Arg) -> Callable[[Values], Any]:
        if isinstance(arg, tuple) and references(arg):
            parts = tuple(self.part(op, item) for item in arg)
            return lambda values: [part(values) for part in parts]
        return itemgetter(self.argument_slot(op, arg))

    def argument_slot(self, op: int, arg: Arg) -> int:
        if isinstance(arg, OpRef):
            if arg.op not in self.op_slots:
                raise UsageError(f"op {op} reads op {arg.op}, which its stage neither runs nor receives")
            return self.op_slots[arg.op]
        if isinstance(arg, LeafRef):
            return self.leaf_slot(op, arg)
        return self.slot(self.literal(arg))

    def leaf_slot(self, op: int, leaf: LeafRef) -> int:
        key = (leaf, op if self.host.own_leaf(leaf) else -1)
        if key not in self.leaves:
            self.leaves[key] = self.slot(self.host.leaf_value(op, leaf))
        return self.leaves[key]

    def literal(self, arg: Arg) -> object:
        if isinstance(arg, tuple):
            return [self.literal(item) for item in arg]
        if isinstance(arg, TorchLiteral):
            return self.host.literal(arg)
        return arg


def _with_keywords(call: Call, names: tuple[str, ...]) -> Call:
    count = len(names)

    def with_keywords(*args: Any) -> Any:
        return call(*args[:-count], **dict(zip(names, args[-count:], strict=True)))

    return with_keywords


def _own_node(call: Call) -> Call:
    def own_node(*args: Any) -> Any:
        out = call(*args)
        return out.view_as(out) if args and out is args[0] else out

    return own_node


def segments(
    steps: Iterable[Step], nodes: Mapping[int, OpNode], default: Autocast | None
) -> tuple[Segment, ...]:
    """Group steps that follow each other under one setting; ``default`` autocast where none."""
    groups: list[tuple[bool, Autocast | None, list[Step]]] = []
    for step in steps:
        node = nodes[step.position]
        setting = (node.grad_enabled, node.autocast or default)
        if not groups or groups[-1][:2] != setting:
            groups.append((*setting, []))
        groups[-1][2].append(step)
    return tuple(
        Segment(
            grad,
            autocast,
            tuple((s.call, s.get, s.out, s.dead) for s in group),
            tuple(s.position for s in group),
        )
        for grad, autocast, group in groups
    )
