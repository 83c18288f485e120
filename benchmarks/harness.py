"""Shared by the benchmarks: a live fleet in the lab, the rival beside it, and honest output.

Everything a benchmark times is started here by the commands a user would type.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.errors import AtollError, UsageError
from benchmarks.waits import HUNG_S, came_about
from coordinator.messages.jobs import UNFIT
from experiments.datasets import download
from lab.reader import read_scenario
from lab.tun import unavailable
from lab.world import Lab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

ROOT = Path(__file__).resolve().parent.parent


def parser(doc: str, *, scenario: str | None = None, job: str | None = None) -> argparse.ArgumentParser:
    """The options every benchmark has, and those that apply to this one."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--json", action="store_true", help="print the figures as one JSON object on the last line"
    )
    if scenario is not None:
        made.add_argument(
            "--scenario", action="append", help=f"name or path; may be repeated (default {scenario})"
        )
    if job is not None:
        made.add_argument("--job", default=job, help="any other job file")
    return made


def execute(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark and leave with its exit code; a user's error is one line, without a traceback."""
    try:
        sys.exit(main())
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load1": round(os.getloadavg()[0], 2),
        "loop_ms": round(1e3 * min(_loop_s() for _ in range(3)), 1),
    }


def _loop_s() -> float:
    """A million additions in Python: shared machines are twice as fast in one hour as in another, and what
    is bound by the processor goes with it."""
    begun_s = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - begun_s


def skip(reason: str, as_json: bool) -> NoReturn:
    """End well, and say in one line, and in the JSON, why nothing was measured."""
    print(f"skipped: {reason}", flush=True)
    if as_json:
        print(json.dumps({"skipped": reason}))
    raise SystemExit(0)


def need_mnist(as_json: bool) -> None:
    """Skip a benchmark of MNIST's images where they were not fetched; what to do is said."""
    try:
        download.read("mnist")
    except AtollError as error:
        skip(str(error), as_json)


def need_lab(as_json: bool) -> None:
    """Skip a benchmark that runs in the lab where the lab cannot be built."""
    if reason := unavailable():
        skip(f"no lab here: {reason}", as_json)


BEGUN_S = time.monotonic()
NOTED_EVERY_S = 10.0  # of steps; whatever else begins is noted at once


def note(words: str) -> None:
    """Say on the error stream what a long benchmark is at, and since when it runs."""
    print(f"[{time.monotonic() - BEGUN_S:5.0f} s] {words}", file=sys.stderr, flush=True)


def fitting(settings: Sequence[str], job: str) -> list[str]:
    """``settings`` without those that set a constant which the file ``job`` does not have: what makes the
    usual job fit a scenario says nothing of another one. UsageError where it is no Python file."""
    try:
        tree = ast.parse(Path(job).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot read the job file {job}: {error}") from None
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    known = {target.id for target in targets if isinstance(target, ast.Name)}
    names = {setting: setting.partition("=")[0] for setting in settings}
    return [setting for setting in settings if not names[setting].isupper() or names[setting] in known]


def conclude(figures: Any, as_json: bool, wrong: str = "") -> int:
    """Say what is ``wrong`` with the values, print the figures last with --json; the exit code."""
    if wrong:
        print(f"WRONG VALUES: {wrong}", flush=True)
    if as_json:
        print(json.dumps(figures))
    return 1 if wrong else 0


def follow(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> bool:
    """Whether a run gave the reference's losses: one for each of its steps, within ``tolerance`` (relative),
    all of them numbers."""
    return 0 < len(losses) == len(reference) and all(
        math.isfinite(b) and math.isclose(a, b, rel_tol=tolerance)
        for a, b in zip(losses, reference, strict=True)
    )


BUILT = b"built"  # what a rank of the rival says before its first step
SCHEDULED = 1000  # steps of the learning rate; a run ends after --steps, before anything is stored
RIVAL_S = HUNG_S  # one run of the rival, which may wait for itself for ever
# The data that benchmarks train on are nobody's secret, and some clients hold a handful of samples.
NO_FLOORS = ["--min-batch", "1", "--min-samples", "1", "--min-steps", "1", "--min-clients", "1"]


class CommandFailed(RuntimeError):
    """A command of the product ended with an error."""


class LabFleet:
    """A coordinator and one worker per host of a scenario, running in the lab."""

    def __init__(self, scenario: str) -> None:
        self.scenario = read_scenario(scenario)
        self._stack = contextlib.ExitStack()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._looking: subprocess.Popen[bytes] | None = None
        self.python = sys.executable

    def __enter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        self.lab = self._stack.enter_context(Lab(self.scenario))
        self.home = self.scenario.coordinator
        self.address = f"{self.lab.address(self.home)}:7700"
        try:
            note(f"starting a coordinator and {len(self.scenario.join_order)} workers in the lab")
            self._serve()
            for host, process in self._prestarted(self.scenario.join_order).items():
                note(f"{host} joins")
                self._join(host, process)
            self._wait_for_pool()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _spawn(
        self, host: str, name: str, command: list[str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            started = self.lab.popen(
                host,
                command,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=ROOT,
            )
        self._daemons.append(started)
        return started

    def _environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "wan0"}

    def _serve_options(self) -> list[str]:
        """Further options of `atoll serve`."""
        return []

    def _serve(self) -> None:
        state = self.folder / "coordinator"
        self._spawn(
            self.home,
            "coordinator",
            [
                self.python,
                "-m",
                "coordinator.cli",
                "serve",
                "--listen",
                "0.0.0.0:7700",
                "--state-dir",
                str(state),
                *self._serve_options(),
            ],
        )

        def answers() -> bool:
            with contextlib.suppress(CommandFailed):
                self.token = self.atoll("token", "create", "--name", "bench", "--json")["token"]
                return True
            return False

        self._wait(answers, "the coordinator to answer", "coordinator")

    def _prestarted(self, hosts: Sequence[str]) -> dict[str, subprocess.Popen[bytes]]:
        """These hosts' workers with their libraries loaded, waiting, in join order."""
        self._quotas(hosts, False)
        try:
            found = {host: self._spawn(host, host, self._worker(host), subprocess.PIPE) for host in hosts}
            for host in hosts:
                note(f"waiting for {host} to load its libraries")
                self._wait(lambda host=host: BUILT.decode() in self.log(host), f"{host} to start", host)  # type: ignore[misc]
        finally:
            self._quotas(hosts, True)
        return found

    def _worker(self, host: str) -> list[str]:
        facts = self.scenario.host(host)
        command = [self.python, "-m", "benchmarks.prestart", "join", self.address, "--token", self.token]
        command += ["--name", host, "--threads", "1", "--device", "cpu"]
        command += ["--state-dir", str(self.folder / host), *NO_FLOORS]
        command += ["--stage-memory", f"{facts.memory_mib:g}MiB"] if facts.memory_mib else []
        return command if facts.inbound else [*command, "--no-inbound"]

    def _join(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        self._wait(
            lambda: host in {w["name"] for w in self.status()["workers"]},
            f"{host} to join",
            host,
        )

    def _wait_for_pool(self) -> None:
        count = len(self.scenario.join_order)
        self._wait(
            lambda: sum(w["state"] == "pool" for w in self.status()["workers"]) == count,
            "the pool",
            "coordinator",
        )

    def _wait(self, done: Callable[[], bool], what: str, log: str) -> None:
        if not came_about(done, self._daemons):
            raise CommandFailed(f"a daemon ended, no more waiting for {what}: {self.log(log)}")

    def log(self, name: str) -> str:
        """The end of a daemon's log."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no log)"

    def atoll(self, *args: str) -> Any:
        """Run an `atoll` command in the coordinator's host and return its JSON."""
        lines = self._output(*args)
        return json.loads("\n".join(lines)) if lines else None

    def _lines(self, *args: str) -> list[dict[str, Any]]:
        """The JSON objects that a command prints, one a line."""
        return [json.loads(line) for line in self._output(*args)]

    def _command(self, *args: str) -> subprocess.Popen[bytes]:
        """An `atoll` command, started in the coordinator's host."""
        command = [self.python, "-m", "coordinator.cli", *args]
        command += ["--state-dir", str(self.folder / "coordinator")]
        return self.lab.popen(
            self.home, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environment()
        )

    def _output(self, *args: str) -> list[str]:
        process = self._command(*args)
        try:
            out, err = process.communicate(timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            self.lab.kill(process)
            logs = "".join(
                f"\n{host}: {self.log(host)}" for host in ("coordinator", *self.scenario.join_order)
            )
            raise CommandFailed(f"{' '.join(args)} took over {HUNG_S:.0f} s; {logs}") from None
        if process.returncode:
            raise CommandFailed(f"{' '.join(args)}: {err.decode(errors='replace')[-2000:]}")
        return [line for line in out.decode().splitlines() if line.strip()]

    def status(self) -> dict[str, Any]:
        """What `atoll status --json` shows; nobody and nothing where the coordinator does not answer."""
        if self._looking is None:
            command = [self.python, "-m", "benchmarks.looking", str(self.folder / "coordinator")]
            pipe = subprocess.PIPE
            looking = self.lab.popen(self.home, command, stdin=pipe, stdout=pipe, env=self._environment())
            self._looking = self._stack.enter_context(looking)  # ends with its standard input
        assert self._looking.stdin is not None
        assert self._looking.stdout is not None
        self._looking.stdin.write(b"\n")
        self._looking.stdin.flush()
        line = self._looking.stdout.readline()
        if not line:
            raise CommandFailed(f"what looks at the fleet ended with {self._looking.wait()}")
        return json.loads(line) or {"workers": [], "jobs": []}

    def train(
        self,
        job: str,
        partitioner: str,
        settings: Sequence[str],
        compress: str = "off",
        stop_after: int | None = None,
        schedule: str = "auto",
    ) -> dict[str, Any]:
        """Submit a job, wait for its end, return its plan, losses, seconds of every step, and what
        each stage computed and each link carried in one of them.

        With ``stop_after`` the job is cancelled after so many steps: nothing is stored, which over
        a slow line would take longer than the steps. It may commit another before it hears of that,
        which the figures leave out.
        """
        options = _planned(job, partitioner, settings, schedule)
        options += ["--compress", compress] if compress != "off" else []
        note(f"submitting {job}{f', compressed by {compress}' if compress != 'off' else ''}")
        submitted = self.atoll("submit", *options, "--detach", "--json")
        name = submitted["job"]
        updates = self._watched(name, stop_after)
        last = updates[-1]
        if last["state"] != "finished" and (stop_after is None or last["step"] < stop_after):
            raise CommandFailed(
                f"{name} ended {last['state']}: {last.get('reason')} {self.log('coordinator')}"
            )
        plan = next(u["plan"] for u in reversed(updates) if u.get("plan"))
        links: list[dict[str, Any]] = next((u["links"] for u in reversed(updates) if u.get("links")), [])
        stages: list[dict[str, Any]] = next((u["stages"] for u in reversed(updates) if u.get("stages")), [])
        series = {key: values[:stop_after] for key, values in self._metrics(name).items()}
        return {"job": name, "plan": plan, "links": links, "stages": stages, **series}

    def plan(
        self,
        job: str,
        partitioner: str,
        settings: Sequence[str],
        schedule: str = "auto",
    ) -> dict[str, Any]:
        """What `atoll plan` says of the live fleet, measured first where it was not."""
        options = _planned(job, partitioner, settings, schedule)
        found = self.atoll("plan", *options, "--json")
        plan: dict[str, Any] = found.get("plan", found)
        return plan

    def _watched(self, job: str, stop_after: int | None) -> list[dict[str, Any]]:
        """Every update of a job up to its end, or its cancellation, as that of one that does not fit."""
        process = self._command("watch", job, "--json")
        assert process.stdout is not None
        alarm = threading.Timer(HUNG_S, self.lab.kill, (process,))
        alarm.start()
        updates: list[dict[str, Any]] = []
        cancelled, unfit, most = False, "", math.inf if stop_after is None else stop_after
        said, noted_s = "", 0.0
        for line in process.stdout:
            updates.append(json.loads(line))
            words = f"{job} is {updates[-1]['state']}, {updates[-1]['step']} steps"
            if words != said and time.monotonic() - noted_s > NOTED_EVERY_S:
                said, noted_s = words, time.monotonic()
                note(words + (f", {updates[-1]['reason']}" if updates[-1].get("reason") else ""))
            if updates[-1].get("reason", "").startswith(UNFIT):
                unfit = updates[-1]["reason"]
            if (unfit or updates[-1]["step"] >= most) and not cancelled:
                cancelled = True
                self._output("cancel", job)
        alarm.cancel()
        process.communicate()
        if unfit:
            raise CommandFailed(f"{job} {unfit}")
        if not updates:
            raise CommandFailed(f"watch {job} said nothing: {self.log('coordinator')}")
        return updates

    def rows(self, job: str) -> list[dict[str, str]]:
        """The job's metrics: step, name, value and time_s of every point."""
        with (self.folder / "coordinator" / "runs" / job / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    def _metrics(self, job: str) -> dict[str, Any]:
        series: dict[str, list[float]] = {}
        for row in self.rows(job):
            series.setdefault(row["name"], []).append(float(row["value"]))
        return {"step_s": series.get("step_s", []), "loss": series.get("loss", [])}

    def rival(
        self, job: str, hosts: Sequence[str], schedule: str, steps: int, settings: Sequence[str]
    ) -> dict[str, Any]:
        """torch.distributed.pipelining, one rank on each host in the given order.

        Importing, tracing and splitting are not timed, so quotas hold only from then on. Its ranks dial
        each other, so every host accepts connections meanwhile.
        """
        port = 29500 + int(time.monotonic() * 10) % 1000
        master = f"{self.lab.address(hosts[0])}:{port}"
        options = settings_options(settings)
        ranks = []
        self._quotas(hosts, False)
        self._doors(hosts, opened=True)
        for rank, host in enumerate(hosts):
            command = [
                self.python,
                "-m",
                "benchmarks.rivals.torch_pipeline",
                "--job",
                job,
                "--rank",
                str(rank),
            ]
            command += ["--world", str(len(hosts)), "--master", master, "--schedule", schedule]
            command += ["--steps", str(steps), *options]
            ranks.append(
                self.lab.popen(
                    host,
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._environment(),
                    cwd=ROOT,
                )
            )
        try:
            self._when_built(hosts, ranks)
            results = self._ended(ranks, f"torch's {schedule}")
        finally:
            self._doors(hosts, opened=False)
        last = json.loads(results[-1][0].decode().strip().splitlines()[-1])
        return {"step_s": last["seconds"], "loss": last["losses"]}

    def _ended(self, ranks: Sequence[subprocess.Popen[bytes]], what: str) -> list[tuple[bytes, bytes]]:
        """What each rank printed; none waits on for one that failed, or for the end of a deadlock."""
        deadline = time.monotonic() + RIVAL_S
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        late = [p for p in ranks if p.poll() is None]
        failed = any(p.returncode for p in ranks)
        for process in late:
            self.lab.kill(process)
        results = [p.communicate() for p in ranks]
        if failed or late:
            why = "a rank failed" if failed else f"not over after {RIVAL_S:.0f} s"
            tails = "".join(err.decode(errors="replace")[-600:] for _, err in results)
            raise CommandFailed(f"{what}: {why}: {tails}")
        return results

    def _when_built(self, hosts: Sequence[str], ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait until every rank has its stage, or one has failed, for which the others would wait for ever;
        then slow the hosts down again."""
        deadline = time.monotonic() + RIVAL_S
        said = {process.stdout.fileno(): b"" for process in ranks if process.stdout is not None}
        try:
            while said and not any(p.poll() for p in ranks) and time.monotonic() < deadline:
                for output in select.select(list(said), [], [], 0.1)[0]:
                    byte = os.read(output, 1)  # what comes after is for others to read
                    said[output] += byte
                    if not byte or said[output].endswith(BUILT + b"\n"):
                        del said[output]
        finally:
            self._quotas(hosts, True)

    def _doors(self, hosts: Sequence[str], *, opened: bool) -> None:
        for host in hosts:
            self.lab.open_door(host, opened)

    def _quotas(self, hosts: Sequence[str], held: bool) -> None:
        for host in hosts:
            share = self.scenario.host(host).cpu
            if share is not None:
                self.lab.set_cpu(host, share if held else None)


def steady(seconds: Sequence[float], skip: int = 2) -> float:
    """Median after the first steps, which load caches and open connections."""
    return statistics.median(list(seconds)[skip:] or list(seconds))


def settings_options(settings: Iterable[str]) -> list[str]:
    """``NAME=VALUE`` settings as a command's options."""
    return [part for setting in settings for part in ("--set", setting)]


def _planned(job: str, partitioner: str, settings: Sequence[str], schedule: str) -> list[str]:
    """What `submit` and `plan` are both told."""
    return [job, "--partitioner", partitioner, "--schedule", schedule, *settings_options(settings)]
