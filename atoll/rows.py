"""An evaluation program at another number of rows: for the held-out rows that fill no micro-batch.

Graphs have static shapes. Captured once more with another number of rows, a module gives the same ops on the
same leaves; shapes and arguments alone differ (sizes of a view, a count to divide by). Each that does is so
many times the number of rows, or nothing is derived; at any other number of rows it is as many times that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import UsageError
from atoll.opdag import OpNode, TensorMeta, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.opdag import Arg, OpDag
    from atoll.program import StageProgram

ArgT = TypeVar("ArgT", bound="Arg")


def at_rows(program: StageProgram, rows: int) -> StageProgram:
    """Return an evaluation program for micro-batches of ``rows`` rows; UsageError where that is not known."""
    tail = program.tail
    for known in (program, tail):
        if known is not None and known.rows == rows:
            return known
    if tail is None:
        raise UsageError(f"the model was captured for {program.rows} rows only; submit the job again")
    if rows < 1:
        raise UsageError(f"a micro-batch of {rows} rows")
    scale = _Scale(program.rows, tail.rows, rows)
    pairs = zip(program.ops, tail.ops, strict=True)
    received = zip(program.received, tail.received, strict=True)
    return replace(
        program,
        rows=rows,
        tail=None,
        ops=tuple((position, scale.node(node, other)) for (position, node), (_, other) in pairs),
        received=tuple(replace(r, meta=scale.meta(r.meta, other.meta)) for r, other in received),
    )


def dag_at_rows(dag: OpDag, rows: int) -> OpDag:
    """Return an evaluation graph at ``rows`` rows a micro-batch, without a tail. Raises as ``at_rows``."""
    tail = dag.tail
    if tail is None or rows < 1:
        raise UsageError(f"the model was captured for {rows_of(dag.inputs)} rows only, not for {rows}")
    scale = _Scale(rows_of(dag.inputs), rows_of(tail.inputs), rows)
    ops = tuple(scale.node(node, other) for node, other in zip(dag.ops, tail.ops, strict=True))
    return replace(dag, ops=ops, inputs=inputs_at(dag.inputs, rows), tail=None)


def inputs_at(inputs: Mapping[str, TensorMeta], rows: int) -> dict[str, TensorMeta]:
    """Return the inputs of a micro-batch of so many rows."""
    return {name: TensorMeta((rows, *meta.shape[1:]), meta.dtype) for name, meta in inputs.items()}


def same_form(dag: OpDag, other: OpDag) -> bool:
    """Whether two graphs differ in shapes, numbers and what was measured alone, so that one cut fits both."""

    def form(of: OpDag) -> object:
        places = (of.loss, of.weight, of.metrics, of.unsplittable, of.constant_ops, of.aliases)
        leaves = (list(of.inputs), of.parameters, of.buffers, of.constants)
        return places, leaves, [node_form(node) for node in of.ops]

    return form(dag) == form(other)


def same_programs(program: StageProgram, other: StageProgram) -> bool:
    """Whether ``other`` is the same stage of a graph of the same form."""

    def form(of: StageProgram) -> object:
        received = [replace(r, meta=TensorMeta((), r.meta.dtype)) for r in of.received]
        leaves = (of.inputs, of.parameters, of.buffers, of.constants)
        places = (of.stage, of.n_stages, of.constant_ops, of.produced, of.loss, of.weight, of.metrics)
        return places, leaves, received, [(position, node_form(node)) for position, node in of.ops]

    return form(program) == form(other)


def node_form(node: OpNode) -> object:
    """What an op is but for shapes and numbers."""
    kwargs = [(name, _form(value)) for name, value in node.kwargs]
    outputs = [(len(meta.shape), meta.dtype) for meta in node.outputs]
    flags = (node.is_tuple, node.grad_enabled, node.autocast, node.random)
    return node.target, _form(node.args), kwargs, outputs, flags


def _form(arg: Arg) -> object:
    if isinstance(arg, tuple):
        return tuple(map(_form, arg))
    return type(arg) if isinstance(arg, int | float) else arg


class _Scale:
    """Numbers at ``rows``, from what they are at ``one`` and at ``other`` number of rows."""

    def __init__(self, one: int, other: int, rows: int) -> None:
        self.one, self.other, self.rows = one, other, rows

    def node(self, node: OpNode, other: OpNode) -> OpNode:
        kwargs = tuple(
            (name, self.argument(value, theirs))
            for (name, value), (_, theirs) in zip(node.kwargs, other.kwargs, strict=True)
        )
        outputs = tuple(self.meta(a, b) for a, b in zip(node.outputs, other.outputs, strict=True))
        return replace(node, args=self.argument(node.args, other.args), kwargs=kwargs, outputs=outputs)

    def meta(self, meta: TensorMeta, other: TensorMeta) -> TensorMeta:
        return TensorMeta(self.argument(meta.shape, other.shape), meta.dtype)

    def argument(self, value: ArgT, other: ArgT) -> ArgT:
        found: Arg
        if isinstance(value, tuple) and isinstance(other, tuple):
            found = tuple(self.argument(a, b) for a, b in zip(value, other, strict=True))
        elif value == other:
            found = value
        elif isinstance(value, int) and isinstance(other, int) and not value % self.one:
            found = value // self.one * self.rows
            self.proven(value // self.one * self.other == other, value, other)
        elif isinstance(value, float) and isinstance(other, float):
            found = value / self.one * self.rows
            self.proven(value / self.one * self.other == other, value, other)
        else:
            found = value
            self.proven(False, value, other)
        return found  # type: ignore[return-value]

    def proven(self, scales: bool, value: object, other: object) -> None:
        if not scales:
            raise UsageError(
                f"{value} with {self.one} rows is {other} with {self.other}, and not known with {self.rows}"
            )
