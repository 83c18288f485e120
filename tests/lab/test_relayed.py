"""Homes of which none can be called: their workers do not know it, and meet at a relay until a door opens."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.harness import LabFleet, settings_options
from lab.tun import unavailable
from tests.worker.transport.ways.test_tunnels import memory_of

pytestmark = [
    pytest.mark.wan,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=f"namespaces: {unavailable()}"),
]
SETTINGS = ("MICRO_BATCH=2", "n_micro=4", "steps=2000", "eval_batches=0", "checkpoint_every=1000")
# Looks at every packet of its host for some seconds: how many bytes, and whether plain ones are among them.
TAP = """
import json, socket, sys, time
plain, until_s, n_bytes, found = sys.argv[1].encode(), time.monotonic() + float(sys.argv[2]), 0, False
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
    tap.settimeout(0.1)
    while time.monotonic() < until_s:
        try:
            packet = tap.recv(1 << 17)
        except TimeoutError:
            continue
        n_bytes, found = n_bytes + len(packet), found or plain in packet
print(json.dumps([n_bytes, found]))
"""


class Unaware(LabFleet):
    """Workers behind closed doors that were not told so, and a relay that is a process of its own."""

    def _worker(self, host: str) -> list[str]:
        return [argument for argument in super()._worker(host) if argument != "--no-inbound"]

    def _serve_options(self) -> list[str]:
        return ["--no-relay", "--relay", f"{self.lab.address(self.home)}:7702"]

    def start_relay(self) -> None:
        command = [self.python, "-m", "coordinator.cli", "relay", "--listen", "0.0.0.0:7702", "--json"]
        command += ["--key", str(self.folder / "coordinator" / "relay-key")]
        with (self.folder / "relay.log").open("ab") as log:
            env = self._environment()
            self.relay = self.lab.popen(self.home, command, stdout=log, stderr=log, env=env)

    def _prestarted(self, hosts: Sequence[str]) -> dict[str, subprocess.Popen[bytes]]:
        self.start_relay()
        self.processes = super()._prestarted(hosts)
        return self.processes

    def ways(self) -> list[str]:
        return [link.get("way", "") for link in self.status().get("links", [])]

    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["jobs"][-1]
        return found

    def until(self, holds: Any) -> None:
        while not holds():
            time.sleep(0.5)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A job that is under way, loses no step and no plan meanwhile, and computes what an undisturbed one
        does."""
        self.atoll("submit", "examples/gpt.py", *settings_options(SETTINGS), "--detach", "--json")
        self.more_steps(2)
        version = self.job()["plan_version"]
        yield
        self.more_steps(2)
        last = self.job()
        assert (last["state"], last["plan_version"]) == ("training", version), last
        self.atoll("cancel", last["job"], "--json")
        losses = [row for row in self.rows(last["job"]) if row["name"] == "loss"]
        assert [int(row["step"]) for row in losses] == list(range(1, len(losses) + 1))
        undisturbed = self.train("examples/gpt.py", "op_fence", SETTINGS, stop_after=len(losses))
        assert [float(row["value"]) for row in losses] == undisturbed["loss"]

    def tapped(self, plain: str) -> tuple[int, bool]:
        """Bytes that passed the relay's host in some seconds, and whether ``plain`` was among them."""
        tap = self.lab.python(self.home, "-c", TAP, plain, "4", stdout=subprocess.PIPE, text=True)
        n_bytes, found = json.loads(tap.communicate()[0])
        return n_bytes, found

    def more_steps(self, number: int) -> None:
        at = self.job()["step"]
        self.until(lambda: self.job()["step"] >= at + number)


def test_a_job_trains_through_the_relay_over_its_death_and_directly_once_a_door_opens() -> None:
    with Unaware("closed_pair") as fleet, fleet.training():
        assert fleet.ways() == ["relayed", "relayed"]
        # The job's name is in the head of every message between workers.
        plain = fleet.job()["job"]
        assert plain.encode() in memory_of(fleet.processes["home1"].pid), "the search finds what is there"
        for _ in range(3):
            assert plain.encode() not in memory_of(fleet.relay.pid)
        n_bytes, found = fleet.tapped(plain)
        assert (n_bytes > 100_000, found) == (True, False)
        fleet.lab.kill(fleet.relay)
        fleet.start_relay()
        fleet.more_steps(3)
        assert fleet.ways() == ["relayed", "relayed"]
        fleet.lab.open_door("home1")
        fleet.until(lambda: set(fleet.ways()) == {"direct", "reversed"})
        fleet.lab.kill(fleet.relay)  # nobody needs it any more
