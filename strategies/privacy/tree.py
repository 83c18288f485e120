"""Noise of a binary tree over rounds: every prefix sum has that of few nodes (DP-FTRL).

    S_t = x_1 + ... + x_t + sum of N_node over the nodes that make up 1..t
    what is added to x_t is the difference of two such sums, over the nodes in one of them alone

A node of level j covers 2^j rounds, and t rounds are made up of as many nodes as t has bits set. A round is
in one node a level, so in at most b(t) of the nodes used until t, b the number of binary digits. A
client that contributes to one round of a tree moves so many nodes by at most its norm, whichever round that
is. The noise of all nodes follows from a seed, so a restart adds what was to be added. Sources: Kairouz 2021
(arXiv 2103.00039), tree aggregation; Dwork 2010 and Chan 2011 for the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.layout import pieces
from strategies.secure.masks import keystream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Noise = Callable[..., NDArray[Any]]
    Node = tuple[int, int]  # level, and number from 0 within it

SEED_BYTES = 32


def nodes_of_a_round(rounds: int) -> int:
    """Return in how many of the nodes that so many rounds of a tree use a round can be."""
    return rounds.bit_length()


def nodes_moved(rounds: int, tree: int) -> int:
    """Return how many nodes a client moves that contributes to one round of each tree: of ``rounds``, a tree
    over each ``tree`` of them."""
    whole, rest = divmod(rounds, tree)
    return whole * nodes_of_a_round(tree) + nodes_of_a_round(rest)


def prefix(rounds: int) -> Iterator[Node]:
    """Yield the nodes that make up the first ``rounds``."""
    begin = 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            yield level, begin >> level
            begin += 1 << level


def added(name: str, size: int, done: int, seed: bytes, sigma: int, noise: Noise) -> NDArray[np.int64]:
    """Return what a tensor's sum of the round after ``done`` gets, int64 [size].

    ``seed``: the tree's secret of 32 bytes; ``noise``: as ``discrete_gaussian``.
    """
    found = np.zeros(size, np.int64)
    before, after = set(prefix(done)), set(prefix(done + 1))
    for sign, nodes in ((1, after - before), (-1, before - after)):
        for level, number in sorted(nodes):
            source = keystream(sha256(seed + f"{level}/{number}/{name}".encode()).digest())
            for part in pieces(size):
                found[part] += sign * noise(sigma, len(found[part]), source)
    return found
