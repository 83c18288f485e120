"""Homes of which none can be called: their workers do not know it, and meet at a relay until a door opens."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.harness import HUNG_S, LabFleet, settings_options
from lab.tun import unavailable

pytestmark = [
    pytest.mark.wan,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=f"namespaces: {unavailable()}"),
]
STEPS = 40
SETTINGS = ("MICRO_BATCH=2", "n_micro=4", f"steps={STEPS}", "eval_batches=0", "checkpoint_every=1000")


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

    def _prestarted(self) -> dict[str, subprocess.Popen[bytes]]:
        self.start_relay()
        return super()._prestarted()

    def ways(self) -> list[str]:
        return [link.get("way", "") for link in self.status().get("links", [])]

    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["jobs"][-1]
        return found

    def until(self, holds: Any, what: str) -> None:
        deadline_s = time.monotonic() + HUNG_S
        while not holds():
            assert time.monotonic() < deadline_s, f"{what}: {self.job()} {self.log('coordinator')}"
            time.sleep(0.5)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A job that is under way, and is to end with every step committed under its first plan."""
        self.atoll("submit", "examples/gpt.py", *settings_options(SETTINGS), "--detach", "--json")
        self.until(lambda: self.job()["step"] >= 2, "two steps")
        version = self.job()["plan_version"]
        yield
        self.until(lambda: self.job()["state"] in ("finished", "failed", "cancelled"), "the end")
        last = self.job()
        assert (last["state"], last["step"]) == ("finished", STEPS), last
        assert last["plan_version"] == version, "no step was lost, or a plan made anew"


def test_a_job_trains_through_the_relay_over_its_death_and_directly_once_a_door_opens() -> None:
    with Unaware("closed_pair") as fleet, fleet.training():
        assert fleet.ways() == ["relayed", "relayed"]
        fleet.lab.kill(fleet.relay)
        time.sleep(1.0)
        fleet.start_relay()
        at = fleet.job()["step"]
        fleet.until(lambda: fleet.job()["step"] >= at + 2, "two more steps")
        fleet.lab.open_door("home1")
        fleet.until(lambda: set(fleet.ways()) == {"direct", "reversed"}, "a direct way")
        assert fleet.job()["state"] == "running"
        fleet.lab.kill(fleet.relay)  # nobody needs it any more
