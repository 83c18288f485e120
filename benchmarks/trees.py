"""Another commit of Atoll beside this one: its source, its environment, and a fleet driven by its commands.

Nothing here imports the product, so that both trees run their own code and meet in files alone.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from atoll.errors import JobFailed, UsageError
from benchmarks.waits import came_about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
COORDINATOR = "coordinator"
TORCH = "torch==2.13.0"
LOG_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Tree:
    """Source code, and the Python that runs it."""

    folder: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """This process's environment with one compute thread and this tree's packages."""
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**os.environ, **threads, "PYTHONPATH": str(self.folder)}

    def run(self, module: str, *arguments: str) -> str:
        """What ``python -m module`` prints. JobFailed with its errors when it fails."""
        command = [str(self.python), "-m", module, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise JobFailed(f"{self.folder.name}: {module} {' '.join(arguments)}: {done.stderr[-LOG_CHARS:]}")
        return done.stdout

    def versions(self) -> dict[str, str]:
        """Versions of Python and of the libraries that compute."""
        found = json.loads(self.run("coordinator.cli", "version", "--json"))
        return {name: found[name] for name in ("python", "torch")}


THIS = Tree(ROOT, Path(sys.executable))


def checkout(commit: str, folder: Path) -> Path:
    """Write the files of ``commit`` below ``folder``; UsageError where this repository has no such commit."""
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    done = subprocess.run(archive, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        raise UsageError(f"no commit {commit} here: {reason}; fetch the whole history")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def install(source: Path, folder: Path) -> Path:
    """Make a virtual environment for the tree at ``source``; return its Python."""
    python = folder / "bin" / "python"
    constraints = ["-c", str(source / "constraints.txt")]
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *constraints]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, TORCH], [*pip, str(source)]):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise UsageError(
                f"{' '.join(command[:4])} failed: {done.stderr[-LOG_CHARS:]}; give --environment PATH"
            )
    return python


def python_of(environment: Path) -> Path:
    """The Python of a virtual environment; UsageError where there is none."""
    python = environment.absolute() / "bin" / "python"
    if not python.exists():
        raise UsageError(f"{environment} is no virtual environment: it has no bin/python")
    return python


class Fleet:
    """A coordinator and workers of one tree, with state folders below ``folder``, TLS and tokens on."""

    def __init__(self, tree: Tree, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._served: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def state(self, name: str) -> Path:
        """The state folder of the coordinator or of a worker."""
        return self.folder / name

    def log(self, name: str) -> str:
        """The end of a process's output."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-LOG_CHARS:] if path.exists() else ""

    # ------------------------------------------------------------ processes

    def serve(self) -> None:
        """Start the coordinator on free ports and wait until it takes calls."""
        self._spawn(COORDINATOR, "coordinator.cli", "serve", "--listen", "127.0.0.1:0", "--json")

        def answers() -> bool:
            with suppress(StopIteration):
                self._served = next(self._announced())
            return bool(self._served)

        self._served = {}
        self.wait_until(answers, "the coordinator to listen", COORDINATOR)

    def join(self, name: str, *options: str) -> None:
        """Start a worker on one thread of the CPU and wait until it is in the pool or at work.

        It gets a token where it has no identity yet.
        """
        command = ["join", self._served["address"], "--device", "cpu", "--threads", "1"]
        command += ["--name", name, "--listen", "127.0.0.1:0", *options]
        if not (self.state(name) / "identity").exists():
            command += ["--token", self._served["join_token"]]
        self._spawn(name, "worker.cli", *command)
        self.wait_until(lambda: name in self.workers("pool", "assigned"), f"{name} to join", name)

    def kill(self) -> None:
        """End every process by kill -9, the coordinator first."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    # ------------------------------------------------------------ commands

    def atoll(self, *arguments: str) -> list[dict[str, Any]]:
        """The JSON values that an `atoll` command prints, one a line."""
        printed = self.tree.run("coordinator.cli", *arguments, "--json", *self._state_dir(COORDINATOR))
        return [json.loads(line) for line in printed.splitlines() if line.strip()]

    def register(self, worker: str, name: str, path: Path) -> None:
        """Add a safetensors file to a worker's data sets."""
        options = ["--accept", "any"] if self._asks else []
        self.tree.run("worker.cli", "data", "add", name, str(path), *options, *self._state_dir(worker))

    def accept_any(self, worker: str, name: str) -> None:
        """Have a data set that an older tree registered take part in every job."""
        if self._asks:
            options = ["--accept", "any", *self._state_dir(worker)]
            self.tree.run("worker.cli", "data", "policy", name, *options)

    @property
    def _asks(self) -> bool:
        # A tree from before there was a policy accepts any job.
        return (self.tree.folder / "worker" / "data" / "policy.py").exists()

    def submit(self, job: Path, *options: str) -> str:
        """Submit a job file; return the job's name."""
        [reply] = self.atoll("submit", str(job), "--detach", *options)
        return str(reply["job"])

    def watch(self, job: str) -> Iterator[dict[str, Any]]:
        """Updates of a job until it ends; JobFailed where it does not finish."""
        command = [str(self.tree.python), "-m", "coordinator.cli", "watch", job, "--json"]
        command += self._state_dir(COORDINATOR)
        update: dict[str, Any] = {}
        with subprocess.Popen(
            command, cwd=self.tree.folder, env=self.tree.environment(), stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    update = json.loads(line)
                    yield update
            finally:
                process.kill()  # a reader may leave before the job's end
        if update.get("state") != "finished":
            logs = "\n".join(self.log(name) for name in self._processes)
            raise JobFailed(f"{job} ended {update.get('state')}: {update.get('reason')}\n{logs}")

    def finish(self, job: str) -> dict[str, Any]:
        """Wait for a job's end; return its last update."""
        *_, last = self.watch(job)
        return last

    def export(self, job: str) -> Path:
        """Write a job's weights; return their file."""
        path = self.folder / f"{job}.safetensors"
        self.atoll("export", job, "-o", str(path))
        return path

    def workers(self, *states: str) -> set[str]:
        """Names of the workers in one of these states."""
        with suppress(JobFailed):
            [status] = self.atoll("status")
            return {worker["name"] for worker in status["workers"] if worker["state"] in states}
        return set()

    def wait_until(self, done: Callable[[], bool], what: str, log: str) -> None:
        """Poll; JobFailed with a log when a process has ended meanwhile."""
        if not came_about(done, self._processes.values()):
            raise JobFailed(f"a process ended, no more waiting for {what}: {self.log(log)}")

    # ------------------------------------------------------------ inside

    def _announced(self) -> Iterator[dict[str, str]]:
        for line in (self.folder / f"{COORDINATOR}.log").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if "join_token" in found:
                    yield found

    def _state_dir(self, name: str) -> Sequence[str]:
        return ["--state-dir", str(self.state(name))]

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        command = [str(self.tree.python), "-m", module, *arguments, *self._state_dir(name)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=self.tree.folder, env=self.tree.environment(), stdout=log, stderr=log
            )
