"""How soon the coordinator notices a worker that is gone, at its defaults: medians from its own log.

A job trains in three stages with three backups on this machine. A worker that holds a stage is killed
(kill -9), frozen (SIGSTOP of all its processes), or its computation hangs (SIGSTOP of the compute process
alone), in turn, in one stage after the other. Time: from the signal to the line of the log by which the
worker is dead or quarantined.

  python -m benchmarks.noticed --times 5 --json
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import CommandFailed, conclude, execute, machine, parser
from coordinator.cli.chaos.fleet import Fleet, own
from coordinator.cli.chaos.kinds import LASTS_S, Kind, Wish
from coordinator.cli.chaos.promises import NOTICED_S, NOTICED_STEPS, noticed_s
from coordinator.cli.chaos.run import LOOK_EVERY_S, Chaos, LogOf, Watching, cut_in
from coordinator.cli.local_fleet import LocalFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare

STAGES, BACKUPS = 3, 3
SETTINGS = ("steps=100000", "eval_batches=0", "checkpoint_every=200")


def measured(job: str, times: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds by kind, and the median step."""
    prepared = cut_in(prepare(load_job(Path(job), list(SETTINGS))), STAGES)
    with LocalFleet(STAGES + BACKUPS, ["--threads", "1"], in_order=False) as local:
        fleet = own(local)
        chaos, log = Chaos(fleet, prepared, tell=lambda words: print(words, flush=True)), LogOf(fleet)
        watching = chaos.submitted()
        for at in range(times):
            for kind in NOTICED_S:
                chaos.disturb(_wish(chaos, watching, kind, at % STAGES), watching)
        chaos.await_whole(watching)
        lines = log.lines
        log.close()
        step_s = watching.step_s
        fleet.client.cancel(watching.job)
    found: dict[str, list[float]] = {kind: [] for kind in NOTICED_S}
    for deed in chaos.deeds:
        took_s = noticed_s(deed, lines)
        if took_s is None:
            raise CommandFailed(f"nobody noticed: {deed} at {deed.at_s:.1f}")
        found[deed.kind].append(took_s)
    return found, step_s


def _wish(chaos: Chaos, watching: Watching, kind: Kind, stage: int) -> Wish:
    """Who holds a stage of a job that trains."""
    chaos.await_whole(watching)
    while watching.state != "training" or not watching.holders:
        if watching.ended.wait(LOOK_EVERY_S):
            raise CommandFailed(f"{watching.job} ended {watching.state}: {watching.reason}")
    return Wish(kind, _name_of(chaos.fleet, watching.holders[stage]), 0.0, LASTS_S[kind][1])


def _name_of(fleet: Fleet, worker: str) -> str:
    return next(w.name for w in fleet.client.status().workers if w.worker == worker)


def main() -> int:
    """Command line."""
    made = parser(__doc__, job="coordinator/cli/demo/job.py")
    made.add_argument("--times", type=int, default=5, help="each kind")
    options = made.parse_args()
    found, step_s = measured(options.job, options.times)
    medians: dict[str, Any] = {f"{kind}_s": statistics.median(took_s) for kind, took_s in found.items()}
    bounds = {kind: float(most_s) for kind, most_s in NOTICED_S.items()}
    bounds[Kind.HANG] = max(bounds[Kind.HANG], NOTICED_STEPS * step_s)
    for kind, took_s in found.items():
        shown = ", ".join(f"{s:.2f}" for s in sorted(took_s))
        print(
            f"{kind}: median {statistics.median(took_s):.2f} s ({shown}); promised {bounds[Kind(kind)]:.1f} s"
        )
    figures = {"machine": machine(), "step_s": step_s, **medians, "seconds": found}
    return conclude(figures, options.json)


if __name__ == "__main__":
    execute(main)
