"""Run simulated worlds by seed: ``python -m tests.sim --seed 7 --story``, ``--seeds 0:1000 --shrink``."""

from __future__ import annotations

import argparse
import json
import sys
import time

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
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
