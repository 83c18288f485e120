"""The lab without root: every host is an address 127.0.x.y, and workers slow their own links down.

Nothing here touches the kernel. Each process finds in ``ATOLL_SHAPER`` the path of a JSON file
with the rate and delay that ``python -m lab.shaped_worker`` keeps towards each peer:

    {"self": "home1", "peers": {"127.0.1.2": {"mbit": 8, "ms": 40}}, "uplink": {"mbit": 20}}

It is approximate: a host's own uplink is shared by the flows of one process, a group's uplink and
all downlinks are not (each pair gets the smallest rate on its path). Nothing is lost, and neither
inbound=false nor CPU quotas are enforced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.reader import read_scenario
from lab.scenario import Scenario
from lab.state import all_states, kill_processes, new_state, save_state, tear_down
from lab.tun import LabError
from lab.world import Hosts, Stats, new_name

MAX_LABS = 200


class LoopbackLab(Hosts):
    """The same calls as ``Lab``; ``approximate`` is True."""

    approximate = True

    def __init__(self, scenario: Scenario | str | Path) -> None:
        """Nothing is made before ``with`` or ``start``."""
        if not isinstance(scenario, Scenario):
            scenario = read_scenario(scenario)
        taken = {next(iter(state.addresses.values())).split(".")[2] for state in all_states()}
        free = [number for number in range(1, MAX_LABS + 1) if str(number) not in taken]
        if not free:
            raise LabError(f"{MAX_LABS} loopback labs are up; lab clean removes those left behind")
        addresses = {host: f"127.0.{free[0]}.{n}" for n, host in enumerate(scenario.host_names, 1)}
        super().__init__(new_state(new_name(), scenario, addresses))

    def start(self) -> Self:
        """Write the notes and the shaper files."""
        save_state(self.state)
        for host in self.scenario.host_names:
            self._write_shaper(host)
        return self

    def shaper_path(self, host: str) -> Path:
        """The file that ``ATOLL_SHAPER`` names in that host's processes."""
        return self.state.folder / f"{host}.shaper.json"

    def _write_shaper(self, host: str) -> None:
        path = self.shaper_path(host)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(shaper_of(self.scenario, host, self.addresses)), encoding="utf-8")
        temporary.replace(path)

    def environment(self, host: str) -> dict[str, str]:
        """As in a namespace, and the shaper's file."""
        return {**super().environment(host), "ATOLL_SHAPER": str(self.shaper_path(host))}

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command as it is: hosts differ by address only."""
        self.scenario.host(host)
        return list(command)

    def _apply_link(self, source: str, target: str, figures: Mapping[str, float]) -> None:
        """Changes reach processes that read their shaper file again; see ``set_link``."""

    def set_link(self, a: str, b: str, **figures: Any) -> None:
        """Change a pair's figures and the files; running transports may have read theirs already."""
        super().set_link(a, b, **figures)
        self._write_shaper(a)
        self._write_shaper(b)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """There is no router on loopback."""
        raise LabError(f"a loopback lab cannot {do}: it has no router; run as root for the real lab")

    def stats(self) -> Stats:
        """Nothing is counted on loopback: all zero."""
        return Stats(time.monotonic(), 0.0, "none", {}, {})

    def close(self) -> None:
        """Kill every process and remove the files."""
        self.end_started()
        kill_processes(self.state)
        tear_down(self.state)

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()


def shaper_of(scenario: Scenario, host: str, addresses: Mapping[str, str]) -> dict[str, object]:
    """The shaper file's contents: rate and one-way delay from ``host`` to every other."""
    own = f"host:{host}:up"
    peers: dict[str, dict[str, float]] = {}
    for other in scenario.host_names:
        if other != host:
            rates = [mbit for name, mbit, _ in scenario.path(host, other) if name != own]
            peers[addresses[other]] = {"mbit": min(rates), "ms": scenario.link(host, other).ms}
    up_mbit = scenario.host(host).uplink.up_mbit
    # A peer that dialled us is known by its name, not by an address.
    names = {addresses[other]: other for other in scenario.host_names if other != host}
    shaper: dict[str, object] = {"self": host, "peers": peers, "names": names}
    if up_mbit is not None:
        shaper["uplink"] = {"mbit": up_mbit}
    return shaper
