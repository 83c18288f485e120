"""The process that a ClientApp runs in, one for each run, warm from message to message.

It imports the app once, keeps its Context, and answers one task after another over a pipe to the
worker's daemon. Arrays come and go as files named by their hash; Context.state is on the disk
before the reply is sent. It has no connection of its own and dies with the daemon (hostos/app_guard.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as pb
from protos import flower_content as content
from protos import flower_internals as flower
from protos.child_pipe import Gone, Pipe, pipe_from
from protos.text_limits import REASON_CHARS

STATE_FILE = "state"


class Child:
    """A ClientApp, and a Context for each node that this worker is."""

    def __init__(self, pipe: Pipe, setup: pb.ChildSetup) -> None:
        self._pipe = pipe
        self._setup = setup
        self._run = setup.run
        self._app: Any = None
        self._contexts: dict[int, Context] = {}  # by node
        self._saved: dict[int, bytes] = {}  # states as they are on the disk

    def load(self) -> None:
        """Import the ClientApp; report what went wrong to the daemon."""
        started_s = time.perf_counter()
        error = ""
        try:
            if self._setup.packages_dir:
                sys.path.append(self._setup.packages_dir)  # last: it takes the place of nothing
            self._app = flower.find_app(self._setup.client, Path(self._setup.code_dir))
            if not callable(self._app):
                error = f"{self._setup.client} is {type(self._app).__name__}, no ClientApp"
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - anything may go wrong in foreign code
            error = _words(failure)
        took_s = time.perf_counter() - started_s
        self._pipe.send(pb.FromChild(loaded=pb.ChildLoaded(error=error, took_s=took_s)))

    def serve(self) -> None:
        """Answer until the daemon is gone."""
        while True:
            message = self._pipe.receive(pb.ToChild())
            if message.HasField("start"):
                self._start(message.start)
            elif message.HasField("task"):
                reply = self._answer(message.task)
                del message
                self._pipe.send(pb.FromChild(reply=reply))
                del reply

    def _start(self, start: pb.AppStart) -> None:
        self._run = start.run
        config = {key: content.value_from_proto(value) for key, value in self._setup.node_config.items()}
        run_config = {key: content.value_from_proto(value) for key, value in start.run_config.items()}
        for seat in start.seats:
            if seat.node in self._contexts:
                continue
            place = {"partition-id": seat.partition, "num-partitions": start.partitions}
            self._contexts[seat.node] = Context(
                run_id=start.run,
                node_id=seat.node,
                node_config={**config, **place},
                state=self._load_state(seat.node),
                run_config=dict(run_config),
            )

    def _answer(self, task: pb.AppTask) -> pb.AppReply:
        started_s = time.perf_counter()
        try:
            reply = self._reply(task)
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - the app's errors are its replies
            traceback.print_exception(failure)
            self._roll_back(task.node)
            reply = pb.AppReply(error=flower.APP_RAISED, reason=_words(failure))
        reply.run, reply.message, reply.created_s = task.run, task.message, time.time()
        reply.took_s = time.perf_counter() - started_s
        return reply

    def _reply(self, task: pb.AppTask) -> pb.AppReply:
        context = self._contexts.get(task.node)
        if context is None:
            raise BadFrame("a task for a node that is not here, or before the start of its run")
        if self._stored(task.node) != self._saved[task.node]:  # another process has served this node
            context.state = self._load_state(task.node)
        flower.take_identity(task.run, task.node)
        message = flower.task_message(
            content.decode(task.content, self._read),
            run=task.run,
            message_id=task.message,
            node=task.node,
            kind=task.kind,
            group=task.group,
            created_s=task.created_s,
            ttl_s=task.ttl_s,
        )
        answer = self._app(message, context)
        if not isinstance(answer, Message):
            raise TypeError(f"the ClientApp returned {type(answer).__name__}, no Message")
        self._save_state(task.node, context.state)
        if answer.has_error():
            found: Error = answer.error
            return pb.AppReply(
                error=found.code or flower.APP_RAISED, reason=(found.reason or "")[:REASON_CHARS]
            )
        encoded = content.encode(answer.content)
        parts = content.inlined(encoded.parts, (part.hash for part in task.parts))
        came = {part.hash for part in task.parts}
        for part in parts:
            if part.size and not part.data and part.hash not in came:
                _write(Path(self._setup.outbox_dir) / part.hash, encoded.parts[part.hash])
        return pb.AppReply(content=encoded.content, parts=parts)

    def _read(self, name: str, size: int) -> bytes:
        return _read(Path(self._setup.parts_dir) / name, size)

    # ------------------------------------------------------------ Context.state

    def _folder(self, node: int) -> Path:
        return Path(self._setup.runs_dir) / f"{self._run:x}-{node:x}"

    def _stored(self, node: int) -> bytes:
        """The state as it is on the disk, without its arrays; empty before there is one."""
        try:
            return (self._folder(node) / STATE_FILE).read_bytes()
        except FileNotFoundError:
            return b""

    def _load_state(self, node: int) -> RecordDict:
        saved = self._saved[node] = self._stored(node)
        if not saved:
            return RecordDict()
        folder = self._folder(node)
        return content.decode(saved, lambda name, size: _read(folder / name, size))

    def _save_state(self, node: int, state: RecordDict) -> None:
        """Write what changed, the arrays first; then forget those of the state before."""
        encoded, folder = content.encode(state), self._folder(node)
        if encoded.content == self._saved[node]:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in encoded.parts.items():
            if not (folder / name).exists():
                _write(folder / name, data)
        _write(folder / STATE_FILE, encoded.content)
        self._saved[node] = encoded.content
        for path in folder.iterdir():
            if path.name not in encoded.parts and path.name != STATE_FILE:
                path.unlink(missing_ok=True)

    def _roll_back(self, node: int) -> None:
        """A task that failed leaves the state as it found it."""
        if node in self._contexts:
            self._contexts[node].state = self._load_state(node)


def _read(path: Path, size: int) -> bytes:
    data = path.read_bytes()
    if len(data) != size:
        raise BadFrame(f"part {path.name[:12]} has {len(data)} bytes, announced were {size}")
    return data


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(data)
    scratch.replace(path)


def _words(failure: BaseException) -> str:
    """The reason as Flower words it, then the end of the traceback."""
    lines = "".join(traceback.format_exception(failure))
    return f"{type(failure)}:<'{failure}'>\n{lines[-REASON_CHARS // 2 :]}"[:REASON_CHARS]


def main() -> None:
    """Entry: the pipe's descriptor is the only argument."""
    pipe = pipe_from(int(sys.argv[1]))
    with contextlib.suppress(Gone):
        child = Child(pipe, pipe.receive(pb.ToChild()).setup)
        child.load()
        child.serve()
    # Threads of the app must not hold up the end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
