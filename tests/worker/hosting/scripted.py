"""A compute process that does what a test says: the program is real, contained and bounded as ever."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from atoll.messages.from_worker import Goodput
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S
from worker.blobs import BlobFile
from worker.cancel import Cancel
from worker.transport.contract import Paths, Receiver
from worker.transport.frames import MessageKey

_BEGIN = """
import os, sys, time
from protos import atoll_control_pb2 as control
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos.child_pipe import Gone, pipe_from

pipe, held = pipe_from(int(sys.argv[1])), ""

def say(**body):
    pipe.send(pb.FromCompute(**body))

def report(**body):
    say(said=control.FromWorker(**body))

def applied(step=0):
    say(applied=control.StepStart(job=held, step=step))

def on_ping(m):
    say(pong=m)

def on_setup(m):
    ready()

def ready():
    say(ready=pb.ComputeReady(device=control.DeviceFacts(kind="cpu", memory_limit_bytes=1 << 30)))

"""
_END = """
while True:
    try:
        message = pipe.receive(pb.ToCompute())
    except Gone:
        break
    if message.freed and "on_freed" in globals():
        on_freed(list(message.freed))
    kind = message.WhichOneof("body")
    if kind is None:
        continue
    if kind == "stop":
        break
    body = getattr(message, kind)
    held = body.job if kind == "load" else body.invitation.job if kind == "join" else held
    if kind == "load":
        globals().get("on_load_asked", lambda m: None)(body)
        say(loading=message.assignment)
    globals().get("on_" + kind, lambda m: None)(body)
"""


def command(handlers: Mapping[str, str]) -> tuple[str, ...]:
    """Command line of a process that runs ``handlers`` by kind of message; ``m`` is its body.
    ``load_asked``: before the assignment's number is said."""
    functions = [f"def on_{kind}(m):\n{indent(code, '    ')}\n" for kind, code in handlers.items()]
    return (sys.executable, "-P", "-c", "\n".join([_BEGIN, *functions, _END]))


@dataclass
class Network:
    """The part of a PeerNetwork that a host uses."""

    receivers: dict[str, Receiver] = field(default_factory=dict)
    forgotten: list[tuple[str, int | None]] = field(default_factory=list)
    sent: queue.SimpleQueue[tuple[str, MessageKey, bytes, bytes]] = field(default_factory=queue.SimpleQueue)
    admitted: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    joined: bool = True  # with everybody

    def register(self, job: str, receiver: Receiver) -> None:
        self.receivers[job] = receiver

    def unregister(self, job: str, receiver: Receiver) -> None:
        if self.receivers.get(job) is receiver:
            del self.receivers[job]

    def forget(self, job: str, plan_version: int | None = None) -> None:
        self.forgotten.append((job, plan_version))

    def send(
        self, peer: str, key: MessageKey, header: bytes, payload: memoryview, timeout_s: float, more: bool
    ) -> None:
        self.sent.put((peer, key, header, bytes(payload)))

    def admit(self, peer: str) -> None:
        self.admitted.append(peer)

    def connected(self, peer: str) -> bool:
        return self.joined

    def expect(self, peer: str, paths: Paths, timeout_s: float) -> None:
        self.expected.append(peer)

    def goodput(self) -> list[Goodput]:
        return [Goodput("w-b", 10, 0.5, 0.01, quickest_bps=4e6)]


@dataclass
class Blobs:
    """A blob store that remembers what it was asked."""

    fetched: list[Mapping[str, int]] = field(default_factory=list)
    stored: list[BlobFile] = field(default_factory=list)

    def fetch(self, wanted: Mapping[str, int], cancel: Cancel, progress: Any = None) -> None:
        self.fetched.append(wanted)

    def store(self, files: Sequence[BlobFile], cancel: Cancel, progress: Any = None, *, new: bool) -> int:
        for file in files:
            assert file.path.read_bytes()
        self.stored += files
        return sum(file.size for file in files)


def batches(asked: control.BatchRequest) -> list[control.Batch]:
    """One micro-batch of every step."""
    data = asked.job.encode()[:3].ljust(3)
    return [
        control.Batch(step=asked.first_step + at, input=asked.inputs[0], dtype="uint8", shape=(3,), data=data)
        for at in range(asked.count)
    ]


def taken(posted: queue.SimpleQueue[Any]) -> Any:
    """The next event."""
    return posted.get(timeout=HUNG_S)
