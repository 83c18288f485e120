"""A node's call as guards read it: its arguments by name, its tensors as their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import UnsupportedOp
from atoll.opdag import Arg, LeafRef, OpRef, TensorMeta
from atoll.ops import refusal
from atoll.signatures import check_types

if TYPE_CHECKING:
    from atoll.opdag import OpNode
    from atoll.program import StageProgram

NUMBER = TensorMeta((), "float32")


class Shapes:
    """Shape and dtype of every value of a program, by reference, as they are declared."""

    def __init__(
        self, program: StageProgram, leaves: Mapping[str, TensorMeta], inputs: Mapping[str, TensorMeta]
    ) -> None:
        self._values: dict[int, tuple[TensorMeta, ...]] = {r.op: (r.meta,) for r in program.received}
        self._values |= {op: node.outputs for op, node in program.ops}
        self._leaves = {**leaves, **inputs}

    def of(self, ref: OpRef | LeafRef) -> tuple[TensorMeta, ...] | None:
        """Return one meta, or those of a tuple; None for a value that the program does not have."""
        if isinstance(ref, OpRef):
            return self._values.get(ref.op)
        found = self._leaves.get(ref.name)
        return None if found is None else (found,)


@dataclass(frozen=True, slots=True)
class Call:
    """A node with its arguments bound to the names of its schema; arguments left at their default are
    absent."""

    node: OpNode
    given: Mapping[str, Arg]
    shapes: Shapes

    @property
    def name(self) -> str:
        """'add' of both ``aten.add.Tensor`` and ``aten.add_.Tensor``."""
        return self.node.target.split(".")[1].removesuffix("_")

    def meta(self, name: str) -> TensorMeta | None:
        """The shape of a tensor argument; a number's is (), that of None or nothing None."""
        arg = self.given.get(name)
        return None if arg is None else self._meta(arg)

    def tensor(self, name: str) -> TensorMeta:
        """The shape of a tensor argument that the schema asks for."""
        return self._meta(self.given[name])

    def tensors(self, name: str) -> list[TensorMeta]:
        """The shapes of a list of tensors; without those that are None."""
        listed = self.given.get(name) or ()
        return [
            self._meta(arg) for arg in (listed if isinstance(listed, tuple) else (listed,)) if arg is not None
        ]

    def number(self, name: str, default: int) -> int:
        """An integer argument."""
        found = self.given.get(name, default)
        return found if isinstance(found, int) else default

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers, or the one number that stands for it; () when absent."""
        found = self.given.get(name)
        listed = found if isinstance(found, tuple) else (found,)
        return tuple(v for v in listed if isinstance(v, int | float))

    def refuse(self, why: str) -> UnsupportedOp:
        """The error to raise."""
        return refusal(self.node, why)

    def _meta(self, arg: Arg) -> TensorMeta:
        if not isinstance(arg, OpRef | LeafRef):
            return NUMBER
        found = self.shapes.of(arg)
        if found is None:
            raise self.refuse("it reads a value that its program does not have")
        if len(found) != 1:
            raise self.refuse("it reads a tuple of tensors where it takes one")
        return found[0]


def call_of(node: OpNode, shapes: Shapes) -> Call:
    """The node's call, its arguments checked against the op's schema. UnsupportedOp."""
    return Call(node, check_types(node), shapes)
