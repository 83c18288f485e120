"""The accountant against dp-accounting, and the budget."""

import importlib
import math
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy
from strategies.privacy.accountant import ORDERS, Spent, epsilon_of, noise_for, planned, round_rdp
from strategies.privacy.private import settled
from strategies.privacy.report import exhausted, plan_words, spent_words
from tests.strategies.privacy.golden import EPSILONS

DELTA = 1e-5


def ours(sampling: float, noise: float, rounds: int, delta: float) -> float:
    one = round_rdp(noise, sampling)
    return epsilon_of({order: rounds * rdp for order, rdp in one.items()}, delta)[0]


def test_epsilon_is_dp_accountings_in_53_settings() -> None:
    assert len(EPSILONS) >= 40
    for sampling, noise, rounds, delta, epsilon in EPSILONS:
        assert ours(sampling, noise, rounds, delta) == pytest.approx(epsilon, rel=1e-5)


def test_epsilon_is_that_of_an_installed_dp_accounting() -> None:
    accounting: Any = pytest.importorskip("dp_accounting")
    rdp: Any = importlib.import_module("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(list(ORDERS))
    accountant.compose(accounting.PoissonSampledDpEvent(0.05, accounting.GaussianDpEvent(1.1)), 40)
    assert ours(0.05, 1.1, 40, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def test_a_fixed_cohort_is_charged_for_twice_the_clip() -> None:
    fixed, whole = round_rdp(3.0, 0.0), round_rdp(1.5, 1.0)
    assert fixed == pytest.approx(whole)
    assert fixed[2] == pytest.approx(4.0 * round_rdp(3.0, 1.0)[2])


def test_sampling_only_ever_helps_and_all_of_it_is_none() -> None:
    for order in (2, 8, 64):
        found = [round_rdp(1.0, q)[order] for q in (0.01, 0.1, 0.5, 0.999, 1.0)]
        assert found == sorted(found)
        assert found[-2] == pytest.approx(found[-1], rel=0.01)


def exact(noise: float, q: float, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Chances of the discrete mechanism's values without a client, and with it at q."""
    sigma = noise * shift
    values = np.arange(-60 * math.ceil(sigma), 60 * math.ceil(sigma) + 1.0)
    without = np.exp(-(values**2) / (2.0 * sigma**2))
    moved = np.exp(-((values - shift) ** 2) / (2.0 * sigma**2))
    without, moved = without / without.sum(), moved / moved.sum()
    return without, (1.0 - q) * without + q * moved


def divergence(one: np.ndarray, other: np.ndarray, order: int) -> float:
    held = (one > 0.0) & (other > 0.0)
    logs = order * np.log(one[held]) - (order - 1) * np.log(other[held])
    most = float(logs.max())
    return (most + math.log(float(np.exp(logs - most).sum()))) / (order - 1)


@pytest.mark.parametrize("noise", [0.5, 0.8, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("q", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("shift", [1, 2, 7])
def test_the_discrete_mechanisms_own_divergence_is_charged_in_both_directions(
    noise: float, q: float, shift: int
) -> None:
    without, with_it = exact(noise, q, shift)
    charged = round_rdp(noise, q)
    for order in (2, 3, 4, 8, 16):
        assert divergence(with_it, without, order) == pytest.approx(charged[order], rel=1e-6, abs=1e-9)
        assert divergence(without, with_it, order) <= charged[order] + 1e-9


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
def test_no_event_of_one_round_is_likelier_than_epsilon_and_delta_allow(noise: float, q: float) -> None:
    without, with_it = exact(noise, q, 3)
    epsilon, _ = epsilon_of(round_rdp(noise, q), DELTA)
    for one, other in ((without, with_it), (with_it, without)):
        assert float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum()) <= DELTA


def test_the_designs_three_figures() -> None:
    assert ours(0.1, 0.8, 50, 5e-4) == pytest.approx(7.60, abs=0.005)
    assert ours(0.1, 1.0, 50, 5e-4) == pytest.approx(4.43, abs=0.005)
    assert ours(0.05, 1.0, 60, 5e-4) == pytest.approx(2.39, abs=0.005)


@pytest.mark.parametrize(("epsilon", "sampling"), [(8.0, 0.1), (2.0, 0.05), (1.0, 0.0), (50.0, 1.0)])
def test_the_noise_of_a_budget_is_the_least_that_keeps_it(epsilon: float, sampling: float) -> None:
    privacy = Privacy(epsilon=epsilon, sampling=sampling)
    noise = noise_for(privacy, 60)
    assert ours(sampling, noise, 60, DELTA) <= epsilon < ours(sampling, noise - 1e-4, 60, DELTA)


def test_a_job_stops_before_the_round_that_would_exceed_its_budget() -> None:
    privacy, spent = Privacy(noise=1.0, epsilon=4.0, sampling=0.1), Spent()
    while not exhausted(privacy, spent):
        spent = spent.after(privacy)
    assert spent.epsilon(DELTA)[0] <= 4.0 < spent.after(privacy).epsilon(DELTA)[0]
    assert spent.rounds > 1
    assert "one more would come to" in exhausted(privacy, spent)
    assert planned(privacy, spent.rounds) == pytest.approx(spent.epsilon(DELTA)[0])
    assert exhausted(Privacy(noise=0.1), spent) == ""  # without a budget it is reported, not stopped


def test_a_budget_below_one_round_is_refused_at_once() -> None:
    rule = Federated(clients=100, evaluate_every=0, privacy=Privacy(noise=0.3, epsilon=1.0))
    with pytest.raises(UsageError, match="the first round alone would spend"):
        settled(rule, 10)
    found = settled(Federated(clients=100, evaluate_every=0, privacy=Privacy(epsilon=1.0)), 10)
    assert found.privacy is not None
    assert found.privacy.noise > 10.0  # twice the clip, no amplification, ten rounds


def test_the_words_say_unit_neighbours_trust_and_what_is_not_covered() -> None:
    rule = Federated(
        clients=100, evaluate_every=0, privacy=Privacy(noise=0.8, epsilon=9.0, delta=5e-4, sampling=0.1)
    )
    spent = Spent()
    assert "nothing released yet" in spent_words(rule, spent)
    assert rule.privacy is not None
    for _ in range(50):
        spent = spent.after(rule.privacy)
    words = spent_words(rule, spent)
    for part in (
        "(7.6, 0.0005)-DP of a budget of 9 after 50 rounds",
        "unit one client, with or without its contribution",
        "Poisson q = 0.1 (100 expected)",
        "noise 0.8",
        "RDP order 3",
        "not covered: the coordinator itself",
    ):
        assert part in words
    assert "(7.6, 0.0005)-DP at most for 50 rounds" in plan_words(rule, 50)
    assert "ends before it would exceed 9" in plan_words(rule, 500)
    assert plan_words(Federated(), 5) == spent_words(Federated(), spent) == ""


def test_no_order_gives_less_than_nothing() -> None:
    assert epsilon_of({2: 0.0}, DELTA)[0] == 0.0
    assert Spent().epsilon(DELTA) == (0.0, 0)
    assert math.isfinite(ours(1e-6, 0.05, 10**6, DELTA))
