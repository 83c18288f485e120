"""An app run on this worker: its owner's consent, the warm process, one task after another.

Everything that takes time happens in the run's own thread. From outside, ``cancel`` and ``end`` act
at once: they kill the process or break off the transfer that the thread waits for.
"""

from __future__ import annotations

import importlib.util
import itertools
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AccessDenied, AtollError
from protos import app_bundle
from protos import atoll_apps_pb2 as pb
from protos.child_pipe import Gone
from protos.text_limits import REASON_CHARS, clean
from worker.apps.aside import APP_CRASHED, REPLY_UNAVAILABLE, Aside, Task, reply_of
from worker.apps.code import AppCode
from worker.apps.context import AppContext
from worker.apps.offered import OfferedApp
from worker.apps.parts import Parts
from worker.apps.process import AppProcess
from worker.cancel import Cancel, Cancelled

if TYPE_CHECKING:
    from worker.control.enroll import Membership

log = structlog.get_logger()

MAX_LEFT_S = 30 * 86_400.0  # of a message's time to live
LOAD_WITHIN_S = 600.0  # importing an app and all it needs
MAX_KEPT = 64  # replies that may have to be sent again


class _SetAside(Exception):
    """A task's process goes on aside; its reply comes later."""


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
        self._app, self._offered = offer.app, OfferedApp(offer, parts, context)
        self._code: AppCode | None = None
        self._parts, self._context = parts, context
        self._came = parts.cache.path("")  # the folder itself
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tasks: dict[str, Task] = {}  # not yet answered
        self._working: Task | None = None
        self._ended = Cancel()
        self._process: AppProcess | None = None
        self._aside = Aside(lambda *answer: self._todo.put(lambda: self._returned(*answer)))
        self._later: list[Task] = []  # of nodes whose earlier task is aside
        self._processes = itertools.count()  # started so far
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
        entry = Task(task, self._context.epoch(), time.monotonic() + max(0.0, min(task.left_s, MAX_LEFT_S)))
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
            for entry in entries:
                entry.cancel.set("cancelled")
                if entry is self._working:  # under the lock: the next one gets no process that is to die
                    self._break_off()
        for entry in entries:
            self._aside.done(entry.task.message)
        self._todo.put(self._resume)

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
        self._aside.close()
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
            self._aside.close()
            self._parts.close()
            self._offered.close()
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
            data = self._offered.fetched(self._ended)
            if not self._context.accepts(self._app):
                store.offers.keep(self._app.hash, data)
                self._parts.cache.path(self._app.hash).unlink(missing_ok=True)
                self._refuse(pb.APP_REFUSAL_NOT_ACCEPTED, self._offered.how_to_accept())
                return
            self._code = self._offered.unpacked(data, self._outbox)
            self._offered.install(self._code, self._ended)
        except (AtollError, OSError) as error:
            self._refuse(pb.APP_REFUSAL_OTHER, str(error))
            return
        if importlib.util.find_spec("flwr") is None:
            self._refuse(pb.APP_REFUSAL_OTHER, "flwr is not installed there; `pip install 'atoll[flower]'`")
            return
        started_s = time.monotonic()
        wrong = self._load()
        if wrong:
            self._refuse(pb.APP_REFUSAL_NOT_LOADED, wrong + self._offered.how_to_install(self._code))
            return
        took_s = time.monotonic() - started_s
        log.info("app.loaded", run=f"{self.run:x}", app=clean(self._app.name, 200), took_s=round(took_s, 2))
        self._stand(
            pb.FromNode(ready=pb.AppReady(run=self.run, took_s=took_s, nodes=self._context.config.app_nodes))
        )

    def _load(self) -> str:
        """Start the process and have it import the app; returns what went wrong."""
        self._drop_process()
        assert self._code is not None  # noqa: S101 - only what was fetched can be accepted
        try:
            self._offered.check(self._code)
        except AccessDenied as error:
            log.error("app.code_changed", run=f"{self.run:x}", reason=str(error))
            return str(error)
        store, config = self._context.store, self._context.config
        outbox = self._outbox / str(next(self._processes))  # two may hold the same array at a time
        outbox.mkdir(mode=0o700)
        setup = pb.ChildSetup(
            run=self.run,
            code_dir=str(self._code.folder),
            client=self._app.client,
            parts_dir=str(self._came),
            outbox_dir=str(outbox),
            runs_dir=str(store.runs_dir(self._app.hash)),
            node_config={key: _to_value(value) for key, value in config.node_config},
            packages_dir=self._offered.site,
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
            self._offered.close()
            self._context.store.drop_files(self._app.hash)
            self._refuse(pb.APP_REFUSAL_NOT_ACCEPTED, self._offered.how_to_accept())

    # ------------------------------------------------------------ one task

    def _serve(self, entry: Task) -> None:
        with self._lock:
            if entry.cancel.is_set:
                return
            self._working = entry
        if self._aside.holds(entry.task.node):  # a node does one thing at a time
            self._later.append(entry)
            return
        known = self._kept.get(entry.task.message)
        self._deliver(entry, lambda: self._reply(entry) if known is None else self._again(entry, known))

    def _returned(self, entry: Task, process: AppProcess, reply: pb.AppReply) -> None:
        """A task that went on aside has its reply."""
        try:
            if not entry.cancel.is_set:
                self._deliver(entry, lambda: self._sent(entry, process, reply))
        finally:
            self._aside.done(entry.task.message)
            self._resume()

    def _resume(self) -> None:
        """Serve what waited for a node that was busy."""
        waited, self._later = self._later, []
        for entry in waited:
            self._serve(entry)

    def _deliver(self, entry: Task, make: Callable[[], pb.AppReply]) -> None:
        """Send what ``make`` returns, or why it could not."""
        try:
            reply = make()
        except _SetAside:
            with self._lock:
                self._working = None
            return
        except (Cancelled, Gone):
            # The reply is awaited no more, but other runs wait for a process.
            self._drop_kept(entry.task.message)
            self._todo.put(self._warm)
            reply = None
        except (AtollError, OSError) as error:
            self._drop_kept(entry.task.message)
            reply = pb.AppReply(error=REPLY_UNAVAILABLE, reason=str(error))
            if entry.epoch != self._context.epoch():
                reply = None  # of a coordinator that is gone; it comes again
        with self._lock:
            self._working = None
            self._tasks.pop(entry.task.message, None)
        if reply is not None:
            reply.run, reply.message = self.run, entry.task.message
            self._answered(entry, reply)

    def _again(self, entry: Task, known: _Kept) -> pb.AppReply:
        """A reply that was lost on the way, and its arrays, which may be."""
        self._parts.send(self.run, known.files, entry.cancel)
        return known.reply

    def _reply(self, entry: Task) -> pb.AppReply:
        task, parts = entry.task, self._parts
        entry.down_bytes = len(task.content) + parts.take(task.parts)
        entry.down_bytes += parts.fetch(self.run, {p.hash: p.size for p in task.parts}, entry.cancel)
        for part in task.parts:
            part.data = b""
        process, reply = self._asked(entry)
        return reply if process is None else self._sent(entry, process, reply)

    def _sent(self, entry: Task, process: AppProcess, reply: pb.AppReply) -> pb.AppReply:
        """The reply, once its arrays are where they shall be."""
        came = {part.hash for part in entry.task.parts}
        # Before it is sent: what the app did must not be done twice should the way be broken.
        files = self._own_files(process.outbox, entry.task.message, reply, came)
        kept = self._kept[entry.task.message] = _Kept(reply, files)
        sent = self._parts.send(self.run, kept.files, entry.cancel)
        reply.down_bytes = entry.down_bytes
        reply.up_bytes = sent + len(reply.content) + sum(len(part.data) for part in reply.parts)
        return reply

    def _drop_kept(self, message: str) -> None:
        kept = self._kept.pop(message, None)
        if kept is not None:
            kept.remove()

    def _own_files(self, outbox: Path, message: str, reply: pb.AppReply, came: set[str]) -> dict[str, Path]:
        """The reply's arrays under names of their own: two replies may hold the same one."""
        found = {}
        for part in reply.parts:
            if part.size and not part.data and part.hash not in came and part.hash not in found:
                path = self._outbox / f"{part.hash}.{message}"
                (outbox / part.hash).replace(path)
                found[part.hash] = path
        return found

    def _asked(self, entry: Task) -> tuple[AppProcess | None, pb.AppReply]:
        """The ClientApp's answer, and the process that gave it; one that dies or is too slow is replaced.

        Raises _SetAside once others have waited for as long as the task's share of the time is.
        """
        if error := self._warm():
            return None, pb.AppReply(error=APP_CRASHED, reason=error)
        process = self._process
        assert process is not None  # noqa: S101 - just loaded
        process.pipe.send(pb.ToChild(task=entry.task))
        if self._aside.outlasts(process, entry, self._waiting):
            self._process = None
            self._aside.take(entry, process)
            self._todo.put(self._warm)
            raise _SetAside
        reply, well = reply_of(process, entry)
        if well:
            return process, reply
        self._ended.check()
        self._renew()
        entry.cancel.check()
        return None, reply

    def _waiting(self) -> int:
        with self._lock:
            return len(self._tasks) - 1

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

    def _answered(self, entry: Task, reply: pb.AppReply) -> None:
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
