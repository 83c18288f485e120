"""How long a job stands still when a worker is lost: hot standbys and send logs against going back.

A GPT cut in three trains on the best workers of a scenario, the others are backups. Some steps after a
checkpoint the worker of one stage is killed (kill -9). Either its hot standby takes the stage over, or a
backup does from the send logs, or, with `--send-log-bytes 0` at each worker, the job goes back to its
checkpoint. Downtime: from the last commit before the loss to the commit of the step that was in flight, or of
the one after it where that is later, less a median step each, and beside it what the plan predicted of that
stage's loss. The runs without a loss show what standbys cost a step: one fleet trains the job without and
with them in turn, and steps count from where all of them are there; of these also the bytes a step that they
were sent, against what the plan says that their stages receive. Each fleet trains another job for some steps
first, so that its links are measured when the one that counts is planned. All runs have the losses of the
first one, bit for bit, as far as both came.

  python -m benchmarks.recovery --seed 0 --json
  python -m benchmarks.recovery --scenario homes --stage 1 --stage 2 --json
  python -m benchmarks.recovery --rounds 0 --arm standby --json    # losses alone, of one way
  python -m benchmarks.recovery --log --json    # the log alone: MB/s to this disk, CPU time a GB
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    settings_options,
)
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare
from coordinator.planning.baselines import GIVEN_CUT
from worker.hosting.neighbours.send_log import SendLog
from worker.transport.frames import Direction, MessageKey

STAGES = 3
SETTINGS = ("LENGTH=64", "N_MICRO=4", "eval_batches=0")
ARMS: dict[str, tuple[tuple[str, ...], str]] = {
    "log": (("--log-json",), "0"),
    "checkpoint": (("--log-json", "--send-log-bytes", "0"), "0"),
    "standby": (("--log-json",), str(STAGES)),
}
"""Options of every worker, and how many standbys the job may have."""
IN_TURN = ("log", "standby")  # whose steps are compared: the same workers
SKIPPED = 3  # first steps, which load caches and open connections
WARMING = 12  # steps of the job before
BEYOND = 8  # steps on either side of a loss: with the standbys before it, and after it
STANDING_S = 600.0  # until a standby is there


class Fleet(LabFleet):
    """Workers with the options of an arm and memory for any stage, whatever the scenario says of it."""

    def __init__(self, scenario: str, options: Sequence[str]) -> None:
        super().__init__(scenario)
        self._options = options

    def _worker(self, host: str) -> list[str]:
        command = super()._worker(host)
        if "--stage-memory" in command:
            at = command.index("--stage-memory")
            del command[at : at + 2]
        return [*command, *self._options]

    def events(self, host: str) -> Iterable[dict[str, Any]]:
        """What a worker has logged; a killed one may have left a half-written line."""
        for line in (self.folder / f"{host}.log").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if line.startswith("{"):
                    yield json.loads(line)

    def stood_by(self, job: str) -> list[dict[str, Any]]:
        """What the workers say that they have done as the job's standbys, once they have left it."""
        self._wait(
            lambda: all(w["state"] != "assigned" for w in self.status()["workers"]), "the pool", "coordinator"
        )
        every = (found for host in self.scenario.join_order for found in self.events(host))
        return [e for e in every if e.get("event") == "stage.stood_by" and e.get("job") == job]

    def warm(self, job: str, options: Sequence[str]) -> None:
        """Train the job for some steps, and end it."""
        name = self.atoll("submit", job, *options, "--detach", "--json")["job"]
        self._watched(name, WARMING)
        self._wait_for_pool()

    def kill(self, host: str) -> None:
        """End all processes of a worker at once."""
        self.lab.kill(self._daemons[1 + self.scenario.join_order.index(host)])


class Placed(Fleet):
    """A fleet whose best machines join first: a given cut puts its stages on those, as an owner would."""

    def __init__(self, scenario: str, options: Sequence[str]) -> None:
        super().__init__(scenario, options)

        def worth(name: str) -> tuple[float, float]:
            host = self.scenario.host(name)
            return host.cpu or math.inf, host.uplink.up_mbit or math.inf

        order = sorted(self.scenario.join_order, key=worth, reverse=True)
        self.scenario = replace(self.scenario, join_order=tuple(order))


def cut_of(job: str, settings: Sequence[str]) -> str:
    """The partitioner that cuts the job's ops in even thirds."""
    positions = prepare(load_job(Path(job), list(settings))).graphs.dag.cuttable()
    starts = (positions[len(positions) * at // STAGES] for at in range(1, STAGES))
    return GIVEN_CUT + ",".join(map(str, starts))


class Seen:
    """What a job's updates have shown so far."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self.holders: list[str] = []  # worker of each stage
        self.received: dict[int, int] = {}  # bytes a step that a stage receives, as planned
        self.predicted: dict[int, float] = {}  # seconds that a stage's loss would cost, as last said
        self.standing = set[int]()  # stages that have had a standby
        self.ready = set[int]()  # those that have, now
        self.settled = 0  # the step at which the last of them came to have it

    def take(self, update: dict[str, Any], *, lost: bool) -> None:
        """Note an update; after a loss the plan and what it predicts are no longer those of before."""
        self.last = update
        stages = update.get("stages", ())
        self.ready = {int(s.get("stage", 0)) for s in stages if stands(s.get("standby_why", ""))}
        if self.ready - self.standing:
            self.settled = update["step"]
        self.standing |= self.ready
        if lost:
            return
        if update.get("plan"):
            self.holders = [stage["workers"][0] for stage in update["plan"]["stages"]]
            self.received = planned_bytes(update["plan"], self.holders)
        self.predicted |= {int(s.get("stage", 0)): s["replace_s"] for s in stages if s.get("replace_s")}


def run(
    fleet: Fleet,
    job: str,
    options: Sequence[str],
    steps: int,
    kill: tuple[int, int] | None,
    *,
    standby: bool = False,
) -> dict[str, Any]:
    """Train for ``steps`` from where the standbys stand; or kill the worker of stage ``kill[0]`` when
    ``kill[1]`` steps are committed, and it has its ``standby`` where it is to have one."""
    fleet._wait_for_pool()
    name = fleet.atoll("submit", job, *options, "--detach", "--json")["job"]
    names = {w["worker"]: w["name"] for w in fleet.status()["workers"]}
    began_s, killed_s, at_step, cancelled = time.monotonic(), 0.0, 0, False
    seen = Seen()
    with fleet._command("watch", name, "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            seen.take(json.loads(line), lost=killed_s > 0.0)
            step = seen.last["step"]
            stood = not standby or (kill[0] in seen.ready if kill else len(seen.standing) == STAGES)
            late = not stood and time.monotonic() > began_s + STANDING_S
            if kill is not None and not killed_s and stood and step >= max(kill[1], seen.settled + BEYOND):
                fleet.kill(names[seen.holders[kill[0]]])
                killed_s, at_step = time.time(), step
            if killed_s:
                enough = step >= at_step + BEYOND
            else:
                enough = kill is None and stood and step >= seen.settled + steps
            if not cancelled and (late or enough):
                cancelled = True
                fleet._output("cancel", name)
    if not cancelled:
        raise CommandFailed(
            f"{name} ended {seen.last.get('state')}: {seen.last.get('reason')} {fleet.log('coordinator')}"
        )
    if kill is not None and not killed_s:
        said = [stage.get("standby_why", "") for stage in seen.last.get("stages", ())]
        raise CommandFailed(f"{name}: no standby of stage {kill[0]} stood in {STANDING_S:.0f} s: {said}")
    rows = [r for r in fleet.rows(name) if r["name"] == "loss"]
    points = [(int(r["step"]), float(r["value"]), float(r["time_s"])) for r in rows]
    losses = [value for _, value in sorted({step: value for step, value, _ in points}.items())]
    figures = {"plan_version": seen.last["plan_version"], "losses": losses, "at_step": at_step}
    if standby:
        figures["standbys"] = len(seen.standing)
        figures["standby_bytes_over_plan"] = sent_over_planned(fleet.stood_by(name), seen.received)
    figures |= times(points, killed_s, max(SKIPPED, seen.settled if not at_step else 0))
    if kill is not None:
        figures["predicted_s"] = seen.predicted[kill[0]]
        figures["over_predicted"] = figures["downtime_s"] / figures["predicted_s"]
    return figures


def stands(standby: str) -> bool:
    """Whether what is said of a standby is that it repeats steps as they come; it may be some behind, for as
    long as its machine is as slow as the stage, and the plan counts them as part of what a loss costs."""
    return bool(re.match(r"\d+ steps behind", standby))


def planned_bytes(plan: Mapping[str, Any], holders: Sequence[str]) -> dict[int, int]:
    """Return the bytes a step that each stage receives, as the plan has it."""
    found: dict[int, int] = dict.fromkeys(range(len(holders)), 0)
    for link in plan["prediction"]["links"]:
        found[holders.index(link["target"])] += int(link["bytes_per_step"])
    return found


def sent_over_planned(stood_by: Sequence[dict[str, Any]], planned: dict[int, int]) -> float:
    """Return bytes that standbys were sent over those that the plan has for their steps."""
    wanted = sum(int(entry["steps"]) * planned.get(int(entry["stage"]), 0) for entry in stood_by)
    return sum(int(entry["bytes"]) for entry in stood_by) / wanted if wanted else 0.0


def times(
    points: Sequence[tuple[int, float, float]], killed_s: float, first: int = SKIPPED
) -> dict[str, Any]:
    """Median step from ``first`` on, and how long the step in flight was late, or the next one where the lost
    stage had done its part already; ``points``: (step, loss, time) as they came."""
    before = [(step, at_s) for step, _, at_s in points if not killed_s or at_s < killed_s]
    lasted_s = [b - a for (_, a), (_, b) in zip(before[first:], before[first + 1 :], strict=False)]
    found = {"step_s": statistics.median(lasted_s)}
    if killed_s:
        in_flight, last_s = before[-1][0] + 1, before[-1][1]
        found["downtime_s"] = max(
            next(at_s for step, _, at_s in points if step >= in_flight + more and at_s > last_s)
            - last_s
            - (1 + more) * found["step_s"]
            for more in (0, 1)
        )
        found["repeated_steps"] = sum(step < in_flight and at_s > last_s for step, _, at_s in points)
    return found


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ratios of the arms: a step's with standbys, and the longest downtimes, over those without."""

    def of(arm: str, name: str) -> list[float]:
        return [row[name] for row in rows if row["arm"] == arm and name in row]

    found: dict[str, float] = {}
    for arm in ("log", "standby"):
        if of(arm, "downtime_s"):
            found[f"{arm}_over_predicted"] = max(of(arm, "over_predicted"))
        if of(arm, "downtime_s") and of("checkpoint", "downtime_s"):
            found[f"{arm}_over_going_back"] = max(of(arm, "downtime_s")) / max(of("checkpoint", "downtime_s"))
    without, beside = (
        [row["step_s"] for row in rows if row["arm"] == arm and row["stage"] is None] for arm in IN_TURN
    )
    if without:
        found["standby_step_over_log"] = statistics.median(beside) / statistics.median(without)
    if of("standby", "standby_bytes_over_plan"):
        bytes_over_plan = of("standby", "standby_bytes_over_plan")
        found["standby_bytes_off_plan"] = max(abs(ratio - 1.0) for ratio in bytes_over_plan)
    for name, value in found.items():
        print(f"{name}: {value:.2f}", flush=True)
    return found


def log_rate(seed: int, message_bytes: int = 8 << 20, messages: int = 96) -> dict[str, float]:
    """Append messages of a large boundary as fast as they are written, and read them again."""
    payload = memoryview(np.random.default_rng(seed).bytes(message_bytes))
    with tempfile.TemporaryDirectory(prefix="atoll-send-log-") as folder:
        log = SendLog(Path(folder) / "log", "job", 64 << 30, 0)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for at in range(messages):
            key = MessageKey("job", 1, at // 8, at % 8, 0, Direction.FORWARD)
            log.append(1, key, b"", payload, wait=True)
        read = sum(len(r.payload) for step in range(messages // 8) for r in log.records(step, 1))
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        right = read == messages * message_bytes and log.logged_from == 0
        log.close()
    gigabytes = messages * message_bytes / 1e9
    return {
        "right": right,
        "written_and_read_mb_per_s": 1e3 * gigabytes / took_s,
        "cpu_s_per_gb": cpu_s / gigabytes,
    }


def main() -> int:
    """Command line."""
    made = parser(__doc__, scenario="homes", job="examples/gpt.py")
    made.add_argument(
        "--rounds", type=int, default=3, help="of runs without a loss, without standbys and with"
    )
    made.add_argument("--steps", type=int, default=30, help="of a run without a loss that are counted")
    made.add_argument("--checkpoint-every", type=int, default=60, help="steps")
    made.add_argument(
        "--kill-after", type=int, default=90, help="steps; a checkpoint is to be stored by then"
    )
    made.add_argument("--stage", type=int, action="append", help="that is lost; may be repeated (default 1)")
    made.add_argument(
        "--arm", action="append", choices=list(ARMS), help="of losses; may be repeated (default all)"
    )
    made.add_argument("--log", action="store_true", help="measure the send log alone")
    options = made.parse_args()
    if options.log:
        figures = log_rate(options.seed)
        print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
        return conclude(figures, options.json, "" if figures["right"] else "the log lost messages")
    need_lab(options.json)
    # Each run is cancelled when it has shown what it is for.
    more = ("steps=10000", f"checkpoint_every={options.checkpoint_every}", f"seed={options.seed}")
    settings = [*fitting(SETTINGS, options.job), *more]
    how = ["--partitioner", cut_of(options.job, settings), *settings_options(settings)]
    rows: list[dict[str, Any]] = []

    def measure(fleet: Placed, scenario: str, arm: str, kill: tuple[int, int] | None) -> None:
        standbys = ARMS[arm][1]
        row = {"scenario": scenario, "arm": arm, "stage": None if kill is None else kill[0]}
        given = [*how, "--standbys", standbys]
        rows.append(row | run(fleet, options.job, given, options.steps, kill, standby=standbys != "0"))
        shown = {key: value for key, value in rows[-1].items() if key != "losses"}
        words = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(*words, sep="  ", flush=True)

    for scenario in options.scenario or ["homes"]:
        if options.rounds:
            with Placed(scenario, ARMS["log"][0]) as fleet:
                fleet.warm(options.job, [*how, "--standbys", "0"])
                for arm in IN_TURN * options.rounds:
                    measure(fleet, scenario, arm, None)
        for stage in options.stage or [1]:
            for arm in options.arm or ARMS:
                with Placed(scenario, ARMS[arm][0]) as fleet:
                    fleet.warm(options.job, [*how, "--standbys", "0"])
                    measure(fleet, scenario, arm, (stage, options.kill_after))
    found = {"machine": machine(), "rows": rows, **compared(rows)}
    wrong = [
        f"{row['arm']}, stage {row['stage']}"
        for row in rows
        if any(a != b for a, b in zip(row["losses"], rows[0]["losses"], strict=False))
    ]
    return conclude(found, options.json, ", ".join(wrong))


if __name__ == "__main__":
    execute(main)
