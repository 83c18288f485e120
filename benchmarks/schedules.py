"""Seconds a step of one cut under both orders of work, alternating in one lab.

`1f1b` takes backwards whole; `zero-bubble` leaves the weight gradients for when a stage would wait. The
cut is op_fence's for 1f1b, on the devices as they joined. Losses must be equal to the last bit, as both
orders compute the same; else the benchmark ends with exit code 1. A short job goes before, not measured,
so that all plans are made by a fleet that has trained once.

  python -m benchmarks.schedules --scenario four_slow --json

With --idealised nothing runs: schedules in closed form, equal stages, timed by the planner's timeline, those
that no policy chooses among them (``benchmarks.idealised``).

  python -m benchmarks.schedules --idealised --json
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.harness import SCHEDULED, LabFleet, conclude, execute, machine, need_lab, parser, steady
from benchmarks.idealised import Times, chimera, lead, plain, rows
from coordinator.planning.baselines import GIVEN_CUT

SCHEDULES = ("1f1b", "zero-bubble")
SETTINGS = ("MICRO_BATCH=6", "n_micro=8")  # 130 ms a micro-batch and stage in four_slow
REFRESHER = "even"  # gives every worker a stage
REFRESHING_STEPS = 4
IDEALISED = {
    "trained weights": Times(20, 40, 20),
    "frozen weights, adapters": Times(20, 20, 0),
}
DEVICES = (4, 8)
MICRO_BATCHES = (1, 2, 4)  # times the devices
HOPS_MS = (0, 2, 10, 40)  # one way


def compare(scenario: str, job: str, settings: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """One scenario: ``rounds`` alternating runs of every schedule."""
    step_s: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    predicted_s: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    plans: dict[str, Any] = {}
    losses: list[list[float]] = []
    with LabFleet(scenario) as fleet:
        fleet.train(job, REFRESHER, settings, stop_after=REFRESHING_STEPS)
        starts = [
            stage["start"] for stage in fleet.plan(job, "op_fence", settings, schedule="1f1b")["stages"]
        ]
        cut = GIVEN_CUT + ",".join(map(str, starts[1:]))
        for number in range(rounds):
            for name in SCHEDULES:
                run = fleet.train(job, cut, settings, stop_after=steps, schedule=name)
                plans[name] = run["plan"]
                losses.append(run["loss"])
                step_s[name].append(steady(run["step_s"]))
                predicted_s[name].append(run["plan"]["prediction"]["step_s"])
                print(
                    f"  round {number}: {name:<12} {step_s[name][-1]:7.3f} s a step, "
                    f"{predicted_s[name][-1]:.3f} predicted",
                    flush=True,
                )
    pairs = zip(step_s["zero-bubble"], step_s["1f1b"], strict=True)
    return {
        "scenario": fleet.scenario.name,
        "step_s": {name: round(statistics.median(seconds), 4) for name, seconds in step_s.items()},
        "predicted_s": {name: round(statistics.median(s), 4) for name, s in predicted_s.items()},
        "of_1f1b_by_round": [round(a / b, 4) for a, b in pairs],
        "runs_s": {name: [round(s, 4) for s in seconds] for name, seconds in step_s.items()},
        "plan": {name: told(plan) for name, plan in plans.items()},
        "same_losses": all(run and run[:steps] == losses[0][:steps] for run in losses),
    }


def told(plan: dict[str, Any]) -> dict[str, Any]:
    """The cut, how far the order of work goes, and what it holds."""
    return {
        "schedule": plan["schedule"],
        "starts": [stage["start"] for stage in plan["stages"]],
        "warmup": [stage["warmup"] for stage in plan["stages"]],
        "held": [stage["held"] for stage in plan["stages"]],
        "memory_mib": [round(s["memory_bytes"] / 2**20, 1) for s in plan["prediction"]["stages"]],
    }


def idealised() -> dict[str, Any]:
    """Print a table of each case, size and delay, and return all with the figures of the papers."""
    found: dict[str, Any] = {}
    for case, times in IDEALISED.items():
        found[case] = {"rows": [], "lead": []}
        for n_devices, hop_ms in product(DEVICES, HOPS_MS):
            delayed = replace(times, hop_ms=hop_ms)
            sizes = [rows(delayed, n_devices, n_devices * factor) for factor in MICRO_BATCHES]
            print(f"\n{case}: {delayed}; {n_devices} devices, hop {hop_ms} ms\n")
            print(_table(sizes), flush=True)
            found[case]["rows"] += [row for size in sizes for row in size]
            found[case]["lead"] += map(lead, sizes)
    whole = IDEALISED["trained weights"]
    over = {n: plain(4, n).step_ms(whole) / chimera(4, n).step_ms(whole) for n in (4, 8)}
    print(f"\nchimera on four devices: 1f1b takes {over[4]:.3f} of its step at N=4, {over[8]:.3f} at N=8")
    return {"chimera_n4": over[4], "chimera_n8": over[8], "cases": found}


def _table(sizes: list[list[dict[str, Any]]]) -> str:
    """A line a schedule: steps in ms and their share of 1f1b's, the most that it holds."""
    lines = [["schedule", *(f"N={size[0]['n_micro']}" for size in sizes), "activations", "weights"]]
    lines.append(["---"] * len(lines[0]))
    for same in zip(*sizes, strict=True):
        steps = [f"{row['step_ms']:g} ({row['faster_than_1f1b']:.2f})" for row in same]
        lines.append([same[0]["schedule"], *steps, f"{same[-1]['activations']:g}", f"{same[0]['weights']:g}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Print a line a run and, with --json, one object (a list for several scenarios)."""
    options = parser(__doc__, scenario="four_slow", job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--rounds", type=int, default=3, help="alternations of both orders")
    options.add_argument("--set", action="append", default=[], help="job override")
    options.add_argument("--idealised", action="store_true", help="schedules in closed form, without a lab")
    args = options.parse_args()
    if args.idealised:
        return conclude(idealised(), args.json)
    need_lab(args.json)
    settings = [f"steps={SCHEDULED}", f"seed={args.seed}", "eval_batches=0", *SETTINGS, *args.set]
    found = []
    for scenario in args.scenario or ("four_slow",):
        result = compare(scenario, args.job, settings, args.steps, args.rounds)
        found.append(result)
        ratio = statistics.median(result["of_1f1b_by_round"])
        print(f"{result['scenario']}: zero-bubble takes {ratio:.2f} of 1f1b's step", flush=True)
    print(f"machine {machine()}, seed {args.seed}")
    strayed = [result["scenario"] for result in found if not result["same_losses"]]
    wrong = f"losses differ between schedules in {', '.join(strayed)}" if strayed else ""
    return conclude(found[0] if len(found) == 1 else found, args.json, wrong)


if __name__ == "__main__":
    execute(main)
