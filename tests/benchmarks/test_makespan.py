"""The promises of the makespan benchmark on fewer trials, in simulated time."""

from __future__ import annotations

from benchmarks import makespan


def test_settled_rounds_end_near_the_bound_and_well_before_an_equal_split() -> None:
    found = makespan.settled(seed=1, trials=6)
    assert found["over_bound"] <= 1.06
    assert found["over_equal"] >= 1.4
    assert found["perfect"] <= found["over_bound"]


def test_a_slowed_host_costs_one_round_and_is_known_within_four() -> None:
    found = makespan.slowed(seed=1, trials=6)
    assert found["rounds"][0] > 2.0  # else nothing was slow
    assert found["rounds_to_recover"] <= 4
    assert found["rounds"][-1] < 1.1


def test_fewer_states_move_and_rounds_end_sooner_than_without_regard_to_them() -> None:
    found = makespan.affinity(seed=1, trials=6)
    assert found["moved"] < 0.4 * found["blind_moved"]
    assert found["over_bound"] < found["blind_over_bound"]


def test_many_clients_are_each_assigned_once() -> None:
    found = makespan.large(seed=1, clients=2000)
    assert found["8_hosts_over_bound"] < 1.01
