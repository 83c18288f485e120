"""Predicted against measured step time, for every partitioner in every scenario.

For each fleet: what `atoll plan` says at first sight, from probes alone; then a short job whose
measurements refresh the estimates, as any training does; then each partitioner's own job, whose
plan's prediction (``predicted_s``) is set beside the median of its steps after the first two
(``measured_s``). ``micro ms`` is what the least and the most loaded stage compute for one
micro-batch, forward and backward: CPU quotas do not slow short bursts, so the settings keep the
least one at 40 ms or more.

  python -m benchmarks.prediction --scenario two_islands --scenario homes --json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil
from typing import Any

from benchmarks.harness import SCHEDULED, LabFleet, execute, fitting, machine, need_lab, parser, steady

PARTITIONERS = ("op_fence", "proportional", "even")
DEFAULT = ("two_islands", "homes", "datacenter")
SETTINGS = ("MICRO_BATCH=6", "n_micro=4")  # enough for 40 ms on every stage of the three
REFRESHER = "even"  # gives every worker a stage
REFRESHING_STEPS = 4
REFRESHING_S = 12.0  # at least about so long: a moment in which the machine is busy is not its speed
COLUMNS = "scenario       partitioner   first s   error predicted s   error measured s stages   micro ms"


def measure(
    fleet: LabFleet, job: str, partitioner: str, settings: list[str], steps: int, first_s: float
) -> dict[str, Any]:
    """Run one job and set its plan's predictions beside what it took."""
    run = fleet.train(job, partitioner, settings, stop_after=steps)
    prediction = run["plan"]["prediction"]
    measured_s = steady(run["step_s"])
    micro_s = [(s["forward_s"] + s["backward_s"]) / run["plan"]["n_micro"] for s in run["stages"]]
    return {
        "scenario": fleet.scenario.name,
        "partitioner": partitioner,
        "predicted_s": round(prediction["step_s"], 4),
        "measured_s": round(measured_s, 4),
        "error": round(prediction["step_s"] / measured_s - 1.0, 4),
        "first_sight_s": round(first_s, 4),
        "first_sight_error": round(first_s / measured_s - 1.0, 4),
        "stages": len(run["plan"]["stages"]),
        "micro_batch_s": [round(s, 4) for s in micro_s],  # computed by each stage, last step
        "predicted_compute_s": [round(s["compute_s"], 4) for s in prediction["stages"]],  # a step
        "steps_s": [round(s, 3) for s in run["step_s"]],
    }


def row_text(row: dict[str, Any]) -> str:
    """One line of the table."""
    micro = row["micro_batch_s"] or [0.0]
    return (
        f"{row['scenario']:<14} {row['partitioner']:<12} {row['first_sight_s']:>8.3f} "
        f"{row['first_sight_error']:>+7.1%} {row['predicted_s']:>11.3f} {row['error']:>+7.1%} "
        f"{row['measured_s']:>10.3f} {row['stages']:>6} {1e3 * min(micro):>5.0f}-{1e3 * max(micro):.0f}"
    )


def scenario_rows(
    name: str, job: str, settings: list[str], steps: int, partitioners: Sequence[str]
) -> list[dict[str, Any]]:
    """The partitioners in one scenario."""
    rows = []
    with LabFleet(name) as fleet:
        first = {p: fleet.plan(job, p, settings)["prediction"]["step_s"] for p in {REFRESHER, *partitioners}}
        refreshing = max(REFRESHING_STEPS, ceil(REFRESHING_S / first[REFRESHER]))
        fleet.train(job, REFRESHER, settings, stop_after=refreshing)
        for partitioner in partitioners:
            row = measure(fleet, job, partitioner, settings, steps, first[partitioner])
            rows.append(row)
            print(row_text(row), flush=True)
    return rows


def main() -> None:
    """Print the table and, with --json, its rows as one list."""
    options = parser(__doc__, scenario=", ".join(DEFAULT), job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--set", action="append", default=[], help="job override, e.g. MICRO_BATCH=8")
    options.add_argument("--only", action="append", choices=PARTITIONERS, help="may repeat (default all)")
    args = options.parse_args()
    need_lab(args.json)
    # Runs are stopped before anything is stored: over a slow line that takes longer than the steps.
    settings = [*fitting(SETTINGS, args.job), f"steps={SCHEDULED}", f"seed={args.seed}", "eval_batches=0"]
    settings += args.set
    print(COLUMNS)
    names, only = args.scenario or DEFAULT, args.only or PARTITIONERS
    rows = [row for name in names for row in scenario_rows(name, args.job, settings, args.steps, only)]
    print(
        f"machine {machine()}, seed {args.seed}; error = predicted / measured - 1; first: from probes alone"
    )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    execute(main)
