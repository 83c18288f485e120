"""What a running lab has made, on disk, so that anyone can list it, join it or clean up after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab.cpu import members, remove_group, signal_if_alive
from lab.reader import dump_scenario, undump_scenario
from lab.scenario import Scenario
from lab.tun import NETNS_DIR, LabError, run_ip

PREFIX = "atoll-"


def state_root() -> Path:
    """Where labs leave their notes: one place per user."""
    if os.geteuid() == 0:
        return Path("/run/atoll-lab")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", f"atoll-lab-{os.geteuid()}")  # noqa: S108


@dataclass(frozen=True, slots=True)
class LabState:
    """Everything ``tear_down`` needs; ``namespaces`` is empty on loopback, ``groups`` without quotas."""

    lab: str
    owner_pid: int
    owner_start: int  # clock ticks since boot; tells the owner from a later process of its number
    scenario: Mapping[str, Any]
    addresses: Mapping[str, str]
    namespaces: Mapping[str, str]
    groups: Mapping[str, str]
    router_pid: int = 0

    @property
    def folder(self) -> Path:
        """The lab's own directory."""
        return state_root() / self.lab

    @property
    def control_path(self) -> Path:
        """The router's socket."""
        return self.folder / "control.sock"

    @property
    def alive(self) -> bool:
        """Whether the process that owns the lab still runs."""
        return start_ticks(self.owner_pid) == self.owner_start

    def read(self) -> Scenario:
        """The scenario the lab was built from."""
        return undump_scenario(self.scenario)


def start_ticks(pid: int) -> int:
    """When a process started, in ticks since boot; 0 when there is none (or only a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def new_state(lab: str, scenario: Scenario, addresses: Mapping[str, str]) -> LabState:
    """The notes of a lab owned by this process, before anything is made."""
    pid = os.getpid()
    return LabState(lab, pid, start_ticks(pid), dump_scenario(scenario), dict(addresses), {}, {})


def save_state(state: LabState) -> Path:
    """Write the notes, whole or not at all; where they are."""
    state.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state.folder / "state.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(state)), encoding="utf-8")
    temporary.replace(path)
    return path


def load_state(lab: str) -> LabState:
    """The notes of a lab by its name."""
    path = state_root() / lab / "state.json"
    try:
        return LabState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise LabError(f"no lab {lab!r} is up; lab list shows those that are") from error


def all_states() -> Iterator[LabState]:
    """Every lab this user has notes of, alive or not."""
    for path in sorted(state_root().glob("*/state.json")):
        try:
            yield load_state(path.parent.name)
        except LabError:
            shutil.rmtree(path.parent, ignore_errors=True)


def processes(state: LabState) -> set[int]:
    """All processes of a lab's hosts: by namespace, by control group, by environment."""
    found: set[int] = set()
    for group in state.groups.values():
        found |= members(Path(group))
    inodes = {_inode(NETNS_DIR / namespace) for namespace in state.namespaces.values()} - {0}
    if inodes:
        found |= {pid for pid in _pids() if _inode(Path(f"/proc/{pid}/ns/net")) in inodes}
    # A process on its way into its host is known by its environment only.
    found |= {pid for pid in _pids() if _belongs(pid, state.lab)}
    return found - {os.getpid(), state.router_pid}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _belongs(pid: int, lab: str) -> bool:
    """Whether a process was started for the lab: its environment says so."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"LAB_ID={lab}".encode() in environment


def kill_processes(state: LabState, patience_s: float = 3.0) -> None:
    """SIGKILL to every process of the hosts until none is left."""
    deadline_s = time.monotonic() + patience_s
    while left := processes(state):
        for pid in left:
            signal_if_alive(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return  # zombies of a parent outside, or stuck in the kernel: nothing more to do
        left = {pid for pid in left if start_ticks(pid)}
        if not left:
            return
        time.sleep(0.005)


def tear_down(state: LabState) -> None:
    """Remove everything the lab made, in any state of completeness; repeating it is harmless."""
    kill_processes(state)
    if state.router_pid and state.router_pid != os.getpid() and _is_router(state.router_pid):
        signal_if_alive(state.router_pid, signal.SIGKILL)
    for namespace in state.namespaces.values():
        if (NETNS_DIR / namespace).exists():
            run_ip("netns", "del", namespace, check=False)
    for group in state.groups.values():
        remove_group(Path(group))
    shutil.rmtree(state.folder, ignore_errors=True)


def _is_router(pid: int) -> bool:
    try:
        return b"lab.router" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def clean() -> list[str]:
    """Tear down every lab whose owner is gone; their names."""
    stale = [state for state in all_states() if not state.alive]
    for state in stale:
        tear_down(state)
    return [state.lab for state in stale]


def with_router(state: LabState, pid: int) -> LabState:
    """The notes once the router runs."""
    return replace(state, router_pid=pid)
