"""Peer selection: who exchanges with whom in each round of gossip.

Objective: mixing per second = -ln(contraction of the disagreement a round) / mean seconds of a round. A
round of pairs lasts as long as its slowest; the bottleneck alone is no objective, since pairs chosen for it
never mix (papers/compression.md 2.2). So a threshold on the rate is sought among quantiles of all pairs'
rates, by simulating rounds with each; no threshold is among them. ``strategies.exchanges.matching`` then
chooses each round's pairs and keeps what must hold: connected windows, nobody idle twice running.

Everything derives from rates, seed and round: whoever has the table derives the same pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError
from coordinator.planning import TUNED
from strategies.exchanges.matching import Network, Pairs, match, random_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Words = NDArray[np.uint64]

EXACT = 2.0**-24  # contraction of one round that counts as agreement: float32 has no finer one

_SEARCH, _PROBES = 1, 2  # what a draw is for, beside matching's


# ---------------------------------------------------------------- the objective


@dataclass(frozen=True, slots=True)
class Mixing:
    """The outcome of simulated rounds; a round's seconds are those of one unit at its slowest pair."""

    nats_a_round: float  # -ln(contraction of the disagreement)
    round_s: float  # mean

    @property
    def per_second(self) -> float:
        return self.nats_a_round / self.round_s if self.round_s else 0.0

    @property
    def bottleneck(self) -> float:
        """Harmonic mean over rounds of the slowest pair's rate."""
        return 1.0 / self.round_s if self.round_s else 0.0


def simulate(
    network: Network, select: Callable[[int], Pairs], rounds: int, seed: int, share: float = 1.0
) -> Mixing:
    """Mix along ``select``'s rounds, where a pair averages a random ``share`` of the elements.

    The first quarter is not counted: peers that are close agree fast, and what remains decides.
    """
    history = [pairs for pairs in map(select, range(rounds)) if pairs]
    counted = history[len(history) // 4 :]
    if not counted:
        return Mixing(0.0, 0.0)
    seconds = [1.0 / min(float(network.rate[pair]) for pair in pairs) for pairs in counted]
    nats = _nats_of_all(network, history, seed) if share == 1.0 else _nats_of_some(network, counted, share)
    return Mixing(nats, float(np.mean(seconds)))


def _nats_of_all(network: Network, history: Sequence[Pairs], seed: int) -> float:
    """Average random vectors [n] and follow their distance from each part's mean.

    Where all agree at once, as two peers do, the vectors begin anew.
    """
    words = random_words(seed, 0, _PROBES, network.n * TUNED.vectors).reshape(network.n, TUNED.vectors)
    values = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    _normalise(network, values)
    fresh = values.copy()
    nats: list[float] = []
    for i, j in (np.array(pairs).T for pairs in history):
        values[i] = values[j] = (values[i] + values[j]) / 2.0
        left = np.maximum(_normalise(network, values), EXACT)
        if left.max() == EXACT:
            values[:] = fresh
        nats.append(-float(np.log(left).mean()))
    return float(np.mean(nats[len(nats) // 4 :]))


def _nats_of_some(network: Network, history: Sequence[Pairs], share: float) -> float:
    """Return -ln(1 - share (1 - lambda)) / 2, lambda the mean round's largest eigenvalue below agreement.

    An element is averaged in few rounds, far apart, so their order does not count. Source: SAPS-PSGD's bound
    (papers/compression.md 2.2); E[W^T W] = E[W] for pairs.
    """
    n = network.n
    unlike = np.zeros((n, n))  # 1 - W, mean over rounds
    for i, j in (np.array(pairs).T for pairs in history):
        unlike[i, i] += 0.5
        unlike[j, j] += 0.5
        unlike[i, j] -= 0.5
        unlike[j, i] -= 0.5
    agreements = int(network.parts.max(initial=-1)) + 1
    gap = np.linalg.eigvalsh(unlike / len(history))[agreements:].min(initial=1.0)
    return -0.5 * float(np.log(max(1.0 - share * max(float(gap), 0.0), EXACT)))


def _normalise(network: Network, values: Floats) -> Floats:
    """Centre ``values`` [n, probes] on each part's mean and scale to length 1; the lengths before."""
    for part in range(int(network.parts.max(initial=-1)) + 1):
        members = network.parts == part
        values[members] -= values[members].mean(axis=0)
    length: Floats = np.linalg.norm(values, axis=0)
    values /= np.where(length > 0.0, length, 1.0)
    return length


def best_threshold(network: Network, seed: int, share: float = 1.0) -> float:
    """Return the rate among some quantiles of all pairs' whose rounds mix most per second; 0 is none.

    About 0.4 s for 32 peers, 13 s for 500.
    """
    if not 0.0 < share <= 1.0:
        raise UsageError(f"a share of {share:g} of the elements; rounds average more than 0, at most 1")
    rates = network.rate[np.triu(network.rate > 0.0)]
    if not rates.size:
        return 0.0
    quantiles: Iterable[float] = np.quantile(rates, TUNED.quantiles[1:], method="lower").tolist()
    thresholds = sorted({0.0, *quantiles})

    def mixes(threshold: float) -> float:
        limited = Network(network.rate, threshold)
        past: deque[Pairs] = deque(maxlen=network.window)

        def select(number: int) -> Pairs:
            past.append(match(limited, random_words(seed, number, _SEARCH, 2 * network.n), past))
            return past[-1]

        return simulate(network, select, TUNED.simulated_rounds, seed, share).per_second

    return max(thresholds, key=mixes)
