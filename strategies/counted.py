"""Count of the numbers about the data that a federated job returns beside the update of its trained tensors.

Each number in a buffer that travels, or in a strategy's own statistics, is an exact sum or mean over samples.
As many of them as the samples have values give these back bit for bit, though every one alone says nothing
of a single sample (power sums, by Newton's identities; means of rows that a condition on values parts).
No type of a value shows that, so they are counted: a round may return half as many as one sample has values.
So no sample fits into them. All rounds may return half as many as all samples have (docs/decisions/060).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from strategies.layout import SHARED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from atoll.federated import Floors
    from atoll.opdag import TensorMeta
    from strategies.base import Strategy
    from strategies.layout import Layout

SHARE = 2  # values of a sample, and of all samples over all rounds, behind each number
ALWAYS_MEASURED = 2  # the loss and one metric, however few values a sample has


def values_of(inputs: Mapping[str, TensorMeta]) -> int:
    """Return how many values one sample has; ``inputs``: samples along their first dim."""
    return sum(prod(meta.shape[1:]) for meta in inputs.values())


def counted_names(layout: Layout, buffers: Collection[str]) -> tuple[str, ...]:
    """Return the buffers whose values leave; ``layout`` as the strategy and ``local`` patterns left it."""
    return tuple(name for name in layout.names(*SHARED) if name in buffers)


def returned_numbers(layout: Layout, buffers: Collection[str], rule: Strategy) -> int:
    """Return how many numbers about the data leave in each round's update beside its trained tensors."""
    travel = [layout.metas[name] for name in counted_names(layout, buffers)]
    slots = rule.extra_up(layout).values()
    own = [meta for slot in slots for name, meta in slot.items() if name in rule.statistics]
    return sum(meta.elements for meta in (*travel, *own))


def few_numbers(values: int, samples: int | None, rounds: int) -> int:
    """Return how many numbers a round are few: of samples of so many ``values``, of which a client trains on
    ``samples`` (None: that is not known yet)."""
    a_round = values // SHARE
    return a_round if samples is None else min(a_round, samples * values // (SHARE * max(1, rounds)))


def check_numbers(count: int, floors: Floors, values: int, samples: int | None, rounds: int) -> None:
    """Raise UsageError for more numbers a round than are few, or than the data's owner allows."""
    few = few_numbers(values, samples, rounds)
    if floors.counted and count > max(few, floors.statistics):
        raise UsageError(too_many(count, few, values, samples, rounds))


def too_many(count: int, few: int, values: int, samples: int | None, rounds: int) -> str:
    """Return what is wrong with ``count`` numbers a round, and what each side can do."""
    all_rounds = "" if samples is None else f", and of {samples:,} samples over {rounds:,} rounds"
    return (
        f"each round would return {count:,} exact sums or means over samples beside the update (running "
        f"statistics, other buffers, statistics of classes), and so many can give samples back: {few:,} are "
        f"allowed, half the values of a sample ({values:,}){all_rounds}. Keep such buffers with the clients, "
        'Federated(local=("*running_mean", "*running_var")) or strategy fedbn; or the data owner allows, '
        f"`atoll-worker data policy NAME --allow-statistics {count}`, or hides them, --clip and --noise"
    )


def check_measured(metrics: int, floors: Floors, values: int) -> None:
    """Raise UsageError for an evaluation that returns too many means: of the loss and ``metrics``."""
    count, few = 1 + metrics, max(ALWAYS_MEASURED, values // SHARE)
    if floors.counted and count > max(few, floors.statistics):
        raise UsageError(
            f"each evaluation would return {count} means over the held-out samples (the loss and {metrics} "
            f"metrics), and so many can give samples back: {few} are allowed, half the values of a sample "
            f"({values}). Drop metrics; or the data owner allows them, `atoll-worker data policy NAME "
            f"--allow-statistics {count}`"
        )
