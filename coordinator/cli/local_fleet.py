"""A coordinator and workers on this machine for the length of one command, each started as a user would."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import structlog

from atoll.errors import AtollError, NoWorkers
from coordinator.cli.demo.processes import Processes
from coordinator.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from protos import atoll_control_pb2 as pb

COORDINATOR = "coordinator"
LOOK_EVERY_S = 0.1
MAX_STARTS = 20  # of one worker, after the first

log = structlog.get_logger()


class LocalFleet:
    """``workers`` worker daemons with these options of `atoll-worker join`, and a coordinator on loopback.

    Use it in ``with``; nothing of it is left behind but ``keep``, a folder for logs and states. AtollError
    when one of them ends early. ``before``: called before anybody joins, with the folders of all workers'
    states. ``again``: workers that end are started again.
    """

    def __init__(
        self,
        workers: int,
        options: Sequence[str],
        *,
        keep: Path | None = None,
        before: Callable[[Processes, Sequence[Path]], None] = lambda processes, states: None,
        again: bool = False,
    ) -> None:
        self._workers, self._options, self._before, self._again = workers, options, before, again
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-local-")
        self.folder = keep or Path(self._folder.name)
        self._processes = Processes(self.folder)
        self._commands: dict[str, list[str]] = {}
        self._over, self._tending = threading.Event(), threading.Thread(target=self._tend, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._before(self._processes, [self.folder / f"host{n}" for n in range(self._workers)])
            address, token = self._serve()
            self.client: Client = connect(state_dir=self.folder / COORDINATOR)
            for number in range(self._workers):
                self._join(f"host{number}", address, token)
                # One after the other: the order in which they join is that of their partitions.
                self._await(number + 1)
            if self._again:
                self._tending.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._tending.is_alive():
            self._tending.join()
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
        command = [*join, "--listen", "127.0.0.1:0", "--device", "cpu", *self._options, *state]
        self._commands[name] = command
        self._processes.daemon(name, name, command)

    def _tend(self) -> None:
        """Thread: start workers again that have ended."""
        left = dict.fromkeys(self._commands, MAX_STARTS)
        while not self._over.wait(LOOK_EVERY_S):
            for name in self._processes.ended():
                if left.get(name, 0) and not self._over.is_set():
                    left[name] -= 1
                    log.warning("worker.started_again", worker=name, log=str(self._processes.log_path(name)))
                    self._processes.daemon(name, name, self._commands[name])

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
