"""A demo: a job trained by workers on this machine, shown and checked.

`atoll demo` plays the scene of this module, two workers on loopback; `make demo` one of its own, four
workers across an emulated WAN (examples/demo.py). Every process is started with the command a user would
type, and says in its own words what it does; nothing is judged by how long it takes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict

from coordinator.cli.first.page import has_page
from coordinator.cli.processes import Processes
from coordinator.cli.views.format import in_seconds
from coordinator.cli.views.render import plan_view
from experiments.demo.scene import Outcome, Scene, check
from experiments.demo.shown import Shown
from protos import atoll_job_pb2
from protos.convert import from_proto

COORDINATOR, PAGE, OWNER, EXPORT, PLAIN = "coordinator", "page", "submit", "export", "plain"
# Where each part ends, of the whole.
READY, TRAINED, STORED, EXPORTED = 0.4, 0.8, 0.92, 0.95
BEFORE = frozenset({"queued", "profiling", "planning"})  # states of a job without a plan
ENDINGS = {"evaluating": "evaluating on held-out data", "storing": "storing the trained weights"}


def play(scene: Scene, folder: Path, shown: Shown) -> Outcome:
    """Serve, join, train, export, evaluate, check; DemoFailed says what was not as it should be.

    ``folder`` receives logs, state and weights. No process is left behind.
    """
    shown.say(scene.title)
    with Processes(folder, scene.start) as processes:
        address, token = _serve(processes, scene, shown)
        _join(processes, scene, shown, address, token)
        if scene.page and has_page():
            _show_page(processes, scene, shown)
        job = _train(processes, scene, shown)
        weights = _export(processes, scene, shown, job.name)
        plain = _evaluate(processes, scene, shown, weights)
    outcome = job.outcome(plain)
    check(outcome, scene)
    return outcome


def _serve(processes: Processes, scene: Scene, shown: Shown) -> tuple[str, str]:
    """Start the coordinator; its address and a join token once it listens."""
    shown.command(f"atoll serve --listen {scene.listen}")
    arguments = ["-m", "coordinator.cli", "serve", "--listen", scene.listen, "--json"]
    processes.daemon(COORDINATOR, scene.host, [*arguments, *_state(processes, COORDINATOR)])
    started = json.loads(processes.first_line(COORDINATOR))
    return started["address"], started["join_token"]


def _join(processes: Processes, scene: Scene, shown: Shown, address: str, token: str) -> None:
    """Start every worker at once; they find the coordinator, and each other, while the model is captured."""
    for lender in scene.workers:
        shown.command(f"atoll-worker join {address} --token atoll1_... --name {lender.name}")
        options = ["--token", token, "--name", lender.name, *lender.options]
        join = ["-m", "worker.cli", "join", address, *options, *_state(processes, lender.name)]
        processes.daemon(lender.name, lender.name, join)


def _show_page(processes: Processes, scene: Scene, shown: Shown) -> None:
    """Serve the dashboard as long as the demo runs; its address once it listens."""
    shown.command("atoll dashboard")
    command = ["-m", "coordinator.cli", "dashboard", "--listen", "127.0.0.1:0", "--json"]
    processes.daemon(PAGE, scene.host, [*command, *_state(processes, COORDINATOR)])
    shown.say(f"page: {json.loads(processes.first_line(PAGE))['url']}")


@dataclass
class _Job:
    """The job as reported by the owner's command so far."""

    name: str = ""
    update: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    step_s: list[float] = field(default_factory=list)

    def hear(self, update: Mapping[str, Any]) -> bool:
        """Take in an update of `atoll submit --watch --json`; whether it brought the first plan."""
        self.name, self.update = update["job"], update
        self.step_s += [point["value"] for point in update["metrics"] if point["name"] == "step_s"]
        first = self.plan is None and update["plan"] is not None
        self.plan = update["plan"] or self.plan
        return first

    def outcome(self, plain: Mapping[str, float]) -> Outcome:
        plan = self.plan or {"stages": [], "prediction": {"step_s": math.nan, "single_machine_s": None}}
        usual = self.step_s[2:] or self.step_s  # the first steps open connections
        return Outcome(
            steps=self.update["step"],
            stages=len(plan["stages"]),
            devices=len({stage["workers"][0] for stage in plan["stages"]}),
            step_s=statistics.median(usual) if usual else math.nan,
            predicted_s=plan["prediction"]["step_s"],
            single_machine_s=plan["prediction"]["single_machine_s"],
            trained_loss=self.update["eval_loss"],
            plain_loss=plain["held_out_loss"],
            entropy=plain["unigram_entropy"],
        )


def _train(processes: Processes, scene: Scene, shown: Shown) -> _Job:
    """The job from capture to its last update, with one `atoll submit`."""
    wait = ("--workers", str(len(scene.workers)))
    command = [*wait, *scene.training, "--watch"]
    shown.command(f"atoll submit {_short(scene.job)} {' '.join(command)}")
    arguments = ["-m", "coordinator.cli", "submit", scene.job, *command, "--json"]
    arguments += _state(processes, COORDINATOR)
    fleet, job = _Fleet(len(scene.workers), LogReader(processes.log_path(COORDINATOR))), _Job()
    for line in processes.lines(OWNER, scene.host, arguments):
        fleet.look()
        if line and job.hear(json.loads(line)) and job.plan is not None:
            show_plan(job.plan, fleet.names, shown)
        under_way = job.name and job.update["state"] not in BEFORE
        shown.progress(*(training_progress(job.update) if under_way else fleet.progress))
    return job


class _Fleet:
    """The fleet as the coordinator's log reports it before there is a plan."""

    def __init__(self, count: int, log: LogReader) -> None:
        self._count = count
        self._log = log
        self._joined: set[str] = set()
        self._links = 0
        self._timed: set[str] = set()
        self.names: dict[str, str] = {}  # worker id -> name

    def look(self) -> None:
        """Read on."""
        for event in self._log.events():
            match event.get("event"):
                case "worker.enrolled":
                    self.names[event["worker"]] = event["name"]
                case "worker.state" if event["state"] == "pool":
                    self._joined.add(event["worker"])
                case "link.probed":
                    self._links += 1
                case "ops.probed" if event["ops"]:
                    self._timed.add(event["worker"])

    @property
    def progress(self) -> tuple[float, str]:
        """Return the whole's progress, and what is being done."""
        n = self._count
        most = 2 * n * (n - 1) + 1  # a look and a rate a pair and way, and some of them together
        done = len(self._joined) / n + min(1.0, self._links / most) + len(self._timed) / n
        if len(self._joined) < n:
            words = f"{len(self._joined)} of {n} workers have joined"
        else:
            words = f"links probed {self._links} times, ops timed on {len(self._timed)} of {n}"
        return READY * done / 3, words


def training_progress(update: Mapping[str, Any]) -> tuple[float, str]:
    """Return the whole's progress while the job runs, and what is being done."""
    step, steps = update["step"], update["steps"]
    if update["state"] in ENDINGS:
        share = TRAINED if update["state"] == "evaluating" else (TRAINED + STORED) / 2
        return share, ENDINGS[update["state"]]
    if update["state"] != "training":
        return (STORED if update["state"] == "finished" else READY), update["reason"] or update["state"]
    words = [f"step {step} of {steps}"]
    words += [f"loss {update['loss']:.3f}"] if update["loss"] is not None else []
    words += [f"{in_seconds(update['step_s'])} a step"] if update["step_s"] is not None else []
    return READY + (TRAINED - READY) * step / max(1, steps), ", ".join(words)


def show_plan(plan: Mapping[str, Any], names: Mapping[str, str], shown: Shown) -> None:
    """The plan that the job trains with, as `atoll plan` shows one."""
    shown.say(plan_view(from_proto(ParseDict(dict(plan), atoll_job_pb2.Plan())), names))


def _export(processes: Processes, scene: Scene, shown: Shown, job: str) -> Path:
    weights = processes.folder / "model.safetensors"
    shown.command(f"atoll export {job} -o {weights.name}")
    shown.progress(STORED, "exporting the weights")
    export = ["-m", "coordinator.cli", "export", job, "-o", str(weights), *_state(processes, COORDINATOR)]
    processes.run(EXPORT, scene.host, export)
    return weights


def _evaluate(processes: Processes, scene: Scene, shown: Shown, weights: Path) -> Mapping[str, float]:
    """The held-out loss of the plain module with the exported weights, in a process of its own."""
    shown.command(f"python {_short(scene.job)} --load {weights.name}   (the plain module)")
    shown.progress(EXPORTED, "evaluating the plain module")
    found: dict[str, float] = json.loads(
        processes.run(PLAIN, scene.host, [scene.job, "--load", str(weights), "--json"])
    )
    return found


def _state(processes: Processes, name: str) -> Sequence[str]:
    return ("--state-dir", str(processes.folder / name))


def _short(job: str) -> str:
    """A path inside the demo's folder by its name alone; one that is relative as it is."""
    return Path(job).name if Path(job).is_absolute() else job


class LogReader:
    """New JSON events of a log that another process writes, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Every whole line written since the last call that holds an event."""
        with self._path.open("rb") as log:
            log.seek(self._at)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
