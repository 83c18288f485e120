"""Formulas in words, for data owners: what each step and each round would compute."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from atoll.opdag import LeafRef, OpRef, TorchLiteral, op_refs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.formulas import DeclaredStrategy, Formula
    from atoll.opdag import Arg, OpNode

MAX_SHOWN = 1500
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "gt": ">",
    "lt": "<",
    "ge": ">=",
    "le": "<=",
}


def client_words(own: DeclaredStrategy) -> str:
    """Return what clients compute by an owner's strategy beside the job's graph."""
    copies = (f"each round sets {into}* to the received {of}*" for into, of in sorted(own.copies.items()))
    parts = [
        *copies,
        *(() if own.gradient is None else (f"each step {'; '.join(_lines(own.gradient))}",)),
        *(() if own.after is None else (f"after each round {'; '.join(_lines(own.after))}",)),
    ]
    text = ". ".join(parts) or "none on clients"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def _lines(formula: Formula) -> Iterator[str]:
    """One assignment for each value that is used again, and for each result."""
    uses = Counter(op for node in formula.ops for op in op_refs(node))
    results = {op: name for name, op in formula.results.items()}
    texts: dict[int, str] = {}
    for at, node in enumerate(formula.ops):
        text = _call(node, texts)
        if at in results or uses[at] > 1:
            name = f"new {results[at]}" if at in results else f"t{at}"
            yield f"{name} = {text}"
            texts[at] = name
        else:
            texts[at] = f"({text})"


def _call(node: OpNode, texts: dict[int, str]) -> str:
    name = node.target.split(".")[1]
    args = [_argument(arg, texts) for arg in node.args]
    if name in _SIGNS and len(args) == 2 and not node.kwargs:
        return f"{args[0]} {_SIGNS[name]} {args[1]}"
    if name == "rsub" and len(args) == 2 and not node.kwargs:
        return f"{args[1]} - {args[0]}"
    return f"{name}({', '.join([*args, *(f'{key}={_argument(arg, texts)}' for key, arg in node.kwargs)])})"


def _argument(arg: Arg, texts: dict[int, str]) -> str:
    match arg:
        case OpRef(op):
            return texts[op]
        case LeafRef():
            return arg.name
        case float():
            return f"{arg:g}"
        case TorchLiteral():
            return arg.name
        case tuple():
            return f"[{', '.join(_argument(item, texts) for item in arg)}]"
    return str(arg)
