"""Noise of trees over rounds: what a prefix holds, what a client can move, what it costs, and restarts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy
from atoll.secure import Secure
from strategies.files import broadcast_arrays
from strategies.layout import Layout
from strategies.privacy.accountant import Spent, noise_for, planned
from strategies.privacy.private import UNIT, Private, strategy_of
from strategies.privacy.report import plan_words, spent_words
from strategies.privacy.sampling import in_slot
from strategies.privacy.tree import added, nodes_moved, nodes_of_a_round, prefix
from strategies.values import ServerState
from tests.strategies.privacy.golden import TREES

SEED = b"s" * 32


def whole(sigma: int, size: int, source: Any) -> np.ndarray[Any, Any]:
    """Numbers that name their node."""
    return np.frombuffer(source(8 * size), np.int64) >> 20


def node(level: int, number: int, size: int = 3) -> np.ndarray[Any, Any]:
    """What a tree adds for one node: the first prefix that is this node alone, less the one before."""
    rounds = 1 << level
    assert number == 0
    return sum((added("w", size, at, SEED, 1, whole) for at in range(rounds)), np.zeros(size, np.int64))


# ---------------------------------------------------------------- the tree


def test_a_prefix_is_made_up_of_nodes_that_cover_each_round_once() -> None:
    for rounds in range(1, 130):
        covered = [
            at for level, number in prefix(rounds) for at in range(number << level, (number + 1) << level)
        ]
        assert sorted(covered) == list(range(rounds))
        assert len(list(prefix(rounds))) == rounds.bit_count()


def test_no_round_is_in_more_nodes_than_are_charged() -> None:
    for rounds in range(1, 130):
        used = {each for at in range(1, rounds + 1) for each in prefix(at)}
        most = max(
            sum(number << level <= at < (number + 1) << level for level, number in used)
            for at in range(rounds)
        )
        assert most <= nodes_of_a_round(rounds) == math.ceil(math.log2(rounds + 1))


def test_what_is_added_until_a_round_is_the_noise_of_its_prefixs_nodes_alone() -> None:
    """Sums of any two prefixes differ by whole nodes; equal nodes have equal noise."""
    until, total = [np.zeros(3, np.int64)], np.zeros(3, np.int64)
    for at in range(40):
        total = total + added("w", 3, at, SEED, 1, whole)
        until.append(total)
    for rounds in range(1, 41):
        for other in range(1, 41):
            same = set(prefix(rounds)) == set(prefix(other))
            assert np.array_equal(until[rounds], until[other]) is same
    np.testing.assert_array_equal(until[12] - until[8], until[12] - node(3, 0))
    assert not np.array_equal(added("w", 3, 0, SEED, 1, whole), added("v", 3, 0, SEED, 1, whole))
    assert not np.array_equal(added("w", 3, 0, SEED, 1, whole), added("w", 3, 0, b"t" * 32, 1, whole))


# ---------------------------------------------------------------- the mechanism


def private(tree: int = 8, **options: Any) -> Private:
    privacy = Privacy(**{"noise": 2.0, "clip": 0.5, "tree": tree, **options})
    found = strategy_of(Federated(clients=10, evaluate_every=0, privacy=privacy))
    assert isinstance(found, Private)
    return found


def begun(rule: Private, size: int) -> ServerState:
    arrays = {"w": np.zeros(size, np.float64)}
    return rule.init(Layout.of(arrays, {"w"}), arrays, 10)


def test_noise_of_every_prefix_is_that_of_its_nodes_within_three_percent() -> None:
    rule, size = private(), 30_000
    state = begun(rule, size)
    for rounds in range(1, 9):
        state = rule.aggregate(state, [])
        expected = 2.0 * 0.5 / 10 * math.sqrt(rounds.bit_count())
        assert float(np.std(state.weights["w"])) == pytest.approx(expected, rel=0.03), rounds
    # The next tree's noise is new: it adds up with the last one's whole node.
    state = rule.aggregate(state, [])
    assert float(np.std(state.weights["w"])) == pytest.approx(2.0 * 0.5 / 10 * math.sqrt(2.0), rel=0.03)


def test_after_many_rounds_it_is_a_fraction_of_independent_noise_at_equal_epsilon() -> None:
    """128 rounds in one tree, epsilon 8, against rounds of their own whose clients are in one of them."""
    tree = Privacy(epsilon=8.0, tree=128)
    noise = noise_for(tree, 128)
    assert planned(replace(tree, noise=noise), 128) <= 8.0
    every_round = Privacy(epsilon=8.0, sampling=1.0)  # charged for all rounds
    flat = noise_for(every_round, 128)
    assert noise * math.sqrt((128).bit_count()) < 0.3 * flat * math.sqrt(128)


def test_a_restart_adds_what_was_to_be_added(tmp_path: Path) -> None:
    from compressors.container import dense_metas, read_dense, write_dense
    from strategies.files import joined, parted

    rule = private()
    state = begun(rule, 50)
    for _ in range(3):
        state = rule.aggregate(state, [])
    path = tmp_path / "state"
    write_dense(path, joined(state.weights, state.slots))
    weights, slots = parted(read_dense(path, dense_metas(path)))
    again = replace(state, weights=weights, slots=slots)
    for _ in range(7):  # beyond the end of a tree
        done, other = rule.aggregate(state, []), rule.aggregate(again, [])
        if state.slots["tree"]["done"][0] == again.slots["tree"]["done"][0] < 7:
            np.testing.assert_array_equal(done.weights["w"], other.weights["w"])
        state, again = done, replace(done)
    assert state.round == 10


def test_the_seed_is_in_no_broadcast_and_of_each_tree_another() -> None:
    rule = private(tree=2)
    state = begun(rule, 4)
    seeds = []
    for _ in range(6):
        seed = state.slots["tree"]["seed"].tobytes()
        seeds.append(seed)
        sent = broadcast_arrays(rule.configure(state))
        assert not any(seed in np.asarray(array).tobytes() for array in sent.values())
        assert not any("tree" in name for name in sent)
        state = rule.aggregate(state, [])
    assert len(set(seeds)) == 3
    assert [a == b for a, b in pairwise(seeds)] == [True, False, True, False, True]
    assert len(seeds[0]) == 32


def test_without_the_seed_nothing_is_released() -> None:
    rule = private()
    state = begun(rule, 4)
    hosts = rule.during({})  # as a broadcast has it
    assert hosts.seed == b""
    with pytest.raises(UsageError, match="without the seed"):
        hosts._of_tree("w", 4, UNIT)
    assert rule.during(state.slots).seed != b""


# ---------------------------------------------------------------- who, and what it costs


def test_a_client_has_one_round_of_each_tree_whoever_else_is_here() -> None:
    names = {f"c{at:03d}": f"c{at:03d}" for at in range(200)}
    rounds = [in_slot(names, at, 5, "job-1") for at in range(20)]
    for begin in range(0, 20, 5):
        assert sorted(sum(rounds[begin : begin + 5], ())) == sorted(names)
    assert len({one for one in rounds if "c007" in one}) == 4
    fewer = {name: name for name in list(names)[:50]}
    for at in range(20):
        assert set(in_slot(fewer, at, 5, "job-1")) == set(rounds[at]) & set(fewer)
    assert [in_slot(names, at, 5, "job-2") for at in range(20)] != rounds
    again = {f"identity-{at}": f"c{at:03d}" for at in range(200)}  # the same names, joined anew
    assert [len(in_slot(again, at, 5, "job-1")) for at in range(20)] == [len(each) for each in rounds]


def test_epsilon_is_dp_accountings_of_trees_in_21_settings() -> None:
    assert len(TREES) == 21
    for noise, tree, rounds, delta, epsilon in TREES:
        privacy = Privacy(noise=noise, tree=tree, delta=delta)
        assert planned(privacy, rounds) == pytest.approx(epsilon, rel=1e-5)
        spent = Spent()
        for _ in range(rounds):
            spent = spent.after(privacy)
        assert spent.epsilon(delta)[0] == pytest.approx(epsilon, rel=1e-5)


def test_what_is_spent_never_falls() -> None:
    privacy = Privacy(noise=3.0, tree=6)
    spent, last = Spent(), 0.0
    for rounds in range(1, 30):
        spent = spent.after(privacy)
        assert spent.epsilon(1e-5)[0] >= last
        last = spent.epsilon(1e-5)[0]
        assert nodes_moved(rounds, 6) >= nodes_moved(rounds - 1, 6)


def test_the_words_name_the_unit_and_the_node() -> None:
    rule = Federated(clients=10, evaluate_every=0, privacy=Privacy(noise=2.0, tree=8))
    words = plan_words(rule, 16)
    assert "its contribution to one round of each tree of 8 (10 expected a round)" in words
    assert "without amplification, noise 2 a node" in words
    assert rule.privacy is not None
    assert "noise 2 a node" in spent_words(rule, Spent().after(rule.privacy))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tree": 1}, "from 2 to"),
        ({"tree": -4}, "from 2 to"),
        ({"tree": 8, "sampling": 0.1}, "leave out sampling="),
        ({"tree": 8, "adaptive": 0.5}, "leave out sampling= and adaptive="),
    ],
)
def test_settings_beside_which_no_tree_is_proven_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Privacy(noise=1.0, **options)


def test_a_tree_beside_masks_is_refused() -> None:
    with pytest.raises(UsageError, match="kept over rounds by the coordinator"):
        Federated(clients=10, evaluate_every=0, privacy=Privacy(noise=1.0, tree=8), secure=Secure())
