"""Stock Flower as a rival: a SuperLink, SuperNodes or the simulation, and ``flwr run``, as users start them.

    with StockFlower(nodes=2) as flower:
        found = flower.run("examples/flower_digits", {"min-nodes": 2})

Defaults as Flower ships them: SuperLink with its state in memory and ServerApps as its children, one new
process a message on the nodes, no TLS. Off the network: no telemetry, no update check, no installation
of an app's requirements, a FLWR_HOME of its own. With a lab every process lives in a host of it.
Whatever was started here, and whatever that started, is ended with the block.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.waits import HUNG_S, came_about

if TYPE_CHECKING:
    from types import TracebackType

    from lab.world import Lab

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
Setting = str | int | float
STARTED = re.compile(r"Successfully started run (\d+)")
REFUSED = "task-token authentication failed"
AFTER_END_S = 120.0  # for what it printed last; a run that is over writes no more
LOOK_EVERY_S = 1.0


class FlowerFailed(RuntimeError):
    """Flower did not start, or a run ended without its result."""


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StockFlower:
    """A SuperLink and ``nodes`` SuperNodes (``simulation``: virtual ones), ready for runs."""

    def __init__(
        self,
        nodes: int,
        *,
        simulation: bool = False,
        lab: Lab | None = None,
        hub: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        """In a ``lab``: the SuperLink lives in ``hub``, SuperNode k in ``hosts[k]``."""
        self.nodes, self.simulation = nodes, simulation
        self._lab, self._hub, self._hosts = lab, hub, list(hosts)
        self._stack = contextlib.ExitStack()
        self._started: list[subprocess.Popen[Any]] = []
        self._runs = 0
        self.port = free_port()

    def __enter__(self) -> StockFlower:
        # Short: Ray puts sockets below it, whose paths may have 107 letters.
        self.home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fl-")))
        self._stack.callback(self._end)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(
        self, app: str | Path, settings: Mapping[str, Setting], timeout_s: float = HUNG_S
    ) -> dict[str, Any]:
        """``flwr run`` of an app that writes JSON to the file ``out`` of its configuration when it is done.

        FlowerFailed with the logs' ends when it does not within ``timeout_s``.
        """
        self._runs += 1
        out = self.home / f"found-{self._runs}.json"
        config = " ".join(f"{key}={_toml(value)}" for key, value in {**settings, "out": str(out)}.items())
        command = ["flwr", "run", str(app), "stock", "--run-config", config]
        if self.simulation:
            virtual = f"num-supernodes={self.nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
            command += ["--federation-config", virtual]
        said = len(self._log())
        asked = self._popen(self._hub, f"run-{self._runs}", command)
        ended_at = deadline = time.monotonic() + timeout_s
        look_at = 0.0
        while not out.exists():
            # Flower ends a run whose ServerApp missed its heartbeats, or raised, and says so here only.
            if ended_at == deadline and time.monotonic() > look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                if self._ended(said):
                    ended_at = time.monotonic() + AFTER_END_S
            if time.monotonic() > min(deadline, ended_at) or asked.poll() not in (None, 0):
                raise FlowerFailed(f"{app} ended without a result: {self.logs()}")
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def processes(self) -> list[psutil.Process]:
        """All that runs of what was started here, and of what that started."""
        found: list[psutil.Process] = []
        for process in self._started:
            with contextlib.suppress(psutil.Error):
                if process.poll() is None:
                    member = psutil.Process(process.pid)
                    found += [member, *member.children(recursive=True)]
        return found

    def logs(self) -> str:
        """The end of every process's log."""
        return "".join(f"\n{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.home.glob("*.log")))

    def _ended(self, said: int) -> bool:
        """Whether the SuperLink logged this run's end from ``said`` on; that of the one before comes late."""
        log = self._log()[said:]
        started = STARTED.search((self.home / f"run-{self._runs}.log").read_text(errors="replace"))
        return REFUSED in log or bool(started and re.search(rf"Finished task \d+ of run {started[1]}\b", log))

    def _log(self) -> str:
        return (self.home / "superlink.log").read_text(errors="replace")

    def _start(self) -> None:
        host = "0.0.0.0" if self._lab else "127.0.0.1"  # noqa: S104 - a lab's hosts see only each other
        command = ["flower-superlink", "--insecure", "--host", host, "--port", str(self.port)]
        hub = self._popen(self._hub, "superlink", command + ["--simulation"] * self.simulation)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "stock"\n\n[superlink.stock]\naddress = "127.0.0.1:{self.port}"\n'
            "insecure = true\n"
        )
        self._wait_for(hub, "/health")
        if not self.simulation:
            for node in range(self.nodes):
                self._popen(self._hosts[node] if self._hosts else "", f"node-{node}", self._node(node))

    def _node(self, node: int) -> list[str]:
        link = self._lab.address(self._hub) if self._lab else "127.0.0.1"
        command = ["flower-supernode", "--insecure", "--superlink", f"{link}:{self.port}"]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        return [*command, "--node-config", f"partition-id={node} num-partitions={self.nodes}"]

    def _wait_for(self, hub: subprocess.Popen[Any], path: str) -> None:
        """Until the SuperLink answers; asked from inside its host."""
        ask = (
            "import sys, urllib.request as u;"
            f"sys.exit(u.urlopen('http://127.0.0.1:{self.port}{path}', timeout=2).status != 200)"
        )

        def healthy() -> bool:
            return self._popen(self._hub, "health", [sys.executable, "-c", ask]).wait() == 0

        if not came_about(healthy, [hub]):
            raise FlowerFailed(f"the SuperLink ended early: {self.logs()}")

    def _popen(self, host: str, name: str, command: list[str]) -> subprocess.Popen[Any]:
        # Flower starts its helpers by bare name, and apps import what this environment has.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = {**QUIET, "PATH": path, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(self.home)}
        env |= {"RAY_TMPDIR": str(self.home)}
        with (self.home / f"{name}.log").open("wb") as log:
            if self._lab is not None:
                process = self._lab.popen(host, command, env=env, stdout=log, stderr=log, cwd=self.home)
            else:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.home,
                    start_new_session=True,
                )
        self._started.append(process)
        return process

    def _end(self) -> None:
        """Ask all to end, then kill what is left of them and of what they started."""
        family = self.processes()
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=10)
        for member in left:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


class Memory:
    """The peak of proportional set sizes (PSS), added over all processes; shared pages count once."""

    def __init__(
        self,
        processes: Callable[[], list[psutil.Process]],
        without: tuple[str, ...] = (),
        every_s: float = 0.3,
    ) -> None:
        """``without``: roles by their beginning that the figures leave out."""
        self._processes, self._without, self._every_s = processes, without, every_s
        self._ended = threading.Event()
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            sizes: dict[str, int] = {}
            for member in self._processes():
                with contextlib.suppress(psutil.Error, OSError):
                    name = role(member.cmdline())
                    if not name.startswith(self._without or ("\0",)):
                        sizes[name] = sizes.get(name, 0) + pss_bytes(member.pid)
            if sum(sizes.values()) > self.peak_bytes:
                self.peak_bytes, self.at_peak = sum(sizes.values()), sizes


def pss_bytes(process: int) -> int:
    """The kernel's figure for one process; 0 for one that is gone."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def role(command: Sequence[str]) -> str:
    """A process's name for a table: its script, or its module and command under ``-m``."""
    words = list(command)
    if "-m" in words[:-1]:
        at = words.index("-m") + 1
        return " ".join(word for word in words[at : at + 2] if not word.startswith("-"))
    names = [Path(word).name for word in words[:3]]
    return next((n for n in names if n.startswith(("flwr", "flower", "ray"))), names[0] if names else "")


def _toml(value: Setting) -> str:
    """A literal string where there are quotes inside: Flower's parser knows no escapes."""
    return f"'{value}'" if isinstance(value, str) else str(value)
