"""Samples a second of our plans and of torch.distributed.pipelining, alternating in one lab.

torch runs over gloo with GPipe and 1F1B, an equal split by blocks, in op_fence's device order; where that has
more devices than the model has blocks, without those that have the fewest ops.
Every run's losses are compared with op_fence's of its round: a fast pipeline that computes something
else would show here, and the benchmark then ends with exit code 1.
A short job goes before, not measured, so that all plans are made by a fleet that has trained once.
A model whose parameters torch cannot tie across ranks is compared with one that ties none, of the same size:
--rival-set gives it, and its losses are then another model's.

  python -m benchmarks.pipeline_vs_torch --scenario two_islands --json
  python -m benchmarks.pipeline_vs_torch --scenario cross_region --only torch_gpipe torch_1f1b --rounds 3
  python -m benchmarks.pipeline_vs_torch --scenario homes --job benchmarks/tied_gpt_job.py --set n_micro=4 \
    --only one_piece torch_1f1b torch_gpipe --rival-set TIED=False
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    SCHEDULED,
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    follow,
    machine,
    need_lab,
    parser,
    steady,
)
from benchmarks.rivals.torch_pipeline import blocks_of
from coordinator.client.job_file import load_job

if TYPE_CHECKING:
    from torch.nn import Module

Losses = Mapping[str, Mapping[int, Sequence[float]]]  # name -> round -> of each step

OURS = ("op_fence", "one_piece", "proportional", "even")
RIVALS = {"torch_gpipe": "gpipe", "torch_1f1b": "1f1b"}
# What torch's pipelining does not offer across ranks is left out on both sides.
SAME_MATHS = ("optimizer.clip_norm=none", "optimizer.weight_decay=0")
REFRESHER = "even"  # gives every worker a stage
REFRESHING_STEPS = 5
LOSS_TOLERANCE = 2e-3  # relative; the rival's initial weights and order of sums differ in the last bits


def compare(
    scenario: str,
    job: str,
    settings: list[str],
    steps: int,
    rounds: int,
    wanted: Sequence[str],
    of_rivals: Sequence[str] = (),
) -> dict[str, Any]:
    """One scenario: ``rounds`` alternating runs of everything ``wanted``, of op_fence in any case."""
    ours = [name for name in OURS if name == "op_fence" or name in wanted]
    rivals = {name: schedule for name, schedule in RIVALS.items() if name in wanted}
    loaded = load_job(Path(job), settings)
    batch = next(iter(loaded.example_inputs.values())).shape[0]
    samples = batch * loaded.training.n_micro
    rates: dict[str, list[float]] = {name: [] for name in (*ours, *rivals)}
    plans: dict[str, Any] = {}
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in (*ours, *rivals)}
    limits: dict[str, list[float]] = {name: [] for name in ours}
    refused: dict[str, str] = {}
    with LabFleet(scenario) as fleet:
        fleet.train(job, REFRESHER, settings, stop_after=REFRESHING_STEPS)
        for number in range(rounds):
            for name in ours:
                run = fleet.train(job, name, settings, stop_after=steps)
                plans[name], losses[name][number] = run["plan"], run["loss"]
                seconds = steady(run["step_s"])
                rates[name].append(samples / seconds)
                tell(number, name, rates)
                limits[name].append(seconds / run["plan"]["prediction"]["lower_bound_s"])
            order = hosts_of(fleet, plans["op_fence"], loaded.module)
            for name, schedule in rivals.items():
                try:
                    run = fleet.rival(job, order, schedule, steps, [*settings, *of_rivals])
                except CommandFailed as error:
                    refused[name] = str(error)[-500:]
                    continue
                losses[name][number] = run["loss"]
                rates[name].append(samples / steady(run["step_s"]))
                tell(number, name, rates)
    followed = {name: runs for name, runs in losses.items() if not of_rivals or name in ours}
    strayed = strays(followed, "op_fence")
    return {
        "scenario": fleet.scenario.name,
        "samples_per_s": {name: round(statistics.median(r), 4) for name, r in rates.items() if r},
        "limit_ratio": {name: round(statistics.median(r), 4) for name, r in limits.items()},
        "plan": {name: summary(plan) for name, plan in plans.items()},
        "same_losses": not strayed,
        "strays": strayed,
        "refused": refused,
    }


def tell(number: int, name: str, rates: dict[str, list[float]]) -> None:
    """One run's line, while the others still go."""
    print(f"  round {number}: {name:<13} {rates[name][-1]:8.2f} samples/s", flush=True)


def hosts_of(fleet: LabFleet, plan: dict[str, Any], module: Module) -> list[str]:
    """Names of the hosts of a plan's largest stages, in stage order, at most one for a block of ``module``.
    The rival needs two at least; what it cannot split it refuses itself."""
    most = max(2, blocks_of(module)[1])
    names = {w["worker"]: w["name"] for w in fleet.status()["workers"]}
    stages = plan["stages"]
    largest = sorted(stages, key=lambda stage: stage["start"] - stage["stop"])[:most]
    hosts = [names[stage["workers"][0]] for stage in stages if stage in largest]
    return hosts if len(hosts) > 1 else list(fleet.scenario.join_order)[:most]


def summary(plan: dict[str, Any]) -> dict[str, Any]:
    """The cut, its devices and its prediction."""
    return {
        "stages": [
            ([(p["start"], p["stop"]) for p in (s, *s.get("further", ()))], s["workers"][0])
            for s in plan["stages"]
        ],
        "schedule": plan["schedule"],
        "recompute": [s.get("keeping", {}).get("recompute") or "off" for s in plan["stages"]],
        "predicted_s": plan["prediction"]["step_s"],
        "lower_bound_s": plan["prediction"]["lower_bound_s"],
        "bottleneck": plan["prediction"]["bottleneck"],
    }


def strays(losses: Losses, reference: str) -> list[str]:
    """Runs whose losses do not follow the reference's of the same round, step by step."""
    return [
        f"{name} in round {number}"
        for name, rounds in losses.items()
        for number, run in rounds.items()
        if not follow(run, losses[reference].get(number, ()), LOSS_TOLERANCE)
    ]


def main() -> int:
    """Print a table a scenario and, with --json, one object (a list for several scenarios); exit code 1
    when losses differ."""
    options = parser(__doc__, scenario="two_islands", job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--rounds", type=int, default=2, help="alternations of everything")
    options.add_argument("--set", action="append", default=[], help="job override")
    options.add_argument("--rival-set", action="append", default=[], help="job override for torch alone")
    everything = (*OURS, *RIVALS)
    options.add_argument("--only", nargs="+", default=everything, choices=everything, help="beside op_fence")
    args = options.parse_args()
    need_lab(args.json)
    settings = [
        f"steps={SCHEDULED}",
        f"seed={args.seed}",
        "n_micro=16",
        "eval_batches=0",
        *SAME_MATHS,
        *args.set,
    ]
    found = []
    for scenario in args.scenario or ("two_islands",):
        result = compare(scenario, args.job, settings, args.steps, args.rounds, args.only, args.rival_set)
        found.append(result)
        best = result["samples_per_s"].get("op_fence", 0.0)
        print(f"{result['scenario']}: samples/s (op_fence over it), measured / lower bound")
        for name, rate in result["samples_per_s"].items():
            ratio = result["limit_ratio"].get(name)
            print(f"  {name:<13} {rate:8.2f} ({best / rate:5.2f}x)  {f'{ratio:.2f}' if ratio else '':>5}")
        print(f"  losses agree: {result['same_losses']}", flush=True)
    print(f"machine {machine()}, seed {args.seed}")
    strayed = [f"{run} ({result['scenario']})" for result in found for run in result["strays"]]
    wrong = f"the losses of {', '.join(strayed)} differ from op_fence's" if strayed else ""
    return conclude(found[0] if len(found) == 1 else found, args.json, wrong)


if __name__ == "__main__":
    execute(main)
