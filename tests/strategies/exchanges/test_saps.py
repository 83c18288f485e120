"""SAPS-PSGD: pairs average at a mask of the seed, and a round counts for both or for neither."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.exchange import Exchange, ExchangeRound
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from strategies.exchanges.saps import SapsPsgd
from tests.inprocess.exchange import Faults, damaged, later, run_round
from worker.exchange.round import Message

SIZE, RATIO = 5000, 20.0
RULE = make_rule(Exchange("saps", ratio=RATIO))
FLAT = Flat(((40, 100), (1000,)), ("w", "b"))
RANKS = (0, 1, 2, 3)
PAIRS = [(0, 3), (1, 2)]


def models() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {rank: torch.randn(SIZE, generator=generator) for rank in RANKS}


def mask_of(at: ExchangeRound) -> torch.Tensor:
    assert isinstance(RULE, SapsPsgd)
    return RULE.mask(FLAT, at)


def test_a_pair_averages_at_the_mask_and_nowhere_else() -> None:
    own, at = models(), ExchangeRound(4, RANKS, seed=1)
    mask = mask_of(at)
    assert SIZE / RATIO * 0.7 < len(mask) < SIZE / RATIO * 1.3
    outside = torch.ones(SIZE, dtype=torch.bool)
    outside[mask] = False
    answers = run_round(RULE, own, dict.fromkeys(RANKS, FLAT), at, PAIRS)
    for one, other in PAIRS:
        for rank in (one, other):
            assert torch.equal(answers[rank].result[mask], (own[one] + own[other])[mask] / 2)
            assert torch.equal(answers[rank].result[outside], own[rank][outside])
            assert answers[rank].receipts[0].sent_bytes < 4 * len(mask) + 100
    before, after = sum(own.values()), sum(answer.result for answer in answers.values())
    assert torch.allclose(before, after, atol=1e-5)  # type: ignore[arg-type]


def test_the_mask_follows_from_seed_and_round_alone() -> None:
    first = mask_of(ExchangeRound(4, RANKS, seed=1))
    assert torch.equal(first, mask_of(ExchangeRound(4, (0, 3), seed=1)))
    assert not torch.equal(first, mask_of(ExchangeRound(5, RANKS, seed=1)))
    assert not torch.equal(first, mask_of(ExchangeRound(4, RANKS, seed=2)))


def test_masks_of_many_rounds_reach_every_element_alike() -> None:
    counts = torch.zeros(SIZE)
    rounds = 400
    for number in range(rounds):
        counts[mask_of(ExchangeRound(number, RANKS, seed=1))] += 1
    assert float(counts.mean()) == pytest.approx(rounds / RATIO, rel=0.02)
    assert 0.9 < float(counts.var()) / (rounds / RATIO) < 1.1  # of independent draws: 1 - 1/c


def test_a_tensor_has_the_same_mask_whatever_stands_beside_it() -> None:
    """So slices of the model, which cuts decide, have the bits of the whole."""
    assert isinstance(RULE, SapsPsgd)
    at = ExchangeRound(3, RANKS, seed=1)
    alone, beside = Flat(((1000,),), ("b",)), Flat(((1000,), (40, 100)), ("b", "w"))
    here = mask_of(at)
    bias = here[here >= 4000] - 4000
    assert torch.equal(RULE.mask(alone, at), bias)
    assert torch.equal(RULE.mask(beside, at)[: len(bias)], bias)


def test_a_tensor_smaller_than_the_ratio_is_drawn_as_often_as_others() -> None:
    assert isinstance(RULE, SapsPsgd)
    small, rounds = Flat(((7,),), ("b",)), 3000
    drawn = sum(len(RULE.mask(small, ExchangeRound(number, RANKS, seed=1))) for number in range(rounds))
    assert drawn == pytest.approx(7 * rounds / RATIO, rel=0.1)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_a_round_counts_for_both_of_a_pair_or_for_neither(lost: bool) -> None:
    def alter(message: Message) -> Message | None:
        if message.source != 3:
            return message
        return None if lost else damaged(message)

    own, at = models(), ExchangeRound(0, RANKS, seed=1)
    answers = run_round(RULE, own, dict.fromkeys(RANKS, FLAT), at, PAIRS, faults=Faults(alter=alter))
    assert not answers[0].receipts[0].complete
    assert answers[0].receipts[0].faults
    for rank in (0, 3):
        assert torch.equal(answers[rank].result, own[rank])
    for rank in (1, 2):
        assert answers[rank].receipts[0].complete
        assert not torch.equal(answers[rank].result, own[rank])


def test_a_late_result_keeps_what_the_model_learnt_in_the_meantime() -> None:
    own, at = models(), ExchangeRound(0, RANKS, seed=1)
    answer = run_round(RULE, own, dict.fromkeys(RANKS, FLAT), at, PAIRS)[0]
    step = torch.full((SIZE,), 0.25)
    moved = later(RULE, answer, own[0] + step)
    assert torch.allclose(moved.result, answer.result + step, atol=1e-6)


def test_repeated_rounds_bring_models_together_around_their_mean() -> None:
    rule = make_rule(replace(RULE.exchange, ratio=4.0))
    own = models()
    mean = torch.stack(list(own.values())).mean(0)
    for number in range(60):
        pairs = PAIRS if number % 2 else [(0, 1), (2, 3)]
        answers = run_round(
            rule, own, dict.fromkeys(RANKS, FLAT), ExchangeRound(number, RANKS, seed=1), pairs
        )
        own = {rank: answer.result for rank, answer in answers.items()}
    assert max(float((model - mean).square().mean()) for model in own.values()) < 0.01
