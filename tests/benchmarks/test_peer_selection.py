"""The rivals of peer selection follow their rules."""

from __future__ import annotations

import networkx as nx
import numpy as np

from benchmarks.peer_selection import KINDS, at_random, saps
from strategies.exchanges.matching import Network


def test_every_kind_of_rates_reaches_everybody() -> None:
    for kind, rates in KINDS.items():
        known = Network.of(rates(13, np.random.default_rng(1))).rate
        assert ((known > 0.0) == ~np.eye(13, dtype=np.bool_)).all(), kind


def test_random_pairs_leave_at_most_one_out() -> None:
    for number in range(20):
        pairs = at_random(13, 1)(number)
        assert len({peer for pair in pairs for peer in pair}) == 12


def test_saps_takes_fast_pairs_while_recent_rounds_connect_all_and_new_ones_otherwise() -> None:
    n, window = 16, 6
    network = Network.of(np.random.default_rng(1).uniform(0.0, 5.0, (n, n)))
    median = np.median(network.rate[np.triu_indices(n, 1)])
    select = saps(network, 1, window)
    history: list[set[tuple[int, int]]] = []
    kinds = set()
    for number in range(60):
        recent = nx.Graph()
        recent.add_nodes_from(range(n))
        recent.add_edges_from(pair for pairs in history[-(window - 1) :] for pair in pairs)
        pairs = {(min(pair), max(pair)) for pair in select(number)}
        assert len({peer for pair in pairs for peer in pair}) == n
        connected = nx.is_connected(recent)
        kinds.add(connected)
        slow = [pair for pair in pairs if network.rate[pair] <= median]
        if connected:
            left = [peer for pair in slow for peer in pair]  # matched with anybody: no fast pair among them
            assert not any(network.rate[i, j] > median for i in left for j in left if i != j)
        else:
            assert not pairs & set(recent.edges)
        history.append(pairs)
    assert kinds == {True, False}
