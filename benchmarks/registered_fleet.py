"""A live fleet in the lab whose workers hold data, and what federated jobs there have shown."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CommandFailed, LabFleet, settings_options
from worker.data.policy import OPEN
from worker.data.registry import add_dataset

Row = Mapping[str, str]


class RegisteredFleet(LabFleet):
    """The coordinator and one worker a host, each with its own part of every data set.

    ``datasets`` by name: a safetensors file for each worker, in the scenario's order of joining.
    """

    def __init__(self, scenario: str, datasets: Mapping[str, Sequence[Path]]) -> None:
        super().__init__(scenario)
        self._datasets = datasets

    def _prestarted(self, hosts: Sequence[str]) -> dict[str, subprocess.Popen[bytes]]:
        for name, paths in self._datasets.items():
            for host, path in zip(self.scenario.join_order, paths, strict=True):
                add_dataset(self.folder / host, name, path, [], policy=OPEN)
        return super()._prestarted(hosts)

    def federate(self, job: str, settings: Mapping[str, Any]) -> Sequence[Row]:
        """Submit a federated job, wait for its end, return the rows of its metrics."""
        options = settings_options(f"{key}={value}" for key, value in settings.items())
        name = self.atoll("submit", job, *options, "--detach", "--json")["job"]
        updates = self._watched(name, None)
        if updates[-1]["state"] != "finished":
            raise CommandFailed(f"{name} ended {updates[-1]['state']}: {updates[-1].get('reason')}")
        return self.rows(name)
