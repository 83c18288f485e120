"""Where the streams of app runs meet: what arrives goes to ``app_runs``, what that machine wants is
queued for the stream it concerns. No Python of an app runs in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.errors import AccessDenied, BadFrame, UsageError
from coordinator.apps import runs, state
from coordinator.apps.mailbox import Mailbox
from coordinator.apps.parts import PartStore
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.services.blobs.service import MAX_BLOBS_A_REQUEST
from hostos.budget import Budget
from protos import atoll_apps_pb2 as pb
from protos import bounds
from protos.text_limits import REASON_CHARS, clean

if TYPE_CHECKING:
    from coordinator.shell import Shell

ATTEND_RETURNS_S = 2.0  # a worker's stream for apps that broke may be back so soon
MAX_QUEUED = 50_000  # messages for one owner or worker that does not read
OWNER_BYTES = 128 << 20  # of these for one owner; workers hold their replies back at the half
NODE_BYTES = 1 << 30
NOTICES, NOTICES_PER_S = 100, 1.0  # of one worker, of any run
NEWEST_COUNTS = ("fleet", "nodes")  # what an owner has not read of these is old news
MAX_CONTENT_BYTES = 16 << 20
QUOTA_BYTES = 256 << 30


class _Roster:
    """``app_runs.View`` of a scheduler."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def free(self) -> list[str]:
        return self._shell.scheduler.roster.free()

    def connected(self) -> int:
        workers = self._shell.scheduler.roster.workers.values()
        return sum(w.session is not None and not w.member.gone for w in workers)

    def name_of(self, worker: str) -> str:
        known = self._shell.scheduler.roster.workers.get(worker)
        return (known.introduction.name if known is not None else "") or worker


class AppDesk:
    """All app runs of one coordinator; every method belongs to the event loop's thread."""

    def __init__(self, shell: Shell) -> None:
        config = shell.config
        self._shell = shell
        self.runs = runs.AppRuns(_Roster(shell))
        quota = min(config.blob_quota_bytes, QUOTA_BYTES)
        self.parts = PartStore(config.state_dir / "app-parts", config.max_blob_bytes, quota)
        self._owners: dict[int, Mailbox] = {}
        self._nodes: dict[str, Mailbox] = {}
        self._sent: dict[str, set[str]] = {}  # worker -> small parts it was given
        self._notices: dict[str, Budget] = {}  # of every worker that ever came; their number is bounded
        shell.moved = self._moved

    def now_s(self) -> float:
        """The coordinator's clock."""
        return self._shell.clock()

    # ------------------------------------------------------------ streams

    def owner_comes(self, request: pb.AppOpen, owner: str = "") -> Mailbox:
        """The box of a run's owner; an owner that is back finds what it has missed, and a stream of its
        own that nobody has found broken yet is ended."""
        state.checked_opening(request)
        if len(request.bundle) > MAX_CONTENT_BYTES:
            raise BadFrame(f"an app bundle of {len(request.bundle)} bytes; at most {MAX_CONTENT_BYTES}")
        self.parts.take_small(request.run, request.app.hash, request.bundle)
        try:
            todo = self.runs.opened(request, owner, self.now_s())
        except UsageError:
            if request.run not in self.runs.runs:
                self.parts.drop(request.run, None, None)
            raise
        before = self._owners.get(request.run)
        if before is None:
            box = Mailbox(MAX_QUEUED, OWNER_BYTES)
        else:
            box = before.moved(UsageError(f"a newer stream of run {request.run} has taken over"))
        self._owners[request.run] = box
        self._do(todo)
        return box

    def owner_says(self, run_id: int, box: Mailbox, message: pb.FromApp) -> bool:
        """Handle one message of the stream that reads ``box``; False: the owner has ended its run."""
        run = self.runs.of(run_id)
        if self._owners.get(run_id) is not box:
            raise UsageError(f"a newer stream of run {run_id} has taken over")
        match message.WhichOneof("body"):
            case "begin":
                self._do(self.runs.begun(run, state.checked_begin(message.begin)))
            case "task":
                self._do(self.runs.task(run, self._taken_in(run_id, message.task)))
            case "cancel":
                self._do(self.runs.cancelled(run, list(message.cancel.messages)))
            case "forget":
                names = frozenset(bounds.blob_hash("part", name) for name in message.forget.hashes)
                self._do(self.runs.forgotten(run, names, message.forget.message[:100]))
            case "close":
                self.end(run_id, message.close.reason or "its ServerApp has ended")
                return False
            case body:
                raise BadFrame(f"a message of kind {body!r}, which does not belong here")
        return True

    def _taken_in(self, run: int, task: pb.AppTask) -> pb.AppTask:
        state.checked_task(task, MAX_CONTENT_BYTES)
        for part in bounds.count("parts", task.parts, MAX_BLOBS_A_REQUEST):
            if part.data or not part.size:
                self.parts.take_small(run, part.hash, part.data)
                part.data = b""
            elif not self.parts.has(run, part.hash):
                raise BadFrame(f"a message refers to part {part.hash[:12]}, which is not here")
        return task

    def owner_goes(self, run: int, box: Mailbox) -> None:
        """The owner's stream ended without a word: it has a moment to come back."""
        if run in self.runs.runs and self._owners.get(run) is box:
            self._owners[run] = box.moved()
            self._do(self.runs.owner_lost(run, self.now_s()))
            self._later(runs.OWNER_RETURNS_S + 0.1, self._tick)

    def end(self, run: int, reason: str) -> None:
        """End a run; unknown ones have ended already."""
        self._do(self.runs.closed(run, clean(reason, REASON_CHARS)))

    def node_comes(self, worker: str, hello: pb.AppHello) -> Mailbox:
        """A worker's stream for apps begins; an older one of it ends. BadFrame when that is too often."""
        self._heed(worker)
        old = self._nodes.get(worker)
        if old is not None:
            old.close()
        box = self._nodes[worker] = Mailbox(MAX_QUEUED, NODE_BYTES)
        self._sent[worker] = set()
        self._do(self.runs.attends(worker, hello, self.now_s()))
        if hello.runs:
            self._later(runs.HELD_S + 0.1, self._tick)
        return box

    async def room_for(self, message: pb.FromNode) -> None:
        """Wait while an owner who reads slowly has enough to read: its nodes hold their replies."""
        if message.HasField("reply"):
            size = message.ByteSize()
            while (box := self._owners.get(message.reply.run)) is not None and not box.fits(size):
                await box.changed()

    def node_says(self, worker: str, message: pb.FromNode) -> None:
        """Handle one message of a worker."""
        match message.WhichOneof("body"):
            case "ready":
                self._heed(worker)
                self._do(self.runs.ready(worker, message.ready))
            case "refused":
                self._heed(worker)
                self._do(self.runs.refused(worker, message.refused))
            case "reply":
                reply = message.reply
                if len(reply.content) > MAX_CONTENT_BYTES or len(reply.reason) > 10 * REASON_CHARS:
                    raise BadFrame(f"a reply of {len(reply.content)} bytes; at most {MAX_CONTENT_BYTES}")
                bounds.count("parts", reply.parts, MAX_BLOBS_A_REQUEST)
                self._do(self.runs.replied(worker, reply, self.parts.has))
            case body:
                raise BadFrame(f"a message of kind {body!r}, which does not belong here")

    def _heed(self, worker: str) -> None:
        """Count what is logged here and sent to owners; one who says it over and over is not heard."""
        if not self._notices.setdefault(worker, Budget(NOTICES, NOTICES_PER_S)).take(self.now_s()):
            raise BadFrame(
                f"{worker} came, was ready or refused more than {NOTICES} times at once; once in "
                f"{1 / NOTICES_PER_S:.0f} s is accepted"
            )

    def node_goes(self, worker: str, box: Mailbox) -> None:
        """A worker's stream ended; a newer one may have replaced it."""
        if self._nodes.get(worker) is not box:
            return
        del self._nodes[worker]

        def check() -> None:
            if worker not in self._nodes:
                self._do(self.runs.stops_attending(worker))

        self._later(ATTEND_RETURNS_S, check)

    def stop(self) -> None:
        """End every stream; the coordinator stops."""
        for box in (*self._owners.values(), *self._nodes.values()):
            box.close()

    def may(self, worker: str, run: int) -> None:
        """AccessDenied unless the worker takes part in the run, or was asked to."""
        found = self.runs.runs.get(run)
        if found is None or worker not in found.places:
            raise AccessDenied(f"{worker} takes no part in app run {run}")

    def takes_from(self, worker: str) -> None:
        """A chunk of a part came from a worker."""
        self._shell.uploading(worker)

    # ------------------------------------------------------------ the fleet, the clock

    def _moved(self, moved: do.MemberMoved) -> None:
        """Membership changed: a node that is dead, leaves or works for another is none."""
        mine = moved.job in {_job(run) for run in self.runs.runs}
        if moved.restarted or moved.phase in ("dead", "left", "draining") or (moved.job and not mine):
            self._do(self.runs.deserts(moved.worker, moved.reason))
        elif moved.phase == "pool":
            self._do(self.runs.fleet_changed())

    def _tick(self) -> None:
        self._do(self.runs.tick(self.now_s()))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, work)

    # ------------------------------------------------------------ carrying out

    def _do(self, todo: list[state.Instruction]) -> None:
        for instruction in todo:
            match instruction:
                case state.TellOwner(run, message):
                    self._tell_owner(run, message)
                case state.TellNode(worker, message):
                    self._tell_node(worker, message)
                case state.Lend(worker, run):
                    self._shell.post(ev.AppLent(worker, _job(run)))
                case state.GiveBack(worker, run, reason):
                    self._shell.post(ev.AppReturned(worker, _job(run), reason))
                case state.HandOver(run, worker, message, hashes):
                    self.parts.hand_over(run, worker, message, hashes)
                case state.DropParts(run, hashes, holder):
                    gone, files = self.parts.drop(run, hashes, holder)
                    for sent in self._sent.values():
                        sent.difference_update(gone)
                    if files:
                        # A large file takes a while to go, and nobody waits for it.
                        asyncio.get_running_loop().run_in_executor(None, self.parts.delete, files)
                case state.Say(event, level, fields):
                    self._shell.note(event, level, **fields)

    def _tell_owner(self, run: int, message: pb.ToApp) -> None:
        box = self._owners.get(run)
        if box is None:
            return
        kind = message.WhichOneof("body") or ""
        if not box.put(message, kind if kind in NEWEST_COUNTS else ""):
            reason = f"{len(box)} messages, {box.bytes} bytes, wait for its owner, who does not read them"
            box.clear()
            self.end(run, reason)
        if message.HasField("ended"):
            self._owners.pop(run, None)
            box.close()

    def _tell_node(self, worker: str, message: pb.ToNode) -> None:
        box = self._nodes.get(worker)
        if box is None:
            return
        if message.HasField("task"):
            message = pb.ToNode(task=self._with_small_parts(worker, message.task))
        if not box.put(message):
            box.clear()
            box.close()

    def _with_small_parts(self, worker: str, task: pb.AppTask) -> pb.AppTask:
        """The task with the bytes of those small parts that the worker was not given yet."""
        sent = self._sent.setdefault(worker, set())
        full = pb.AppTask()
        full.CopyFrom(task)
        for part in full.parts:
            data = self.parts.small(part.hash)
            if data is not None and part.hash not in sent:
                part.data = data
                sent.add(part.hash)
        return full


def _job(run: int) -> str:
    """A run's name where jobs are named."""
    return f"app-{run:x}"
