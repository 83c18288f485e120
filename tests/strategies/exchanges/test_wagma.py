"""WAGMA-SGD: equal models after log_S P rounds, and what is late neither waits nor gets lost."""

from __future__ import annotations

import pytest
import torch

from atoll.collective import group_size
from atoll.exchange import Exchange, ExchangeRound
from strategies.exchanges import make_rule
from tests.inprocess.exchange import Faults, later, run_round
from tests.inprocess.peers import default_groups
from tests.strategies.exchanges.butterfly import butterfly_groups

SIZE = 1000
RULE = make_rule(Exchange("wagma"))
RANKS = (0, 1, 2, 3)
AT = ExchangeRound(0, RANKS, seed=1)


def models(ranks: int = 4) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {rank: torch.randn(SIZE, generator=generator) for rank in range(ranks)}


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (8, 2), (8, 4), (16, 4), (64, 8)])
def test_spread_is_exactly_zero_after_log_s_p_rounds(ranks: int, size: int) -> None:
    own, order = models(ranks), tuple(range(ranks))
    mean = torch.stack(list(own.values())).mean(0)
    rounds = -(-(ranks.bit_length() - 1) // (size.bit_length() - 1))
    for number in range(rounds):
        assert not all(torch.equal(own[0], model) for model in own.values())
        at = ExchangeRound(number, order)
        answers = run_round(RULE, own, dict.fromkeys(order), at, butterfly_groups(order, size, number))
        own = {rank: answer.result for rank, answer in answers.items()}
    assert all(torch.equal(own[0], model) for model in own.values())
    assert torch.allclose(own[0], mean, atol=1e-5)


def test_a_late_rank_merges_its_fresh_model_as_one_more() -> None:
    own = models()
    answers = run_round(RULE, own, dict.fromkeys(RANKS), AT, [RANKS])
    total = own[0] + own[1] + own[2] + own[3]
    assert torch.equal(answers[0].result, total / 4)
    fresh = own[3] + 0.5
    merged = later(RULE, answers[3], fresh).result
    assert torch.equal(merged, (total + fresh) / 5)


def test_the_mean_is_of_those_that_came() -> None:
    own = models()
    faults = Faults(dead=frozenset({1}))
    answers = run_round(RULE, own, dict.fromkeys(RANKS), AT, [RANKS], faults=faults)
    mean = (own[0] + own[2] + own[3]) / 3
    quarter = SIZE // 4
    for rank in (0, 2, 3):
        result = answers[rank].result
        assert torch.allclose(result[:quarter], mean[:quarter], atol=1e-6)
        assert torch.equal(result[quarter : 2 * quarter], own[rank][quarter : 2 * quarter])  # its owner died
        assert not answers[rank].receipts[0].complete


def test_groups_are_near_the_root_and_everybody_meets_every_tenth_round() -> None:
    assert [group_size(ranks) for ranks in (2, 4, 8, 16, 64, 256)] == [2, 2, 4, 4, 8, 16]
    sizes = [len(default_groups(Exchange("wagma"), range(64), 0, number)[0]) for number in range(20)]
    assert sizes == ([8] * 9 + [64]) * 2


@pytest.mark.parametrize(("total", "size"), [(4, 2), (16, 4), (64, 8), (8, 4), (32, 8)])
def test_butterfly_groups_spread_everything_in_log_rounds(total: int, size: int) -> None:
    knows = {rank: {rank} for rank in range(total)}
    rounds = -(-(total.bit_length() - 1) // (size.bit_length() - 1))
    for number in range(5, 5 + rounds):
        groups = butterfly_groups(range(total), size, number)
        assert sorted(r for group in groups for r in group) == list(range(total))
        for group in groups:
            assert len(group) == size
            heard = set().union(*(knows[rank] for rank in group))
            for rank in group:
                knows[rank] = heard
    assert all(heard == set(range(total)) for heard in knows.values())
