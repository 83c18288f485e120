"""Plans with sites in words: what the processes of each do, how sites are joined, and why so."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from atoll.mesh.layout import Inside
from hostos.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.planning.costs.fleet import Device, Mesh
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
    """Return how each member of several devices in a plan divides its stage, and why not in another way."""
    found, bounds = [], best.candidate.bounds(problem.n_ops)
    for those in best.candidate.together:
        at = best.candidate.devices[those[0]]
        device, inside = problem.fleet.devices[at], problem.inside[at]
        if inside is not None and device.mesh is not None:
            pieces = [bounds[piece] for piece in those]
            found.append(_site(problem, device, device.mesh, inside, pieces))
    return found


def _site(
    problem: Problem, device: Device, mesh: Mesh, inside: InsideCosts, pieces: Sequence[tuple[int, int]]
) -> str:
    options = problem.insides.fastest(mesh, problem.table.costs(device, problem.kept_by(device)))
    need = {option.kind: sum(option.memory.bytes(a, b, 1) for a, b in pieces) for _, option in options}
    limit = device.model_limit_bytes
    seconds = next(s for s, option in options if option is inside)
    faster = [option.kind for s, option in options if s < seconds]
    why = "the fastest"
    if faster:
        short = all(need[kind] > limit for kind in faster)
        why = "the fastest that has room" if short else "with which the step is the shortest"
    what = _WHAT[inside.kind].format(size=mesh.size)
    found = (
        f"inside {device.label}: {inside.kind} on {mesh.size} devices ({what}), {why}; "
        f"for a micro-batch of the whole model {_figures(inside, seconds)}"
    )
    for took_s, option in options:
        if option is not inside:
            lacks = need[option.kind] > limit
            room = f", but its stage needs {need[option.kind] / GIB:.3g} GiB of {limit / GIB:.3g}" * lacks
            found += f"; {option.kind}: {_figures(option, took_s)}{room}"
    return found


def _figures(inside: InsideCosts, seconds: float) -> str:
    return (
        f"{seconds:.3g} s, each sends {inside.sent_bytes / 1e6:.3g} MB and holds {inside.stored:.0%} of the "
        "parameters"
    )


def outside_words(problem: Problem, best: Scored) -> list[str]:
    """Return how sites are joined with each other and other devices, and why; nothing of a fleet without."""
    fleet, order = problem.fleet, list(dict.fromkeys(best.candidate.devices))
    sites = [(at, device.mesh) for at, device in enumerate(fleet.devices) if problem.inside[at] is not None]
    if not sites or len(fleet.devices) == 1:
        return []
    names = " > ".join(fleet.devices[at].label for at in order)
    if len(order) == 1:
        return [f"outside: {names} has the whole model, so nothing of a step crosses a link between sites"]
    slowest = min(float(fleet.effective_bps[pair]) for pair in pairwise(order))
    rates = [mesh.bytes_per_s for at, mesh in sites if at in order and mesh is not None]
    inner = f", where devices inside send {min(rates) / 1e9:.3g} GB/s" if rates else ""
    _, timeline = problem.timeline(best, keep_spans=False)
    sent = sum(link.n_bytes for link in timeline.links)
    return [
        f"outside: a pipeline of {len(order)} stages, {names}; its links carry {slowest / 8e9:.3g} GB/s"
        f"{inner}, and a step sends {sent / 1e6:.4g} MB over them; {_alone(problem, sites)}"
    ]


def _alone(problem: Problem, sites: Sequence[tuple[int, Mesh | None]]) -> str:
    """Return what the fastest site would take alone, whose inside plan has room for the whole model."""
    found = []
    for at, mesh in sites:
        device = problem.fleet.devices[at]
        if mesh is None:
            continue
        costs = problem.table.costs(device, problem.kept_by(device))
        best = problem.insides.best(device, mesh, costs, among=1)
        if best.memory.bytes(0, problem.n_ops, 1) <= device.model_limit_bytes:
            joint = best.costs(costs, mesh)
            took_s = problem.n_micro * float((joint.forward_s + joint.backward_s).sum())
            found.append((took_s, f"{device.label} alone would compute {took_s:.3g} s, by {best.kind}"))
    return min(found, default=(0.0, "no site alone has room for the model"))[1]
