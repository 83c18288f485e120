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
SETTINGS = ("MICRO_BATCH=2", "n_micro=4", "steps=2000", "eval_batches=0", "checkpoint_every=1000")


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
        """A job that is under way, and loses no step and no plan meanwhile."""
        self.atoll("submit", "examples/gpt.py", *settings_options(SETTINGS), "--detach", "--json")
        self.more_steps(2)
        version = self.job()["plan_version"]
        yield
        self.more_steps(2)
        last = self.job()
        assert (last["state"], last["plan_version"]) == ("training", version), last
        self.atoll("cancel", last["job"], "--json")

    def more_steps(self, number: int) -> None:
        at = self.job()["step"]
        self.until(lambda: self.job()["step"] >= at + number, f"{number} steps")


def test_a_job_trains_through_the_relay_over_its_death_and_directly_once_a_door_opens() -> None:
    with Unaware("closed_pair") as fleet, fleet.training():
        assert fleet.ways() == ["relayed", "relayed"]
        fleet.lab.kill(fleet.relay)
        fleet.start_relay()
        fleet.more_steps(3)
        assert fleet.ways() == ["relayed", "relayed"]
        fleet.lab.open_door("home1")
        fleet.until(lambda: set(fleet.ways()) == {"direct", "reversed"}, "a direct way")
        fleet.lab.kill(fleet.relay)  # nobody needs it any more
