"""The leader's side of a mesh: its followers started, given their orders, and missed where one ends."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch
import torch.distributed as dist

from atoll.errors import AtollError, UsageError
from atoll.mesh.group import Processes
from atoll.mesh.volumes import reduced_bytes
from protos import atoll_compute_pb2 as pb
from protos.child_pipe import Gone, Pipe
from worker.machine.device import devices_of
from worker.machine.torch_device import torch_device
from worker.mesh.stage import MeshStage
from worker.pipe.status import Mark
from worker.stage.op_marks import allowed_for

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from protos import atoll_control_pb2 as control
    from worker.context import ComputeSettings
    from worker.machine.device import Device
    from worker.pipe.status import ComputeStatus
    from worker.stage.assignment import Assignment

log = structlog.get_logger()

PROGRAM = (sys.executable, "-P", "-m", "worker.mesh")
READY_S = 300.0  # importing torch takes seconds, on a part of a core many
FAILS_WITHIN_S, POLL_S = 10.0, 0.05
PROBE_BYTES = 4 << 20
PROBES = 5


class Joint(NamedTuple):
    """What an all-reduce of the mesh takes: seconds for one of next to nothing, and bytes a second that each
    process sends beyond."""

    latency_s: float
    bytes_per_s: float


class Follower(NamedTuple):
    """A process that follows, and the leader's end of its pipe."""

    process: subprocess.Popen[bytes]
    pipe: Pipe


class Leader:
    """Followers of this process, and the group that they make with it; ``joint`` once they are ready."""

    joint: Joint

    def __init__(
        self,
        settings: ComputeSettings,
        device: Device,
        scratch: Path,
        blobs: Path,
        died: Callable[[str], None] = lambda reason: None,
        started: Sequence[Follower] = (),
        status: ComputeStatus | None = None,
    ) -> None:
        """``died`` is called, in a thread, when a follower ends by itself; ``started``: what
        ``start_followers`` returned; ``status`` shows what others are waited for, as it shows ops.
        UsageError where a process cannot be."""
        self._settings, self._device, self._scratch, self._blobs = settings, device, scratch, blobs
        self._died, self._status = died, status
        self.devices = devices_of(settings.device)
        self._round = 0  # of starts
        self._followers: list[Follower] = list(started)
        self._stage: MeshStage | None = None
        self._start()

    def stage(
        self, message: control.Assign, assignment: Assignment, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> MeshStage:
        """Return the assignment's stage, which all processes load. Starts them anew where a call of the last
        one failed."""
        self.drop()
        if not self._followers:
            self._start()
        self._say(pb.ToFollower(load=message))
        place = torch_device(self._device)
        exchanges = self._exchanges(sum(state.meta.nbytes for state in assignment.leaf_states.values()))
        try:
            self._stage = MeshStage(
                assignment, tensors, place, self.processes, self._tell, self._scratch, exchanges
            )
        except BaseException:  # the others fail in the same way
            self._stop()
            raise
        return self._stage

    def _exchanges(self, n_bytes: int) -> Callable[[], AbstractContextManager[object]]:
        """What shows that processes exchange up to ``n_bytes``: whoever hangs is ended as by an op."""
        status = self._status
        if status is None:
            return nullcontext
        shown = status.encoded(Mark("what processes of the mesh exchange", allowed_for(n_bytes)))

        @contextmanager
        def exchanging() -> Iterator[None]:
            status.begin(shown)
            try:
                yield
            finally:
                status.end()

        return exchanging

    def drop(self) -> None:
        """Have nobody hold the last stage any more.

        Where a call of it failed, the followers may wait for each other for ever: they are ended.
        """
        if self._stage is not None and self._stage.broken:
            self._stop()
        elif self._stage is not None:
            self._tell(pb.MeshWork(call="drop"))
        self._stage = None

    def close(self) -> None:
        """End the followers."""
        self._stop()

    @property
    def _failed(self) -> bool:
        return self._stage is not None and self._stage.broken

    def _tell(self, work: pb.MeshWork) -> None:
        self._say(pb.ToFollower(work=work))

    def _say(self, message: pb.ToFollower) -> None:
        try:
            for follower in self._followers:
                follower.pipe.send(message)
        except Gone:
            raise AtollError("a process of this mesh has ended") from None

    # ------------------------------------------------------------ processes

    def _start(self) -> None:
        self._round += 1
        meeting = self._scratch / f"mesh-{self._round}"
        size, settings = len(self.devices), self._settings
        self._followers = self._followers or start_followers(settings.device)
        for rank, (device, follower) in enumerate(zip(self.devices[1:], self._followers, strict=True), 1):
            setup = pb.FollowerSetup(
                device=device,
                threads=self._device.threads,
                memory_bytes=settings.memory_bytes,
                gpu_memory_bytes=settings.gpu_memory_bytes,
                blob_dir=str(self._blobs),
                rank=rank,
                size=size,
                meeting=str(meeting),
            )
            follower.pipe.send(pb.ToFollower(setup=setup))
        self.processes = joined(meeting, 0, size)
        try:
            for rank, follower in enumerate(self._followers, 1):
                found = follower.pipe.receive(pb.FromFollower(), READY_S)
                if not found.ready:
                    raise UsageError(f"process {rank} of this mesh does not work: {found.error}")
        except (Gone, TimeoutError):
            raise UsageError(f"process {rank} of this mesh ended before it was ready") from None
        for rank, follower in enumerate(self._followers, 1):
            arguments = (rank, follower)
            threading.Thread(target=self._watch, args=arguments, name="atoll-mesh", daemon=True).start()
        self.joint = _probed(self.processes, self._tell, torch_device(self._device))

    def _stop(self) -> None:
        if not self._followers:
            return
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.process.kill()
            follower.process.wait()
            follower.pipe.close()
        self.processes.close()

    def _watch(self, rank: int, follower: Follower) -> None:
        """Thread: a follower that ends is missed at once, not when the next call hangs."""
        reason = ""
        with contextlib.suppress(Gone, AtollError):
            reason = follower.pipe.receive(pb.FromFollower()).error
        # What fails there fails here, too, or as soon as this process waits for it: the stage is reported.
        until_s = time.monotonic() + FAILS_WITHIN_S * bool(reason)
        while not self._failed and follower in self._followers and time.monotonic() < until_s:
            time.sleep(POLL_S)
        if follower not in self._followers or self._failed:
            return
        code = follower.process.wait()
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self._died(f"process {rank} of the mesh ended ({how}) {reason}".rstrip())


def joined(meeting: Path, rank: int, size: int) -> Processes:
    """Return the group of processes that meet in a file; waits for all of them."""
    # Over the loopback device, which in a sandbox is its own; NCCL meets there, too.
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    world = dist.group.WORLD
    if world is None:
        raise AtollError("torch.distributed has no group")
    return Processes(world)


def probe(processes: Processes, device: torch.device) -> None:
    """Take part in the probing of collectives."""
    small, large = torch.zeros(1, device=device), torch.zeros(PROBE_BYTES // 4, device=device)
    for value in (small, large):
        for _ in range(PROBES):
            processes.sum(value)


def _probed(processes: Processes, tell: Callable[[pb.MeshWork], None], device: torch.device) -> Joint:
    tell(pb.MeshWork(call="probe"))
    took = []
    for count in (1, PROBE_BYTES // 4):
        value = torch.zeros(count, device=device)
        times = []
        for _ in range(PROBES):
            begun_s = time.perf_counter()
            processes.sum(value)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun_s)
        took.append(statistics.median(times))
    small_s, large_s = took
    processes.sent_bytes = 0
    return Joint(small_s, reduced_bytes(PROBE_BYTES, processes.size) / max(large_s - small_s, 1e-6))


def start_followers(devices: str) -> list[Follower]:
    """Start a process for each device but the first; they wait for their setup."""
    return [_started() for _ in devices_of(devices)[1:]]


def _started() -> Follower:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [*PROGRAM, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Follower(process, Pipe(ours))
