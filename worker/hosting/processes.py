"""The compute process of a host: started, given its setup, watched, started anew where it died."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.backoff import Backoff
from atoll.errors import AtollError, UsageError
from atoll.messages.from_worker import OpsProbed
from protos import atoll_compute_pb2 as pb
from worker.hosting import TUNED
from worker.hosting.contained.child import Child, make_scratch
from worker.hosting.contained.limits import computed_s
from worker.hosting.contained.sandbox import View, chosen
from worker.hosting.held import Now
from worker.hosting.requests import Served, unlogged
from worker.machine.lent import gpus_here
from worker.session import events
from worker.transport.contract import TransportConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker.config import WorkerConfig
    from worker.hosting.contained.launch import Ending
    from worker.hosting.held import HostState

log = structlog.get_logger()

MAX_DEATHS = 3


class Processes:
    """Starts and ends the processes of ``state``, of which there is one at a time."""

    def __init__(
        self,
        state: HostState,
        heard: Callable[[Child, pb.FromCompute], None],
        rejoin: Callable[[events.Participate], None],
    ) -> None:
        """``heard`` takes what a process says; ``rejoin`` has a federated job go on in a new one."""
        self._state, self._heard, self._rejoin = state, heard, rejoin
        self._deaths: Counter[str] = Counter()
        self._backoff = Backoff(TUNED.again_first_s, TUNED.again_most_s)
        self._pausing = False  # before the next process is started
        self._stopping = threading.Event()
        self._suspended = False
        self.resting = False  # an app has the room

    def watch(self) -> None:
        """Begin to end what hangs."""
        threading.Thread(target=self._look, name="atoll-compute-watch", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """End the process, and start none."""
        self._stopping.set()
        with self._state.lock:
            now, self._state.now = self._state.now, None
        if now is not None:
            now.abandon("leaving")
            now.child.close(timeout_s)

    def pool_view(self) -> View:
        """Files of a process for any pipeline's stage."""
        wanted = self._state.config.device
        gpu = wanted.startswith("cuda") or (wanted == "auto" and gpus_here() > 0)
        network = self._state.ranks is not None
        return View((self._state.config.blob_dir.absolute(),), (), "cuda" if gpu else "cpu", network)

    def launch_for_pool(self) -> None:
        """``launch`` a process for any pipeline's stage, or for strangers' ops."""
        self.launch(self.pool_view())

    def launch(self, view: View, joined: str = "") -> None:
        """Start a process in place of what there is; the lock is held. Raises StorageError."""
        self._retire("another process takes over")
        config, self.resting = self._state.config, False
        scratch = make_scratch(config.device_dir.absolute(), f"{os.getpid()}-{next(self._state.numbers)}")
        view = replace(view, read_write=(*view.read_write, scratch))
        # A federated round is this host's alone.
        ranks = None if joined else self._state.ranks
        child = Child(
            view,
            chosen(config.sandbox, view.device),
            config.threads,
            scratch,
            self._heard,
            self._ended,
            () if ranks is None else ranks.pipes(),
        )
        self._state.now = Now(child, answered_s=time.monotonic(), joined=joined)
        if self._state.worker:
            self.settle_in(self._state.now)
        if self._state.wants_codecs and not joined:
            child.send(pb.ToCompute(report_codecs=True))

    def _retire(self, reason: str) -> None:
        """Let the process go that there is, if any; the lock is held."""
        before, self._state.now = self._state.now, None
        if before is not None:
            before.abandon(reason)
            name = "atoll-compute-close"
            threading.Thread(target=before.child.close, args=(TUNED.close_s,), name=name, daemon=True).start()

    def settle_in(self, now: Now) -> None:
        """Tell a process who it computes for."""
        state, ports = self._state, self._state.ports
        departing = partial(state.consent.departing, now.joined) if now.joined else unlogged
        keep = None if now.joined else ports.keep
        now.served = Served(now.child, ports.blobs, ports.batches, departing, keep)
        setup = setup_of(state.config, state.worker, now.child.scratch, state.share, state.speeds.read())
        setup.follower_pipes.extend(now.child.followers)
        setup.interface = state.ranks.interface if now.child.followers and state.ranks is not None else ""
        setup.may_shrink = state.device is not None
        now.child.send(pb.ToCompute(setup=setup))

    def make_room(self) -> None:
        """End the process while no job is held: the next one, or a probe, starts another."""
        with self._state.lock:
            state = self._state
            if state.device is not None and state.now is not None and not (state.held or state.probes):
                self.resting = True
                self._retire("an app has the room")

    def suspend(self, reason: str) -> None:
        """End the process, and start none."""
        self._suspended, self.resting, self._state.held = True, False, None
        now, self._state.now = self._state.now, None
        if now is not None:
            now.abandon(reason)
            now.child.end(reason)
        self._end_probes(reason)

    def wake(self) -> None:
        """Start a process again."""
        self._suspended = False
        if self._state.now is None:
            self.launch_for_pool()

    def refuses(self, job: str) -> bool:
        """Whether a job has cost too many processes."""
        return self._deaths[job] >= MAX_DEATHS

    def check(self, job: str) -> None:
        """Raise UsageError for a job that ``refuses`` names."""
        if self.refuses(job):
            raise UsageError(
                f"this worker takes no more of job {job}, which ended its process {MAX_DEATHS} times; "
                f"the last time: {self._state.last_death}"
            )

    # ------------------------------------------------------------ its end

    def _ended(self, child: Child, ending: Ending) -> None:
        """The child's thread: a process is gone."""
        with self._state.changed:
            now = self._state.now
            if now is None or now.child is not child:
                return
            now.abandon("the compute process ended")
            self._state.now = None
            if self._stopping.is_set():
                return
            mark = child.status.running().mark
            what = "the compute process ended" if mark is None else f"{mark.name} ended the compute process"
            reason = self._state.last_death = f"{what} ({ending})"
            log.error("compute.ended", reason=reason, printed=list(ending.lines[-5:]))
            if self._state.device is None:
                self._state.failed = AtollError("\n".join([reason, *ending.lines[-10:]]))
                self._state.changed.notify_all()
                return
            self._end_probes(reason)
            self._bury(ending.memory_bytes)

    def _bury(self, memory_bytes: int) -> None:
        """Report a death, and start anew; the lock is held. ``memory_bytes``: as of StageFailed."""
        held = self._state.held
        if held is None:
            self.later()
            return
        # Want of memory is its plan's fault, and the next one counts on what it took.
        self._deaths[held.job] += not memory_bytes or held.federated is not None
        over = held.turn == "load" or self.refuses(held.job)
        self._state.report(self._state.last_death, gone=True, memory_bytes=memory_bytes)
        try:
            if held.federated is None or over:
                self.launch_for_pool()
            else:
                # The job goes on with its next round; the session knows that it joined.
                self._rejoin(held.federated)
                held = self._state.held
                if held is not None:
                    held.turn = ""
        except AtollError as error:
            log.error("compute.not_started", reason=str(error))
            self.later()

    def _end_probes(self, reason: str) -> None:
        for request in self._state.probes:
            self._state.ports.post(OpsProbed(request, {}, reason))
        self._state.probes.clear()

    def later(self) -> None:
        """Start anew after a pause, which doubles each time; the lock is held."""
        if self._pausing or self._suspended:
            return
        self._pausing = True
        timer = threading.Timer(self._backoff.next_s(), self._again)
        timer.daemon = True
        timer.start()

    def _again(self) -> None:
        with self._state.lock:
            self._pausing = False
            if self._state.now is None and not (self._suspended or self.resting or self._stopping.is_set()):
                try:
                    self.launch_for_pool()
                except AtollError as error:
                    log.error("compute.not_started", reason=str(error))
                    self.later()

    def _look(self) -> None:
        """Thread: end what hangs."""
        looked_s = time.monotonic()
        pinged_s = 0.0
        while not self._stopping.wait(TUNED.process_look_s):
            now, now_s = self._state.now, time.monotonic()
            frozen, looked_s = now_s - looked_s > TUNED.frozen_s, now_s
            if now is None:
                continue
            if frozen:  # the whole machine was: nobody is late
                now.watch.forget()
                now.answered_s = now_s
            child = now.child
            if self._state.held is not None:
                self._state.energy.look()
            if now_s - pinged_s > TUNED.ping_s:
                pinged_s = now_s
                child.send(pb.ToCompute(ping=1))
            late = now.watch.overdue(child.status.running(), now_s, partial(computed_s, child.launched.pid))
            silent_s = now_s - now.answered_s
            if late is None and silent_s > (TUNED.pong_s if now.ready else TUNED.ready_s):
                late = f"it has not answered for {silent_s:.0f} s"
            if late is not None:
                log.error("op.overdue", reason=late)
                child.kill(late)


def setup_of(
    config: WorkerConfig, worker: str, scratch: Path, share: float, codec_speeds: bytes
) -> pb.ComputeSetup:
    """Return the setup of a process whose own files lie in ``scratch``; ``share``: of the time that it may
    compute, in (0, 1]. A setting of the worker that has its field's name is passed on as it is."""
    transport = TransportConfig()
    same: dict[str, Any] = {
        name: getattr(config, name, None) for name in pb.ComputeSetup.DESCRIPTOR.fields_by_name
    }
    return pb.ComputeSetup(
        **same
        | {
            "worker": worker,
            "state_dir": str(config.state_dir.absolute()),
            "blob_dir": str(config.blob_dir.absolute()),
            "scratch_dir": str(scratch),
            "compute_share": share,
            "codec_speeds": codec_speeds,
            "max_queued_bytes": transport.max_queued_bytes,
            "max_queued_messages": transport.max_messages,
        }
    )
