"""The compute process: what the daemon asks is done on the workbench, what comes of it is sent back.

One thread reads the pipe and never waits for anything else; the pipe's end is the process's.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from atoll.errors import AtollError
from atoll.federated import Floors
from atoll.messages.from_worker import CodecSpeeds
from hostos.allotted import usable
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos import coding
from protos.child_pipe import Gone, Pipe
from worker.compute.logs import log_to
from worker.compute.ports import (
    Arenas,
    DaemonBlobs,
    DaemonNetwork,
    QueueBounds,
    Requests,
    daemon_batches,
)
from worker.compute.workbench import Workbench
from worker.context import ComputeContext, ComputeSettings
from worker.data.population import load_population
from worker.data.registry import open_dataset
from worker.machine.codec_speed import CodecGauge
from worker.machine.cpu import CpuMeter
from worker.machine.device import Device, device_facts, versions
from worker.machine.malloc import keep_no_tensors
from worker.machine.op_timing import warm_up
from worker.machine.torch_device import (
    GpuEnergy,
    find_device,
    peak_memory_bytes,
    prepare,
    remaining,
    torch_device,
    used_memory_bytes,
)
from worker.manners.duty import DutyCycle
from worker.mesh.followers import Follower, followers_elsewhere, start_followers
from worker.mesh.leader import Leader, Reach
from worker.pipe.status import ComputeStatus, DaemonStatus
from worker.session import events, instructions, pipe
from worker.spans import Spans
from worker.stage.reports import Progress

COUNT_S = 0.1  # between two looks at progress and memory
END_S = 0.5


class PipeSpeeds:
    """``Kept`` by the daemon."""

    def __init__(self, kept: bytes, tell: Callable[[pb.FromCompute], None]) -> None:
        self._kept, self._tell = kept, tell

    def read(self) -> bytes:
        return self._kept

    def write(self, data: bytes) -> None:
        self._kept = data
        self._tell(pb.FromCompute(codec_speeds=data))


class ComputeProcess:
    """All that is computed on one device; ``run`` returns when the daemon is done with it."""

    def __init__(self, end: Pipe, arenas: Arenas, setup: pb.ComputeSetup, began_s: float) -> None:
        """UsageError when the device is not there."""
        self._pipe, self._began_s = end, began_s
        settings = _settings(setup)
        if setup.may_shrink:
            settings = replace(settings, device=remaining(settings))
        # They import what this process does meanwhile.
        followers = followers_elsewhere(setup.follower_pipes) or start_followers(settings.device)
        device = find_device(settings)
        prepare(device, settings)
        keep_no_tensors()
        warm_up()
        # What importing left behind is no garbage, and looking through it for some takes a tenth of a
        # second, on an eighth of a core nearly one, in the midst of a step.
        gc.freeze()
        self._device, self._devices, self._progress = device, settings.device, Progress()
        self._status = ComputeStatus(arenas.outgoing.head)
        daemon, cores, spans = DaemonStatus(arenas.incoming.head), usable().cores, Spans()
        cpu = CpuMeter(
            cores,
            device.threads if device.kind == "cpu" else 0,
            # The daemon's share of the same cores is taken from computing as well.
            cpu_clock=lambda: time.process_time() + daemon.cpu_s,
        )
        self._duty = DutyCycle(
            # A GPU computes beside this process's own threads.
            (lambda: cpu.computed_s - cpu.rested_s)
            if device.kind != "cpu"
            else (lambda: time.process_time() / device.threads),
            partial(self._rested, cpu),
        )
        self._duty.limit(setup.compute_share or 1.0)
        self._mesh = self._led(settings, setup, followers)
        self._requests = Requests(self._tell)
        bounds = QueueBounds(setup.max_queued_bytes, setup.max_queued_messages)
        self._network = DaemonNetwork(self._tell, self._requests, arenas, bounds, spans)
        gauge = self._gauge = CodecGauge(
            PipeSpeeds(setup.codec_speeds, self._tell),
            _circumstances(device, cores),
            torch_device(device),
            at_work=cpu.at_work_s,
            scratch=Path(setup.scratch_dir),
        )
        context = ComputeContext(
            worker=setup.worker,
            device=device,
            config=settings,
            network=self._network,
            blobs=DaemonBlobs(self._requests, Path(setup.blob_dir)),
            fetch_of=partial(daemon_batches, self._requests),
            open_data=partial(open_dataset, settings.state_dir),
            open_population=partial(load_population, settings.state_dir),
            scratch=Path(setup.scratch_dir),
            spans=spans,
            progress=self._progress,
            cpu=cpu,
            status=self._status,
            duty=self._duty,
            mesh=self._mesh,
        )
        self._bench = Workbench(context, self._post, self._say, self._say_loading, gauge)

    def _led(
        self, settings: ComputeSettings, setup: pb.ComputeSetup, followers: Sequence[Follower]
    ) -> Leader | None:
        """The other processes of a member of several devices, ready."""
        if not followers:
            return None
        folders = Path(setup.scratch_dir), Path(setup.blob_dir)
        reach = Reach(setup.interface, setup.may_shrink)
        found = Leader(settings, self._device, folders, _mesh_died, followers, self._status, reach)
        joint = found.joint.latency_s, found.joint.bytes_per_s
        self._device = replace(found.device, joint=joint)
        return None if found.alone else found

    def run(self) -> None:
        """Work until the pipe ends or the daemon says so."""
        self._bench.start()
        threading.Thread(target=self._count, name="atoll-count", daemon=True).start()
        took_s = time.monotonic() - self._began_s
        known = coding.write(CodecSpeeds(self._gauge.rates), control.CodecSpeeds)
        ready = pb.ComputeReady(device=device_facts(self._device), took_s=took_s, codec_speeds=known.speeds)
        self._tell(pb.FromCompute(ready=ready))
        while True:
            try:
                message = self._pipe.receive(pb.ToCompute())
            except Gone:
                return
            if message.WhichOneof("body") == "stop":
                self._bench.stop(END_S)
                return
            self._handle(message)

    def _handle(self, message: pb.ToCompute) -> None:
        if message.freed:
            self._network.freed(message.freed)
        kind = message.WhichOneof("body")
        if kind is None:
            return
        m = getattr(message, kind)
        if kind in ("run_step", "drop"):
            self._network.tidy()  # sums of tied parameters went through the arena at the last step's end
        match kind:
            case _ if kind in pipe.INSTRUCTIONS:
                self._bench.do(pipe.instruction_of(kind, m))
            case "arrived":
                self._network.arrived(m)
            case "lost":
                self._network.lost(m.peer, m.reason)
            case "answer":
                self._requests.answered(m.request, m)
            case "batch":
                self._requests.answered(m.request, m.batch)
            case "transferred":
                self._requests.transferred(m.request, m.bytes)
            case "load":
                self._bench.load(m, message.assignment)
            case "reconfigure":
                self._bench.reconfigure(m)
            case "join":
                self._bench.join(m)
            case "time_ops":
                self._bench.time_ops(m)
            case "interrupt":
                self._bench.do(instructions.Interrupt(m))
            case "report_codecs":
                self._bench.report_codecs()
            case "memory_limit":
                self._bench.memory_limit_bytes = m
            case "compute_share":
                self._duty.limit(m)
            case "ping":
                self._tell(pb.FromCompute(pong=m))

    # ------------------------------------------------------------ to the daemon

    def _tell(self, message: pb.FromCompute) -> None:
        try:
            self._pipe.send(message)
        except Gone:
            os._exit(0)  # nobody is there to hear of anything that follows

    def _post(self, report: events.Report) -> None:
        self._tell(pipe.reported(report))

    def _say(self, message: control.FromWorker) -> None:
        self._tell(pb.FromCompute(said=message))

    def _say_loading(self, assignment: int) -> None:
        self._tell(pb.FromCompute(loading=assignment))

    def _rested(self, cpu: CpuMeter, seconds: float) -> None:
        """A part of a rest is over: no hang, and time that the step takes."""
        cpu.rested_s += seconds
        self._progress.tick()

    def _count(self) -> None:
        """Thread: what the heartbeat shows."""
        energy = GpuEnergy(self._devices, self._device)
        while True:
            device = self._device
            used, peak = used_memory_bytes(device), peak_memory_bytes(device)
            self._status.count(self._progress.count, used, peak, energy.joules())
            self._status.wait(self._progress.waits, time.monotonic())
            time.sleep(COUNT_S)


def serve(end: Pipe, arenas: Arenas, began_s: float) -> None:
    """The process's life: its setup is the pipe's first message."""
    setup = end.receive(pb.ToCompute()).setup
    threading.excepthook = _end
    log_to(end.send)
    try:
        process = ComputeProcess(end, arenas, setup, began_s)
    except AtollError as error:
        end.send(pb.FromCompute(ready=pb.ComputeReady(error=str(error))))
        return
    process.run()


def _end(died: threading.ExceptHookArgs) -> None:
    """A thread has died of what nothing foresees. Nobody would do its work any more: the daemon reports the
    end of a process and starts another."""
    threading.__excepthook__(died)
    os._exit(1)


def _mesh_died(reason: str) -> None:
    """A process of the mesh is gone, and what this one waits for with it: they end together."""
    print(reason, flush=True)  # the daemon shows what a process printed last
    os._exit(1)


def _settings(setup: pb.ComputeSetup) -> ComputeSettings:
    same = {f.name: getattr(setup, f.name) for f in fields(ComputeSettings) if f.name != "floors"}
    floors = Floors(setup.min_batch, setup.min_samples, setup.min_steps, setup.min_clients)
    return ComputeSettings(**same | {"state_dir": Path(setup.state_dir), "floors": floors})


def _circumstances(device: Device, cores: float) -> dict[str, object]:
    facts = {"device": device.kind, "model": device.model, "threads": device.threads, "cores": cores}
    return {**versions(), **facts}
