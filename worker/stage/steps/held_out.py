"""Evaluation of a stage: the held-out micro-batches through its pieces, with or without the links' codecs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from worker.transport.frames import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.held_out import Figures
    from atoll.microbatch import Action
    from worker.cancel import Cancel
    from worker.spans import Spans
    from worker.stage.reports import Progress
    from worker.stage.stage import Stage
    from worker.stage.steps.messages import Messages
    from worker.stage.steps.ports import HeldOut


def evaluate(
    stage: Stage,
    messages: Messages,
    held_out: HeldOut,
    spans: Spans,
    progress: Progress,
    step: int,
    cancel: Cancel,
    *,
    coded: bool,
) -> Figures | None:
    """Return means over the held-out rows, None where another stage computes them; ``coded``: through the
    links' codecs."""
    assignment = messages.assignment
    if all(evaluation is None for _, evaluation in assignment.pieces):
        return None
    direction = Direction.EVALUATION_CODED if coded else Direction.EVALUATION
    batches = held_out(cancel)
    held: dict[int, Mapping[str, Tensor]] = {}
    messages.begin()
    last, count = len(assignment.pieces) - 1, assignment.training.eval_batches
    for turn in assignment.plan.held_out_turns(assignment.rank, count):
        if turn.piece == 0:
            with progress.waiting("", "data", step):
                held[turn.micro] = next(batches)
        cancel.check()
        inputs = held.pop(turn.micro) if turn.piece == last else held[turn.micro]
        with spans.timed("eval", step, turn.micro):
            _turn(stage, messages, turn, direction, step, inputs, cancel)
        progress.tick()
    return stage.held_out_figures()


def _turn(
    stage: Stage,
    messages: Messages,
    turn: Action,
    direction: Direction,
    step: int,
    inputs: Mapping[str, Tensor],
    cancel: Cancel,
) -> None:
    """Put one micro-batch of an evaluation through a piece."""
    assignment, micro = messages.assignment, turn.micro
    program = assignment.evaluates(micro, turn.piece)
    if program is None:
        return
    received: dict[int, Tensor] = {}
    for r in program.received:
        key = messages.key_to(program.stage, direction, step, micro, r.op)
        received[r.op] = messages.receive_value_from(r.source, key, cancel)
    tail = program is not assignment.pieces[turn.piece].evaluation
    own = {name: inputs[name] for name in program.inputs}
    with messages.blaming_sources(program):
        produced = stage.evaluate_micro(micro, own, received, tail=tail, piece=turn.piece)
    for r in program.received:
        if r.grad_from is None and not assignment.here(r.source):  # the last to receive it acknowledges
            messages.send(r.source, messages.key_to(r.source, direction, step, micro, r.op), None)
    # A fast stage may be at most a step's micro-batches ahead of the slowest.
    behind = micro - assignment.training.n_micro
    for p in program.produced:
        if behind >= 0 and not assignment.here(p.targets[-1]):
            key = messages.key_to(program.stage, direction, step, behind, p.op)
            messages.receive_from(p.targets[-1], key, cancel)
        for target in p.targets:
            messages.send(target, messages.key_to(target, direction, step, micro, p.op), produced[p.op])
