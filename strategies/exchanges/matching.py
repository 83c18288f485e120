"""One gossip round: which peers exchange with which, from their rates, a draw and the last rounds.

    window(n)  = ceil(log2 n) + 5 rounds, whose pairs together must connect everybody
    due        = the fastest pairs that join components of the last w rounds, where c components are left
                 and c > 2^(window - 1 - w): as a round of pairs halves the components, the window closes
                 in time, and no sooner than it must, since such pairs may be slow
    idle       = peers that the last round left out: a pair above the threshold, else the fastest, else
                 the place of one that was not left out
    the rest   = a matching of pairs above the threshold: a peer with the fewest free partners chooses next,
                 so that nearly all find one, and takes of those with whom it had least to do one at random

Where all peers of a part reach each other, windows connect it and nobody idles twice running. Where they
do not (a hub and its leaves), each round joins at least one pair of components that are due, and the
longest idle choose first. A blossom on random weights mixes alike and takes 15 to 75 times as long (32 and 64
peers). Source of window and due pairs: SAPS-PSGD's repair rounds (papers/compression.md 2.2), which ignore
rates and begin as soon as a window is not connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]
    Words = NDArray[np.uint64]

Pairs = tuple[tuple[int, int], ...]  # peers by index, each at most once, the smaller first

PAIRS, GROUPS = 0, 3  # what words are drawn for
WINDOW_SLACK = 5  # rounds above log2(n), the fewest that connect n peers (papers/compression.md 2.2)


@dataclass(frozen=True, eq=False)
class Network:
    """Rates of n peers' pairs: ``rate`` [n, n] symmetric, in any unit, 0 for those that cannot exchange.

    ``threshold``: pairs as fast as that are matched at random, 0 is all; others where they must be.
    """

    rate: Floats
    threshold: float = 0.0

    @classmethod
    def of(cls, directed: Floats, threshold: float = 0.0) -> Network:
        """A pair exchanges at the slower of its two directions; NaN and 0 are unreachable.

        UsageError for another shape than [n, n], negative or infinite rates.
        """
        known = np.nan_to_num(np.asarray(directed, dtype=np.float64), nan=0.0)
        if known.ndim != 2 or known.shape[0] != known.shape[1]:
            raise UsageError(f"rates of shape {known.shape}; give one per ordered pair of peers, [n, n]")
        if known.size and not (known.min() >= 0.0 and np.isfinite(known).all()):
            raise UsageError("rates must be finite and at least 0; give 0 for pairs that cannot exchange")
        rate = np.minimum(known, known.T)
        np.fill_diagonal(rate, 0.0)
        return cls(rate, threshold)

    @property
    def n(self) -> int:
        return len(self.rate)

    @property
    def window(self) -> int:
        """Rounds whose pairs connect every part."""
        return max(self.n - 1, 0).bit_length() + WINDOW_SLACK

    @cached_property
    def fast(self) -> Bools:
        """[n, n] the pairs at or above the threshold; the fastest pair of a part always is."""
        fastest = np.zeros(self.n)
        np.maximum.at(fastest, self.parts, self.rate.max(axis=1, initial=0.0))
        limit = np.minimum(self.threshold, fastest[self.parts])
        return (self.rate > 0.0) & (self.rate >= limit[:, None])

    @cached_property
    def parts(self) -> Ints:
        """[n] the connected component that each peer belongs to."""
        label, before = np.arange(self.n), np.full(self.n, -1)
        joined = (self.rate > 0.0) | np.eye(self.n, dtype=np.bool_)
        while not np.array_equal(label, before):  # each takes the smallest label around it
            before, label = label, np.where(joined, label[None, :], self.n).min(axis=1, initial=self.n)
        return np.asarray(np.unique(label, return_inverse=True)[1], dtype=np.int64)


def random_words(seed: int, number: int, purpose: int, count: int) -> Words:
    """[count] words of 64 bits from a counter: a function of its arguments in every release of numpy."""
    generator = np.random.Philox(key=[seed % 2**64, number], counter=[0, 0, 0, purpose])
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def grid_groups(n: int, size: int, seed: int, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of at most ``size`` of n peers that average together in a round; alone is in none.

    Peers have d digits in base ``size``, in an order drawn anew every d rounds; a round groups those
    that differ in one digit at most. With size^d peers all hold the mean after d rounds (WAGMA's
    butterfly, Moshpit's grid: papers/compression.md 7). Rates do not count.
    """
    if size < 2:
        raise UsageError(f"groups of {size}; at least 2 average")
    digits = next(d for d in range(1, n + 1) if size**d >= n) if n else 1
    cycle, digit = divmod(number, digits)
    order = np.argsort(random_words(seed, cycle, GROUPS, n), kind="stable").tolist()
    grouped: dict[int, list[int]] = {}
    for place, peer in enumerate(order):
        without = place - place // size**digit % size * size**digit
        grouped.setdefault(without, []).append(peer)
    return tuple(tuple(group) for group in grouped.values() if len(group) > 1)


def match(network: Network, words: Words, past: Iterable[Pairs]) -> Pairs:
    """Return the pairs of the round after ``past`` (oldest first; only the last window matters).

    ``words`` [2 n]: random bits, the same at everybody who derives this round.
    """
    last_first = list(past)[: -network.window - 1 : -1]
    round_ = _Round(network, words, last_first)
    _join_components(round_, last_first)
    _match_idle(round_, last_first)
    _match_rest(round_)
    return tuple((i, j) for i, j in enumerate(round_.partner.tolist()) if i < j)


class _Round:
    """Pairs of the round in the making."""

    def __init__(self, network: Network, words: Words, last_first: Sequence[Pairs]) -> None:
        n = network.n
        self.distance = _distance(n, last_first[: network.window - WINDOW_SLACK])
        self.network = network
        self.partner = np.full(n, -1, dtype=np.int64)
        self.due = np.zeros(n, dtype=np.bool_)  # whose pair must stay
        self.rank = np.argsort(words[:n], kind="stable").argsort()  # a random order of the peers
        self._picks = iter(words[n:].tolist())

    @property
    def free(self) -> Bools:
        return self.partner < 0

    def pick(self, i: int, options: Ints) -> int:
        """The option farthest from ``i``, at random among equals; at most one pick a peer."""
        distance = self.distance[i, options]
        farthest = options[distance == distance.max()]
        return int(farthest[next(self._picks) % len(farthest)])

    def join(self, i: int, j: int) -> None:
        self.partner[i], self.partner[j] = j, i


def _distance(n: int, last_first: Sequence[Pairs]) -> Floats:
    """[n, n] squared distances of what peers hold after some rounds, from values that were independent.

    Averaging the farthest shrinks disagreement most: half as much again a round as random partners. All are
    multiples of 4^-rounds, so exact, and equal on every machine.
    """
    share = np.eye(n)  # of everybody's value in what each peer holds
    for i, j in (np.array(pairs).T for pairs in reversed(last_first) if pairs):
        share[i] = share[j] = (share[i] + share[j]) / 2.0
    overlap = share @ share.T
    own = overlap.diagonal()
    return own[:, None] + own[None, :] - 2.0 * overlap


# ---------------------------------------------------------------- connected windows


def _join_components(round_: _Round, last_first: Sequence[Pairs]) -> None:
    """Match due pairs, of the longest window first."""
    chosen: list[tuple[int, int]] = []
    for allowed, label in reversed(_late_windows(round_.network, last_first)):
        _merge(label, chosen)
        while _most_components(round_.network, label) > allowed:
            pair = _fastest_between(round_, label)
            if pair is None:
                break
            round_.join(*pair)
            round_.due[list(pair)] = True
            _merge(label, [pair])
            chosen.append(pair)


def _late_windows(network: Network, last_first: Sequence[Pairs]) -> list[tuple[int, Ints]]:
    """Windows with more components than they may have after this round: that number, and labels [n]."""
    late: list[tuple[int, Ints]] = []
    label = np.arange(network.n)
    window = network.window
    for length, pairs in enumerate(last_first[: window - 1], start=1):
        _merge(label, pairs)
        components = _most_components(network, label)
        if components <= 1:
            break
        allowed = 2 ** (window - 1 - length)
        if components > allowed:
            late.append((allowed, label.copy()))
    return late


def _merge(label: Ints, pairs: Sequence[tuple[int, int]]) -> None:
    """Give both ends' components one label, in place."""
    for i, j in pairs:
        if label[i] != label[j]:
            label[label == label[j]] = label[i]


def _most_components(network: Network, label: Ints) -> int:
    """The number of labels in the part that has most."""
    heads = np.unique(label)  # a label is the index of one of its peers
    return int(np.bincount(network.parts[heads]).max(initial=0))


def _fastest_between(round_: _Round, label: Ints) -> tuple[int, int] | None:
    """The fastest pair of free peers from different components."""
    free = np.flatnonzero(round_.free)
    rate = round_.network.rate[np.ix_(free, free)] * (label[free][:, None] != label[free][None, :])
    if not rate.any():
        return None
    i, j = divmod(int(rate.argmax()), len(free))
    return int(free[i]), int(free[j])


# ---------------------------------------------------------------- the others


def _match_idle(round_: _Round, last_first: Sequence[Pairs]) -> None:
    """Match whoever the last round left out, longest idle first."""
    idle = _rounds_idle(round_.network, last_first)
    rate = round_.network.rate
    for i in np.lexsort((round_.rank, -idle)).tolist():
        if not idle[i]:
            break
        if not round_.free[i]:
            continue
        fast = np.flatnonzero(round_.free & round_.network.fast[i])
        any_ = rate[i] * round_.free
        if fast.size:
            round_.join(i, round_.pick(i, fast))
        elif any_.any():
            round_.join(i, int(any_.argmax()))
        else:
            _take_place(round_, i, idle)


def _rounds_idle(network: Network, last_first: Sequence[Pairs]) -> Ints:
    """[n] the rounds since each peer's last pair, at most a window."""
    idle = np.zeros(network.n, dtype=np.int64)
    waiting = np.ones(network.n, dtype=np.bool_)
    for pairs in last_first:
        waiting[[peer for pair in pairs for peer in pair]] = False
        if not waiting.any():
            break
        idle[waiting] += 1
    return idle


def _take_place(round_: _Round, i: int, idle: Ints) -> None:
    """Match ``i`` with the fastest peer whose partner can do without this round."""
    other = round_.partner
    can_leave = (other >= 0) & ~round_.due & (idle[other] == 0)
    rate = round_.network.rate[i] * can_leave
    if rate.any():
        taken = int(rate.argmax())
        other[other[taken]] = -1
        round_.join(i, taken)


def _match_rest(round_: _Round) -> None:
    """Match free peers at random over pairs above the threshold, those with fewest options first."""
    n = round_.network.n
    free = round_.free
    open_ = round_.network.fast & free[:, None] & free[None, :]
    options = open_.sum(axis=1)
    never = n * n + n
    while True:
        order = np.where(options > 0, options * n + round_.rank, never)
        i = int(order.argmin()) if n else 0
        if not n or order[i] == never:
            return
        j = round_.pick(i, np.flatnonzero(open_[i]))
        round_.join(i, j)
        options = options - open_[i] - open_[j]
        options[[i, j]] = 0
        open_[:, [i, j]] = False
