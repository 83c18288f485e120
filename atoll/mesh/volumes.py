"""Bytes that each process of a mesh sends for a program: what its inside plan costs. Pure.

All-reduce of V bytes among D processes: 2 (D - 1) / D V sent by each; all-gather and reduce-scatter: half of
that. Source: ring algorithms (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from atoll.job import Recompute
from atoll.mesh.layout import Kernel, Way
from atoll.opdag import DTYPE_BYTES

if TYPE_CHECKING:
    from atoll.mesh.share import Shared, Turn
    from atoll.opdag import OpNode

COUNT_BYTES = DTYPE_BYTES["int64"]


def reduced_bytes(n_bytes: int, size: int) -> int:
    """Return what each process sends for an all-reduce of a tensor."""
    return 2 * (size - 1) * n_bytes // size


def gathered_bytes(n_bytes: int, size: int) -> int:
    """Return what each process sends for an all-gather into a tensor of so many bytes."""
    return (size - 1) * n_bytes // size


scattered_bytes = gathered_bytes


class Sent(NamedTuple):
    """Bytes that each process sends, and collectives that it takes part in."""

    n_bytes: int = 0
    calls: int = 0

    def and_then(self, n_bytes: int, calls: int = 1) -> Sent:
        return Sent(self.n_bytes + n_bytes, self.calls + calls)


def op_volumes(shared: Shared, size: int) -> dict[int, tuple[Sent, Sent]]:
    """Return what each op's forward and backward send for a micro-batch, by position; most send nothing."""
    nodes = dict(shared.program.ops)
    found = {op: _of(nodes[op], turn, size) for op, turn in shared.turns.items()}
    return {op: both for op, both in found.items() if any(sent.calls for sent in both)}


def step_volume(shared: Shared, size: int) -> Sent:
    """Return what the sums of a step's gradients send, once behind all micro-batches."""
    sent = Sent()
    for n_bytes in shared.summed.values():
        sent = sent.and_then(reduced_bytes(n_bytes, size))
    return sent


def micro_volume(
    shared: Shared, size: int, *, trains: bool = True, recompute: Recompute = Recompute.OFF
) -> Sent:
    """Return what a micro-batch's forward and, where it trains, its backward send."""
    n_bytes = calls = 0
    for forward, backward in op_volumes(shared, size).values():
        times = 1 + (trains and recompute is Recompute.FULL)
        n_bytes += times * forward.n_bytes + trains * backward.n_bytes
        calls += times * forward.calls + trains * backward.calls
    return Sent(n_bytes, calls)


def _of(node: OpNode, turn: Turn, size: int) -> tuple[Sent, Sent]:
    ahead, back = _of_rounds(turn, size)
    out = sum(meta.nbytes for meta in node.outputs)
    for move in turn.moves.values():
        whole = gathered_bytes(move.nbytes, size)
        if move.way is Way.ENTER and move.last:
            back = back.and_then(reduced_bytes(move.nbytes, size))
        elif move.way is Way.GATHER and move.last:
            ahead = ahead.and_then(whole)
        elif move.way is Way.TAKE and move.differentiable:
            back = back.and_then(whole)
        elif move.way in (Way.LEND, Way.SCATTER):
            ahead = ahead.and_then(whole)
            for _ in range(move.differentiable + (move.way is Way.LEND and turn.again)):
                back = back.and_then(whole)
        elif move.way is Way.SUM:
            ahead = ahead.and_then(reduced_bytes(move.nbytes, size))
        elif move.way in (Way.FETCH, Way.COPY):
            ahead = ahead.and_then(whole)
            if turn.again:
                back = back.and_then(whole)
            if move.way is Way.FETCH and move.differentiable:
                back = back.and_then(whole)
    if turn.kernel is Kernel.VOCABULARY_LOSS:
        rows = turn.rows * DTYPE_BYTES["float32"]
        ahead = ahead.and_then(reduced_bytes(rows, size)).and_then(reduced_bytes(2 * rows, size))
    elif turn.kernel is Kernel.ROWS_LOSS:
        ahead = ahead.and_then(reduced_bytes(out, size)).and_then(reduced_bytes(COUNT_BYTES, size))
    elif turn.sums:
        ahead = ahead.and_then(reduced_bytes(out, size))
    return ahead, back


def _of_rounds(turn: Turn, size: int) -> tuple[Sent, Sent]:
    """Keys and values are passed on together: to all others forward, and again backward with the sums of
    their gradients behind them."""
    rounds = [move for move in turn.moves.values() if move.way is Way.ROUND]
    if not rounds:
        return Sent(), Sent()
    n_bytes = sum(gathered_bytes(move.nbytes, size) for move in rounds)
    times = 1 + any(move.differentiable for move in rounds)
    return Sent(n_bytes, size - 1), Sent(times * n_bytes, times * (size - 1))
