"""The daemon's side of computing: starts compute processes, gives them their work, outlives them.

A pipeline's stages are computed by the process that stands ready; a federated job gets one of its own,
which sees that job's folder and data set and no other. What a process says is checked; one that breaks a
rule, crashes, hangs or takes too much memory is ended. A job that has cost ``MAX_DEATHS`` is refused.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.dataset_spec import DataSpec
from atoll.errors import AtollError, StorageError
from atoll.messages.from_worker import LinkProbed, OpsProbed
from hostos.files.private_files import private_folder
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos import coding
from worker.config import make_state_dir
from worker.data.pinned import PinnedRows
from worker.data.registry import dataset_folder
from worker.federated.kept.folders import make_job_folder
from worker.hosting import TUNED
from worker.hosting.contained.child import clear_scratch
from worker.hosting.contained.sandbox import View
from worker.hosting.hearing import Hearing
from worker.hosting.held import Held, HostState
from worker.hosting.neighbours.connecting import expect, time_link
from worker.hosting.neighbours.gate import Gate
from worker.hosting.neighbours.send_log import SendLog
from worker.hosting.processes import Processes
from worker.hosting.requests import HostPorts
from worker.hosting.watch import OpWatch
from worker.session import events, instructions, pipe, wire

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.federated.owner.consent import Consent
    from worker.machine.own_share import MemoryShare
    from worker.pipe.status import Waiting
    from worker.ranks.gathering import Gathering


class ComputeHost:
    """Owns the compute process of one device. ``do`` may be called from any thread and never waits."""

    def __init__(self, config: WorkerConfig, consent: Consent, ranks: Gathering | None = None) -> None:
        """``ranks``: the other hosts of a site."""
        self._state = HostState(config, consent, ranks)
        self._processes = Processes(self._state, Hearing(self._state).heard, self._join)

    # ------------------------------------------------------------ the daemon

    def prepare(self) -> None:
        """Start a process: it loads torch while the worker joins. Raises StorageError, and UsageError for a
        sandbox that is required and not to be had."""
        config = self._state.config
        make_state_dir(config.state_dir)
        private_folder(config.blob_dir)
        shutil.rmtree(config.send_log_dir, ignore_errors=True)  # of an earlier life, whose stage is gone
        clear_scratch(config.device_dir)
        with self._state.lock:
            self._processes.launch_for_pool()

    def start(
        self, worker: str, ports: HostPorts, stopping: Callable[[], bool] = lambda: False
    ) -> control.DeviceFacts:
        """Begin to compute as ``worker``; returns the device's facts. UsageError when it is not there."""
        state = self._state
        with state.changed:
            state.worker, state.ports = worker, ports
            now = state.now
            if now is not None:
                self._processes.settle_in(now)
            while state.device is None and state.failed is None and not stopping():
                state.changed.wait(TUNED.process_look_s)
            if state.failed is not None:
                raise state.failed
        self._processes.watch()
        return state.device or control.DeviceFacts()

    def stop(self, timeout_s: float) -> None:
        """End the process."""
        self._processes.stop(timeout_s)

    @property
    def progress(self) -> int:
        """Signs of life of the computation, counted."""
        now = self._state.now
        return 0 if now is None else now.child.status.progress

    @property
    def waiting(self) -> Waiting | None:
        """What the computation waits for, None: for nothing."""
        now = self._state.now
        return None if now is None else now.child.status.waiting(time.monotonic())

    @property
    def logged_from(self) -> int:
        """First step from which on the send log holds all that the held stage sent. 0 without a stage: who is
        given the next one is else thought to hold nothing of it until its next heartbeat."""
        gate = self._state.gate
        return 0 if gate is None else gate.logged_from

    @property
    def memory_bytes(self) -> int:
        """Bytes held on the device."""
        now = self._state.now
        return 0 if now is None else now.child.status.memory_bytes

    @property
    def memory_peak_bytes(self) -> int:
        """The most bytes that computing has held beyond rest since the newest stage was loaded."""
        now = self._state.now
        return 0 if now is None else now.peak_bytes(self._state.device)

    @property
    def codec_speeds(self) -> list[control.CodecSpeed]:
        """Codecs' speeds that are known by now."""
        return list(self._state.rates)

    @property
    def device(self) -> control.DeviceFacts:
        """Facts of the device as the newest process found them, its budget as it is set now."""
        facts = control.DeviceFacts()
        facts.CopyFrom(self._state.device or facts)
        share = self._state.memory_under()
        facts.memory_limit_bytes, facts.own_memory_bytes = max(0, share.planned_bytes), share.own_bytes
        facts.memory_in_figures = share.planned_bytes < share.stage_bytes
        return facts

    def memory_under(self, config: WorkerConfig | None = None) -> MemoryShare:
        """Return how the device's memory is shared under the limits of ``config``, None: as they are now."""
        return self._state.memory_under(config)

    def limit_share(self, share: float) -> None:
        """Compute for so much of the time, in (0, 1], from now on."""
        self._state.share = share
        self._state.tell(pb.ToCompute(compute_share=share))

    def limit_memory(self, memory_bytes: int, gpu_memory_bytes: int) -> bool:
        """Have every process that is started from now on bounded so; True when the one that there is must
        make way for that."""
        before = self._state.config
        self._state.config = replace(before, memory_bytes=memory_bytes, gpu_memory_bytes=gpu_memory_bytes)
        return self._state.config != before

    def report_codecs(self) -> None:
        """Have the speeds of codecs reported that are known, and those measured that are not."""
        self._state.wants_codecs = True
        self._state.tell(pb.ToCompute(report_codecs=True))

    def do(self, instruction: instructions.Instruction) -> None:
        """Take an instruction of the session that concerns computing."""
        with self._state.lock:
            try:
                self._do(instruction)
            except AtollError as error:
                self._state.report(str(error), gone=False)
                if self._state.now is None:
                    self._processes.later()

    def _do(self, instruction: instructions.Instruction) -> None:
        state = self._state
        match instruction:
            case events.Assign():
                self._load(instruction)
            case instructions.RunStep(_, version, step) | instructions.RunRound(_, version, step):
                state.at(version, step)
                if state.now is not None:
                    state.now.watch.step_begins(time.monotonic())
                if state.gate is not None:
                    state.gate.step_over(step)
                state.tell(pipe.asked(instruction))
            case instructions.Reconfigure():
                self._reconfigure(instruction)
            case (events.StepCommit() as commit) | instructions.RepeatStep(commit):
                state.at(commit.version, commit.step)
                if state.gate is not None:
                    state.gate.trim_log(commit.replay_from)
                state.tell(pipe.asked(instruction))
            case instructions.Evaluate(commit):
                state.at(commit.version, commit.step)
                state.tell(pipe.asked(instruction))
            case events.Release():
                self._drop(instruction)
            case instructions.Interrupt(reason):
                state.tell(pb.ToCompute(interrupt=reason))
            case events.Participate():
                self._join(instruction)
            case events.TrainRound(job, at_round, gateway=gateway):
                self._turn(job, at_round, "train", pipe.asked(instruction), gateway)
            case events.EvaluateRound(job, at_round):
                self._turn(job, at_round, "evaluate", pipe.asked(instruction))
            case events.StepDiscard() | events.RoundTaken() | events.SecureOrder():
                state.tell(pipe.asked(instruction))
            case events.ProbeOps(request, ops) if not ops.ops:
                # The coordinator times the way here: nothing that computes may stand in it.
                state.ports.post(OpsProbed(request, {}))
            case events.ProbeOps(request) if state.now is None and not self._processes.resting:
                state.ports.post(OpsProbed(request, {}, state.last_death))
            case events.ProbeOps(request, ops):
                if state.now is None or state.now.joined:
                    self._processes.launch_for_pool()  # strangers' ops see nobody's data
                state.probes.add(request)
                state.tell(pb.ToCompute(time_ops=ops))
            case instructions.Suspend(reason):
                self._processes.suspend(reason)
            case instructions.Wake():
                self._processes.wake()
            case events.ProbeLink():
                name = f"atoll-probe-{instruction.link.worker}"
                threading.Thread(target=self._time_link, args=(instruction,), name=name, daemon=True).start()
            case _:
                raise TypeError(f"not for the compute host: {instruction!r}")

    def make_room(self) -> None:
        """End the process while no job is held: the next one, or a probe, starts another."""
        self._processes.make_room()

    def stand_by(self, job: str, ranks: Mapping[str, int], *, checks: bool = False) -> None:
        """Have these workers repeat neighbours' steps, and no others."""
        with self._state.lock:
            gate = self._state.gate
            if gate is not None and gate.job == job:
                gate.stand_by(ranks, checks=checks)

    # ------------------------------------------------------------ jobs

    def _load(self, asked: events.Assign) -> None:
        state, job = self._state, asked.job
        state.held = held = Held(job, standby=asked.standby, version=asked.version)
        held.rows = self._rows(asked)
        self._processes.check(job)
        if state.now is None or state.now.joined:
            self._processes.launch_for_pool()
        now = state.now
        assert now is not None  # noqa: S101 - launched
        now.leave_gate()
        child = now.child
        first_step = asked.first_step if asked.replay is None else asked.replay.first_step
        folder = state.config.send_log_dir / str(next(state.numbers))
        sent = SendLog(folder, job, state.config.send_log_bytes, first_step)
        network, ranks = state.ports.network, wire.ranks_of(asked.peers)
        now.gate = Gate(job, asked.version, ranks, network, child.incoming, child.send, sent, child.end)
        now.watch = OpWatch(1 if asked.local is None or asked.piped else asked.local.every)
        state.links = wire.links_of(asked.peers)
        network.register(job, now.gate)
        expect(state.links, network, state.config.peer_timeout_s)
        state.ports.fetch_from(asked.holders)
        now.assigned += 1
        now.restart_peak()
        state.energy.begin(*now.counters)
        child.send(pb.ToCompute(load=asked.message, assignment=now.assigned))

    def _rows(self, asked: events.Assign) -> PinnedRows | None:
        """The samples of a job whose data stay here, which their owner has agreed to."""
        if asked.data_of != self._state.worker:
            return None
        data, n_micro = coding.read(DataSpec, asked.message.data), asked.message.training.n_micro
        return PinnedRows(self._state.config.state_dir, data, n_micro)

    def _reconfigure(self, asked: instructions.Reconfigure) -> None:
        state = self._state
        now, change = state.now, asked.change
        if now is None or now.gate is None:
            raise StorageError(f"the stage is gone: {state.last_death}")
        if state.held is not None:
            state.held.standby = change.standby
        state.at(change.version, change.step)
        state.links = wire.links_of(change.peers)
        expect(state.links, state.ports.network, state.config.peer_timeout_s)
        ranks = wire.ranks_of(change.peers)
        # The steps of who has a round left are over: what was sent of them stays.
        begins = change.step + change.joining
        now.gate.reconfigure(ranks, change.version, begins, repeating=asked.repeating)
        now.child.send(pb.ToCompute(reconfigure=change.message))

    def _join(self, joining: events.Participate) -> None:
        state, invitation = self._state, joining.message
        state.held = Held(joining.job, joining, version=joining.version, turn="load")
        self._processes.check(joining.job)
        config = state.config
        folder = make_job_folder(config.state_dir, joining.job, config.kept_bytes)
        data = dataset_folder(config.state_dir, invitation.federated.data)
        view = View(
            (config.blob_dir.absolute(), data.absolute()),
            (folder.absolute(),),
            self._processes.pool_view().device,
        )
        if state.now is None or state.now.joined != joining.job:
            self._processes.launch(view, joining.job)
        join = state.consent.joining(invitation)
        state.tell(pb.ToCompute(join=join))

    def _turn(self, job: str, at_round: int, during: str, message: pb.ToCompute, gateway: str = "") -> None:
        state = self._state
        if state.held is not None:
            # Who takes no more of a job is no member of it: else its rounds were repeated for ever.
            refused = self._processes.refuses(job)
            state.held.step, state.held.turn = at_round, "load" if refused else during
            state.held.gateway = ""
            if gateway and state.held.federated is not None:
                data = state.held.federated.message.federated.data
                state.consent.discloses(data, gateway, state.worker)
                state.held.gateway = gateway
        self._processes.check(job)
        if during == "evaluate":
            state.consent.evaluates(job)
        if state.now is None:
            raise StorageError(f"no process computes here: {state.last_death}")
        if during == "train":
            state.energy.begin(*state.now.counters)
        state.tell(message)

    def _drop(self, released: events.Release) -> None:
        state = self._state
        state.held = None
        if state.now is not None:
            state.now.abandon(released.reason)
        state.tell(pipe.asked(released))

    def _time_link(self, asked: events.ProbeLink) -> None:
        found = time_link(self._state.ports.network, asked)
        self._state.ports.post(LinkProbed(asked.request, asked.link.worker, *found))
