"""The coordinator's side of the processes that sum updates: one a federated job, kept warm.

A job's requests are answered one after another; a process that ends, talks nonsense or falls silent
is an event (``AggregatorBroke``), never an exception. It names the client whose update the process was
at, so that nobody gives it that one again. Files it wrote become blobs here, so the store's figures have
one keeper.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from atoll.errors import AtollError, BadFrame, StorageError
from coordinator.aggregation.process import AT, FILES, OOM_SCORE, Asked, tagged, untagged
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.storage.blob_store import BlobStore
from protos.child_pipe import Gone
from protos.child_process import ChildProcess, with_packages

COMMAND = ("-m", "coordinator.aggregation.process")
SILENT_S = 300.0  # at most, and as long again as the bytes of a request take at ...
SLOWEST_BYTES_PER_S = 1e6  # ... the rate that no machine falls below: usual ones do a hundred times that
STDERR = 2

log = structlog.get_logger()


@dataclass(slots=True)
class _Worker:
    """Process of a job, its pending requests, and the thread that talks to the process."""

    asked: asyncio.Queue[Asked] = field(default_factory=asyncio.Queue)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "atoll-aggregator"))
    task: asyncio.Task[None] | None = None
    process: ChildProcess | None = None
    over: bool = False
    at: str = ""  # the client whose update it takes now
    made: set[str] = field(default_factory=set)  # blobs of its last answer, which may not be heard yet


@dataclass(slots=True)
class Aggregators:
    """All processes of a coordinator; every public method belongs to the event loop's thread."""

    blobs: BlobStore
    post: Callable[[ev.AggregatorEvent], None]
    silent_s: float = SILENT_S
    workers: dict[str, _Worker] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def ask(self, request: Asked) -> None:
        """Queue a request; its answer is posted."""
        worker = self.workers.get(request.job)
        if worker is None:
            worker = self.workers[request.job] = _Worker()
            worker.task = asyncio.get_running_loop().create_task(self._run(request.job, worker))
        worker.asked.put_nowait(request)

    def made(self) -> set[str]:
        """Blobs of last answers: another job, over with the same bytes, must not take them away."""
        return {name for worker in self.workers.values() for name in worker.made}

    def close(self, job: str) -> None:
        """End a job's process; nothing of it is posted any more."""
        worker = self.workers.pop(job, None)
        if worker is not None:
            self._later(_ended(worker))

    async def stop(self) -> None:
        """End them all."""
        for job in list(self.workers):
            self.close(job)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _run(self, job: str, worker: _Worker) -> None:
        while True:
            request = await worker.asked.get()
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(worker.thread, self._answer, worker, request)
            if isinstance(answer, ev.AggregatorBroke):
                # What was asked of it it cannot do any more; the job's machine asks anew.
                while not worker.asked.empty():
                    worker.asked.get_nowait()
            if self.workers.get(job) is worker:
                self.post(answer)

    # ------------------------------------------------------------ in the worker's thread

    def _answer(self, worker: _Worker, request: Asked) -> ev.AggregatorEvent:
        worker.at = ""
        if not isinstance(request, do.EvaluateModel):
            worker.made = set()
        try:
            return self._exchange(worker, request)
        except (OSError, Gone, BadFrame) as error:
            process, worker.process = worker.process, None
            code = None if process is None else process.end()
            known = isinstance(error, BadFrame | TimeoutError)
            words = str(error) if known else f"its process ended ({code})"
            return ev.AggregatorBroke(request.job, words, client=worker.at)
        except AtollError as error:
            storage = isinstance(error, StorageError)
            return ev.AggregatorBroke(request.job, str(error), storage=storage)
        except Exception as error:
            log.exception("aggregator.crashed", job=request.job)
            return ev.AggregatorBroke(request.job, repr(error))

    def _exchange(self, worker: _Worker, request: Asked) -> ev.AggregatorEvent:
        """The answer; TimeoutError once nothing was sent for as long as the request allows."""
        process = worker.process
        if process is None or not process.alive:
            if process is not None:  # killed since it answered: its pipe stands open here
                process.end()
            process = worker.process = self._started()
        if worker.over:  # since before it was started
            process.end()
        within_s = self.silent_s + self._bytes_of(request) / SLOWEST_BYTES_PER_S
        try:
            process.pipe.say(tagged(request), within_s)
            while AT in (reply := process.pipe.hear(within_s)):
                worker.at = str(reply[AT])
        except TimeoutError:
            raise TimeoutError(f"its process said nothing for {within_s:.0f} s") from None
        answer: ev.AggregatorEvent = untagged(reply)
        self._take(worker, answer, reply[FILES])
        return answer

    def _started(self) -> ChildProcess:
        blobs = self.blobs
        places = (str(blobs.root), blobs.url, str(blobs.partial))
        # Its standard output is the coordinator's error stream: a library's prints are none of its answers.
        return ChildProcess(COMMAND, with_packages(os.environ), places, stdout=STDERR, oom_score=OOM_SCORE)

    def _bytes_of(self, request: Asked) -> int:
        """Return the bytes to be read for it, as far as they are here."""
        match request:
            case do.OpenAggregator():
                blobs = [request.spec.dag_hash, *request.spec.tensors.values(), request.state]
            case do.AggregateRound():
                blobs = [update.update for update in request.updates.values()]
                blobs += [sums.blob for sums in request.sums.values()]
            case do.EvaluateModel():
                blobs = []  # it says of each batch that it begins it
        return sum(self.blobs.held(name) for name in blobs if name)

    def _take(self, worker: _Worker, answer: ev.AggregatorEvent, files: Sequence[str]) -> None:
        """Make the files of an answer blobs."""
        match answer:
            case ev.AggregatorOpened(model=model):
                made = [model]
            case ev.Aggregated(state=state, model=model, delta=delta):
                made = [blob for blob in (state, model, delta) if blob is not None]
            case _:
                made = []
        for blob, path in zip(made, files, strict=True):
            worker.made.add(blob.hash)
            self.blobs.adopt(Path(path), blob.hash, blob.size)


async def _ended(worker: _Worker) -> None:
    worker.over = True
    if worker.task is not None:
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
    if worker.process is not None:
        await asyncio.to_thread(worker.process.end)
    worker.thread.shutdown(wait=False)
