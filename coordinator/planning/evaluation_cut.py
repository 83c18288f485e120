"""The cut of the evaluation DAG that goes with a training cut.

Evaluation runs on the same workers, each op where its parameters and its mutated buffers already
are: a stage evaluates a contiguous interval of the evaluation DAG, possibly empty. Among the cuts
that allow it, the one with the fewest bytes across. None when there is no such cut. No stage begins
behind the loss, so that it is with the last stage that evaluates anything.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.opdag import LeafRef, OpDag, Source, leaf_refs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EMPTY_COST = 1e-3  # bytes: an empty interval is a last resort among equals


def evaluation_intervals(
    dag: OpDag, starts: Sequence[int], owners: Sequence[int], eval_dag: OpDag, live_bytes: NDArray[np.int64]
) -> tuple[tuple[int, int], ...] | None:
    """Half-open op intervals of ``eval_dag`` by piece, or None.

    ``starts``: where the training pieces begin in ``dag``; ``owners``: whose they are, as what one of a
    stage's pieces holds its others hold, too; ``live_bytes`` [ops + 1]: bytes across each position of
    ``eval_dag``.
    """
    holders = _holders(dag, starts, owners)
    n_stages, n = len(starts), len(eval_dag.ops)
    forbidden = np.zeros((n_stages, n + 1), dtype=np.int64)
    for op, node in enumerate(eval_dag.ops):
        for leaf in leaf_refs(node):
            if leaf in holders:
                for stage in set(range(n_stages)) - holders[leaf]:
                    forbidden[stage, op + 1] += 1
    wrong = np.cumsum(forbidden, axis=1)
    inner = [position for position in eval_dag.cuttable() if position <= eval_dag.loss]
    positions = np.array([0, *inner, n], dtype=np.intp)
    return _least_bytes(positions, wrong[:, positions], live_bytes[positions].astype(np.float64))


def _least_bytes(
    positions: NDArray[np.intp], wrong: NDArray[np.int64], cost: NDArray[np.float64]
) -> tuple[tuple[int, int], ...] | None:
    k = len(positions)
    best = np.full(k, np.inf)
    best[0] = 0.0
    came = []
    backwards = np.tri(k, k, -1, dtype=bool)
    for stage in range(len(wrong)):
        allowed = (wrong[stage][None, :] == wrong[stage][:, None]) & ~backwards
        entry = best + (cost if stage else 0.0)
        total = np.where(allowed, entry[:, None], np.inf)
        total[np.arange(k), np.arange(k)] += EMPTY_COST
        came.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    bounds = [k - 1]
    for source in reversed(came):
        bounds.append(int(source[bounds[-1]]))
    bounds.reverse()
    return tuple((int(positions[a]), int(positions[b])) for a, b in pairwise(bounds))


def _holders(dag: OpDag, starts: Sequence[int], owners: Sequence[int]) -> dict[LeafRef, set[int]]:
    pieces = {owner: [at for at, other in enumerate(owners) if other == owner] for owner in owners}
    found: dict[LeafRef, set[int]] = {}
    for op, node in enumerate(dag.ops):
        for leaf in leaf_refs(node):
            if _stateful(dag, leaf):
                found.setdefault(leaf, set()).update(pieces[owners[bisect_right(starts, op) - 1]])
    return found


def _stateful(dag: OpDag, leaf: LeafRef) -> bool:
    """Return whether training changes the leaf, so that only its holder has the newest value."""
    if leaf.source is Source.BUFFER:
        return dag.buffers[leaf.name].mutated
    return leaf.source is Source.PARAMETER
