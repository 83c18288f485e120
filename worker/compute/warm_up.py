"""What the first computation of a process brings with it, before the process is measured at rest."""

from __future__ import annotations

from atoll.messages.to_worker import OpProbe
from atoll.opdag import Kind, LeafRef, OpNode, Source, TensorMeta
from worker.machine.op_timing import time_ops

_VALUE = TensorMeta((8, 8), "float32")


def warm_up() -> None:
    """Rehearse an op, run it and differentiate it, as the first stage would.

    torch imports modules of its compiler as soon as it follows shapes, and sympy as soon as it is given a
    gradient: 70 MiB and some seconds, whatever the model is.
    """
    leaves = (LeafRef(Source.INPUT, "x"), LeafRef(Source.PARAMETER, "w"))
    node = OpNode(
        "warm_up", Kind.PARAMETRIC, "aten.linear.default", leaves, (), (_VALUE,), requires_grad=True
    )
    time_ops([OpProbe("warm_up", node, (), {"x": _VALUE, "w": _VALUE})], sustained_s=0.0)
