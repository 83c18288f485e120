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
from coordinator.cli.processes import Processes, Start, start_here
from coordinator.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protos import atoll_control_pb2 as pb

COORDINATOR = "coordinator"
LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.1
MAX_STARTS = 20  # of one worker, after the first

log = structlog.get_logger()


class LocalFleet:
    """``workers`` worker daemons with these options of `atoll-worker join`, and a coordinator on loopback.

    Use it in ``with``; nothing of it is left behind but ``keep``, a folder for logs and states. AtollError
    when one of them ends early. ``before``: called before anybody joins, with the folders of all workers'
    states. ``again``: workers that end are started again. ``hosts``: where each worker runs, and its name;
    ``start``: starts one there; ``address``: of this machine as they reach it. ``in_order``: they join one
    after the other, as where that is the order of their partitions of data. ``awaited``: the block begins
    when they are there; else it calls ``joined``.
    """

    def __init__(
        self,
        workers: int,
        options: Sequence[str],
        *,
        keep: Path | None = None,
        before: Callable[[Processes, Sequence[Path]], None] = lambda processes, states: None,
        again: bool = False,
        hosts: Sequence[str] = (),
        start: Start = start_here,
        address: str = LOOPBACK,
        in_order: bool = True,
        awaited: bool = True,
    ) -> None:
        self.names = tuple(hosts) or tuple(f"host{number}" for number in range(workers))
        self._options, self._before, self._again = options, before, again
        self._address, self._in_order, self._awaited = address, in_order, awaited
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-local-")
        self.folder = keep or Path(self._folder.name)
        self._processes = Processes(self.folder, start)
        self._commands: dict[str, list[str]] = {}
        self._over, self._tending = threading.Event(), threading.Thread(target=self._tend, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._before(self._processes, [self.folder / name for name in self.names])
            self._serve(f"{self._address}:0")
            self.client: Client = connect(state_dir=self.folder / COORDINATOR)
            names, self.names = self.names, ()
            for name in names:
                self.join(name)
                if self._in_order:
                    self._await(len(self.names))
            if self._awaited:
                self.joined()
            if self._again:
                self._tending.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._tending.is_alive():
            self._tending.join()
        if hasattr(self, "client"):
            self.client.close()
        self._processes.close()
        with suppress(OSError):
            self._folder.cleanup()

    def joined(self) -> None:
        """Wait until every worker has joined. Raises what keeps one from it."""
        self._await(len(self.names))

    def log(self, name: str) -> str:
        """Return the end of what ``coordinator`` or a ``hostN`` wrote."""
        return self._processes.log(name)

    def start_again(self, name: str) -> None:
        """Start ``coordinator``, which answers where it did, or a worker, with the state that it had."""
        host = "" if name == COORDINATOR else name
        self._processes.daemon(name, host, self._commands[name])

    def join(self, name: str) -> None:
        """Start another worker; it is not waited for."""
        state = ["--state-dir", str(self.folder / name)]
        join = ["-m", "worker.cli", "join", *self._entry, "--name", name]
        listen = LOOPBACK if self._address == LOOPBACK else "0.0.0.0"  # noqa: S104 - one of a host of its own
        self._commands[name] = [
            *join, "--listen", f"{listen}:0", "--device", "cpu", *self._options, *state,
        ]  # fmt: skip
        self.names = (*self.names, name)
        self.start_again(name)

    def ended(self) -> list[str]:
        """Return the names of ended processes."""
        return self._processes.ended()

    def _serve(self, listen: str) -> None:
        serve = ["-m", "coordinator.cli", "serve", "--state-dir", str(self.folder / COORDINATOR), "--json"]
        self._processes.daemon(COORDINATOR, "", [*serve, "--listen", listen])
        started = json.loads(self._processes.first_line(COORDINATOR))
        address, work_port = str(started["address"]), started["work_address"].rpartition(":")[2]
        self._commands[COORDINATOR] = [*serve, "--listen", address, "--work-port", work_port]
        self._entry = [address, "--token", str(started["join_token"])]

    def _tend(self) -> None:
        """Thread: start workers again that have ended."""
        left = dict.fromkeys(self.names, MAX_STARTS)
        while not self._over.wait(LOOK_EVERY_S):
            for name in self._processes.ended():
                if left.get(name, 0) and not self._over.is_set():
                    left[name] -= 1
                    log.warning("worker.started_again", worker=name, log=str(self._processes.log_path(name)))
                    self.start_again(name)

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
