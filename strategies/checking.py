"""Checks of what a peer sent against what a strategy declares: names, shapes, dtypes, bounds, finite.

Every refusal is a BadUpdate that names the field and both figures, so that the round can close
without this client and say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, sqrt
from typing import TYPE_CHECKING, Protocol

import numpy as np

from atoll.errors import BadUpdate, UsageError
from atoll.federated import MOST_COUNTED, parse_uplink
from atoll.job import OptimizerName
from strategies.layout import SHARED, Role, meta_of, parts

if TYPE_CHECKING:
    from atoll.federated import Federated
    from atoll.job import Optimizer
    from atoll.opdag import TensorMeta
    from strategies.layout import Array, Arrays, Layout, SlotMetas, Slots
    from strategies.values import Broadcast, ClientUpdate, Facts, Scalar, ServerState

MAX_METRICS = 64
MAX_NAME = 128
MAX_ELEMENT = 1e18
"""Times the most samples this is still a float32, so no client alone makes a sum overflow."""
RATE = "lr"
"""Name of the local learning rate where a strategy's clients upload it."""
SAME_RATE = 1e-6  # two machines' libraries may round a schedule's cosine apart


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and values that every honest update meets. ``samples``: samples that this client registered and
    the owner lets count, where known."""

    samples: int = MOST_COUNTED
    steps: int = 10**8
    norm: float = float("inf")  # L2 of the whole delta
    rate: float | None = None  # the round's learning rate by the job's schedule; None: not known


NO_LIMITS = Limits()


class Declares(Protocol):
    """A strategy's declarations, against which every message is checked; ``strategies.base.Strategy``."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Facts: ...

    @property
    def core(self) -> Declares: ...

    def extra_down(self, layout: Layout) -> SlotMetas: ...

    def extra_up(self, layout: Layout) -> SlotMetas: ...

    def scalars_up(self) -> tuple[Scalar, ...]: ...

    def check(self, layout: Layout, update: ClientUpdate) -> None: ...


def check_update(
    strategy: Declares, layout: Layout, at_round: int, update: ClientUpdate, limits: Limits = NO_LIMITS
) -> None:
    """Raise BadUpdate unless ``update`` may be counted in round ``at_round``. Both ends run it."""
    if update.round != at_round:
        raise BadUpdate(f"an update of round {update.round}; this is round {at_round}")
    for what, value, most in (
        ("samples", update.n_samples, limits.samples),
        ("steps", update.steps, limits.steps),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise BadUpdate(f"{value!r} {what}; a whole number from 1 to {most}")
    _check_arrays("delta", update.delta, layout.metas_of(*SHARED))
    _check_slots(update.extra, strategy.extra_up(layout))
    _check_scalars(strategy, update.scalars)
    _check_rate(update.scalars, limits.rate)
    if len(update.metrics) > MAX_METRICS or any(len(name) > MAX_NAME for name in update.metrics):
        raise BadUpdate(f"{len(update.metrics)} metrics; at most {MAX_METRICS}, names to {MAX_NAME} letters")
    bad = [name for name, value in update.metrics.items() if not isfinite(value)]
    if bad:
        raise BadUpdate(f"metric {bad[0]!r} is {update.metrics[bad[0]]}")
    strategy.check(layout, update)
    if limits.norm != float("inf"):
        norm = sqrt(sum(float(np.vdot(a, a)) for a in map(_double, update.delta.values())))
        if norm > limits.norm:
            raise BadUpdate(f"an update of norm {norm:.3g}; at most {limits.norm:.3g}")


def check_updates(
    strategy: Declares, state: ServerState, updates: Sequence[ClientUpdate]
) -> list[ClientUpdate]:
    """All of a round, in the order of their clients' names. BadUpdate names the client."""
    ordered = sorted(updates, key=lambda update: update.client)
    for at, update in enumerate(ordered):
        if at and ordered[at - 1].client == update.client:
            raise BadUpdate(f"two updates of client {update.client!r} in round {state.round}")
        try:
            check_update(strategy, state.layout, state.round, update)
        except BadUpdate as error:
            raise BadUpdate(f"client {update.client!r}: {error}") from None
    return ordered


def check_optimizer(strategy: Declares, optimizer: Optimizer) -> None:
    """UsageError where ``strategy`` reads the local optimizer as SGD at one rate and it is not. Owner and
    clients both ask."""
    if not strategy.facts.sgd_only:
        return
    others = [name for name in optimizer.names.values() if name is not OptimizerName.SGD]
    if others:
        raise UsageError(
            f"{strategy.name} reads the local optimizer as SGD, the job declares {others[0]}; take "
            "OptimizerName.SGD or another strategy"
        )
    scaled = [group.patterns for group in optimizer.groups if group.lr_scale != 1.0 and not group.frozen]
    if scaled:
        raise UsageError(
            f"{strategy.name} reads one learning rate for all tensors, the group {scaled[0][:3]} has its "
            "own; drop its lr_scale or take another strategy"
        )


def check_feedback(strategy: Declares, federated: Federated) -> None:
    """UsageError for a strategy that itself restores what sparse updates leave out, beside error feedback."""
    lossy = not parse_uplink(federated.uplink).exact
    if strategy.core.name == "opwa" and lossy and federated.error_feedback:
        raise UsageError(
            "opwa and error feedback both restore what the uplink's codec leaves out, so together it counts "
            "twice; set error_feedback=False, or take fedavg for clients that return"
        )


def check_broadcast(strategy: Declares, layout: Layout, broadcast: Broadcast) -> None:
    """Raise BadUpdate unless ``broadcast`` holds what ``strategy`` sends down."""
    if broadcast.round < 0:
        raise BadUpdate(f"a broadcast of round {broadcast.round}")
    _check_arrays("weights", broadcast.weights, layout.metas_of(*SHARED, Role.TOLD))
    _check_slots(broadcast.extra, strategy.extra_down(layout))


def _check_slots(slots: Slots, expected: SlotMetas) -> None:
    if slots.keys() != expected.keys():
        raise BadUpdate(f"extra arrays {sorted(slots)[:4]}; expected {sorted(expected)}")
    for slot, metas in expected.items():
        _check_arrays(slot, slots[slot], metas)


def _check_arrays(what: str, arrays: Arrays, expected: Mapping[str, TensorMeta]) -> None:
    missing = [name for name in expected if name not in arrays]
    unknown = [name for name in arrays if name not in expected]
    if missing or unknown:
        shown = [f"{name[:MAX_NAME]!r}" for name in (missing or unknown)[:3]]
        word = "lacks" if missing else "has unknown"
        raise BadUpdate(f"{what} {word} {len(missing or unknown)} tensors, such as {', '.join(shown)}")
    for name, meta in expected.items():
        array = arrays[name]
        if meta_of(array) != meta:
            raise BadUpdate(
                f"{what} {name!r} is {array.dtype} {tuple(array.shape)}; expected {meta.dtype} {meta.shape}"
            )
        most = _most(array)
        if any(np.any(~(np.abs(part) <= most)) for part in parts(array)):
            bad = sum(int(np.sum(~np.isfinite(part))) for part in parts(array))
            why = f"{bad} non-finite elements" if bad else f"elements beyond {most:g}"
            raise BadUpdate(f"{what} {name!r} has {why}")


def _check_scalars(strategy: Declares, scalars: Mapping[str, float]) -> None:
    expected = {scalar.name: scalar for scalar in strategy.scalars_up()}
    if scalars.keys() != expected.keys():
        raise BadUpdate(f"numbers {sorted(scalars)[:4]}; expected {sorted(expected)}")
    for name, bound in expected.items():
        value = scalars[name]
        if not isfinite(value) or not bound.low <= value <= bound.high:
            raise BadUpdate(f"{name} = {value:g}; from {bound.low:g} to {bound.high:g}")


def _check_rate(scalars: Mapping[str, float], rate: float | None) -> None:
    if rate is None or RATE not in scalars:
        return
    if not isclose(scalars[RATE], rate, rel_tol=SAME_RATE):
        raise BadUpdate(f"trained at the rate {scalars[RATE]:g}; this round's is {rate:g}")


def _most(array: Array) -> float:
    """The largest element allowed; for halves 255.9, so that a few of them still add up."""
    if not np.issubdtype(array.dtype, np.floating):
        return float("inf")
    return min(MAX_ELEMENT, sqrt(float(np.finfo(array.dtype).max)))


def _double(array: Array) -> Array:
    return np.asarray(array, np.float64).reshape(-1)
