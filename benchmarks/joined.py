"""How soon a worker that joins while a job trains takes part, and how soon one that leaves is gone.

A GPT cut in three trains on the slowest hosts of a scenario. Then the fastest one joins: it times the job's
ops, is chosen for a place, fetches that stage's checkpoint (``fetched``: its state has arrived), repeats
the steps since beside training, and takes the place at a step's border. Steps are counted from the arrival
of its state on: those that are committed before the first one that it computes. Later the worker of the
last stage is asked to leave (SIGTERM), and the one whose place was taken takes over. No step is repeated,
and the losses are those of a job on the same hosts that nobody disturbs, bit for bit.

  python -m benchmarks.joined --seed 0 --json
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from benchmarks.harness import (
    CommandFailed,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    settings_options,
)
from benchmarks.recovery import SETTINGS, STAGES, Fleet, cut_of
from protos.telemetry import Event

LOG = ("--log-json",)
LAST = STAGES - 1
INSTEAD_OF = "instead of"  # in why a worker stands by, where that is to take a place


class Growing(Fleet):
    """A fleet of the slowest hosts of a scenario, which the fastest one may join."""

    def __init__(self, scenario: str) -> None:
        super().__init__(scenario, LOG)
        *first, self.late = sorted(
            self.scenario.join_order, key=lambda host: self.scenario.host(host).cpu or 1.0
        )
        self.scenario = replace(self.scenario, join_order=tuple(first[:STAGES]))

    def join(self) -> None:
        """Have the fastest host join."""
        ((host, process),) = self._prestarted([self.late]).items()
        self.scenario = replace(self.scenario, join_order=(*self.scenario.join_order, host))
        self._join(host, process)

    def leave(self, host: str) -> float:
        """Ask a worker to leave; return the seconds until it is gone."""
        process = self._daemons[1 + self.scenario.join_order.index(host)]
        asked_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
        return time.monotonic() - asked_s


def run(fleet: Growing, job: str, options: Sequence[str], leave_at: int) -> dict[str, Any]:
    """Train; have a worker join after a few steps, and one leave once ``leave_at`` steps are done."""
    name = fleet.atoll("submit", job, *options, "--detach", "--json")["job"]
    before, holders, gone_s, last = list[str](), list[str](), 0.0, dict[str, Any]()
    with fleet._command("watch", name, "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = json.loads(line)
            holders = [stage["workers"][0] for stage in (last.get("plan") or {}).get("stages", ())] or holders
            if not before and holders and last["step"] >= STAGES:
                before = holders
                fleet.join()
            if before and not gone_s and last["step"] >= leave_at and holders != before:
                names = {worker["worker"]: worker["name"] for worker in fleet.status()["workers"]}
                gone_s = fleet.leave(names[holders[LAST]])
    if last.get("state") != "finished" or not gone_s:
        words = "nobody took a place" if last.get("state") == "finished" else last.get("reason")
        raise CommandFailed(f"{name} ended {last.get('state')}: {words} {fleet.log('coordinator')}")
    rows = [row for row in fleet.rows(name) if row["name"] == "loss"]
    steps = [int(row["step"]) for row in rows]
    return {
        "losses": [float(row["value"]) for row in rows],
        "repeated": len(steps) - len(set(steps)),
        "gone_s": gone_s,
        **taken(fleet, [float(row["time_s"]) for row in rows]),
    }


def taken(fleet: Growing, committed_s: Sequence[float]) -> dict[str, float]:
    """Return the seconds of a newcomer's parts, and the steps from its state's arrival to its first one."""
    mine = {w["name"]: w["worker"] for w in fleet.status()["workers"]}[fleet.late]
    said: list[tuple[str, float, Mapping[str, Any]]] = [
        (line["event"], line["time_s"], json.loads(line.get("fields_json") or "{}"))
        for line in fleet._lines("logs", "--json")
    ]

    def at_s(event: Event, *, worker: str = "", words: str = "") -> float:
        """When the coordinator first logged an event, of a worker and with such a reason where given."""
        return min(
            at_s
            for name, at_s, fields in said
            if name == event.value
            and worker in fields.get("worker", "")
            and words in fields.get("reason", "")
        )

    joined_s = at_s(Event.WORKER_STATE, worker=mine)
    chosen_s = at_s(Event.STANDBY_CHOSEN, worker=mine, words=INSTEAD_OF)
    moved_s = at_s(Event.RECONFIGURED, words=INSTEAD_OF)
    events = list(fleet.events(fleet.late))
    loaded = next(entry for entry in events if entry["event"] == "stage.loaded")
    loaded_s = datetime.fromisoformat(loaded["timestamp"]).timestamp()
    # What it repeats it repeats after its state has arrived.
    repeated = next((entry for entry in events if entry["event"] == "stage.replayed"), {"took_s": 0.0})
    arrived_s = loaded_s - float(repeated["took_s"])
    lasted_s = [later - sooner for sooner, later in pairwise(committed_s)]
    return {
        "decided_s": chosen_s - joined_s,
        "fetched_s": arrived_s - chosen_s,
        "taken_s": moved_s - arrived_s,
        "steps_after_fetch": sum(arrived_s < done_s <= moved_s for done_s in committed_s),
        "step_s": statistics.median(lasted_s),
    }


def main() -> int:
    """Command line."""
    made = parser(__doc__, scenario="late_home", job="examples/gpt.py")
    made.add_argument("--steps", type=int, default=80)
    made.add_argument("--leave-after", type=int, default=60, help="steps, once a place was taken")
    made.add_argument("--times", type=int, default=3)
    options = made.parse_args()
    need_lab(options.json)
    more = (f"steps={options.steps}", "checkpoint_every=8", f"seed={options.seed}")
    settings = [*fitting(SETTINGS, options.job), *more]
    how = ["--partitioner", cut_of(options.job, settings), *settings_options(settings)]
    scenario = (options.scenario or ["late_home"])[0]
    rows = []
    for _ in range(options.times):
        with Growing(scenario) as fleet:
            rows.append(run(fleet, options.job, how, options.leave_after))
        shown = {key: value for key, value in rows[-1].items() if key != "losses"}
        print("  ".join(f"{key} {value:.2f}" for key, value in shown.items()), flush=True)
    with Growing(scenario) as fleet:
        undisturbed = fleet.train(options.job, how[1], settings)["loss"]
    figures: dict[str, Any] = {
        "machine": machine(),
        "rows": rows,
        "repeated": sum(r["repeated"] for r in rows),
    }
    for key in ("decided_s", "fetched_s", "taken_s", "steps_after_fetch", "step_s", "gone_s"):
        figures[key] = statistics.median(row[key] for row in rows)
    wrong = [f"run {at}" for at, row in enumerate(rows) if row["losses"] != undisturbed or row["repeated"]]
    return conclude(figures, options.json, ", ".join(wrong))


if __name__ == "__main__":
    execute(main)
