"""Exchange: how many ranks it waits for; ExchangeRound: draws that are the same everywhere."""

from __future__ import annotations

import pytest

from atoll.errors import PlanError, UsageError
from atoll.exchange import (
    GOSSIP_RULES,
    GRADIENT_RULES,
    LOCAL_RULES,
    MOST_PEERS,
    Content,
    Exchange,
    ExchangeRound,
    PairTable,
    check_exchange,
    wanted_exchange,
)
from atoll.job import Optimizer, OptimizerName, ParamGroup, TrainingSpec
from strategies.exchanges.catalogue import EXCHANGES


@pytest.mark.parametrize(
    ("quorum", "ranks", "awaited"), [(1.0, 5, 5), (0.5, 4, 2), (0.5, 5, 3), (0.07, 100, 7), (0.001, 4, 1)]
)
def test_a_quorum_is_at_least_its_share_of_the_ranks(quorum: float, ranks: int, awaited: int) -> None:
    assert Exchange(quorum=quorum).awaited(ranks) == awaited


def test_draws_depend_on_seed_round_and_purpose_alone() -> None:
    at = ExchangeRound(3, (0, 1), seed=5)
    assert at.draw_seed("mask") == ExchangeRound(3, (0, 7), seed=5, weights=(1.0, 2.0)).draw_seed("mask")
    others = [ExchangeRound(4, (0, 1), 5), ExchangeRound(3, (0, 1), 6)]
    assert len({at.draw_seed("mask"), at.draw_seed("1 2"), *(one.draw_seed("mask") for one in others)}) == 4


def test_periods_of_local_steps_end_where_the_period_divides_the_steps_and_with_the_last() -> None:
    exchange = Exchange("diloco", every=4)
    assert [exchange.last_step(step, 10) for step in range(10)] == [3] * 4 + [7] * 4 + [9] * 2
    assert [exchange.first_step(step) for step in range(10)] == [0] * 4 + [4] * 4 + [8] * 2
    assert [exchange.round_of(last) for last in (3, 7, 9)] == [0, 1, 2]
    assert [exchange.contributed_after(last) for last in (3, 7, 9)] == [4, 8, 10]
    for step in range(10):
        assert Exchange("sum").first_step(step) == Exchange("sum").last_step(step, 10) == step


def test_a_result_that_is_used_later_ends_its_period_later() -> None:
    exchange = Exchange("streaming_diloco", every=4, delay=2, fragments=2)
    lasts = [exchange.last_step(step, 12) for step in range(12)]
    assert lasts == [5] * 6 + [9] * 4 + [11] * 2
    assert [exchange.first_step(step) for step in range(12)] == [0] * 6 + [6] * 4 + [10] * 2
    assert [exchange.round_of(last) for last in (5, 9, 11)] == [0, 1, 2]
    assert [exchange.contributed_after(last) for last in (5, 9)] == [4, 8]
    assert exchange.contributed_after(11) == 12  # cut short: contributed at the end


def test_local_rules_are_those_that_exchange_changes_or_models() -> None:
    def of(*contents: Content) -> set[str]:
        return {name for name, facts in EXCHANGES.items() if facts.content in contents}

    assert of(Content.DELTA, Content.MODEL) == LOCAL_RULES
    assert of(Content.MODEL) == GOSSIP_RULES


@pytest.mark.parametrize(("rule", "steps"), [("diloco", 50), ("saps", 1), ("swarm", 5), ("wagma", 1)])
def test_a_rule_has_a_period_of_its_own(rule: str, steps: int) -> None:
    exchange = wanted_exchange(rule, 0)
    assert exchange is not None
    assert exchange.every == steps


@pytest.mark.parametrize("wrong", [(-1.0,), (float("nan"),), (1.0,) * (MOST_PEERS**2 + 1)])
def test_a_table_of_pairs_has_rates_and_a_bound(wrong: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="pairs"):
        check_exchange(Exchange("saps", pairs=PairTable(wrong)))


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("exact", None),
        ("auto", None),
        ("diloco", Exchange("diloco", every=48)),
        ("diloco:int8_block", Exchange("diloco", every=48, codec="int8_block")),
        ("streaming_diloco", Exchange("streaming_diloco", every=12, fragments=4, delay=5)),
        ("saps", Exchange("saps", every=48, ratio=100.0)),
        ("saps:20", Exchange("saps", every=48, ratio=20.0)),
        ("swarm", Exchange("swarm", every=48)),
        ("sparseloco:50", Exchange("sparseloco", every=48, ratio=50.0)),
    ],
)
def test_a_job_names_its_exchange_in_a_word(how: str, found: Exchange | None) -> None:
    assert wanted_exchange(how, 48) == found


def test_a_rule_of_gradients_exchanges_those_of_every_step_in_its_codec() -> None:
    exchange = wanted_exchange("mean:int8_block", 0)
    assert exchange == Exchange("mean", codec="int8_block")
    assert exchange.keeps
    assert not exchange.local
    assert not Exchange().keeps
    assert {EXCHANGES[name].content for name in GRADIENT_RULES} == {Content.GRADIENT}
    training = TrainingSpec(steps=1, n_micro=2, exchange="mean:int8_block")
    assert (training.local_exchange, training.gradient_exchange) == (None, exchange)


@pytest.mark.parametrize(("how", "ratio"), [("powersgd", 16.0), ("acp_sgd:8", 8.0), ("gtopk", 100.0)])
def test_a_rule_of_factors_or_of_few_elements_has_a_ratio(how: str, ratio: float) -> None:
    assert wanted_exchange(how, 0) == Exchange(how.partition(":")[0], ratio=ratio)


@pytest.mark.parametrize(
    ("how", "every"),
    [("mean", 0), ("mean:auto", 0), ("mean:int8_block", 5), ("acp_sgd:fp16", 0), ("powersgd:0.5", 0)],
)
def test_a_rule_of_gradients_needs_a_codec_and_has_no_steps_of_its_own(how: str, every: int) -> None:
    with pytest.raises((UsageError, PlanError)):
        wanted_exchange(how, every)


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(),
        Optimizer(OptimizerName.SGD, momentum=0.9),
        Optimizer(OptimizerName.SGD, clip_norm=1.0),
        Optimizer(OptimizerName.SGD, groups=(ParamGroup(("w",), optimizer=OptimizerName.ADAMW),)),
    ],
)
def test_signs_go_through_plain_sgd_alone(optimizer: Optimizer) -> None:
    with pytest.raises(UsageError, match="sgd without momentum"):
        TrainingSpec(steps=1, n_micro=2, exchange="demo", optimizer=optimizer)
    assert (
        TrainingSpec(steps=1, n_micro=2, exchange="demo:50", optimizer=Optimizer(OptimizerName.SGD)).seed == 0
    )


@pytest.mark.parametrize("how", ["wagma:50", "swarm:int8_block"])
def test_what_gossip_does_not_have_is_refused(how: str) -> None:
    with pytest.raises(UsageError, match="nothing to set"):
        wanted_exchange(how, 50)


@pytest.mark.parametrize("how", ["eager", "nonsense", ""])
def test_a_rule_that_no_worker_runs_is_refused(how: str) -> None:
    with pytest.raises(UsageError, match="workers run"):
        wanted_exchange(how, 50)
