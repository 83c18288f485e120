"""Inside plans in words: what the processes of each site do, what it sends, and why this kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.mesh.layout import Inside

if TYPE_CHECKING:
    from coordinator.planning.inside.costs import InsideCosts
    from coordinator.planning.problem import Problem, Scored

_WHAT = {
    Inside.SHARDS: "each has its rows of a micro-batch and 1/{size} of every matrix, fetched for each use",
    Inside.SEQUENCE: "each has its tokens of every row, with all keys and values in attention, "
    "and 1/{size} of every matrix, fetched for each use",
    Inside.RING: "each has its tokens of every row, to which keys and values come a block at a time, "
    "and 1/{size} of every matrix, fetched for each use",
    Inside.EXPERTS: "as shards, but each has 1/{size} of the experts whole, for the tokens of all",
    Inside.DATA: "each has its rows of a micro-batch and the whole model; gradients are summed once a step",
    Inside.TENSOR: "each has its heads, hidden units and rows of the vocabulary",
}


def inside_words(problem: Problem, best: Scored) -> list[str]:
    """Return how each member of several devices in a plan divides its stage."""
    found = []
    for at in dict.fromkeys(best.candidate.devices):
        device, inside = problem.fleet.devices[at], problem.inside[at]
        if inside is None or device.mesh is None:
            continue
        size = device.mesh.size
        others = (other for other in problem.insides.of_size(size) if other.kind is not inside.kind)
        what = _WHAT[inside.kind].format(size=size)
        found.append(
            f"inside {device.label}: {inside.kind} on {size} devices ({what}); "
            f"for a micro-batch of the whole model {_figures(inside)}"
            + "".join(f"; {other.kind}: {_figures(other)}" for other in others)
        )
    return found


def _figures(inside: InsideCosts) -> str:
    return f"each sends {inside.sent_bytes / 1e6:.3g} MB and holds {inside.stored:.0%} of the parameters"
