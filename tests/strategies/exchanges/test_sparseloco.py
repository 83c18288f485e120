"""SparseLoCo: a few values a chunk take the outer step, the rest waits and decays, all ranks go on alike."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from atoll.errors import PlanError
from atoll.exchange import Exchange, ExchangeRound
from atoll.opdag import TensorMeta
from compressors.contrib.sparse.sizes import chunk_kept, chunk_size
from strategies.exchanges import exchange_facts, make_rule
from tests.strategies.exchanges.rounds import Rounds, gradients, same_bits

SIZE = 4 * 4096
RATIO = 100.0
RULE = make_rule(Exchange("sparseloco", every=20, ratio=RATIO))
META = TensorMeta((SIZE,), "float32")


def moved(ranks: int, seed: int, start: Tensor) -> dict[int, Tensor]:
    """Models after local steps from ``start``."""
    return {rank: start - 0.01 * change for rank, change in gradients(ranks, SIZE, seed).items()}


def test_the_outer_step_is_along_the_mean_of_what_was_sent() -> None:
    rounds = Rounds(RULE, 3, SIZE)
    own = moved(3, 0, torch.zeros(SIZE))
    answers = rounds.play(own)
    assert same_bits(answers)
    residuals = [rounds.states[rank].residual for rank in range(3)]
    sent = [-own[rank] - residuals[rank] for rank in range(3)]
    assert torch.allclose(answers[0].result, -sum(sent) / 3, atol=1e-6)
    assert torch.equal(answers[0].result, rounds.states[2].outer)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_steps_and_residuals_add_up_with_what_decayed(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    model, brought = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(4):
        left = [state.residual for state in rounds.states.values() if state.residual is not None]
        own = moved(ranks, number, model)
        brought += sum(model - own[rank] for rank in range(ranks)) - 0.05 * sum(left, torch.zeros(SIZE))
        answers = rounds.play(own, number, pick=random.Random(number).randrange)
        assert same_bits(answers)
        model = answers[0].result
    left = sum(state.residual for state in rounds.states.values())
    assert torch.allclose(-ranks * model + left, brought, atol=1e-5)


def test_a_fixed_number_of_each_chunk_travels_at_two_bits_a_value() -> None:
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(moved(4, 0, torch.zeros(SIZE)))
    assert len(rounds.messages) == 4 * 3
    kept, expected = chunk_kept(META, RATIO), chunk_size(META, RATIO)
    assert all(len(m.packet.payload) == pytest.approx(expected, rel=0.05) for m in rounds.messages)
    changed = (answers[0].result != 0).view(4, 4096).sum(1)
    assert bool((changed >= kept - 1).all())
    assert bool((changed <= 4 * kept).all())


def test_the_residual_decays() -> None:
    rounds = Rounds(RULE, 2, SIZE)
    answers = rounds.play(moved(2, 0, torch.zeros(SIZE)))
    part = RULE.contribute(answers[1].result, rounds.states[1], ExchangeRound(1, (0, 1)), 1)
    assert torch.allclose(part.vector.values, 0.95 * rounds.states[1].residual)


@pytest.mark.parametrize("dead", [frozenset(), frozenset({3})])
def test_after_a_round_that_counts_for_nobody_all_go_on_from_their_own_model(dead: frozenset[int]) -> None:
    rounds = Rounds(RULE, 4, SIZE)
    before = dict(rounds.states)
    own = moved(4, 0, torch.zeros(SIZE))
    answers = rounds.play(own, lose=lambda m: (m.source, m.target) == (1, 2), dead=dead)
    assert not all(answer.receipts[0].complete for answer in answers.values())
    assert all(torch.equal(answer.result, own[rank]) for rank, answer in answers.items())
    assert all(rounds.states[rank] is before[rank] for rank in answers)


@pytest.mark.parametrize("wrong", [Exchange("sparseloco", codec="topk"), Exchange("sparseloco", fragments=2)])
def test_settings_of_other_rules_are_refused(wrong: Exchange) -> None:
    with pytest.raises(PlanError):
        exchange_facts("sparseloco").check(wrong)
