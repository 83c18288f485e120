"""Hosts of a simulation's population as actors of a Ray cluster, in place of processes of this machine."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from atoll.errors import AtollError
from coordinator.cli.on_ray.bundles import Bundle
from coordinator.cli.on_ray.cluster import LEAVE_S, Cluster
from coordinator.cli.on_ray.kept import Order
from coordinator.cli.on_ray.shipped import ShippedFile, shipped
from coordinator.cli.processes import Started, start_here

LOOK_S = 1.0


class RayProcess:
    """A worker on a Ray cluster, as the process that it stands for; ``log``: gets the end of its log."""

    stdout: IO[str] | None = None

    def __init__(self, cluster: Cluster, actor: Any, log: Path) -> None:
        self._cluster, self._actor, self._log = cluster, actor, log
        self._waited: Any = actor.ended.remote()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None as long as Ray keeps the worker."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code. TimeoutExpired as of a process."""
        if self._code is None:
            if not self._cluster.answered(self._waited, timeout):
                raise subprocess.TimeoutExpired("a worker on Ray", timeout or 0.0)
            self._code, words = self._end()
            with suppress(OSError), self._log.open("a") as file:
                file.write(f"{words}\n")
        return self._code

    def terminate(self) -> None:
        """Have the worker leave; its folder goes with it."""
        if self._code is None:
            self._waited = self._actor.leave.remote()

    def kill(self) -> None:
        """End the worker, once it has had its time to leave."""
        self._cluster.answered(self._waited, LEAVE_S)
        self._cluster.kill(self._actor)
        self._code = -9 if self._code is None else self._code

    def _end(self) -> tuple[int, str]:
        try:
            found = self._cluster.answer(self._waited)
        except AtollError as error:
            return error.exit_code, str(error)
        return (found["exit_code"] or 0, found["log"]) if found else (0, "left")


class RayHosts:
    """Starts the hosts of a population on a Ray cluster. Use it in ``with``, around their ``LocalFleet``.

    All hosts get their CPUs together, before the block begins: of simulations that are started at once some
    wait, and none for ever. ``names``: of the hosts; whatever else is started runs on this machine.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Sequence[str],
        cpus: int,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._cluster, self._places = cluster, {name: index for index, name in enumerate(names)}
        self._bundle, self._run = Bundle(cpus), f"simulation-{secrets.token_hex(8)}"
        self._group, self._tell = cluster.group([self._bundle] * len(names)), tell
        self._data: tuple[ShippedFile, ...] | None = None

    def __enter__(self) -> Self:
        try:
            if not self._group.ready(LOOK_S):
                self._tell(
                    f"waiting for {len(self._places)} x {self._bundle.cpus} free CPUs of the Ray cluster"
                )
            while not self._group.ready(LOOK_S):
                pass
        except BaseException:
            self._group.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()

    def start(self, host: str, arguments: Sequence[str], **streams: Any) -> Started:
        """Start a command of Atoll: of a host on the cluster, any other one on this machine."""
        if host not in self._places:
            return start_here(host, arguments, **streams)
        words, state = _without(arguments[arguments.index("join") + 1 :], "--state-dir")
        words, token = _without(words, "--token")
        if self._data is None:
            self._data = shipped(Path(state) / "data", self._cluster.put)
        folder = f"{self._run}/{host}"
        order = Order(tuple(words), {"ATOLL_TOKEN": token}, folder, data=self._data, passing=True)
        actor = self._cluster.keep(host, order, self._bundle, self._group, self._places[host])
        return RayProcess(self._cluster, actor, Path(streams["stderr"].name))


def _without(words: Sequence[str], option: str) -> tuple[list[str], str]:
    """The words without an option, and its value."""
    at = list(words).index(option)
    return [*words[:at], *words[at + 2 :]], words[at + 1]
