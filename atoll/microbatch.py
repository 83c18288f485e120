"""Action lists: in what order a stage runs the forwards and backwards of a step's micro-batches.

Forwards, backwards and weight gradients each go through the micro-batches in ascending order in every
schedule, so gradients accumulate in one order and the schedule never changes a result.

A backward has two parts (Qi 2024, "Zero Bubble Pipeline Parallelism", section 2). These are the gradients of
what a stage received, for which the stage before it waits, and those of its own weights, for which nobody
waits until the step's end. Where the second part comes later, it fills the time in which a stage would wait.
With equal stages and a free network that takes the bubble of 1F1B from (S - 1)(F + B + W) to (S - 1) F.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Work(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # both parts
    INPUT = "I"  # the part that others wait for
    WEIGHT = "W"  # the rest, at the latest; sooner where the stage waits for something


_BACKWARDS = (Work.BACKWARD, Work.INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """Work of a micro-batch on a piece of a stage."""

    work: Work
    micro: int
    piece: int = 0  # number among the pieces of the stage


class Depth(NamedTuple):
    """Number of micro-batches that a piece has in flight beyond one after the other."""

    warmup: int  # forwards before the first backward
    held: int = 0  # most micro-batches that hold activations, where backwards come in two parts

    @property
    def in_flight(self) -> int:
        """Most micro-batches that hold activations, if there are as many."""
        return max(self.warmup + 1, self.held)

    @property
    def whole(self) -> int | None:
        """Most of them before the end of their backward; None where weight gradients do not wait."""
        return self.warmup + 1 if self.held else None


class ScheduleName(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    ZERO_BUBBLE = "zero-bubble"  # 1F1B, weight gradients when nothing else is to be done


def block_ranges(n_micro: int, blocks: int) -> tuple[range, ...]:
    """Return each block's micro-batches: contiguous and ascending, sizes that differ by one at most.

    UsageError unless 1 <= ``blocks`` <= ``n_micro``.
    """
    if not 1 <= blocks <= n_micro:
        raise UsageError(f"{blocks} blocks of {n_micro} micro-batches; give from 1 to {n_micro}")
    return tuple(range(b * n_micro // blocks, (b + 1) * n_micro // blocks) for b in range(blocks))


def own_blocks(n_micro: int, blocks: int, micros: tuple[int, int]) -> dict[int, range]:
    """Return the blocks within a half-open range of micro-batches by their number, ascending.

    UsageError unless the range holds micro-batches and begins and ends on borders of blocks.
    """
    start, stop = micros
    own = {
        number: block
        for number, block in enumerate(block_ranges(n_micro, blocks))
        if start <= block.start and block.stop <= stop
    }
    if not own or sum(map(len, own.values())) != stop - start:
        raise UsageError(f"micro-batches [{start}, {stop}) are no whole blocks of {n_micro} in {blocks}")
    return own


def gpipe(n_micro: int, first: int = 0) -> tuple[Action, ...]:
    """All forwards, then all backwards."""
    return one_f_one_b(n_micro, n_micro, first=first)


def one_f_one_b(n_micro: int, warmup: int, held: int = 0, *, first: int = 0) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the rest backward.

    With ``held`` backwards come in two parts, weight gradients as late as possible, while at most
    ``held`` micro-batches (but ``warmup`` + 1 at least) hold activations; without it ``warmup`` + 1 do.
    Both are at least 0, larger values act as n_micro. Micro-batches are numbered from ``first``.
    n_micro >= 1, else UsageError.
    """
    if n_micro < 1:
        raise UsageError(f"micro-batches: {n_micro} < 1; ask for at least 1")
    warmup = min(max(warmup, 0), n_micro)
    actions: list[Action] = []
    owed = first  # the first micro-batch whose weight gradients are to come
    for m in range(first, first + n_micro + warmup):
        if m < first + n_micro:
            if held and m - owed >= max(held, warmup + 1):
                actions.append(Action(Work.WEIGHT, owed))
                owed += 1
            actions.append(Action(Work.FORWARD, m))
        if m >= first + warmup:
            actions.append(Action(Work.INPUT if held else Work.BACKWARD, m - warmup))
    if held:
        actions.extend(Action(Work.WEIGHT, m) for m in range(owed, first + n_micro))
    return tuple(actions)


def in_turn(depths: Sequence[Depth], n_micro: int, first: int = 0) -> tuple[Action, ...]:
    """Actions of a stage that has a piece for each of ``depths``: each piece's own 1F1B, one order for all.

    Depths never rise from a piece to the next. The forwards that a piece runs before its first backward come
    first, those of earlier pieces before others': where links are slow, micro-batches are under way soonest.
    After them, with a warm-up of w, the forward of micro-batch m comes at the time 2 m - w, its backward at
    2 m + w; the last piece of a pipeline does one of each in a time of 2. Backwards of a piece that has no
    forward after them come last, those of later pieces first.

    What an action waits for comes at an earlier time, or at the same one and sooner in an order that all
    stages have: forwards, first pieces first, then backwards, last pieces first. So stages never wait in a
    circle.
    """
    return merged([one_f_one_b(n_micro, *depth, first=first) for depth in depths])


def merged(of_pieces: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """Return the actions of a stage's pieces in one order (``in_turn``), each with the number of its piece;
    ``of_pieces``: lists of ``one_f_one_b`` on the same micro-batches."""
    if len(of_pieces) == 1:
        return tuple(of_pieces[0])
    pieces = (_timed(actions, at) for at, actions in enumerate(of_pieces))
    return tuple(action for _, action in merge(*pieces, key=lambda timed: timed[0]))


def _timed(actions: Sequence[Action], piece: int) -> Iterator[tuple[tuple[float, bool, int], Action]]:
    """Actions of a piece with what orders them; weight gradients come with the action after them."""
    first = next((at for at, action in enumerate(actions) if action.work in _BACKWARDS), len(actions))
    warmup = sum(action.work is Work.FORWARD for action in actions[:first]) - 1
    last = all(action.work is not Work.FORWARD for action in actions[first:])
    waiting: list[Action] = []
    for at, action in enumerate(actions):
        action = replace(action, piece=piece)
        if action.work is Work.WEIGHT:
            waiting.append(action)
            continue
        ahead = action.work is Work.FORWARD
        when = 2.0 * action.micro + (-warmup if ahead else warmup)
        if at < first:
            when = -inf
        elif last:
            when = inf
        key = (when, not ahead, piece if ahead else -piece)
        for one in (*waiting, action):
            yield key, one
        waiting.clear()
    for one in waiting:
        yield (inf, True, 0), one


def delay_aware_warmup(
    stage: int, n_stages: int, n_micro: int, hop_s: float, forward_s: float, backward_s: float
) -> int:
    """w_s = min(N-1, m (D-s-1)), m = 1 + ceil(2c/(F+B)): warm-up depth from the delay.

    ``hop_s`` is one boundary's delay plus transfer; equals GPipe's speed with less memory.
    Source: papers/decentralized.md 0.3 (derived there by simulation).
    """
    per_stage = 1 + ceil(2 * hop_s / max(forward_s + backward_s, 1e-9))
    return min(n_micro - 1, per_stage * (n_stages - stage - 1))
