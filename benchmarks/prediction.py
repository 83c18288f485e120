"""Predicted against measured step time, for every partitioner in every scenario.

The prediction is the one that the plan carried before the job ran; the measured figure is the
median of the job's steps after the first two. A micro-batch computes for at least 40 ms on the
slowest device, since CPU quotas do not slow shorter bursts.

  python -m benchmarks.prediction --scenario two_islands --scenario homes --json
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import LabFleet, machine, parser, steady

PARTITIONERS = ("op_fence", "proportional", "even")
DEFAULT = ("two_islands", "homes", "datacenter")


def measure(fleet: LabFleet, job: str, partitioner: str, settings: list[str]) -> dict[str, Any]:
    """Run one job and set its plan's prediction beside what it took."""
    run = fleet.train(job, partitioner, settings)
    predicted = run["plan"]["prediction"]["step_s"]
    measured = steady(run["step_s"])
    return {
        "scenario": fleet.scenario.name,
        "partitioner": partitioner,
        "predicted_s": round(predicted, 4),
        "measured_s": round(measured, 4),
        "error": round(predicted / measured - 1.0, 4),
        "stages": len(run["plan"]["stages"]),
    }


def main() -> None:
    """Print the table and, with --json, its rows as one list."""
    options = parser(__doc__, scenario=", ".join(DEFAULT), job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--set", action="append", default=[], help="job override, e.g. batch=4")
    args = options.parse_args()
    settings = [f"steps={args.steps}", f"seed={args.seed}", "eval_batches=0", *args.set]
    rows = []
    print("scenario       partitioner   predicted s  measured s    error stages")
    for scenario in args.scenario or DEFAULT:
        with LabFleet(scenario) as fleet:
            for partitioner in PARTITIONERS:
                row = measure(fleet, args.job, partitioner, settings)
                rows.append(row)
                print(
                    f"{row['scenario']:<14} {row['partitioner']:<13} {row['predicted_s']:>11.3f} "
                    f"{row['measured_s']:>11.3f} {row['error']:>+8.1%} {row['stages']:>6}",
                    flush=True,
                )
    print(f"machine {machine()}, seed {args.seed}")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
