"""Every message that one step or evaluation brings to a stage: known before it begins.

What is not in these lists is refused by the links, so nobody can make a worker take a tensor that
its program does not ask for, nor one of another size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.collective import TOTAL
from atoll.opdag import TensorMeta
from strategies.exchanges import make_rule
from worker.exchange import rule_bucket
from worker.stage.assignment import Assignment
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from atoll.gradient_exchange import Arriving, Bucket
    from atoll.program import StageProgram
    from worker.exchange.bucket import Outgoing
    from worker.stage.steps.local_steps import LocalSteps

PHASE = 4096
"""Numbers of labels and segments that a phase has: more than replicas there are."""
SETTLED = 1
"""``micro`` of a tied parameter's value after a round; 0 is its gradient's."""
EMPTY = TensorMeta((0,), "uint8")
"""What an acknowledgement of an evaluation micro-batch carries: nothing, as a zero-gradient mark."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message, whom it comes from, and its tensor."""

    key: MessageKey
    peer: str
    meta: TensorMeta


def step_arrivals(assignment: Assignment, step: int) -> Iterator[Arrival]:
    """Messages of one training step, in no order that matters."""
    for program, _ in assignment.pieces:
        yield from _piece_arrivals(assignment, program, step)
    for bucket in assignment.buckets:
        for arriving, meta in bucket_arrivals(assignment, bucket).items():
            peer = assignment.holder(bucket, arriving.source)
            direction, micro, edge = bucket_key(bucket, arriving)
            key = MessageKey(assignment.job, assignment.version, step, micro, edge, direction)
            yield Arrival(key, peer, meta)


def bucket_arrivals(assignment: Assignment, bucket: Bucket) -> dict[Arriving, TensorMeta]:
    """Return what a step brings to a bucket: elements of exact sums, or the bytes of a rule's messages, at
    most so many."""
    exchange = assignment.plan.exchange
    if exchange is None or not exchange.keeps:
        sizes = [segment.size for segment in bucket.collective.segments]
        return {one: TensorMeta((sizes[one.segment],), "float32") for one in bucket.arriving}
    shapes = [assignment.states[name].meta.shape for name in bucket.names]
    found = rule_bucket.arrivals(bucket, make_rule(exchange), shapes)
    return {one: TensorMeta((most,), "uint8") for one, most in found}


def _piece_arrivals(assignment: Assignment, program: StageProgram, step: int) -> Iterator[Arrival]:
    """Messages that come for a piece from other workers."""
    nodes = dict(program.ops)

    def arrival(
        direction: Direction, micro: int, at: int, source: int, meta: TensorMeta
    ) -> Iterator[Arrival]:
        if not assignment.here(source):
            edge = assignment.ends[program.stage].edge(at)
            key = MessageKey(assignment.job, assignment.version, step, micro, edge, direction)
            yield Arrival(key, assignment.worker_of(source), meta)

    for micro in assignment.micros:
        for r in program.received:
            yield from arrival(Direction.FORWARD, micro, r.op, r.source, r.meta)
            if r.requires_grad and r.grad_from is not None:
                yield from arrival(Direction.BACKWARD, micro, r.op, r.grad_from, r.meta)
        for p in program.produced:
            if p.requires_grad:
                yield from arrival(Direction.BACKWARD, micro, p.op, p.grad_from, nodes[p.op].outputs[0])
    for tied in program.tied:
        meta = assignment.states[tied.name].meta
        at = tied.holders.index(program.stage)
        for later in tied.holders[at + 1 : at + 2]:
            for block in assignment.blocks:
                yield from arrival(Direction.TIED_PARTIAL, block, tied.index, later, meta)
        if program.stage in assignment.total_to(tied):
            yield from arrival(Direction.TIED_TOTAL, 0, tied.index, tied.holders[0], meta)


def settled_arrivals(assignment: Assignment, last: int) -> Iterator[Arrival]:
    """Tied parameters as a round has left them, which stages of the same peer have from the first holder."""
    for program, _ in assignment.pieces:
        for tied in program.tied:
            if program.stage in assignment.total_to(tied) and tied.name in assignment.trained:
                edge = assignment.ends[program.stage].edge(tied.index)
                direction = Direction.TIED_TOTAL
                key = MessageKey(assignment.job, assignment.version, last, SETTLED, edge, direction)
                worker = assignment.worker_of(tied.holders[0])
                yield Arrival(key, worker, assignment.states[tied.name].meta)


def round_arrivals(assignment: Assignment, local: LocalSteps, last: int) -> Iterator[Arrival]:
    """Messages of the round that ends a period with step ``last``, and what a peer's stages send each other
    of it."""
    job, version = assignment.job, assignment.version
    for worker, (direction, micro, edge), size in local.arrivals(assignment.plan, last):
        key = MessageKey(job, version, last, micro, edge, direction)
        yield Arrival(key, worker, TensorMeta((size,), "uint8"))
    yield from settled_arrivals(assignment, last)


def bucket_key(bucket: Bucket, message: Arriving | Outgoing) -> tuple[Direction, int, int]:
    """Direction, micro and edge of a bucket's message."""
    before = message.phase * PHASE
    if message.label == TOTAL:
        return Direction.TOTAL, before + message.segment, bucket.op
    return Direction.PART, before + message.label, bucket.op


def evaluation_arrivals(
    assignment: Assignment, step: int, direction: Direction = Direction.EVALUATION
) -> Iterator[Arrival]:
    """Messages of the evaluation after ``step``: forward values, and their acknowledgements,
    which keep a fast stage from running ahead of a slow one."""
    for at, (train, _) in enumerate(assignment.pieces):

        def key(micro: int, op: int, number: int = train.stage) -> MessageKey:
            edge = assignment.ends[number].edge(op)
            return MessageKey(assignment.job, assignment.version, step, micro, edge, direction)

        for micro in range(assignment.training.eval_batches):
            program = assignment.evaluates(micro, at)
            if program is None:
                break
            for r in program.received:
                if not assignment.here(r.source):
                    yield Arrival(key(micro, r.op), assignment.worker_of(r.source), r.meta)
            for p in program.produced:
                if not assignment.here(p.targets[-1]):
                    yield Arrival(key(micro, p.op), assignment.worker_of(p.targets[-1]), EMPTY)


def gradient_sources(program: StageProgram) -> list[tuple[int, int]]:
    """(op, stage) of every gradient that must arrive before a backward."""
    own = [(p.op, p.grad_from) for p in program.produced if p.requires_grad]
    later = [(r.op, r.grad_from) for r in program.received if r.requires_grad and r.grad_from is not None]
    return own + later
