"""Action lists: in what order a stage runs the forwards and backwards of a step's micro-batches.

Forwards and backwards each go through the micro-batches in ascending order in every schedule,
so gradients accumulate in one order and the schedule never changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from atoll.errors import UsageError


class Work(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """Run the forward or backward of one micro-batch."""

    work: Work
    micro: int


class ScheduleName(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


def gpipe(n_micro: int) -> tuple[Action, ...]:
    """All forwards, then all backwards."""
    return one_f_one_b(n_micro, n_micro)


def one_f_one_b(n_micro: int, warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the rest backward.

    At most ``warmup`` + 1 micro-batches hold activations; 0 <= warmup, larger values act as
    n_micro. n_micro >= 1, else UsageError.
    """
    if n_micro < 1:
        raise UsageError(f"micro-batches: {n_micro} < 1; ask for at least 1")
    warmup = min(max(warmup, 0), n_micro)
    actions = [Action(Work.FORWARD, m) for m in range(warmup)]
    for m in range(warmup, n_micro):
        actions.append(Action(Work.FORWARD, m))
        actions.append(Action(Work.BACKWARD, m - warmup))
    actions.extend(Action(Work.BACKWARD, m) for m in range(n_micro - warmup, n_micro))
    return tuple(actions)


def delay_aware_warmup(
    stage: int, n_stages: int, n_micro: int, hop_s: float, forward_s: float, backward_s: float
) -> int:
    """w_s = min(N-1, m (D-s-1)), m = 1 + ceil(2c/(F+B)): warm-up depth from the delay.

    ``hop_s`` is one boundary's delay plus transfer; equals GPipe's speed with less memory.
    Source: papers/decentralized.md 0.3 (derived there by simulation).
    """
    per_stage = 1 + ceil(2 * hop_s / max(forward_s + backward_s, 1e-9))
    return min(n_micro - 1, per_stage * (n_stages - stage - 1))
