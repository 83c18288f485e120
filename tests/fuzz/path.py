"""A worker's own path for one op: typed, guarded, rehearsed, then forward and backward by the executor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.calls import Shapes
from atoll.errors import AtollError, UnsupportedOp
from atoll.execute import DTYPES, Executor, torch_literal
from atoll.guards import check_call
from atoll.job import Precision
from atoll.kernels import resolve
from atoll.opdag import FLOATING, Arg, Kind, OpNode, OpRef, TensorMeta, TorchLiteral
from atoll.ops import GETITEM
from atoll.program import Produced, Received, StageProgram
from atoll.rehearse import RehearsalLimits, rehearse
from tests.fuzz.case import Case, Tensorlike, filled, node_of
from tests.fuzz.memory import fenced

LIMITS = RehearsalLimits(output_bytes=32 << 20, kernels=2_000)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Result:
    """How far a case came: "refused" before the op ran, "raised" by it, or "ran"; of what ran, a digest."""

    status: str
    detail: str = ""


def run(case: Case, reached: Callable[[], None] = lambda: None) -> Result:
    """Run ``case`` as a worker would; ``reached`` is called right before the op is."""
    node, tensors = node_of(case)
    try:
        node = replace(node, outputs=_declared(node, tensors))
        program = _program(node, tensors)
        rehearse(program, {}, {}, Precision.FP32, CPU, LIMITS)
    except AtollError as error:
        return Result("refused", str(error))
    generator = torch.Generator().manual_seed(case.seed)
    values = [fenced(filled(spec, generator), case.at_start) for spec in tensors]
    executor = Executor(program, CPU, seed=case.seed)
    executor.load({})
    reached()
    try:
        out = executor.forward(0, 0, {}, dict(enumerate(values)))
        grads = {p.op: _gradient(out[p.op], generator, case.at_start) for p in program.produced}
        answers = executor.backward(0, grads)
    except (RuntimeError, IndexError, TypeError, ValueError, AtollError, NotImplementedError) as error:
        return Result("raised", f"{type(error).__name__}: {str(error)[:300]}")
    return Result("ran", _digest([*out.values(), *(a for a in answers.values() if a is not None)]))


def _gradient(value: Tensor, generator: torch.Generator, at_start: bool) -> Tensor | None:
    name = str(value.dtype).removeprefix("torch.")
    if name not in FLOATING:
        return None
    return fenced(filled(Tensorlike(tuple(value.shape), name), generator), at_start)


def _declared(node: OpNode, tensors: list[Tensorlike]) -> tuple[TensorMeta, ...]:
    """What the op makes, as a hostile owner finds out: by running it on shapes."""
    shapes = Shapes(_program(node, tensors), {}, {})
    check_call(node, shapes)
    with FakeTensorMode():
        fakes = [torch.empty(t.shape, dtype=DTYPES[t.dtype]) for t in tensors]
        try:
            out = resolve(node.target)(**{name: _literal(arg, fakes) for name, arg in node.kwargs})
        except Exception as error:  # noqa: BLE001 - torch may raise anything
            raise UnsupportedOp(f"no shapes: {type(error).__name__}: {str(error)[:200]}") from None
    found = out if isinstance(out, tuple | list) else (out,)
    if not found or any(str(v.dtype).removeprefix("torch.") not in DTYPES for v in found):
        raise UnsupportedOp("it makes nothing, or a dtype that no node may declare")
    return tuple(TensorMeta(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in found)


def _literal(arg: Arg, fakes: list[Tensor]) -> object:
    if isinstance(arg, OpRef):
        return fakes[arg.op]
    if isinstance(arg, TorchLiteral):
        return torch_literal(arg, CPU)
    return [_literal(item, fakes) for item in arg] if isinstance(arg, tuple) else arg


def _program(node: OpNode, tensors: list[Tensorlike]) -> StageProgram:
    """The op, behind values of another stage, and a getitem for each tensor of a tuple."""
    place, several = len(tensors), len(node.outputs) > 1
    ops = [(place, replace(node, is_tuple=several))]
    if several:
        ops += [
            (place + 1 + at, OpNode("item", Kind.NON_PARAMETRIC, GETITEM, (OpRef(place), at), (), (meta,)))
            for at, meta in enumerate(node.outputs)
        ]
    made = range(place + 1, place + 1 + len(node.outputs)) if several else (place,)
    return StageProgram(
        stage=0,
        n_stages=1,
        ops=tuple(ops),
        constant_ops=frozenset(),
        received=tuple(
            Received(at, 0, t.grad and t.dtype in FLOATING, None, 0, t.meta) for at, t in enumerate(tensors)
        ),
        produced=tuple(Produced(op, (1,), True, 1) for op in made),
        inputs=(),
        parameters=(),
        buffers=(),
        constants=(),
        tied=(),
        loss=None,
    )


def _digest(values: list[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        flat = torch.zeros(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
