"""The leader's side of a mesh: its followers started, given their orders, and missed where one ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch

from atoll.errors import AtollError, UsageError
from atoll.mesh.volumes import reduced_bytes
from protos import atoll_compute_pb2 as pb
from protos.child_pipe import Gone
from worker.machine.device import devices_of
from worker.machine.torch_device import find_device, torch_device
from worker.mesh.followers import Follower, start_followers
from worker.mesh.handing import Handing
from worker.mesh.meeting import Board, LeadersStore, joined
from worker.mesh.stage import MeshStage
from worker.pipe.status import Mark
from worker.stage.op_marks import allowed_for

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.mesh.group import Processes
    from protos import atoll_control_pb2 as control
    from worker.context import ComputeSettings
    from worker.machine.device import Device
    from worker.pipe.status import ComputeStatus
    from worker.stage.assignment import Assignment

log = structlog.get_logger()

READY_S = 300.0  # importing torch takes seconds, on a part of a core many
FAILS_WITHIN_S, POLL_S = 10.0, 0.05
PROBE_BYTES = 4 << 20
PROBES = 5


class Joint(NamedTuple):
    """What an all-reduce of the mesh takes: seconds for one of next to nothing, and bytes a second that each
    process sends beyond."""

    latency_s: float
    bytes_per_s: float


class Reach(NamedTuple):
    """Where the processes of a mesh are. ``interface``: of the site's network where some are on other hosts,
    else "". ``may_shrink``: go on without those that are not there."""

    interface: str = ""
    may_shrink: bool = False


class Leader:
    """Followers of this process, and the group that they make with it.

    ``device`` is what they have together, ``joint`` what their collectives take. Where no follower is left,
    ``alone`` is true and there is no stage of this kind.
    """

    joint = Joint(0.0, 0.0)
    processes: Processes

    def __init__(
        self,
        settings: ComputeSettings,
        device: Device,
        folders: tuple[Path, Path],
        died: Callable[[str], None] = lambda reason: None,
        started: Sequence[Follower] = (),
        status: ComputeStatus | None = None,
        reach: Reach = Reach(),  # noqa: B008 - a constant
    ) -> None:
        """``folders``: its own, and that of blobs. ``died`` is called, in a thread, when a follower ends by
        itself; ``started``: followers that were started already; ``status`` shows what others are waited for,
        as it shows ops. UsageError where a process cannot be."""
        self._settings, self.device, self._reach = settings, device, reach
        self._scratch, self._blobs = folders
        self._died, self._status = died, status
        self._round = 0  # of starts
        self._followers: list[Follower] = []
        self._stage: MeshStage | None = None
        self._start(started or start_followers(settings.device))

    @property
    def alone(self) -> bool:
        """True where no other process is there."""
        return not self._followers

    def stage(
        self, message: control.Assign, assignment: Assignment, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> MeshStage:
        """Return the assignment's stage, which all processes load. Starts them anew where a call of the last
        one failed."""
        self.drop()
        if not self._followers:
            self._start(start_followers(self._settings.device))
        elsewhere = bool(self._reach.interface)
        self._say(pb.ToFollower(load=pb.MeshLoad(assign=message, handed=elsewhere)))
        place = torch_device(self.device)
        handing = Handing(self.processes, place, tell=self._say) if elsewhere else None
        exchanges = self._exchanges(sum(state.meta.nbytes for state in assignment.leaf_states.values()))
        try:
            self._stage = MeshStage(
                assignment, tensors, place, self.processes, self._tell, self._scratch, exchanges, handing
            )
        except BaseException:  # the others fail in the same way
            self._restart()
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
            self._restart()
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
                follower.send(message)
        except Gone:
            raise AtollError("a process of this mesh has ended") from None

    # ------------------------------------------------------------ processes

    def _start(self, started: Sequence[Follower]) -> None:
        """Have followers that were started find their devices, meet, and be probed."""
        self._round += 1
        board, elsewhere = Board(), bool(self._reach.interface)
        for follower in started:
            if not elsewhere:
                follower.send(pb.ToFollower(setup=self._setup(follower.device)))
            follower.begin(board, self._missed)
        self._followers = self._present(started)
        self._measure()
        if self.alone:
            return
        meeting = "" if elsewhere else str(self._scratch / f"mesh-{self._round}")
        size = len(self._followers) + 1
        for rank, follower in enumerate(self._followers, 1):
            follower.rank = rank
            follower.send(pb.ToFollower(meeting=pb.MeshMeeting(rank=rank, size=size, file=meeting)))
        store = Path(meeting) if meeting else LeadersStore(board)
        self.processes = joined(store, 0, size, self._reach.interface)
        until_s = time.monotonic() + READY_S
        for follower in self._followers:
            if not follower.is_ready(until_s):
                raise UsageError(_why_not(follower))
        self.joint = _probed(self.processes, self._tell, torch_device(self.device))

    def _setup(self, device: str) -> pb.FollowerSetup:
        settings = self._settings
        return pb.FollowerSetup(
            device=device,
            threads=self.device.threads,
            memory_bytes=settings.memory_bytes,
            gpu_memory_bytes=settings.gpu_memory_bytes,
            blob_dir=str(self._blobs),
            scratch_dir=str(self._scratch),
        )

    def _present(self, started: Sequence[Follower]) -> list[Follower]:
        """Return the followers that have found their devices. UsageError where one has not, and all are
        needed."""
        found, until_s = [], time.monotonic() + READY_S
        for number, follower in enumerate(started, 1):
            follower.rank = number
            why_not = "" if follower.is_there(until_s) else _why_not(follower)
            if follower.found is not None and self._reach.interface:
                why_not = why_not or self._unlike(follower.found)
            if not why_not:
                found.append(follower)
            elif self._reach.may_shrink:
                log.warning("mesh.smaller", reason=why_not)
                follower.kill()
            else:
                raise UsageError(why_not)
        return found

    def _unlike(self, found: pb.FollowerFound) -> str:
        if found.model == self.device.model:
            return ""
        return f"processes on {self.device.model} and {found.model}; join devices of one model"

    def _measure(self) -> None:
        """Find what this process and its followers have together."""
        there, names = self._followers, devices_of(self._settings.device)
        if self._reach.interface:
            facts = [follower.found for follower in there if follower.found is not None]
            own, count = self.device, len(there) + 1
            least = min([own.memory_limit_bytes, *(each.memory_limit_bytes for each in facts)])
            self.device = replace(
                own,
                memory_bytes=own.memory_bytes + sum(each.memory_bytes for each in facts),
                memory_limit_bytes=count * least,
                own_bytes=count * own.own_bytes,
                processes=count,
            )
        elif len(there) < len(names) - 1:
            left = "+".join([names[0], *(follower.device for follower in there)])
            self.device = find_device(replace(self._settings, device=left))

    def _restart(self) -> None:
        """End followers that may hang; they are started anew for the next stage, on other hosts with this
        process."""
        self._stop()
        if self._reach.interface:
            self._died("a call failed in this site; its processes restart")

    def _stop(self) -> None:
        if not self._followers:
            return
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.kill()
        self.processes.close()

    def _missed(self, follower: Follower) -> None:
        """A follower's thread: one that ends is missed at once, not when the next call hangs."""
        # What fails there fails here, too, or as soon as this process waits for it: the stage is reported.
        until_s = time.monotonic() + FAILS_WITHIN_S * bool(follower.error)
        while not self._failed and follower in self._followers and time.monotonic() < until_s:
            time.sleep(POLL_S)
        if follower not in self._followers or self._failed:
            return
        ended = f"process {follower.rank} of the mesh ended ({follower.ending()}) {follower.error}"
        self._died(ended.rstrip())


def _why_not(follower: Follower) -> str:
    if follower.error:
        return f"process {follower.rank} of this mesh does not work: {follower.error}"
    return f"process {follower.rank} of this mesh ended before it was ready"


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
