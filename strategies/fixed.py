"""Weighted sums in whole numbers: the same bits however a round's contributions are grouped over hosts.

    v = rint(w x / unit),   unit = 2^(c - bits),   c = ceil(log2 W)

W is the most that all contributions of a round may weigh together. It follows from public numbers (how many
clients were drawn, what they have registered), so every host knows the unit before anybody trains, and it
tells nothing of the data. A sum of m contributions differs from the exact one by at most
m unit / 2 + 2^-53 sum |w x|, and their mean by at most m 2^-bits where they weigh all of W.

No sum ever wraps. A contribution of weight w counts as a load of ceil(w 2^(60 - c)). An element up to
2^(60 - bits) cannot exceed its load, loads add up as whole numbers do, and what would lift one beyond
2^61 - 1 is refused before any of it is added. The bound is therefore no matter of grouping either, and a
sum read from a wire is believed no further than its load. Secure aggregation and discrete noise can work on
the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, frexp, isfinite, ldexp
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import BadUpdate, UsageError
from strategies.layout import parts, pieces
from strategies.sums import Contribution, Sums

if TYPE_CHECKING:
    from strategies.layout import Array, Arrays, Layout, Slots

BITS = 34
"""Resolution of a mean. With 100 clients its elements are off by 3e-10 (root mean square), about as much as
float32 sums of changes of 0.01 are; an element of a sum takes 32 bits where the mean change is below 1/8."""
FULL_BITS = 60  # of the load of a whole round
LIMIT = 2**61 - 1
"""Largest load. Two of them still fit an int64, and so does one shifted left by a bit, as it travels."""


@dataclass(frozen=True)
class Grid:
    """Bounds of a round's sums, alike at all hosts. UsageError for a figure out of its range."""

    weights: Mapping[str, float]  # by term: the most that all contributions weigh together
    scalars: Mapping[str, float]  # by name: the most that they add up to
    bits: int = BITS

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 8 <= self.bits <= 48:
            raise UsageError(f"sums of {self.bits!r} bits; give a whole number from 8 to 48")
        for name, most in (*self.weights.items(), *self.scalars.items()):
            if not isfinite(most) or not 2.0**-300 <= most <= 2.0**300:
                raise UsageError(f"{name} adds up to {most!r} in a round; give a number above 0")

    @property
    def reach(self) -> float:
        """The largest element that may be added."""
        return ldexp(1.0, FULL_BITS - self.bits)

    def unit(self, term: str) -> float:
        """Value of 1 in a term's sums."""
        return ldexp(1.0, _exponent(self.weights[term]) - self.bits)

    def load(self, term: str, weight: float) -> int:
        """Return the bound of every element that contributes with ``weight`` to a term."""
        return ceil(ldexp(weight, FULL_BITS - _exponent(self.weights[term])))

    def scalar_unit(self, name: str) -> float:
        """Value of 1 in a scalar's sum."""
        return ldexp(1.0, _exponent(self.scalars[name]) - FULL_BITS)


@dataclass(frozen=True)
class FixedSums:
    """Sums over ``clients`` contributions in units of ``grid``. Arrays in int64, by term and name."""

    grid: Grid
    arrays: Slots
    loads: Mapping[str, int]
    scalars: Mapping[str, int]
    clients: int


class Accumulator:
    """Sums in the making: contributions and sums of contributions, in any order and grouping."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._arrays: dict[str, dict[str, Array]] = {}
        self._loads = dict.fromkeys(grid.weights, 0)
        self._scalars = dict.fromkeys(grid.scalars, 0)
        self._clients = 0

    def add(self, part: Contribution | FixedSums) -> None:
        """Add one; sums from a wire only after ``check_sums``. BadUpdate for what is out of bounds, of which
        nothing is added then; ValueError for other terms than the grid's."""
        grid = self.grid
        terms: dict[str, tuple[Arrays, float | None]]
        if isinstance(part, FixedSums):
            if part.grid != grid:
                raise BadUpdate("a sum on another grid; hosts and coordinator disagree on who was drawn")
            loads, scalars, clients = part.loads, part.scalars, part.clients
            terms = {term: (arrays, None) for term, arrays in part.arrays.items()}
        else:
            _same_names(part.terms, grid.weights)
            _same_names(part.scalars, grid.scalars)
            loads, scalars, clients = *_checked(part, grid), 1
            terms = {term: (held.arrays, held.weight / grid.unit(term)) for term, held in part.terms.items()}
        after = {term: load + loads[term] for term, load in self._loads.items()}
        summed = {name: held + scalars[name] for name, held in self._scalars.items()}
        for name, load in (*after.items(), *summed.items()):
            if load > LIMIT:
                raise BadUpdate(f"{name} would add up to {load / LIMIT:.3g} of what a sum may hold")
        for term, (arrays, _) in terms.items():
            _same_names(arrays, self._arrays.get(term, arrays))
        for term, (arrays, scale) in terms.items():
            held = self._arrays.setdefault(term, {n: np.zeros(a.shape, np.int64) for n, a in arrays.items()})
            for name, array in arrays.items():
                _add(held[name], array, scale)
        self._loads, self._scalars, self._clients = after, summed, self._clients + clients

    def sums(self) -> FixedSums:
        """What was added so far; shares memory with what is added later."""
        return FixedSums(self.grid, self._arrays, self._loads, self._scalars, self._clients)


def check_sums(sums: FixedSums, share: Grid) -> None:
    """Raise BadUpdate unless every element of received sums stays within its load, and loads and scalars
    within what their clients may claim: ``share``, the grid of those clients alone."""
    grid, n = sums.grid, sums.clients  # each of the n may have been rounded up
    loads = {term: grid.load(term, most) + n for term, most in share.weights.items()}
    scalars = {name: int(most / grid.scalar_unit(name)) + n for name, most in share.scalars.items()}
    for given, most in ((sums.loads, loads), (sums.scalars, scalars)):
        if given.keys() != most.keys():
            raise BadUpdate(f"sums of {sorted(given)[:4]}; expected {sorted(most)}")
        for name, value in given.items():
            if type(value) is not int or not 0 <= value <= most[name]:
                raise BadUpdate(f"{name} of {n} clients is {value!r}; from 0 to {most[name]}")
    for term, arrays in sums.arrays.items():
        for name, array in arrays.items():
            if any(part.max() > sums.loads[term] or part.min() < -sums.loads[term] for part in parts(array)):
                raise BadUpdate(f"{term} {name!r} holds more than its load of {sums.loads[term]}")


def real(sums: FixedSums, layout: Layout) -> Sums:
    """The sums as a strategy finishes them: arrays in their tensors' dtype, float32 at least."""
    grid = sums.grid
    arrays = {
        term: {
            name: _floats(array, grid.unit(term), layout.metas[name].dtype) for name, array in held.items()
        }
        for term, held in sums.arrays.items()
    }
    scalars = {name: value * grid.scalar_unit(name) for name, value in sums.scalars.items()}
    return Sums(arrays, scalars, sums.clients)


def _checked(part: Contribution, grid: Grid) -> tuple[dict[str, int], dict[str, int]]:
    """A contribution's loads, and its scalars in their units. BadUpdate for what the grid does not hold."""
    loads, scalars = {}, {}
    for name, term in part.terms.items():
        most = grid.weights[name]
        if not 0.0 < term.weight <= most:
            raise BadUpdate(f"a weight of {term.weight:g} in {name}; above 0, at most {most:g}")
        for tensor, array in term.arrays.items():
            # A NaN is both maximum and minimum, and fails every comparison.
            if not all(-grid.reach <= float(p.min()) and float(p.max()) <= grid.reach for p in parts(array)):
                raise BadUpdate(
                    f"{name} {tensor!r} has elements that are not finite or beyond {grid.reach:g}, the reach "
                    f"of sums of {grid.bits} bits"
                )
        loads[name] = grid.load(name, term.weight)
    for name, value in part.scalars.items():
        if not 0.0 <= value <= grid.scalars[name]:
            raise BadUpdate(f"{name} = {value:g}; from 0 to {grid.scalars[name]:g}")
        scalars[name] = round(value / grid.scalar_unit(name))
    return loads, scalars


def _add(total: Array, array: Array, scale: float | None) -> None:
    """Add ``array`` times ``scale``, rounded to even; None: whole numbers, as they are."""
    into, source = total.reshape(-1), np.ascontiguousarray(array).reshape(-1)
    for here in pieces(source.size):
        if scale is None:
            into[here] += source[here]
            continue
        # In doubles, by one product: a unit is a power of two, so w x is rounded once.
        exact = np.multiply(source[here], scale, dtype=np.float64)
        into[here] += np.rint(exact, out=exact).astype(np.int64)


def _floats(array: Array, unit: float, dtype: str) -> Array:
    found: Array = np.empty(array.shape, np.result_type(dtype, np.float32))
    into, source = found.reshape(-1), array.reshape(-1)
    for here in pieces(source.size):
        into[here] = np.multiply(source[here], unit, dtype=np.float64)
    return found


def _exponent(value: float) -> int:
    """Return the least e with 2^e >= ``value`` > 0."""
    fraction, exponent = frexp(value)
    return exponent - 1 if fraction == 0.5 else exponent


def _same_names(given: Mapping[str, Any] | Arrays, expected: Mapping[str, Any]) -> None:
    if given.keys() != expected.keys():
        raise ValueError(f"sums of {sorted(given)[:4]}; expected {sorted(expected)[:4]}")
