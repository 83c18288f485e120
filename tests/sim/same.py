"""Simulated worlds of two commits: whether each seed's jobs end alike, in every value that is promised.

    python -m tests.sim.same --seeds 0:200 --against db02d01e  # the commit's own code, in a copy of its tree
    python -m tests.sim.same --seeds 0:200 > ends.jsonl        # one line a seed
    python -m tests.sim.same --seeds 0:200 --against ends.jsonl

Promised are, of each job: how it ended and after how many steps, the loss of each step that was committed
last, held-out losses, and the weights. With ``--stories`` all that happened on the way counts as well, event
by event: a change that only moves code changes none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coordinator.messages import peer_tensors
from tests.sim.clock import digest
from tests.sim.world import World, scenario, violation_of

ROOT = Path(__file__).resolve().parents[2]


def ends(seed: int) -> dict[str, Any]:
    """Run a seed's world; returns what it promises, and a hash of its story."""
    why, world = violation_of(scenario(seed))
    jobs = {job: _end(world, job) for job in sorted(world.specs)}
    return {"seed": seed, "why": why, "jobs": jobs, "story": world.clock.fingerprint()}


def _end(world: World, job: str) -> dict[str, Any]:
    losses: dict[int, str] = {}
    for record in world.coordinator.folder.records:
        if record.kind == "StepCommitted" and record.payload["job"] == job:
            losses[record.payload["step"]] = repr(record.payload["loss"])
    known = world.coordinator.shadow.jobs.get(job)
    if known is None:
        return {}
    weights = sorted(peer_tensors.model(known.last_checkpoint.tensors).items())
    return {
        "outcome": known.outcome,
        "steps": known.steps,
        "stored": known.last_checkpoint.step,
        "loss": repr(known.loss),
        "eval_loss": repr(known.eval_loss),
        "losses": digest(sorted(losses.items())),
        "weights": digest(weights),
    }


def _lines_of(against: str, seeds: str) -> list[str]:
    """Return the lines of a file, or those that a commit's tree gives."""
    if Path(against).is_file():
        return Path(against).read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", against], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=packed, check=True)
        (Path(folder) / "tests/sim/same.py").write_text(Path(__file__).read_text())
        command = [sys.executable, "-m", "tests.sim.same", "--seeds", seeds]
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


def main() -> int:
    """Print one line a seed, or what differs from another tree; 1 where something does."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.same", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="a range of runs")
    parser.add_argument("--against", default="", help="a commit, or a file of lines")
    parser.add_argument("--stories", action="store_true", help="compare everything that happened, too")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # a story may depend on the order in a set of names
        again = [sys.executable, "-m", "tests.sim.same", *sys.argv[1:]]
        return subprocess.run(again, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False).returncode
    first, _, stop = arguments.seeds.partition(":")
    lines = _lines_of(arguments.against, arguments.seeds) if arguments.against else []
    theirs, different = {found["seed"]: found for found in map(json.loads, lines)}, 0
    for seed in range(int(first), int(stop)):
        ours = ends(seed)
        if not theirs:
            print(json.dumps(ours), flush=True)
            continue
        left_out = () if arguments.stories else ("story",)
        odd = [key for key in ours if key not in left_out and ours[key] != theirs[seed][key]]
        different += bool(odd)
        for key in odd:
            print(f"seed {seed}, {key}: {theirs[seed][key]!r}, now {ours[key]!r}")
    if theirs:
        print(f"{int(stop) - int(first)} worlds, {different} of them end otherwise", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
