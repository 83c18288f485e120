"""A lab from Python: hosts to start processes in, links to change, counters to read.

    with Lab(read_scenario("two_islands")) as lab:
        server = lab.popen("hub", ["python", "-m", "http.server"])
        lab.set_link("fast1", "slow1", ms=80)
        lab.cut("fast1", "slow1")
        print(lab.stats().flow("fast1", "hub").bytes)

Everything started in a host dies with the lab, and the lab dies with the process that made
it, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from lab import cpu
from lab.control import Control
from lab.reader import read_scenario
from lab.scenario import Scenario
from lab.state import (
    PREFIX,
    LabState,
    kill_processes,
    load_state,
    new_state,
    save_state,
    start_ticks,
    tear_down,
)
from lab.tun import DEVICE, NETNS_DIR, LabError, run_ip, unavailable

HOME = Path(__file__).resolve().parents[1]
STOP_PATIENCE_S = 60.0  # a killed process is gone once the machine gets to it
_numbers = itertools.count(1)


def new_name() -> str:
    """A lab's name, unique on this machine."""
    return f"{os.getpid()}-{next(_numbers)}"


Stream = int | IO[Any] | None


@dataclass(frozen=True, slots=True)
class FlowTotals:
    """One direction of a pair since the lab came up."""

    packets: int  # a burst handed over at once counts as one
    bytes: int  # IP packets delivered
    drops: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The router's counters; take two and subtract for a rate."""

    at_s: float
    router_cpu_s: float
    priority: str
    flows: Mapping[tuple[str, str], FlowTotals]
    servers: Mapping[str, tuple[int, int]]  # name -> (bytes, drops)

    def flow(self, source: str, target: str) -> FlowTotals:
        """The totals of one direction."""
        return self.flows[source, target]


class Hosts:
    """What a lab that runs can do, for its owner and for whoever joins it by name."""

    approximate = False

    def __init__(self, state: LabState) -> None:
        self.state = state
        self.scenario = state.read()
        self._control: Control | None = None
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def name(self) -> str:
        """The lab's name, as ``lab list`` shows it."""
        return self.state.lab

    def address(self, host: str) -> str:
        """The IPv4 address of a host."""
        self.scenario.host(host)
        return self.state.addresses[host]

    @property
    def addresses(self) -> dict[str, str]:
        """Every host's address."""
        return dict(self.state.addresses)

    def environment(self, host: str) -> dict[str, str]:
        """What every process in a host finds in its environment, beside what it inherits."""
        facts = self.scenario.host(host)
        threads = str(facts.threads)
        found = {
            "LAB_ID": self.name,
            "LAB_HOST": host,
            "LAB_HOSTS": json.dumps(self.addresses),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        if facts.memory_mib is not None:
            found["LAB_MEMORY_MIB"] = f"{facts.memory_mib:g}"
        return found

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` inside a host and keeps the process's number."""
        group = self.state.groups.get(host)
        # The shell moves itself into the host's CPU group and then becomes the command.
        join = 'echo 0 > "$0/cgroup.procs" && ' if group else ""
        script = join + 'net="$1"; shift; exec nsenter --net="$net" -- "$@"'
        return ["sh", "-c", script, group or "lab", str(NETNS_DIR / self.state.namespaces[host]), *command]

    def popen(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: str | Path | None = None,
        text: bool = False,
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in a session of its own; ``env`` comes on top of what is inherited."""
        environment = {**os.environ, **self.environment(host), **(env or {})}
        process: subprocess.Popen[Any] = subprocess.Popen(
            self.command(host, list(command)),
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            text=text,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def popen_outside(self, command: Sequence[str]) -> subprocess.Popen[Any]:
        """Start a process outside all hosts that knows the lab (LAB_ID, LAB_HOSTS); it dies with the lab."""
        environment = {**os.environ, "LAB_ID": self.name, "LAB_HOSTS": json.dumps(self.addresses)}
        process: subprocess.Popen[Any] = subprocess.Popen(command, env=environment, start_new_session=True)
        self._started.append(process)
        return process

    def python(self, host: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start this Python in a host with the repository's packages importable."""
        path = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH", "")]))
        options["env"] = {"PYTHONPATH": path, **(options.get("env") or {})}
        return self.popen(host, [sys.executable, *arguments], **options)

    def kill(self, process: subprocess.Popen[Any], number: int = signal.SIGKILL) -> None:
        """Signal a process and all it has started; its end is waited for only on SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if number == signal.SIGKILL:
            process.wait(STOP_PATIENCE_S)

    def end_started(self) -> None:
        """SIGKILL to every process started here, with all of its session, and wait for each."""
        for process in self._started:
            if process.poll() is None:
                self.kill(process)
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One request to the router."""
        if self._control is None:
            self._control = Control(self.state.control_path)
        return self._control.ask(do, **arguments)

    def set_link(
        self,
        a: str,
        b: str,
        *,
        mbit: float | None = None,
        ms: float | None = None,
        loss: float | None = None,
        buffer_ms: float | None = None,
        both: bool = True,
    ) -> None:
        """Change a pair's figures, live; ``both=False`` changes only the way from a to b."""
        given = {"mbit": mbit, "ms": ms, "loss": loss, "buffer_ms": buffer_ms}
        figures = {key: value for key, value in given.items() if value is not None}
        check_figures(figures)
        for source, target in [(a, b), (b, a)] if both else [(a, b)]:
            link = replace(self.scenario.link(source, target), **figures)
            self._apply_link(source, target, figures)
            self.scenario = replace(self.scenario, links={**self.scenario.links, (source, target): link})

    def _apply_link(self, source: str, target: str, figures: Mapping[str, float]) -> None:
        self.ask("link", source=source, target=target, **figures)

    def set_uplink(self, server: str, mbit: float) -> None:
        """Change a shared uplink such as ``group:fast:up`` or ``host:home1:down``, live."""
        check_figures({"mbit": mbit})
        self.ask("uplink", server=server, mbit=mbit)

    def cut(self, a: str, b: str, *, both: bool = True) -> None:
        """Lose everything between two hosts, silently, until ``heal``."""
        self._cut(a, b, both, True)

    def heal(self, a: str, b: str, *, both: bool = True) -> None:
        """Undo ``cut``."""
        self._cut(a, b, both, False)

    def open_door(self, host: str, opened: bool = True) -> None:
        """Let others open connections to a host with ``inbound = false``, or no more (others: no change)."""
        self.scenario.host(host)
        self.ask("door", host=host, opened=opened)

    def move(self, host: str, address: str | None = None) -> str:
        """Give a running host another address; returns it. Its connections hear nothing of that: what they
        send, and what is sent to the old address, is lost."""
        old = self.address(host)
        if address is None:
            head, third, last = old.rsplit(".", 2)
            address = f"{head}.{(int(third) + 1) % 256}.{last}"
        self.ask("move", host=host, address=address)
        namespace = self.state.namespaces[host]
        run_ip("-n", namespace, "addr", "del", f"{old}/16", "dev", DEVICE)
        run_ip("-n", namespace, "addr", "add", f"{address}/16", "dev", DEVICE)
        self.state = replace(self.state, addresses={**self.state.addresses, host: address})
        save_state(self.state)
        return address

    def isolate(self, host: str, others: Iterable[str] | None = None) -> None:
        """Cut a host off from the others (default: from all)."""
        for other in self.scenario.host_names if others is None else others:
            if other != host:
                self.cut(host, other)

    def _cut(self, a: str, b: str, both: bool, cut: bool) -> None:
        for source, target in [(a, b), (b, a)] if both else [(a, b)]:
            self.scenario.link(source, target)
            self.ask("cut", source=source, target=target, cut=cut)

    def set_cpu(self, host: str, share: float | None) -> None:
        """Change a host's CPU quota, live (None: not limited)."""
        if host not in self.state.groups:
            raise LabError(f"{host} has no CPU group: the lab was built without quotas")
        cpu.set_quota(Path(self.state.groups[host]), share)

    def stats(self) -> Stats:
        """The router's counters now."""
        found = self.ask("stats")
        flows = {(source, target): FlowTotals(*totals) for source, target, *totals in found["flows"]}
        servers = {name: (count, drops) for name, count, drops in found["servers"]}
        return Stats(found["at_s"], found["cpu_s"], found["priority"], flows, servers)


def check_figures(figures: Mapping[str, float]) -> None:
    """The bounds of a scenario file, for live changes."""
    bounds = {"mbit": (0.01, 1e5), "ms": (0.0, 1e4), "loss": (0.0, 0.99), "buffer_ms": (1.0, 1e4)}
    for key, value in figures.items():
        low, high = bounds[key]
        if not low <= value <= high:
            raise LabError(f"{key} = {value:g}; a number from {low:g} to {high:g}")


class Lab(Hosts):
    """A lab of namespaces owned by this process. Needs root; ``LoopbackLab`` does not."""

    def __init__(self, scenario: Scenario | str | Path, *, quotas: bool = True) -> None:
        """Nothing is made before ``with`` or ``start``. ``quotas=False`` leaves CPU speeds alone."""
        if not isinstance(scenario, Scenario):
            scenario = read_scenario(scenario)
        name = new_name()
        addresses = {host: f"10.80.0.{number}" for number, host in enumerate(scenario.host_names, 1)}
        super().__init__(new_state(name, scenario, addresses))
        self.quotas = quotas
        self.router: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Build namespaces, CPU groups and the router; on failure nothing is left."""
        if reason := unavailable():
            raise LabError(f"no namespace lab here: {reason}; use LoopbackLab, or lab run --loopback")
        if shutil.which("nsenter") is None:
            raise LabError("the lab needs the command nsenter; install the package util-linux")
        names = {host: f"{PREFIX}{self.name}-{host}" for host in self.scenario.host_names}
        folder = cpu.require_controller() if self.quotas else None
        groups = {host: str(folder / name) for host, name in names.items()} if folder else {}
        self.state = replace(self.state, namespaces=names, groups=groups)
        save_state(self.state)
        try:
            for host in self.scenario.hosts:
                if self.quotas:
                    cpu.make_group(names[host.name], host.cpu)
            self._start_router()
        except BaseException:
            self.close()
            raise
        return self

    def _start_router(self) -> None:
        # Without another lab's mark, or that lab would take this router for one of its processes.
        environment = {key: value for key, value in os.environ.items() if key != "LAB_ID"}
        self.router = subprocess.Popen(
            [sys.executable, "-m", "lab.router", self.name],
            cwd=HOME,
            env={**environment, "PYTHONPATH": str(HOME)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.router.stdout is not None
        words = self.router.stdout.readline().strip()
        self.state = replace(self.state, router_pid=self.router.pid)
        if words != "ready":
            raise LabError(words or "the router ended before it was ready")

    def close(self) -> None:
        """Kill every process of every host and remove all that was made; may be repeated."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self.end_started()
        kill_processes(self.state)
        if self.router is not None:
            self.router.kill()
            self.router.wait(STOP_PATIENCE_S)
            assert self.router.stdout is not None
            self.router.stdout.close()
        tear_down(self.state)

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()


def join(lab: str | None = None) -> Hosts:
    """A lab that is up, by its name; default: the one this process runs in (``LAB_ID``)."""
    lab = lab or os.environ.get("LAB_ID")
    if not lab:
        raise LabError("which lab? give its name (lab list) or run inside one")
    state = load_state(lab)
    if not start_ticks(state.router_pid):
        raise LabError(f"lab {lab} is not up any more; lab clean removes what it left")
    return Hosts(state)
