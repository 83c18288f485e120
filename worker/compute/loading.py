"""Loading of an assignment until its stage can train: tensors, links, data, neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import ConnectionFailed
from atoll.messages.to_worker import Assign
from atoll.rehearse import RehearsalLimits, rehearse
from protos import coding
from worker.blobs import most_bytes
from worker.cancel import Cancel
from worker.exchange.kept import kept_keys
from worker.links.links import NEVER, Links
from worker.machine.torch_device import torch_device
from worker.stage import feed, tensor_blobs
from worker.stage.assignment import Assignment, assigned, check
from worker.stage.op_marks import OpMarks
from worker.stage.piece import Keeps
from worker.stage.reports import LongWait
from worker.stage.stage import MAX_OUTPUT_BYTES, Stage
from worker.stage.steps import joining
from worker.stage.steps.local_steps import LocalSteps
from worker.stage.steps.run import Meters, StageRun, codecs_of
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.program import StageProgram
    from atoll.rehearse import OpCost
    from protos import atoll_control_pb2 as pb
    from worker.context import ComputeContext
    from worker.machine.device import Device


class Fetched(NamedTuple):
    """What it took until a stage's tensors were on this machine's disk: bytes that were not before."""

    seconds: float
    n_bytes: int


def load(
    message: pb.Assign, context: ComputeContext, cancel: Cancel, notice: Callable[[LongWait], None]
) -> tuple[StageRun, Links, Fetched]:
    """Check, fetch, build and connect. Raises the error that is reported to the coordinator."""
    assignment = assigned(coding.read(Assign, message))
    check(assignment, context.worker)
    costs, device = _rehearse(assignment, context.device), torch_device(context.device)
    with context.spans.timed("load", assignment.first_step):
        tensors, fetched = _tensors(assignment, context, cancel)
        stage = _stage(message, assignment, context, tensors)
        joining.restore(assignment, stage, tensors)
        local = LocalSteps(assignment, stage, tensors) if assignment.plan.local else None
    (_, first), *later = assignment.eras
    links = Links(
        context.network,
        assignment.job,
        first.version,
        codecs_of(first, context.cpu),
        device=device,
        announce=context.network.announce,
        record=context.network.record,
        sends_from=(NEVER if assignment.standby else assignment.first_step, assignment.joining),
    )
    if assignment.training.spot_checks > 0:
        links.hash_inputs()
    for begins, era in later:
        links.relink(era.version, begins, codecs_of(era, context.cpu))
    for executor, found in zip(stage.executors, costs, strict=True):
        executor.watch = OpMarks(context.status, executor.program, found, context.duty)
    run = StageRun(
        assignment,
        stage,
        links,
        feed_of(assignment, context),
        _held_out(assignment, context),
        Meters(context.spans, context.progress, context.cpu),
        notice,
        local,
    )
    try:
        run.open(assignment.first_step if assignment.replay is None else assignment.replay.first_step)
        _connect(assignment, context, cancel)
    except BaseException:
        run.close()
        raise
    return run, links, fetched


def _stage(
    message: pb.Assign,
    assignment: Assignment,
    context: ComputeContext,
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> Stage:
    """The stage in this process, or in all those of a mesh. Peers with steps of their own exchange what one
    process holds: there the first device computes alone."""
    if context.mesh is not None and not assignment.plan.local:
        return context.mesh.stage(message, assignment, tensors)
    return Stage(
        assignment.pieces,
        assignment.own_training,
        tensors,
        torch_device(context.device),
        states=assignment.states,
        keeps=Keeps(assignment.keeping, context.scratch),
        actions=assignment.plan.actions(assignment.rank),
    )


def _connect(assignment: Assignment, context: ComputeContext, cancel: Cancel) -> None:
    """Be connected to every neighbour. Raises ConnectionFailed: who is new accuses nobody of those who were
    there before, as it may well be its own line."""
    try:
        context.network.connect(assignment.job, assignment.version, cancel)
    except PeerLost as lost:
        raise ConnectionFailed(lost.reason) from None


def _rehearse(assignment: Assignment, device: Device) -> list[Mapping[int, OpCost]]:
    """Refuse a program that does not make what it declares, before anything is allocated; what each costs."""
    limits = RehearsalLimits(output_bytes=min(MAX_OUTPUT_BYTES, device.memory_limit_bytes))
    costs: list[Mapping[int, OpCost]] = []
    for program in assignment.programs:
        names = (*program.parameters, *program.buffers, *program.constants)
        leaves = {name: assignment.states[name].meta for name in names}
        inputs, precision = assignment.inputs(program), assignment.training.precision
        costs.append(rehearse(program, leaves, inputs, precision, torch_device(device), limits))
    return costs


def _tensors(
    assignment: Assignment, context: ComputeContext, cancel: Cancel
) -> tuple[dict[str, dict[str, Tensor]], Fetched]:
    """Return the stage's tensors, and what it took until they were on this machine's disk."""
    states = assignment.leaf_states
    if assignment.plan.keeps:
        states |= {key: states[of] for key, of in kept_keys(assignment.tensors, states).items()}
    wanted: dict[str, int] = {}
    for name, state in states.items():
        blob = assignment.tensors[name]
        wanted[blob] = max(wanted.get(blob, 0), most_bytes(state))

    came = 0

    def progress(nbytes: int) -> None:
        nonlocal came
        came += nbytes
        context.progress.tick()

    started_s = time.perf_counter()
    context.blobs.fetch(wanted, cancel, progress)
    fetched = Fetched(time.perf_counter() - started_s, came)
    tensors = {
        name: tensor_blobs.load(context.blobs, name, assignment.tensors[name], state)
        for name, state in states.items()
    }
    return tensors, fetched


def feed_of(assignment: Assignment, context: ComputeContext) -> feed.Feed:
    """Return what fetches the micro-batches of a stage's share of each step, not started."""
    training = assignment.training
    return feed.Feed(
        context.fetch_of(assignment.job, assignment.micros),
        _rules(assignment, [program for program, _ in assignment.pieces]),
        assignment.micros,
        training.steps,
        context.config.feed_ahead_steps,
        context.config.feed_bytes,
    )


def _held_out(
    assignment: Assignment, context: ComputeContext
) -> Callable[[Cancel], Iterator[Mapping[str, Tensor]]]:
    fetch, count = context.fetch_of(assignment.job, None), assignment.training.eval_batches

    def rules_of(micro: int) -> dict[str, feed.InputRule]:
        return _rules(assignment, [assignment.evaluates(micro, at) for at in range(len(assignment.pieces))])

    full, last = rules_of(0), rules_of(count - 1)

    def batches(cancel: Cancel) -> Iterator[Mapping[str, Tensor]]:
        return feed.held_out(fetch, [*[full] * (count - 1), last], cancel)

    return batches


def _rules(assignment: Assignment, programs: Iterable[StageProgram | None]) -> dict[str, feed.InputRule]:
    """Rules of everything that these programs of a stage take."""
    return feed.joined_rules(
        feed.input_rules(program, assignment.inputs(program), assignment.states)
        for program in programs
        if program is not None
    )
