"""Who exchanges with whom: from the plan, the seed and the round alone, and nobody is forgotten."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from atoll.exchange import Exchange, PairTable
from atoll.job import TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from strategies.exchanges.partners import EPOCH, group_of, groups_at, groups_of, joins

FAST, SLOW = 100.0, 1.0


def islands(n: int) -> tuple[float, ...]:
    """Rates of two islands of machines, with slow links between them."""
    first = np.arange(n) < n // 2
    return tuple(np.where(first[:, None] == first[None, :], FAST, SLOW).reshape(-1).tolist())


def rounds(
    exchange: Exchange, n: int, count: int, present: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], ...]]:
    there = present or tuple(range(n))
    return [groups_at(exchange, there, n, 7, number) for number in range(count)]


@pytest.mark.parametrize("rule", ["saps", "swarm", "wagma", "diloco"])
@pytest.mark.parametrize("present", [(0,), (0, 2), (0, 1, 4), (1, 2, 3, 4, 5), tuple(range(6))])
def test_every_rank_that_is_there_is_in_one_group(rule: str, present: tuple[int, ...]) -> None:
    for groups in rounds(Exchange(rule), 6, 12, present):
        assert sorted(rank for group in groups for rank in group) == list(present)
        assert all(group == tuple(sorted(group)) for group in groups)
        assert all(group_of(rank, groups) == group for group in groups for rank in group)


def test_a_round_is_the_same_whenever_it_is_asked_for() -> None:
    exchange = Exchange("saps", pairs=PairTable(islands(6), FAST))
    in_order = rounds(exchange, 6, 2 * EPOCH)
    assert [groups_at(exchange, tuple(range(6)), 6, 7, at) for at in (50, 3, 33)] == [
        in_order[at] for at in (50, 3, 33)
    ]
    assert in_order[:EPOCH] != in_order[EPOCH:]  # epochs draw anew
    assert in_order != [groups_at(exchange, tuple(range(6)), 6, 8, at) for at in range(2 * EPOCH)]


def test_pairs_are_fast_ones_and_slow_ones_only_to_connect_all() -> None:
    exchange = Exchange("saps", pairs=PairTable(islands(8), FAST))
    found = rounds(exchange, 8, EPOCH)
    assert 0 < crossing(found) < EPOCH
    assert crossing(rounds(Exchange("swarm"), 8, EPOCH)) > 2 * crossing(found)


def crossing(found: list[tuple[tuple[int, ...], ...]]) -> int:
    """Number of the groups that have ranks of both islands."""
    return sum((group[0] < 4) != (group[-1] < 4) for groups in found for group in groups)


def test_of_an_odd_number_one_is_alone_and_not_twice_running() -> None:
    alone = [
        next(group for group in groups if len(group) == 1) for groups in rounds(Exchange("swarm"), 5, EPOCH)
    ]
    assert all(a != b for a, b in pairwise(alone))


def test_pairs_that_cannot_exchange_never_do() -> None:
    hub = np.zeros((4, 4))
    hub[0], hub[:, 0] = 1.0, 1.0
    exchange = Exchange("saps", pairs=PairTable(tuple(hub.reshape(-1).tolist())))
    assert all(len(group) == 1 or group[0] == 0 for groups in rounds(exchange, 4, EPOCH) for group in groups)


def test_groups_take_turns_and_every_tenth_round_is_everybodys() -> None:
    found = rounds(Exchange("wagma"), 9, 20)
    assert [len(groups) for groups in (found[9], found[19])] == [1, 1]
    assert all(len(groups) >= 2 for at, groups in enumerate(found) if at % 10 != 9)


def test_the_last_round_joins_everybody_who_is_there() -> None:
    replicas = tuple(Replica((i, i + 1), (StageSpec(0, 4, 0, 4, f"w{i}", 0),)) for i in range(4))
    plan = Plan("j", 1, "", "", "x", ScheduleName.ONE_F_ONE_B, 4, replicas, exchange=Exchange("saps"))
    plan = plan.moved(2, ["w0", "w1", "w2", "w3"], frozenset({1}))
    training = TrainingSpec(steps=5, n_micro=4)
    assert groups_of(plan, training, 4) == ((0, 2, 3),)
    assert len(groups_of(plan, training, 3)) == 2
    assert [joins(plan, training, last) for last in (3, 4)] == [False, True]
