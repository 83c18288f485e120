"""A plan as a picture: above the fleet as a graph with the plan on it, below one step second by second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon, Rectangle

from atoll.errors import PlanError, StorageError
from coordinator.cli.plot.fleet import draw_fleet, rate_grey, rate_width
from coordinator.cli.plot.fleet_map import WIDTH, FleetMap, fleet_map
from coordinator.cli.plot.step import (
    LABELS,
    SHADES,
    busy_rows,
    draw_busy,
    draw_gantt,
    gantt_rows,
    kinds_of,
    row_inches,
)  # fmt: skip
from coordinator.cli.plot.style import (
    ACCENT,
    FAINT,
    HUES,
    INK,
    PAPER,
    QUIET,
    Bound,
    hue,
    lettering,
    text_width,
    tint,
    wrapped,
)
from coordinator.cli.views.format import in_seconds
from coordinator.planning.replay import timelines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from atoll.plan import Plan, Prediction
    from coordinator.planning.costs.timeline import Timeline
    from coordinator.planning.planner import PlanRequest

MARGIN, TITLE, LEGEND, SENTENCE, TICKS = 0.35, 0.72, 0.4, 0.32, 0.32  # inches
DPI = 130
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}


def plot_plan(plan: Plan, names: Mapping[str, str], path: Path, request: PlanRequest | None = None) -> None:
    """Draw ``plan`` into ``path`` (png, svg or pdf by its ending), the same bytes each time.

    With the ``request`` that it was made for the whole fleet and the step's timeline are drawn, else what
    the prediction says of the plan's own machines.
    PlanError for a plan without a prediction, StorageError when the file cannot be written.
    """
    with lettering():
        figure = draw_plan(plan, names, request)
        try:
            figure.savefig(path, dpi=DPI, metadata=UNDATED.get(Path(path).suffix.lower()))
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot write {path}: {error}; give a .png, .svg or .pdf file") from None


def draw_plan(plan: Plan, names: Mapping[str, str], request: PlanRequest | None = None) -> Figure:
    """Return the picture; as ``plot_plan``."""
    prediction = plan.prediction
    if prediction is None:
        raise PlanError("this plan carries no prediction to draw; make it again with `atoll plan`")
    fleet = request.fleet if request is not None else None
    steps = timelines(request, plan) if request is not None else ()
    bound = Bound(plan, prediction, names, fleet)
    drawn = fleet_map(plan, names, fleet)
    rows = gantt_rows(plan, names, bound) if steps else busy_rows(plan, names, bound)
    below = (rows[-1].y + 0.55) * row_inches(len(rows))
    width = max(WIDTH, drawn.width) + 2 * MARGIN
    why = _sentence(prediction, names)
    lines = wrapped(why, width - 2 * MARGIN, 10.2)  # bold letters are wider
    height = 2 * MARGIN + TITLE + drawn.height + 2 * LEGEND + SENTENCE + 0.16 * len(lines) + below + TICKS
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    sheet = _inches(figure, (0.0, 0.0, width, height))
    _draw_title(sheet, plan, prediction, height)
    top = height - MARGIN - TITLE - drawn.height
    map_axes = _inches(figure, ((width - drawn.width) / 2, top, drawn.width, drawn.height))
    draw_fleet(map_axes, drawn, plan, fleet, bound)
    _draw_map_legend(sheet, top - 0.28, drawn, plan)
    top -= LEGEND + SENTENCE
    for i, line in enumerate(lines):
        sheet.text(MARGIN, top - 0.16 * i, line, size=9, color=ACCENT, va="center", weight="bold")
    top -= 0.16 * len(lines)
    _draw_step_legend(sheet, top - 0.08, steps, width)
    top -= LEGEND * 0.7
    left = MARGIN + LABELS
    step_axes = figure.add_axes(
        (left / width, (top - below) / height, (width - left - MARGIN) / width, below / height)
    )
    if request is not None:
        draw_gantt(step_axes, width - left - MARGIN, plan, rows, steps, request.fleet, bound)
        unit = "milliseconds" if max(step.step_s for step in steps) < 1 else "seconds"
        step_axes.set_xlabel(f"{unit} from the commit of the step before", size=7.5, color=QUIET)
    else:
        draw_busy(step_axes, width - left - MARGIN, plan, rows)
        step_axes.set_xlabel("share of the step", size=7.5, color=QUIET)
    return figure


def _inches(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes without a frame at a place on the figure, in inches like the figure."""
    x, y, width, height = box
    full_width, full_height = figure.get_size_inches()
    axes = figure.add_axes((x / full_width, y / full_height, width / full_width, height / full_height))
    axes.set_xlim(0.0, width)
    axes.set_ylim(0.0, height)
    axes.axis("off")
    return axes


def _draw_title(sheet: Axes, plan: Plan, prediction: Prediction, height: float) -> None:
    sheet.text(
        MARGIN,
        height - MARGIN,
        f"{in_seconds(prediction.step_s)} a step",
        size=17,
        weight="bold",
        va="center",
    )
    replicas = f"{len(plan.replicas)} replicas, " if len(plan.replicas) > 1 else ""
    stages = len(plan.places)
    parts = (
        f"{replicas}{stages} stage{'s' if stages > 1 else ''}, {plan.n_micro} micro-batches, {plan.schedule}",
        f"cut by {plan.partitioner}",
        f"lower bound {in_seconds(prediction.lower_bound_s)}",
    )
    sheet.text(MARGIN, height - MARGIN - 0.27, "  ·  ".join(parts), size=9, color=QUIET, va="center")


def _sentence(prediction: Prediction, names: Mapping[str, str]) -> str:
    """The bottleneck and its reason, machines by name."""
    text = (
        f"Bound by {prediction.bottleneck}: {prediction.reason}"
        if prediction.reason
        else f"Bound by {prediction.bottleneck}"
    )
    for worker in sorted(names, key=len, reverse=True):
        if names[worker] != worker:
            text = text.replace(worker, names[worker])
    return text


class _Legend:
    """Marks and words in a line, from left to right."""

    def __init__(self, sheet: Axes, x: float, y: float) -> None:
        self.sheet, self.x, self.y = sheet, x, y

    def words(self, text: str, gap: float = 0.25) -> None:
        """Write and go on behind."""
        self.sheet.text(self.x, self.y, text, size=7.5, color=QUIET, va="center_baseline")
        self.x += text_width(text, 7.5) + gap

    def box(self, colour: str, height: float = 0.1, width: float = 0.2) -> None:
        """A bar of the timeline."""
        self.sheet.add_patch(
            Rectangle((self.x, self.y - height / 2), width, height, facecolor=colour, edgecolor="none")
        )
        self.x += width + 0.06


def _draw_map_legend(sheet: Axes, y: float, drawn: FleetMap, plan: Plan) -> None:
    legend = _Legend(sheet, MARGIN, y)
    several = len(plan.replicas) > 1
    if several:
        legend.words("stages of replica", 0.12)
    for number in range(min(len(plan.replicas), len(HUES))):
        sheet.add_patch(Circle((legend.x + 0.09, y), 0.085, facecolor=hue(number), edgecolor="none"))
        sheet.text(
            legend.x + 0.09, y, "n", size=6, weight="bold", color=PAPER, ha="center", va="center_baseline"
        )
        legend.x += 0.24
        legend.words(str(number) if several else "stage n", 0.14 if several else 0.25)
    legend.x += 0.11 if several else 0.0
    if any(node.machine.gflops for node in drawn.nodes):
        for radius in (0.05, 0.09):
            sheet.add_patch(Circle((legend.x + radius, y), radius, facecolor=PAPER, edgecolor=QUIET, lw=1.0))
            legend.x += 2 * radius + 0.03
        legend.x += 0.03
        legend.words("area: speed")
    sheet.add_patch(Circle((legend.x + 0.09, y), 0.09, facecolor=PAPER, edgecolor=QUIET, lw=1.0))
    level = [
        (legend.x + 0.09 + dx, y + dy)
        for dx, dy in ((-0.088, 0.0), (-0.062, -0.062), (0.0, -0.088), (0.062, -0.062), (0.088, 0.0))
    ]
    sheet.add_patch(Polygon(level, facecolor=FAINT, edgecolor="none"))
    legend.x += 0.24
    legend.words("filled: memory that the plan needs, of the limit")
    for bps, text in ((1e7, "10 Mbit/s"), (1e8, "100 Mbit/s"), (1e9, "1 Gbit/s")):
        sheet.plot(
            [legend.x, legend.x + 0.3],
            [y, y],
            color=rate_grey(bps),
            lw=rate_width(bps),
            solid_capstyle="butt",
        )
        legend.x += 0.36
        legend.words(text, 0.18)
    legend.words("⇄ → ←: bytes a step, to and from whom")


def _draw_step_legend(sheet: Axes, y: float, steps: Sequence[Timeline], width: float) -> None:
    legend = _Legend(sheet, MARGIN + LABELS, y)
    if not steps:
        for shade, text in ((1.0, "computing"), (0.6, "codecs"), (0.3, "handling messages")):
            legend.box(tint(hue(0), shade))
            legend.words(text)
        legend.box(QUIET)
        legend.words("link carries")
        legend.box(FAINT)
        legend.words("and waits behind others")
    else:
        for kind, text in kinds_of(steps):
            legend.box(tint(hue(0), SHADES[kind]))
            legend.words(text)
        legend.box(QUIET, 0.04)
        legend.words("sending")
        legend.box(INK)
        legend.words("optimizer")
        legend.box(tint(FAINT, 0.55), 0.14)
        legend.words("commit")
    legend.box(ACCENT)
    legend.words("what bounds the step")
