"""How much is done again when a worker of a plan that uses all of them is lost.

Three workers on loopback train the demo's model, cut evenly, with checkpoints at their default. At a random
moment after the first minute of training one of them is killed (kill -9); the other two go on with a plan of
two stages. Counted, from the job's metrics: the steps that are done again, and the seconds that they had
taken.

  python -m benchmarks.ring --seeds 5 --json

With a scenario of the lab the same behind its lines, a fleet for each loss: killed is somebody at a random
moment of the time between two snapshots, or checkpoints where links have no time for those, once the first is
whole. Compared with what `atoll plan` says of a
loss: the seconds that are done again, and what a loss would have cost at every moment until then.

  python -m benchmarks.ring --scenario three_thin --seeds 1 --json
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import recovery
from benchmarks.harness import (
    CommandFailed,
    conclude,
    execute,
    machine,
    need_lab,
    parser,
    settings_options,
)
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare

WORKERS = 3
MINUTE_S = 60.0
FIRST_S = 10.0  # of training, before the first snapshot
WITHIN_S = 25.0  # after it: longer than there is between two snapshots
MOST_AGAIN_S = 30.0
SETTINGS = ("steps=100000", "eval_batches=0")
OFF_BY = 1.0 / 3.0  # the most that a plan's words about a loss may be
LOSS_NOTE = re.compile(
    r"costs about (?P<usual_s>\d+) s of training, at most (?P<most_s>\d+) s "
    r"\(a (?:snapshot|checkpoint) every (?P<every_s>\d+) s, whole after (?P<took_s>\d+) s"
)
BACK_TO = re.compile(r"from step (\d+)")


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
        if killed_s and "continues from step" in update.reason:
            reason = update.reason
        if killed_s and update.state == "training" and update.step > at_step + 2:
            break
    fleet.client.cancel(name)
    found = done_again(fleet.rows(name))
    return {"seed": seed, "after_s": round(after_s, 1), "victim": victim, "reason": reason, **found}


def predicted_loss(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that a plan's notes name. CommandFailed where they say nothing of a loss."""
    notes = plan["prediction"]["notes"]
    found = next(filter(None, map(LOSS_NOTE.search, notes)), None)
    if found is None:
        raise CommandFailed(f"the plan does not say what a loss costs: {notes}")
    return {name: float(seconds) for name, seconds in found.groupdict().items()}


class Watched:
    """What a job's updates have shown: by committed step when, and at each how far a loss would go back."""

    def __init__(self) -> None:
        self.at_s: dict[int, float] = {}
        self.back: dict[int, int] = {}  # by step, from the first whole snapshot on
        self.under_way: list[tuple[float, float]] = []  # from when until when a snapshot was

    def take(self, update: Mapping[str, Any]) -> None:
        """Note an update of a job that trains."""
        step, now_s = update["step"], update["time_s"]
        self.at_s.setdefault(step, now_s)
        found = BACK_TO.search(update.get("loss_now", ""))
        back = int(found[1]) if found else 0
        if not back or back not in self.at_s:
            return
        if back not in self.back.values() and back != update.get("checkpoint_step"):
            self.under_way.append((self.at_s[back], now_s))
        self.back.setdefault(step, back)

    def figures(self) -> dict[str, Any]:
        """Return what a loss would have cost on average, and what steps took with a snapshot under way."""
        costs = [self.at_s[step] - self.at_s[back] for step, back in self.back.items()]
        beside, alone = list[float](), list[float]()
        for step, until_s in self.at_s.items():
            since_s = self.at_s.get(step - 1)
            if since_s is None:
                continue
            now = any(begun_s <= since_s and until_s <= end_s for begun_s, end_s in self.under_way)
            (beside if now else alone).append(until_s - since_s)
        return {
            "mean_s": statistics.fmean(costs),
            "took_s": [round(end_s - begun_s, 1) for begun_s, end_s in self.under_way],
            "apart_s": [round(b - a, 1) for (a, _), (b, _) in pairwise(self.under_way)],
            "step_s": statistics.median(alone),
            "beside_step_s": statistics.median(beside) if beside else 0.0,
        }


def lose_behind(scenario: str, job: str, seed: int) -> dict[str, Any]:
    """Have a fleet of the lab train until a random moment, kill a worker, and go on until the next step."""
    random_ = random.Random(seed)
    settings = [*SETTINGS, f"seed={seed}"]
    with recovery.Fleet(scenario, ("--log-json",)) as fleet:
        victim = random_.choice(fleet.scenario.join_order)
        said = predicted_loss(fleet.plan(job, "even", settings))
        after_s = max(MINUTE_S, said["took_s"] + FIRST_S) + said["every_s"] * (1.0 + random_.random())
        print(f"{scenario}: plan says {said}; {victim} is killed after {after_s:.0f} s", flush=True)
        options = ["--partitioner", "even", *settings_options(settings), "--detach", "--json"]
        name = fleet.atoll("submit", job, *options)["job"]
        seen, reason, at_step = Watched(), "", 0
        with fleet._command("watch", name, "--json") as process:
            assert process.stdout is not None
            for line in process.stdout:
                update = json.loads(line)
                if update["state"] in ("failed", "finished"):
                    raise CommandFailed(f"{name} ended: {update['reason']} {fleet.log('coordinator')}")
                if at_step:
                    if update["plan_version"] > 1:
                        reason = reason or update["reason"]
                        if any(point["name"] == "loss" for point in update.get("metrics", ())):
                            break
                elif update["state"] == "training" and update["step"]:
                    seen.take(update)
                    if update["time_s"] > min(seen.at_s.values()) + after_s:
                        fleet.kill(victim)
                        at_step, loss_now = update["step"], update["loss_now"]
            fleet._output("cancel", name)
        found = done_again([row for row in fleet.rows(name) if row["name"] == "loss"])
    row = {"seed": seed, "victim": victim, "at_step": at_step, "loss_now": loss_now, **found}
    row |= {"plan": said, **seen.figures(), "after_s": after_s}
    row["over_plan"] = row["mean_s"] / said["usual_s"]
    print(json.dumps(row), flush=True)
    return row


def behind(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of losses behind a scenario's lines."""
    ratios = [row["over_plan"] for row in rows]
    return {
        "rows": rows,
        "least_over_plan": min(ratios),
        "most_over_plan": max(ratios),
        "again_over_most": max(row["seconds"] / row["plan"]["most_s"] for row in rows),
        "slowed": statistics.median(1.0 - row["step_s"] / row["beside_step_s"] for row in rows),
        "machine": machine(),
    }


def main() -> int:
    """Command line."""
    made = parser(__doc__, scenario="none: workers on loopback", job="examples/gpt.py")
    made.add_argument("--seeds", type=int, default=5, help="losses")
    options = made.parse_args()
    seeds = range(options.seed, options.seed + options.seeds)
    if options.scenario:
        need_lab(options.json)
        rows = [lose_behind(name, options.job, seed) for name in options.scenario for seed in seeds]
        figures = behind(rows)
        least, most, beyond = (figures[n] for n in ("least_over_plan", "most_over_plan", "again_over_most"))
        off = least < 1.0 - OFF_BY or max(most, beyond) > 1.0 + OFF_BY
        return conclude(figures, options.json, "a loss costs otherwise than the plan says" if off else "")
    rows = on_loopback(options.job, seeds)
    most_s = max(row["seconds"] for row in rows)
    median_s = statistics.median(row["seconds"] for row in rows)
    late = f"{most_s:.1f} s were done again, at most {MOST_AGAIN_S:.0f} are to be"
    print(f"done again: at most {most_s:.1f} s, median {median_s:.1f} s")
    figures = {"rows": rows, "most_again_s": most_s, "median_again_s": median_s, "machine": machine()}
    return conclude(figures, options.json, late if most_s > MOST_AGAIN_S else "")


def on_loopback(job: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Lose a worker for each seed; who was lost comes again under another name."""
    rows = []
    fleet = Fleet(WORKERS)
    with fleet:
        for at, seed in enumerate(seeds):
            if at:
                fleet.add(f"again{at}")
            rows.append(lose(fleet, job, seed))
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    execute(main)
