"""The daemon's side of computing: starts compute processes, gives them their work, outlives them.

A pipeline's stages are computed by the process that stands ready; a federated job gets one of its own,
which sees that job's folder and data set and no other. What a process says is checked; one that breaks a
rule, crashes, hangs or takes too much memory is ended. A job that has cost ``MAX_DEATHS`` is refused.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.backoff import Backoff
from atoll.errors import AtollError, BadFrame, StorageError, UsageError
from atoll.messages.from_worker import LinkProbed, OpsProbed
from hostos.private_files import private_folder
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos import coding
from protos.session import to_coordinator
from protos.text_limits import clean
from worker.config import make_state_dir
from worker.data.registry import dataset_folder
from worker.federated.folders import make_job_folder
from worker.hosting.child import Child, clear_scratch, make_scratch
from worker.hosting.child_log import ChildLog
from worker.hosting.connecting import connect, expect, time_link
from worker.hosting.gate import Gate, ranks_of
from worker.hosting.held import Held, Now
from worker.hosting.limits import computed_s, descendants, resident_bytes
from worker.hosting.requests import HostPorts, Served, of_assignment, unlogged
from worker.hosting.sandbox import View, chosen
from worker.hosting.send_log import SendLog
from worker.hosting.setup import setup_of
from worker.hosting.watch import OpWatch
from worker.machine.lent import gpus_here
from worker.machine.own_share import RESERVE_BYTES, MemoryShare, held_bytes, main_share, memory_share
from worker.machine.speed_file import MAX_BYTES as MAX_SPEEDS_BYTES
from worker.machine.speed_file import SpeedFile
from worker.session import events, instructions, wire
from worker.session.pipe_events import event_of, turn_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker.cancel import Cancel
    from worker.config import WorkerConfig
    from worker.federated.consent import Consent
    from worker.hosting.launch import Ending
    from worker.pipe.status import Waiting
    from worker.session.wire import AssignedStage, LinkRequest, ReconfiguredStage
    from worker.stage.assignment import PeerLink

log = structlog.get_logger()

MAX_DEATHS = 3
READY_S = 300.0  # from its start: importing torch takes 2 s on a core, and there are eighths of one
LOOK_S = 0.25
PING_S, PONG_S = 5.0, 60.0
AGAIN_FIRST_S, AGAIN_MOST_S = 0.5, 60.0  # a new process after one that died without work
SAID = frozenset({"spans", "log", "codec_speeds"})
"""Messages to the coordinator that a compute process sends by itself."""
MESSAGE_COST = 1000  # bytes, beside its own
MAX_REASON_CHARS = 2000
CLOSE_S = 0.5
FROZEN_S = 5.0  # between two looks: this process stood still itself


class ComputeHost:
    """Owns the compute process of one device. ``do`` may be called from any thread and never waits."""

    def __init__(self, config: WorkerConfig, consent: Consent) -> None:
        self._config, self._consent = config, consent
        self._worker = ""  # until it has joined; then with its ports
        self._ports: HostPorts
        self._speeds = SpeedFile(config.device_dir)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._now: Now | None = None
        self._held: Held | None = None
        self._probes: set[int] = set()  # requests to time ops that are not answered
        self._deaths: Counter[str] = Counter()
        self._backoff = Backoff(AGAIN_FIRST_S, AGAIN_MOST_S)
        self._pausing = False  # before the next process is started
        self._device: control.DeviceFacts | None = None
        self._own_bytes = 0  # that the worker takes itself of the device's memory
        self._rates: list[control.CodecSpeed] = []
        self._failed: AtollError | None = None
        self._links: tuple[PeerLink, ...] = ()
        self._last_death = ""
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._log = ChildLog()
        self._share = 1.0
        self._suspended = self._resting = False
        self._wants_codecs = False

    # ------------------------------------------------------------ the daemon

    def prepare(self) -> None:
        """Start a process: it loads torch while the worker joins. Raises StorageError, and UsageError for a
        sandbox that is required and not to be had."""
        config = self._config
        make_state_dir(config.state_dir)
        private_folder(config.blob_dir)
        shutil.rmtree(config.send_log_dir, ignore_errors=True)  # of an earlier life, whose stage is gone
        clear_scratch(config.device_dir)
        with self._lock:
            self._launch(self._pool_view())

    def start(
        self, worker: str, ports: HostPorts, stopping: Callable[[], bool] = lambda: False
    ) -> control.DeviceFacts:
        """Begin to compute as ``worker``; returns the device's facts. UsageError when it is not there."""
        with self._changed:
            self._worker, self._ports = worker, ports
            now = self._now
            if now is not None:
                self._settle_in(now)
            while self._device is None and self._failed is None and not stopping():
                self._changed.wait(LOOK_S)
            if self._failed is not None:
                raise self._failed
        threading.Thread(target=self._look, name="atoll-compute-watch", daemon=True).start()
        return self._device or control.DeviceFacts()

    def stop(self, timeout_s: float) -> None:
        """End the process."""
        self._stopping.set()
        with self._lock:
            now, self._now = self._now, None
        if now is not None:
            self._abandon(now, "leaving")
            now.child.close(timeout_s)

    @property
    def progress(self) -> int:
        """Signs of life of the computation, counted."""
        now = self._now
        return 0 if now is None else now.child.status.progress

    @property
    def waiting(self) -> Waiting | None:
        """What the computation waits for, None: for nothing."""
        now = self._now
        return None if now is None else now.child.status.waiting(time.monotonic())

    @property
    def logged_from(self) -> int:
        """First step from which on the send log holds all that the held stage sent. 0 without a stage: who is
        given the next one is else thought to hold nothing of it until its next heartbeat."""
        now = self._now
        return 0 if now is None or now.gate is None else now.gate.logged_from

    @property
    def memory_bytes(self) -> int:
        """Bytes held on the device."""
        now = self._now
        return 0 if now is None else now.child.status.memory_bytes

    @property
    def memory_peak_bytes(self) -> int:
        """The most bytes that computing has held beyond rest since the newest stage was loaded."""
        now = self._now
        return 0 if now is None else now.peak_bytes(self._device)

    @property
    def codec_speeds(self) -> list[control.CodecSpeed]:
        """Codecs' speeds that are known by now."""
        return list(self._rates)

    @property
    def device(self) -> control.DeviceFacts:
        """Facts of the device as the newest process found them, its budget as it is set now."""
        facts = control.DeviceFacts()
        facts.CopyFrom(self._device or facts)
        share = self.memory_under()
        facts.memory_limit_bytes, facts.own_memory_bytes = max(0, share.planned_bytes), share.own_bytes
        facts.memory_in_figures = share.planned_bytes < share.stage_bytes
        return facts

    def memory_under(self, config: WorkerConfig | None = None) -> MemoryShare:
        """Return how the device's memory is shared under the limits of ``config``, None: as they are now."""
        facts = self._device or control.DeviceFacts()
        return memory_share(config or self._config, facts.kind, facts.memory_limit_bytes, self._own_bytes)

    def limit_share(self, share: float) -> None:
        """Compute for so much of the time, in (0, 1], from now on."""
        self._share = share
        self._tell(pb.ToCompute(compute_share=share))

    def limit_memory(self, memory_bytes: int, gpu_memory_bytes: int) -> bool:
        """Have every process that is started from now on bounded so; True when the one that there is must
        make way for that."""
        before = self._config
        self._config = replace(before, memory_bytes=memory_bytes, gpu_memory_bytes=gpu_memory_bytes)
        return self._config != before

    def report_codecs(self) -> None:
        """Have the speeds of codecs reported that are known, and those measured that are not."""
        self._wants_codecs = True
        self._tell(pb.ToCompute(report_codecs=True))

    def do(self, instruction: instructions.Instruction) -> None:
        """Take an instruction of the session that concerns computing."""
        with self._lock:
            try:
                self._do(instruction)
            except AtollError as error:
                self._report(str(error), gone=False)
                if self._now is None:
                    self._later()

    def _do(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.LoadStage(job, version, work):
                self._load(job, version, work)
            case instructions.RunStep(job, version, step):
                self._at(version, step)
                if self._now is not None:
                    self._now.watch.step_begins(time.monotonic())
                    if self._now.gate is not None:
                        self._now.gate.step_over(step)
                self._tell(pb.ToCompute(run_step=_step(job, version, step)))
            case instructions.Reconfigure():
                self._reconfigure(instruction)
            case instructions.RepeatStep(job, version, step, scale, replay_from):
                self._at(version, step)
                if self._now is not None and self._now.gate is not None:
                    self._now.gate.trim_log(replay_from)
                self._tell(pb.ToCompute(repeat_step=_step(job, version, step, gradient_scale=scale)))
            case instructions.ApplyStep(job, version, step, scale, store, replay_from, keep):
                self._at(version, step)
                if self._now is not None and self._now.gate is not None:
                    self._now.gate.trim_log(replay_from)
                message = _step(job, version, step, gradient_scale=scale, store=store, keep=keep)
                self._tell(pb.ToCompute(apply_step=message))
            case instructions.Evaluate(job, version, step, coded):
                self._at(version, step)
                self._tell(pb.ToCompute(evaluate=_step(job, version, step, evaluate_coded=coded)))
            case instructions.ChangeLinks(job, version, step, relink):
                changed = coding.write(relink, control.Relink)
                self._tell(pb.ToCompute(change_links=_step(job, version, step, relink=changed)))
            case instructions.DiscardStep(job, version, step, reason):
                self._tell(pb.ToCompute(discard=_step(job, version, step, reason=reason)))
            case instructions.DropStage(job, version, reason):
                self._drop(job, version, reason)
            case instructions.Interrupt(reason):
                self._tell(pb.ToCompute(interrupt=reason))
            case instructions.JoinFederation():
                self._join(instruction)
            case instructions.TrainLocally(job, at_round, order):
                self._turn(job, at_round, "train", pb.ToCompute(train=order))
            case instructions.EvaluateLocally(job, at_round, order):
                self._turn(job, at_round, "evaluate", pb.ToCompute(evaluate_round=order))
            case instructions.SettleRound(job, at_round, taken, clients):
                settle = pb.ComputeRound(job=job, round=at_round, taken=taken, clients=clients)
                self._tell(pb.ToCompute(settle=settle))
            case instructions.TimeOps(request, ops) if not ops.ops:
                # The coordinator times the way here: nothing that computes may stand in it.
                self._ports.post(events.Probed(to_coordinator(OpsProbed(request, {}, ""))))
            case instructions.TimeOps(request) if self._now is None and not self._resting:
                self._ports.post(events.Probed(to_coordinator(OpsProbed(request, {}, self._last_death))))
            case instructions.TimeOps(request, ops):
                if self._now is None or self._now.joined:
                    self._launch(self._pool_view())  # strangers' ops see nobody's data
                self._probes.add(request)
                self._tell(pb.ToCompute(time_ops=ops))
            case instructions.Suspend(reason):
                self._suspend(reason)
            case instructions.Wake():
                self._wake()
            case instructions.TimeLink(request, peer, target):
                arguments = (request, peer, target)
                name = f"atoll-probe-{peer}"
                threading.Thread(target=self._time_link, args=arguments, name=name, daemon=True).start()
            case _:
                raise TypeError(f"not for the compute host: {instruction!r}")

    def make_room(self) -> None:
        """End the process while no job is held: the next one, or a probe, starts another."""
        with self._lock:
            if self._device is not None and self._now is not None and self._held is None and not self._probes:
                self._resting = True
                self._retire("an app has the room")

    # ------------------------------------------------------------ jobs

    def stand_by(self, job: str, ranks: Mapping[str, int], *, checks: bool = False) -> None:
        """Have these workers repeat neighbours' steps, and no others."""
        with self._lock:
            gate = self._now.gate if self._now is not None else None
            if gate is not None and gate.job == job:
                gate.stand_by(ranks, checks=checks)

    def _load(self, job: str, version: int, work: AssignedStage) -> None:
        self._held = Held(job, standby=work.message.replay.standby, version=version)
        self._check_deaths(job)
        if self._now is None or self._now.joined:
            self._launch(self._pool_view())
        now = self._now
        assert now is not None  # noqa: S101 - launched
        self._leave_gate(now)
        child = now.child
        assigned = work.message
        first_step = assigned.replay.first_step if assigned.HasField("replay") else assigned.first_step
        folder = self._config.send_log_dir / str(next(self._numbers))
        sent = SendLog(folder, job, self._config.send_log_bytes, first_step)
        network, ranks = self._ports.network, ranks_of(assigned)
        now.gate = Gate(job, version, ranks, network, child.incoming, child.send, sent, child.end)
        now.watch = OpWatch(max(1, assigned.plan.exchange.every))
        self._links = work.links
        network.register(job, now.gate)
        expect(work.links, network, self._config.peer_timeout_s)
        self._ports.fetch_from(work.holders)
        now.assigned += 1
        now.restart_peak()
        child.send(pb.ToCompute(load=assigned, assignment=now.assigned))

    def _reconfigure(self, asked: instructions.Reconfigure) -> None:
        now, version, step = self._now, asked.version, asked.step
        work: ReconfiguredStage = asked.work
        if now is None or now.gate is None:
            raise StorageError(f"the stage is gone: {self._last_death}")
        if self._held is not None:
            self._held.standby = asked.standby
        self._at(version, step)
        self._links = work.links
        expect(work.links, self._ports.network, self._config.peer_timeout_s)
        now.gate.reconfigure(ranks_of(work.message), version, step, repeating=asked.repeating)
        now.child.send(pb.ToCompute(reconfigure=work.message))

    def _join(self, joining: instructions.JoinFederation) -> None:
        invitation: control.Participate = joining.work
        self._held = Held(joining.job, joining, version=joining.version, turn="load")
        self._check_deaths(joining.job)
        config = self._config
        folder = make_job_folder(config.state_dir, joining.job, config.kept_bytes)
        data = dataset_folder(config.state_dir, invitation.federated.data)
        view = View(
            (config.blob_dir.absolute(), data.absolute()),
            (folder.absolute(),),
            self._pool_view().device,
        )
        if self._now is None or self._now.joined != joining.job:
            self._launch(view, joining.job)
        join = self._consent.joining(invitation)
        self._tell(pb.ToCompute(join=join))

    def _turn(self, job: str, at_round: int, during: str, message: pb.ToCompute) -> None:
        if self._held is not None:
            # Who takes no more of a job is no member of it: else its rounds were repeated for ever.
            refused = self._deaths[job] >= MAX_DEATHS
            self._held.step, self._held.turn = at_round, "load" if refused else during
        self._check_deaths(job)
        if during == "evaluate":
            self._consent.evaluates(job)
        if self._now is None:
            raise StorageError(f"no process computes here: {self._last_death}")
        self._tell(message)

    def _drop(self, job: str, version: int, reason: str) -> None:
        self._held = None
        if self._now is not None:
            self._abandon(self._now, reason)
        self._tell(pb.ToCompute(drop=_step(job, version, 0, reason=reason)))

    def _at(self, version: int, step: int) -> None:
        if self._held is not None:
            self._held.version, self._held.step = version, step

    def _check_deaths(self, job: str) -> None:
        if self._deaths[job] >= MAX_DEATHS:
            raise UsageError(
                f"this worker takes no more of job {job}, which ended its process {MAX_DEATHS} times; "
                f"the last time: {self._last_death}"
            )

    def _report(self, reason: str, *, gone: bool, memory_bytes: int = 0) -> None:
        """Report that the job that is held cannot go on; ``gone``: nor can it be repeated."""
        held = self._held
        if held is None:
            return
        if held.federated is None:
            broke = events.StageBroke(held.job, held.version, held.step, reason, "", gone, memory_bytes)
            self._ports.post(broke)
        elif held.turn:
            during, held.turn = held.turn, ""
            self._ports.post(events.TurnBroke(held.job, held.step, during, reason))

    def _abandon(self, now: Now, reason: str) -> None:
        """End what is done for a process and its job."""
        self._leave_gate(now)
        if now.served is not None:
            now.served.cancel_all(reason)

    def _leave_gate(self, now: Now) -> None:
        if now.gate is not None:
            now.gate.close()
            now.gate = None

    # ------------------------------------------------------------ processes

    def _pool_view(self) -> View:
        """Files of a process for any pipeline's stage."""
        wanted = self._config.device
        gpu = wanted.startswith("cuda") or (wanted == "auto" and gpus_here() > 0)
        return View((self._config.blob_dir.absolute(),), (), "cuda" if gpu else "cpu")

    def _launch(self, view: View, joined: str = "") -> None:
        """Start a process in place of what there is; the lock is held. Raises StorageError."""
        self._retire("another process takes over")
        config, self._resting = self._config, False
        scratch = make_scratch(config.device_dir.absolute(), f"{os.getpid()}-{next(self._numbers)}")
        view = replace(view, read_write=(*view.read_write, scratch))
        child = Child(
            view, chosen(config.sandbox, view.device), config.threads, scratch, self._heard, self._ended
        )
        self._now = Now(child, answered_s=time.monotonic(), joined=joined)
        if self._worker:
            self._settle_in(self._now)
        if self._wants_codecs and not joined:
            self.report_codecs()

    def _retire(self, reason: str) -> None:
        """Let the process go that there is, if any; the lock is held."""
        before, self._now = self._now, None
        if before is not None:
            self._abandon(before, reason)
            name = "atoll-compute-close"
            threading.Thread(target=before.child.close, args=(CLOSE_S,), name=name, daemon=True).start()

    def _settle_in(self, now: Now) -> None:
        """Tell a process who it computes for."""
        departing = partial(self._consent.departing, now.joined) if now.joined else unlogged
        ports, keep = self._ports, None if now.joined else self._ports.keep
        now.served = Served(now.child, ports.blobs, ports.batches, departing, keep)
        scratch, speeds = now.child.scratch, self._speeds.read()
        setup = setup_of(self._config, self._worker, scratch, self._share, speeds)
        now.child.send(pb.ToCompute(setup=setup))

    def _tell(self, message: pb.ToCompute) -> None:
        now = self._now
        if now is not None:
            now.child.send(message)

    def _ended(self, child: Child, ending: Ending) -> None:
        """The child's thread: a process is gone."""
        with self._changed:
            now = self._now
            if now is None or now.child is not child:
                return
            self._abandon(now, "the compute process ended")
            self._now = None
            if self._stopping.is_set():
                return
            mark = child.status.running().mark
            what = "the compute process ended" if mark is None else f"{mark.name} ended the compute process"
            reason = self._last_death = f"{what} ({ending})"
            log.error("compute.ended", reason=reason, printed=list(ending.lines[-5:]))
            if self._device is None:
                self._failed = AtollError("\n".join([reason, *ending.lines[-10:]]))
                self._changed.notify_all()
                return
            self._end_probes(reason)
            self._bury(ending.memory_bytes)

    def _bury(self, memory_bytes: int) -> None:
        """Report a death, and start anew; the lock is held. ``memory_bytes``: as of StageBroke."""
        held = self._held
        if held is None:
            self._later()
            return
        # Want of memory is its plan's fault, and the next one counts on what it took.
        self._deaths[held.job] += not memory_bytes or held.federated is not None
        over = held.turn == "load" or self._deaths[held.job] >= MAX_DEATHS
        self._report(self._last_death, gone=True, memory_bytes=memory_bytes)
        try:
            if held.federated is None or over:
                self._launch(self._pool_view())
            else:
                # The job goes on with its next round; the session knows that it joined.
                self._join(held.federated)
                held = self._held
                if held is not None:
                    held.turn = ""
        except AtollError as error:
            log.error("compute.not_started", reason=str(error))
            self._later()

    def _suspend(self, reason: str) -> None:
        """End the process, and start none."""
        self._suspended, self._resting, self._held = True, False, None
        now, self._now = self._now, None
        if now is not None:
            self._abandon(now, reason)
            now.child.end(reason)
        self._end_probes(reason)

    def _end_probes(self, reason: str) -> None:
        for request in self._probes:
            self._ports.post(events.Probed(to_coordinator(OpsProbed(request, {}, reason))))
        self._probes.clear()

    def _wake(self) -> None:
        self._suspended = False
        if self._now is None:
            self._launch(self._pool_view())

    def _later(self) -> None:
        """Start anew after a pause, which doubles each time; the lock is held."""
        if self._pausing or self._suspended:
            return
        self._pausing = True
        timer = threading.Timer(self._backoff.next_s(), self._again)
        timer.daemon = True
        timer.start()

    def _again(self) -> None:
        with self._lock:
            self._pausing = False
            if self._now is None and not (self._suspended or self._resting or self._stopping.is_set()):
                try:
                    self._launch(self._pool_view())
                except AtollError as error:
                    log.error("compute.not_started", reason=str(error))
                    self._later()

    def _look(self) -> None:
        """Thread: end what hangs."""
        looked_s = time.monotonic()
        pinged_s = 0.0
        while not self._stopping.wait(LOOK_S):
            now, now_s = self._now, time.monotonic()
            frozen, looked_s = now_s - looked_s > FROZEN_S, now_s
            if now is None:
                continue
            if frozen:  # the whole machine was: nobody is late
                now.watch.forget()
                now.answered_s = now_s
            child = now.child
            if now_s - pinged_s > PING_S:
                pinged_s = now_s
                child.send(pb.ToCompute(ping=1))
            late = now.watch.overdue(child.status.running(), now_s, partial(computed_s, child.launched.pid))
            silent_s = now_s - now.answered_s
            if late is None and silent_s > (PONG_S if now.ready else READY_S):
                late = f"it has not answered for {silent_s:.0f} s"
            if late is not None:
                log.error("op.overdue", reason=late)
                child.kill(late)

    # ------------------------------------------------------------ what a process says

    def _heard(self, child: Child, m: pb.FromCompute) -> None:
        """The child's thread. Raises BadFrame for what breaks a rule."""
        with self._lock:
            now = self._now
        if now is None or now.child is not child:
            return
        served = now.served
        if served is None:
            raise BadFrame("it spoke before it was spoken to")
        left_over = now.loading != now.assigned  # the blocks that it read then are free already
        if m.freed and now.gate is not None and not left_over:
            now.gate.freed(m.freed)
        if left_over and of_assignment(m):
            return served.left_over(m)
        match m.WhichOneof("body"):
            case "ready":
                self._heard_ready(now, m.ready)
            case "loading":
                now.loading = m.loading
            case "posted" | "said" if not now.most.take(time.monotonic(), m.ByteSize() + MESSAGE_COST):
                raise BadFrame("it says more than any job has to say")
            case "posted":
                self._heard_event(now, m.posted)
            case "said":
                self._heard_message(now, m.said)
            case "wanted" if now.gate is not None:
                now.gate.want(m.wanted.messages)
            case "outgoing":
                self._send(now, m.outgoing)
            case "connect":
                served.start(m.connect.request, self._connect)
            case "forget" if now.gate is not None:
                self._ports.network.forget(now.gate.job, m.forget.plan_version or None)
            case "fetch":
                served.fetch(m.fetch)
            case "store":
                served.store(m.store)
            case "batches":
                served.batches(m.batches, self._held.job if self._held is not None else "")
            case "cancel":
                served.cancel(m.cancel)
            case "codec_speeds" if len(m.codec_speeds) <= MAX_SPEEDS_BYTES:
                self._speeds.write(m.codec_speeds)
            case "log":
                self._log.write(m.log)
            case "pong":
                now.answered_s = time.monotonic()

    def _heard_ready(self, now: Now, ready: pb.ComputeReady) -> None:
        if now.ready:
            raise BadFrame("it was ready before")
        with self._changed:
            now.ready, now.answered_s = True, time.monotonic()
            if ready.error:
                self._failed = UsageError(clean(ready.error, MAX_REASON_CHARS))
            else:
                try:
                    self._bound(now, ready.device)
                except UsageError as error:
                    self._failed = error
            self._rates = list(ready.codec_speeds)
            self._changed.notify_all()
        log.debug("compute.ready", took_s=round(ready.took_s, 2))

    def _bound(self, now: Now, device: control.DeviceFacts) -> None:
        """Bound what a job may add to a process that is idle and ready; the lock is held. UsageError where
        the owner's limit leaves nothing for a stage, of which the first process alone speaks."""
        launched, first = now.child.launched, not self._own_bytes
        own = held_bytes() // self._config.parts + resident_bytes(descendants(launched.pid)) + RESERVE_BYTES
        if first:
            self._own_bytes = own if device.kind == "cpu" else device.own_memory_bytes
        found, self._device = self._device, device  # its memory may be another than that of the one before
        share = self.memory_under()
        main = share if device.kind == "cpu" else main_share(self._config, share, own)
        if first:
            self._device = found  # until it is known to do
            share.checked()
            main.checked()
            self._device = device
        launched.limit_added(max(0, main.stage_bytes))
        most = max(0, share.stage_bytes)
        now.child.send(pb.ToCompute(memory_limit=most))

    def _heard_event(self, now: Now, m: pb.Posted) -> None:
        event = event_of(m)
        with self._lock:
            held = self._held
            if isinstance(event, events.Probed):
                request = event.message.ops_probed.request
                if request not in self._probes:
                    return  # nobody asked
                self._probes.remove(request)
            elif held is None or getattr(event, "job", "") != held.job:
                return  # of a job that was dropped meanwhile
            elif held.turn == turn_over(event):
                held.turn = ""
            if held is not None and held.standby and isinstance(event, events.StepApplied) and now.gate:
                now.gate.step_over(event.step + 1)
        if isinstance(event, events.StepDone):
            now.watch.step_done(time.monotonic())
            wire.add_measured(event.message.ready, self._ports.network.goodput(), self._ports.beside_s())
        self._ports.post(event)

    def _heard_message(self, now: Now, message: control.FromWorker) -> None:
        kind = message.WhichOneof("body")
        if kind not in SAID:
            raise BadFrame(f"a message to the coordinator of kind {kind}")
        held = self._held
        if kind != "codec_speeds" and (held is None or getattr(message, kind).job != held.job):
            return  # of a job that was dropped meanwhile
        if not now.said.take(time.monotonic(), message.ByteSize() + MESSAGE_COST):
            return
        if kind == "codec_speeds":
            self._rates = list(message.codec_speeds.speeds)
        self._ports.send(message)

    def _send(self, now: Now, m: pb.Outgoing) -> None:
        block = now.child.outgoing.block(m.offset, m.size)
        weakref.finalize(block, now.child.freed, m.offset, m.size).atexit = False
        if now.gate is not None:
            now.gate.send(m, block)

    def _connect(self, cancel: Cancel, _: object) -> int:
        connect(self._links, self._ports.network, self._config.peer_timeout_s, cancel)
        return 0

    def _time_link(self, request: int, peer: str, target: LinkRequest) -> None:
        found = time_link(self._ports.network, peer, target)
        self._ports.post(events.Probed(to_coordinator(LinkProbed(request, peer, *found))))


def _step(job: str, version: int, step: int, **more: Any) -> pb.ComputeStep:
    return pb.ComputeStep(job=job, plan_version=version, step=step, **more)
