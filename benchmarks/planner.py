"""How long planning takes on large fleets, and whether the islands are found.

    python -m benchmarks.planner [--seed N] [--json] [--small]

Three cases: 8 devices x 400 ops (a lab), 64 x 2,000 (acceptance: under 2 s) and 1,000 devices in
50 islands of 20 x 5,000 ops (acceptance: under 60 s). Memory is such that many devices are
needed. ``--small`` leaves the last one out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass

from atoll.job import TrainingSpec
from benchmarks.harness import execute
from coordinator.planning.clusters import groups
from coordinator.planning.planner import PlanRequest, make_plan
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import islands, random_fleet


@dataclass(frozen=True)
class Result:
    devices: int
    ops: int
    plan_s: float
    grouping_s: float
    groups: int
    groups_right: bool
    stages: int
    step_s: float
    lower_bound_s: float


def measure(seed: int, n_islands: int, size: int, layers: int, memory_mib: float, n_micro: int) -> Result:
    """Plan a GPT of ``layers`` blocks (13 ops each) over ``n_islands`` islands of ``size``."""
    dag = gpt_like(layers, d=512, tokens=128, vocab=4096, tied=False)
    if n_islands == 1:
        fleet, home = random_fleet(seed, size, (memory_mib, 2 * memory_mib)), [0] * size
    else:
        fleet, home = islands(seed, n_islands, size, memory_mib)
    begin = time.perf_counter()
    found = groups(fleet.effective_bps)
    grouped = time.perf_counter()
    plan = make_plan(PlanRequest("bench", 1, dag, None, TrainingSpec(1, n_micro), fleet))
    done = time.perf_counter()
    assert plan.prediction is not None
    right = len(found) == n_islands and all(len({home[d] for d in group}) == 1 for group in found)
    return Result(
        devices=len(fleet.devices),
        ops=len(dag.ops),
        plan_s=round(done - grouped, 3),
        grouping_s=round(grouped - begin, 3),
        groups=len(found),
        groups_right=right or n_islands == 1,
        stages=len(plan.stages),
        step_s=round(plan.prediction.step_s, 3),
        lower_bound_s=round(plan.prediction.lower_bound_s, 3),
    )


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--small", action="store_true", help="without the 1,000-device case")
    args = parser.parse_args()
    random.seed(args.seed)
    cases = [
        ("lab", (1, 8, 30, 400.0, 16)),
        ("64x2000", (8, 8, 154, 400.0, 16)),
        ("1000x5000", (50, 20, 384, 250.0, 64)),
    ]
    results = {}
    for name, case in cases[:2] if args.small else cases:
        results[name] = result = measure(args.seed, *case)
        print(
            f"{name:10} {result.devices:5} devices {result.ops:5} ops: plan {result.plan_s:6.2f} s, grouping "
            f"{result.grouping_s:5.2f} s ({result.groups} groups), {result.stages} stages, "
            f"step {result.step_s:.2f} s, {result.step_s / result.lower_bound_s:.2f}x the bound",
            flush=True,
        )
    if args.json:
        print(json.dumps({name: asdict(result) for name, result in results.items()}))


if __name__ == "__main__":
    execute(main)
