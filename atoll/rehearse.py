"""A program's ops on shapes alone, before any tensor is loaded: no allocation, no arithmetic.

A node's declared outputs are a peer's word; an op such as ``expand`` then ``add`` could ask for
any amount of memory while declaring little. The rehearsal runs the stage's own interpreter on
fake tensors and compares every result with its declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.errors import AtollError, UnsupportedOp
from atoll.execute import DTYPES, Executor
from atoll.job import Precision
from atoll.opdag import OpNode, TensorMeta
from atoll.program import StageProgram


def rehearse(
    program: StageProgram,
    leaves: Mapping[str, TensorMeta],
    inputs: Mapping[str, TensorMeta],
    precision: Precision,
    device: torch.device | str = "cpu",
) -> None:
    """Raise UnsupportedOp naming the first op whose result is not the declared one, or that fails.

    ``leaves`` are the metas of the program's parameters, buffers and constants. Costs about half
    a millisecond an op.
    """
    nodes = dict(program.ops)

    def observe(position: int, value: Any) -> None:
        several = isinstance(value, tuple | list)
        found = tuple(_meta(v) for v in (value if several else (value,)) if isinstance(v, Tensor))
        if found != nodes[position].outputs:
            raise _refusal(nodes[position], f"it makes {found} but declares {nodes[position].outputs}")

    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        executor = Executor(program, device, precision, differentiate=False)
        try:
            executor.load({name: _fake(meta, device) for name, meta in leaves.items()})
            executor.forward(
                0,
                0,
                {name: _fake(meta, device) for name, meta in inputs.items()},
                {r.op: _fake(r.meta, device) for r in program.received},
                observe,
            )
        except AtollError:
            raise
        except Exception as error:  # a forged argument can make torch raise anything
            text = " ".join(str(error).split())[:200]
            raise UnsupportedOp(
                f"the program does not run on its own shapes: {text}; it is refused"
            ) from error


def _fake(meta: TensorMeta, device: torch.device | str) -> Tensor:
    return torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device=device)


def _meta(value: Tensor) -> TensorMeta:
    return TensorMeta(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))


def _refusal(node: OpNode, why: str) -> UnsupportedOp:
    return UnsupportedOp(f"op {node.target!r} ({node.name[:80]}): {why}; it is refused")
