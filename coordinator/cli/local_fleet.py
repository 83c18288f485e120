"""A coordinator and workers on this machine for the length of one command, each started as a user would."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from atoll.errors import AtollError, NoWorkers
from coordinator.cli.demo.processes import Processes
from coordinator.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from protos import atoll_control_pb2 as pb

COORDINATOR = "coordinator"
LOOK_EVERY_S = 0.1


class LocalFleet:
    """``workers`` worker daemons with these options of `atoll-worker join`, and a coordinator on loopback.

    Use it in ``with``; nothing of it is left behind. AtollError when one of them ends early.
    """

    def __init__(self, workers: int, options: Sequence[str]) -> None:
        self._workers, self._options = workers, options
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-local-")
        self.folder = Path(self._folder.name)
        self._processes = Processes(self.folder)

    def __enter__(self) -> Self:
        try:
            address, token = self._serve()
            self.client: Client = connect(state_dir=self.folder / COORDINATOR)
            for number in range(self._workers):
                self._join(f"host{number}", address, token)
                # One after the other: the order in which they join is that of their partitions.
                self._await(number + 1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "client"):
            self.client.close()
        self._processes.close()
        with suppress(OSError):
            self._folder.cleanup()

    def log(self, name: str) -> str:
        """Return the end of what ``coordinator`` or a ``hostN`` wrote."""
        return self._processes.log(name)

    def _serve(self) -> tuple[str, str]:
        state = ["--state-dir", str(self.folder / COORDINATOR)]
        self._processes.daemon(
            COORDINATOR, "", ["-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0", "--json", *state]
        )
        started = json.loads(self._processes.first_line(COORDINATOR))
        return str(started["address"]), str(started["join_token"])

    def _join(self, name: str, address: str, token: str) -> None:
        state = ["--state-dir", str(self.folder / name)]
        join = ["-m", "worker.cli", "join", address, "--token", token, "--name", name]
        self._processes.daemon(
            name, name, [*join, "--listen", "127.0.0.1:0", "--device", "cpu", *self._options, *state]
        )

    def _await(self, count: int) -> None:
        while True:
            self._processes.look()
            found = self._seen()
            if sum(worker.state == "pool" for worker in found) >= count:
                return
            if refused := [worker.reason for worker in found if worker.state == "quarantined"]:
                raise NoWorkers(refused[0])
            time.sleep(LOOK_EVERY_S)

    def _seen(self) -> Sequence[pb.WorkerStatus]:
        with suppress(AtollError):  # a busy machine answers later
            return self.client.status().workers
        return ()
