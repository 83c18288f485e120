"""PowerSGD among ranks: the algorithm as its paper has it, two averaged factors, and nothing lost."""

from __future__ import annotations

import torch

from atoll.exchange import Exchange, ExchangeRound
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from tests.inprocess.exchange import Faults, run_round
from tests.strategies.exchanges.low_rank.factored import FLAT, RANKS, RATIO, begin, gradients, play

RULE = make_rule(Exchange("powersgd", ratio=RATIO))


def test_two_collectives_carry_both_factors_and_the_vectors() -> None:
    answers = play(RULE, begin(RULE), gradients(0))
    floats = sum(
        rank * (rows + columns) if rank else rows for rows, columns, rank in begin(RULE)[0].layout.tensors
    )
    sent = sum(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts)
    messages = 2 * 2 * len(RANKS) * (len(RANKS) - 1)
    payload = 2 * (len(RANKS) - 1) * 4 * floats
    assert payload < sent < payload + 80 * messages
    assert len(answers[0].receipts) == 2


def test_residuals_are_smaller_than_those_against_the_mean() -> None:
    states = begin(RULE)
    for number in range(4):
        own = gradients(number)
        answers = play(RULE, states, own, number)
        for rank, answer in answers.items():
            wanted = own[rank] + states[rank].residual
            assert float(answer.state.residual.norm()) < 0.99 * float((wanted - answer.result).norm())
        states = {rank: answer.state for rank, answer in answers.items()}


def test_a_death_between_the_two_phases_leaves_the_state_as_well() -> None:
    own, states = gradients(0), begin(RULE)
    lost = Faults(alter=lambda message: None if message.phase == 1 and message.source == 1 else message)
    answers = run_round(RULE, own, states, ExchangeRound(0, RANKS, 1), [RANKS], faults=lost)
    assert [receipt.complete for receipt in answers[0].receipts] == [True, False]
    assert all(torch.equal(answers[rank].state.residual, own[rank]) for rank in RANKS)
    again = play(RULE, states, own)
    assert all(torch.equal(play(RULE, begin(RULE), own)[rank].result, again[rank].result) for rank in RANKS)


def test_a_zero_gradient_keeps_the_span_found_so_far() -> None:
    silent = {rank: torch.zeros(FLAT.size) for rank in RANKS}
    answers = play(RULE, begin(RULE), silent)
    assert all(map(torch.equal, answers[0].state.qs, begin(RULE)[0].qs))
    assert float(answers[0].result.abs().max()) == 0.0


def test_vectors_alone_need_one_phase() -> None:
    flat = Flat(((5,), (7,)))
    states = {rank: RULE.init(flat, torch.zeros(flat.size)) for rank in (0, 1)}
    answers = play(RULE, states, {0: torch.ones(12), 1: 3 * torch.ones(12)})
    assert torch.equal(answers[0].result, 2 * torch.ones(12))
    assert len(answers[0].receipts) == 1
