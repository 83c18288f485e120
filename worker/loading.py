"""From an assignment to a stage that is ready to train: tensors, links, data, neighbours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from atoll.rehearse import RehearsalLimits, rehearse
from protos.blob_transfer import BlobPort
from worker import blobs
from worker.blobs import BlobCache
from worker.cancel import Cancel
from worker.config import WorkerConfig
from worker.data.registry import open_dataset
from worker.federated.participation import Site
from worker.links.links import Links
from worker.links.timed import TimedNetwork
from worker.machine.cpu import CpuMeter
from worker.spans import Spans
from worker.stage import feed
from worker.stage.assignment import Assignment, check
from worker.stage.op_watch import OpWatch
from worker.stage.run import LongWait, Progress, StageRun, codecs_of
from worker.stage.stage import MAX_OUTPUT_BYTES, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.rehearse import OpCost
    from worker.machine.device import Device
    from worker.transport.network import PeerNetwork

POLL_S = 0.1


@dataclass(frozen=True)
class Surroundings:
    """What a stage of any job runs on."""

    worker: str
    device: Device
    config: WorkerConfig
    network: PeerNetwork
    cache: BlobCache
    blobs: BlobPort
    fetch_of: Callable[[str], feed.Fetch]  # job -> its data
    spans: Spans
    progress: Progress
    cpu: CpuMeter = field(default_factory=CpuMeter)

    def site(self) -> Site:
        """The same as a participation in a federated job needs it."""
        return Site(
            self.worker,
            self.device.torch_device,
            self.config.state_dir,
            self.blobs,
            self.cache,
            partial(open_dataset, self.config.state_dir),
            self.config.max_upload_bytes_per_s,
            self.config.kept_bytes,
            self.progress.tick,
            self.config.floors,
        )


def load(
    assignment: Assignment, around: Surroundings, cancel: Cancel, notice: Callable[[LongWait], None]
) -> tuple[StageRun, Links]:
    """Check, fetch, build and connect; raises the error that the coordinator is told."""
    check(assignment, around.worker)
    costs = _rehearse(assignment, around.device)
    with around.spans.timed("load", assignment.first_step):
        tensors = _tensors(assignment, around, cancel)
        stage = Stage(
            assignment.program,
            assignment.eval_program,
            assignment.training,
            tensors,
            around.device.torch_device,
            states=assignment.states,
            recompute=assignment.plan.recompute,
            defer=assignment.plan.defers(assignment.stage),
        )
    links = Links(
        TimedNetwork(around.network, around.spans),
        assignment.job,
        assignment.version,
        codecs_of(assignment, around.cpu),
        device=around.device.torch_device,
    )
    run = StageRun(
        assignment,
        stage,
        links,
        _feed(assignment, around),
        _held_out(assignment, around),
        around.spans,
        around.progress,
        cpu=around.cpu,
        notice=notice,
        watches=[OpWatch(e.program, found, e) for e, found in zip(stage.executors, costs, strict=True)],
    )
    try:
        run.open(assignment.first_step)
        connect(assignment, around.network, around.config.peer_timeout_s, cancel)
    except BaseException:
        run.close()
        raise
    return run, links


def connect(assignment: Assignment, network: PeerNetwork, timeout_s: float, cancel: Cancel) -> None:
    """Be connected to every neighbour. Raises ConnectionFailed naming the one that is not."""
    deadline_s = time.monotonic() + timeout_s
    for link in assignment.links:
        network.admit(link.worker)
    waits = [
        partial(connect_one, network, link.worker, link.addresses, link.dial, timeout_s)
        for link in assignment.links
    ]
    _together(waits, deadline_s, cancel)


def connect_one(
    network: PeerNetwork, peer: str, addresses: tuple[tuple[str, int], ...], dial: bool, timeout_s: float
) -> None:
    """Be connected to ``peer``: dial it, or wait until it dials. Raises ConnectionFailed."""
    if network.connected(peer):
        return
    if dial:
        network.dial(peer, addresses, timeout_s)
    else:
        network.wait_for(peer, timeout_s)


def _together(waits: Sequence[Callable[[], object]], deadline_s: float, cancel: Cancel) -> None:
    """Run all at once; the first error counts. Given up, not stopped, when cancelled."""
    failures: list[AtollError] = []

    def attempt(wait: Callable[[], object]) -> None:
        try:
            wait()
        except AtollError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(w,), name="atoll-dial", daemon=True) for w in waits]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        cancel.wait(POLL_S)
        if time.monotonic() > deadline_s + 2.0:
            break
    if failures:
        raise failures[0]


def _rehearse(assignment: Assignment, device: Device) -> list[Mapping[int, OpCost]]:
    """Refuse a program that does not make what it declares, before anything is allocated; what each costs."""
    limits = RehearsalLimits(output_bytes=min(MAX_OUTPUT_BYTES, device.memory_limit_bytes))
    costs: list[Mapping[int, OpCost]] = []
    for program in (assignment.program, assignment.eval_program):
        if program is not None:
            names = (*program.parameters, *program.buffers, *program.constants)
            leaves = {name: assignment.states[name].meta for name in names}
            inputs, precision = assignment.inputs(program), assignment.training.precision
            costs.append(rehearse(program, leaves, inputs, precision, device.torch_device, limits))
    return costs


def _tensors(assignment: Assignment, around: Surroundings, cancel: Cancel) -> dict[str, dict[str, Tensor]]:
    programs = [p for p in (assignment.program, assignment.eval_program) if p is not None]
    names = sorted({n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)})
    wanted: dict[str, int] = {}
    for name in names:
        blob = assignment.tensors[name]
        wanted[blob] = max(wanted.get(blob, 0), blobs.most_bytes(assignment.states[name]))

    def progress(_: int) -> None:
        around.progress.tick()

    blobs.download(around.blobs, around.cache, wanted, cancel, progress)
    return {
        name: blobs.load(around.cache, name, assignment.tensors[name], assignment.states[name])
        for name in names
    }


def _feed(assignment: Assignment, around: Surroundings) -> feed.Feed:
    program, training = assignment.program, assignment.training
    return feed.Feed(
        around.fetch_of(assignment.job),
        feed.input_rules(program, assignment.inputs(program), assignment.states),
        training.n_micro,
        training.steps,
        around.config.feed_ahead_steps,
        around.config.feed_bytes,
    )


def _held_out(
    assignment: Assignment, around: Surroundings
) -> Callable[[Cancel], Iterator[Mapping[str, Tensor]]]:
    program = assignment.eval_program
    fetch = around.fetch_of(assignment.job)
    rules = (
        {} if program is None else feed.input_rules(program, assignment.inputs(program), assignment.states)
    )

    def batches(cancel: Cancel) -> Iterator[Mapping[str, Tensor]]:
        return feed.held_out(fetch, rules, assignment.training.eval_batches, cancel)

    return batches
