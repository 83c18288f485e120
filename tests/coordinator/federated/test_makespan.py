"""Clients dealt to hosts: the model that times fit, forgetting, the bound, ties and states."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from coordinator.federated.makespan import (
    Assignment,
    HostTimes,
    Rate,
    Task,
    Timed,
    assign,
    explained,
    fitted,
    learnt,
    lower_bound,
    rates,
)


def measured(rate: Rate, *steps: int) -> list[Timed]:
    return [Timed(n, rate.seconds(n)) for n in steps]


def tasks(*steps: int) -> list[Task]:
    return [Task(f"c{at:02d}", n) for at, n in enumerate(steps)]


def once_each(found: Assignment, given_tasks: list[Task]) -> bool:
    return sorted(c for clients in found.clients.values() for c in clients) == sorted(
        task.client for task in given_tasks
    )


# ---------------------------------------------------------------- times


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-4, 10.0), st.floats(0.0, 100.0), st.lists(st.integers(1, 5000), min_size=2, max_size=20))
def test_exact_times_give_the_host_back(step_s: float, client_s: float, steps: list[int]) -> None:
    true = Rate(step_s, client_s)
    found = fitted(learnt(HostTimes(), measured(true, *steps)))
    assert found is not None
    if len(set(steps)) > 1 and max(steps) > 1.01 * min(steps):
        for n in (min(steps), max(steps)):
            assert found.seconds(n) == pytest.approx(true.seconds(n), rel=1e-3)
    else:
        assert found.seconds(steps[0]) == pytest.approx(true.seconds(steps[0]), rel=0.02)


def test_one_size_gives_a_ratio_and_no_model_predicts_less_than_nothing() -> None:
    same = fitted(learnt(HostTimes(), measured(Rate(0.1, 2.0), 20, 20, 20)))
    assert same == Rate(pytest.approx(0.2))
    falling = [Timed(10, 5.0), Timed(20, 4.0), Timed(40, 3.0)]
    steep = [Timed(10, 1.0), Timed(20, 4.0), Timed(40, 12.0)]  # a line through them begins below 0
    for points in (falling, steep):
        found = fitted(learnt(HostTimes(), points))
        assert found is not None
        assert found.step_s > 0.0
        assert found.client_s >= 0.0


def test_a_new_speed_outweighs_the_old_one_within_two_rounds_and_an_idle_round_forgets_nothing() -> None:
    times = HostTimes()
    for _ in range(10):
        times = learnt(times, measured(Rate(0.1), 10, 20, 40))
    assert times.count == pytest.approx(4.0, rel=1e-4)  # 3 / (1 - 1/4)
    one = learnt(times, measured(Rate(0.3), 10, 20, 40))
    two = learnt(one, measured(Rate(0.3), 10, 20, 40))
    assert [fitted(t).step_s for t in (one, two)] == [  # type: ignore[union-attr]
        pytest.approx(0.25, rel=1e-3),
        pytest.approx(0.2875, rel=1e-3),
    ]
    assert learnt(two, []) == two
    assert learnt(two, [Timed(0, 1.0), Timed(5, 0.0)]) == two  # no work, or a clock that did not move


def test_a_host_that_was_not_measured_is_taken_for_the_median_and_all_are_alike_at_first() -> None:
    known = {f"h{n}": learnt(HostTimes(), measured(Rate(0.1 * n, 1.0 * n), 10, 30)) for n in (1, 2, 5)}
    found = rates({**known, "new": HostTimes()})
    assert found["new"].step_s == pytest.approx(0.2)
    assert found["new"].client_s == pytest.approx(2.0)
    assert rates({"a": HostTimes(), "b": HostTimes()}) == {"a": Rate(1.0), "b": Rate(1.0)}


# ---------------------------------------------------------------- assignment


def best(given_tasks: list[Task], hosts: dict[str, Rate]) -> float:
    """The earliest end of all assignments."""
    ends = []
    for choice in product(sorted(hosts), repeat=len(given_tasks)):
        end = dict.fromkeys(hosts, 0.0)
        for task, host in zip(given_tasks, choice, strict=True):
            end[host] += hosts[host].seconds(task.steps)
        ends.append(max(end.values()))
    return min(ends)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 5.0)), min_size=1, max_size=3),
)
def test_no_assignment_ends_before_the_bound_and_this_one_soon_after_the_best(
    steps: list[int], hosts: list[tuple[float, float]]
) -> None:
    fleet = {f"h{at}": Rate(*rate) for at, rate in enumerate(hosts)}
    given_tasks = tasks(*steps)
    found = assign(given_tasks, fleet)
    earliest = best(given_tasks, fleet)
    assert once_each(found, given_tasks)
    assert found.bound_s <= earliest * (1 + 1e-12)
    assert earliest <= found.makespan_s * (1 + 1e-12)
    assert found.makespan_s <= 2.0 * earliest * (1 + 1e-12)


def test_equal_arguments_give_equal_assignments_and_ties_go_by_name() -> None:
    given_tasks, fleet = tasks(5, 5, 5, 5), {"b": Rate(1.0), "a": Rate(1.0)}
    found = assign(given_tasks, fleet)
    assert found.clients == {"a": ("c00", "c02"), "b": ("c01", "c03")}
    assert found == assign(given_tasks[::-1], dict(reversed(fleet.items())))
    assert found.end_s == {"a": 10.0, "b": 10.0}
    assert found.steps == {"a": 10, "b": 10}


def test_hosts_that_are_busy_begin_later() -> None:
    """Clients of a host that was lost, dealt to those that are at work."""
    found = assign(tasks(10, 10, 10, 10), {"a": Rate(1.0), "b": Rate(1.0)}, {"a": 20.0})
    assert found.clients == {"a": ("c02",), "b": ("c00", "c01", "c03")}
    assert found.end_s == {"a": 30.0, "b": 30.0}
    assert found.bound_s == 30.0
    assert assign([], {"a": Rate(1.0)}, {"a": 3.0}).makespan_s == 3.0


def test_a_state_stays_unless_moving_it_wins_more_than_it_costs() -> None:
    fleet = {"a": Rate(1.0), "b": Rate(1.0)}
    stays = [Task(f"c{at}", 10, "a", 5.0) for at in range(4)]
    found = assign(stays, fleet)
    assert [len(found.clients[host]) for host in "ab"] == [3, 1]  # a second one at b would end at 30 as well
    assert (found.moved, found.end_s) == (1, {"a": 30.0, "b": 15.0})
    dear = [Task(f"c{at}", 10, "a", 31.0) for at in range(4)]
    assert assign(dear, fleet).clients == {"a": ("c0", "c1", "c2", "c3"), "b": ()}
    gone = [Task("c", 10, "lost", 5.0)]
    assert assign(gone, fleet).end_s == {"a": 15.0, "b": 0.0}
    settled = [Task(f"c{at}", 10, "ab"[at % 2], 1.0) for at in range(6)]
    assert assign(settled, fleet).moved == 0


def test_data_that_cannot_move_stay_and_without_their_host_the_client_is_named() -> None:
    fleet = {"a": Rate(10.0), "b": Rate(1.0)}
    fixed = [Task(f"c{at}", 10, "a", inf) for at in range(3)]
    assert assign([*fixed, *tasks(5)], fleet).clients == {"a": ("c0", "c1", "c2"), "b": ("c00",)}
    with pytest.raises(UsageError, match="'lost' has left; only it has the data of client 'c'"):
        assign([Task("c", 10, "lost", inf)], fleet)
    with pytest.raises(UsageError, match="3 clients and no host"):
        assign(fixed, {})


def test_an_assignment_says_why() -> None:
    fleet = {"a": Rate(0.01, 0.5), "b": Rate(0.02)}
    found = assign([*tasks(1000, 400), Task("d", 100, "b", 0.1)], fleet)
    text = explained(found, fleet)
    assert "a: 1 clients, 1,000 steps at 10 ms + 0.5 s a client, ends at 10.5 s" in text
    assert "b: 2 clients, 500 steps at 20 ms, ends at 10 s" in text
    assert text.endswith("x the lower bound, 0 clients away from their state")


def test_a_bound_without_clients_is_no_time() -> None:
    assert lower_bound([], {"a": Rate(1.0)}) == 0.0
