"""Upper half of a plan's picture: the fleet as a graph, the plan's stages and what they send on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import asin, cos, log10, pi, sin, sqrt
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon
from matplotlib.patheffects import withStroke

from coordinator.cli.plot.fleet_map import FleetMap, Node
from coordinator.cli.plot.style import (
    ACCENT,
    FAINT,
    INK,
    ISLAND,
    PAPER,
    QUIET,
    RATES,
    Bound,
    fitted,
    hue,
    memory_text,
    mixed,
    size_text,
    tint,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from atoll.plan import LinkPrediction, Plan, Prediction
    from coordinator.planning.costs.fleet import Fleet

DECADE = (6.0, 10.0)  # log10 of the rates, bit/s, between which widths and greys grow
MOST_AMOUNTS = 2  # lines below a machine of what it sends and gets
BEND = 0.12  # of an arrow, in its length, upwards: words stand below machines
POINTS = 72.0  # an inch


def draw_fleet(axes: Axes, drawn: FleetMap, plan: Plan, fleet: Fleet | None, bound: Bound) -> None:
    """Draw the map on axes in inches."""
    _draw_islands(axes, drawn)
    fastest = max((node.machine.gflops for node in drawn.nodes), default=0.0)
    prediction = plan.prediction
    arrows = list(_arrows(drawn, plan, prediction, fleet, bound)) if prediction is not None else []
    amounts = _amounts(drawn, arrows)
    radii = []
    for i, node in enumerate(drawn.nodes):
        radius = _radius(node, fastest, drawn.cell)
        marked = node.machine.rank in bound.ranks
        radii.append(radius + (0.08 if marked else 0.0))
        _draw_machine(axes, node, radius, marked, plan)
        _draw_words(axes, node, radii[-1], drawn.cell, amounts.get(i, ()))
    _draw_edges(axes, drawn)
    _draw_arrows(axes, drawn, radii, arrows)


def rate_width(bps: float) -> float:
    """Points of a link's line."""
    return 0.5 + 2.8 * _rate_share(bps)


def rate_grey(bps: float) -> str:
    """Colour of a link's line."""
    return mixed(*RATES, _rate_share(bps))


def _rate_share(bps: float) -> float:
    low, high = DECADE
    return min(1.0, max(0.0, (log10(max(bps, 1.0)) - low) / (high - low)))


def _draw_islands(axes: Axes, drawn: FleetMap) -> None:
    """Grounds of the sites."""
    for island in drawn.islands:
        if not island.label:
            continue
        box = FancyBboxPatch(
            (island.x, island.y), island.width, island.height,
            boxstyle="round,pad=0,rounding_size=0.14", facecolor=ISLAND, edgecolor="none", zorder=0,
        )  # fmt: skip
        axes.add_patch(box)
        name = fitted(island.label, island.width - 0.3, 8.5)
        left, top = island.x + 0.14, island.y + island.height - 0.1
        axes.text(left, top, name, size=8.5, weight="bold", color=QUIET, va="top", zorder=6)


def _draw_edges(axes: Axes, drawn: FleetMap) -> None:
    lines = [
        [(node.x, node.y) for node in (drawn.nodes[e.source], drawn.nodes[e.target])] for e in drawn.edges
    ]
    rates = [edge.rate_bps for edge in drawn.edges]
    every = LineCollection(
        lines, colors=[rate_grey(r) for r in rates], linewidths=[rate_width(r) for r in rates], zorder=1
    )
    axes.add_collection(every, autolim=False)


def _radius(node: Node, fastest: float, cell: tuple[float, float]) -> float:
    """Inches; the area grows with the speed, where that is known."""
    most = min(0.4, 0.27 * cell[0], 0.3 * cell[1])
    if not fastest:
        return 0.75 * most
    return max(0.42 * most, 0.13, most * sqrt(node.machine.gflops / fastest))


def _draw_machine(axes: Axes, node: Node, radius: float, marked: bool, plan: Plan) -> None:
    machine, at = node.machine, (node.x, node.y)
    colour = hue(machine.replica) if machine.rank is not None else FAINT
    if marked:
        axes.add_patch(
            Circle(at, radius + 0.07, facecolor=tint(ACCENT, 0.25), edgecolor=ACCENT, lw=1.6, zorder=3)
        )
    if len(machine.workers) > 1:  # a crowd: a second rim behind
        axes.add_patch(
            Circle((node.x + 0.06, node.y + 0.05), radius, facecolor=PAPER, edgecolor=colour, zorder=3)
        )
    axes.add_patch(Circle(at, radius, facecolor=PAPER, edgecolor="none", zorder=3))
    if machine.memory_bytes and machine.limit_bytes:
        share = min(1.0, machine.memory_bytes / machine.limit_bytes)
        axes.add_patch(
            Polygon(_filled(node, radius, share), facecolor=tint(colour, 0.38), edgecolor="none", zorder=3)
        )
    axes.add_patch(Circle(at, radius, facecolor="none", edgecolor=colour, lw=1.5, zorder=4))
    if machine.rank is not None:
        disc = min(0.125, 0.85 * radius)
        axes.add_patch(Circle(at, disc, facecolor=colour, edgecolor=PAPER, lw=0.8, zorder=5))
        axes.text(
            *at, str(plan.places[machine.rank].stage), size=58 * disc, weight="bold", color=PAPER,
            ha="center", va="center_baseline", zorder=6,
        )  # fmt: skip


def _filled(node: Node, radius: float, share: float) -> list[tuple[float, float]]:
    """Outline of a circle filled up to a share of its height."""
    level = asin(2 * share - 1)
    turns = np.linspace(pi - level, 2 * pi + level, 40)
    return [(node.x + radius * cos(turn), node.y + radius * sin(turn)) for turn in turns]


def _draw_words(
    axes: Axes, node: Node, radius: float, cell: tuple[float, float], amounts: Sequence[str]
) -> None:
    """Name and figures below a machine."""
    machine, used = node.machine, node.machine.rank is not None
    size = 8.0 if cell[0] >= 1.2 else 7.0
    facts = []
    if cell[0] >= 1.2:
        memory = (
            memory_text(machine.memory_bytes, machine.limit_bytes) if used and machine.limit_bytes else ""
        )
        speed = f"{machine.gflops:.3g} GFLOP/s" if machine.gflops else ""
        if len(machine.workers) > 1:
            speed = f"{speed} each" if speed else ""
        facts = [fitted(part, cell[0] - 0.08, 6.6) for part in (speed, memory, *amounts) if part]
    lines = [fitted(machine.label, cell[0] - 0.08, size * 1.08), *facts]
    halo = [withStroke(linewidth=2.2, foreground=ISLAND if machine.site else PAPER)]
    y = node.y - radius - 0.04
    for i, line in enumerate(lines):
        axes.text(
            node.x, y, line, size=size if i == 0 else 6.6, weight="bold" if i == 0 and used else "normal",
            color=(INK if used else QUIET) if i == 0 else QUIET, ha="center", va="top",
            path_effects=halo, zorder=6,
        )  # fmt: skip
        y -= 0.145 if i == 0 else 0.12


# ---------------------------------------------------------------- arrows


@dataclass(frozen=True, slots=True)
class _Arrow:
    """What two machines send each other in a step."""

    source: int
    target: int
    there: float  # bytes
    back: float
    rate_bps: float
    colour: str


def _arrows(
    drawn: FleetMap, plan: Plan, prediction: Prediction, fleet: Fleet | None, bound: Bound
) -> Iterator[_Arrow]:
    """One arrow a pair, in the order of the stages."""
    at = {node.machine.workers[0]: i for i, node in enumerate(drawn.nodes)}
    links = {
        (link.source, link.target): link
        for link in prediction.links
        if link.source in at and link.target in at
    }
    for a, b in dict.fromkeys(tuple(sorted(pair, key=lambda w: at[w])) for pair in links):
        both = [link for link in (links.get((a, b)), links.get((b, a))) if link is not None]
        there, back = (
            float(found.bytes_per_step) if (found := links.get(pair)) else 0.0 for pair in ((a, b), (b, a))
        )
        rate = min(_rate(link, fleet) for link in both)
        marked = bound.ways or bool(bound.pairs & {(a, b), (b, a)})
        colour = ACCENT if marked else hue(drawn.nodes[at[a]].machine.replica)
        yield _Arrow(at[a], at[b], there, back, rate, colour)


def _rate(link: LinkPrediction, fleet: Fleet | None) -> float:
    """Bit/s of a link; what its bytes and busy seconds amount to where no fleet is described."""
    if fleet is not None and link.source in fleet.index and link.target in fleet.index:
        return float(fleet.effective_bps[fleet.index[link.source], fleet.index[link.target]])
    return 8.0 * link.bytes_per_step / link.busy_s if link.busy_s else 0.0


def _draw_arrows(axes: Axes, drawn: FleetMap, radii: Sequence[float], arrows: Sequence[_Arrow]) -> None:
    for arrow in arrows:
        source, target = drawn.nodes[arrow.source], drawn.nodes[arrow.target]
        width = rate_width(arrow.rate_bps)
        bend = -BEND if target.x >= source.x else BEND
        axes.add_patch(
            FancyArrowPatch(
                (source.x, source.y),
                (target.x, target.y),
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=6.5 + 1.5 * width,
                lw=width,
                color=arrow.colour,
                shrinkA=POINTS * (radii[arrow.source] + 0.04),
                shrinkB=POINTS * (radii[arrow.target] + 0.04),
                clip_on=False,
                zorder=2.5,
            )
        )


def _amounts(drawn: FleetMap, arrows: Sequence[_Arrow]) -> Mapping[int, tuple[str, ...]]:
    """Lines below each machine: what it sends others and gets back in a step."""
    found: dict[int, list[str]] = {}
    for arrow in arrows:
        other = drawn.nodes[arrow.target].machine.label
        if abs(arrow.there - arrow.back) <= 0.005 * max(arrow.there, arrow.back):
            words = f"⇄ {size_text(arrow.there)}"
        else:
            both = zip("→←", (arrow.there, arrow.back), strict=True)
            words = " ".join(f"{to} {size_text(amount)}" for to, amount in both if amount)
        found.setdefault(arrow.source, []).append(f"{words} {other}")
    return {
        at: (*lines[: MOST_AMOUNTS - 1], f"and to {len(lines) - MOST_AMOUNTS + 1} more")
        if len(lines) > MOST_AMOUNTS
        else tuple(lines)
        for at, lines in found.items()
    }
