"""An app run on this worker: its owner's consent, the warm process, one task after another.

Everything that takes time happens in the run's own thread. From outside, ``cancel`` and ``end`` act
at once: they kill the process or break off the transfer that the thread waits for.
"""

from __future__ import annotations

import importlib.util
import queue
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AccessDenied, AtollError, BadFrame, StorageError
from hostos.budget import Budget
from protos import app_bundle
from protos import atoll_apps_pb2 as pb
from protos.app_signing import signer
from protos.child_pipe import Gone
from protos.text_limits import LINE_CHARS, LINES_CHARS, LINES_CHARS_PER_S, REASON_CHARS, clean
from worker.apps.code import AppCode, unpack
from worker.apps.parts import Parts
from worker.apps.process import AppProcess
from worker.apps.store import AppStore, KnownApp
from worker.cancel import Cancel, Cancelled
from worker.config import default_state_dir

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership

log = structlog.get_logger()

MAX_LEFT_S = 30 * 86_400.0  # of a message's time to live
LOAD_WITHIN_S = 600.0  # importing an app and all it needs
MAX_KEPT = 64  # replies that may have to be sent again
# Flower's error codes.
APP_RAISED, REPLY_UNAVAILABLE, APP_CRASHED = 2, 4, 8


@dataclass(frozen=True, slots=True)
class AppContext:
    """Everything that the runs on this worker share."""

    config: WorkerConfig
    store: AppStore
    accepts: Callable[[pb.AppIdentity], bool]
    send: Callable[[pb.FromNode], None]
    epoch: Callable[[], int]  # rises with every new stream: what was under way is sent again
    make_room: Callable[[], None] = lambda: None  # called before an app's code is loaded
    printing: Budget = field(default_factory=lambda: Budget(LINES_CHARS, LINES_CHARS_PER_S))

    def printed(self, run: str, line: str) -> None:
        """Log what an app printed, as far as all apps here together may fill the log."""
        if self.printing.take(time.monotonic(), len(line) + LINE_CHARS):
            left_out = self.printing.refused()
            more = {"left_out_before": left_out} if left_out else {}
            log.info("app.printed", run=run, line=line, **more)


@dataclass(slots=True)
class _Task:
    task: pb.AppTask
    epoch: int
    due_s: float  # monotonic
    cancel: Cancel = field(default_factory=Cancel)


@dataclass(slots=True)
class _Kept:
    """A reply that was sent, and the files of its arrays."""

    reply: pb.AppReply
    files: dict[str, Path]

    def remove(self) -> None:
        for path in self.files.values():
            path.unlink(missing_ok=True)


class HostedRun:
    """A run that was offered to this worker; every public method returns at once."""

    def __init__(self, offer: pb.AppOffer, parts: Parts, context: AppContext) -> None:
        self.run = offer.run
        self._app = offer.app
        self._code: AppCode | None = None
        self._parts, self._context = parts, context
        self._came = parts.cache.path("")  # the folder itself
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}  # not yet answered
        self._working: _Task | None = None
        self._ended = Cancel()
        self._process: AppProcess | None = None
        self._outbox = context.store.root / "outbox" / f"{offer.run:x}.{secrets.token_hex(4)}"
        self._standing: pb.FromNode | None = None
        self._start: pb.AppStart | None = None
        self._kept: dict[str, _Kept] = {}  # the newest replies, until the owner has their arrays
        self._thread = threading.Thread(target=self._work, name=f"atoll-app-{offer.run:x}", daemon=True)
        self._todo.put(self._prepare)
        self._thread.start()

    @property
    def app(self) -> str:
        """The hash of the app that this is a run of."""
        return str(self._app.hash)

    # ------------------------------------------------------------ from the stream

    def start(self, start: pb.AppStart) -> None:
        """The run begins with this worker as a node."""
        self._todo.put(lambda: self._begin(start))

    def task(self, task: pb.AppTask) -> None:
        """A message for the ClientApp; one that is known already is not done twice."""
        entry = _Task(task, self._context.epoch(), time.monotonic() + max(0.0, min(task.left_s, MAX_LEFT_S)))
        with self._lock:
            known = self._tasks.get(task.message)
            if known is not None:
                known.epoch = entry.epoch
                return
            self._tasks[task.message] = entry
        self._todo.put(lambda: self._serve(entry))

    def cancel(self, messages: list[str]) -> None:
        """Give up replies that are awaited no more."""
        with self._lock:
            entries = [self._tasks.pop(m) for m in messages if m in self._tasks]
            working = self._working
        for entry in entries:
            entry.cancel.set("cancelled")
            if entry is working:
                self._break_off()

    def forget(self, hashes: list[str], message: str) -> None:
        """Delete parts that are needed no more; ``message``: and what its reply holds."""

        def remove() -> None:
            self._drop_kept(message)
            for name in hashes:
                self._parts.cache.path(name).unlink(missing_ok=True)

        self._todo.put(remove)

    def consent_changed(self) -> None:
        """React to an app that this machine's owner accepted or revoked."""
        self._todo.put(self._reconsider)

    def greet(self) -> None:
        """Send again what may have been lost with the stream before."""
        if self._standing is not None:
            self._context.send(self._standing)

    def moved(self, member: Membership) -> None:
        """A restarted coordinator may listen elsewhere."""
        if self._parts.address != member.work_address:
            self._parts.move(member.channel(self._context.config), member.work_address)

    def end(self, reason: str, *, for_good: bool = True) -> None:
        """Stop at once; ``for_good``: the run is over, its state goes too."""
        if self._ended.is_set:
            return
        log.info("app.ended", run=f"{self.run:x}", reason=clean(reason, REASON_CHARS))
        self._ended.set(reason)
        with self._lock:
            entries = list(self._tasks.values())
        for entry in entries:
            entry.cancel.set(reason)
        if for_good:
            self._todo.put(self._remove_state)
        self._todo.put(None)
        self._break_off()

    def join(self, timeout_s: float) -> None:
        """Wait until its thread has ended."""
        self._thread.join(timeout_s)

    def _break_off(self) -> None:
        self._parts.abort()
        process = self._process
        if process is not None:
            process.kill()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while (work := self._todo.get()) is not None:
                try:
                    work()
                except (Cancelled, Gone):
                    continue
                except AtollError as error:
                    log.warning("app.failed", run=f"{self.run:x}", reason=str(error))
                except Exception:  # the next message must find this thread alive
                    log.exception("app.broke", run=f"{self.run:x}")
        finally:
            self._drop_process()
            self._parts.close()
            for folder in (self._outbox, self._came):
                shutil.rmtree(folder, ignore_errors=True)

    def _prepare(self) -> None:
        """Fetch the app, ask for consent, unpack and load it; report which of these failed.

        What nobody accepted is never unpacked; what was refused is not even fetched.
        """
        if self._ended.is_set:
            return
        store = self._context.store
        try:
            if store.is_refused(self._app.hash):
                self._refuse(pb.APP_REFUSAL_NOT_ACCEPTED, "its owner refused this app")
                return
            data = self._fetched()
            if not self._context.accepts(self._app):
                store.offers.keep(self._app.hash, data)
                self._parts.cache.path(self._app.hash).unlink(missing_ok=True)
                self._refuse(pb.APP_REFUSAL_NOT_ACCEPTED, self._how_to_accept())
                return
            self._unpack(data)
        except (AtollError, OSError) as error:
            self._refuse(pb.APP_REFUSAL_OTHER, str(error))
            return
        if importlib.util.find_spec("flwr") is None:
            self._refuse(pb.APP_REFUSAL_OTHER, "flwr is not installed there; `pip install 'atoll[flower]'`")
            return
        started_s = time.monotonic()
        wrong = self._load()
        if wrong:
            self._refuse(pb.APP_REFUSAL_NOT_LOADED, wrong + self._how_to_install())
            return
        took_s = time.monotonic() - started_s
        log.info("app.loaded", run=f"{self.run:x}", app=clean(self._app.name, 200), took_s=round(took_s, 2))
        self._stand(
            pb.FromNode(ready=pb.AppReady(run=self.run, took_s=took_s, nodes=self._context.config.app_nodes))
        )

    def _fetched(self) -> bytes:
        """The app's bundle, looked at and remembered as asked for."""
        app, store = self._app, self._context.store
        most = app_bundle.MAX_BUNDLE_BYTES + app_bundle.MAX_FILES * 2 * app_bundle.MAX_PATH_CHARS
        if app.size > most:
            raise BadFrame(f"an app bundle of {app.size} bytes; at most {most} are accepted")
        data = store.offers.read(app.hash)
        if data is None:
            self._parts.fetch(self.run, {app.hash: app.size}, self._ended)
            data = self._parts.cache.path(app.hash).read_bytes()
        spec, _ = app_bundle.opened(data, app.hash)
        if spec.client != app.client:
            raise BadFrame(f"the app's ClientApp is {spec.client}, announced was {app.client[:200]}")
        store.asked(
            KnownApp(app.hash, spec.name, spec.version, spec.publisher, time.time(), signer=signer(app))
        )
        return data

    def _unpack(self, data: bytes) -> None:
        store = self._context.store
        folder = store.code_dir(self._app.hash)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {folder}: {error.strerror}") from None
        self._code = unpack(data, self._app.hash, folder)
        store.offers.drop(self._app.hash)

    def _how_to_accept(self) -> str:
        folder = self._context.config.state_dir
        option = "" if folder == default_state_dir() else f" --state-dir {folder}"
        return (
            "its owner has not accepted this app; read it and accept it there: "
            f"`atoll-worker apps show {self._app.hash[:16]}{option}`, "
            f"`atoll-worker apps accept {self._app.hash[:16]}{option}`" + self._or_its_publisher(option)
        )

    def _or_its_publisher(self, option: str) -> str:
        who = signer(self._app)
        return f", or all that {who} signs: `atoll-worker apps accept {who}{option}`" if who else ""

    def _how_to_install(self) -> str:
        lacking = app_bundle.missing_dependencies(self._code.spec) if self._code is not None else []
        if not lacking:
            return ""
        return f"\nnot installed there: `pip install {shlex.join(lacking)}`"[:REASON_CHARS]

    def _load(self) -> str:
        """Start the process and have it import the app; returns what went wrong."""
        self._drop_process()
        assert self._code is not None  # noqa: S101 - only what was fetched can be accepted
        try:
            self._code.check()
        except AccessDenied as error:
            log.error("app.code_changed", run=f"{self.run:x}", reason=str(error))
            return str(error)
        store, config = self._context.store, self._context.config
        setup = pb.ChildSetup(
            run=self.run,
            code_dir=str(self._code.folder),
            client=self._app.client,
            parts_dir=str(self._came),
            outbox_dir=str(self._outbox),
            runs_dir=str(store.runs_dir(self._app.hash)),
            node_config={key: _to_value(value) for key, value in config.node_config},
        )
        self._context.make_room()
        process = self._process = AppProcess(setup, config.threads, self._printed, config.app_env)
        if self._ended.is_set:
            raise Cancelled("ended")
        try:
            loaded = process.pipe.receive(pb.FromChild(), LOAD_WITHIN_S).loaded
        except Gone:
            self._ended.check()
            self._process = None
            return process.last_words()[-REASON_CHARS:]
        except TimeoutError:
            self._drop_process()
            return f"it was not loaded within {LOAD_WITHIN_S:.0f} s"
        if loaded.error:
            self._drop_process()
        elif self._start is not None:
            process.pipe.send(pb.ToChild(start=self._start))
        return loaded.error[:REASON_CHARS]

    def _begin(self, start: pb.AppStart) -> None:
        if self._start == start:
            return
        self._start = start
        partitions = [seat.partition for seat in start.seats]
        log.info("app.started", run=f"{self.run:x}", partition=partitions, partitions=start.partitions)
        if self._process is not None:
            self._process.pipe.send(pb.ToChild(start=start))

    def _reconsider(self) -> None:
        accepted = self._context.accepts(self._app)
        refused = self._standing is not None and self._standing.HasField("refused")
        if accepted and refused:
            self._prepare()
        elif not accepted and not refused:
            self._drop_process()
            self._context.store.drop_files(self._app.hash)
            self._refuse(pb.APP_REFUSAL_NOT_ACCEPTED, self._how_to_accept())

    # ------------------------------------------------------------ one task

    def _serve(self, entry: _Task) -> None:
        with self._lock:
            if entry.cancel.is_set:
                return
            self._working = entry
        known = self._kept.get(entry.task.message)
        try:
            if known is not None:
                # Its reply was lost on the way, and its arrays may be.
                self._parts.send(self.run, known.files, entry.cancel)
            reply = known.reply if known is not None else self._reply(entry)
        except (Cancelled, Gone):
            # The reply is awaited no more, but other runs wait for a process.
            self._drop_kept(entry.task.message)
            self._todo.put(self._warm)
            return
        except (AtollError, OSError) as error:
            if entry.epoch != self._context.epoch():
                return  # of a coordinator that is gone; it comes again
            self._drop_kept(entry.task.message)
            reply = pb.AppReply(error=REPLY_UNAVAILABLE, reason=str(error))
        finally:
            with self._lock:
                self._working = None
                self._tasks.pop(entry.task.message, None)
        reply.run, reply.message = self.run, entry.task.message
        self._answered(entry, reply)

    def _reply(self, entry: _Task) -> pb.AppReply:
        task, parts = entry.task, self._parts
        down = len(task.content) + parts.take(task.parts)
        down += parts.fetch(self.run, {p.hash: p.size for p in task.parts}, entry.cancel)
        for part in task.parts:
            part.data = b""
        reply = self._asked(entry)
        came = {part.hash for part in task.parts}
        # Before it is sent: what the app did must not be done twice should the way be broken.
        kept = self._kept[task.message] = _Kept(reply, self._own_files(task.message, reply, came))
        sent = parts.send(self.run, kept.files, entry.cancel)
        reply.down_bytes = down
        reply.up_bytes = sent + len(reply.content) + sum(len(part.data) for part in reply.parts)
        return reply

    def _drop_kept(self, message: str) -> None:
        kept = self._kept.pop(message, None)
        if kept is not None:
            kept.remove()

    def _own_files(self, message: str, reply: pb.AppReply, came: set[str]) -> dict[str, Path]:
        """The reply's arrays under names of their own: two replies may hold the same one."""
        found = {}
        for part in reply.parts:
            if part.size and not part.data and part.hash not in came and part.hash not in found:
                path = self._outbox / f"{part.hash}.{message}"
                (self._outbox / part.hash).replace(path)
                found[part.hash] = path
        return found

    def _asked(self, entry: _Task) -> pb.AppReply:
        """The ClientApp's answer; a process that dies or is too slow is replaced by a fresh one."""
        if error := self._warm():
            return pb.AppReply(error=APP_CRASHED, reason=error)
        process = self._process
        assert process is not None  # noqa: S101 - just loaded
        try:
            process.pipe.send(pb.ToChild(task=entry.task))
            left_s = entry.due_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            return process.pipe.receive(pb.FromChild(), left_s).reply
        except TimeoutError:
            self._renew()
            return pb.AppReply(error=REPLY_UNAVAILABLE, reason="no reply within the message's time to live")
        except (Gone, BadFrame) as error:
            self._ended.check()
            words = process.last_words() if isinstance(error, Gone) else str(error)
            self._renew()
            entry.cancel.check()
            return pb.AppReply(error=APP_CRASHED, reason=words[-REASON_CHARS:])

    def _renew(self) -> None:
        """A fresh process for the next task, started while the reply is on its way."""
        self._drop_process()
        self._todo.put(self._warm)

    def _warm(self) -> str:
        """Have a living process; returns why there is none."""
        self._ended.check()
        if self._process is not None and self._process.alive:
            return ""
        prepared = self._standing is not None and self._standing.HasField("ready")
        if not prepared or not self._context.accepts(self._app):
            # In whatever order messages come: what the owner has not accepted does not run here.
            return "this app is not accepted there, or could not be loaded"
        return self._load()

    def _answered(self, entry: _Task, reply: pb.AppReply) -> None:
        with self._lock:
            self._tasks.pop(entry.task.message, None)
        self._kept.setdefault(entry.task.message, _Kept(reply, {}))
        most = max(MAX_KEPT, len(self._start.seats) if self._start is not None else 0)
        while len(self._kept) > most:
            self._kept.pop(next(iter(self._kept))).remove()
        self._context.send(pb.FromNode(reply=reply))

    # ------------------------------------------------------------ helpers

    def _refuse(self, kind: Any, reason: str) -> None:
        if self._ended.is_set:
            return
        reason = clean(reason, REASON_CHARS, lines=True)
        log.warning("app.refused", run=f"{self.run:x}", app=clean(self._app.name, 200), reason=reason)
        self._stand(pb.FromNode(refused=pb.AppRefused(run=self.run, kind=kind, reason=reason)))

    def _stand(self, standing: pb.FromNode) -> None:
        self._standing = standing
        self._context.send(standing)

    def _printed(self, line: str) -> None:
        self._context.printed(f"{self.run:x}", line)

    def _drop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _remove_state(self) -> None:
        self._drop_process()
        for seat in self._start.seats if self._start is not None else ():
            self._context.store.drop_state(self._app.hash, self.run, seat.node)


def _to_value(value: app_bundle.ConfigValue) -> pb.AppValue:
    """A configuration value as it goes to the process; flwr itself is not imported here."""
    if isinstance(value, bool):
        return pb.AppValue(flag=value)
    if isinstance(value, int):
        return pb.AppValue(integer=value)
    if isinstance(value, float):
        return pb.AppValue(number=value)
    return pb.AppValue(text=value)
