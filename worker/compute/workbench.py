"""The compute process's threads: carry out the session's instructions one after another.

What takes long answers with an event. Stopping is immediate in effect: an instruction that was
cancelled, running or not, answers nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.messages import from_worker as told
from atoll.messages import to_worker as asked
from protos import coding
from protos.session import to_coordinator
from worker.cancel import Cancel, Cancelled
from worker.compute import reports
from worker.compute.bases import Bases
from worker.compute.loading import feed_of, load
from worker.compute.rounds import Rounds
from worker.compute.snapshots import Snapshots
from worker.compute.tasks import Task, Tasks, Thread
from worker.links.links import LinksAborted
from worker.machine import op_timing
from worker.machine.malloc import give_back
from worker.machine.torch_device import restart_peak, short_of_memory, torch_device, used_memory_bytes
from worker.pipe.status import Mark
from worker.session import events, instructions
from worker.session import wire as messages
from worker.stage.assignment import check
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from atoll.messages.to_worker import Replay
    from protos import atoll_compute_pb2 as compute_pb
    from protos import atoll_control_pb2 as pb
    from worker.context import ComputeContext
    from worker.links.links import Links
    from worker.machine.codec_speed import CodecGauge
    from worker.stage.reports import LongWait, StepReport
    from worker.stage.steps.run import StageRun

log = structlog.get_logger()

OPS_BUDGET_S = 60.0
OPS_BYTES_SHARE = 0.5  # of what a job may add, for one op: computing for the first time takes some as well
Due = instructions.RunStep | instructions.RunRound
PROBE_S = 60.0  # nothing honest takes longer
SHOW_S = 10.0  # between two lines of log about steps that are repeated


class Workbench:
    """Owns the stage. What asks it to work may be called from any thread and never waits."""

    def __init__(
        self,
        context: ComputeContext,
        post: Callable[[events.Report], None],
        send: Callable[[pb.FromWorker], None],
        loads: Callable[[int], None],
        gauge: CodecGauge,
    ) -> None:
        """``loads``: called with an assignment's number, once nothing more can come of the one before."""
        self._context, self._post, self._send, self._loads = context, post, send, loads
        self._gauge = gauge
        self.memory_limit_bytes = context.device.memory_limit_bytes  # that a job may add; the daemon's word
        self._tasks = Tasks(self._begin, self._idle)
        self._snapshots = Snapshots(context, self._tasks, post, self._explained, Bases(context.scratch))
        self._lock = threading.Lock()
        self._codecs_asked = False  # and not begun
        self._standby = False  # beside the plan: what is asked for is done one after the other
        self._newest = -1  # step that was to be repeated last
        self._run: StageRun | None = None
        self._rounds = Rounds(context, self._tasks, post, self._explained, self._drop)
        self._links: Links | None = None

    def start(self) -> None:
        """Begin to work."""
        self._tasks.start()

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything; False when an op that is running cannot be awaited."""
        self.interrupt("leaving")
        return self._tasks.stop(timeout_s)

    def interrupt(self, reason: str, *, stores: bool = True) -> None:
        """Cancel what runs and what waits; a wait for a neighbour ends at once. ``stores``: snapshots on
        their way to the store as well."""
        self._tasks.cancel(reason, stores=stores)
        links = self._links
        if links is not None:
            links.abort(reason)

    def do(self, instruction: instructions.Instruction) -> None:
        """Take an instruction of the session that concerns computing."""
        match instruction:
            case instructions.RunStep() | instructions.RunRound() as due:
                self._for_stage(due, lambda c: self._run_due(due, c))
            case events.StepCommit() as commit:
                self._relinks(commit)
                self._for_stage(commit, lambda c: self._apply(commit, c))
            case instructions.RepeatStep(commit):
                self._relinks(commit)
                self._newest = commit.step
                self._for_stage(commit, lambda c: self._repeat(commit, c))
            case instructions.Evaluate(commit):
                self._for_stage(commit, lambda c: self._evaluate(commit.step, commit.evaluate_coded, c))
            case events.StepDiscard():
                self._tasks.cancel(instruction.reason)
                self._tasks.submit(lambda c: self._discard())
            case events.Release():
                self.interrupt(instruction.reason)
                self._tasks.submit(lambda c: self._drop())
                self._tasks.submit(lambda c: self._snapshots.bases.forget(), Thread.STORE)
            case instructions.Interrupt(reason):
                self.interrupt(reason, stores=False)
            case events.TrainRound() | events.EvaluateRound() | events.SecureOrder() | events.RoundTaken():
                self._rounds.do(instruction)
            case _:
                raise TypeError(f"not for the workbench: {instruction!r}")

    def load(self, message: pb.Assign, assignment: int) -> None:
        """Load a stage, as the assignment of this number."""
        self._standby = message.replay.standby
        at = instructions.RunStep(message.job, message.plan_version, 0)
        self._for_stage(at, lambda c: self._load(message, assignment, c))

    def reconfigure(self, message: pb.Reconfigure) -> None:
        """Go on with the stage among other neighbours."""
        if not self._standby:  # who stands by has steps to repeat first
            self.interrupt("the plan is reconfigured", stores=False)
        self._standby = message.standby
        at = instructions.RunStep(message.job, message.plan_version, message.step)
        self._for_stage(at, lambda c: self._reconfigure(message, c))

    def join(self, message: compute_pb.ComputeJoin) -> None:
        """Load a federated job."""
        self._rounds.join(message)

    def time_ops(self, message: pb.ProbeOps) -> None:
        """Time ops."""
        self._tasks.submit(lambda c: self._time_ops(message))

    def report_codecs(self) -> None:
        """Report how fast the codecs are; measures first what is not known, while no stage is held."""
        with self._lock:
            asked, self._codecs_asked = self._codecs_asked, True
        if not asked:  # two that wait would make way for each other for ever
            self._tasks.submit(self._report_codecs)

    # ---------------------------------------------------------------- around a task

    def _begin(self, cancel: Cancel) -> None:
        self._context.duty.stop = cancel

    def _idle(self) -> AbstractContextManager[object]:
        return nullcontext() if self._busy else self._context.cpu.resting()

    def _for_stage(self, of: Due | events.StepCommit, task: Task) -> None:
        """Queue a stage's ``task``; its failures are reported to the session, as ``of`` that step."""
        failed = partial(events.StageFailed, of.job, of.version, of.step)

        def run(cancel: Cancel) -> None:
            try:
                cancel.check()
                task(cancel)
            except (Cancelled, LinksAborted):
                raise
            except PeerLost as lost:
                self._post(failed(str(lost), lost.peer))
            except AtollError as error:
                self._post(failed(str(error)))
            except Exception as error:  # any op may fail in its own way
                log.error("stage.broke", job=of.job, step=of.step, exc_info=True)
                bytes_held = self.memory_limit_bytes if short_of_memory(error) else 0
                self._post(failed(self._explained(error), memory_bytes=bytes_held))

        self._tasks.submit(run)

    def _explained(self, error: Exception, *, private: bool = False) -> str:
        """A reason that the owner of the job can act on; of an op on ``private`` data not torch's own words,
        which may quote a value ("index 17 is out of bounds")."""
        device = self._context.device
        if short_of_memory(error):
            return (
                f"out of memory on {device.model}: {used_memory_bytes(device) / 2**30:.1f} GiB "
                f"held, budget {self.memory_limit_bytes / 2**30:.1f} GiB; lower --memory on this "
                "worker so that it gets a smaller stage, or use smaller micro-batches"
            )
        if private:
            return f"{type(error).__name__} on the client's own data; the worker's log has torch's words"
        return f"{type(error).__name__}: {str(error)[:500]}"

    # ---------------------------------------------------------------- a stage

    def _load(self, message: pb.Assign, assignment: int, cancel: Cancel) -> None:
        started_s = time.perf_counter()
        self._drop()
        self._loads(assignment)
        run, links, fetched = load(message, self._context, cancel, self._report_waiting)
        work = run.assignment
        with self._lock:
            self._run, self._links = run, links
        # Cancelled in the meantime: links that did not exist yet could not be aborted.
        cancel.check()
        digests = () if work.replay is None else self._replay(run, links, work.replay, cancel)
        took_s = time.perf_counter() - started_s
        log.info(
            "stage.loaded",
            job=work.job, version=work.version, stage=work.stage, took_s=round(took_s, 3),
            fetched_s=round(fetched.seconds, 3), fetched_bytes=fetched.n_bytes,
        )  # fmt: skip
        self._post(told.Loaded(work.job, work.version, took_s, digests=digests, fetched_s=fetched.seconds))

    def _replay(self, run: StageRun, links: Links, replay: Replay, cancel: Cancel) -> tuple[told.Digest, ...]:
        """Repeat the steps since the state that was loaded, until the stage is where its neighbours are;
        returns each one's digests, of its gradients and of what it was sent."""
        started_s = shown_s = time.perf_counter()
        job, first, count = run.assignment.job, replay.first_step, len(replay.scales or replay.commits)

        digests: list[told.Digest] = []

        def notice(report: StepReport) -> None:
            nonlocal shown_s
            if run.assignment.standby:
                self._post(events.StepApplied(job, run.at(report.step).version, report.step))
            digests.append(told.Digest(report.stage.digest.hex(), report.inputs.hex()))
            now_s = time.perf_counter()
            if now_s - shown_s >= SHOW_S:
                shown_s = now_s
                log.info("stage.replays", job=job, step=report.step, steps=report.step + 1 - first, of=count)

        run.replay(cancel, lambda step: self._snapshots.take(run, step), notice)
        links.codec_use()  # is no training step's
        took_s = round(time.perf_counter() - started_s, 3)
        log.info("stage.replayed", job=job, step=first, steps=count, took_s=took_s)
        return () if run.assignment.plan.local else tuple(digests)  # nobody keeps those of a peer's own steps

    def _repeat(self, commit: events.StepCommit, cancel: Cancel) -> None:
        """Do a committed step of the rank that this worker stands by for."""
        run, step = self._loaded, commit.step
        run.repeat(commit, self._newest, cancel)
        self._post(events.StepApplied(run.assignment.job, run.at(step).version, step))

    def _reconfigure(self, message: pb.Reconfigure, cancel: Cancel) -> None:
        started_s = time.perf_counter()
        run, change = self._loaded, coding.read(asked.Reconfigure, message)
        links = messages.links_of(change.peers)
        later = run.assignment.reconfigured(change.plan, links, change.step, standby=change.standby)
        check(later, self._context.worker)
        _log_stood_by(run)
        # Who is connected may be lost again until then: the new neighbours send when all are loaded.
        self._context.network.connect(later.job, later.version, cancel)
        shared = later.micros != run.assignment.micros
        run.reconfigure(later, feed_of(later, self._context) if shared else None)
        if change.store:
            self._snapshots.take(run, change.step - 1)
        took_s = time.perf_counter() - started_s
        log.info(
            "stage.reconfigured",
            job=later.job, version=later.version, stage=later.stage, step=change.step,
            took_s=round(took_s, 3),
        )  # fmt: skip
        if not later.standby:
            self._post(told.Loaded(later.job, later.version, took_s))

    def _report_waiting(self, wait: LongWait) -> None:
        """Report that nothing comes though every peer lives: nothing else would show it."""
        self._send(reports.waiting(wait))
        log.warning("stage.waits", job=wait.key.job, **reports.wait_fields(wait))

    def _run_due(self, due: Due, cancel: Cancel) -> None:
        run = self._loaded
        work = run.run_step if isinstance(due, instructions.RunStep) else run.run_round
        report = work(due.step, cancel)
        assignment = run.at(due.step)
        job, version = assignment.job, assignment.version
        norms = len(assignment.plan.replicas) > 1 or assignment.training.optimizer.clip_norm is not None
        used = {} if self._links is None else self._links.codec_use()
        self._post(reports.step_ready(job, version, report, norms, used))

    def _apply(self, commit: events.StepCommit, cancel: Cancel) -> None:
        run, step = self._loaded, commit.step
        assignment = run.at(step)
        run.apply(step, commit.gradient_scale, cancel, commit.shares)
        if commit.store or commit.keep:
            self._snapshots.take(run, step, keep=not commit.store)
        self._post(events.StepApplied(assignment.job, assignment.version, step))
        spans = run.spans.take()
        for message in reports.spans(assignment.job, run.assignment.version, assignment.stage, spans):
            self._send(message)

    def _evaluate(self, step: int, coded: bool, cancel: Cancel) -> None:
        run = self._loaded
        found = run.evaluate(step, cancel)
        through_codecs = run.evaluate(step, cancel, coded=True) if coded else None
        job, version = run.assignment.job, run.at(step).version
        self._post(reports.eval_ready(job, version, step, found, through_codecs))

    def _relinks(self, commit: events.StepCommit) -> None:
        """Queue the change of links that a commit announces."""
        relink = commit.relink
        if relink is not None:
            self._for_stage(commit, lambda c: self._relink(relink))

    def _relink(self, relink: events.Relink) -> None:
        run = self._loaded
        run.relink(relink.version, relink.first_step, relink.links)
        log.info("links.changed", job=run.assignment.job, version=relink.version, step=relink.first_step)

    def _discard(self) -> None:
        if self._run is not None:
            self._run.discard()

    def _drop(self) -> None:
        self._rounds.drop()
        with self._lock:
            run, self._run, self._links = self._run, None, None
        if run is not None:
            _log_stood_by(run)
            run.close()
            _dropped(self._context)
            if self._gauge.left:
                self.report_codecs()

    @property
    def _busy(self) -> bool:
        return self._run is not None or self._rounds.joined

    @property
    def _loaded(self) -> StageRun:
        if self._run is None:
            raise RuntimeError("no stage is loaded")
        return self._run

    # ---------------------------------------------------------------- probes

    def _report_codecs(self, cancel: Cancel) -> None:
        with self._lock:
            self._codecs_asked = False
        try:
            done = self._busy or self._gauge.run(cancel.check, lambda: self._tasks.waiting)
        finally:
            give_back()  # codecs were timed on large tensors
            self._send(to_coordinator(told.CodecSpeeds(self._gauge.rates)))
        if not done:
            self.report_codecs()  # behind those that wait

    def _time_ops(self, message: pb.ProbeOps) -> None:
        device = self._context.device
        error, timings = "", {}
        try:
            probes = coding.read(asked.ProbeOps, message)
            timings = op_timing.time_ops(
                probes.ops,
                torch_device(device),
                probes.precision,
                OPS_BUDGET_S,
                int(self.memory_limit_bytes * OPS_BYTES_SHARE),
                clock=self._context.cpu.at_work_s,
                watch=self._watch_probe,
            )
        except (RuntimeError, AtollError) as failed:
            error = self._explained(failed)
        finally:
            give_back()  # the stage that comes next counts from here
            self._context.status.end()
        found = {signature: (took.forward_s, took.backward_s) for signature, took in timings.items()}
        self._post(told.OpsProbed(message.request, found, error))

    def _watch_probe(self, name: str) -> None:
        status, duty = self._context.status, self._context.duty
        if duty.limited:
            status.end()
            duty.rest()
        status.begin(status.encoded(Mark(f"{name}, as a probe", PROBE_S)))


def _log_stood_by(run: StageRun) -> None:
    """Log what a standby has done, where this was one."""
    steps, nbytes = run.stood_by
    if steps:
        run.stood_by = [0, 0]
        log.info(
            "stage.stood_by", job=run.assignment.job, stage=run.assignment.stage, steps=steps, bytes=nbytes
        )


def _dropped(context: ComputeContext) -> None:
    """No process holds a stage any more."""
    if context.mesh is not None:
        context.mesh.drop()
    restart_peak(context.device)
