"""The declared types of an op's arguments, and the check of a node's arguments against them.

Torch's own schema of an op says what each argument is; ``real_type`` is read, since ``type`` calls a
dtype, a layout and a memory format an int, and a kernel given such an int hangs or crashes. Values
that a kernel takes without looking (enumerations, names of modes) have a table here. What depends on
the shapes of other arguments is in ``atoll.guards``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from atoll.opdag import DTYPE_BYTES, Arg, LeafRef, OpNode, OpRef, TorchLiteral
from atoll.ops import GETITEM, overload, refusal

LITERAL_NAMES: Mapping[str, frozenset[str]] = {
    "dtype": frozenset(DTYPE_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
    "device": frozenset({""}),
}
_LITERALS = {
    "ScalarType": "dtype",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Device": "device",
}
# Integers that stand for an enumeration of the kernel's.
ENUMERATIONS = {
    "reduction": frozenset({0, 1, 2}),
    "interpolation_mode": frozenset({0, 1, 2}),
    "padding_mode": frozenset({0, 1, 2}),
    "compute_mode": frozenset({0, 1, 2}),
    "mode": frozenset({0, 1, 2}),
}
TEXTS = {
    "UPLO": frozenset({"L", "U"}),
    "approximate": frozenset({"none", "tanh"}),
    "driver": frozenset(),
    "indexing": frozenset({"ij", "xy"}),
    "interpolation": frozenset({"linear", "lower", "higher", "midpoint", "nearest"}),
    "mode": frozenset({"constant", "reflect", "replicate", "circular", "reduced", "complete", "r"}),
    "norm": frozenset({"forward", "backward", "ortho"}),
    "ord": frozenset({"fro", "nuc"}),
    "pad_mode": frozenset({"constant", "reflect", "replicate", "circular"}),
    "padding": frozenset({"same", "valid"}),
    "reduce": frozenset({"sum", "prod", "mean", "amax", "amin", "add", "multiply"}),
    "rounding_mode": frozenset({"trunc", "floor"}),
    "side": frozenset({"left", "right"}),
}
_EQUATION = re.compile(r"[A-Za-z.,\-> ]*")
_TYPE = re.compile(r"(Optional\[)?(List\[)?(Optional\[)?(\w+)\]*")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Argument of an op as its schema declares it."""

    name: str
    kind: str  # Tensor, int, number, float, bool, str, ScalarType, Layout, MemoryFormat, Device, Generator
    is_list: bool
    optional: bool
    item_optional: bool
    length: int | None  # of a list that one number may stand for
    required: bool
    keyword_only: bool


@lru_cache(maxsize=4096)
def parameters(target: str) -> tuple[Parameter, ...]:
    """The arguments that an allowed op takes, in the order of its schema."""
    return tuple(_parameter(argument) for argument in overload(target)._schema.arguments)


def _parameter(argument: Any) -> Parameter:
    found = _TYPE.fullmatch(str(argument.real_type))
    assert found is not None, argument  # noqa: S101 - a test reads every schema of the list
    outer, listed, inner, kind = found.groups()
    return Parameter(
        argument.name,
        kind,
        listed is not None,
        outer is not None,
        inner is not None,
        argument.N,
        not argument.has_default_value(),
        argument.kwarg_only,
    )


def bind(node: OpNode) -> dict[str, Arg]:
    """The node's arguments by name, those left to their defaults absent.

    UnsupportedOp for an argument that is unknown, missing, given twice or of another type than declared.
    """
    declared = parameters(node.target)
    positional = [p for p in declared if not p.keyword_only]
    if len(node.args) > len(positional):
        raise refusal(node, f"{len(node.args)} positional arguments; it takes at most {len(positional)}")
    given: dict[str, Arg] = {p.name: arg for p, arg in zip(positional, node.args, strict=False)}
    known = {p.name for p in declared}
    for name, arg in node.kwargs:
        if name not in known:
            raise refusal(node, f"it has no argument {name[:40]!r}")
        if name in given:
            raise refusal(node, f"argument {name!r} is given twice")
        given[name] = arg
    for parameter in declared:
        if parameter.name in given:
            _check(node, parameter, given[parameter.name])
        elif parameter.required:
            raise refusal(node, f"argument {parameter.name!r} is missing")
    return given


def check_getitem(node: OpNode) -> None:
    """UnsupportedOp unless the node takes one element, by its index, of an op that returns a tuple."""
    match node.args:
        case (OpRef(), int(index)) if not isinstance(index, bool) and not node.kwargs and index >= 0:
            return
    raise refusal(node, "getitem takes an op's tuple and the position of one of its tensors")


def check_types(node: OpNode) -> dict[str, Arg]:
    """``bind``, or for ``builtin.getitem`` its own check and no arguments."""
    if node.target == GETITEM:
        check_getitem(node)
        return {}
    return bind(node)


def _check(node: OpNode, parameter: Parameter, arg: Arg) -> None:
    if arg is None:
        if parameter.optional:
            return
        raise refusal(node, f"argument {parameter.name!r} is None; a {_wanted(parameter)} is due")
    if not parameter.is_list:
        _check_item(node, parameter, arg)
    elif isinstance(arg, tuple):
        for item in arg:
            if not (item is None and parameter.item_optional):
                _check_item(node, parameter, item)
    elif parameter.length is not None and parameter.kind in ("int", "float"):
        _check_item(node, parameter, arg)
    else:
        raise refusal(node, f"argument {parameter.name!r} is {_shown(arg)}; a {_wanted(parameter)} is due")


def _check_item(node: OpNode, parameter: Parameter, arg: Arg) -> None:
    if not _fits(parameter, arg):
        raise refusal(node, f"argument {parameter.name!r} is {_shown(arg)}; a {_wanted(parameter)} is due")
    name = parameter.name
    if parameter.kind == "int" and name in ENUMERATIONS and arg not in ENUMERATIONS[name]:
        raise refusal(node, f"argument {name!r} is {arg}; {sorted(ENUMERATIONS[name])} are known")
    if parameter.kind == "str" and not _known_text(name, str(arg)):
        raise refusal(
            node, f"argument {name!r} is {str(arg)[:40]!r}; {sorted(TEXTS.get(name, ()))} are known"
        )


def _fits(parameter: Parameter, arg: Arg) -> bool:
    match parameter.kind:
        case "Tensor":
            # Torch wraps a plain number; honest graphs have `mul.Tensor(x, 2.0)`.
            return isinstance(arg, OpRef | LeafRef) or (_number(arg) and not parameter.is_list)
        case "int":
            return isinstance(arg, int) and not isinstance(arg, bool)
        case "float":
            return isinstance(arg, int | float) and not isinstance(arg, bool)
        case "number":
            return _number(arg)
        case "bool":
            return isinstance(arg, bool)
        case "str":
            return isinstance(arg, str)
        case "Generator":
            return False
        case kind:
            literal = _LITERALS.get(kind)
            return (
                isinstance(arg, TorchLiteral) and arg.kind == literal and arg.name in LITERAL_NAMES[arg.kind]
            )


def _number(arg: Arg) -> bool:
    return isinstance(arg, int | float)  # a bool is one


def _known_text(name: str, text: str) -> bool:
    return bool(_EQUATION.fullmatch(text)) if name == "equation" else text in TEXTS.get(name, ())


def _wanted(parameter: Parameter) -> str:
    return f"list of {parameter.kind}" if parameter.is_list else parameter.kind


def _shown(arg: Arg) -> str:
    if isinstance(arg, OpRef | LeafRef):
        return "a tensor"
    if isinstance(arg, TorchLiteral):
        return f"the {arg.kind} {arg.name[:40]!r}"
    return f"{type(arg).__name__} {str(arg)[:40]}"
