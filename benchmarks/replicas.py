"""Two replicas of a pipeline against one: samples a second, and what was predicted of them.

Four hosts on a fast network, none of which holds the model. Trained three times: by the first two of them as
one pipeline, by all four as two replicas, which exchange gradients at every step, and by all four as one
pipeline. Printed: predicted and measured step, samples a second, and the ratio of the second to the first.

  python -m benchmarks.replicas --json
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import (
    SCHEDULED,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    steady,
)

SETTINGS = ("MICRO_BATCH=6", "n_micro=8")
REPLICAS = 2
REFRESHING_STEPS = 5  # of a run whose measurements refresh the estimates, as any training does


def middle(plan: dict[str, Any]) -> str:
    """The cut of the plan's first replica, on hosts as they joined."""
    return "cut:" + ",".join(str(stage["start"]) for stage in plan["replicas"][0]["stages"][1:])


def measured(
    fleet: LabFleet, job: str, what: str, partitioner: str, settings: list[str], steps: int
) -> dict[str, Any]:
    """Train for some steps, and set the plan's prediction beside them."""
    run = fleet.train(job, partitioner, settings, stop_after=steps)
    plan, step_s = run["plan"], steady(run["step_s"])
    samples = plan["n_micro"] * next(
        int(s.partition("=")[2]) for s in settings if s.startswith("MICRO_BATCH")
    )
    row = {
        "what": what,
        "stages": [len(r["stages"]) for r in plan.get("replicas") or [plan]],
        "predicted_s": round(plan["prediction"]["step_s"], 4),
        "measured_s": round(step_s, 4),
        "error": round(plan["prediction"]["step_s"] / step_s - 1.0, 4),
        "samples_per_s": round(samples / step_s, 3),
        "steps_s": [round(s, 3) for s in run["step_s"]],
    }
    print(
        f"{what:<28} {row['predicted_s']:>8.3f} s predicted {row['measured_s']:>8.3f} s measured "
        f"{row['error']:>+7.1%} {row['samples_per_s']:>7.2f} samples/s",
        flush=True,
    )
    return row


def main() -> int:
    """Print a row for each; exit code 1 when replicas gain nothing."""
    options = parser(__doc__ or "", scenario="four_slow", job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=8)
    args = options.parse_args()
    need_lab(args.json)
    settings = [*fitting(SETTINGS, args.job), f"steps={SCHEDULED}", f"seed={args.seed}", "eval_batches=0"]
    several = [*settings, f"blocks={REPLICAS}", f"replicas={REPLICAS}"]
    with LabFleet((args.scenario or ["four_slow"])[0]) as fleet:
        first = fleet.plan(args.job, "op_fence", several)
        fleet.train(args.job, "op_fence", settings, stop_after=REFRESHING_STEPS)
        rows = [
            measured(fleet, args.job, "one pipeline, two hosts", middle(first), settings, args.steps),
            measured(fleet, args.job, "two replicas, four hosts", "op_fence", several, args.steps),
            measured(fleet, args.job, "one pipeline, four hosts", "op_fence", settings, args.steps),
        ]
        ratio = rows[1]["samples_per_s"] / rows[0]["samples_per_s"]
        print(f"two replicas: {ratio:.2f} times the samples a second of one; {json.dumps(machine())}")
        wrong = "" if ratio > 1.0 else "replicas are no faster than one pipeline of half the hosts"
        return conclude({"rows": rows, "ratio": round(ratio, 3), "machine": machine()}, args.json, wrong)


if __name__ == "__main__":
    execute(main)
