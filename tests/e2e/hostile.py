"""A compute process that turns on its host in jobs named after an attack ("segfault", "opens", ...).

It is the real one, with some of its functions replaced; ``hostile_worker`` hands its text to Python, so
that it needs no file that a contained process does not see. An attack happens in the third step of a job's
first plan, or of every plan where the job's name ends in "always": a job that is planned anew is honest.
"""

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos.child_pipe import pipe_from
from worker.blobs import BlobFile
from worker.cancel import Cancel
from worker.compute.ports import Arenas
from worker.compute.process import ComputeProcess, serve
from worker.federated.kept.folders import job_folder
from worker.federated.participation import Participation
from worker.pipe.arena import Arena
from worker.stage.op_marks import OpMarks
from worker.stage.steps.run import StageRun

BEGUN_S = time.monotonic()
TOLD: dict[str, Any] = json.loads(sys.argv.pop(1))
"""What an attacker may know: files, a port, the daemon's number."""
AT_STEP = 2


class Hostile:
    """The process, and what it is about to do."""

    process: Any
    setup: Any
    attack = ""


# ---------------------------------------------------------------- in an op


def tried(what: str, act: Any) -> str:
    """The outcome in words."""
    try:
        act()
    except OSError as error:
        return f"{what}: {error.strerror or error}"
    return f"{what}: done"


def segfault() -> None:
    ctypes.string_at(0)


def spins() -> None:
    while True:
        pass


def sleeps() -> None:
    ctypes.PyDLL(None).sleep(3600)  # and nobody else runs


def grows() -> None:
    held = []
    while True:
        held.append(bytearray(b"x" * (32 << 20)))


def forks() -> None:
    while True:
        if os.fork() == 0:
            time.sleep(3600)


def opens() -> None:
    found = [tried(Path(name).name, Path(name).read_bytes) for name in (TOLD["secret"], TOLD["key"])]
    raise UsageError("; ".join(found))


def connects() -> None:
    def connect() -> None:
        socket.create_connection(("127.0.0.1", TOLD["port"]), 5.0).close()

    raise UsageError(tried("connection", connect))


def peeks() -> None:
    def read() -> None:
        with (
            Path(f"/proc/{TOLD['daemon']}/maps").open() as maps,
            Path(f"/proc/{TOLD['daemon']}/mem").open("rb") as memory,
        ):
            memory.seek(int(maps.readline().split("-")[0], 16))
            memory.read(16)

    raise UsageError(tried("memory of the daemon", read))


# ---------------------------------------------------------------- on the pipe


def tell(message: Any) -> None:
    Hostile.process._tell(message)


def said(**body: Any) -> None:
    tell(pb.FromCompute(said=control.FromWorker(**body)))


def raw(data: bytes) -> None:
    Hostile.process._pipe._socket.sendall(data)


def rubbish() -> None:
    raw(struct.pack("!I", 64) + b"\xff" * 64)


def endless() -> None:
    raw(struct.pack("!I", 2**32 - 1) + bytes(1 << 20))


def unknown() -> None:
    said(introduction=control.Introduction(name="other-1"))


def foreign() -> None:
    """Word of another job, which is dropped; then of a worker whose name breaks a line."""
    said(failed=control.StageFailed(job="other-1", reason="broken by a stranger"))
    said(failed=control.StageFailed(job=Hostile.process.job, plan_version=1, lost_peer="w\n"))


def leaves() -> None:
    said(leaving=control.Leaving(reason="bye"))


def floods() -> None:
    log = control.WorkerLog(level="info", event="stage.flood", fields_json="x" * 60_000)
    while True:
        said(log=log)


def twice() -> None:
    tell(pb.FromCompute(ready=pb.ComputeReady()))


def beyond() -> None:
    key = pb.Key(job=Hostile.process.job, plan_version=1, step=AT_STEP)
    tell(pb.FromCompute(outgoing=pb.Outgoing(peer="w", key=key, offset=2**62, size=2**20)))


def outside() -> None:
    """A message to nobody of this plan."""
    key = pb.Key(job=Hostile.process.job, plan_version=1, step=AT_STEP)
    tell(pb.FromCompute(outgoing=pb.Outgoing(peer="somebody", key=key, offset=1 << 16, size=64)))


def wants() -> None:
    key = pb.Key(job=Hostile.process.job, plan_version=1, step=9, edge=1)
    peer = Hostile.process.peer
    wanted = pb.Wanted(peer=peer, key=key, max_bytes=2**63)
    tell(pb.FromCompute(wanted=pb.WantedList(messages=[wanted])))


def shuts() -> None:
    Hostile.process._pipe.close()
    time.sleep(3600)


def leaks() -> None:
    """A link to the worker's key among the files that it may send to the store."""
    link = Path(Hostile.setup.scratch_dir) / "linked"
    link.symlink_to(TOLD["key"])
    blobs = Hostile.process._bench._context.blobs
    blobs.store([BlobFile(link, "0" * 64, 100)], Cancel())


def steals() -> None:
    """The key itself, as a file of its own."""
    blobs = Hostile.process._bench._context.blobs
    blobs.store([BlobFile(Path(TOLD["key"]), "0" * 64, 100)], Cancel())


def fetches() -> None:
    Hostile.process._bench._context.blobs.fetch({"0" * 64: 2**63}, Cancel())


def deaf() -> None:
    """It reads nothing any more."""
    Hostile.process._pipe.receive = lambda into: time.sleep(3600)


IN_OPS = {act.__name__: act for act in (segfault, spins, sleeps, grows, forks, opens, connects, peeks)}
ON_THE_PIPE = {
    act.__name__: act
    for act in (
        rubbish, endless, unknown, foreign, leaves, floods, twice, beyond, outside, wants, shuts, leaks,
        steals, fetches, deaf,
    )
}  # fmt: skip


# ---------------------------------------------------------------- in a federated job


def looks_around(folder: Path) -> None:
    """Which of the host's files a federated job's process can read, by name."""
    (folder / "written").write_bytes(b"its own")
    found = {name: _readable(Path(path)) for name, path in TOLD["files"].items()}
    raise UsageError("readable: " + ", ".join(name for name in sorted(found) if found[name]))


def _readable(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_dir():
            return bool(os.listdir(path))
        return bool(path.read_bytes())
    return False


# ---------------------------------------------------------------- the process


def replace_all() -> None:
    begin, run_step, train = OpMarks.__call__, StageRun.run_step, Participation.train
    init = ComputeProcess.__init__

    def watched(self: Any, at: Any) -> None:
        begin(self, at)
        act = IN_OPS.get(Hostile.attack)
        if act is not None and at is not None and at >= 0:
            Hostile.attack = ""
            act()

    def stepping(self: Any, step: int, cancel: Any) -> Any:
        job, version = self.assignment.job, self.assignment.version
        name, _, more = job.partition("-")
        if step == AT_STEP and (version == 1 or "always" in more):
            Hostile.attack = name
            Hostile.process.job = job
            Hostile.process.peer = self.assignment.links[0].worker
            if name in ON_THE_PIPE:
                ON_THE_PIPE[name]()
        return run_step(self, step, cancel)

    def made(self: Any, pipe: Any, arenas: Any, setup: Any, began_s: float) -> None:
        Hostile.process, Hostile.setup = self, setup
        init(self, pipe, arenas, setup, began_s)

    def training(self: Any, order: Any, cancel: Any) -> Any:
        if self.joining.job.startswith("looks"):
            looks_around(Path(TOLD["files"]["own folder"]))
        died = job_folder(Path(Hostile.setup.state_dir), self.joining.job) / "died"
        if self.joining.job.startswith("dies") and order.round == 1 and not died.exists():
            died.touch()
            segfault()
        return train(self, order, cancel)

    OpMarks.__call__, StageRun.run_step, ComputeProcess.__init__ = watched, stepping, made  # type: ignore[method-assign]
    Participation.train = training  # type: ignore[method-assign]


if __name__ == "__main__":
    given, incoming, incoming_bytes, outgoing, outgoing_bytes = map(int, sys.argv[1:])
    replace_all()
    arenas = Arenas(Arena(incoming, incoming_bytes), Arena(outgoing, outgoing_bytes))
    serve(pipe_from(given), arenas, BEGUN_S)
