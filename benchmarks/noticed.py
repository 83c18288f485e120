"""How soon the coordinator notices a worker that is gone, at its defaults: medians from its own log.

A job trains in three stages with three backups on this machine. A worker that holds a stage is killed
(kill -9), frozen (SIGSTOP of all its processes), or its computation hangs (SIGSTOP of the compute process
alone), in turn, in one stage after the other. Time: from the signal to the line of the log by which the
worker is dead or quarantined.

With ``--exchange`` three peers train by steps of their own instead, one job after the other, and one of
them is killed or frozen; then it is also shown how long after that line the others have met without it, by
the line of the round whose receipt names it.

  python -m benchmarks.noticed --times 5 --json
  python -m benchmarks.noticed --exchange diloco --exchange saps:4 --exchange swarm --times 3 --json
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CommandFailed, conclude, execute, machine, parser
from coordinator.cli.local_fleet import LocalFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare
from experiments.chaos.fleet import Fleet, own
from experiments.chaos.kinds import LASTS_S, Deed, Kind, Wish
from experiments.chaos.promises import LOOKED_FOR_S, NOTICED_S, NOTICED_STEPS, Line, noticed_s
from experiments.chaos.run import LOOK_EVERY_S, Chaos, LogOf, Watching, cut_in
from protos.telemetry import Event

STAGES, BACKUPS = 3, 3
SETTINGS = ("steps=100000", "eval_batches=0", "checkpoint_every=200")
PEERS = 3
STEPS_ALONE = 4  # of a peer, between two rounds
GO_ON_S = 3.0  # after a peer's loss is noticed


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


def peers_measured(job: str, how: str, times: int) -> dict[str, dict[str, list[float]]]:
    """Return, by kind, the seconds until a peer's loss is noticed (``noticed``) and from there until the
    others have met without it (``go_on``)."""
    settings = [*SETTINGS, f"exchange={how}", f"local_steps={STEPS_ALONE}"]
    prepared = prepare(load_job(Path(job), settings))
    with LocalFleet(PEERS, ["--threads", "1"], in_order=False) as local:
        fleet = own(local)
        chaos, log = Chaos(fleet, prepared, tell=lambda words: print(words, flush=True)), LogOf(fleet)
        deeds: list[Deed] = []
        for at in range(times):
            for kind in (Kind.KILL, Kind.FREEZE):
                chaos.await_whole()  # a job without who was disturbed last has other ranks
                watching = chaos.submitted()
                wish = _wish(chaos, watching, kind, at % PEERS, after=2 * STEPS_ALONE)
                deed = chaos.disturb(wish, watching)
                deeds.append(deed)
                while _met_without_s(deed, log.lines) is None:
                    if watching.ended.wait(LOOK_EVERY_S) or time.time() > deed.at_s + LOOKED_FOR_S:
                        break
                fleet.client.cancel(watching.job)
                watching.ended.wait()
        lines = log.lines
        log.close()
    found: dict[str, dict[str, list[float]]] = {
        kind: {"noticed": [], "go_on": []} for kind in (Kind.KILL, Kind.FREEZE)
    }
    for deed in deeds:
        took_s, met_s = noticed_s(deed, lines), _met_without_s(deed, lines)
        if took_s is None or met_s is None:
            raise CommandFailed(f"nobody noticed, or met without it: {deed} at {deed.at_s:.1f}")
        found[deed.kind]["noticed"].append(took_s)
        found[deed.kind]["go_on"].append(max(met_s - took_s, 0.0))
    return found


def _met_without_s(deed: Deed, lines: Sequence[Line]) -> float | None:
    """Return the seconds from a deed to the first round whose receipt names its worker as missing."""
    for line in lines:
        since_s = line.at_s - deed.at_s
        named = line.event == Event.ROUND_MET.value and deed.worker in str(line.fields.get("missing") or "")
        if named and 0.0 <= since_s <= LOOKED_FOR_S:
            return since_s
    return None


def _wish(chaos: Chaos, watching: Watching, kind: Kind, stage: int, *, after: int = 0) -> Wish:
    """Who holds a stage of a job that trains, and has trained ``after`` steps."""
    chaos.await_whole(watching)
    while watching.state != "training" or not watching.holders or watching.step < after:
        if watching.ended.wait(LOOK_EVERY_S):
            raise CommandFailed(f"{watching.job} ended {watching.state}: {watching.reason}")
    return Wish(kind, _name_of(chaos.fleet, watching.holders[stage]), 0.0, LASTS_S[kind][1])


def _name_of(fleet: Fleet, worker: str) -> str:
    return next(w.name for w in fleet.client.status().workers if w.worker == worker)


def main() -> int:
    """Command line."""
    made = parser(__doc__, job="experiments/demo/job.py")
    made.add_argument("--times", type=int, default=5, help="each kind")
    made.add_argument("--exchange", action="append", default=[], help="peers by this rule; may be repeated")
    options = made.parse_args()
    return _peers(options) if options.exchange else _stages(options)


def _stages(options: Namespace) -> int:
    found, step_s = measured(options.job, options.times)
    medians: dict[str, Any] = {f"{kind}_s": statistics.median(took_s) for kind, took_s in found.items()}
    bounds = {kind: float(most_s) for kind, most_s in NOTICED_S.items()}
    bounds[Kind.HANG] = max(bounds[Kind.HANG], NOTICED_STEPS * step_s)
    for kind, took_s in found.items():
        print(f"{kind}: {_shown(took_s)}; promised {bounds[Kind(kind)]:.1f} s")
    figures = {"machine": machine(), "step_s": step_s, **medians, "seconds": found}
    return conclude(figures, options.json)


def _peers(options: Namespace) -> int:
    found = {how: peers_measured(options.job, how, options.times) for how in options.exchange}
    for how, kinds in found.items():
        for kind, took_s in kinds.items():
            print(f"{how}, {kind}: noticed {_shown(took_s['noticed'])}")
            print(
                f"{how}, {kind}: the others go on after {_shown(took_s['go_on'])}; promised {GO_ON_S:.1f} s"
            )
    most_s = max(statistics.median(kind["go_on"]) for kinds in found.values() for kind in kinds.values())
    return conclude({"machine": machine(), "go_on_s": most_s, "seconds": found}, options.json)


def _shown(took_s: list[float]) -> str:
    every = ", ".join(f"{s:.2f}" for s in sorted(took_s))
    return f"median {statistics.median(took_s):.2f} s ({every})"


if __name__ == "__main__":
    execute(main)
