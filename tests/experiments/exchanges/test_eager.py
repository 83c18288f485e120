"""eager-SGD: zeros for who is not ready, and every gradient counts once, whenever it comes."""

from __future__ import annotations

import random

import pytest
import torch

from atoll.exchange import Exchange, ExchangeRound
from experiments.exchanges import make_rule
from tests.inprocess.exchange import Faults, run_round

SIZE = 1000
RULE = make_rule(Exchange("eager", quorum=0.5))
RANKS = (0, 1, 2, 3)
NOTHING = torch.zeros(SIZE)


def gradients(seed: int = 2) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {rank: torch.randn(SIZE, generator=generator) for rank in RANKS}


def test_who_is_not_ready_contributes_zeros_and_applies_the_result() -> None:
    own = gradients() | {3: NOTHING}
    answers = run_round(RULE, own, dict.fromkeys(RANKS), ExchangeRound(0, RANKS), [RANKS])
    expected = (own[0] + own[1] + own[2]) / 4
    for rank in RANKS:
        assert torch.allclose(answers[rank].result, expected, atol=1e-6)
        assert torch.equal(answers[rank].result, answers[0].result)
        assert answers[rank].state is None
    assert answers[3].receipts[0].sent_bytes < answers[0].receipts[0].sent_bytes  # totals alone


def test_a_late_gradient_joins_the_next_round_once() -> None:
    first, at = gradients(), ExchangeRound(0, RANKS)
    late = RULE.undelivered(RULE.contribute(first[3], None, at, 3), None)
    states = {0: None, 1: None, 2: None, 3: late}
    second = gradients(3)
    answers = run_round(RULE, second, states, ExchangeRound(1, RANKS), [RANKS])
    expected = (sum(second.values()) + first[3]) / 4
    assert torch.allclose(answers[0].result, expected, atol=1e-6)
    assert all(answer.state is None for answer in answers.values())


@pytest.mark.parametrize(("number", "joins"), [(10, True), (11, False)])
def test_a_gradient_is_dropped_beyond_the_age_limit(number: int, joins: bool) -> None:
    late = RULE.undelivered(RULE.contribute(gradients()[3], None, ExchangeRound(0, RANKS), 3), None)
    brought = RULE.contribute(NOTHING, late, ExchangeRound(number, RANKS), 3)
    assert bool(brought.vector.dense().any()) is joins


def test_weights_count_in_the_result_and_not_in_what_is_kept() -> None:
    at = ExchangeRound(0, RANKS, weights=(1.0, 1.0, 1.0, 5.0))
    own = gradients()
    late = RULE.undelivered(RULE.contribute(own[3], None, at, 3), None)
    assert torch.allclose(late.gradient, own[3], atol=1e-6)
    answers = run_round(RULE, own, dict.fromkeys(RANKS), at, [RANKS])
    assert torch.allclose(answers[0].result, (own[0] + own[1] + own[2] + 5 * own[3]) / 8, atol=1e-6)


@pytest.mark.parametrize("codec", ["none", "int8_block", "topk"])
def test_results_and_what_is_kept_are_all_that_was_contributed(codec: str) -> None:
    rule = make_rule(Exchange("eager", codec=codec, ratio=10.0 if codec == "topk" else 1.0))
    drawn = random.Random(5)
    states: dict[int, object] = dict.fromkeys(RANKS)
    brought, applied = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(8):
        own = {
            rank: NOTHING if drawn.random() < 0.3 else gradient
            for rank, gradient in gradients(number).items()
        }
        dead = drawn.choice(RANKS)  # and back in the next round
        at = ExchangeRound(number, RANKS, seed=2)
        answers = run_round(rule, own, states, at, [RANKS], faults=Faults(dead=frozenset({dead})))
        assert len({answer.receipts[0].digest for answer in answers.values()}) == 1
        states |= {rank: answer.state for rank, answer in answers.items()}
        applied += 4 * next(iter(answers.values())).result
        brought += sum(own[rank] for rank in answers)
    kept = sum(state.gradient for state in states.values() if state is not None)  # type: ignore[attr-defined]
    tolerance = 0.2 if codec == "int8_block" else 1e-4  # the total is coded once more
    assert torch.allclose(applied + kept, brought, atol=tolerance)


def test_a_gradient_that_is_not_finite_is_not_kept() -> None:
    broken = gradients()[0]
    broken[7] = float("nan")
    at = ExchangeRound(0, RANKS)
    assert RULE.undelivered(RULE.contribute(broken, None, at, 0), None) is None
