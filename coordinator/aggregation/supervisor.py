"""The coordinator's side of the processes that sum updates: one a federated job, kept warm.

A job's requests are answered one after another; a process that ends, talks nonsense or falls silent
is an event (``AggregatorBroke``), never an exception; it names the client whose update the process was
at, so that nobody gives it that one again. Files it wrote become blobs here, so the store's figures have
one keeper.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

import atoll
from atoll.errors import AtollError, BadFrame, StorageError
from atoll.opdag import TensorMeta
from coordinator.aggregation.process import AGGREGATE, AT, EVALUATE, LENGTH, OPEN, body_length, frame, parsed
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.storage.blob_store import BlobStore
from protos.convert import encode

COMMAND = ("-m", "coordinator.aggregation.process")
END_WITHIN_S = 1.0
SILENT_S = 300.0  # at most, and as long again as the bytes of a request take at ...
SLOWEST_BYTES_PER_S = 1e6  # ... the rate that no machine falls below: usual ones do a hundred times that
_ROOT = str(Path(atoll.__file__).resolve().parent.parent)

log = structlog.get_logger()

Asked = do.OpenAggregator | do.AggregateRound | do.EvaluateModel


@dataclass(slots=True)
class _Worker:
    """Process of a job and its pending request."""

    asked: asyncio.Queue[Asked]
    task: asyncio.Task[None] | None = None
    process: Process | None = None
    at: str = ""  # the client whose update it takes now
    made: set[str] = field(default_factory=set)  # blobs of its last answer, which may not be heard yet


@dataclass(slots=True)
class Aggregators:
    """All processes of a coordinator; every method belongs to the event loop's thread."""

    blobs: BlobStore
    post: Callable[[ev.AggregatorEvent], None]
    silent_s: float = SILENT_S
    workers: dict[str, _Worker] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def ask(self, request: Asked) -> None:
        """Queue a request; its answer is posted."""
        worker = self.workers.get(request.job)
        if worker is None:
            worker = self.workers[request.job] = _Worker(asyncio.Queue())
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
            worker.at = ""
            if not isinstance(request, do.EvaluateModel):
                worker.made = set()
            try:
                answer = await self._answer(worker, request)
            except (OSError, EOFError, asyncio.IncompleteReadError, BadFrame) as error:
                code = await _killed(worker)
                said = isinstance(error, BadFrame | TimeoutError)
                words = str(error) if said else f"its process ended ({code})"
                answer = ev.AggregatorBroke(job, words, client=worker.at)
            except AtollError as error:
                answer = ev.AggregatorBroke(job, str(error), storage=isinstance(error, StorageError))
            except Exception as error:
                log.exception("aggregator.crashed", job=job)
                answer = ev.AggregatorBroke(job, repr(error))
            if isinstance(answer, ev.AggregatorBroke):
                # What was asked of it it cannot do any more; the job's machine asks anew.
                while not worker.asked.empty():
                    worker.asked.get_nowait()
            if self.workers.get(job) is worker:
                self.post(answer)

    async def _answer(self, worker: _Worker, request: Asked) -> ev.AggregatorEvent:
        if worker.process is None or worker.process.returncode is not None:
            worker.process = await _started()
        n_bytes = await asyncio.to_thread(self._bytes_of, request)
        within_s = self.silent_s + n_bytes / SLOWEST_BYTES_PER_S
        reply = await _exchange(worker, worker.process, self._message(request), within_s)
        job = request.job
        error = reply.get("error")
        match request:
            case do.EvaluateModel(_, at_round):
                if error is not None:
                    return ev.CentrallyEvaluated(job, at_round, None, error=str(error))
                metrics = {str(name): float(value) for name, value in reply["metrics"].items()}
                return ev.CentrallyEvaluated(
                    job, at_round, float(reply["loss"]), metrics, int(reply["n_samples"])
                )
            case _ if error is not None:
                return ev.AggregatorBroke(
                    job, str(error), bool(reply.get("hopeless")), bool(reply.get("storage"))
                )
            case do.OpenAggregator():
                return await self._opened(worker, job, reply)
            case do.AggregateRound():
                return await self._summed(worker, request, reply)

    def _message(self, request: Asked) -> dict[str, Any]:
        match request:
            case do.OpenAggregator():
                return {
                    "what": OPEN,
                    "job": request.job,
                    "spec": base64.b64encode(encode(request.spec)).decode(),
                    "state": request.state,
                    "n_clients": request.n_clients,
                    "blobs": str(self.blobs.root),
                    "blobs_url": self.blobs.url,
                    "scratch": str(self.blobs.partial),
                }
            case do.AggregateRound():
                return {
                    "what": AGGREGATE,
                    "round": request.round,
                    "n_clients": request.n_clients,
                    "least": request.least,
                    "updates": {name: _offered(request, name) for name in request.updates},
                    "sums": {host: asdict(sums) for host, sums in request.sums.items()},
                    "drawn": request.drawn,
                }
            case do.EvaluateModel():
                return {"what": EVALUATE}

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

    async def _opened(self, worker: _Worker, job: str, reply: Mapping[str, Any]) -> ev.AggregatorEvent:
        model = await self._taken(worker, reply["model"])
        if model is None:
            return ev.AggregatorBroke(job, "it opened without a model")
        inputs = {name: TensorMeta(tuple(shape), dtype) for name, (dtype, shape) in reply["inputs"].items()}
        up = tuple(TensorMeta(tuple(shape), dtype) for dtype, shape in reply["up"])
        return ev.AggregatorOpened(job, int(reply["round"]), model, inputs, up)

    async def _summed(
        self, worker: _Worker, request: do.AggregateRound, reply: Mapping[str, Any]
    ) -> ev.AggregatorEvent:
        state, model, delta = [await self._taken(worker, reply[name]) for name in ("state", "model", "delta")]
        dropped = {str(name): str(why) for name, why in reply["dropped"].items()}
        return ev.Aggregated(
            request.job,
            request.round,
            request.attempt,
            state,
            model,
            delta,
            dropped,
            float(reply["took_s"]),
        )

    async def _taken(self, worker: _Worker, told: Mapping[str, Any] | None) -> ev.Blob | None:
        """A file of the process becomes a blob."""
        if told is None:
            return None
        blob = ev.Blob(str(told["hash"]), int(told["size"]))
        worker.made.add(blob.hash)
        await asyncio.to_thread(self.blobs.adopt, Path(told["path"]), blob.hash, blob.size)
        return blob


def _offered(request: do.AggregateRound, name: str) -> dict[str, Any]:
    update = request.updates[name]
    codec, ratio = request.codecs[name]
    return {
        "blob": update.update,
        "n_samples": update.n_samples,
        "steps": update.steps,
        "registered": request.n_samples[name],
        "codec": codec,
        "ratio": ratio,
        "scalars": dict(update.scalars),
        "metrics": dict(update.metrics),
    }


async def _started() -> Process:
    # -P and PYTHONPATH: a file called coordinator.py where we were started must not be taken for ours.
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        *COMMAND,
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        limit=1 << 20,
    )


async def _exchange(
    worker: _Worker, process: Process, message: Mapping[str, Any], within_s: float
) -> dict[str, Any]:
    """The reply to ``message``; TimeoutError once nothing was said for ``within_s``."""
    if process.stdin is None or process.stdout is None:
        raise StorageError("the aggregator has no pipes")
    try:
        async with asyncio.timeout(within_s):
            process.stdin.write(frame(message))
            await process.stdin.drain()
        while True:
            async with asyncio.timeout(within_s):
                length = body_length(await process.stdout.readexactly(LENGTH.size))
                reply = parsed(await process.stdout.readexactly(length))
            if AT not in reply:
                return reply
            worker.at = str(reply[AT])
    except TimeoutError:
        raise TimeoutError(f"its process said nothing for {within_s:.0f} s") from None


async def _killed(worker: _Worker) -> int | None:
    """Make sure that a process which broke is gone; its exit code."""
    process, worker.process = worker.process, None
    return None if process is None else await _exit_code(process)


async def _ended(worker: _Worker) -> None:
    if worker.task is not None:
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
    process = worker.process
    if process is None or process.returncode is not None:
        return
    if process.stdin is not None:
        process.stdin.close()
    await _exit_code(process)


async def _exit_code(process: Process) -> int:
    """The exit code of a process that is to end by itself soon, or else is killed.

    Never killed at once: kill() first polls, and a poll that finds a process just ended takes the exit
    code that asyncio's own watcher waits for, which then reports 255 in its place.
    """
    try:
        return await asyncio.wait_for(process.wait(), END_WITHIN_S)
    except TimeoutError:
        process.kill()
        return await process.wait()
