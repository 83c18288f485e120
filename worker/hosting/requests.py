"""What a compute process asks for that takes time: blobs, micro-batches, connections; a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from atoll.bounded import MAX_ITEMS
from atoll.errors import AtollError, BadFrame, ConnectionFailed
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos import bounds
from worker.blobs import BlobFile, DeltaFile
from worker.cancel import Cancel, Cancelled
from worker.hosting import TUNED
from worker.session.pipe import OF_STAGE
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from atoll.messages.to_worker import PeerLink
    from worker.blobs import BlobStore
    from worker.data.pinned import PinnedRows
    from worker.hosting.contained.child import Child
    from worker.session import events
    from worker.transport.network import PeerNetwork

log = structlog.get_logger()

MAX_REQUESTS = 64
MAX_BLOBS = 1 << 20

OF_ASSIGNMENT = frozenset({"wanted", "outgoing", "connect", "forget", "batches", "applied"})

Batches = Callable[[control.BatchRequest], Iterable[control.Batch]]
"""The data provider's answer to a request."""
Work = Callable[[Cancel, "Progress"], int]
"""Does what was asked, reports bytes so far, returns the answer's figure."""
Keep = Callable[[Sequence[BlobFile], Cancel], None]
Departing = Callable[[Sequence[BlobFile], Callable[[], int], str], AbstractContextManager[None]]
"""Decides whether files may leave for a worker, "" for the store, and logs how many bytes did; raises
AtollError where they may not."""


@dataclass(frozen=True)
class HostPorts:
    """What the daemon does for its compute processes."""

    network: PeerNetwork
    blobs: BlobStore
    batches: Batches
    post: Callable[[events.Event], None]  # hears of what becomes of the work
    send: Callable[[control.FromWorker], None]
    fetch_from: Callable[[Sequence[PeerLink]], None] = lambda holders: None  # before the store is asked
    beside_s: Callable[[], float] = lambda: 0.0  # that computing lost to this process since the last call
    keep: Keep | None = None  # parts of a stage's snapshots, on this machine's disk
    resized: Callable[[], None] = lambda: None  # the device has more processes than before, or fewer


def unlogged(
    files: Sequence[BlobFile], left: Callable[[], int], borrower: str
) -> AbstractContextManager[None]:
    """Of jobs that touch no data owner's data."""
    return nullcontext()


def of_assignment(m: pb.FromCompute) -> bool:
    """Whether a message concerns the stage that is held, or was."""
    kind = m.WhichOneof("body")
    return m.said.WhichOneof("body") in OF_STAGE if kind == "said" else kind in OF_ASSIGNMENT


class Progress:
    """Counts the bytes of a request, and reports them now and then."""

    def __init__(self, child: Child, number: int) -> None:
        self._child, self._number, self._said_s = child, number, 0.0
        self.bytes = 0

    def __call__(self, nbytes: int) -> None:
        """So many bytes more have come or gone."""
        self.bytes += nbytes
        if time.monotonic() - self._said_s >= TUNED.report_s:
            self._said_s = time.monotonic()
            transferred = pb.Transferred(request=self._number, bytes=self.bytes)
            self._child.send(pb.ToCompute(transferred=transferred))


class Served:
    """Requests of one compute process that are under way."""

    def __init__(
        self,
        child: Child,
        blobs: BlobStore,
        batches: Batches,
        departing: Departing = unlogged,
        keep: Keep | None = None,
    ) -> None:
        """``departing`` is entered around every upload; ``keep``: as in ``HostPorts``, None: nothing is."""
        self._child, self._blobs, self._batches = child, blobs, batches
        self._departing, self._keep = departing, keep
        self._lock = threading.Lock()
        self._open: dict[int, Cancel] = {}

    def fetch(self, m: pb.FetchBlobs) -> None:
        """Bring blobs into the cache. Raises BadFrame."""
        wanted = {
            bounds.blob_hash("blob", blob.hash): blob.size
            for blob in bounds.count("blobs", list(m.blobs), MAX_BLOBS)
        }

        def work(cancel: Cancel, progress: Progress) -> int:
            self._blobs.fetch(wanted, cancel, progress)
            return progress.bytes

        self.start(m.request, work)

    def fetch_near(self, m: pb.FetchNear) -> None:
        """Bring what a worker of the same site lends into the cache. Raises BadFrame."""
        holder, blobs = bounds.name("holder", m.holder), bounds.count("blobs", list(m.blobs), MAX_BLOBS)
        wanted = {bounds.blob_hash("blob", blob.hash): blob.size for blob in blobs}

        def work(cancel: Cancel, progress: Progress) -> int:
            self._blobs.fetch_near(holder, wanted, cancel, progress)
            return progress.bytes

        self.start(m.request, work)

    def lend(self, m: pb.LendBlob, gateway: str) -> None:
        """Lend an update to ``gateway``, and what is fetched to every neighbour. Raises BadFrame."""
        blob, file = bounds.blob_hash("blob", m.file.hash), None
        if m.file.path:
            file = BlobFile(self._own(m.file.path), blob, m.file.size)
            if not gateway or m.borrower != gateway:
                raise BadFrame(f"an update lent to {m.borrower[:64]!r}; its gateway is {gateway!r}")

        def work(cancel: Cancel, progress: Progress) -> int:
            if file is None:
                self._blobs.lend(blob, cancel)
                return 0
            with self._departing([file], lambda: progress.bytes, gateway):
                self._blobs.lend(blob, cancel, file, gateway)
                progress(file.size)
            return 0

        self.start(m.request, work)

    def store(self, m: pb.StoreFiles) -> None:
        """Send files of the process's own folders to the store. Raises BadFrame."""
        files = [
            BlobFile(self._own(file.path), bounds.blob_hash("blob", file.hash), file.size, self._delta(file))
            for file in bounds.count("files", list(m.files), MAX_ITEMS)
        ]

        keep = self._keep
        if m.keep and keep is None:
            raise BadFrame("a snapshot to be kept, by a process that computes no stage")

        def work(cancel: Cancel, progress: Progress) -> int:
            if m.keep and keep is not None:
                keep(files, cancel)
                return 0
            with self._departing(files, lambda: progress.bytes, ""):
                return self._blobs.store(files, cancel, progress, new=m.new)

        self.start(m.request, work)

    def batches(self, m: pb.FetchBatches, held: str, rows: PinnedRows | None = None) -> None:
        """Send micro-batches of the job ``held`` as they come, of ``rows`` where its data stay here; those of
        another were asked for before the process heard that it is released."""
        if m.batches.job != held:
            return self._decline(m.request)
        child, batches = self._child, self._batches if rows is None else rows.batches

        def work(cancel: Cancel, _: Progress) -> int:
            for batch in batches(m.batches):
                while not child.has_room(TUNED.request_room_s):
                    cancel.check()
                cancel.check()
                child.send(pb.ToCompute(batch=pb.FetchedBatch(request=m.request, batch=batch)))
            return 0

        self.start(m.request, work)

    def left_over(self, m: pb.FromCompute) -> None:
        """Answer what was sent before the process heard that another assignment follows, perhaps of the same
        job: nothing is done for it any more. Raises BadFrame."""
        match m.WhichOneof("body"):
            case "outgoing":
                self._child.freed(m.outgoing.offset, m.outgoing.size)
            case "connect":
                self._decline(m.connect.request)
            case "batches":
                self._decline(m.batches.request)

    def _decline(self, number: int) -> None:
        def work(cancel: Cancel, _: Progress) -> int:
            raise Cancelled("of an assignment that is over")

        self.start(number, work)

    def start(self, number: int, work: Work) -> None:
        """Do it in a thread, and answer. Raises BadFrame for more than may be under way."""
        cancel = Cancel()
        with self._lock:
            if len(self._open) >= MAX_REQUESTS or number in self._open:
                raise BadFrame(f"request {number} beside {len(self._open)} others")
            self._open[number] = cancel
        name = f"atoll-request-{number}"
        threading.Thread(target=self._serve, args=(number, cancel, work), name=name, daemon=True).start()

    def cancel(self, number: int) -> None:
        """Give a request up."""
        with self._lock:
            cancel = self._open.get(number)
        if cancel is not None:
            cancel.set("cancelled")

    def cancel_all(self, reason: str) -> None:
        """Give every request up."""
        with self._lock:
            cancels = list(self._open.values())
        for cancel in cancels:
            cancel.set(reason)

    def _serve(self, number: int, cancel: Cancel, work: Work) -> None:
        answer = pb.Answer(request=number)
        try:
            answer.bytes = work(cancel, Progress(self._child, number))
        except Cancelled:
            answer.kind = "ConnectionFailed"
            answer.error = "cancelled"
        except PeerLost as lost:
            answer.kind, answer.error, answer.peer = ConnectionFailed.__name__, lost.reason, lost.peer
        except AtollError as error:
            answer.kind, answer.error = type(error).__name__, str(error)
        except Exception as error:  # the process waits for an answer
            log.exception("request.broke")
            answer.kind, answer.error = "StorageError", f"{type(error).__name__} in this worker"
        finally:
            with self._lock:
                self._open.pop(number, None)
        self._child.send(pb.ToCompute(answer=answer))

    def _delta(self, file: pb.StoreFile) -> DeltaFile | None:
        if not file.delta_path:
            return None
        delta, base = bounds.blob_hash("delta", file.delta_hash), bounds.blob_hash("base", file.base)
        return DeltaFile(self._own(file.delta_path), delta, file.delta_size, base)

    def _own(self, text: str) -> Path:
        path = Path(text)
        if path.parent not in (self._child.scratch, *self._child.view.read_write) or path.name in ("", ".."):
            raise BadFrame(f"a file to store at {text[:200]!r}, which is not the compute process's own")
        return path
