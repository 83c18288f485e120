"""Hosts whose address changes while they train: the session, and links direct and relayed, go on."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from typing import Any

import pytest

from coordinator.config import Liveness
from lab.check import PORT
from lab.tun import unavailable
from lab.world import Lab
from tests.lab.test_lab import pair_of_hosts, serve_meters
from tests.lab.test_relayed import Unaware
from tests.patience import HUNG_S

pytestmark = [
    pytest.mark.wan,
    pytest.mark.skipif(unavailable() is not None, reason=f"namespaces: {unavailable()}"),
]
TALK = (
    "import socket,sys\n"
    "for line in sys.stdin:\n"
    "  where=line.strip()\n"
    "  try:\n"
    "    if where: s=socket.create_connection((where,int(sys.argv[1])),float(sys.argv[2])); s.sendall(b'E')\n"
    "    s.settimeout(float(sys.argv[2])); s.sendall(b'x'); print(len(s.recv(1)),flush=True)\n"
    "  except OSError: print('lost',flush=True)\n"
)


class Talker:
    """A process in a host that sends a byte and waits for its echo."""

    def __init__(self, lab: Lab, host: str, within_s: float) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = lab.python(host, "-c", TALK, str(PORT), str(within_s), **pipes)

    def says(self, where: str = "") -> str:
        """``1`` where an echo comes, on the connection there is or a new one to ``where``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(where + "\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline().strip())


def test_a_host_that_moves_is_reached_where_it_is_now_and_its_connections_fall_silent() -> None:
    with Lab(pair_of_hosts(100, 1)) as lab:
        serve_meters(lab, "b")
        patient, hasty = Talker(lab, "a", HUNG_S), Talker(lab, "a", 0.5)
        old = lab.address("b")
        assert patient.says(old) == "1"
        assert lab.move("b") == lab.address("b") != old
        assert hasty.says(old) == "lost"
        assert patient.says(lab.address("b")) == "1"
        # What is dialled from the other end comes from the address there is.
        lab.move("a", "10.80.9.9")
        assert patient.says(lab.address("b")) == "1"
        for one in (patient, hasty):
            lab.kill(one.process)
            one.process.communicate()


class Patient(Unaware):
    """A coordinator that gives nobody up because the machine is busy."""

    def _spawn(self, host: str, name: str, command: list[str], stdin: int = subprocess.DEVNULL) -> Any:
        if name == "coordinator":
            command = [
                "tests.lab.patient_coordinator" if part == "coordinator.cli" else part for part in command
            ]
        return super()._spawn(host, name, command, stdin)

    def away_s(self) -> list[float]:
        """Seconds from each move to the session that follows it."""
        lines = (self.folder / "coordinator.log").read_text().splitlines()
        opened = [json.loads(line) for line in lines if '"session.opened"' in line]
        found = []
        for home in self.scenario.join_order:
            back = sorted(at(line["timestamp"]) for line in opened if line["name"] == home)
            for line in (self.folder / f"{home}.log").read_text().splitlines():
                if "worker.moved" in line:
                    moved = at(line.split()[0])
                    found.append(next(time for time in back if time > moved) - moved)
        return found


def at(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["relayed", "direct"])
def test_homes_that_move_in_mid_step_cost_no_step(way: str) -> None:
    with Patient("closed_pair") as fleet, fleet.training():
        if way == "direct":
            for home in ("home1", "home2"):
                fleet.lab.open_door(home)
            fleet.until(lambda: set(fleet.ways()) <= {"direct", "reversed"})
        for home in ("home1", "home2", "home1"):
            fleet.lab.move(home)
            fleet.more_steps(3)
        ways = {"relayed"} if way == "relayed" else {"direct", "reversed"}
        # Both may have dialled the other: each then says "direct".
        fleet.until(lambda: set(fleet.ways()) <= ways)
        away_s = fleet.away_s()
        assert len(away_s) == 3
        # A busy machine may hold up one of them; a silent worker is given up after 2 s.
        assert min(away_s) + Liveness().heartbeat_s < Liveness().dead_after_s, away_s
