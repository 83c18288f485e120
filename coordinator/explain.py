"""A Plan in words and in a picture: what ``atoll plan`` prints and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.opdag import OpDag, Source, leaf_refs
from coordinator.cluster import groups
from coordinator.estimate import gflops_of
from coordinator.problem import Candidate, Problem, Scored
from coordinator.timeline import Timeline
from coordinator.workload import Wire

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.plan import Plan, Prediction, StageSpec
    from coordinator.fleet import Fleet

MIB = float(2**20)


def explain(plan: Plan, dag: OpDag, fleet: Fleet | None = None) -> str:
    """The plan as plain text; ``fleet`` adds device names and the groups it sees.

    Needs ``plan.prediction``, else ValueError.
    """
    prediction = plan.prediction
    if prediction is None:
        raise ValueError("a plan without prediction cannot be explained")
    names = {d.worker: d.label for d in fleet.devices} if fleet is not None else {}
    lines = [
        f"{plan.partitioner}: {len(plan.stages)} stages, {plan.n_micro} micro-batches, {plan.schedule.value}",
        "",
        *_table(_stage_rows(plan, dag, prediction, names)),
        "",
        *_link_lines(prediction, names),
        *_codec_lines(plan, names),
        *_step_lines(prediction),
        *(f"left out      {names.get(w, w)}: {why}" for w, why in plan.left_out),
        *(f"note          {note}" for note in prediction.notes),
    ]
    if fleet is not None:
        lines += ["", *_fleet_lines(fleet)]
    return "\n".join(lines)


def _stage_rows(plan: Plan, dag: OpDag, prediction: Prediction, names: Mapping[str, str]) -> list[list[str]]:
    rows = [["stage", "worker", "ops", "modules", "params", "memory MiB", "limit", "compute s", "busy"]]
    for i, (stage, about) in enumerate(zip(plan.stages, prediction.stages, strict=True)):
        rows.append(
            [
                str(i),
                names.get(about.worker, about.worker),
                f"{stage.start}-{stage.stop - 1}",
                module_range(dag, stage),
                _count(parameter_count(dag, stage)),
                f"{about.memory_bytes / MIB:.1f}",
                f"{about.memory_limit_bytes / MIB:.0f}",
                f"{about.compute_s:.3f}",
                f"{about.busy_share:.0%}",
            ]
        )
    return rows


def _link_lines(prediction: Prediction, names: Mapping[str, str]) -> list[str]:
    if not prediction.links:
        return []
    rows = [["link", "KiB a step", "Mbit/s", "busy s", "busy"]]
    for link in sorted(prediction.links, key=lambda entry: -entry.busy_s):
        source, target = names.get(link.source, link.source), names.get(link.target, link.target)
        rows.append(
            [
                f"{source} > {target}",
                f"{link.bytes_per_step / 1024:.0f}",
                f"{link.bytes_per_step * 8 / prediction.step_s / 1e6:.2f}",
                f"{link.busy_s:.3f}",
                f"{link.busy_s / prediction.step_s:.0%}",
            ]
        )
    return [*_table(rows), ""]


def _codec_lines(plan: Plan, names: Mapping[str, str]) -> list[str]:
    """A line a link that has a reason: what it compresses with, and why."""
    labels = [names.get(stage.worker, stage.worker) for stage in plan.stages]
    lines = [f"{labels[s.source]} > {labels[s.target]}: {s.reason}" for s in plan.links if s.reason]
    return [*lines, ""] if lines else []


def _step_lines(prediction: Prediction) -> list[str]:
    bound = prediction.lower_bound_s
    ratio = f"; no schedule of this cut can be faster than {bound:.3f} s ({prediction.step_s / bound:.2f}x)"
    lines = [
        f"step          {prediction.step_s:.3f} s predicted{ratio if bound > 0 else ''}",
        f"commit        {prediction.commit_s * 1e3:.1f} ms of it",
        f"bottleneck    {prediction.bottleneck}: {prediction.reason}",
    ]
    if prediction.single_machine_s is not None:
        ratio_alone = prediction.step_s / prediction.single_machine_s
        lines.append(
            f"one machine   {prediction.single_machine} alone, memory aside: "
            f"{prediction.single_machine_s:.3f} s a step, "
            + (f"{ratio_alone:.1f}x faster" if ratio_alone >= 1 else f"{1 / ratio_alone:.1f}x slower")
        )
    return lines


def _fleet_lines(fleet: Fleet) -> list[str]:
    """The fleet as the planner sees it: groups of well-joined devices, and shared uplinks."""
    lines = []
    for i, group in enumerate(groups(fleet.effective_bps)):
        shown = [
            f"{fleet.devices[d].label} ({gflops_of(fleet.devices[d].gflops):.3g} GFLOP/s)" for d in group[:8]
        ]
        more = f" and {len(group) - 8} more" if len(group) > 8 else ""
        lines.append(f"group {i + 1}       {', '.join(shown)}{more}")
    return lines + [
        f"uplink        {uplink.name}: {uplink.up_bps / 1e6:.3g} Mbit/s up, "
        f"{uplink.down_bps / 1e6:.3g} down, shared by {len(uplink.members)}"
        for uplink in fleet.uplinks[:16]
    ]


def module_range(dag: OpDag, stage: StageSpec) -> str:
    """First and last module of a stage, as people name them."""
    paths = [dag.ops[op].module_path for op in range(stage.start, stage.stop) if dag.ops[op].module_path]
    if not paths:
        return "-"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"


def parameter_count(dag: OpDag, stage: StageSpec) -> int:
    """Elements of the distinct parameters that a stage holds."""
    names = {
        leaf.name
        for op in range(stage.start, stage.stop)
        for leaf in leaf_refs(dag.ops[op])
        if leaf.source is Source.PARAMETER
    }
    return sum(dag.parameters[name].meta.elements for name in names)


def timeline_of(
    plan: Plan, dag: OpDag, training: TrainingSpec, fleet: Fleet, wire: Wire | None = None
) -> Timeline:
    """The plan's step simulated anew on ``fleet``, with every span."""
    problem = Problem(dag, training, fleet, wire=wire or Wire())
    devices = tuple(fleet.index[stage.worker] for stage in plan.stages)
    candidate = Candidate(devices, tuple(stage.start for stage in plan.stages))
    warmups = tuple(stage.warmup for stage in plan.stages)
    return problem.timeline(Scored(candidate, plan.schedule, warmups, 0.0, plan.links))[1]


def plot(plan: Plan, timeline: Timeline, path: str | Path) -> None:
    """Draw the step to ``path`` (PNG, SVG or PDF by its ending): a row a stage, a row a wire."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wires = sorted({(s.source, s.target) for s in timeline.spans if s.source != s.target})
    rows: dict[tuple[int, int], int] = {(s, s): s for s in range(len(plan.stages))}
    rows.update({pair: len(plan.stages) + i for i, pair in enumerate(wires)})
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        spans = [s for s in timeline.spans if s.kind == kind]
        if spans:
            axes.barh(
                [rows[s.source, s.target] for s in spans],
                [s.end_s - s.start_s for s in spans],
                left=[s.start_s for s in spans],
                color=colour,
                edgecolor="white",
                linewidth=0.4,
                height=0.8,
                label=kind,
            )
    axes.set_yticks(list(rows.values()), _row_labels(plan, wires))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.step_s)
    axes.set_xlabel("seconds")
    axes.set_title(f"{plan.partitioner}: {timeline.step_s:.3f} s a step, {plan.schedule.value}")
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.25 / max(1.0, 0.1 * len(rows))))
    figure.savefig(path, dpi=110)


_COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "opt": "#54a24b",
    "send-F": "#9ecae9",
    "send-B": "#ffbf79",
    "send-tied": "#b279a2",
}


def _row_labels(plan: Plan, wires: Sequence[tuple[int, int]]) -> list[str]:
    workers = [stage.worker for stage in plan.stages]
    return [f"stage {i}  {w}" for i, w in enumerate(workers)] + [
        f"{workers[a]} > {workers[b]}" for a, b in wires
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: text left, figures right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    left = [not rows[-1][c][:1].isdigit() or c == 0 for c in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(w) if at_left else cell.rjust(w)
            for cell, w, at_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]


def _count(n: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)
