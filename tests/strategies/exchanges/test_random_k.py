"""Random-k: no position travels, packets add up, and what was not drawn or not delivered waits."""

from __future__ import annotations

import random

import pytest
import torch

from atoll.collective import cut, even_shares
from atoll.exchange import Exchange, ExchangeRound
from compressors.random_k import draw_positions
from strategies.exchanges import make_rule
from tests.strategies.exchanges.rounds import Rounds, gradients, same_bits

SIZE, RATIO = 4000, 20.0
RULE = make_rule(Exchange("random_k", ratio=RATIO))


def drawn(number: int) -> torch.Tensor:
    at = ExchangeRound(number, (), seed=11)
    return torch.from_numpy(draw_positions(SIZE, int(SIZE / RATIO), at.draw_seed("random_k")))


def test_the_result_is_the_mean_at_the_drawn_positions_and_zero_elsewhere() -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own, 3)
    mean = (own[0] + own[1] + own[2] + own[3]) / 4
    expected = torch.zeros(SIZE)
    expected[drawn(3)] = mean[drawn(3)]
    assert torch.equal(answers[0].result, expected)
    assert same_bits(answers)
    rest = own[2].clone()
    rest[drawn(3)] = 0.0
    assert torch.equal(rounds.states[2], rest)


def test_every_round_draws_other_positions() -> None:
    assert not torch.equal(drawn(0), drawn(1))
    assert len(drawn(0)) == pytest.approx(SIZE / RATIO, rel=0.4)


def test_only_values_travel() -> None:
    rounds = Rounds(RULE, 5, SIZE)
    answers = rounds.play(gradients(5, SIZE))
    payload = sum(len(m.packet.payload) for m in rounds.messages if m.source == 2)
    kept = len(drawn(0))
    assert payload == pytest.approx(4 * kept * 2 * 4 / 5, abs=4 * 8)
    assert answers[2].receipts[0].sent_bytes <= payload + 120 * 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_updates_and_residuals_add_up_to_the_contributions(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    brought, applied = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(5):
        own = gradients(ranks, SIZE, seed=number)
        answers = rounds.play(own, number, pick=random.Random(number).randrange)
        assert same_bits(answers)
        brought += sum(own.values())
        applied += ranks * answers[0].result
    assert torch.allclose(applied + sum(rounds.states.values()), brought, atol=1e-4)


def test_weights_count_in_the_mean_and_not_in_the_residual() -> None:
    own = gradients(2, SIZE)
    rounds = Rounds(RULE, 2, SIZE, weights=(3.0, 1.0))
    answers = rounds.play(own)
    here = drawn(0)
    assert torch.allclose(answers[0].result[here], ((3 * own[0] + own[1]) / 4)[here], atol=1e-6)
    assert torch.allclose(rounds.states[0][here], torch.zeros(len(here)))


def test_a_lost_part_stays_with_its_rank() -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own, lose=lambda m: (m.source, m.target, m.label) == (1, 3, 1))
    assert not answers[1].receipts[0].complete
    assert same_bits(answers)
    left = sum(rounds.states.values()) + 4 * answers[0].result
    last = drawn(0)[cut(len(drawn(0)), even_shares(4))[3].start :]
    shares = own[0][last] + own[2][last] + own[3][last]
    assert torch.allclose(answers[0].result[last], shares / 3, atol=1e-6)
    assert torch.equal(rounds.states[1][last], own[1][last])
    untouched = torch.ones(SIZE, dtype=torch.bool)
    untouched[last] = False
    assert torch.allclose(left[untouched], sum(own.values())[untouched], atol=1e-5)


def test_with_a_dead_owner_the_living_keep_what_it_should_have_added() -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own, dead=frozenset({2}))
    living = own[0] + own[1] + own[3]
    kept = sum(rounds.states[rank] for rank in (0, 1, 3))
    assert torch.allclose(3 * answers[0].result + kept, living, atol=1e-5)


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_changes_no_residual() -> None:
    rounds = Rounds(RULE, 3, SIZE)
    rounds.play(gradients(3, SIZE))
    before = dict(rounds.states)
    own = gradients(3, SIZE, seed=1)
    hidden = next(at for at in range(SIZE) if at not in set(drawn(1).tolist()))
    own[1][hidden] = torch.inf
    answers = rounds.play(own, 1)
    assert all(bool(torch.isnan(answer.result).any()) for answer in answers.values())
    assert all(torch.equal(rounds.states[rank], before[rank]) for rank in before)


def test_a_round_given_up_leaves_everything_in_the_residual() -> None:
    own = gradients(1, SIZE)[0]
    part = RULE.contribute(own, own, ExchangeRound(0, (0, 1)), 0)
    assert torch.equal(RULE.undelivered(part, own), own + own)
