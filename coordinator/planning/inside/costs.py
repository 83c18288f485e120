"""A graph as each process of a mesh has it, and what the processes take for it together.

seconds(op) = share(op) seconds of one device + collectives, each latency + bytes / rate of the mesh's probe
bytes of a process = the memory model of its own graph + what is fetched whole for one op, and its gradient

Where keys and values go round, a block travels while the one before it is computed on: with c seconds of
compute and s of sends on D processes, max(c, c / D + s). Of a causal attention the last process computes
most: D - 1 blocks and a half of the D^2 / 2 that there are.

A stage is priced by the whole graph's inside plan, but for what its cuts keep whole (``regions``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from atoll.mesh.layout import Inside, Kernel, Way
from atoll.mesh.rules import RINGS
from atoll.mesh.share import Terms, held_whole, local_metas, share_all, trained_names
from atoll.mesh.volumes import Sent, op_volumes, reduced_bytes
from atoll.opdag import DTYPE_BYTES, LeafRef, Source, leaf_refs
from atoll.program import stage_programs
from coordinator.planning.costs.memory import MemoryModel, leaf_bytes
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.inside.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from atoll.job import Keeping, Optimizer, TrainingSpec
    from atoll.mesh.share import Shared, Turn
    from atoll.opdag import OpDag, OpNode, StateMeta, TensorMeta
    from coordinator.planning.costs.fleet import Mesh
    from coordinator.planning.costs.op_seconds import Costs

    Floats = NDArray[np.float64]

COPIES, BLOCKS = 1.5, 3.0
CAUSAL = (Kernel.CAUSAL, Kernel.RING_CAUSAL)


class ProcessMemory(MemoryModel):
    """Bytes of one process, where several hold a stage together."""

    def __init__(
        self, dag: OpDag, training: TrainingSpec, keeping: Keeping, fetched: Floats, regions: Regions
    ) -> None:
        """``dag``: as the process has it; ``fetched`` [ops]: bytes of weights that are whole for one op."""
        super().__init__(dag, training, Traffic(dag, training.optimizer, training.blocks), keeping)
        self._largest = self._largest + 2.0 * fetched
        self._regions = regions

    def state_bytes(self, a: int, b: int) -> float:
        return super().state_bytes(a, b) + self._regions.more_bytes(a, b)


@dataclass(frozen=True)
class Divided:
    """One kind of inside plan of a whole graph for ``size`` processes, whatever its stages keep."""

    kind: Inside
    size: int
    dag: OpDag  # as a process has it
    fetched: Floats  # [ops] bytes of weights that are whole for one op
    share: Floats  # [ops] of an op's seconds that a process takes
    sent: dict[int, tuple[Sent, Sent]]  # by op: forward, backward of a micro-batch
    stored: float  # part of the parameters that a process holds
    regions: Regions
    sent_once: dict[int, Sent]  # by op: sums of gradients, once for the micro-batches of a step
    overlaps: frozenset[int]  # ops that compute while their keys and values travel


Divisions = dict[tuple["Optimizer", bool, Inside, int], Divided]
"""Of one graph, by all that they depend on beside it."""


@dataclass(frozen=True)
class InsideCosts:
    """One kind of inside plan with what a step takes by it and what a process holds."""

    divided: Divided
    training: TrainingSpec
    keeping: Keeping

    @cached_property
    def memory(self) -> ProcessMemory:
        """Bytes of a process; made where it is asked for, as most kinds are only compared by seconds."""
        own = self.divided
        return ProcessMemory(own.dag, self.training, self.keeping, own.fetched, own.regions)

    @property
    def kind(self) -> Inside:
        """The kind."""
        return self.divided.kind

    @property
    def stored(self) -> float:
        """Part of the parameters that a process holds."""
        return self.divided.stored

    @property
    def regions(self) -> Regions:
        """Regions of the graph that are divided."""
        return self.divided.regions

    def costs(self, whole: Costs, mesh: Mesh) -> Costs:
        """Every op's seconds on the mesh; ``whole``: on one of its devices alone."""
        own = self.divided
        forward, backward = whole.forward_s * own.share, whole.backward_s * own.share
        for op, (ahead, back) in own.sent.items():
            if op in own.overlaps:
                forward[op] = _overlapped_s(forward[op], ahead, mesh)
                # The last sums of gradients have no compute left to travel behind.
                last = joint_s(ahead, mesh) / (mesh.size - 1) if back.n_bytes > ahead.n_bytes else 0.0
                backward[op] = max(_overlapped_s(backward[op], back, mesh), backward[op] + last)
            else:
                forward[op] += joint_s(ahead, mesh)
                backward[op] += joint_s(back, mesh)
        for op, sums in own.sent_once.items():
            backward[op] += joint_s(sums, mesh) / self.training.n_micro
        return replace(whole, forward_s=forward, backward_s=backward, weights_s=whole.weights_s * own.share)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each process sends the others for a micro-batch, its part of a step's sums included."""
        own = self.divided
        once = sum(sums.n_bytes for sums in own.sent_once.values())
        return once // self.training.n_micro + sum(
            ahead.n_bytes + back.n_bytes for ahead, back in own.sent.values()
        )


Seconds = tuple[float, float, float]  # forward, backward, weights


def undivided(inside: InsideCosts | None, alone: Costs, joint: Costs) -> Callable[[int, int], Seconds]:
    """Return the seconds that a stage of ops [a, b) takes beside ``joint``, as its cuts keep some whole."""
    one = np.stack((alone.forward_s, alone.backward_s, alone.weights_s))
    more = one - np.stack((joint.forward_s, joint.backward_s, joint.weights_s))

    def of_stage(a: int, b: int) -> Seconds:
        whole = [] if inside is None else inside.regions.whole_ops(a, b)
        forward, backward, weights = more[:, whole].sum(axis=1)
        return float(forward), float(backward), float(weights)

    return of_stage


def joint_s(sent: Sent, mesh: Mesh) -> float:
    """Return the seconds of collectives: alpha each, beta a byte."""
    return sent.calls * mesh.latency_s + sent.n_bytes / mesh.bytes_per_s


def _overlapped_s(compute_s: float, sent: Sent, mesh: Mesh) -> float:
    return max(compute_s, compute_s / mesh.size + joint_s(sent, mesh))


def inside_costs(
    dag: OpDag,
    training: TrainingSpec,
    keeping: Keeping,
    kind: Inside,
    size: int,
    known: Divisions | None = None,
) -> InsideCosts:
    """Return what one kind of inside plan costs, whatever the devices are; ``known``: of this graph, where
    what is found is kept."""
    known = {} if known is None else known
    key = training.optimizer, training.int8_moments, kind, size
    if key not in known:
        known[key] = _divided(dag, training, kind, size)
    return InsideCosts(known[key], training, keeping)


def _divided(dag: OpDag, training: TrainingSpec, kind: Inside, size: int) -> Divided:
    (program,) = stage_programs(dag, (0,))
    parameters = {name: state.meta for name, state in dag.parameters.items()}
    metas = {**parameters, **{n: s.meta for n, s in dag.buffers.items()}, **dag.constants, **dag.inputs}
    trained, held = trained_names(dag.parameters, training), held_whole(dag.parameters, training)
    terms = Terms(kind, size, metas, trained, held)
    (shared,) = share_all((program,), lambda _: terms)
    own = _process_dag(dag, shared, local_metas(shared, metas, size))
    fetched, share = np.zeros(len(dag.ops)), np.ones(len(dag.ops))
    for op, turn in shared.turns.items():
        fetched[op] = _passing_bytes(turn, dag.ops[op], size)
    share[sorted(shared.divided)] = 1.0 / size
    share[[op for op, turn in shared.turns.items() if turn.kernel in CAUSAL]] = (2 * size - 1) / size**2
    more = {
        name: _held(dag, name, training.optimizer) - _held(own, name, training.optimizer)
        for name in shared.stored
    }
    regions = Regions(dag, shared, more)
    whole = sum(meta.nbytes for meta in parameters.values())
    stored = sum(own.parameters[name].meta.nbytes for name in parameters)
    return Divided(
        kind,
        size,
        own,
        fetched,
        share,
        op_volumes(shared, size),
        stored / max(1, whole),
        regions,
        _sent_once(dag, shared, size),
        frozenset(op for op, turn in shared.turns.items() if turn.kernel in RINGS),
    )


def _passing_bytes(turn: Turn, node: OpNode, size: int) -> float:
    """Return the bytes that an op's process has beside its own part; as much again is counted for gradients.

    Of matrices the whole. Of keys and values the whole, too, with the copy that takes it apart; going round,
    two blocks and the joint result, in the backward sums of gradients on their way beside them.
    """
    found = 0.0
    for move in turn.moves.values():
        if move.way in (Way.FETCH, Way.COPY):
            found += move.nbytes
        elif move.way is Way.LEND:
            found += COPIES * move.nbytes
        elif move.way is Way.ROUND:
            found += BLOCKS * move.nbytes / size
    own = node.outputs[0]
    if turn.kernel in RINGS:
        found += DTYPE_BYTES["float32"] * own.elements / size
    elif turn.kernel is Kernel.CAUSAL:  # a mask of own tokens by all
        found += DTYPE_BYTES[own.dtype] * own.shape[2] ** 2 / size / 2  # and has no gradient
    return found


def _sent_once(dag: OpDag, shared: Shared, size: int) -> dict[int, Sent]:
    """Sums of a step's gradients, at the first op that uses each parameter."""
    found: dict[int, Sent] = {}
    there = dict(shared.summed)
    for op, node in enumerate(dag.ops):
        for leaf in leaf_refs(node):
            n_bytes = there.pop(leaf.name, None) if leaf.source is Source.PARAMETER else None
            if n_bytes is not None:
                found[op] = found.get(op, Sent()).and_then(reduced_bytes(n_bytes, size))
    return found


def _held(dag: OpDag, name: str, optimizer: Optimizer) -> float:
    return leaf_bytes(dag, LeafRef(Source.PARAMETER, name), optimizer)[0]


def _process_dag(dag: OpDag, shared: Shared, metas: Mapping[str, TensorMeta]) -> OpDag:
    """The graph with the shapes of one process."""
    nodes = dict(shared.program.ops)

    def state(name: str, of: StateMeta) -> StateMeta:
        return replace(of, meta=metas[name])

    return replace(
        dag,
        ops=tuple(nodes.get(op, node) for op, node in enumerate(dag.ops)),
        inputs={name: metas[name] for name in dag.inputs},
        parameters={name: state(name, of) for name, of in dag.parameters.items()},
        tail=None,
    )
