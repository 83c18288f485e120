"""Bytes a stage holds, for any interval of ops.

bytes(a, b, q) = state(a, b) + max(flow, update)
flow = q * activations(a, b) + 2 * boundary(a, b) + largest op(a, b) + messages(a, b)

with q micro-batches in flight. A micro-batch whose weight gradients are still to come keeps what these need
instead of all activations, which may be more. The largest op is the one whose backward makes the most at one
time: of an embedding or a head the gradient of the whole table, for each micro-batch, before it is added.
(An embedding on a CPU makes that of the rows it read; a plan may move to a GPU.)
Messages are the sums of parameters that are trained inside and outside. An update makes temporaries when the
flow is gone. state counts weights, gradients and optimizer state once a parameter, sums of earlier blocks of
micro-batches where there are several, what is exchanged where there are replicas, plus buffers and constants.

What any stage takes on a worker, whatever its model, is in ``Device.beside``; both together are everything
that a job adds to an idle worker, which is compared with its budget, and measured (``benchmarks.memory``).

A device with several intervals (``Together``) holds what two of them use once, and runs one at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from atoll.job import EXACTLY, Keeping, Optimizer, Place, Precision, Recompute, TrainingSpec
from atoll.opdag import DTYPE_BYTES, Kind, LeafRef, OpDag, Source, leaf_refs, op_refs
from atoll.ops import DEEPEST, cheap_again, is_layer
from atoll.optimizers import optimizer_of, state_elements, workspace_elements
from atoll.standing import standing_of
from coordinator.planning.costs.op_seconds import (
    apply_work,
    is_trained,
    leaf_meta,
    saved_bytes,
    weights_share,
)
from strategies.exchanges.catalogue import exchange_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from coordinator.planning.costs.traffic import Traffic

    Floats = NDArray[np.float64]

FigureT = TypeVar("FigureT", int, float)


UPDATE_PIECE_BYTES = 16 << 20
"""Of a gradient in float64, whose norm is taken in pieces: ``worker.stage.digests.PIECE`` elements."""
CODES = 0.51
"""Copies of parameters that moments in 8 bits are while they are stored: 2 bytes a parameter, and scales."""
JOINING = 2
"""Gradients beside a stage's own where there are other replicas: those that travel, and the totals."""


class MemoryModel:
    """Prefix sums over a DAG under a TrainingSpec; every query of an interval is O(1) but for
    leaves used more than once, which are few."""

    def __init__(
        self, dag: OpDag, training: TrainingSpec, traffic: Traffic, keeping: Keeping = EXACTLY
    ) -> None:
        n = len(dag.ops)
        own_copies = _own_copies(training)
        self.n_micro = training.n_micro
        self.full = keeping.recompute is Recompute.FULL
        self.autocast = training.precision is not Precision.FP32
        state, trainable, tensors = np.zeros(n), np.zeros(n), np.zeros(n)
        tied, update = np.zeros(n), np.zeros(n)
        clips = training.optimizer.clip_norm is not None
        shared: dict[LeafRef, list[int]] = {}
        last_use: dict[LeafRef, int] = {}
        repeats: list[tuple[float, ...]] = []
        used: dict[LeafRef, list[int]] = {}
        uses = Counter(leaf for node in dag.ops for leaf in leaf_refs(node))
        away = keeping.state_on is not Place.DEVICE
        step = {leaf: _step_figures(dag, leaf, training.optimizer, away) for leaf in uses}
        # A state that is elsewhere comes here for its step.
        work = {leaf: workspace_bytes(dag, leaf, training.optimizer) + step[leaf][3] for leaf in uses}
        held = {leaf: leaf_bytes(dag, leaf, training.optimizer, float(step[leaf][3])) for leaf in uses}
        stepped = np.zeros((n, 4))
        for op, node in enumerate(dag.ops):
            for leaf in leaf_refs(node):
                bytes_held, bytes_trained = held[leaf]
                once, again = (0.0, bytes_trained) if uses[leaf] > 1 else (bytes_trained, 0.0)
                state[op] += bytes_held
                state[op] += gradient_copies(once, again, training.blocks, alone=training.replicas == "1")
                state[op] += own_copies * bytes_trained
                trainable[op] += bytes_trained
                tied[op] += again
                tensors[op] += bytes_trained > 0
                # A scaled copy of a tied total, beside the total itself.
                update[op] = max(update[op], min(2 * bytes_trained, UPDATE_PIECE_BYTES), clips * again)
                if uses[leaf] > 1 and bytes_held:
                    used.setdefault(leaf, []).append(op)
                if again:
                    shared.setdefault(leaf, []).append(op)
                if leaf in last_use and bytes_held:
                    # Each use keeps its own gradient accumulator, everything else is held once.
                    once_held = (bytes_held - bytes_trained, bytes_trained, *step[leaf])
                    repeats.append((last_use[leaf], op, *once_held))
                last_use[leaf] = op
                stepped[op] += step[leaf]
                update[op] = max(update[op], work[leaf])
        selective = keeping.selective and not self.full
        self.again = _again_bytes(dag, keeping, selective)
        saved = np.array([saved_bytes(node, keeping) for node in dag.ops])
        saved *= keeping.saved_on is Place.DEVICE
        self._state, self._saved = prefix(state), prefix(saved)
        owed = _owed_bytes(dag, training.optimizer, DEEPEST if selective else 0)
        # Under autocast an op's own graph keeps the cast arguments and weights, too; layers have none.
        own = np.array([self.autocast and (selective or not is_layer(node)) for node in dag.ops], dtype=bool)
        self._owed, self._waiting = prefix(owed), prefix(owed + np.where(own & (owed > 0), saved, 0.0))
        self._trainable, self._tensors, self._tied = prefix(trainable), prefix(tensors), prefix(tied)
        self._stepped = np.concatenate((np.zeros((1, 4)), np.cumsum(stepped, axis=0)))
        self._blocks = training.blocks
        self._alone, self._own_copies = training.replicas == "1", own_copies
        self._largest, self._update = _largest_bytes(dag, training), update
        self._shared = [
            (ops[0], ops[-1], np.array(ops), float(leaf_meta(dag, leaf).nbytes))
            for leaf, ops in shared.items()
        ]
        self._repeats = np.array(repeats, dtype=np.float64).reshape(-1, 8)
        # Leaves of several ops: these, what is held once, of it what each use has a gradient for, and what a
        # step takes of it.
        self.leaves = [(np.array(ops), *held[leaf], step[leaf]) for leaf, ops in used.items()]
        self.live = traffic.live_bytes.astype(np.float64)  # [n + 1], 0 at both ends

    def state_bytes(self, a: int, b: int) -> float:
        """Weights, gradients, optimizer state, buffers and constants of ops [a, b)."""
        return float(self._state[b] - self._state[a]) - self._repeated(a, b, 2)

    def trained(self, a: int, b: int) -> tuple[float, float]:
        """(bytes, tensors) of the trainable parameters of ops [a, b)."""
        n_bytes = float(self._trainable[b] - self._trainable[a]) - self._repeated(a, b, 3)
        return n_bytes, float(self._tensors[b] - self._tensors[a])

    def stepped(self, a: int, b: int) -> Floats:
        """(bytes of optimizer state, bytes that a step moves, its FLOPs, bytes of state elsewhere) of the
        parameters of ops [a, b)."""
        inside = (self._repeats[:, 0] >= a) & (self._repeats[:, 1] < b)
        again: Floats = self._repeats[inside, 4:].sum(axis=0)
        found: Floats = self._stepped[b] - self._stepped[a] - again
        return found

    def gradients(self, a: int, b: int) -> tuple[float, float]:
        """Return the bytes of gradients of ops [a, b) as ``gradient_copies`` counts them: of parameters that
        one op uses, and of those that several do, once for each."""
        tied = float(self._tied[b] - self._tied[a])
        return float(self._trainable[b] - self._trainable[a]) - tied, tied

    def per_micro_bytes(self, a: int, b: int, *, defer: bool = False) -> float:
        """Return the bytes that a micro-batch in flight stores: saved activations and received values; where
        weight gradients are deferred, also what these need until they are computed."""
        kept = float(self.live[a]) + (0.0 if self.full else float(self._saved[b] - self._saved[a]))
        owed = float(self._owed[b] - self._owed[a]) if defer else 0.0
        # Under autocast an op's own graph keeps its arguments as they came beside the cast ones.
        return kept + owed if self.autocast else max(kept, owed)

    def fixed_bytes(self, a: int, b: int) -> float:
        """Everything that does not grow with the micro-batches in flight, update aside."""
        passing = self.boundary_bytes(a, b) + self.messages(((a, b),)) + self.largest_op(a, b)
        return self.state_bytes(a, b) + passing + self.again_bytes(a, b)

    def again_bytes(self, a: int, b: int) -> float:
        """Results that are computed again, at one time."""
        return float(self._saved[b] - self._saved[a]) if self.full else self.again

    def boundary_bytes(self, a: int, b: int) -> float:
        """A value being sent and one being received, or their gradients, on each side."""
        return 2.0 * float(self.live[a] + self.live[b])

    def messages(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of a parameter's sum for each that is trained inside and outside."""
        total = 0.0
        for _, _, ops, n_bytes in self._shared:
            inside = sum(int(np.searchsorted(ops, b) - np.searchsorted(ops, a)) for a, b in pieces)
            total += n_bytes if 0 < inside < len(ops) else 0.0
        return total

    def largest_op(self, a: int, b: int) -> float:
        """What the backward of the largest op makes at one time."""
        return self._most(self._largest, a, b)

    def update_bytes(self, a: int, b: int) -> float:
        """Temporaries of an update."""
        return self._most(self._update, a, b)

    def copies(self, once: float, tied: float) -> float:
        """Return the bytes of gradients beside each use's own, and of copies that an exchange's rule has."""
        beside = gradient_copies(once, tied, self._blocks, alone=self._alone)
        return beside + self._own_copies * (once + tied)

    @staticmethod
    def _most(of_ops: Floats, a: int, b: int) -> float:
        return float(of_ops[a:b].max()) if b > a else 0.0

    def micros_bytes(self, a: int, b: int, in_flight: int, whole: int | None = None) -> float:
        """Return the bytes of ``in_flight`` micro-batches, of which ``whole`` are before the end of their
        backward and the others wait for their weight gradients; None: all, and nothing waits."""
        if whole is None:
            return in_flight * self.per_micro_bytes(a, b)
        each, waiting = self.per_micro_bytes(a, b, defer=True), float(self._waiting[b] - self._waiting[a])
        return min(in_flight, whole) * each + max(0, in_flight - whole) * min(waiting, each)

    def bytes(self, a: int, b: int, in_flight: int, whole: int | None = None) -> float:
        """Bytes of a stage that runs ops [a, b) with ``in_flight`` micro-batches; see ``micros_bytes``."""
        flowing = self.fixed_bytes(a, b) + self.micros_bytes(a, b, in_flight, whole)
        return max(flowing, self.state_bytes(a, b) + self.update_bytes(a, b))

    def terms(self, a: int, b: int, in_flight: int, whole: int | None = None) -> dict[str, float]:
        """Return the same by name; the terms add up to it."""
        return Together(self, ((a, b),)).terms([(in_flight, whole)])

    def in_flight_cap(self, a: int, b: int, limit_bytes: float, *, defer: bool = False) -> int:
        """Most micro-batches in flight under ``limit_bytes``; 0 when not even one fits."""
        if self.state_bytes(a, b) + self.update_bytes(a, b) > limit_bytes:
            return 0
        room = limit_bytes - self.fixed_bytes(a, b)
        each = self.per_micro_bytes(a, b, defer=defer)
        if room < each:
            return 0
        if each <= 0 or room >= self.n_micro * each:
            return self.n_micro
        return int(room // each)

    def farthest(self, positions: NDArray[np.intp], limit_bytes: float, in_flight: int) -> NDArray[np.intp]:
        """[l] index of the last position up to which a stage from positions[l] fits, at least l.

        From the safe side: a leaf used twice counts twice, and a wide cut on the way ends it.
        """
        p, q = positions, 1 if self.full else in_flight
        passing = np.maximum.reduceat(self._largest, p[:-1]) if len(p) > 1 else np.zeros(0)
        step_limit = limit_bytes - self.again - sum(n_bytes for *_, n_bytes in self._shared)
        limit_bytes = step_limit - max(float(self._largest.max()), float(self._update.max()))
        grown = self._state[p] + q * self._saved[p]
        needed = np.maximum.accumulate(grown + 2.0 * self.live[p])
        room = limit_bytes + grown - (2 + in_flight) * self.live[p]
        far = np.searchsorted(needed, room, side="right") - 1
        here = np.arange(len(p))
        far = np.maximum(far, here)
        step = np.diff(grown) + (2 + in_flight) * self.live[p[:-1]] + 2.0 * self.live[p[1:]]
        far[:-1] = np.maximum(far[:-1], here[:-1] + (step + passing <= step_limit))
        return far

    def matrix(self, positions: NDArray[np.intp], in_flight: int) -> Floats:
        """[l, i] bytes of the stage from positions[l] to positions[i]; meaningless for i <= l."""
        p = positions
        kept = self._saved[p][None, :] - self._saved[p][:, None]
        flow = (1 if self.full else in_flight) * kept + self.again + self._most_matrix(self._largest, p)
        flow += ((2 + in_flight) * self.live[p])[:, None] + (2 * self.live[p])[None, :]
        for first, last, ops, n_bytes in self._shared:
            later = np.append(ops, len(self._largest))[np.searchsorted(ops, p)]  # the first use from p on
            split = (p[:, None] > first) | (p[None, :] <= last)
            flow += n_bytes * (split & (later[:, None] < p[None, :]))
        total = self._state[p][None, :] - self._state[p][:, None]
        if len(self._repeats):
            total = total - self._repeat_matrix(p)
        result: Floats = total + np.maximum(flow, self._most_matrix(self._update, p))
        return result

    @staticmethod
    def _most_matrix(of_ops: Floats, p: NDArray[np.intp]) -> Floats:
        """[l, i] the largest of ops from p[l] to p[i]; 0 for i <= l."""
        found = np.zeros((len(p), len(p)))
        if len(p) > 1:
            found[:, 1:] = np.maximum.reduceat(of_ops, p[:-1])
            found = np.maximum.accumulate(np.triu(found, 1), axis=1)
        return found

    def _repeat_matrix(self, p: NDArray[np.intp]) -> Floats:
        """[l, i] bytes counted twice: pairs of uses with p[l] <= first and second < p[i]."""
        k = len(p)
        counts = np.zeros((k + 1, k + 1))
        first = np.searchsorted(p, self._repeats[:, 0], side="right")  # rows l < first see it
        second = np.searchsorted(p, self._repeats[:, 1], side="right")  # columns i >= second do
        np.add.at(counts, (first, second), self._repeats[:, 2])
        below = counts[::-1].cumsum(axis=0)[::-1]  # sum over first >= row
        inside: Floats = below.cumsum(axis=1)[1:, :k]  # row l: first >= l + 1
        return inside

    def _repeated(self, a: int, b: int, column: int) -> float:
        pairs = self._repeats
        if not len(pairs):
            return 0.0
        inside = (pairs[:, 0] >= a) & (pairs[:, 1] < b)
        return float(pairs[inside, column].sum())


class Together:
    """Bytes of a device that holds several intervals of the ops: what two of them use is there once, and it
    runs one of them at a time."""

    def __init__(self, model: MemoryModel, pieces: Sequence[tuple[int, int]]) -> None:
        self.model, self.pieces = model, tuple(pieces)
        self._state_again = self._trained_again = 0.0
        self._stepped_again: Floats = np.zeros(4)
        for ops, held, trained, step in model.leaves:
            times = max(0, self._users(ops) - 1)
            self._state_again += (held - trained) * times
            self._trained_again += trained * times
            self._stepped_again = self._stepped_again + step * times

    def _users(self, ops: NDArray[np.intp]) -> int:
        """Return how many of the intervals have one of ``ops``, ascending."""
        if len(self.pieces) == 1:
            return 1  # which has what is used again counted
        return sum(bool(np.searchsorted(ops, a) < np.searchsorted(ops, b)) for a, b in self.pieces)

    def state_bytes(self) -> float:
        """Weights, gradients, optimizer state, buffers and constants."""
        return sum(self.model.state_bytes(a, b) for a, b in self.pieces) - self._state_again

    def trained(self) -> tuple[float, float]:
        """(bytes, tensors) of the trainable parameters."""
        n_bytes, tensors = zip(*(self.model.trained(a, b) for a, b in self.pieces), strict=True)
        return sum(n_bytes) - self._trained_again, sum(tensors)

    def stepped(self) -> Floats:
        """Return the same as ``MemoryModel.stepped``."""
        pieces = np.array([self.model.stepped(a, b) for a, b in self.pieces])
        found: Floats = pieces.sum(axis=0) - self._stepped_again
        return found

    def step_work(self) -> tuple[float, float, float]:
        """(bytes that an optimizer's step moves, tensors that it steps, its FLOPs)."""
        _, moved, flops, _ = self.stepped().tolist()
        return moved, self.trained()[1], flops

    def gradients(self) -> tuple[float, float]:
        """Return the bytes of gradients; see ``MemoryModel.gradients``."""
        once, tied = zip(*(self.model.gradients(a, b) for a, b in self.pieces), strict=True)
        return sum(once), sum(tied)

    def bytes(self, micros: Sequence[tuple[int, int | None]]) -> float:
        """Return the bytes with so many micro-batches by piece; see ``MemoryModel.micros_bytes``."""
        flowing = self._fixed_bytes() + self._micros_bytes(micros)
        return max(flowing, self._updating_bytes())

    def terms(self, micros: Sequence[tuple[int, int | None]]) -> dict[str, float]:
        """Return the same by name; the terms add up to it."""
        model, state, (once, tied) = self.model, self.state_bytes(), self.gradients()
        optimizer = float(self.stepped()[0])
        gradients = once + tied + model.copies(once, tied)
        found = {
            "weights": state - gradients - optimizer,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": self._again_bytes() + self._micros_bytes(micros),
            "boundary": self._boundary_bytes(),
            "largest op": max(model.largest_op(a, b) for a, b in self.pieces),
            "messages": model.messages(self.pieces),
        }
        more = self.bytes(micros) - sum(found.values())
        return found | {"optimizer temporaries": max(0.0, more)}

    def caps(self, limit_bytes: float, *, ends: bool) -> list[int]:
        """Return the most micro-batches in flight by piece, 0 where not even one each fits. ``ends``: the
        last piece ends the pipeline and never needs more than one; the others have equally many."""
        n = self.model.n_micro
        *others, last = (self.model.per_micro_bytes(a, b) for a, b in self.pieces)
        room = limit_bytes - self._fixed_bytes()
        if self._updating_bytes() > limit_bytes or room < sum(others) + last:
            return [0] * len(self.pieces)
        if room >= n * (sum(others) + last):
            return [n] * len(self.pieces)
        each = sum(others) if ends else sum(others) + last
        most = int((room - last * ends) // each) if each > 0 else n
        return [min(n, most)] * len(others) + [1 if ends else min(n, most)]

    def _fixed_bytes(self) -> float:
        largest = max(self.model.largest_op(a, b) for a, b in self.pieces)
        passing = self._boundary_bytes() + self.model.messages(self.pieces) + largest
        return self.state_bytes() + passing + self._again_bytes()

    def _boundary_bytes(self) -> float:
        return sum(self.model.boundary_bytes(a, b) for a, b in self.pieces)

    def _again_bytes(self) -> float:
        return max(self.model.again_bytes(a, b) for a, b in self.pieces)

    def _updating_bytes(self) -> float:
        return self.state_bytes() + max(self.model.update_bytes(a, b) for a, b in self.pieces)

    def _micros_bytes(self, micros: Sequence[tuple[int, int | None]]) -> float:
        both = zip(self.pieces, micros, strict=True)
        return sum(self.model.micros_bytes(a, b, in_flight, whole) for (a, b), (in_flight, whole) in both)


def _own_copies(training: TrainingSpec) -> float:
    """Return the copies of its parameters that a stage holds for exchanges and rounded checkpoints."""
    among = training.gradient_exchange if training.replicas != "1" else None
    joined = training.local_exchange or among
    found = exchange_facts(joined.rule).copies(joined) if joined is not None else 0.0
    return found + CODES * training.int8_moments


def _again_bytes(dag: OpDag, keeping: Keeping, selective: bool) -> float:
    """Return the bytes of results that are computed again, at one time; and of what is made whole for a
    backward or fetched, beside the one before."""
    cheap = [node.outputs[0].nbytes for node in dag.ops if selective and cheap_again(node)]
    found = DEEPEST * float(max(cheap, default=0))
    if keeping.bits or keeping.saved_on is not Place.DEVICE:
        found += 2.0 * max((node.bytes_saved for node in dag.ops), default=0)
    return found


def _largest_bytes(dag: OpDag, training: TrainingSpec) -> Floats:
    """[ops] what each op's backward makes at one time: gradients of its result, of its arguments and of its
    weights, which are added to those of earlier micro-batches; under autocast in both precisions. What
    follows from frozen weights alone is there once with what it is computed from, and beside its reader."""
    found = np.zeros(len(dag.ops))
    untrained = standing_of(dag, lambda name: is_trained(dag, name, training.optimizer))
    for op, node in enumerate(dag.ops):
        beside = sum(m.nbytes for ref in op_refs(node) if ref in untrained for m in dag.ops[ref].outputs)
        if op in untrained:
            found[op] = beside + sum(meta.nbytes for meta in node.outputs)
        if not node.requires_grad:
            continue
        trained = sum(leaf_bytes(dag, leaf, training.optimizer)[1] for leaf in leaf_refs(node))
        weights = trained if training.precision is Precision.FP32 else 1.5 * trained
        arguments = sum(
            m.nbytes for ref in op_refs(node) if dag.ops[ref].requires_grad for m in dag.ops[ref].outputs
        )
        # A loss is several ops to torch, each with a gradient of the size of the logits.
        twice = arguments if node.kind is Kind.LOSS or "cross_entropy" in node.target else 0
        found[op] = beside + weights + arguments + twice + sum(meta.nbytes for meta in node.outputs)
    return found


def _owed_bytes(dag: OpDag, optimizer: Optimizer, deepest: int) -> Floats:
    """[ops] what each op's weight gradients need, where they can come later: its arguments and the gradient
    of its result. An argument of several ops counts for each: they may be in different stages."""
    found = np.zeros(len(dag.ops))
    for op, node in enumerate(dag.ops):
        if weights_share(dag, op, optimizer):
            arguments = sum(_held_bytes(dag, ref, deepest) for ref in op_refs(node))
            found[op] = node.outputs[0].nbytes + arguments
    return found


def _held_bytes(dag: OpDag, op: int, deepest: int) -> int:
    """Return the bytes stored for an op's result: itself, or the values from which it is recomputed."""
    node = dag.ops[op]
    if deepest and cheap_again(node):
        return sum(_held_bytes(dag, ref, deepest - 1) for ref in op_refs(node))
    return node.outputs[0].nbytes


def gradient_copies(once: FigureT, tied: FigureT, blocks: int, *, alone: bool) -> FigureT:
    """Return the bytes of gradients that a stage holds beside each use's own: of several blocks the sum so
    far, where another stage may use the parameter, too, each one's; where there are other replicas, what
    travels. ``once``, ``tied``: see ``MemoryModel.gradients``."""
    sums = min(blocks - 1, 1) * once + (blocks - 1) * tied
    return sums if alone else sums + JOINING * (once + tied)


def leaf_bytes(dag: OpDag, leaf: LeafRef, optimizer: Optimizer, away: float = 0.0) -> tuple[float, float]:
    """(bytes held for a leaf by a stage that uses it, bytes of it that are trained); ``away``: bytes of its
    state that are elsewhere."""
    if leaf.source is Source.INPUT:
        return 0.0, 0.0
    n_bytes = float(leaf_meta(dag, leaf).nbytes)
    if leaf.source is not Source.PARAMETER or not is_trained(dag, leaf.name, optimizer):
        return n_bytes, 0.0
    return n_bytes * 2 + _state_bytes(dag, leaf.name, optimizer) - away, n_bytes


def prefix(values: Floats) -> Floats:
    """Cumulative sums with a leading 0: sum of [a, b) is prefix[b] - prefix[a]."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _state_bytes(dag: OpDag, name: str, optimizer: Optimizer) -> float:
    """Return the bytes of a trained parameter's optimizer state, which is of the parameter's type."""
    state = dag.parameters[name]
    own = optimizer_of(name, state, optimizer)
    kept = state_elements(own, state.meta.shape, optimizer.momentum)
    return float(kept * DTYPE_BYTES[state.meta.dtype])


def _step_figures(dag: OpDag, leaf: LeafRef, optimizer: Optimizer, away: bool) -> Floats:
    """[4] bytes of a leaf's optimizer state, bytes that its step moves, the step's FLOPs, and bytes of state
    that is ``away``."""
    if leaf.source is not Source.PARAMETER or not is_trained(dag, leaf.name, optimizer):
        return np.zeros(4)
    work = apply_work(leaf.name, dag.parameters[leaf.name], optimizer)
    state = _state_bytes(dag, leaf.name, optimizer)
    return np.array([0.0 if away else state, *work, state if away else 0.0])


def workspace_bytes(dag: OpDag, leaf: LeafRef, optimizer: Optimizer) -> float:
    """Return the bytes of what an optimizer's step of a leaf makes and drops again, in float32."""
    if leaf.source is not Source.PARAMETER or not is_trained(dag, leaf.name, optimizer):
        return 0.0
    state = dag.parameters[leaf.name]
    own = optimizer_of(leaf.name, state, optimizer)
    return float(DTYPE_BYTES["float32"] * workspace_elements(own, state.meta.shape, state.meta.dtype))
