"""gTop-k: at most k pairs a hop, and nothing lost: by eviction, odd numbers, lost messages or the dead."""

from __future__ import annotations

import math
import random

import pytest
import torch

from atoll.collective import TOTAL
from atoll.exchange import Exchange, ExchangeRound
from compressors.sparse_sizes import vector_kept
from strategies.exchanges import make_rule
from tests.strategies.exchanges.rounds import Rounds, gradients, same_bits

SIZE, RATIO = 3000, 50.0
KEPT = vector_kept(SIZE, RATIO)
RULE = make_rule(Exchange("gtopk", ratio=RATIO))


@pytest.mark.parametrize("ranks", range(2, 33))
def test_no_rank_receives_more_than_2k_log2_of_p_pairs(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    for number in range(2):
        rounds.play(gradients(ranks, SIZE, seed=number), number)
        assert KEPT <= max(rounds.pairs_received().values()) <= 2 * KEPT * math.ceil(math.log2(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
def test_updates_and_residuals_add_up_to_the_contributions(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    brought, applied = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(6):
        own = gradients(ranks, SIZE, seed=number)
        answers = rounds.play(own, number, pick=random.Random(number).randrange)
        assert same_bits(answers)
        assert all(answer.receipts[0].complete for answer in answers.values())
        assert int((answers[0].result != 0).sum()) <= KEPT
        brought += sum(own.values())
        applied += ranks * answers[0].result
    scale = float(brought.abs().max())
    assert float((applied + sum(rounds.states.values()) - brought).abs().max()) <= 1e-5 * scale


def test_an_entry_evicted_in_one_branch_and_chosen_through_another_stays_with_the_merger() -> None:
    rule = make_rule(Exchange("gtopk", ratio=10.0))
    size = 40
    kept = vector_kept(size, 10.0)
    own = {rank: torch.zeros(size) for rank in range(4)}
    own[0][7] = 5.0
    own[1][:kept] = 9.0  # evicts position 7 at rank 0
    own[2][7] = 60.0
    rounds = Rounds(rule, 4, size)
    answers = rounds.play(own)
    assert answers[3].result[7] == 60.0 / 4
    assert rounds.states[0][7] == 5.0
    assert rounds.states[2][7] == 0.0
    assert torch.equal(4 * answers[0].result + sum(rounds.states.values()), sum(own.values()))


def test_an_entry_that_the_result_did_not_choose_goes_back_to_its_rank() -> None:
    own = gradients(8, SIZE)
    rounds = Rounds(RULE, 8, SIZE)
    answers = rounds.play(own)
    elsewhere = answers[0].result == 0
    for rank in range(8):
        assert torch.equal(rounds.states[rank][elsewhere], own[rank][elsewhere])


def test_weights_add_up_too() -> None:
    weights = (1.0, 2.0, 0.5, 4.0, 1.5)
    own = gradients(5, SIZE)
    rounds = Rounds(RULE, 5, SIZE, weights=weights)
    answers = rounds.play(own)
    left = sum(weight * rounds.states[rank] for rank, weight in enumerate(weights))
    brought = sum(weight * own[rank] for rank, weight in enumerate(weights))
    assert torch.allclose(sum(weights) * answers[0].result + left, brought, atol=1e-4)


@pytest.mark.parametrize("ranks", [4, 5, 8, 11])
@pytest.mark.parametrize("child", [1, 2, 3])
def test_a_part_lost_on_its_way_up_stays_with_its_branch(ranks: int, child: int) -> None:
    own = gradients(ranks, SIZE)
    rounds = Rounds(RULE, ranks, SIZE)
    answers = rounds.play(own, lose=lambda m: m.source == child and m.label != TOTAL)
    receipt = answers[0].receipts[0]
    assert not receipt.complete
    assert child not in receipt.included
    assert same_bits(answers)
    assert torch.equal(rounds.states[child], own[child])
    total = len(receipt.included) * answers[0].result
    assert torch.allclose(total + sum(rounds.states.values()), sum(own.values()), atol=1e-4)


@pytest.mark.parametrize("ranks", [4, 5, 8, 11])
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_the_mass_of_the_living_is_kept_when_a_rank_dies(ranks: int, dead: int) -> None:
    own = gradients(ranks, SIZE)
    rounds = Rounds(RULE, ranks, SIZE)
    answers = rounds.play(own, dead=frozenset({dead}))
    living = [rank for rank in range(ranks) if rank != dead]
    included = {answers[rank].receipts[0].included for rank in living} - {()}
    results = [answers[rank].result for rank in living if answers[rank].receipts[0].included]
    assert all(torch.equal(results[0], other) for other in results)
    total = len(included.pop()) * results[0] if results else torch.zeros(SIZE)
    kept = sum(rounds.states[rank] for rank in living)
    assert torch.allclose(total + kept, sum(own[rank] for rank in living), atol=1e-4)


def test_a_rank_that_the_total_did_not_reach_keeps_all_of_its_own() -> None:
    own = gradients(8, SIZE)
    rounds = Rounds(RULE, 8, SIZE)
    answers = rounds.play(own, lose=lambda m: m.target == 5 and m.label == TOTAL)
    assert answers[5].receipts[0].included == ()
    assert not answers[5].result.any()
    assert torch.equal(rounds.states[5], own[5])
    others = [rank for rank in range(8) if rank != 5]
    assert same_bits({rank: answers[rank] for rank in others})
    # The others hold what the result chose of it: there its work counts twice, and nowhere less than once.
    extra = 8 * answers[0].result + sum(rounds.states.values()) - sum(own.values())
    chosen = answers[0].result != 0
    assert float(extra[~chosen].abs().max()) <= 1e-4
    best = own[5].abs() >= own[5].abs().topk(KEPT).values[-1]
    assert torch.allclose(extra[chosen], torch.where(best, own[5], 0.0)[chosen], atol=1e-4)


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_changes_no_residual() -> None:
    rounds = Rounds(RULE, 5, SIZE)
    rounds.play(gradients(5, SIZE))
    before = dict(rounds.states)
    own = gradients(5, SIZE, seed=1)
    own[3][17] = torch.nan
    answers = rounds.play(own, 1)
    assert all(bool(torch.isnan(answer.result).any()) for answer in answers.values())
    assert all(torch.equal(rounds.states[rank], before[rank]) for rank in before)


def test_a_round_given_up_leaves_everything_in_the_residual() -> None:
    own = gradients(1, SIZE)[0]
    part = RULE.contribute(own, own, ExchangeRound(0, (0, 1)), 0)
    assert torch.equal(RULE.undelivered(part, own), own + own)
