"""Ops to time, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.opdag import OpNode, TensorMeta


@dataclass(frozen=True, slots=True)
class OpProbe:
    """An op to time. ``op_inputs`` describe ``op_refs(node)``, ``leaves`` ``leaf_refs(node)``, in
    order; ``op_grads``: which op inputs require a gradient (None: guessed)."""

    signature: str
    node: OpNode
    op_inputs: tuple[TensorMeta, ...]
    leaves: tuple[TensorMeta, ...]
    op_grads: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class OpTiming:
    """Seconds of an op on this device."""

    forward_s: float
    backward_s: float  # 0 where the output requires no gradient
