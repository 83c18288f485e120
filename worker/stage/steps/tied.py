"""Tied parameters of a pipeline: partial sums go down to the first holder, the total goes to all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.transport.frames import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from worker.cancel import Cancel
    from worker.stage.stage import Stage
    from worker.stage.steps.messages import Messages


def fold_tied(stage: Stage, messages: Messages, step: int, cancel: Cancel) -> None:
    """Partial sums from the last holder down to the first."""
    # The last pieces first: what they hand on within the stage is here when the others ask for it.
    for piece, (program, _) in reversed(list(enumerate(messages.assignment.pieces))):
        for tied in program.tied:
            at = tied.holders.index(program.stage)
            for block in stage.blocks:
                later: Tensor | None = None
                if at + 1 < len(tied.holders):
                    key = messages.key_to(program.stage, Direction.TIED_PARTIAL, step, block, tied.index)
                    later = messages.receive_from(tied.holders[at + 1], key, cancel)
                sums = stage.tied_partial(tied.name, block, later, piece)
                if at:
                    target = tied.holders[at - 1]
                    key = messages.key_to(target, Direction.TIED_PARTIAL, step, block, tied.index)
                    messages.send(target, key, sums)


def share_tied(stage: Stage, messages: Messages, step: int, cancel: Cancel) -> None:
    """Send the total from the first holder to every other; where there are replicas, theirs."""
    pieces = messages.assignment.pieces
    tied = {tied.name: tied for program, _ in pieces for tied in program.tied}.values()
    for each in tied:
        targets = messages.assignment.total_to(each)
        if messages.assignment.here(each.holders[0]) and targets:
            total = stage.total(each.name)
            stage.set_total(each.name, total)
            for target in targets:
                key = messages.key_to(target, Direction.TIED_TOTAL, step, 0, each.index)
                messages.send(target, key, total)
    # Totals last: waiting for one must not hold back another parameter's partial sum.
    for each in tied:
        if not messages.assignment.here(each.holders[0]):
            first = next(filter(messages.assignment.here, each.holders))
            key = messages.key_to(first, Direction.TIED_TOTAL, step, 0, each.index)
            stage.set_total(each.name, messages.receive_from(each.holders[0], key, cancel))
