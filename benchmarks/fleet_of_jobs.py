"""Many jobs on one fleet, in simulated time, by the code that the coordinator runs.

philly   160 jobs on 16 servers of 4 GPUs at 10 Gbit/s: orders, placements, rules for transfers that meet
elastic  50 jobs on 16 slots, speed g^0.8: slots by FIFO, least service, evolution, marginal gain, shares
homes    50 jobs of three owners on machines that come at night: with moves that cost a minute, and churn

  python -m benchmarks.fleet_of_jobs --json

Figures and why they differ from the papers': docs/decisions/091-many-jobs-on-one-fleet.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.job_traces import elastic, evenings, evolution, fixed_order, homes, marginal, philly, servers
from benchmarks.shared_fleet import Admits, SharedFleet, at_most, by_shares, fluid
from coordinator.sharing.contention import begins
from coordinator.sharing.places import Placing, first_fit, least_work_first
from coordinator.sharing.policies import POLICIES

SLOTS = 16
MOVE_S = 5.0  # of a job on servers
HOME_MOVE_S = 60.0  # of one at home, whose state goes over a home's uplink
OTHER_MOVE_S = 120.0  # beside it
TRANSFERS: dict[str, Admits] = {"Ada-SRSF": begins, "SRSF(1)": at_most(1), "SRSF(2)": at_most(2)}
PLACINGS: dict[str, tuple[Placing, bool]] = {
    "whole": (least_work_first, True),  # LWF-1, and a job waits for as few places as could hold it
    "LWF-1": (least_work_first, False),
    "first fit": (first_fit, False),
}


def of_philly(seed: int) -> dict[str, Any]:
    """Mean seconds to a job's end by order, placement and rule; and how much later than under FIFO."""
    trace, found = philly(seed), dict[str, Any]()
    ends: dict[str, dict[str, float]] = {}
    orders = {rule: ("srsf", admits) for rule, admits in TRANSFERS.items()} | {"FIFO": ("fifo", begins)}
    for place, (placing, together) in PLACINGS.items():
        for rule, (policy, admits) in orders.items():
            fleet = SharedFleet(
                trace, servers(), POLICIES[policy], placing, admits, pause_s=MOVE_S, together=together
            )
            name = f"{rule}, {place}"
            ends[name] = fleet.run()
            found[name] = mean(ends[name].values())
    found["latest / FIFO"] = _latest(ends["Ada-SRSF, whole"], ends["FIFO, whole"])
    return found


def of_elastic(seed: int) -> dict[str, Any]:
    """The same by how slots are given out."""
    asked = elastic(seed, slots=SLOTS)
    free = [_any_number(job) for job in asked]
    rules: dict[str, tuple[list[Any], Callable[..., Any]]] = {
        "FIFO": (asked, fixed_order(SLOTS, shortest=False)),
        "least service": (asked, fixed_order(SLOTS, shortest=True)),
        "evolution": (free, evolution(SLOTS, seed)),
        "marginal gain": (free, marginal(SLOTS)),
        "shares (heSRPT)": (free, by_shares(SLOTS, POLICIES["srsf"])),
    }
    return {name: mean(fluid(jobs, SLOTS, rule).values()) for name, (jobs, rule) in rules.items()}


def _any_number(job: Any) -> Any:
    return replace(job, least=1, compute_s=job.step_s(1))


def of_homes(seed: int) -> dict[str, Any]:
    """The same on machines at home, under each policy; moves are counted."""
    machines, sessions = homes(seed)
    trace, found, ends = evenings(seed), dict[str, Any](), dict[str, dict[str, float]]()
    for name in ("fifo", "priorities", "shares", "srsf"):
        fleet = SharedFleet(trace, machines, POLICIES[name], pause_s=HOME_MOVE_S, sessions=sessions)
        ends[name] = fleet.run()
        found[name] = mean(ends[name].values())
        found[f"{name} moves"] = fleet.moves
    found["latest / FIFO"] = _latest(ends["srsf"], ends["fifo"])
    found["over 2 x FIFO"] = sum(ends["srsf"][job] > 2.0 * ends["fifo"][job] for job in ends["fifo"])
    # The same under FIFO with other pauses: how far one job's time under FIFO is a matter of minutes.
    other = SharedFleet(trace, machines, POLICIES["fifo"], pause_s=OTHER_MOVE_S, sessions=sessions).run()
    found["FIFO / FIFO"] = _latest(other, ends["fifo"])
    return found


def _latest(ends: dict[str, float], before: dict[str, float]) -> float:
    """Return by how many times the job that loses most ends later."""
    return max(ends[job] / before[job] for job in ends)


PARTS = {"philly": of_philly, "elastic": of_elastic, "homes": of_homes}


def main() -> int:
    """Run the parts and print the figures."""
    options = parser(__doc__ or "")
    options.add_argument("--seeds", type=int, default=5, help="traces, from --seed on")
    options.add_argument("--only", choices=list(PARTS), help="one part")
    args = options.parse_args()
    result: dict[str, Any] = {"machine": machine(), "seed": args.seed, "seeds": args.seeds}
    for part, of in PARTS.items():
        if args.only in (None, part):
            rows = [of(args.seed + at) for at in range(args.seeds)]
            result[part] = {key: round(mean(row[key] for row in rows), 3) for key in rows[0]}
            result[f"{part}_worst"] = round(max(row.get("latest / FIFO", 0.0) for row in rows), 3)
        for name, value in result.get(part, {}).items():
            print(f"  {part:<8} {name:<24} {value:10.2f}", flush=True)
    return conclude(result, args.json)


if __name__ == "__main__":
    execute(main)
