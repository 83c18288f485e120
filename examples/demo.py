"""`make demo`: a GPT trained by four workers across an emulated WAN, shown and checked.

As root: the ``two_islands`` lab, where a real network of namespaces joins two fast and two slow
hosts over one 8 Mbit/s, 40 ms line, and no machine has the memory for the whole model. Otherwise the
same scenario on loopback, shaped by the transport itself (approximate). Every process is started
with the command a user would type. Exit code 0 when every check holds, the five minutes among them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict
from rich.console import Console

from coordinator.render import plan_view
from lab.loopback import LoopbackLab
from lab.reader import read_scenario
from lab.tun import LabError, unavailable
from lab.world import Hosts, Lab
from protos import atoll_job_pb2
from protos.convert import from_proto

ROOT = Path(__file__).resolve().parent.parent
JOB = "examples/gpt.py"
SCENARIO = "two_islands"
PORT = 7700
LOSS_SHARE = 0.88  # of the unigram entropy: what the trained model must reach
LIMIT_S = 300.0  # for everything
TRAIN_FOR_S = 100.0  # as predicted; the rest is starting, probing, evaluating, and for slower machines
STEPS = (30, 100)
SAME_LOSS = 2e-4  # the stages and the plain module may add in another order


class DemoFailed(Exception):
    """A check or a command did not do what it should."""


@dataclass(frozen=True)
class Outcome:
    """What the summary tells."""

    steps: int
    step_s: float
    predicted_s: float
    single_machine_s: float | None
    trained_loss: float
    plain_loss: float
    entropy: float
    stages: int
    devices: int


class Fleet:
    """A coordinator and one worker a host, started by the commands a user would type."""

    def __init__(self, lab: Hosts, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.home = lab.scenario.coordinator
        self.processes: dict[str, subprocess.Popen[Any]] = {}

    def serve(self) -> None:
        """Start the coordinator and wait until it answers."""
        listen = f"{self.lab.address(self.home)}:{PORT}"
        show(f"{self.home}: atoll serve --listen {listen}")
        self._spawn("coordinator", self.home, "coordinator.cli", "serve", "--listen", listen, *self._state())
        self._until(lambda: self.ask("status") is not None, 40.0, "the coordinator", "coordinator")

    def join(self) -> None:
        """Start every worker in join order and wait until all are in the pool."""
        token = str(self.must("token", "create", "--name", "demo")["token"])
        address = f"{self.lab.address(self.home)}:{PORT}"
        for name in self.lab.scenario.join_order:
            host = self.lab.scenario.host(name)
            show(f"{name}: atoll-worker join {address} --token atoll1_... --name {name}")
            options = ["--token", token, "--name", name, "--threads", "1", "--device", "cpu"]
            options += ["--state-dir", str(self.folder / name)]
            options += ["--listen", f"{self.lab.address(name)}:0"] if self.lab.approximate else []
            options += ["--site", host.group] if host.group else []
            shaper = self.lab.environment(name).get("ATOLL_SHAPER")
            options += ["--shaper", shaper] if shaper else []
            options += ["--memory", f"{host.memory_mib:g}MiB"] if host.memory_mib else []
            self._spawn(name, name, "worker.cli", "join", address, *options)
            # Join order is part of the scenario: the baselines place stages by it.
            self._until(lambda name=name: name in self._in_pool(), 60.0, f"{name} to join", name)  # type: ignore[misc]

    def _in_pool(self) -> set[str]:
        found = self.ask("status") or {"workers": []}
        return {w["name"] for w in found["workers"] if w["state"] == "pool"}

    def ask(self, *arguments: str) -> Any:
        """The JSON answer of an `atoll` command on the coordinator's host; None when it fails."""
        done = self._atoll(*arguments, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, self.last_error = done.communicate(timeout=300)
        return json.loads(out) if done.returncode == 0 else None

    def must(self, *arguments: str) -> Any:
        """As ``ask``; DemoFailed with the command's own words when it fails."""
        found = self.ask(*arguments)
        if found is None:
            raise DemoFailed(f"atoll {' '.join(arguments)}: {self.last_error.strip()}")
        return found

    def run(self, *arguments: str) -> None:
        """An `atoll` command whose output everybody sees."""
        show("atoll " + " ".join(arguments))
        done = self._atoll(*arguments)
        try:
            code = done.wait()
        except KeyboardInterrupt:
            done.send_signal(signal.SIGINT)
            raise
        if code:
            raise DemoFailed(f"atoll {arguments[0]} ended with exit code {code}\n{self.log('coordinator')}")

    def log(self, name: str) -> str:
        """The end of a daemon's log."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def _state(self) -> list[str]:
        return ["--state-dir", str(self.folder / "coordinator")]

    def _atoll(self, *arguments: str, **streams: Any) -> subprocess.Popen[Any]:
        command = ["-m", "coordinator.cli", *arguments, *self._state()]
        # One job of the owner's machine: it captures and checks on the coordinator's host.
        return self.lab.python(self.home, *command, cwd=ROOT, text=True, **streams)

    def _spawn(self, name: str, host: str, module: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = self.lab.python(
                host, "-m", module, *arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def _until(self, done: Callable[[], bool], seconds: float, what: str, process: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if done():
                return
            if self.processes[process].poll() is not None:
                raise DemoFailed(f"{process} ended early:\n{self.log(process)}")
            time.sleep(0.2)
        raise DemoFailed(f"waited {seconds:.0f} s for {what}:\n{self.log(process)}")


def show(text: str) -> None:
    """A line of the demo's own, told apart from what the commands print."""
    print(f"\n$ {text}" if text.startswith(("atoll", "python")) else f"-- {text}", flush=True)


def demo(fleet: Fleet, steps: int | None) -> Outcome:
    """Plan, train, export and evaluate; DemoFailed names the command that failed."""
    fleet.serve()
    fleet.join()
    plan = fleet.must("plan", JOB)
    show(f"atoll plan {JOB}")
    show_plan(plan)
    predicted_s = float(plan["prediction"]["step_s"])
    steps = steps or max(STEPS[0], min(STEPS[1], math.floor(TRAIN_FOR_S / predicted_s)))
    fleet.run("submit", JOB, "--steps", str(steps), "--watch")
    name = fleet.must("status")["jobs"][-1]["job"]
    job = fleet.must("watch", name)  # of an ended job: one update, with its plan and every figure
    weights = fleet.folder / "gpt.safetensors"
    fleet.run("export", name, "-o", str(weights))
    show(f"python {JOB} --load gpt.safetensors   (the plain module, no Atoll)")
    plain = evaluate(weights)
    print(f"held-out loss {plain['held_out_loss']:.4f}, unigram entropy {plain['unigram_entropy']:.4f}")
    trained = job["plan"]
    return Outcome(
        steps=steps,
        step_s=median_step_s(job["metrics"]),
        predicted_s=float(trained["prediction"]["step_s"]),
        single_machine_s=trained["prediction"]["single_machine_s"],
        trained_loss=float(job["eval_loss"]),
        plain_loss=plain["held_out_loss"],
        entropy=plain["unigram_entropy"],
        stages=len(trained["stages"]),
        devices=len({stage["workers"][0] for stage in trained["stages"]}),
    )


def show_plan(plan: dict[str, Any]) -> None:
    """What `atoll plan` prints, from its JSON: asking twice would capture the model twice."""
    facts = {key: value for key, value in plan.items() if key != "names"}
    found = from_proto(ParseDict(facts, atoll_job_pb2.Plan()))
    Console(highlight=False).print(plan_view(found, plan["names"]))


def median_step_s(metrics: list[dict[str, Any]]) -> float:
    """Median time from one commit to the next; the first steps open connections."""
    found = [point["value"] for point in metrics if point["name"] == "step_s"][2:]
    return statistics.median(found) if found else math.nan


def evaluate(weights: Path) -> dict[str, float]:
    """The held-out loss of the plain module with the exported weights, in a process of its own."""
    command = [sys.executable, str(ROOT / JOB), "--load", str(weights), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode:
        raise DemoFailed(f"the plain module refused the exported weights: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def check(outcome: Outcome, took_s: float, limit_s: float) -> None:
    """The demo's promises; DemoFailed with the number that broke each. ``limit_s`` 0: however long."""
    broken = []
    if outcome.stages < 3:
        broken.append(f"{outcome.stages} stages; the scenario's memory asks for at least 3")
    if not outcome.plain_loss <= LOSS_SHARE * outcome.entropy:
        share = outcome.plain_loss / outcome.entropy
        broken.append(f"held-out loss is {share:.3f} x the unigram entropy; at most {LOSS_SHARE}")
    if not abs(outcome.plain_loss - outcome.trained_loss) <= SAME_LOSS:
        broken.append(f"trained to {outcome.trained_loss:.6f}, the plain module has {outcome.plain_loss:.6f}")
    if 0 < limit_s < took_s:
        broken.append(
            f"it took {took_s:.1f} s, at most {limit_s:g} are promised; on a slow machine give "
            "--limit SECONDS, 0 for none"
        )
    if broken:
        raise DemoFailed("\n".join(broken))


def summary(outcome: Outcome, took_s: float, lab: Hosts) -> str:
    """What was shown, in plain words."""
    kind = "loopback, shaped by the transport (approximate)" if lab.approximate else "network namespaces"
    share = outcome.plain_loss / outcome.entropy
    lines = [
        f"trained {outcome.steps} steps in {outcome.stages} stages on {outcome.devices} workers; lab: {kind}",
        f"step {outcome.step_s:.2f} s measured, {outcome.predicted_s:.2f} s predicted",
        f"held-out loss {outcome.plain_loss:.4f} nats a byte, {share:.2f} x the unigram entropy "
        f"{outcome.entropy:.4f} (at most {LOSS_SHARE})",
        f"the plain module evaluates to the same loss: {outcome.trained_loss:.4f} in training, "
        f"{outcome.plain_loss:.4f} loaded",
    ]
    if outcome.single_machine_s:
        times = outcome.step_s / outcome.single_machine_s
        word = f"{times:.1f}x faster" if times > 1 else f"{1 / times:.1f}x slower"
        lines.append(
            f"honestly: on the fastest of these machines alone, if it had the memory, a step would take "
            f"{outcome.single_machine_s:.2f} s, {word}; it has not, and that is why the model is spread"
        )
    lines.append(f"all checks hold; {took_s:.0f} s in all")
    return "\n".join(f"   {line}" for line in lines)


def open_lab(loopback: bool) -> Lab | LoopbackLab:
    """The namespace lab where it can be built, loopback otherwise, saying which and why."""
    reason = "asked for" if loopback else unavailable()
    if reason is None:
        try:
            return Lab(SCENARIO).start()
        except LabError as error:
            reason = str(error)
    show(f"no namespace lab ({reason}): running on loopback, its WAN is approximate")
    return LoopbackLab(SCENARIO).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every check holds, 1 when one does not, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="training steps; default: as many as fit in five minutes")
    parser.add_argument("--loopback", action="store_true", help="do not build namespaces even as root")
    parser.add_argument("--keep", type=Path, help="keep logs, weights and state in this folder")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="fail when all of it takes longer (default 300, as promised; 0: no limit), for slow machines",
    )
    options = parser.parse_args(arguments)
    started_s = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            folder = options.keep or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-demo-"))
            )
            folder.mkdir(parents=True, exist_ok=True)
            lab = open_lab(options.loopback)
            stack.callback(lab.close)
            show(read_scenario(SCENARIO).title)
            outcome = demo(Fleet(lab, folder.resolve()), options.steps)
        took_s = time.monotonic() - started_s
        check(outcome, took_s, options.limit)
    except (DemoFailed, LabError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print("\nsummary\n" + summary(outcome, took_s, lab))
    return 0


if __name__ == "__main__":
    sys.exit(main())
