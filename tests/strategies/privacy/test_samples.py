"""What noised local steps cost a single sample."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.federated import Federated
from atoll.privacy import Privacy, SamplePrivacy
from coordinator.federated.checks import check_federated
from protos import convert
from strategies.privacy.samples import Charge, charge_of, epsilon, sample_words
from tests.coordinator.federated import test_driver
from tests.strategies.privacy.golden import SAMPLES


def test_epsilon_is_dp_accountings_for_the_steps_of_all_rounds() -> None:
    assert len(SAMPLES) == 5
    for noise, samples, batch, steps, rounds, delta, expected in SAMPLES:
        charge = charge_of(SamplePrivacy(noise), samples, batch, steps)
        assert epsilon([charge.times(rounds)], delta) == pytest.approx(expected, rel=1e-5)
        assert epsilon([charge] * rounds, delta) == pytest.approx(expected, rel=1e-5)


def test_charges_of_jobs_on_the_same_data_add_up_and_nothing_costs_nothing() -> None:
    one, other = Charge(1.0, 0.1, 30), Charge(2.0, 0.3, 10)
    assert epsilon([], 1e-5) == epsilon([one.times(0)], 1e-5) == 0.0
    both = epsilon([one, other], 1e-5)
    assert both > max(epsilon([one], 1e-5), epsilon([other], 1e-5))
    assert both < epsilon([one], 1e-5) + epsilon([other], 1e-5)
    assert charge_of(SamplePrivacy(1.0), 5, 20, 3).rate == 1.0  # fewer samples than a batch
    with pytest.raises(ValueError, match="at rate 0"):
        Charge(1.0, 0.0, 1)


def test_the_words_have_the_bound_the_unit_and_whom_they_trust() -> None:
    words = sample_words(SamplePrivacy(1.1, clip=0.5), Charge(1.1, 0.02, 10), 5)
    assert words.startswith("(1.27, 1e-05)-DP at most for 5 updates of 10 steps: unit one sample")
    assert "its gradient clipped to 0.5" in words
    assert "it trusts nobody else" in words


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"evaluate_every": 1}, "figures of their samples"),
        ({"privacy": Privacy(noise=1.0), "clients": 4}, "different units"),
    ],
)
def test_settings_that_would_show_samples_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Federated(**{"evaluate_every": 0, "sample_privacy": SamplePrivacy(1.0), **options})


def test_strategies_that_send_more_than_noised_gradients_made_are_refused() -> None:
    made_of = test_driver.spec()
    for strategy, why in (("scaffold", "is not proven"), ("fedavg", "")):
        rule = Federated(strategy, evaluate_every=0, sample_privacy=SamplePrivacy(1.0))
        if why:
            with pytest.raises(UsageError, match=why):
                check_federated(rule, made_of.training)
        else:
            check_federated(rule, made_of.training)


def test_every_field_of_sample_privacy_travels() -> None:
    made_of = test_driver.spec()
    assert made_of.federated is not None
    rule = Federated(evaluate_every=0, sample_privacy=SamplePrivacy(1.3, 0.7, 1e-6))
    whole = replace(made_of, federated=replace(made_of.federated, rule=rule))
    assert convert.from_proto(convert.to_proto(whole)) == whole
    assert len(fields(SamplePrivacy)) == 3
