"""Local steps on real workers behind thin links: wall time of H = 50 beside H = 1 for as many tokens.

Four hosts with 8 Mbit/s each hold the model and train it by DiLoCo, with an exchange every 50 steps and with
one at every step. A step sees the same micro-batches either way. Printed: seconds of all steps from the first
one's start to the last one's commit, bytes that were exchanged, the loss at the end, and what was predicted.

  python -m benchmarks.local_steps_lab --json
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import LabFleet, conclude, execute, fitting, machine, need_lab, parser

SETTINGS = ("WIDTH=128", "LAYERS=2", "n_micro=4")
GOAL = 5.0
PERIODS = (50, 1)


def measured(fleet: LabFleet, job: str, settings: list[str], every: int, steps: int) -> dict[str, Any]:
    """Train all steps with an exchange after ``every``."""
    asked = [*settings, f"steps={steps}", "exchange=diloco", f"local_steps={every}"]
    run = fleet.train(job, "op_fence", asked)
    plan = run["plan"]
    row = {
        "every": every,
        "peers": len(plan["replicas"]),
        "predicted_s": round(plan["prediction"]["step_s"] * steps, 2),
        "wall_s": round(sum(run["step_s"]) * every, 2),
        "step_s": [round(seconds, 4) for seconds in run["step_s"]],
        "loss": round(run["loss"][-1], 4),
    }
    print(
        f"H = {every:<4} {row['peers']} peers {row['wall_s']:>9.1f} s for {steps} steps "
        f"({row['predicted_s']:.1f} s predicted), loss {row['loss']}",
        flush=True,
    )
    return row


def main() -> int:
    """Print a row for each; exit code 1 when local steps are not 5 times as fast."""
    options = parser(__doc__ or "", scenario="four_thin", job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=100, help="of each run; a multiple of 50")
    args = options.parse_args()
    need_lab(args.json)
    settings = [*fitting(SETTINGS, args.job), f"seed={args.seed}", "eval_batches=0"]
    with LabFleet((args.scenario or ["four_thin"])[0]) as fleet:
        rows = [measured(fleet, args.job, settings, every, args.steps) for every in PERIODS]
    ratio = rows[1]["wall_s"] / rows[0]["wall_s"]
    print(f"H = 50: {ratio:.1f} times as fast; {json.dumps(machine())}")
    wrong = "" if ratio >= GOAL else f"{ratio:.1f} times as fast, {GOAL:g} are asked"
    return conclude({"rows": rows, "ratio": round(ratio, 2), "machine": machine()}, args.json, wrong)


if __name__ == "__main__":
    execute(main)
