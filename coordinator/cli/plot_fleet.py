"""Upper half of a plan's picture: the fleet as a graph, the plan's stages and what they send on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import asin, cos, hypot, log10, pi, sin, sqrt
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from coordinator.cli.fleet_map import FleetMap, Node
from coordinator.cli.plot_style import (
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
    rate_text,
    size_text,
    text_width,
    tint,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from atoll.plan import LinkPrediction, Plan, Prediction
    from coordinator.planning.costs.fleet import Fleet

    Points = NDArray[np.float64]

BENDS = (0.0, *(sign * inches for inches in (0.25, 0.45, 0.65, 0.9, 1.3) for sign in (1, -1)))  # of curves
ALONG = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74)  # of an arrow, where its words may stand
MOST_RATES = 8  # arrows with rates beside them, in pictures with more their widths say it
MOST_WORDS = 40  # arrows with words at all
DECADE = (6.0, 10.0)  # log10 of the rates, bit/s, between which widths and greys grow
OVERHANG = 0.3  # inches above the map for curves and words
Box = tuple[float, float, float, float]  # left, bottom, right, top


def draw_fleet(axes: Axes, drawn: FleetMap, plan: Plan, fleet: Fleet | None, bound: Bound) -> None:
    """Draw the map on axes in inches."""
    names = _draw_islands(axes, drawn)
    fastest = max((node.machine.gflops for node in drawn.nodes), default=0.0)
    taken: list[Box] = []
    radii = []
    for node in drawn.nodes:
        radius = _radius(node, fastest, drawn.cell)
        marked = node.machine.rank in bound.ranks
        radii.append(radius + (0.08 if marked else 0.0))
        _draw_machine(axes, node, radius, marked, plan)
        taken.append((node.x - radius, node.y - radius, node.x + radius, node.y + radius))
        taken.append(_draw_words(axes, node, radius, drawn.cell, marked))
    paper = _Paper(drawn, radii, taken, names)
    _draw_edges(axes, paper)
    if plan.prediction is not None:
        arrows = _arrows(drawn, plan, plan.prediction, fleet, bound)
        _draw_arrows(axes, paper, list(arrows))


def rate_width(bps: float) -> float:
    """Points of a link's line."""
    return 0.5 + 2.8 * _rate_share(bps)


def rate_grey(bps: float) -> str:
    """Colour of a link's line."""
    return mixed(*RATES, _rate_share(bps))


def _rate_share(bps: float) -> float:
    low, high = DECADE
    return min(1.0, max(0.0, (log10(max(bps, 1.0)) - low) / (high - low)))


def _draw_islands(axes: Axes, drawn: FleetMap) -> list[Box]:
    """Grounds of the sites; the room that their names take."""
    names = []
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
        names.append((left, top - 0.14, left + text_width(name, 9.2), top))
    return names


def _draw_edges(axes: Axes, paper: _Paper) -> None:
    edges = paper.drawn.edges
    straight = len(edges) > MOST_WORDS  # then what they cross does not matter any more
    lines = [
        paper.clear_line(edge.source, edge.target, BENDS[:1] if straight else BENDS[:5]) for edge in edges
    ]
    rates = [edge.rate_bps for edge in edges]
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


def _draw_words(axes: Axes, node: Node, radius: float, cell: tuple[float, float], marked: bool) -> Box:
    """Name and figures below a machine; the room that they take."""
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
        facts = [part for part in (speed, memory) if part]
    lines = [fitted(machine.label, cell[0] - 0.08, size * 1.08), *facts]
    top = node.y - radius - (0.1 if marked else 0.05)
    halo = [withStroke(linewidth=2.2, foreground=ISLAND if machine.site else PAPER)]
    y = top
    for i, line in enumerate(lines):
        axes.text(
            node.x, y, line, size=size if i == 0 else 6.6, weight="bold" if i == 0 and used else "normal",
            color=(INK if used else QUIET) if i == 0 else QUIET, ha="center", va="top",
            path_effects=halo, zorder=6,
        )  # fmt: skip
        y -= 0.145 if i == 0 else 0.12
    width = max(text_width(line, size * 1.08) for line in lines)
    return (node.x - width / 2, y, node.x + width / 2, top)


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


@dataclass(frozen=True)
class _Paper:
    """Room that machines and words take."""

    drawn: FleetMap
    radii: list[float]
    taken: list[Box]  # of each node its circle and its words
    names: list[Box]  # of sites

    def clear_line(self, source: int, target: int, bends: Sequence[float] = BENDS) -> Points:
        """The curve between two machines that crosses the fewest others, the straightest of those."""
        ends = self.drawn.nodes[source], self.drawn.nodes[target]
        own = self.radii[source] + 0.04, self.radii[target] + 0.04
        others = [i for i in range(len(self.taken)) if i not in (2 * source, 2 * target)]
        left, bottom, right, top = np.array([self.taken[i] for i in others]).reshape(-1, 4).T
        weights = np.where(np.array(others) % 2 == 0, 3.0, 1.0)  # circles and words
        best: tuple[float, Points] | None = None
        for bend in bends:
            line = _curve(ends, bend, own)
            x, y = line[:, :1], line[:, 1:]
            inside = (x > left - 0.03) & (x < right + 0.03) & (y > bottom - 0.03) & (y < top + 0.03)
            cost = float((inside @ weights).sum()) + 2.0 * abs(bend) + 3.0 * float(self.outside(x, y).sum())
            if best is None or cost < best[0]:
                best = (cost, line)
        assert best is not None  # noqa: S101  BENDS is not empty
        return best[1]

    def outside(self, x: Points, y: Points) -> NDArray[np.bool_]:
        """Points off the map and the room that it has around it."""
        return (x < -0.2) | (x > self.drawn.width + 0.2) | (y < -0.1) | (y > self.drawn.height + OVERHANG)

    def cost(self, box: Box, words: Sequence[Box]) -> float:
        """How much a box for words covers of others, square inches; of paper that is not there, ten times."""
        corners = np.array((box[:2], box[2:]))
        off = float(self.outside(corners[:, :1], corners[:, 1:]).sum())
        return sum(_overlap(box, other) for other in (*self.taken, *words)) + 10.0 * off


def _draw_arrows(axes: Axes, paper: _Paper, arrows: Sequence[_Arrow]) -> None:
    lines = [paper.clear_line(arrow.source, arrow.target) for arrow in arrows]
    for arrow, line in zip(arrows, lines, strict=True):
        width = rate_width(arrow.rate_bps)
        axes.add_patch(
            FancyArrowPatch(
                path=Path(line),
                arrowstyle="-|>",
                mutation_scale=6.5 + 1.5 * width,
                lw=width,
                color=arrow.colour,
                shrinkA=0,
                shrinkB=0,
                capstyle="butt",
                joinstyle="miter",
                clip_on=False,
                zorder=2.5,
            )
        )
    if len(arrows) <= MOST_WORDS:
        every = np.concatenate(lines) if lines else np.empty((0, 2))
        words = list(paper.names)
        for arrow, line in zip(arrows, lines, strict=True):
            _draw_amount(axes, paper, arrow, line, every, words, rates=len(arrows) <= MOST_RATES)


def _curve(ends: tuple[Node, Node], bend: float, own: tuple[float, float]) -> Points:
    """Points of a flat curve outside the two machines; ``bend``: inches to the left of the straight line."""
    a, b = np.array((ends[0].x, ends[0].y)), np.array((ends[1].x, ends[1].y))
    way = b - a
    off = bend / 0.75 * np.array((-way[1], way[0])) / (hypot(*way) or 1.0)
    t = np.linspace(0.0, 1.0, 81)[:, None]
    first, second = a + 0.12 * way + off, b - 0.12 * way + off
    line: Points = (1 - t) ** 3 * a + 3 * t * (1 - t) ** 2 * first + 3 * t**2 * (1 - t) * second + t**3 * b
    outside = (np.hypot(*(line - a).T) >= own[0]) & (np.hypot(*(line - b).T) >= own[1])
    return line[outside] if outside.sum() >= 2 else line[[20, 60]]


def _draw_amount(
    axes: Axes, paper: _Paper, arrow: _Arrow, line: Points, every: Points, words: list[Box], *, rates: bool
) -> None:
    """Write beside an arrow what it carries, where the least is in the way; ``every``: points of arrows."""
    size = 6.8 if rates else 6.2
    texts = _amount(arrow, line[-1] - line[0])
    if rates and arrow.rate_bps:
        texts = (*texts, rate_text(arrow.rate_bps))
    width = max(text_width(text, size) for text in texts) + 0.04
    height = 0.018 * size * len(texts) + 0.02
    best: tuple[float, Box] | None = None
    for share in ALONG:
        at = min(len(line) - 2, max(1, round(share * (len(line) - 1))))
        (x, y), (dx, dy) = line[at], line[at + 1] - line[at - 1]
        length = hypot(dx, dy) or 1.0
        for side in (1.0, -1.0):
            nx, ny = -dy / length * side, dx / length * side
            off = 0.045 + abs(nx) * width / 2 + abs(ny) * height / 2
            cx, cy = x + nx * off, y + ny * off
            box = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
            over = (every > box[:2]).all(axis=1) & (every < box[2:]).all(axis=1)
            cost = 100 * paper.cost(box, words) + 0.3 * float(over.sum()) + 2 * abs(share - 0.5)
            cost += 0.1 if ny < 0 else 0.0
            if best is None or cost < best[0]:
                best = (cost, box)
    assert best is not None  # noqa: S101  ALONG is not empty
    box = best[1]
    words.append(box)
    axes.text(
        (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, "\n".join(texts), size=size, color=arrow.colour,
        ha="center", va="center", linespacing=1.15,
        path_effects=[withStroke(linewidth=2.4, foreground=PAPER)],
        zorder=7,
    )  # fmt: skip


def _amount(arrow: _Arrow, way: Points) -> tuple[str, ...]:
    """Bytes there and back, each with the direction that it has on paper; once where they are the same."""
    dx, dy = way
    level = abs(dx) > abs(dy)
    ways = ("▸◂" if dx > 0 else "◂▸") if level else ("▴▾" if dy > 0 else "▾▴")
    if abs(arrow.there - arrow.back) <= 0.005 * max(arrow.there, arrow.back):
        return (f"{size_text(arrow.there)} {'⇄' if level else '⇅'}",)
    return tuple(f"{size_text(n)} {to}" for n, to in zip((arrow.there, arrow.back), ways, strict=True) if n)


def _overlap(a: Box, b: Box) -> float:
    """Square inches that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
