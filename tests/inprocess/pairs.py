"""Pairs of every round under one table of rates, as the ranks of a plan draw them from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable

from strategies.exchanges.matching import PAIRS, Network, Pairs, match, random_words


def drawn_pairs(network: Network, seed: int) -> Callable[[int], Pairs]:
    """Return what gives the pairs of a round; rounds derive from the first one on."""
    rounds: list[Pairs] = []

    def pairs(number: int) -> Pairs:
        while len(rounds) <= number:
            words = random_words(seed, len(rounds), PAIRS, 2 * network.n)
            rounds.append(match(network, words, rounds[-2 * network.window :]))
        return rounds[number]

    return pairs
