"""Renyi differential privacy of rounds with sampled discrete Gaussian noise, in whole orders.

    sampled, one added or removed
        (a - 1) r(a) = log sum_k C(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 z^2))
    fixed cohorts, one replaced
        r(a) = a (2 C)^2 / (2 (z C)^2)
    trees over rounds, one added or removed that is in one round of each
        sum r(a) = a n / (2 z^2), n the nodes that it can move (strategies.privacy.tree)
    T rounds, (epsilon, delta)
        epsilon = min_a  T r(a) + log(1 - 1/a) - log(delta a) / (a - 1)

Orders are whole because then the first line holds for discrete noise to the letter: for whole x and k,
E[(P(y - x)/P(y))^k] = exp(k (k - 1) x^2 / (2 sigma^2)), as the shifted sum over all whole numbers is the
same sum. That the other direction of the divergence is no larger follows as for the continuous noise: y ->
x - y swaps the two. Sources: Mironov, Talwar, Zhang 2019 (arXiv 1908.10530), sections 3.1 to 3.3; Canonne,
Kamath, Steinke 2020, Prop. 12 for the last line; dp-accounting 0.6.0, against which tests hold this file,
uses the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from atoll.privacy import MAX_NOISE, MIN_NOISE
from strategies.privacy.tree import nodes_moved

if TYPE_CHECKING:
    from atoll.privacy import Privacy

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
NOISE_STEP = 1e-4  # to which a noise that was not given is found


@dataclass(frozen=True, slots=True)
class Spent:
    """The accountant's state: releases so far, and their divergence by order."""

    rounds: int = 0
    rdp: Mapping[str, float] = field(default_factory=dict)

    def after(self, privacy: Privacy) -> Spent:
        """The state after one more round."""
        if privacy.tree:
            spent = rounds_rdp(privacy, privacy.noise, self.rounds + 1)
            return Spent(self.rounds + 1, {str(a): r for a, r in spent.items()})
        one = round_rdp(privacy.noise, privacy.sampling)
        return Spent(self.rounds + 1, {str(a): self.rdp.get(str(a), 0.0) + r for a, r in one.items()})

    def epsilon(self, delta: float) -> tuple[float, int]:
        """Return epsilon at ``delta``, and the order that gives it; (0, 0) before the first round."""
        return (
            epsilon_of({int(order): rdp for order, rdp in self.rdp.items()}, delta)
            if self.rounds
            else (0.0, 0)
        )


def round_rdp(noise: float, sampling: float) -> Mapping[int, float]:
    """Return the divergence of one round by order. ``sampling`` 0: a fixed cohort, of which one is
    replaced."""
    return _round_rdp(noise, sampling)


@cache
def _round_rdp(noise: float, sampling: float) -> Mapping[int, float]:
    if sampling == 0.0:
        return {order: order * 4.0 / (2.0 * noise * noise) for order in ORDERS}
    return {order: _sampled(noise, sampling, order) for order in ORDERS}


def _sampled(noise: float, q: float, order: int) -> float:
    if q == 1.0:
        return order / (2.0 * noise * noise)
    logs = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-q) + k * math.log(q)
        + k * (k - 1) / (2.0 * noise * noise)
        for k in range(order + 1)
    ]  # fmt: skip
    most = max(logs)
    # Terms are sums of hundreds of nats; what rounding takes off them is added on again.
    slack = 1e-13 * max(1.0, max(map(abs, logs)))
    return max(0.0, most + math.log(math.fsum(math.exp(each - most) for each in logs)) + slack) / (order - 1)


def epsilon_of(rdp: Mapping[int, float], delta: float) -> tuple[float, int]:
    """Return the least epsilon at ``delta`` over all orders, and the order."""
    found = (math.inf, 0)
    for order, value in rdp.items():
        if delta * delta + math.expm1(-value) > 0.0:
            epsilon = 0.0  # by Bretagnolle and Huber
        else:
            epsilon = value + math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1)
        found = min(found, (max(0.0, epsilon), order))
    return found


def rounds_rdp(privacy: Privacy, noise: float, rounds: int) -> dict[int, float]:
    """Return the divergence of so many rounds by order, with this noise in the place of the privacy's."""
    if privacy.tree:
        nodes = nodes_moved(rounds, privacy.tree)
        return {order: order * nodes / (2.0 * noise * noise) for order in ORDERS}
    return {order: rounds * value for order, value in _round_rdp(noise, privacy.sampling).items()}


def planned(privacy: Privacy, rounds: int) -> float:
    """Return epsilon after so many rounds."""
    return epsilon_of(rounds_rdp(privacy, privacy.noise, rounds), privacy.delta)[0]


def noise_for(privacy: Privacy, rounds: int) -> float:
    """Return the least noise, up to NOISE_STEP, with which so many rounds keep within the budget.
    UsageError where none does."""

    def epsilon(noise: float) -> float:
        return epsilon_of(rounds_rdp(privacy, noise, rounds), privacy.delta)[0]

    low, high = 0, 1
    while epsilon(high * NOISE_STEP) > privacy.epsilon:
        low, high = high, 2 * high
        if high * NOISE_STEP > MAX_NOISE:
            raise UsageError(
                f"no noise keeps {rounds} rounds within epsilon {privacy.epsilon:g} at delta "
                f"{privacy.delta:g}; take fewer rounds, a lower sampling or a larger epsilon"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(middle * NOISE_STEP) > privacy.epsilon else (low, middle)
    return max(MIN_NOISE, high * NOISE_STEP)
