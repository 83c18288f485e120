"""Peer selection: what holds in every round, and that rounds mix better a second than random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from atoll.errors import UsageError
from coordinator.planning.peers.selection import best_threshold, simulate
from strategies.exchanges.matching import Network, Pairs, grid_groups
from tests.inprocess.pairs import drawn_pairs

ROUNDS = 60


def uniform(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.0, 5.0, (n, n))


@dataclass
class Selection:
    """Rounds with a given threshold: what must hold does so with any."""

    network: Network
    pairs: Callable[[int], Pairs]


def selection(rates: np.ndarray, seed: int, threshold: float) -> Selection:
    network = Network.of(rates, threshold)
    return Selection(network, drawn_pairs(network, seed))


def searched(rates: np.ndarray, seed: int) -> Selection:
    return selection(rates, seed, best_threshold(Network.of(rates), seed))


def drawn(seed: int, islands: int = 1) -> Selection:
    """2 to 40 peers with uniform or log-normal rates and any threshold up to the fastest pair's rate."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, 41))
    rates = draw.uniform(0.0, 5.0, (n, n)) if seed % 3 else np.exp(draw.normal(0.0, 2.0, (n, n)))
    if islands > 1:
        island = draw.integers(0, islands, n)
        rates = rates * (island[:, None] == island[None, :])
    known = Network.of(rates).rate
    reachable = known[known > 0.0]
    threshold = float(np.quantile(reachable, draw.uniform())) if reachable.size else 0.0
    return selection(rates, seed, threshold)


def components(n: int, rounds: Sequence[Pairs]) -> int:
    root = list(range(n))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, j in (pair for pairs in rounds for pair in pairs):
        root[find(i)] = find(j)
    return sum(find(i) == i for i in range(n))


def violations(chosen: Selection, rounds: int = ROUNDS, window: int = 0) -> list[str]:
    """Broken promises of ``rounds`` rounds where all peers of a part reach each other, in words."""
    network, n = chosen.network, chosen.network.n
    parts = int(network.parts.max()) + 1
    others = np.bincount(network.parts)[network.parts] - 1
    history = [chosen.pairs(number) for number in range(rounds)]
    found = []
    idle: set[int] = set()
    for number, pairs in enumerate(history):
        matched = [peer for pair in pairs for peer in pair]
        found += [f"round {number}: twice"] * (len(set(matched)) != len(matched))
        found += [f"round {number}: {i} cannot reach {j}" for i, j in pairs if network.rate[i, j] <= 0.0]
        now_idle = {i for i in range(n) if others[i]} - set(matched)
        found += [f"round {number}: {i} idles again" for i in now_idle & idle]
        idle = now_idle
    span = window or network.window
    for first in range(rounds - span + 1):
        left = components(n, history[first : first + span])
        found += [f"rounds from {first}: {left} components"] * (left != parts)
    return found


# ---------------------------------------------------------------- what always holds


@pytest.mark.parametrize("islands", [1, 3])
def test_windows_are_connected_and_nobody_idles_twice_with_any_threshold(islands):
    for seed in range(20):
        assert violations(drawn(seed, islands)) == [], seed


@pytest.mark.slow
@pytest.mark.parametrize("islands", [1, 3])
def test_windows_are_connected_and_nobody_idles_twice_on_a_thousand_seeds(islands):
    for seed in range(1000):
        assert violations(drawn(seed, islands)) == [], seed


def test_searched_thresholds_keep_the_promises_on_32_peers():
    for seed in range(1):
        assert violations(searched(uniform(32, seed), seed), 200) == []


def test_where_not_all_reach_each_other_every_part_is_still_connected():
    for seed in range(10):
        draw = np.random.default_rng(seed)
        n = int(draw.integers(4, 20))
        rates = uniform(n, seed) * (draw.uniform(size=(n, n)) < 0.4)
        chosen = selection(rates, seed, 3.0)
        found = violations(chosen, 4 * n + 60, window=chosen.network.window + n)
        assert [words for words in found if "idles" not in words] == [], seed


def test_leaves_of_a_hub_take_turns():
    rates = np.zeros((9, 9))
    rates[0, 1:] = rates[1:, 0] = np.arange(1.0, 9.0)
    chosen = selection(rates, 1, 4.0)
    history = [chosen.pairs(number) for number in range(60)]
    assert all(len(pairs) == 1 for pairs in history)
    for first in range(40):
        assert components(9, history[first : first + 16]) == 1


def test_one_direction_that_cannot_be_sent_forbids_the_pair():
    rates = uniform(6, 1)
    rates[0, 1], rates[2, 3] = 0.0, np.nan
    chosen = selection(rates, 1, 0.0)
    met = {pair for number in range(200) for pair in chosen.pairs(number)}
    assert met == {(i, j) for i in range(6) for j in range(i + 1, 6)} - {(0, 1), (2, 3)}


def test_fleets_of_none_and_of_two_have_pairs_where_they_can():
    assert searched(np.zeros((0, 0)), 1).pairs(3) == ()
    assert searched(np.zeros((2, 2)), 1).pairs(3) == ()
    assert searched(np.ones((2, 2)), 1).pairs(3) == ((0, 1),)


# ---------------------------------------------------------------- both ends derive the same


def test_pairs_depend_on_rates_seed_and_round_alone():
    rates = uniform(16, 3)
    in_order = searched(rates, 5)
    history = [in_order.pairs(number) for number in range(80)]
    jumping = searched(rates.copy(), 5)
    assert [jumping.pairs(number) for number in (70, 3, 71, 0, 79)] == [
        history[number] for number in (70, 3, 71, 0, 79)
    ]
    another = searched(rates, 6)
    assert history != [another.pairs(number) for number in range(80)]
    scaled = searched(rates * 2.0**20, 5)  # the unit is of no account
    assert [scaled.pairs(number) for number in range(80)] == history


def test_pairs_of_a_seed_stay_those_of_earlier_releases():
    rates = np.array([[(7 * i + 11 * j) % 13 + 1.0 for j in range(6)] for i in range(6)])
    chosen = selection(rates, 4711, 3.0)
    assert [chosen.pairs(number) for number in range(4)] == [
        ((0, 4), (1, 5), (2, 3)),
        ((0, 3), (1, 5), (2, 4)),
        ((0, 1), (2, 4), (3, 5)),
        ((0, 4), (1, 2), (3, 5)),
    ]


# ---------------------------------------------------------------- the objective


def at_random(n: int, seed: int):
    """A random matching a round, as papers compare with."""

    def select(number: int) -> Pairs:
        order = np.random.default_rng([seed, number]).permutation(n).tolist()
        return tuple(zip(order[: n // 2], order[n // 2 : n // 2 * 2], strict=True))

    return select


def test_a_selection_mixes_several_times_faster_than_random_pairs():
    for seed in range(2):
        rates = uniform(32, seed)
        network = Network.of(rates)
        chosen = simulate(network, searched(rates, seed).pairs, 300, 1)
        random = simulate(network, at_random(32, seed), 300, 1)
        assert chosen.bottleneck >= 2.5 * random.bottleneck
        assert chosen.per_second >= 5.0 * random.per_second


def test_partners_with_least_in_common_mix_faster_than_random_ones():
    for n in (12, 25, 32):
        network = Network.of(np.ones((n, n)))
        chosen = simulate(network, selection(np.ones((n, n)), 1, 0.0).pairs, 300, 1)
        random = simulate(network, at_random(n, 1), 300, 1)
        assert chosen.nats_a_round >= 1.3 * random.nats_a_round


def test_equal_rates_need_no_threshold():
    assert best_threshold(Network.of(np.full((12, 12), 3.0)), 1) in (0.0, 3.0)


def test_simulated_mixing_is_that_of_the_expected_matrix():
    """Mean of n uniform matchings: variance falls by 1 - n / (2 (n - 1)) a round at first; two peers agree
    at once."""
    network = Network.of(np.full((64, 64), 2.0))
    mixing = simulate(network, at_random(64, 1), 400, 1)
    assert mixing.round_s == 0.5
    assert mixing.nats_a_round == pytest.approx(-0.5 * np.log(1 - 64 / 126), rel=0.1)
    assert simulate(Network.of(np.ones((2, 2))), lambda _: ((0, 1),), 8, 1).nats_a_round == pytest.approx(
        24 * np.log(2)
    )


def test_a_mask_mixes_as_the_published_bound_says():
    network = Network.of(np.full((64, 64), 2.0))
    mixing = simulate(network, at_random(64, 1), 400, 1, share=0.01)
    assert mixing.nats_a_round == pytest.approx(0.005 * 64 / 126, rel=0.15)  # -ln(1 - p (1 - lambda)) / 2
    draw = np.random.default_rng(1)
    values = draw.normal(size=(64, 4000))  # element by element, with masks
    values -= values.mean(axis=0)
    before = (values**2).sum()
    for number in range(400):
        mask = draw.uniform(size=4000) < 0.01
        for i, j in at_random(64, 1)(number):
            values[[i, j]] = np.where(mask, (values[i] + values[j]) / 2.0, values[[i, j]])
    assert -0.5 * np.log((values**2).sum() / before) / 400 == pytest.approx(mixing.nats_a_round, rel=0.25)


def test_a_share_of_the_elements_may_need_another_threshold():
    rates = np.random.default_rng(5).uniform(4.0, 5.0, (12, 12))
    rates[:2] /= 20.0  # two peers at a twentieth: whoever averages all can leave them out every other round
    network = Network.of(rates)
    chosen = selection(rates, 1, best_threshold(network, 1, 0.01))
    masked = simulate(network, chosen.pairs, 400, 1, share=0.01).per_second
    assert masked >= 0.95 * simulate(network, at_random(12, 1), 400, 1, share=0.01).per_second
    with pytest.raises(UsageError, match="share"):
        best_threshold(network, 1, 0.0)


def test_pairs_that_never_join_two_halves_do_not_mix():
    network = Network.of(np.ones((8, 8)))
    stuck = simulate(network, lambda number: ((0, 1), (2, 3), (4, 5), (6, 7))[number % 2 :: 2], 100, 1)
    assert abs(stuck.nats_a_round) < 1e-6


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(("n", "size", "rounds"), [(16, 4, 2), (8, 2, 3), (27, 3, 3), (64, 8, 2)])
def test_groups_hold_the_mean_after_log_rounds(n, size, rounds):
    values = np.random.default_rng(1).normal(size=n)
    for cycle in range(3):
        held = values.copy()
        for number in range(cycle * rounds, (cycle + 1) * rounds):
            groups = grid_groups(n, size, 7, number)
            assert sorted(peer for group in groups for peer in group) == list(range(n))
            for group in groups:
                held[list(group)] = held[list(group)].mean()
        assert np.ptp(held) < 1e-12
    assert grid_groups(n, size, 7, 0) != grid_groups(n, size, 7, rounds)


def test_groups_of_any_number_of_peers_mix_and_never_exceed_their_size():
    values = np.random.default_rng(1).normal(size=11)
    for number in range(40):
        for group in grid_groups(11, 4, 7, number):
            assert 2 <= len(group) <= 4
            values[list(group)] = values[list(group)].mean()
    assert np.ptp(values) < 1e-6


# ---------------------------------------------------------------- refusals


def test_unusable_requests_are_refused():
    with pytest.raises(UsageError, match="at least 0"):
        Network.of(-np.ones((2, 2)))
    with pytest.raises(UsageError, match="shape"):
        Network.of(np.ones((2, 3)))
    with pytest.raises(UsageError, match="at least 2"):
        grid_groups(3, 1, 1, 10)
