"""Sums in whole numbers as the words that are masked, and back.

    word = v mod 2^m,   |v_1 + ... + v_n| <= 2^(m - 2) + n < 2^(m - 1)

``v`` are ``strategies.fixed``'s sums on a grid of ``bits``, m = 32 up to 24 bits and 64 with more. An element
of an update is at most 2^(m - 2 - bits), which bounds any sum over clients that weigh all of the grid's
weight; what is larger is refused by the client itself, as nobody else ever sees it. Of a tensor whose support
is drawn for all members alike (``random_k`` under one seed) the words of that support travel. Scalars follow
in words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ldexp
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import BadUpdate, UsageError
from strategies.fixed import FULL_BITS, LIMIT, FixedSums, Grid
from strategies.layout import pieces
from strategies.linear import Linear

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.secure import Secure
    from strategies.base import Strategy
    from strategies.layout import Array, Layout, SlotMetas
    from strategies.secure.masks import Words

NARROW_BITS = 24
"""Up to so many bits a word of 32 has room for a mean change of 64."""


@dataclass(frozen=True)
class Encoding:
    """Words of a round's sums: ``grid``, the arrays of each term, and by term and name the positions that
    travel, where not all do."""

    grid: Grid
    metas: SlotMetas
    supports: Mapping[tuple[str, str], NDArray[Any]] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"u{word_bytes(self.grid.bits)}")

    @property
    def room(self) -> float:
        """The largest element of a mean."""
        return ldexp(1.0, 8 * self.dtype.itemsize - 2 - self.grid.bits)

    def sizes(self) -> tuple[int, int]:
        """How many words of the arrays there are, and of the scalars."""
        return sum(self._size(term, name) for term, name in self._arrays()), len(self.grid.scalars)

    def words(self, sums: FixedSums) -> list[NDArray[Any]]:
        """The words of one member's sums. BadUpdate for an element that has no room."""
        count, _ = self.sizes()
        body, at = np.empty(count, self.dtype), 0
        for term, name in self._arrays():
            size, support = self._size(term, name), self.supports.get((term, name))
            flat = sums.arrays[term][name].reshape(-1)
            # A load is a weight in units of 2^(c - 60).
            most = int(ldexp(float(sums.loads[term]), 8 * self.dtype.itemsize - 2 - FULL_BITS)) + sums.clients
            self._check(term, name, flat, most)
            body[at : at + size] = (flat if support is None else flat[support]).astype(self.dtype)
            at += size
        return [body, np.array([sums.scalars[name] for name in sorted(self.grid.scalars)], np.uint64)]

    def sums(self, words: Words, clients: int) -> FixedSums:
        """The inverse of the members' words, added up and without masks. BadUpdate for what no such words
        could add up to."""
        body, tail = words
        arrays: dict[str, dict[str, Array]] = {term: {} for term in self.metas}
        signed = np.dtype(f"i{self.dtype.itemsize}")
        most, at = 2 ** (8 * self.dtype.itemsize - 2) + clients, 0
        for term, name in self._arrays():
            size, support = self._size(term, name), self.supports.get((term, name))
            values = body[at : at + size].view(signed).astype(np.int64)
            self._check(term, name, values, most)
            meta = self.metas[term][name]
            if support is not None:
                dense = np.zeros(meta.elements, np.int64)
                dense[support] = values
                values = dense
            arrays[term][name] = values.reshape(meta.shape)
            at += size
        scalars = dict(zip(sorted(self.grid.scalars), map(int, tail), strict=True))
        if any(value > LIMIT for value in scalars.values()):
            raise BadUpdate("scalars that no members' sums add up to: a mask is left on them")
        return FixedSums(self.grid, arrays, dict.fromkeys(self.metas, 0), scalars, clients)

    def _check(self, term: str, name: str, flat: Array, most: int) -> None:
        if any(p.max() > most or p.min() < -most for p in (flat[part] for part in pieces(len(flat)))):
            raise BadUpdate(
                f"{term} {name!r} has elements beyond {self.room:g}, the room of masked words at "
                f"{self.grid.bits} bits; lower the learning rate, or give Secure(bits=32)"
            )

    def _arrays(self) -> Iterator[tuple[str, str]]:
        return ((term, name) for term in sorted(self.metas) for name in sorted(self.metas[term]))

    def _size(self, term: str, name: str) -> int:
        support = self.supports.get((term, name))
        return self.metas[term][name].elements if support is None else len(support)


def secured(strategy: Strategy) -> Linear:
    """Return the strategy that sums, of a job with secure aggregation. UsageError for one whose server needs
    more than sums in whole numbers."""
    core = strategy.core
    if not isinstance(core, Linear) or not (core.facts.linear and core.facts.secure and core.facts.bounded):
        raise UsageError(
            f"{strategy.name} looks at single updates, or at numbers without a bound beside them, and secure "
            "aggregation shows sums alone; take fedavg, fedavgm, fedadam, fedprox or another that sums"
        )
    return core


def encoding_of(
    core: Linear,
    layout: Layout,
    secure: Secure,
    clients: int,
    samples: int,
    supports: Mapping[tuple[str, str], NDArray[Any]],
) -> Encoding:
    """Return the words of a round over ``clients`` who have registered ``samples``: alike at all members."""
    grid = core.round_grid(clients, samples)
    if not core.whole:  # else its units are the strategy's own
        grid = with_bits(grid, secure.bits)
    return Encoding(grid, core.term_metas(layout), supports)


def word_bytes(bits: int) -> int:
    """Bytes of an element at a resolution of so many ``bits``."""
    return 4 if bits <= NARROW_BITS else 8


def with_bits(grid: Grid, bits: int) -> Grid:
    """Return the same bounds at another resolution."""
    return replace(grid, bits=bits)
