"""How long planning takes on large fleets, and whether the islands are found.

    python -m benchmarks.planner [--seed N] [--json] [--small] [--fleet-size N]

Three cases: 8 devices x 400 ops (a lab), 64 x 2,000 (acceptance: under 2 s) and 1,000 devices in
50 islands of 20 x 5,000 ops (acceptance: under 60 s). Memory is such that many devices are
needed. ``--small`` leaves the last one out.

``--fleet-size 10000`` is another case, alone: workers in sites of 20, of whose links few are measured, are
narrowed as the coordinator does it and planned for; the plan is compared with a search of all that are left.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

from atoll.job import TrainingSpec
from benchmarks.harness import execute
from coordinator.config import Probing
from coordinator.membership.links.guesses import guesses
from coordinator.membership.links.table import LinkTable, measured_fleet
from coordinator.planning.costs.fleet import UNKNOWN, Device
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.search.clusters import groups
from coordinator.planning.search.op_fence import Effort
from coordinator.planning.search.preselect import candidates
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


@dataclass(frozen=True)
class HugeResult:
    """Times in seconds; ``ratio``: the plan's predicted step over that of a search of all candidates."""

    workers: int
    measured_pairs: int
    candidates: int
    candidates_s: float
    fleet_s: float
    plan_s: float
    stages: int
    step_s: float
    searched_all_s: float
    ratio: float
    first_joined_ratio: float  # the step over that of a plan among the first that joined


def huge_fleet(seed: int, workers: int, site: int = 20) -> tuple[list[Device], dict[str, str], LinkTable]:
    """Devices, the site of each, and the table of the links that were measured: between each worker and its
    site's first, and between that one and two other sites' first."""
    draw = random.Random(seed)
    devices, place_of, table = [], {}, LinkTable()
    for at in range(workers):
        name = f"w{at}"
        memory = int(draw.uniform(300.0, 1200.0) * 2**20)
        devices.append(Device(name, memory, gflops={"": draw.lognormvariate(3.5, 0.5)}, memory_gbps=20.0))
        place_of[name] = f"site{at % (workers // site)}"
    heads = workers // site
    for at in range(workers):
        near = at >= heads
        for peer in [at % heads] if near else draw.sample([h for h in range(heads) if h != at], 2):
            for a, b in ((at, peer), (peer, at)):
                rate, delay = (1e9, 0.001) if near else (2e7, 0.03)
                table.probed(
                    f"w{a}", f"w{b}", rate * draw.uniform(0.5, 1.5), 2 * delay * draw.uniform(0.7, 1.3)
                )
    return devices, place_of, table


def measure_huge(seed: int, workers: int) -> HugeResult:
    """Plan a GPT of 24 blocks on ``workers`` workers."""
    devices, place_of, table = huge_fleet(seed, workers)
    dag, training = gpt_like(24, d=512, tokens=128, vocab=4096, tied=False), TrainingSpec(1, 32)
    most = Probing().planned_workers

    def request(chosen: list[str]) -> PlanRequest:
        among = set(chosen)
        known = [device for device in devices if device.worker in among]
        fleet = measured_fleet(known, table, guessed=guesses(chosen, place_of, table, UNKNOWN))
        return PlanRequest("bench", 1, dag, None, training, fleet, beyond=workers - len(chosen))

    def step_s(asked: PlanRequest, effort: Effort | None = None) -> tuple[float, int]:
        plan = make_plan(asked, effort)
        assert plan.prediction is not None
        return plan.prediction.step_s, len(plan.stages)

    times = [time.perf_counter()]
    chosen = candidates(devices, most, {d.worker: table.best_bps(d.worker) for d in devices}, place_of)
    times.append(time.perf_counter())
    asked = request(chosen)
    times.append(time.perf_counter())
    mine, stages = step_s(asked)
    times.append(time.perf_counter())
    whole, _ = step_s(asked, Effort(few=workers))
    times.append(time.perf_counter())
    first, _ = step_s(request([device.worker for device in devices[:most]]))
    narrowed_s, fleet_s, plan_s, whole_s = (b - a for a, b in pairwise(times))
    return HugeResult(
        workers,
        len(table.estimates),
        len(chosen),
        round(narrowed_s, 3),
        round(fleet_s, 3),
        round(plan_s, 3),
        stages,
        round(mine, 4),
        round(whole_s, 3),
        round(mine / whole, 4),
        round(mine / first, 4),
    )


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--small", action="store_true", help="without the 1,000-device case")
    parser.add_argument("--fleet-size", type=int, default=0, help="only a fleet of so many workers")
    args = parser.parse_args()
    random.seed(args.seed)
    if args.fleet_size:
        found = measure_huge(args.seed, args.fleet_size)
        print(
            f"{found.workers} workers, {found.measured_pairs} pairs measured: {found.candidates} candidates "
            f"in {found.candidates_s:.2f} s, fleet {found.fleet_s:.2f} s, plan {found.plan_s:.2f} s, "
            f"{found.stages} stages, step {found.step_s:.2f} s, {found.ratio:.3f}x that of a search of all "
            f"candidates, which takes {found.searched_all_s:.1f} s, and {found.first_joined_ratio:.3f}x that "
            "of a plan among the first that joined"
        )
        if args.json:
            print(json.dumps(asdict(found)))
        return
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
