"""Noise that members of a secure round share: what is in every sum that can be opened, and its cost."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy
from atoll.secure import Secure
from strategies.fixed import Accumulator
from strategies.layout import Layout
from strategies.linear import TRAINED
from strategies.privacy.accountant import ORDERS, epsilon_of, planned, round_rdp
from strategies.privacy.private import UNIT, Private, strategy_of
from strategies.privacy.report import plan_words
from strategies.secure.exchange import quorum
from strategies.secure.vector import Encoding, encoding_of, secured
from strategies.values import ClientUpdate
from tests.strategies.secure.exchanges import Run, names

SIZE = 40_000
ARRAYS = {"w": np.zeros(SIZE, np.float32)}
LAYOUT = Layout.of(ARRAYS, {"w"})


def federated(clients: int, **options: Any) -> Federated:
    privacy = Privacy(**{"noise": 0.9, "clip": 0.5, **options})
    return Federated(clients=clients, evaluate_every=0, privacy=privacy, secure=Secure())


def exchange(
    clients: int, lost: Mapping[str, list[str]], value: float = 0.0
) -> tuple[Run, Private, Encoding]:
    """An exchange whose members have contributed ``value`` in each element, with their noise."""
    rule = federated(clients)
    core = secured(strategy_of(rule))
    assert isinstance(core, Private)
    assert rule.secure is not None
    encoding = encoding_of(core, LAYOUT, rule.secure, clients, 10 * clients, {})
    delta = {"w": np.full(SIZE, value, np.float32)}
    run = Run({who: [] for who in names(clients)}, rule.secure, lost)
    run.share()
    words = {}
    for who in run.there("vectors"):
        sums = Accumulator(encoding.grid)
        sums.add(core.contribute(LAYOUT, ClientUpdate(0, 10, 1, delta, {}, {}, {}, who)))
        member = run.members[who]
        found = core.hidden(sums.sums(), member.quorum, member.noise_source())
        words[who] = encoding.words(found)
        again = core.hidden(sums.sums(), member.quorum, member.noise_source())
        np.testing.assert_array_equal(found.arrays[TRAINED]["w"], again.arrays[TRAINED]["w"])
    run.vectors = words
    run.upload()
    run.answer()
    return run, core, encoding


@pytest.mark.parametrize(("clients", "lost"), [(3, 0), (3, 1), (12, 0), (12, 2), (12, 4), (20, 6)])
def test_every_sum_that_can_be_opened_has_the_noise_that_is_accounted(clients: int, lost: int) -> None:
    gone = names(clients)[:lost]
    run, core, encoding = exchange(clients, {"vectors": gone})
    left = clients - lost
    total = encoding.sums(run.opened(), left).arrays[TRAINED]["w"]
    std = float(np.std(total))
    member = core.member_sigma(quorum(clients, Secure().threshold))
    assert std == pytest.approx(member * math.sqrt(left), rel=0.03)
    assert abs(float(np.mean(total))) < 5.0 * std / math.sqrt(SIZE)
    # What is left once one survivor subtracts its own.
    assert member * math.sqrt(left - 1) > core.privacy.noise * UNIT


def test_one_lost_below_the_threshold_opens_nothing() -> None:
    with pytest.raises(Exception, match="survivors; at least 8 are needed"):
        exchange(12, {"vectors": names(12)[:5]})


def test_the_sum_is_the_clipped_contributions_with_noise_on_top() -> None:
    value = 0.5 / math.sqrt(SIZE) * 0.999
    run, core, encoding = exchange(12, {}, value)
    total = encoding.sums(run.opened(), 12).arrays[TRAINED]["w"]
    sigma = core.member_sigma(quorum(12, Secure().threshold)) * math.sqrt(12.0)
    assert float(np.mean(total)) == pytest.approx(12 * value / 0.5 * UNIT, abs=5.0 * sigma / math.sqrt(SIZE))
    large, _, _ = exchange(12, {}, 1e3)
    clipped = encoding.sums(large.opened(), 12).arrays[TRAINED]["w"]
    assert float(np.mean(clipped)) == pytest.approx(
        12 * UNIT / math.sqrt(SIZE), abs=5.0 * sigma / math.sqrt(SIZE)
    )


def test_no_two_members_or_exchanges_draw_the_same_noise() -> None:
    run, _, _ = exchange(3, {})
    other, _, _ = exchange(3, {})
    drawn = [run.members[who].noise_source()(64) for who in names(3)]
    drawn += [other.members[who].noise_source()(64) for who in names(3)]
    assert len(set(drawn)) == 6


# ---------------------------------------------------------------- what it costs


def discrete(sigma: float, reach: int) -> np.ndarray:
    values = np.arange(-reach, reach + 1.0)
    found = np.exp(-(values**2) / (2.0 * sigma**2))
    return found / found.sum()


@pytest.mark.parametrize(("unit", "noise", "members"), [(4, 1.0, 2), (4, 1.0, 6), (8, 2.0, 3), (16, 0.7, 8)])
def test_a_sum_of_discrete_gaussians_diverges_no_more_than_is_charged(
    unit: int, noise: float, members: int
) -> None:
    """The sum is no discrete Gaussian. On grids a million times as coarse as ours its own divergence between
    neighbours, a contribution and its opposite, still is within the charge."""
    sigma = math.ceil(noise * unit / math.sqrt(members)) + 1
    reach = 14 * sigma
    total = discrete(sigma, reach)
    for _ in range(members - 1):
        total = np.convolve(total, discrete(sigma, reach))
    shift = 2 * unit
    one, other = total[shift:], total[:-shift]
    held = (one > 1e-290) & (other > 1e-290)
    charged = round_rdp(noise, 0.0)
    for order in (2, 3, 8):
        logs = order * np.log(one[held]) - (order - 1) * np.log(other[held])
        most = float(logs.max())
        divergence = (most + math.log(float(np.exp(logs - most).sum()))) / (order - 1)
        assert divergence <= charged[order]


def test_the_excess_of_a_sum_over_a_discrete_gaussian_is_less_than_what_members_add_on_top() -> None:
    """tau d of Kairouz 2021 against the share 1 / s of each order's divergence, at the least noise, the most
    members and 2^40 weights; in logarithms."""
    for members in (2, 4096):
        sigma = math.ceil(0.05 * UNIT / math.sqrt(members)) + 1
        log_tau_d = math.log(10.0 * members) - (math.pi * sigma) ** 2 + 40 * math.log(2.0)
        log_saved = math.log(4.0 / (2.0 * 1e4**2)) - math.log(sigma)
        assert log_tau_d < log_saved - 1e9


def test_epsilon_is_dp_accountings_for_the_variance_that_is_there() -> None:
    """dp-accounting 0.6.0, GaussianDpEvent(z / 2) under REPLACE_ONE: 10 rounds of z = 3."""
    privacy = Privacy(noise=3.0)
    core = strategy_of(federated(20, noise=3.0))
    assert isinstance(core, Private)
    least = quorum(20, Secure().threshold)
    there = core.member_sigma(least) * math.sqrt(least - 1) / UNIT
    assert there == pytest.approx(3.0, rel=1e-6)
    assert there > 3.0
    assert planned(privacy, 10) == pytest.approx(11.468358, rel=1e-5)
    accounting: Any = pytest.importorskip("dp_accounting")
    rdp: Any = importlib.import_module("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(list(ORDERS), accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(accounting.GaussianDpEvent(there / 2.0), 10)
    ours = epsilon_of({order: 10 * each for order, each in round_rdp(3.0, 0.0).items()}, 1e-5)[0]
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-5)
    assert ours >= accountant.get_epsilon(1e-5)


# ---------------------------------------------------------------- settings and words


def test_the_words_say_whom_the_bound_trusts() -> None:
    words = plan_words(federated(20), 10)
    assert "-DP at most for 10 rounds" in words
    assert "any contribution replaced, 20 clients a round without amplification" in words
    assert "against a coordinator that lies about who dropped out, and one member that helps it" in words
    assert "members whom the coordinator makes up" in words
    assert "not covered: the coordinator itself" not in words


@pytest.mark.parametrize(
    ("options", "why"), [({"sampling": 0.1}, "amplifies nothing"), ({"adaptive": 0.5}, "is not built")]
)
def test_what_is_not_proven_beside_masks_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        federated(20, **options)


def test_a_sum_of_one_member_has_no_noise_of_others() -> None:
    core = strategy_of(federated(20))
    assert isinstance(core, Private)
    with pytest.raises(UsageError, match="at least 2 must be left"):
        core.member_sigma(1)
