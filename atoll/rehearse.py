"""A program judged before any tensor is loaded: every node checked, then run on shapes alone.

A node's declared outputs are a peer's word; an op such as ``expand`` then ``add`` could ask for
any amount of memory while declaring little. First each node's arguments are checked against the op's
schema and each other (``atoll.guards``), by the declared shapes. Then the stage's own interpreter runs on
fake tensors, which neither allocate nor compute, and every result is compared with its declaration, so
that the next node's check was of true shapes. The run also says what each op costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from atoll.calls import Shapes
from atoll.errors import AtollError, UnsupportedOp, UsageError
from atoll.execute import DTYPES, Executor
from atoll.guards import check_call
from atoll.job import Precision
from atoll.opdag import OpNode, TensorMeta
from atoll.ops import check_node, refusal
from atoll.program import StageProgram

# It logs a stack for every op that fails on shapes: a peer's forged op would fill the worker's log.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class RehearsalLimits:
    """Bounds of a program before a worker computes anything of it."""

    ops: int = 200_000
    output_bytes: int = 1 << 35  # of one tensor, those inside an op too
    kernels: int = 100_000  # that one op breaks down to
    first_s: float = 60.0  # for all ops together ...
    per_op_s: float = 0.1  # ... and this for each; half a millisecond is usual


@dataclass(frozen=True, slots=True)
class OpCost:
    """Bytes and operations of an op's forward."""

    bytes: int = 0
    flops: int = 0


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the kernels that an op breaks down to; stops one that asks for too much."""

    def __init__(self, limits: RehearsalLimits, ends_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limits, self._ends_s = limits, ends_s
        self._kernels = self._bytes = self._flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._kernels += 1
        if self._kernels > self._limits.kernels:
            raise UnsupportedOp(f"it breaks down to more than {self._limits.kernels} kernels")
        if time.monotonic() > self._ends_s:
            raise UnsupportedOp("its shapes take too long to follow")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            with suppress(TypeError):  # its formulas do not know the overloads with a dtype
                self._flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        if any(r.alias_info is None for r in func._schema.returns):  # no view
            for tensor in _tensors(out):
                self._bytes += tensor.nbytes
                if tensor.nbytes > self._limits.output_bytes:
                    raise UnsupportedOp(
                        f"it makes {tensor.nbytes} bytes on the way; {self._limits.output_bytes} are accepted"
                    )
        return out

    def take(self) -> OpCost:
        """The cost since the last call."""
        cost = OpCost(self._bytes, self._flops)
        self._kernels = self._bytes = self._flops = 0
        return cost


def rehearse(
    program: StageProgram,
    leaves: Mapping[str, TensorMeta],
    inputs: Mapping[str, TensorMeta],
    precision: Precision,
    device: torch.device | str = "cpu",
    limits: RehearsalLimits = RehearsalLimits(),
) -> dict[int, OpCost]:
    """Raise UnsupportedOp naming the first op that no honest capture makes, whose result is not the
    declared one, that fails, or that asks for more than ``limits``. Returns each op's cost, by position.

    ``leaves`` are the metas of the program's parameters, buffers and constants. Costs about half
    a millisecond an op.
    """
    nodes = dict(program.ops)
    shapes = Shapes(program, leaves, inputs)
    if len(nodes) > limits.ops:
        raise UnsupportedOp(f"the program has {len(nodes)} ops, at most {limits.ops} are accepted")
    for node in nodes.values():
        check_node(node, limits.output_bytes)
        check_call(node, shapes)
    meter = _Meter(limits, time.monotonic() + limits.first_s + limits.per_op_s * len(nodes))
    costs: dict[int, OpCost] = {}

    def observe(position: int, value: Any) -> None:
        found = tuple(_meta(v) for v in _tensors(value))
        if found != nodes[position].outputs:
            raise UnsupportedOp(f"it makes {found} but declares {nodes[position].outputs}")
        costs[position] = meter.take()

    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        executor = Executor(program, device, precision, differentiate=False)
        try:
            given = {name: _fake(meta, device) for name, meta in inputs.items()}
            received = {r.op: _fake(r.meta, device) for r in program.received}
            held = {name: _fake(meta, device) for name, meta in leaves.items()}
            with meter:
                executor.load(held, observe=observe)
                executor.forward(0, 0, given, received, observe)
        except UsageError:
            raise
        except Exception as error:  # a forged argument can make torch raise anything
            raise _named(None if executor.failed_at is None else nodes[executor.failed_at], error) from error
    return costs


def _named(node: OpNode | None, error: Exception) -> AtollError:
    """The error with the op that it came of."""
    if node is None:
        return error if isinstance(error, AtollError) else UnsupportedOp(f"the program does not run: {error}")
    text = " ".join(str(error).split())[:200]
    known = isinstance(error, AtollError)
    return refusal(node, text if known else f"it does not run on its own shapes: {text}")


def _tensors(value: Any) -> list[Tensor]:
    found = value if isinstance(value, tuple | list) else (value,)
    return [v for v in found if isinstance(v, Tensor)]


def _fake(meta: TensorMeta, device: torch.device | str) -> Tensor:
    return torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device=device)


def _meta(value: Tensor) -> TensorMeta:
    return TensorMeta(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
