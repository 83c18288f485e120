"""Run simulated worlds by seed: ``python -m tests.sim --seed 7 --story``, ``--seeds 0:1000 --shrink``;
a large fleet for some minutes: ``--fleet 10000 --minutes 5 --churn 0.1``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.sim.checks import Violation
from tests.sim.fleet import Fleet, FleetRun
from tests.sim.shrink import shrunk
from tests.sim.world import scenario, told, violation_of

SHOWN = 40  # last events of a failing run


def main() -> int:
    """Run what was asked for; 1 when something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", default="", help="a range of runs, such as 0:1000")
    parser.add_argument("--story", action="store_true", help="tell each run, event by event")
    parser.add_argument("--shrink", action="store_true", help="make a failing run smaller, and tell that one")
    parser.add_argument("--fleet", type=int, help="one run of so many workers, for some minutes")
    parser.add_argument("--minutes", type=float, default=5.0, help="simulated ones, of --fleet")
    parser.add_argument("--churn", type=float, default=0.1, help="share of --fleet that goes, a minute")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if arguments.fleet:
        run = FleetRun(arguments.fleet, arguments.minutes, arguments.churn, arguments.seed or 0)
        return _fleet(run, arguments.json)
    first, _, stop = arguments.seeds.partition(":")
    one = arguments.seed if arguments.seed is not None else 0
    seeds = range(int(first), int(stop)) if stop else range(one, one + 1)
    begun_s, events, failing = time.monotonic(), 0, []
    for seed in seeds:
        found = scenario(seed)
        why, world = violation_of(found)
        events += len(world.clock.story)
        if why and arguments.shrink:
            found = shrunk(found)
            why, world = violation_of(found)
        if why:
            failing.append({"seed": seed, "why": why, "scenario": repr(found)})
        if why or arguments.story:
            print(f"seed {seed}: {why or 'everything holds'}\n{found!r}")
            print(told(world, None if arguments.story else SHOWN))
    took_s = time.monotonic() - begun_s
    print(f"{len(seeds)} runs, {len(failing)} of them fail; {took_s:.1f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"runs": len(seeds), "events": events, "took_s": took_s, "failing": failing}))
    return 1 if failing else 0


def _fleet(asked: FleetRun, as_json: bool) -> int:
    fleet = Fleet(asked)
    try:
        figures = fleet.run()
    except Violation as broken:
        print(f"seed {asked.seed}: {broken}\n{told(fleet.world, SHOWN)}")
        return 1
    print(
        f"{asked.workers} workers, {asked.minutes:g} minutes, {figures['departures']} departures: everything "
        f"holds; {figures['wall_s']} s, {figures['peak_mb']} MB at most, {figures['messages']} messages: "
        f"{figures['messages_a_simulated_s']} a simulated second, {figures['messages_a_wall_s']} a real one",
        file=sys.stderr,
    )
    if as_json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
