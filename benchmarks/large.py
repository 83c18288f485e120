"""GPT-2 of 124 or 355 million parameters, tied, random weights, across an emulated WAN.

A fleet of the lab in which no machine has memory for the training state trains some steps under the plan
that `auto` gives; then one process trains the same graph on the same micro-batches. Compared are the losses.
Shown are planned and measured memory of every stage and the planned and measured step.

  python -m benchmarks.large --size small --json
  python -m benchmarks.large --size medium --json    # 8 GiB of memory, ten minutes on two busy cores

Sequences are short and micro-batches of one, so that a step takes seconds on two cores.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    SCHEDULED,
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    machine,
    need_lab,
    parser,
    steady,
)
from coordinator.client.job_file import load_job

MIB = float(1 << 20)
JOB = str(Path(__file__).with_name("large_job.py"))
SCENARIO = "four_large"
ALONE = "--alone"  # this program as the one process that trains beside the fleet


@dataclass(frozen=True, slots=True)
class Size:
    """Memory of a machine of the fleet, by the size of the model: less than its training state takes."""

    stage_mib: int


SIZES = {"tiny": Size(120), "small": Size(1300), "medium": Size(2900)}


class Fleet(LabFleet):
    """Workers with so much memory for a stage, whatever the scenario says."""

    def __init__(self, scenario: str, stage_mib: int) -> None:
        super().__init__(scenario)
        self._stage_mib = stage_mib

    def _worker(self, host: str) -> list[str]:
        command = super()._worker(host)
        if "--stage-memory" in command:
            at = command.index("--stage-memory")
            del command[at : at + 2]
        return [*command, "--stage-memory", f"{self._stage_mib}MiB"]


def across(scenario: str, size: Size, settings: Sequence[str], steps: int) -> dict[str, Any]:
    """Train ``steps`` steps across a scenario and return its plan, losses, seconds and stages."""
    with Fleet(scenario, size.stage_mib) as fleet:
        begun_s = time.monotonic()
        run = fleet.train(JOB, "op_fence", settings, stop_after=steps)
        return {**run, "in_all_s": time.monotonic() - begun_s}


def alone(settings: Sequence[str], steps: int) -> dict[str, Any]:
    """Train ``steps`` steps in this process, one stage, and return losses, seconds and peak memory."""
    from atoll.program import stage_programs
    from benchmarks.oracle import from_job
    from tests.inprocess.pipeline import LocalPipeline

    job = load_job(Path(JOB), list(settings))
    case = from_job(job, job.training)
    pipeline = LocalPipeline(stage_programs(case.dag, (0,)), job.training, case.tensors, states=case.states)
    losses, step_s = [], []
    for step in range(steps):
        begun_s = time.monotonic()
        losses.append(pipeline.step(step, case.batches(step)).loss)
        step_s.append(time.monotonic() - begun_s)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    return {"loss": losses, "step_s": step_s, "peak_mib": peak_mib}


def in_one_process(settings: Sequence[str], steps: int) -> dict[str, Any]:
    """Return ``alone`` of a process of its own, so that its memory is nobody else's."""
    command = [sys.executable, "-m", "benchmarks.large", ALONE, json.dumps(list(settings))]
    command += ["--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"the one process ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(run: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared, of a run across the fleet and of one process."""
    prediction = run["plan"]["prediction"]
    measured = {stage["stage"]: stage for stage in run["stages"]}
    memory = [
        {
            "stage": at,
            "planned_mib": round(planned["memory_bytes"] / MIB, 1),
            "measured_mib": round(measured.get(at, {}).get("measured_bytes", 0) / MIB, 1),
        }
        for at, planned in enumerate(prediction["stages"])
    ]
    gaps = [abs(a - b) / abs(b) for a, b in zip(run["loss"], one["loss"], strict=True)]
    step_s = steady(run["step_s"], 1)
    return {
        "stages": run["plan"]["stages"],
        "schedule": run["plan"]["schedule"],
        "loss": run["loss"],
        "most_relative_gap": max(gaps),
        "step_s": round(step_s, 3),
        "steps_s": [round(each_s, 2) for each_s in run["step_s"]],
        "planned_s": round(prediction["step_s"], 3),
        "over_plan": round(step_s / prediction["step_s"], 3),
        "lower_bound_s": round(prediction["lower_bound_s"], 3),
        "bottleneck": prediction["bottleneck"],
        "memory": memory,
        "most_over_memory": max((m["measured_mib"] / m["planned_mib"] for m in memory), default=0.0),
        "in_all_s": round(run["in_all_s"], 1),
        "one_process_s": round(steady(one["step_s"], 1), 3),
        "one_process_mib": round(one["peak_mib"], 1),
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the figures of a size."""
    print(f"{name}: {len(found['stages'])} stages, {found['schedule']}, {found['in_all_s']:.0f} s in all")
    print(
        f"  step {found['step_s']:.2f} s, planned {found['planned_s']:.2f} s ({found['over_plan']:.2f} x), "
        f"bound {found['lower_bound_s']:.2f} s; one process without a quota {found['one_process_s']:.2f} s"
    )
    for each in found["memory"]:
        print(
            f"  stage {each['stage']}: planned {each['planned_mib']} MiB, measured {each['measured_mib']} MiB"
        )
    print(f"  one process {found['one_process_mib']:.0f} MiB")
    print(f"  losses {found['loss']}, largest relative gap {found['most_relative_gap']:.1e}", flush=True)


def main() -> int:
    """Train, compare and print; exit code 1 where losses differ."""
    options = parser(__doc__, scenario=SCENARIO)
    options.add_argument("--size", choices=SIZES, default="small")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--set", action="append", default=[], help="job override")
    options.add_argument(ALONE, help="settings of the one process, as JSON: for this program itself")
    args = options.parse_args()
    if args.alone:
        print(json.dumps(alone(json.loads(args.alone), args.steps)))
        return 0
    need_lab(args.json)
    settings = [f"SIZE={args.size}", f"SEED={args.seed}", f"steps={SCHEDULED}", *args.set]
    (scenario,) = args.scenario or (SCENARIO,)
    run = across(scenario, SIZES[args.size], settings, args.steps)
    found = figures(run, in_one_process(settings, args.steps))
    show(args.size, found)
    print(f"machine {machine()}, seed {args.seed}")
    result = {"size": args.size, "scenario": scenario, "seed": args.seed, **found}
    wrong = "losses differ from those of one process" if found["most_relative_gap"] else ""
    return conclude(result, args.json, wrong)


if __name__ == "__main__":
    execute(main)
