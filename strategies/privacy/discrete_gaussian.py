"""Exact samples of the discrete Gaussian, a million at a time.

    P(y) ~ exp(-y^2 / (2 sigma^2)),   y and sigma whole numbers

Source: Canonne, Kamath, Steinke 2020 (arXiv 2004.00010), Alg. 1 to 3: a discrete Laplace number is accepted
with probability exp(-(|y| - sigma^2/t)^2 / (2 sigma^2)). The proposal's scale t is the power of two from
sigma on, so that its uniform part takes whole bits. Every coin of probability exp(-g) compares a uniform
number U with exp(-g). Doubles decide where they surely do: the first 53 bits of U and exp(-g) lie further
apart than both errors together. The others, fewer than one in 10^12, are decided in decimals with more bits
of U. So no rounding bends the distribution, and no floating-point number is released: the attack of Mironov
2012 has nothing to read."""

from __future__ import annotations

import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.layout import PIECE_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Source = Callable[[int], bytes]
    Exponent = Callable[[int], Fraction]

MAX_SIGMA = 2**44
BITS = 53  # of U in doubles
DOUBT = 2.0**-43
"""How far apart U and exp(-g) in doubles must be. g is off by less than 2^-49 (a + 2) a, of a coin that is
true with exp(-a^2/2), and numpy's exp by 4 ulp: together below 2^-46."""
FURTHER_BITS = 128


def discrete_gaussian(
    sigma: int, size: int, source: Source = os.urandom, doubt: float = DOUBT
) -> NDArray[np.int64]:
    """Return ``size`` independent samples, int64 [size]. ``sigma``: a whole number from 1 to 2^44, else
    ValueError.

    ``source``: as ``os.urandom``; ``doubt``: a test raises it, so that every coin is decided in decimals.
    """
    if type(sigma) is not int or not 1 <= sigma <= MAX_SIGMA:
        raise ValueError(f"sigma = {sigma!r}; a whole number from 1 to {MAX_SIGMA}")
    found = np.empty(size, np.int64)
    coins, at = _Coins(source, doubt), 0
    while at < size:
        wanted = min(size - at, PIECE_ELEMENTS)
        made = _tried(sigma, wanted + wanted // 2 + 16, coins)[:wanted]
        found[at : at + len(made)] = made
        at += len(made)
    return found


class _Coins:
    """Coins of known probability, and whole random bits."""

    def __init__(self, source: Source, doubt: float) -> None:
        self._source, self._doubt = source, doubt

    def words(self, count: int) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = np.frombuffer(self._source(8 * count), np.uint64)
        return found

    def tossed(self, exponents: NDArray[np.float64], exact: Exponent) -> NDArray[np.bool_]:
        """Return a coin that is true with probability exp(-g) for each g; ``exact(at)`` is g as a
        fraction."""
        low = (self.words(len(exponents)) >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS
        chance = np.exp(-exponents)
        true = low + 2.0**-BITS <= chance - self._doubt
        unsure = ~true & (low < chance + self._doubt)
        for at in np.flatnonzero(unsure).tolist():
            true[at] = self._decided(int(low[at] * 2.0**BITS), exact(at))
        return true

    def _decided(self, low: int, exponent: Fraction) -> bool:
        """Compare U, whose first bits are ``low``, with exp(-exponent)."""
        if not exponent:
            return True
        bits = BITS
        while True:
            low = (low << FURTHER_BITS) | int.from_bytes(self._source(FURTHER_BITS // 8), "big")
            bits += FURTHER_BITS
            with localcontext() as context:
                context.prec = bits // 3 + 30
                context.Emin = -(10**8)
                chance = (-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
                most = Decimal(2) ** bits
                error = most * Decimal(10) ** (-(bits // 3) - 20)
                if Decimal(low + 1) + error <= chance * most:
                    return True
                if Decimal(low) - error >= chance * most:
                    return False


def _tried(sigma: int, count: int, coins: _Coins) -> NDArray[np.int64]:
    """The samples that come of ``count`` tries: more than half of them."""
    shift = (sigma - 1).bit_length()  # t = 2^shift, the least power of two that is not below sigma
    scale = 1 << shift
    magnitude, words = _laplace(shift, count, coins)
    # The two zeros of a signed number are one.
    fit = (magnitude > 0) | (words & np.uint64(1) == 0)
    magnitude, negative = magnitude[fit], (words[fit] & np.uint64(1)).astype(bool)
    square = Fraction(sigma * sigma, scale)

    def exponent(at: int) -> Fraction:
        return (int(magnitude[at]) - square) ** 2 / (2 * sigma * sigma)

    off = (magnitude.astype(np.float64) - float(sigma) * (float(sigma) / scale)) / float(sigma)
    taken = coins.tossed(off * off / 2.0, exponent)
    found: NDArray[np.int64] = np.where(negative, -magnitude, magnitude)[taken]
    return found


def _laplace(shift: int, count: int, coins: _Coins) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Numbers x >= 0 with P(x) ~ exp(-x / 2^shift), and a random word beside each."""
    words = coins.words(count)
    uniform = (words >> np.uint64(64 - shift)).astype(np.int64) if shift else np.zeros(count, np.int64)

    def exponent(at: int) -> Fraction:
        return Fraction(int(uniform[at]), 1 << shift)

    kept = coins.tossed(uniform.astype(np.float64) / float(1 << shift), exponent)
    found, beside = uniform[kept], words[kept]  # whose lowest bits are no part of the number
    times = np.zeros(len(found), np.int64)
    going = np.arange(len(found))
    while len(going):
        going = going[coins.tossed(np.ones(len(going)), lambda at: Fraction(1))]
        times[going] += 1
    return found + (times << shift), beside
