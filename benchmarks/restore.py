"""How long a lost stage takes to restore: from a backup's copy, a peer's, or storage behind a thin line.

A GPT cut in three trains on the first workers of a scenario, two are backups. Once a checkpoint is stored,
and kept by backups where they lend disk for it, the worker of the middle stage is killed. Restored: from the
newcomer's first look at its assignment until its stage is built, without the steps that it repeats. In the
``peer`` arm two stages are lost at once, and only the first backup keeps copies: the second fetches from it.

The same runs show what a checkpoint costs training: it stands still for the snapshot (the ``save`` span of a
stage), where a synchronous save would stand still until the checkpoint is stored. Every run ends with the
losses of the first one, bit for bit.

  python -m benchmarks.restore --seed 0 --json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
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
from benchmarks.recovery import STAGES, Fleet, cut_of

SETTINGS = ("WIDTH=160", "LAYERS=3", "N_MICRO=4", "eval_batches=0")
MIDDLE = 1
LOG = ("--log-json",)
NONE = ("--copy-bytes", "0")
ARMS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "storage": (0, (MIDDLE,)),
    "copy": (2, (MIDDLE,)),
    "peer": (1, (0, MIDDLE)),
}
"""Backups that lend disk for copies, and the stages that are lost."""
NEEDED = {"copy restores so many times as fast as storage": 5.0, "save stands still so much longer": 20.0}


class Backed(Fleet):
    """The first three workers lend nothing: they hold stages; ``lending`` of the others do."""

    def __init__(self, scenario: str, lending: int) -> None:
        super().__init__(scenario, LOG)
        self._lending = lending

    def _worker(self, host: str) -> list[str]:
        at = self.scenario.join_order.index(host)
        lends = STAGES <= at < STAGES + self._lending
        return super()._worker(host) + ([] if lends else list(NONE))


def ready_to_lose(update: Mapping[str, Any], backed: bool) -> bool:
    """Whether a checkpoint of training is stored, and on a backup's disk where one lends some."""
    kept = [str(stage.get("copy", "")).startswith("on the disk of") for stage in update.get("stages", ())]
    return update.get("checkpoint_step", 0) > 0 and (not backed or (bool(kept) and all(kept)))


def run(fleet: Backed, job: str, cut: str, settings: Sequence[str], lost: Sequence[int]) -> dict[str, Any]:
    """Train, lose these stages, and return what became of it."""
    # A standby would have the stage already, and who checks one has loaded it, too.
    beside = ("--standbys", "0", "--spot-checks", "0")
    options = ["--partitioner", cut, *beside, *settings_options(settings), "--detach", "--json"]
    name = fleet.atoll("submit", job, *options)["job"]
    names = {w["worker"]: w["name"] for w in fleet.status()["workers"]}
    holders: list[str] = []
    struck = False
    last: dict[str, Any] = {}
    with fleet._command("watch", name, "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = json.loads(line)
            if last.get("plan") and not struck:
                holders = [stage["workers"][0] for stage in last["plan"]["stages"]]
            if not struck and ready_to_lose(last, fleet._lending > 0):
                struck = True
                for stage in lost:
                    fleet.kill(names[holders[stage]])
    if last.get("state") != "finished" or not struck:
        raise CommandFailed(
            f"{name} ended {last.get('state')}: {last.get('reason')} {fleet.log('coordinator')}"
        )
    rows = [row for row in fleet.rows(name) if row["name"] == "loss"]
    losses = {int(row["step"]): float(row["value"]) for row in rows}  # of steps done again the last
    return {
        "losses": [losses[step] for step in sorted(losses)],
        "repeated_steps": len(rows) - len(losses),
        "restores": [found for host in fleet.scenario.join_order[STAGES:] for found in restores(fleet, host)],
        **saves(fleet, name, {int(row["step"]): float(row["time_s"]) for row in rows}),
    }


def restores(fleet: Backed, host: str) -> Iterable[dict[str, float]]:
    """Seconds of each stage that a backup took over, and the bytes that it fetched for it."""
    repeated_s = 0.0
    for event in fleet.events(host):
        if event["event"] == "stage.replayed":
            repeated_s = event["took_s"]
        elif event["event"] == "stage.loaded":
            yield {
                "restored_s": event["took_s"] - repeated_s,
                "fetched_s": event["fetched_s"],
                "fetched_mb": event["fetched_bytes"] / 1e6,
            }
            repeated_s = 0.0


def saves(fleet: Backed, job: str, committed_s: Mapping[int, float]) -> dict[str, float]:
    """Medians over the checkpoints: seconds that a stage's snapshot takes, and until it is stored."""
    path = fleet.folder / "trace.json"
    fleet.atoll("trace", job, "--output", str(path), "--json")
    spans = json.loads(path.read_text())
    spans = spans["traceEvents"] if isinstance(spans, dict) else spans
    snapshots = [
        span["dur"] / 1e6 for span in spans if span.get("ph") == "X" and span["name"].startswith("save")
    ]
    stored = []
    for line in fleet._lines("logs", job, "--json"):
        fields = json.loads(line["fields_json"]) if line.get("fields_json") else {}
        if line["event"] == "checkpoint.stored" and fields.get("step") in committed_s:
            stored.append(line["time_s"] - committed_s[fields["step"]])
    return {"snapshot_s": max(snapshots), "stored_s": statistics.median(stored)}


def main() -> int:
    """Command line."""
    made = parser(__doc__, scenario="thin_server", job="examples/gpt.py")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--checkpoint-every", type=int, default=25)
    options = made.parse_args()
    need_lab(options.json)
    more = (f"steps={options.steps}", f"checkpoint_every={options.checkpoint_every}", f"seed={options.seed}")
    settings = [*fitting(SETTINGS, options.job), *more]
    cut = cut_of(options.job, settings)
    figures: dict[str, Any] = {"machine": machine()}
    for scenario in options.scenario or ["thin_server"]:
        for arm, (lending, lost) in ARMS.items():
            with Backed(scenario, lending) as fleet:
                figures[arm] = run(fleet, options.job, cut, settings, lost)
            shown = {key: value for key, value in figures[arm].items() if key != "losses"}
            print(arm, json.dumps(shown), flush=True)
    wrong = [arm for arm in ARMS if figures[arm]["losses"] != figures["storage"]["losses"]]
    (storage,), (copy,) = figures["storage"]["restores"], figures["copy"]["restores"]
    found = (
        storage["restored_s"] / copy["restored_s"],
        figures["storage"]["stored_s"] / figures["storage"]["snapshot_s"],
    )
    for (what, needed), ratio in zip(NEEDED.items(), found, strict=True):
        figures[what] = ratio
        print(f"{what}: {ratio:.1f} (at least {needed:g})", flush=True)
    return conclude(figures, options.json, ", ".join(wrong))


if __name__ == "__main__":
    execute(main)
