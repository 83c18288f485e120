"""Seconds of every op on a device: measured where probed, else from FLOPs and bytes.

Ops that do the same work share a signature, so that a worker times each only once. A model's
blocks repeat: a 12-layer GPT has some 30 distinct ops among 400.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from atoll.job import EXACTLY, Optimizer, OptimizerName, Place, Recompute, packed_bytes
from atoll.messages.to_worker import OpProbe
from atoll.opdag import (
    Arg,
    Kind,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    StateMeta,
    TensorMeta,
    TorchLiteral,
    leaf_refs,
    op_refs,
)
from atoll.ops import cheap_again, weights_may_wait
from atoll.optimizers import muon_flops, optimizer_of
from atoll.standing import kept_for_backward, standing_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from atoll.job import Keeping
    from coordinator.planning.costs.fleet import Device

    Floats = NDArray[np.float64]

GETITEM = "builtin.getitem"
DEFAULT_GFLOPS = 20.0  # one modest CPU core
CLASSES = {
    "matmul": ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "addbmm", "addmv", "mv"),
    "conv": ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose2d"),
    "attention": ("scaled_dot_product_attention",),
}
_CLASS_OF = {name: cls for cls, names in CLASSES.items() for name in names}

SCALE_WEIGHT = 0.1  # of a new measurement in a worker's scale (decentralized.md 1.5)
SCALE_RANGE = (0.05, 20.0)


# Tensors read and written per parameter element in one optimizer step, fp32; of Muon outside its iterations.
_APPLY_PASSES = {
    OptimizerName.SGD: 3,
    OptimizerName.ADAMW: 7,
    OptimizerName.MUON: 14,
    OptimizerName.ADAFACTOR: 19,
    OptimizerName.LION: 13,
}
_PACKING_PASSES = (12, 6)  # tensors read and written to pack one into few bits, and to unpack it
UNMEASURED_BPS = 0.5e9  # to a disk and back, where nothing is known of it
APPLY_OVERHEAD_S = 20e-6  # per parameter tensor


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of each op of a DAG on one device, for one micro-batch."""

    forward_s: Floats  # [ops]
    backward_s: Floats
    weights_s: Floats  # of backward_s: weight gradients that can come later
    measured_share: float  # of the seconds, from probes rather than from the fallback


def op_class(target: str) -> str:
    """matmul, conv, attention, or elementwise for everything that moves more than it computes."""
    parts = target.split(".")
    return _CLASS_OF.get(parts[1] if len(parts) > 1 else target, "elementwise")


def leaf_meta(dag: OpDag, leaf: LeafRef) -> TensorMeta:
    """Shape and dtype of a named leaf."""
    if leaf.source is Source.INPUT:
        return dag.inputs[leaf.name]
    if leaf.source is Source.PARAMETER:
        return dag.parameters[leaf.name].meta
    if leaf.source is Source.BUFFER:
        return dag.buffers[leaf.name].meta
    return dag.constants[leaf.name]


def signature(dag: OpDag, op: int) -> str:
    """16 hex digits that are equal for ops of equal target, shapes, dtypes and literals."""
    node = dag.ops[op]

    def form(arg: Arg) -> str:
        if isinstance(arg, OpRef):
            source = dag.ops[arg.op]
            return f"op{_metas(source.outputs)}{int(source.requires_grad)}"
        if isinstance(arg, LeafRef):
            return f"{arg.source.value}{_metas((leaf_meta(dag, arg),))}{int(_leaf_grad(dag, arg))}"
        if isinstance(arg, tuple):
            return "(" + ",".join(map(form, arg)) + ")"
        if isinstance(arg, TorchLiteral):
            return f"{arg.kind}:{arg.name}"
        return repr(arg)

    text = "|".join(
        [
            node.target,
            form(node.args),
            *(f"{key}={form(value)}" for key, value in node.kwargs),
            _metas(node.outputs),
            f"{int(node.requires_grad)}{int(node.grad_enabled)}{node.autocast}",
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def signatures(dag: OpDag) -> tuple[str, ...]:
    """The signature of every op, "" for those that are free (getitem and constant ops)."""
    return tuple("" if _free(dag, op) else signature(dag, op) for op in range(len(dag.ops)))


def probe_ops(dag: OpDag) -> tuple[OpProbe, ...]:
    """Each distinct op once, in order of first appearance."""
    found: dict[str, OpProbe] = {}
    for op, sig in enumerate(signatures(dag)):
        if sig and sig not in found:
            node = dag.ops[op]
            found[sig] = OpProbe(
                sig,
                node,
                tuple(dag.ops[r].outputs[0] for r in op_refs(node)),
                {leaf.name: leaf_meta(dag, leaf) for leaf in leaf_refs(node)},
            )
    return tuple(found.values())


def fallback_seconds(node: OpNode, device: Device) -> tuple[float, float]:
    """Roofline: max(FLOPs / class rate, bytes / memory rate) + overhead, forward and backward.

    The backward of an op without gradient takes no time; its bytes are twice the forward's.
    """
    rate = device.gflops.get(op_class(node.target), device.gflops.get("", DEFAULT_GFLOPS)) * 1e9
    memory = device.memory_gbps * 1e9
    forward = max(node.flops_forward / rate, node.bytes_moved / memory) + device.op_overhead_s
    if not node.requires_grad:
        return forward, 0.0
    backward = max(node.flops_backward / rate, 2 * node.bytes_moved / memory) + device.op_overhead_s
    return forward, backward


class OpTable:
    """A DAG's ops as arrays, so that a thousand devices cost a thousand vector operations."""

    def __init__(
        self, dag: OpDag, sigs: tuple[str, ...] | None = None, optimizer: Optimizer | None = None
    ) -> None:
        sigs = signatures(dag) if sigs is None else sigs
        self._names, kinds = np.unique(np.array(sigs), return_inverse=True)
        self._kind: NDArray[np.intp] = kinds.astype(np.intp)  # [ops] index of its signature
        # Ops of one signature have equal figures: one row a signature is enough.
        first = {sig: op for op, sig in reversed(list(enumerate(sigs)))}
        self._nodes = [dag.ops[first[str(name)]] for name in self._names]
        # Not by signature: it does not tell which parameters are frozen.
        optimizer = optimizer or Optimizer()
        shares = [weights_share(dag, op, optimizer) for op in range(len(dag.ops))]
        self._weights_share: Floats = np.array(shares)  # [ops]
        untrained = kept_for_backward(dag, standing_of(dag, lambda name: is_trained(dag, name, optimizer)))
        self._standing: Floats = np.zeros(len(dag.ops))  # [ops] 1 where every backward runs it again
        self._standing[sorted(untrained)] = 1.0
        cheap = [float(cheap_again(node) > 0 and node.requires_grad) for node in dag.ops]
        self._cheap: Floats = np.array(cheap)  # [ops] 1 where a selective recomputation runs it again
        self._dag = dag
        self._few: Floats = np.array([float(node.bytes_few) for node in dag.ops])  # [ops]

    def costs(self, device: Device, keeping: Keeping = EXACTLY) -> Costs:
        """Every op's seconds on ``device``, with what it takes to keep and run again what is needed again."""
        seconds = np.zeros((len(self._nodes), 2))
        probed = np.zeros(len(self._nodes), dtype=bool)
        for i, (name, node) in enumerate(zip(self._names, self._nodes, strict=True)):
            if not name:
                continue
            timing = device.timings.get(str(name))
            probed[i] = timing is not None
            seconds[i] = timing or fallback_seconds(node, device)
        forward, backward = seconds[self._kind, 0], seconds[self._kind, 1]
        weights = backward * self._weights_share
        again = self._standing
        if keeping.recompute is Recompute.FULL:
            again = again + 1.0
        elif keeping.selective:
            again = again + self._cheap
        backward = backward + again * forward
        if keeping.bits:
            pack_bps, unpack_bps = packing_rates(device, keeping)
            forward, backward = forward + self._few / pack_bps, backward + self._few / unpack_bps
        if keeping.saved_on is not Place.DEVICE:
            stored = np.array([saved_bytes(node, keeping) for node in self._dag.ops])
            away_bps, back_bps = away_rates(device, keeping.saved_on)
            forward, backward = forward + stored / away_bps, backward + stored / back_bps
        total = float((forward + backward).sum())
        share = float((forward + backward)[probed[self._kind]].sum()) / total if total else 0.0
        return Costs(forward * device.scale, backward * device.scale, weights * device.scale, share)

    def totals(self, devices: Sequence[Device]) -> Floats:
        """[devices] seconds of all ops of a micro-batch, nothing run again."""
        count = np.bincount(self._kind, minlength=len(self._names)).tolist()
        kinds = [
            (str(name), node, n)
            for name, node, n in zip(self._names, self._nodes, count, strict=True)
            if name
        ]
        return np.array(
            [
                d.scale
                * sum(n * sum(d.timings.get(name) or fallback_seconds(node, d)) for name, node, n in kinds)
                for d in devices
            ]
        )


def saved_bytes(node: OpNode, keeping: Keeping) -> float:
    """Return the bytes that a micro-batch in flight stores for an op, wherever."""
    selective = keeping.selective and keeping.recompute is not Recompute.FULL
    found = float(node.bytes_saved - selective * node.bytes_repeatable)
    return found - node.bytes_few + packed_bytes(node.elements_few, keeping.bits) if keeping.bits else found


def packing_rates(device: Device, keeping: Keeping) -> tuple[float, float]:
    """Return the dense bytes a second that a device packs into few bits, and unpacks: as it has measured."""
    memory = device.memory_gbps * 1e9
    packs, unpacks = _PACKING_PASSES
    return device.codec_speeds.get(keeping.activations.rate, (memory / packs, memory / unpacks))


def away_rates(device: Device, place: Place) -> tuple[float, float]:
    """Return the bytes a second that a device puts elsewhere, and takes back: as it has measured."""
    speeds = device.codec_speeds
    return speeds.get(place.rate) or speeds.get(Place.DISK.rate) or (UNMEASURED_BPS, UNMEASURED_BPS)


def is_trained(dag: OpDag, parameter: str, optimizer: Optimizer) -> bool:
    """Return whether a parameter gets gradients: requires them and is in no frozen group."""
    group = optimizer.group_of(parameter)
    return dag.parameters[parameter].requires_grad and not (group is not None and group.frozen)


def weights_share(dag: OpDag, op: int, optimizer: Optimizer) -> float:
    """Part of an op's backward that its weight gradients take, where they can come later.

    Of a product both gradients cost as much as the product itself; what has only the weights' to give, as
    an embedding or a first layer, has nothing else.
    """
    node = dag.ops[op]
    names = [leaf.name for leaf in leaf_refs(node) if leaf.source is Source.PARAMETER]
    if not node.requires_grad or not weights_may_wait(node):
        return 0.0
    if not any(is_trained(dag, name, optimizer) for name in names):
        return 0.0
    return 0.5 if any(dag.ops[ref].requires_grad for ref in op_refs(node)) else 1.0


def refresh_scale(
    scale: float,
    unit_s: float,
    measured_s: float,
    samples: int = 0,
    within: tuple[float, float] = SCALE_RANGE,
) -> float:
    """The mean of the first measured_s / unit_s, then their moving average.

    ``unit_s`` is what was predicted at scale 1, ``samples`` how many measurements ``scale`` already
    holds. Impossible figures leave it as it is; the result stays ``within``.
    """
    if not (isfinite(measured_s) and measured_s > 0.0 and isfinite(unit_s) and unit_s > 0.0):
        return scale
    weight = max(SCALE_WEIGHT, 1.0 / (samples + 1))
    blended = scale + weight * (measured_s / unit_s - scale)
    return min(max(blended, within[0]), within[1])


def apply_work(name: str, state: StateMeta, optimizer: Optimizer) -> tuple[float, float]:
    """(bytes that a step of a trained parameter reads and writes, its floating-point operations)."""
    own = optimizer_of(name, state, optimizer)
    flops = muon_flops(state.meta.shape) if own is OptimizerName.MUON else 0.0
    return float(_APPLY_PASSES[own] * state.meta.nbytes), flops


def apply_seconds(
    n_bytes: float, n_tensors: float, flops: float, device: Device, away_s: float = 0.0
) -> float:
    """Optimizer step that moves ``n_bytes`` and multiplies ``flops``: memory passes, products, overhead, and
    ``away_s`` for states that come from elsewhere and go back.

    Products at the rate of float32; a GPU's in bfloat16 take less.
    """
    rate = device.gflops.get("matmul", device.gflops.get("", DEFAULT_GFLOPS)) * 1e9
    seconds = n_bytes / (device.memory_gbps * 1e9) + n_tensors * APPLY_OVERHEAD_S + flops / rate
    return seconds * device.scale + away_s


def _free(dag: OpDag, op: int) -> bool:
    # Constant ops are computed once when a stage loads, not once a micro-batch.
    return op in dag.constant_ops or dag.ops[op].target == GETITEM or dag.ops[op].kind is Kind.PLACEHOLDER


def _metas(metas: tuple[TensorMeta, ...]) -> str:
    return ";".join(f"{m.dtype}{list(m.shape)}" for m in metas)


def _leaf_grad(dag: OpDag, leaf: LeafRef) -> bool:
    return leaf.source is Source.PARAMETER and dag.parameters[leaf.name].requires_grad
