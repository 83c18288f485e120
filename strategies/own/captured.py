"""An owner's strategy as formulas: each method run on stand-ins by torch.export, and proven. Needs torch.

What a method does with Python (options, loops over them) is settled here; what it does with tensors becomes
ops. It runs at two shapes: a formula that differs has taken a number from the shape. Then its ops are run
against the method itself on random tensors of several shapes, to the bit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.errors import AtollError, UsageError
from atoll.exported import exported
from atoll.formulas import (
    CLIENT_NUMBERS,
    DELTA,
    GRADIENT,
    MEAN,
    NUMBER,
    RECEIVED,
    SERVER_NUMBERS,
    STAND_IN,
    WEIGHT,
    DeclaredStrategy,
    Formula,
    value,
    value_meta,
)
from atoll.opdag import Arg, Kind, OpNode, OpRef, TensorMeta, TorchLiteral
from strategies import STRATEGIES
from strategies.own.base import OwnStrategy, Values, make_own
from strategies.own.computed import Computer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.federated import Federated

Method = Callable[[Values], Any]
OTHER = TensorMeta((2, 3, 2), "float32")
MOST_S = 60.0  # of the processor, for a method that usually takes less than 2
PROVEN_AT = (STAND_IN, OTHER, TensorMeta((1,), "float32"), TensorMeta((4,), "float64"))


def with_own(rule: Federated) -> Federated:
    """Return a job's settings with its strategy's formulas, where that is none of ours. UsageError for one
    that is not known here, or that cannot be captured."""
    if rule.strategy in STRATEGIES:
        return rule
    return replace(rule, own=captured(make_own(rule.strategy, rule.options)))


def captured(strategy: OwnStrategy) -> DeclaredStrategy:
    """Return what of ``strategy`` travels. UsageError names the method that cannot be captured, and why."""
    kind = type(strategy)
    here = (RECEIVED, *kind.SENT_DOWN, *kind.CLIENT)
    seen = {
        "gradient": (GRADIENT, WEIGHT, *here),
        "after": (WEIGHT, DELTA, *here, *CLIENT_NUMBERS),
        "step": (WEIGHT, MEAN, *kind.SERVER, *kind.SENT_UP, *SERVER_NUMBERS),
    }
    found = {
        name: _formula(f"{kind.name}.{name}", getattr(strategy, name), values)
        for name, values in seen.items()
        if getattr(kind, name) is not getattr(OwnStrategy, name)
    }
    summary = (kind.__doc__ or "").strip().partition("\n")[0].strip().rstrip(".")
    try:
        return DeclaredStrategy(
            summary,
            kind.SERVER,
            kind.SENT_DOWN,
            kind.CLIENT,
            kind.SENT_UP,
            kind.BY_SAMPLES,
            copies=dict(kind.COPIES),
            **found,
        )
    except UsageError as error:
        raise UsageError(f"strategy {kind.name}: {error}") from None


def _formula(what: str, method: Method, values: Sequence[str]) -> Formula:
    with _ending(what):
        return _proven(what, method, values)


@contextmanager
def _ending(what: str) -> Iterator[None]:
    """UsageError once this process has computed for ``MOST_S`` meanwhile; a busy machine costs nothing of it.

    In the main thread, where systems have such a timer: elsewhere who waits can interrupt.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: object) -> None:
        raise UsageError(f"{what}() does not end: it was interrupted after {MOST_S:g} s of computing")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _proven(what: str, method: Method, values: Sequence[str]) -> Formula:
    formula = _traced(what, method, values, STAND_IN)
    other = _traced(what, method, values, OTHER)
    if _form(formula) != _form(other):
        raise UsageError(f"{what}() gives another formula for another shape; do not use shapes or sizes")
    for meta in PROVEN_AT:
        _prove(what, method, formula, values, meta)
    return formula


def _form(formula: Formula) -> Any:
    return [(node.target, node.args, node.kwargs) for node in formula.ops], formula.results


class _Method(nn.Module):
    """A method as torch.export wants it: tensors in, tensors out."""

    def __init__(self, run: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.run(tensors)


def _called(what: str, method: Method, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a method makes of these, by name."""
    found = method(Values(what, values))
    if isinstance(found, Tensor):
        found = {GRADIENT: found}
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        due = "a tensor" if what.endswith(".gradient") else "a dict of tensors by name"
        raise UsageError(f"{what}() returns {type(found).__name__}; return {due}")
    given = {id(each) for each in values.values()}
    return {str(name): each.clone() if id(each) in given else each for name, each in found.items()}


def _traced(what: str, method: Method, names: Sequence[str], meta: TensorMeta) -> Formula:
    results: list[str] = []

    def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = _called(what, method, dict(zip(names, tensors, strict=True)))
        results[:] = found
        return tuple(found.values())

    tensors = tuple(_drawn(value_meta(name, meta), at) for at, name in enumerate(names))
    try:
        return _from_graph(exported(_Method(run), tensors), names, results, meta)
    except AtollError as error:
        text = str(error)
        raise UsageError(text if text.startswith(what) else f"{what}(): {text}") from None
    except Exception as error:  # torch.export raises whatever the method raised
        said = " ".join(str(error).split())[:200]
        if "data-dependent" in said:
            raise UsageError(
                f"{what}() decides by a tensor's value; use torch.where in the place of if"
            ) from error
        raise UsageError(
            f"{what}() raised {type(error).__name__}: {said}. It is captured by running it on stand-ins: use "
            "torch's functions on the values of at, and Python for options alone"
        ) from error


def _from_graph(
    program: torch.export.ExportedProgram, names: Sequence[str], results: Sequence[str], meta: TensorMeta
) -> Formula:
    env: dict[Any, Arg] = {}
    ops: list[OpNode] = []
    given = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name not in given:
                raise UsageError("it makes a tensor of numbers; write them as numbers")
            env[node] = value(given[node.name])
        elif node.op == "call_function":
            ops.append(_node(node, env, meta))
            env[node] = OpRef(len(ops) - 1)
        elif node.op == "output":
            positions = [env[each] for each in node.args[0]]
    found = {name: at.op for name, at in zip(results, positions, strict=True) if isinstance(at, OpRef)}
    return Formula(tuple(ops), found)


def _node(node: Any, env: Mapping[Any, Arg], meta: TensorMeta) -> OpNode:
    target = str(node.target)
    found = node.meta.get("val")
    if not isinstance(found, Tensor):
        raise UsageError(f"the op {target} is not allowed in a formula; give results the values' dtype")
    shape = tuple(int(size) for size in found.shape)
    output = TensorMeta(STAND_IN.shape if shape == meta.shape else shape, _name(found.dtype))
    return OpNode(
        node.name,
        Kind.NON_PARAMETRIC,
        target,
        tuple(_argument(target, arg, env) for arg in node.args),
        tuple((name, _argument(target, arg, env)) for name, arg in node.kwargs.items()),
        (output,),
    )


def _argument(target: str, arg: Any, env: Mapping[Any, Arg]) -> Arg:
    match arg:
        case torch.fx.Node():
            return env[arg]
        case bool() | int() | float() | str() | None:
            return arg
        case torch.dtype():
            return TorchLiteral("dtype", _name(arg))
        case torch.device():
            return TorchLiteral("device", "")
        case torch.memory_format():
            return TorchLiteral("memory_format", str(arg).removeprefix("torch."))
        case list() | tuple():
            return tuple(_argument(target, item, env) for item in arg)
    raise UsageError(f"the op {target} takes a {type(arg).__name__}, which cannot be sent")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drawn(meta: TensorMeta, seed: int) -> Tensor:
    """A tensor of plain numbers; single numbers are positive and whole, as steps and clients are."""
    draw = torch.Generator().manual_seed(seed)
    if meta == NUMBER:
        return torch.tensor(float(seed + 2), dtype=torch.float64)
    return torch.randn(meta.shape, generator=draw, dtype=getattr(torch, meta.dtype))


def _prove(what: str, method: Method, formula: Formula, names: Sequence[str], meta: TensorMeta) -> None:
    """UsageError unless the ops give what the method gives, to the bit, and tensors of ``meta``."""
    values = {name: _drawn(value_meta(name, meta), at) for at, name in enumerate(names)}
    wanted = _called(what, method, values)
    found = Computer(formula).run(values)
    for name, tensor in wanted.items():
        if tensor.shape != meta.shape or _name(tensor.dtype) != meta.dtype:
            raise UsageError(
                f"{what}() makes {name!r} {_name(tensor.dtype)} {tuple(tensor.shape)} of a tensor "
                f"{meta.dtype} {meta.shape}; give it the tensor's shape and dtype"
            )
        if not torch.equal(torch.nan_to_num(found[name]), torch.nan_to_num(tensor)):
            raise UsageError(
                f"{what}() gives another {name!r} when it is run again: it depends on more than its values"
            )
