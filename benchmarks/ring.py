"""How much is done again when a worker of a plan that uses all of them is lost.

Three workers on loopback train the demo's model, cut evenly, with checkpoints at their default. At a random
moment after the first minute of training one of them is killed (kill -9); the other two go on with a plan of
two stages. Counted, from the job's metrics: the steps that are done again, and the seconds that they had
taken.

  python -m benchmarks.ring --seeds 5 --json
"""

from __future__ import annotations

import csv
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CommandFailed, conclude, execute, machine, parser
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare

WORKERS = 3
MINUTE_S = 60.0
WITHIN_S = 25.0  # after it: longer than there is between two snapshots
MOST_AGAIN_S = 30.0
SETTINGS = ("steps=100000", "eval_batches=0")


class Fleet(LoopbackFleet):
    """Workers that come again under another name when they were killed."""

    def kill(self, at: int) -> None:
        """Kill the daemon of a worker, by its number in join order; its compute process ends with it."""
        process = self._processes[1 + at]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        del self._processes[1 + at]

    def add(self, name: str) -> None:
        """Have another worker join, and wait until all are idle."""
        self._spawn(name, *self.join_command(name))
        self._wait_for(WORKERS)

    def rows(self, job: str) -> list[dict[str, str]]:
        """The job's losses as they were written."""
        path = self.state / "runs" / job / "metrics.csv"
        with path.open() as file:
            return [row for row in csv.DictReader(file) if row["name"] == "loss"]


def done_again(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return the steps that were done twice, and the seconds of training that they had taken at first."""
    at_s: dict[int, float] = {}
    for row in rows:
        step, time_s = int(row["step"]), float(row["time_s"])
        if step in at_s:
            newest = max(at_s)
            begun_s = at_s.get(step - 1, min(at_s.values()))
            return {
                "steps": newest - step + 1,
                "seconds": at_s[newest] - begun_s,
                "stood_s": time_s - at_s[newest],
            }
        at_s[step] = time_s
    return {"steps": 0, "seconds": 0.0, "stood_s": 0.0}


def lose(fleet: Fleet, job: str, seed: int) -> dict[str, Any]:
    """Train until a random moment after the first minute, kill a worker, and go on until that is made up."""
    random_ = random.Random(seed)
    victim, after_s = random_.randrange(WORKERS), MINUTE_S + WITHIN_S * random_.random()
    prepared = prepare(load_job(Path(job), [*SETTINGS, f"seed={seed}"]), partitioner="even")
    name = fleet.client.submit(prepared).job
    begun_s = killed_s = 0.0
    at_step, reason = 0, ""
    for update in fleet.client.watch(name):
        now_s = time.monotonic()
        if update.step and not begun_s:
            begun_s = now_s
        if update.state in ("failed", "finished"):
            raise CommandFailed(f"{name} ended {update.state}: {update.reason} {fleet.log('coordinator')}")
        if begun_s and not killed_s and now_s > begun_s + after_s:
            fleet.kill(victim)
            killed_s, at_step = now_s, update.step
        if killed_s and "goes on from step" in update.reason:
            reason = update.reason
        if killed_s and update.state == "training" and update.step > at_step + 2:
            break
    fleet.client.cancel(name)
    found = done_again(fleet.rows(name))
    return {"seed": seed, "after_s": round(after_s, 1), "victim": victim, "reason": reason, **found}


def main() -> int:
    """Command line."""
    made = parser(__doc__, job="examples/gpt.py")
    made.add_argument("--seeds", type=int, default=5, help="losses")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    fleet = Fleet(WORKERS)
    with fleet:
        for at in range(options.seeds):
            rows.append(lose(fleet, options.job, options.seed + at))
            print(rows[-1], flush=True)
            if at + 1 < options.seeds:
                fleet.add(f"again{at}")
    most_s = max(row["seconds"] for row in rows)
    median_s = statistics.median(row["seconds"] for row in rows)
    wrong = (
        ""
        if most_s <= MOST_AGAIN_S
        else f"{most_s:.1f} s were done again, at most {MOST_AGAIN_S:.0f} are to be"
    )
    print(f"done again: at most {most_s:.1f} s, median {median_s:.1f} s")
    figures = {"rows": rows, "most_again_s": most_s, "median_again_s": median_s, "machine": machine()}
    return conclude(figures, options.json, wrong)


if __name__ == "__main__":
    execute(main)
