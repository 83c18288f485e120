"""Weighted sums of updates that add up in any grouping: what makes a strategy linear.

A client's Contribution is (weight, arrays) per term and a few numbers; a device that trains several
clients, or a relay, adds theirs into one Sums and sends that alone; sums of sums are the same sum.
Nothing is normalised before the end. Source: the two-level aggregation of FedML Parrot
(papers/federated.md 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.layout import pieces

if TYPE_CHECKING:
    from strategies.layout import Arrays, Slots


@dataclass(frozen=True)
class Term:
    """``weight`` times ``arrays``."""

    weight: float
    arrays: Arrays


@dataclass(frozen=True)
class Contribution:
    """Contribution of a client."""

    terms: Mapping[str, Term]
    scalars: Mapping[str, float]


@dataclass(frozen=True)
class Sums:
    """Sums over ``clients`` contributions, not normalised. Arrays in float32 at least."""

    arrays: Slots = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    clients: int = 0


def total(parts: Iterable[Contribution | Sums]) -> Sums:
    """Their sum. Takes one at a time, so a generator may load or decode them as they are needed.

    The order decides the last bits of a float32 sum: give one order (``check_updates`` does) where
    equal bits matter.
    """
    arrays: dict[str, dict[str, Any]] = {}
    scalars: dict[str, float] = {}
    clients = 0
    for part in parts:
        if isinstance(part, Sums):
            terms: Mapping[str, Term] = {slot: Term(1.0, held) for slot, held in part.arrays.items()}
            clients += part.clients
        else:
            terms = part.terms
            clients += 1
        for slot, term in terms.items():
            _add(arrays.setdefault(slot, {}), term)
        for name, value in part.scalars.items():
            scalars[name] = scalars.get(name, 0.0) + value
    return Sums(arrays, scalars, clients)


def _add(sums: dict[str, Any], term: Term) -> None:
    for name, array in term.arrays.items():
        kind = np.result_type(array.dtype, np.float32)  # halves would lose the small clients
        if name not in sums:
            sums[name] = np.multiply(array, term.weight, out=np.empty(array.shape, kind), dtype=kind)
            continue
        total, part = sums[name].reshape(-1), array.reshape(-1)
        for here in pieces(part.size):
            total[here] += np.multiply(part[here], term.weight, dtype=kind)


def divided(arrays: Arrays, by: float) -> dict[str, Any]:
    """Every array over ``by``."""
    return {name: array / by for name, array in arrays.items()}
