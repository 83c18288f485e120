"""Loading of an assignment until its stage can train: tensors, links, data, neighbours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from atoll.rehearse import RehearsalLimits, rehearse
from worker import blobs
from worker.cancel import Cancel
from worker.links.links import Links
from worker.links.timed import TimedNetwork
from worker.stage import feed
from worker.stage.assignment import Assignment, check
from worker.stage.op_watch import OpWatch
from worker.stage.run import LongWait, Meters, StageRun, codecs_of
from worker.stage.stage import MAX_OUTPUT_BYTES, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.rehearse import OpCost
    from worker.context import WorkerContext
    from worker.machine.device import Device
    from worker.transport.network import PeerNetwork

POLL_S = 0.1


def load(
    assignment: Assignment, context: WorkerContext, cancel: Cancel, notice: Callable[[LongWait], None]
) -> tuple[StageRun, Links]:
    """Check, fetch, build and connect; raises the error that is reported to the coordinator."""
    check(assignment, context.worker)
    costs = _rehearse(assignment, context.device)
    with context.spans.timed("load", assignment.first_step):
        tensors = _tensors(assignment, context, cancel)
        stage = Stage(
            assignment.program,
            assignment.eval_program,
            assignment.training,
            tensors,
            context.device.torch_device,
            states=assignment.states,
            recompute=assignment.plan.recompute,
            actions=assignment.plan.actions(assignment.stage),
        )
    links = Links(
        TimedNetwork(context.network, context.spans),
        assignment.job,
        assignment.version,
        codecs_of(assignment, context.cpu),
        device=context.device.torch_device,
    )
    run = StageRun(
        assignment,
        stage,
        links,
        _feed(assignment, context),
        _held_out(assignment, context),
        Meters(context.spans, context.progress, context.cpu),
        notice,
        watches=[OpWatch(e.program, found, e) for e, found in zip(stage.executors, costs, strict=True)],
    )
    try:
        run.open(assignment.first_step)
        connect(assignment, context.network, context.config.peer_timeout_s, cancel)
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
    """Connect to ``peer``: dial it, or wait until it dials. Raises ConnectionFailed."""
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


def _tensors(assignment: Assignment, context: WorkerContext, cancel: Cancel) -> dict[str, dict[str, Tensor]]:
    programs = [p for p in (assignment.program, assignment.eval_program) if p is not None]
    names = sorted({n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)})
    wanted: dict[str, int] = {}
    for name in names:
        blob = assignment.tensors[name]
        wanted[blob] = max(wanted.get(blob, 0), blobs.most_bytes(assignment.states[name]))

    def progress(_: int) -> None:
        context.progress.tick()

    blobs.download(context.blobs, context.cache, wanted, cancel, progress)
    return {
        name: blobs.load(context.cache, name, assignment.tensors[name], assignment.states[name])
        for name in names
    }


def _feed(assignment: Assignment, context: WorkerContext) -> feed.Feed:
    program, training = assignment.program, assignment.training
    return feed.Feed(
        context.fetch_of(assignment.job),
        feed.input_rules(program, assignment.inputs(program), assignment.states),
        training.n_micro,
        training.steps,
        context.config.feed_ahead_steps,
        context.config.feed_bytes,
    )


def _held_out(
    assignment: Assignment, context: WorkerContext
) -> Callable[[Cancel], Iterator[Mapping[str, Tensor]]]:
    program = assignment.eval_program
    fetch = context.fetch_of(assignment.job)
    rules = (
        {} if program is None else feed.input_rules(program, assignment.inputs(program), assignment.states)
    )

    def batches(cancel: Cancel) -> Iterator[Mapping[str, Tensor]]:
        return feed.held_out(fetch, rules, assignment.training.eval_batches, cancel)

    return batches
