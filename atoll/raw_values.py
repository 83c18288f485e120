"""Ops of a graph that read its inputs, or what follows from the inputs alone.

Where a job's inputs stay with one worker, all of these are that worker's, so that no value leaves it in which
no trained parameter has had a part. That keeps rows, labels and masks at home; it does not make what leaves
safe: who knows the weights reads text from activations (SECURITY.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.opdag import Source, leaf_refs, op_refs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.opdag import OpNode


def reads_inputs(ops: Iterable[tuple[int, OpNode]]) -> dict[int, bool]:
    """Return by position, ascending, the ops that read inputs or raw values, and whether what they give is
    raw again: no parameter, and nothing that follows from one, is among their arguments.

    A value that none of these ``ops`` computes is not raw.
    """
    found: dict[int, bool] = {}
    plain: set[int] = set()  # that follow from nothing but literals, constants and buffers
    for position, node in ops:
        sources, values = {leaf.source for leaf in leaf_refs(node)}, op_refs(node)
        learnt = Source.PARAMETER in sources or any(
            op not in plain and not found.get(op, False) for op in values
        )
        if Source.INPUT in sources or any(found.get(op, False) for op in values):
            found[position] = not learnt
        elif not learnt:
            plain.add(position)
    return found
