"""A plan as a picture: who computes what, how busy each stage and link is, what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from atoll.errors import PlanError, StorageError
from atoll.plan import LinkPrediction, Plan, Prediction

INK, BUSY, LINK, MEMORY, LIMIT = "#22313f", "#2a9d8f", "#e9a03b", "#577590", "#d9e2ec"


def plot_plan(plan: Plan, names: Mapping[str, str], path: Path) -> None:
    """Draw ``plan`` into ``path`` (png, svg or pdf by its ending).

    PlanError for a plan without a prediction, StorageError when the file cannot be written.
    """
    prediction = plan.prediction
    if prediction is None:
        raise PlanError("this plan carries no prediction to draw; make it again with `atoll plan`")
    several = len(plan.replicas) > 1
    labels = [
        f"{f'replica {p.replica} ' if several else ''}stage {p.stage}\n{names.get(p.worker, p.worker)}"
        for p in plan.places
    ]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(max(7.0, 1.7 * len(labels)), 7.2), layout="constrained")
        busy, memory = figure.subplots(2, 1, height_ratios=[3, 2])
        _draw_busy(busy, labels, names, prediction)
        _draw_memory(memory, labels, prediction)
        figure.suptitle(
            f"{plan.partitioner}: {prediction.step_s:.2f} s a step, lower bound "
            f"{prediction.lower_bound_s:.2f} s; bottleneck {_named(prediction.bottleneck, names)}",
            color=INK,
        )
        try:
            figure.savefig(path, dpi=140)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot write {path}: {error}; give a .png, .svg or .pdf file") from None


def _draw_busy(axes: object, labels: list[str], names: Mapping[str, str], prediction: Prediction) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)  # noqa: S101 - subplots() is typed as a union
    links = [
        f"{names.get(link.source, link.source)} >\n{names.get(link.target, link.target)}"
        for link in prediction.links
    ]
    shares = [stage.busy_share for stage in prediction.stages]
    carried = [link.busy_s / prediction.step_s for link in prediction.links]
    rows = range(len(labels) + len(links))
    bars = axes.barh(
        list(rows), [*shares, *carried], color=[BUSY] * len(labels) + [LINK] * len(links), height=0.7
    )
    texts = [f"{stage.compute_s:.2f} s" for stage in prediction.stages]
    texts += [f"{link.bytes_per_step / 1e6:.2f} MB{_shrunk(link)}" for link in prediction.links]
    axes.bar_label(bars, texts, padding=4, color=INK)
    axes.set_yticks(list(rows), [*labels, *links])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("share of the step that a stage computes, a link carries")


def _shrunk(link: LinkPrediction) -> str:
    """Return the factor by which compression shrinks a link's bytes, "" where it does not."""
    if link.bytes_per_step >= link.dense_bytes_per_step:
        return ""
    return f", 1/{link.dense_bytes_per_step / max(link.bytes_per_step, 1):.3g} of dense"


def _draw_memory(axes: object, labels: list[str], prediction: Prediction) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)  # noqa: S101 - subplots() is typed as a union
    used = [stage.memory_bytes / 2**20 for stage in prediction.stages]
    limits = [stage.memory_limit_bytes / 2**20 for stage in prediction.stages]
    rows = list(range(len(labels)))
    axes.barh(rows, limits, color=LIMIT, height=0.7, label="limit")
    bars = axes.barh(rows, used, color=MEMORY, height=0.4, label="needed")
    axes.bar_label(bars, [f"{value:.0f} MiB" for value in used], padding=4, color=INK)
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.set_xlabel("memory, MiB")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _named(bottleneck: str, names: Mapping[str, str]) -> str:
    for worker, name in names.items():
        bottleneck = bottleneck.replace(worker, name)
    return bottleneck
