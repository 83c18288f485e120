"""The worker's part in Flower apps: a stream to the coordinator beside the session, and the runs.

Only a worker whose owner gave --allow-apps has one, and it runs only apps whose hash its owner
accepted. Losing the coordinator stops nothing: runs go on and answer once it is back.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.backoff import Backoff
from atoll.errors import AtollError, BadFrame
from protos import atoll_apps_pb2 as pb
from protos import bounds
from protos.app_signing import signer
from protos.text_limits import clean
from worker.apps.context import AppContext
from worker.apps.parts import Parts
from worker.apps.run import HostedRun
from worker.apps.store import AppStore
from worker.blobs import BlobCache
from worker.config import ANY_APP
from worker.control.stream import ATTEND, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from worker.config import WorkerConfig
    from worker.control.enroll import Membership

log = structlog.get_logger()

MAX_RUNS = 16
MAX_PARTS = 100_000  # that one message refers to
BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 4.0
_STOP_S = 0.5
_MESSAGE = re.compile(r"[A-Za-z0-9_-]{1,100}")


class AppHost:
    """The app runs of this worker. ``make_room``: called before the code of an app is loaded."""

    def __init__(self, config: WorkerConfig, make_room: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._store = AppStore(config.state_dir)
        self._store.sweep(time.time())
        self._context = AppContext(
            config, self._store, self._accepts, self._send, lambda: self._epoch, make_room
        )
        self._incarnation = secrets.randbits(63)
        self._lock = threading.Lock()
        self._runs: dict[int, HostedRun] = {}
        self._stream: Stream | None = None
        self._member: Membership | None = None
        self._channels: dict[int, grpc.Channel] = {}
        self._stopping = threading.Event()
        self._epoch = 0
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MOST_S)

    def attend(self, member: Membership) -> None:
        """Open the stream, if none is open; the session was just welcomed."""
        with self._lock:
            self._member = member
            if self._stream is None and not self._stopping.is_set():
                self._open()

    def moved(self) -> None:
        """This machine has another address: what is open has fallen silent."""
        stream = self._stream
        if stream is not None:
            stream.abandon("this machine's address has changed")

    def consent_changed(self) -> None:
        """The list of accepted apps was changed on the disk."""
        for run in self._all():
            run.consent_changed()

    def stop(self) -> None:
        """End every run's process now; states stay for a return."""
        self._stopping.set()
        runs = self._all()
        for run in runs:
            run.end("the worker leaves", for_good=False)
        deadline_s = time.monotonic() + _STOP_S
        for run in runs:
            run.join(max(0.0, deadline_s - time.monotonic()))
        stream = self._stream
        if stream is not None:
            stream.close(wait=False)

    # ------------------------------------------------------------ the stream

    def _open(self) -> None:
        """The lock is held."""
        member = self._member
        assert member is not None  # noqa: S101 - set before
        self._epoch += 1
        hello = pb.FromNode(hello=pb.AppHello(incarnation=self._incarnation, runs=list(self._runs)))
        self._stream = Stream(
            partial(member.async_channel, self._config),
            member.metadata,
            member.work_address,
            hello,
            self._config.outgoing_messages,
            self._receive,
            self._ended,
            ATTEND,
        )
        for run in self._runs.values():
            run.moved(member)
            run.greet()

    def _ended(self, error: AtollError | None) -> None:
        """A thread of its own: try again after a pause, as long as the worker lives."""
        with self._lock:
            self._stream = None
            self._epoch += 1
            pause_s = self._backoff.next_s()
        if self._stopping.wait(pause_s):
            return
        with self._lock:
            if self._stream is None and not self._stopping.is_set():
                self._open()

    def _send(self, message: pb.FromNode) -> None:
        stream = self._stream
        if stream is not None:
            stream.send(message)

    def _receive(self, message: pb.ToNode) -> None:
        self._backoff.reset()
        try:
            self._handle(message)
        except AtollError as error:
            log.error("app.message_refused", reason=str(error))

    def _handle(self, message: pb.ToNode) -> None:
        kind = message.WhichOneof("body")
        if kind is None:
            raise BadFrame("the coordinator sent a message of a kind this worker does not know; update it")
        body: Any = getattr(message, kind)
        _check_names(kind, body)
        if kind == "offer":
            self._offered(body)
            return
        run = self._runs.get(body.run)
        if run is None:
            return  # ended here, or never offered: the coordinator learns of it when we attend
        match kind:
            case "start":
                run.start(body)
            case "task":
                run.task(body)
            case "cancel":
                run.cancel(list(body.messages))
            case "forget":
                run.forget(list(body.hashes), body.message)
            case "end":
                with self._lock:
                    self._runs.pop(body.run, None)
                run.end(body.reason[:1000])

    def _offered(self, offer: pb.AppOffer) -> None:
        known = self._runs.get(offer.run)
        if known is not None and known.app == offer.app.hash:
            known.greet()
            return
        if known is not None:
            reason = f"run {offer.run:x} is one of another app here, {known.app[:16]}, until that one ends"
            self._send(pb.FromNode(refused=pb.AppRefused(run=offer.run, reason=reason)))
            return
        if len(self._runs) >= MAX_RUNS:
            reason = f"{MAX_RUNS} apps are open on this worker already"
            self._send(pb.FromNode(refused=pb.AppRefused(run=offer.run, reason=reason)))
            return
        name, version = clean(offer.app.name, 200), clean(offer.app.version, 200)
        log.info("app.offered", app=name, version=version, hash=offer.app.hash)
        member = self._member
        assert member is not None  # noqa: S101 - a stream is open
        channel = member.channel(self._config)  # of its own: arrays must not hold up messages
        cache = BlobCache(self._store.new_parts_dir(offer.run), self._config.app_cache_bytes)
        parts = Parts(channel, member.metadata, member.work_address, cache)
        with self._lock:
            self._runs[offer.run] = HostedRun(offer, parts, self._context)

    def _accepts(self, app: pb.AppIdentity) -> bool:
        given = self._config.accept_apps
        here = ANY_APP in given or app.hash in given or signer(app) in given
        return (here and not self._store.is_refused(app.hash)) or self._store.accepts(app)

    def _all(self) -> list[HostedRun]:
        with self._lock:
            return list(self._runs.values())


def _check_names(kind: str, body: Any) -> None:
    """BadFrame for names that are none: here they become names of files."""
    if kind == "offer":
        bounds.blob_hash("app", body.app.hash)
    if kind in ("task", "forget"):
        names = [part.hash for part in body.parts] if kind == "task" else list(body.hashes)
        for name in bounds.count("parts", names, MAX_PARTS):
            bounds.blob_hash("part", name)
        if (kind == "task" or body.message) and not _MESSAGE.fullmatch(body.message):
            raise BadFrame(f"a message's id {body.message[:80]!r}; up to 100 letters, digits, _ and -")
