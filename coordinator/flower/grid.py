"""A Flower ``Grid`` over our coordinator: messages go at once, replies wake who waits for them.

Arrays are sent once however many nodes get them, and not again while the coordinator and the nodes
still have them: the aggregate that is evaluated and then trained on goes down once. What no later
message can need is forgotten everywhere. Replies come in the order of the nodes' partitions, so the
sums of a strategy do not depend on who was faster.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from atoll.errors import AtollError, BadFrame, ConnectionFailed, JobFailed, UsageError
from coordinator.flower import replies as heard
from coordinator.flower.stream import AppLink
from protos import atoll_apps_pb2 as pb
from protos import flower_content as content
from protos import flower_internals as flower

IDLE_S = 10.0  # so long after the last reply an app that sends nothing is mentioned
IDLE_LOOKS = 3  # at the nodes: it waits in a loop
RETURN_S = 15.0  # after the coordinator's restart its nodes have so long to come back
KEPT_PUSHES = 2  # arrays of the last pushes stay: what is evaluated is often trained on next
FETCHES = 4
ATTEMPTS, RETRY_S = 6, 3.0  # of a transfer, until its stream is known to be broken or not
MAX_ERRORS_TOLD = 20  # of one batch; the rest is counted
T = TypeVar("T")
Tell = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class _Sent:
    """A message without a reply."""

    task: pb.AppTask
    metadata: Metadata
    parts: dict[str, bytes]
    sent_s: float
    epoch: int


@dataclass(slots=True)
class Traffic:
    """What a batch of messages cost the workers' links."""

    down_bytes: int = 0
    up_bytes: int = 0
    errors: list[str] = field(default_factory=list)


class CoordinatorGrid(Grid):
    """The Grid of one run; safe for the app's own threads."""

    def __init__(self, run: int, run_info: Any, tell: Tell) -> None:
        """``tell`` hears what happens: ("sent" | "replies" | "nodes", figures)."""
        self._run_id, self._run, self._tell = run, run_info, tell
        self._changed = threading.Condition()
        self._nodes: dict[int, pb.AppNode] = {}
        self._sent: dict[str, _Sent] = {}
        self._replies: dict[str, Message] = {}
        self._traffic: dict[str, Traffic] = {}
        self._there: set[str] = set()  # parts that the coordinator has
        self._uses: Counter[str] = Counter()  # by messages without a reply
        self._recent: deque[frozenset[str]] = deque(maxlen=KEPT_PUSHES)
        self._failure: AtollError | None = None
        self._epoch = 0
        self._away = False  # the coordinator is, and with it what it knew of the nodes
        self._quiet_s = time.monotonic()  # since when nothing was sent; inf: said already
        self._looks = 0  # at the nodes since then
        self._pool = ThreadPoolExecutor(FETCHES, "atoll-app-parts")
        self._link: AppLink | None = None

    def use(self, link: AppLink) -> None:
        """Talk over ``link``, whose events come to the three methods below."""
        self._link = link

    @property
    def link(self) -> AppLink:
        if self._link is None:
            raise UsageError("this Grid is not connected")
        return self._link

    # ------------------------------------------------------------ from the link

    def nodes_changed(self, news: pb.AppNodes) -> None:
        """Who takes part now; what waits for a node that is back is sent again."""
        with self._changed:
            self._nodes = {node.node: node for node in news.nodes}
            self._away = False
            again = [
                sent
                for sent in self._sent.values()
                if sent.epoch != self._epoch and sent.task.node in self._nodes
            ]
        for sent in again:
            self._pool.submit(self._guarded, partial(self._post, sent))

    def replied(self, reply: pb.AppReply) -> None:
        """A reply came; its large arrays are fetched beside the stream."""
        large = any(part.size and not part.data for part in reply.parts)
        if large:
            self._pool.submit(self._guarded, partial(self._take, reply))
        else:
            self._take(reply)

    def reopened(self) -> None:
        """The coordinator was away: parts may be gone, nodes come back one by one."""
        with self._changed:
            self._epoch += 1
            self._away = True
            self._there.clear()
            self._changed.notify_all()
        timer = threading.Timer(RETURN_S, self._give_up, (self._epoch,))
        timer.daemon = True
        timer.start()

    def fail(self, error: AtollError) -> None:
        """Nothing will come any more; who waits gets the error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _give_up(self, epoch: int) -> None:
        with self._changed:
            lost = [m for m, sent in self._sent.items() if sent.epoch != self._epoch and epoch == self._epoch]
        for message in lost:
            reason = f"it did not come back within {RETURN_S:.0f} s after the coordinator's restart"
            self._take(pb.AppReply(message=message, error=flower.NODE_UNAVAILABLE, reason=reason))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except AtollError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - who waits for this message must not wait for ever
            self.fail(JobFailed(f"a message could not be handled: {type(error).__name__}: {error}"))

    def _take(self, reply: pb.AppReply) -> None:
        with self._changed:
            sent = self._sent.get(reply.message)
        if sent is None:
            self._taken(reply, ())
            return
        body = self._body(reply, sent)
        if body is None:
            return
        message_id = f"{reply.message}-reply"
        message = flower.reply_message(body, sent.metadata, message_id, reply.created_s or time.time())
        with self._changed:
            if self._sent.pop(reply.message, None) is None:
                return
            self._quiet_s, self._looks = time.monotonic(), 0
            self._uses.subtract(sent.parts.keys())
            self._replies[reply.message] = message
            traffic = self._traffic.setdefault(reply.message, Traffic())
            traffic.down_bytes, traffic.up_bytes = reply.down_bytes, reply.up_bytes
            if isinstance(body, Error):
                node = self._nodes.get(sent.task.node)
                name = node.name if node is not None else f"node {sent.task.node}"
                traffic.errors.append(heard.in_short(name, body.reason or "", body.code))
            self._changed.notify_all()
        self._taken(reply, sent.parts)
        self._forget()

    def _body(self, reply: pb.AppReply, sent: _Sent) -> RecordDict | Error | None:
        """What the reply says; None: the coordinator went away with its arrays, and it comes again."""
        if reply.error:
            return Error(int(reply.error), heard.reason_of(reply.reason))
        known = {part.hash: part.data for part in reply.parts if part.data or not part.size}
        wanted = {
            part.hash: part.size
            for part in reply.parts
            if part.hash not in known and part.hash not in sent.parts
        }
        try:
            for name, data in known.items():
                if content.part_hash(data) != name:
                    raise BadFrame(f"part {name[:12]} of the reply is not what its name says")
            fetched = self._patiently(lambda: self.link.get(wanted))
            if fetched is None:
                return None
            known |= fetched
            records = content.decode(reply.content, lambda name, size: _part(name, size, known, sent.parts))
            return heard.checked(records)
        except ConnectionFailed:
            raise  # no fault of this node
        except (AtollError, ValueError, TypeError, LookupError) as error:
            # Whatever a node answers costs its own reply, never the run.
            return Error(flower.REPLY_UNAVAILABLE, heard.reason_of(str(error)))

    # ------------------------------------------------------------ what Flower asks of a Grid

    def set_run(self, run: Any) -> None:
        """The run is given from the start."""
        self._run = run

    @property
    def run(self) -> Any:
        """What Flower knows of this run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message of this run, as ``flwr.app.Message`` makes it."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that take part now, by partition."""
        self._note_idle()
        with self._changed:
            return sorted(self._nodes, key=lambda node: self._nodes[node].partition)

    def get_nodes(self) -> Iterable[Any]:
        """The same with their names."""
        return [flower.node_info(node, self._nodes[node].name) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids, by which replies are pulled."""
        ids: list[str] = []
        used: set[str] = set()
        for message in messages:
            sent = self._prepared(message)
            used |= sent.parts.keys()
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._sent[sent.task.message] = sent
                self._uses.update(sent.parts.keys())
                away = self._away
            if not away:
                self._post(sent)
            ids.append(sent.task.message)
        self._recent.append(frozenset(used))
        self._forget()
        self._quiet_s, self._looks = time.monotonic(), 0
        if ids:
            first = self._sent_task(ids[0])
            self._tell("sent", {"kind": first[0], "group": first[1], "nodes": len(ids)})
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Those replies that are here; each is handed out once."""
        with self._changed:
            return [self._replies.pop(m) for m in dict.fromkeys(message_ids) if m in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for their replies, at most ``timeout`` seconds.

        Nobody can ask for a reply that was not here in time: its node is asked to stop.
        """
        started_s = time.monotonic()
        ids = list(self.push_messages(messages))
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(m in self._replies for m in ids), timeout
            )
            if self._failure is not None:
                raise self._failure
            late = [m for m in ids if m not in self._replies]
            for message in late:
                self._uses.subtract(self._sent.pop(message).parts.keys())
            replies = [self._replies.pop(m) for m in ids if m in self._replies]
            traffic = [self._traffic.pop(m) for m in ids if m in self._traffic]
            order = {node: at.partition for node, at in self._nodes.items()}
        if late:
            self.link.say(pb.FromApp(cancel=pb.AppCancel(run=self._run_id, messages=late)))
        if ids:
            self._report(replies, traffic, late, time.monotonic() - started_s)
        return sorted(replies, key=lambda reply: order.get(reply.metadata.src_node_id, len(order)))

    # ------------------------------------------------------------ helpers

    def _note_idle(self) -> None:
        """Say once what an app may wait for that asks who is there and sends nothing: a legacy one says not a
        word."""
        now_s = time.monotonic()
        with self._changed:
            count = len(self._nodes)
            self._looks += 1
            if self._sent or not count or self._looks < IDLE_LOOKS or now_s - self._quiet_s < IDLE_S:
                return
            self._quiet_s = math.inf
        words = (
            f"the app has sent nothing for {IDLE_S:.0f} s: it computes, or waits for more than the {count}"
        )
        self._tell("waiting", {"reason": f"{words} nodes that take part"})

    def _prepared(self, message: Message) -> _Sent:
        metadata = message.metadata
        name = uuid.uuid4().hex
        flower.named(message, name)
        encoded = content.encode(message.content)
        task = pb.AppTask(
            run=self._run_id,
            message=name,
            node=metadata.dst_node_id,
            kind=metadata.message_type,
            group=metadata.group_id,
            created_s=metadata.created_at,
            ttl_s=metadata.ttl,
            content=encoded.content,
        )
        return _Sent(task, metadata, encoded.parts, time.monotonic(), -1)

    def _post(self, sent: _Sent) -> None:
        """Say a message, after the large arrays that the coordinator lacks."""
        with self._changed:
            sent.epoch = epoch = self._epoch
            parts = content.inlined(sent.parts, self._there)
            large = {
                p.hash: sent.parts[p.hash]
                for p in parts
                if p.size and not p.data and p.hash not in self._there
            }
        if self._patiently(lambda: self.link.put(large)) is None or epoch != self._epoch:
            sent.epoch = -1
            if not self._away:
                self._post(sent)
            return  # else it is said once the coordinator and its nodes are back
        left_s = sent.task.ttl_s - (time.monotonic() - sent.sent_s)
        task = pb.AppTask(left_s=max(0.0, left_s), parts=parts)
        task.MergeFrom(sent.task)
        with self._changed:
            self._there |= sent.parts.keys()
        self.link.say(pb.FromApp(task=task))

    def _patiently(self, call: Callable[[], T]) -> T | None:
        """The call's result; None when the coordinator was restarted meanwhile, so that it is void."""
        epoch = self._epoch
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except (ConnectionFailed, UsageError):
                with self._changed:
                    over = self._changed.wait_for(
                        lambda: self._epoch != epoch or self._failure is not None, RETRY_S
                    )
                if self._failure is not None:
                    raise self._failure from None
                if over:
                    return None
                if attempt + 1 == ATTEMPTS:
                    raise
        return None

    def _sent_task(self, message: str) -> tuple[str, str]:
        with self._changed:
            sent, reply = self._sent.get(message), self._replies.get(message)
            if sent is not None:
                return sent.task.kind, sent.task.group
            return (reply.metadata.message_type, reply.metadata.group_id) if reply is not None else ("", "")

    def _taken(self, reply: pb.AppReply, known: Iterable[str]) -> None:
        """The coordinator need not keep what came with this reply."""
        came = {part.hash for part in reply.parts if part.size and not part.data} - set(known)
        if came:
            forget = pb.AppForget(run=self._run_id, hashes=sorted(came), message=reply.message)
            self.link.say(pb.FromApp(forget=forget))

    def _forget(self) -> None:
        """Tell the coordinator which parts no message can refer to any more."""
        with self._changed:
            kept = frozenset().union(*self._recent) | {name for name, n in self._uses.items() if n > 0}
            over = self._there - kept
            self._there -= over
            self._uses = +self._uses
        if over:
            self.link.say(pb.FromApp(forget=pb.AppForget(run=self._run_id, hashes=sorted(over))))

    def _report(self, replies: list[Message], traffic: list[Traffic], late: list[str], took_s: float) -> None:
        errors = [error for one in traffic for error in one.errors]
        figures = {
            "replies": sum(not reply.has_error() for reply in replies),
            "errors": errors[:MAX_ERRORS_TOLD],
            "failed": len(errors),
            "late": len(late),
            "down_bytes": sum(one.down_bytes for one in traffic),
            "up_bytes": sum(one.up_bytes for one in traffic),
            "took_s": took_s,
        }
        self._tell("replies", figures)


def _part(name: str, size: int, *sources: dict[str, bytes]) -> bytes:
    data = next((source[name] for source in sources if name in source), None)
    if data is None or len(data) != size:
        raise UsageError(f"part {name[:12]} of the reply did not arrive whole")
    return data
