"""Snapshots of a stage: written to this disk, then stored, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.messages.from_worker import StateStored
from worker.cancel import Cancel, Cancelled
from worker.compute.bases import Bases
from worker.compute.tasks import Tasks, Thread
from worker.stage import tensor_blobs

if TYPE_CHECKING:
    from torch import Tensor

    from worker.blobs import BlobFile
    from worker.context import ComputeContext
    from worker.stage.assignment import Assignment
    from worker.stage.steps.run import StageRun

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stage after a step; ``keep``: it stays on this disk."""

    assignment: Assignment
    step: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Takes snapshots and reports each, stored or failed. ``explain``: the words for an error."""

    context: ComputeContext
    tasks: Tasks
    post: Callable[[StateStored], None]
    explain: Callable[[Exception], str]
    bases: Bases

    def take(self, run: StageRun, step: int, *, keep: bool = False) -> None:
        """Have the state after ``step`` stored; ``keep``: it stays on this disk."""
        made = Snapshot(run.at(step), step, keep)
        tensors, read = run.lend()

        def write(cancel: Cancel) -> None:
            nonlocal tensors
            try:
                self.write(made, tensors, cancel)
            finally:
                tensors = {}
                read()

        self.tasks.submit(write, Thread.WRITE)

    def write(self, made: Snapshot, tensors: dict[str, dict[str, Tensor]], cancel: Cancel) -> None:
        """Write the tensors; another thread stores them, so that a slow link holds up no later state."""
        with self._reporting(made):
            files = tensor_blobs.write_tensors(tensors, self.context.scratch, cancel)
            self.tasks.submit(partial(self._store, made, files), Thread.STORE)

    def _store(self, made: Snapshot, files: Mapping[str, BlobFile], cancel: Cancel) -> None:
        with self._reporting(made):
            try:
                coded = files if made.keep else self.bases.coded(made.assignment.job, files, cancel)
            except BaseException:
                tensor_blobs.remove(files)
                raise
            taken = self.bases.taker(made.assignment.job)
            tensors = tensor_blobs.store_files(self.context.blobs, coded, cancel, taken, keep=made.keep)
            self._report(made, tensors)

    @contextmanager
    def _reporting(self, made: Snapshot) -> Iterator[None]:
        """Report a failure as that of storing this state."""
        job, step = made.assignment.job, made.step
        try:
            yield
        except Cancelled:
            raise
        except AtollError as error:
            log.warning("state.not_stored", job=job, step=step, reason=str(error))
            self._report(made, {}, str(error))
        except Exception as error:  # whatever happens, the thread has the next state to store
            reason = self.explain(error)
            log.error("state.not_stored", job=job, step=step, reason=reason, exc_info=True)
            self._report(made, {}, reason)

    def _report(self, made: Snapshot, tensors: Mapping[str, str], reason: str = "") -> None:
        job, version, step = made.assignment.job, made.assignment.version, made.step
        self.post(StateStored(job, version, step, tensors, reason, kept=made.keep))
