"""Lower half of a plan's picture: one step as a timeline, or how busy stages and links are where only a
prediction is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from coordinator.cli.plot.style import (
    ACCENT,
    FAINT,
    INK,
    PAPER,
    QUIET,
    Bound,
    fitted,
    hue,
    rate_text,
    size_text,
    text_width,
    tint,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from atoll.plan import LinkPrediction, Plan, Prediction
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.timeline import Span, Timeline

LABELS = 1.9  # inches for the names of rows
SHADES = {"F": 0.35, "B": 1.0, "I": 1.0, "W": 0.65}
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
MOST_NUMBERS = 400  # bars with their micro-batch written on them
MOST_SHAPES = 4000  # in a vector file; beyond, bars become an image
MOST_LINKS = 10  # rows of links
Rectangle = tuple[float, float, float, float]  # x, y, width, height


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the lower half: its name and where its middle lies, in rows from the top."""

    text: str
    y: float
    marked: bool = False
    stage: int | None = None
    colour: str = QUIET


def row_inches(rows: int) -> float:
    """Height of a row."""
    return 0.42 if rows <= 8 else 0.3 if rows <= 24 else 0.17 if rows <= 40 else 0.14


def gantt_rows(plan: Plan, names: Mapping[str, str], bound: Bound) -> list[Row]:
    """A row a rank, replicas apart from each other."""
    found = []
    for rank, place in enumerate(plan.places):
        y = rank + 0.5 + (place.replica + 0.6) * (len(plan.replicas) > 1)
        name = names.get(place.worker, place.worker)
        found.append(Row(name, y, rank in bound.ranks, place.stage, hue(place.replica)))
    return found


def draw_gantt(
    axes: Axes,
    width: float,
    plan: Plan,
    rows: Sequence[Row],
    steps: Sequence[Timeline],
    fleet: Fleet,
    bound: Bound,
) -> None:
    """Draw each rank's work and what it sends beneath, second by second, on axes ``width`` inches wide."""
    end_s = max(step.step_s for step in steps)
    inch_s = end_s / width
    _frame(axes, rows, end_s, width)
    _bands(axes, plan, rows)
    if end_s < 1:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * 1e3:.4g}")
    bars: dict[tuple[str, float], list[Rectangle]] = {}
    numbers: list[tuple[float, float, int, bool]] = []
    first = 0
    for number, (replica, step) in enumerate(zip(plan.replicas, steps, strict=True)):
        workers = replica.workers
        mine = rows[first : first + len(replica.stages)]
        row_of = [mine[one.stage] for one in replica.pieces]
        for span in step.spans:
            row = row_of[span.source]
            length = span.end_s - span.start_s
            if span.source != span.target:
                ends = (workers[span.source], workers[span.target])
                marked = ends in bound.pairs
                bars.setdefault((ACCENT if marked else QUIET, 2.0), []).append(
                    (span.start_s, row.y + 0.27, length, 0.13)
                )
                if bound.ways:
                    away = float(fleet.latency_s[fleet.index[ends[0]], fleet.index[ends[1]]])
                    bars.setdefault((ACCENT, 2.0), []).append((span.end_s, row.y + 0.31, away, 0.05))
                continue
            colour = ACCENT if row.marked and span.kind != "opt" else hue(number)
            shade = SHADES.get(span.kind, 0.0)
            bars.setdefault((tint(colour, shade) if shade else INK, 3.0), []).append(
                (span.start_s, row.y - 0.36, length, 0.58)
            )
            if shade and length > inch_s * (text_width(str(span.micro), 5.5) + 0.05):
                numbers.append((span.start_s + length / 2, row.y - 0.07, span.micro, shade < 0.6))
        _commit(axes, step, mine)
        first += len(mine)
    shapes = sum(map(len, bars.values()))
    for (colour, order), found in bars.items():
        gap = 0.012 * inch_s  # between bars that touch
        corners = [_corners(x, y, max(w - gap, 0.6 * w, 0.6 * gap), h) for x, y, w, h in found]
        every = PolyCollection(
            corners, facecolors=colour, edgecolors="none", zorder=order, rasterized=shapes > MOST_SHAPES
        )
        axes.add_collection(every, autolim=False)
    if len(numbers) <= MOST_NUMBERS and len(rows) <= 24:
        for x, y, micro, dark in numbers:
            axes.text(
                x,
                y,
                str(micro),
                size=5.5,
                ha="center",
                va="center_baseline",
                color=INK if dark else PAPER,
                zorder=4,
            )


def _corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _frame(axes: Axes, rows: Sequence[Row], end: float, width: float) -> None:
    """Names of the rows and a scale from 0 to ``end``."""
    axes.set_xlim(0.0, end)
    axes.set_ylim(max(row.y for row in rows) + 0.55, 0.0)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="x", length=2.5, labelsize=7.5, pad=2)
    axes.tick_params(axis="y", length=0, labelsize=8 if len(rows) <= 24 else 6)
    axes.grid(axis="x", color=FAINT, lw=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    size = 8.0 if len(rows) <= 24 else 6.0
    disc = 0.095 if len(rows) <= 24 else 0.058  # inches
    axes.tick_params(axis="y", pad=9 + 144 * disc)
    axes.set_yticks([row.y for row in rows], [fitted(row.text, LABELS - 0.4, size * 1.1) for row in rows])
    x, stages = -(disc + 0.06) / width, [row for row in rows if row.stage is not None]
    axes.scatter(
        [x] * len(stages), [row.y for row in stages], s=(144 * disc) ** 2,
        color=[row.colour for row in stages], linewidths=0,
        transform=axes.get_yaxis_transform(), clip_on=False, zorder=5,
    )  # fmt: skip
    for row in stages:
        axes.text(
            x, row.y, str(row.stage), size=58 * disc + 1, weight="bold", color=PAPER, ha="center",
            va="center_baseline", transform=axes.get_yaxis_transform(), zorder=6,
        )  # fmt: skip
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        if row.marked:
            label.set_color(ACCENT)
            label.set_fontweight("bold")


def _bands(axes: Axes, plan: Plan, rows: Sequence[Row]) -> None:
    """Grounds of the replicas, where there are several."""
    first = 0
    for number, replica in enumerate(plan.replicas if len(plan.replicas) > 1 else ()):
        last = first + len(replica.stages)
        _band(axes, rows[first:last], number, replica.micros)
        first = last


def _band(axes: Axes, rows: Sequence[Row], number: int, micros: tuple[int, int]) -> None:
    """A replica's rows on a ground of its colour."""
    axes.axhspan(
        rows[0].y - 1.0, rows[-1].y + 0.5, facecolor=tint(hue(number), 0.07), edgecolor="none", zorder=0
    )
    axes.annotate(
        f"replica {number}: micro-batches {micros[0]} to {micros[1] - 1}", (0.0, rows[0].y - 0.72),
        xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", size=7, weight="bold",
        color=hue(number), va="center", zorder=5,
    )  # fmt: skip


def _commit(axes: Axes, step: Timeline, rows: Sequence[Row]) -> None:
    """Ground of the time from the last gradient to the next step's start."""
    ready = max(step.ready_s)
    top, bottom = rows[0].y - 0.45, rows[-1].y + 0.45
    corners = _corners(ready, top, step.step_s - ready, bottom - top)
    axes.add_collection(
        PolyCollection([corners], facecolors=tint(FAINT, 0.55), edgecolors="none", zorder=1), autolim=False
    )


# ---------------------------------------------------------------- without a timeline


def busy_rows(plan: Plan, names: Mapping[str, str], bound: Bound) -> list[Row]:
    """A row a rank, below them one for each of the busiest links."""
    assert plan.prediction is not None  # noqa: S101  checked by plot_plan
    found = gantt_rows(plan, names, bound)
    y = found[-1].y + 1.5
    for link in _busiest(plan.prediction):
        text = f"{names.get(link.source, link.source)} > {names.get(link.target, link.target)}"
        found.append(Row(text, y, (link.source, link.target) in bound.pairs))
        y += 1.0
    return found


def draw_busy(axes: Axes, width: float, plan: Plan, rows: Sequence[Row]) -> None:
    """Draw what part of the step each stage computes and each link carries."""
    prediction = plan.prediction
    assert prediction is not None  # noqa: S101  checked by plot_plan
    step_s = prediction.step_s or 1.0
    _frame(axes, rows, 1.0, width)
    _bands(axes, plan, rows)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    stages = {stage.worker: stage for stage in prediction.stages}
    places = list(plan.places)
    for row, place in zip(rows, places, strict=False):
        stage = stages.get(place.worker)
        if stage is None:
            continue
        colour, at = ACCENT if row.marked else hue(place.replica), 0.0
        parts = (
            (stage.compute_s, colour),
            (stage.codec_s, tint(colour, 0.6)),
            (stage.handling_s, tint(colour, 0.3)),
        )
        for seconds, shade in parts:
            axes.barh(row.y, seconds / step_s, 0.58, left=at, color=shade, zorder=3)
            at += seconds / step_s
        _beside(axes, at, row, f"{at:.0%}, {stage.compute_s:.3g} s")
    for row, link in zip(rows[len(places) :], _busiest(prediction), strict=True):
        share = link.busy_s / step_s
        axes.barh(row.y, max(share, link.under_way_s / step_s), 0.2, color=FAINT, zorder=2)
        axes.barh(row.y, share, 0.34, color=ACCENT if row.marked else QUIET, zorder=3)
        rate = f" at {rate_text(8 * link.bytes_per_step / link.busy_s)}" if link.busy_s else ""
        _beside(
            axes,
            max(share, link.under_way_s / step_s),
            row,
            f"{share:.0%}, {size_text(link.bytes_per_step)}{rate}",
        )


def _beside(axes: Axes, share: float, row: Row, text: str) -> None:
    """Write at the end of a bar, in it where there is no room behind."""
    inside = share > 0.8
    axes.annotate(
        text, (min(share, 1.0), row.y), xytext=(-4 if inside else 4, 0), textcoords="offset points", size=7,
        color=PAPER if inside else QUIET, ha="right" if inside else "left", va="center", zorder=5,
    )  # fmt: skip


def _busiest(prediction: Prediction) -> list[LinkPrediction]:
    return sorted(prediction.links, key=lambda link: -link.busy_s)[:MOST_LINKS]


def kinds_of(steps: Sequence[Timeline]) -> list[tuple[str, str]]:
    """(kind, its words) of the work in the timelines, for a legend."""
    spans: set[str] = {_plain(span) for step in steps for span in step.spans}
    return [(kind, words) for kind, words in WORDS.items() if kind in spans]


def _plain(span: Span) -> str:
    return "B" if span.kind == "I" else span.kind
