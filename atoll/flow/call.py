"""An op call as the families of ops see it: arguments by name, values in place of references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.flow.shapes import wrapped
from atoll.flow.value import Shape, Value
from atoll.ops import schema
from atoll.schemas import named_arguments

if TYPE_CHECKING:
    from atoll.opdag import Arg, OpNode

Given = Any
"""A Value, a literal, or a tuple of those."""
Result = Value | tuple[Value, ...]
ACROSS = "it mixes the samples of a micro-batch otherwise than by a sum or a mean"


@dataclass(frozen=True, slots=True)
class Call:
    """``name``: the op's, without overload and without the underscore of writing in place. ``batch``: samples
    of a micro-batch; ``least``: how many must be left of them on average by what drops some at random."""

    name: str
    overload: str
    given: dict[str, Given]
    shapes: tuple[Shape, ...]
    batch: int
    least: int

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @property
    def values(self) -> list[Value]:
        """Every value among the arguments, in order."""
        return _values(tuple(self.given.values()))

    def value(self, name: str) -> Value:
        """An argument that must be a tensor; ValueError when it is not."""
        found = self.given.get(name)
        if not isinstance(found, Value):
            raise ValueError(f"{name} is not a tensor")
        return found

    def number(self, name: str) -> int:
        """An argument that must be a whole number; ValueError when it is not."""
        found = self.given.get(name)
        if type(found) is not int:
            raise ValueError(f"{name} is {found!r}")
        return found

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """A dim or several, from 0; all where none is given."""
        found = self.given.get(name)
        if found is None or found == ():
            return tuple(range(ndim))
        several = found if isinstance(found, tuple) else (found,)
        return tuple(wrapped(int(dim), ndim) for dim in several)


Family = Callable[[Call], Result]


def called(node: OpNode, read: Callable[[Arg], Given], batch: int, least: int) -> Call:
    """``node`` with defaults filled in and every reference read."""
    arguments, given = named_arguments(node), {}
    for argument in schema(node.target).arguments:
        if argument.name in arguments:
            given[argument.name] = read(arguments[argument.name])
        elif argument.has_default_value():
            default = argument.default_value
            given[argument.name] = tuple(default) if isinstance(default, list) else default
    _, name, overload = node.target.split(".")
    return Call(base_name(name), overload, given, tuple(o.shape for o in node.outputs), batch, least)


def base_name(name: str) -> str:
    """``add_`` and ``__iadd__`` -> add; ``_softmax`` stays."""
    if name.startswith("__"):
        word = name.strip("_")
        return word.removeprefix("i") if word in ("iand", "ior", "ixor") else word
    return name.rstrip("_")


def _values(given: Given) -> list[Value]:
    if isinstance(given, tuple):
        return [value for item in given for value in _values(item)]
    return [given] if isinstance(given, Value) else []
