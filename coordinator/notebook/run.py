"""A run: a job on a fleet, as an object that is watched, cancelled and exported."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import AtollError, StorageError, UsageError
from atoll.worker_names import distinct
from coordinator.client.chrome_trace import chrome_trace
from coordinator.client.client import Client, Exported, KeptStep, check_ended
from coordinator.loggers.plugin import Logger, Loggers, RunFacts, open_logger
from coordinator.notebook.live import showing
from coordinator.notebook.metrics import LOSS, Metrics
from coordinator.notebook.progress import Progress, progress_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from protos import atoll_control_pb2 as pb

LOSSES_KEPT = 2000  # of a run, for its curve
LOGS = Path("atoll-logs")
"""Folder, below the working one, of loggers that keep files."""
ONE_FILE = ".safetensors"


@dataclass
class PassedOn:
    """Loggers of a run, and the state in which it was last seen."""

    loggers: Loggers
    state: str = "unwatched"

    def take(self, update: pb.JobUpdate) -> Progress:
        """Pass an update's figures on; returns it as a Progress."""
        found = progress_of(update)
        self.state = found.state
        self.loggers.add(found.points)
        return found


class Run:
    """A job on a fleet. ``job``: the coordinator's name of it, by which `atoll watch` knows it too.

    It needs this program only to be watched: it goes on when the program ends, and ``fleet.run(NAME)``
    finds it again. Calls raise errors of ``atoll.errors``.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        name: str,
        module: nn.Module | None = None,
        loggers: Sequence[str | Logger] = (),
    ) -> None:
        self.job, self.name = job, name
        self._client, self._module, self._loggers = client, module, tuple(loggers)
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._last_step = -1
        self._seen: pb.JobUpdate | None = None

    def __repr__(self) -> str:
        return f"<Run {self.job} ({self.name})>"

    def _repr_html_(self) -> str:
        try:
            return self.status().shown(list(self._losses))
        except AtollError as error:
            return Progress(self.job, self.name, "not known", str(error), 0, 0).shown()

    def status(self) -> Progress:
        """Return how far it is now. UsageError where its owner had it forgotten."""
        found = [update for update in self._client.status().jobs if update.job == self.job]
        if not found:
            raise UsageError(f"the coordinator knows no job {self.job!r} any more")
        return progress_of(found[0])

    def updates(self, loggers: Sequence[str | Logger] = ()) -> Iterator[Progress]:
        """Yield its progress as it changes, from the first figure on, until it has ended.

        ``loggers``: names of plug-ins or loggers that take its figures, beside those of ``train``. Goes on
        after a restart of the coordinator.
        """
        with self.logging([*self._loggers, *loggers]) as passed_on:
            for update in self._client.watch(self.job):
                self._seen, found = update, passed_on.take(update)
                self._keep(found)
                yield found

    @contextmanager
    def logging(self, loggers: Sequence[str | Logger]) -> Iterator[PassedOn]:
        """Open loggers, names of plug-ins or objects, for updates of this run; they are closed at the end."""
        facts = RunFacts(self.job, self.name, LOGS / self.job)
        opened = Loggers()
        found = PassedOn(opened)
        try:
            for one in loggers:
                opened.loggers.append(open_logger(one, facts) if isinstance(one, str) else one)
            yield found
        finally:
            opened.close(found.state)

    def progress(self, loggers: Sequence[str | Logger] = ()) -> Progress:
        """Show it live until it has ended, and return its last update; ``loggers`` as of ``updates``.

        JobFailed unless it finished. An interrupt ends the showing alone.
        """
        last: Progress | None = None
        try:
            with showing() as show:
                for last in self.updates(loggers):
                    show(last, list(self._losses))
        except KeyboardInterrupt:
            print(f"{self.job} goes on; atoll.connect().run({self.job!r}) finds it again")
            raise
        return self._finished(last)

    def wait(self) -> Progress:
        """Wait until it has ended, and return its last update. JobFailed unless it finished."""
        last = deque(self.updates(), maxlen=1)
        return self._finished(last[0] if last else None)

    def cancel(self) -> Progress:
        """Stop it; its last checkpoint stays."""
        return progress_of(self._client.cancel(self.job))

    def metrics(self) -> Metrics:
        """Return every figure that was measured so far."""
        return Metrics.of(self.job, self._client.metrics(self.job))

    def logs(self, *, follow: bool = False) -> Iterator[pb.LogLine]:
        """Yield lines of its log, oldest first; ``follow``: and new ones as they arrive."""
        return self._client.logs(self.job, follow=follow)

    def weights(self, step: KeptStep = None) -> dict[str, Tensor]:
        """Return its newest weights as a state dict of the module that was trained.

        ``step``: of this kept checkpoint, or "best": of the one nearest to the best held-out loss.
        """
        return dict(self._client.weights(self.job, step=step).tensors)

    def export(
        self, path: str | PathLike[str], step: KeptStep = None, *, module: nn.Module | None = None
    ) -> Exported:
        """Write its newest weights, or those of ``step`` as of ``weights``.

        A path that ends in .safetensors becomes one file, any other a folder: by ``save_pretrained`` where
        the module has it, else with one file in it, model.safetensors. ``module``: the one that was trained,
        where it was not ``train`` of this program that submitted it. StorageError where the disk refuses.
        """
        from coordinator.client.export import Format

        target = Path(path)
        own = module if module is not None else self._module
        if target.suffix == ONE_FILE:
            return self._client.export(self.job, target, step=step)
        if own is not None and hasattr(own, "save_pretrained"):
            return self._client.export_folder(self.job, target, own, Format.HF, step=step)
        return self._client.export(self.job, target / f"model{ONE_FILE}", step=step)

    def trace(self, path: str | PathLike[str] = "trace.json") -> Path:
        """Write its timeline for Perfetto. UsageError where nothing was recorded yet."""
        spans = self._client.trace(self.job)
        if not spans:
            raise UsageError(f"{self.job} has no recorded spans yet; try again once it trains")
        target = Path(path).expanduser()
        try:
            target.write_text(json.dumps(chrome_trace(self.job, spans, names(self._client))))
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror}") from None
        return target

    def _keep(self, found: Progress) -> None:
        for point in found.points:
            if point.name == LOSS and point.step > self._last_step:
                self._last_step = point.step
                self._losses.append(point.value)

    def _finished(self, last: Progress | None) -> Progress:
        if last is None or self._seen is None:
            raise UsageError(f"the coordinator knows no job {self.job!r} any more")
        check_ended(self._seen)
        return last


def names(client: Client) -> dict[str, str]:
    """Return the names for people of the fleet's workers, by id."""
    return distinct({worker.worker: worker.name for worker in client.status().workers})
