"""PowerSGD among ranks: the algorithm as its paper has it, two averaged factors, and nothing lost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from atoll.errors import PlanError
from atoll.exchange import Exchange, ExchangeRound
from atoll.opdag import TensorMeta
from compressors.contrib.factors import sketch
from compressors.contrib.powersgd import START_SEED
from compressors.contrib.ranks import powersgd_rank
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from strategies.exchanges.powersgd import PowerState
from tests.inprocess.exchange import Answer, Faults, run_round

RATIO = 8.0
SHAPES = ((40, 30), (30,), (24, 5, 4), (3,))
FLAT = Flat(SHAPES)
RANKS = (0, 1, 2)
RULE = make_rule(Exchange("powersgd", ratio=RATIO))

Doubles = npt.NDArray[np.float64]


def gradients(number: int, ranks: tuple[int, ...] = RANKS) -> dict[int, torch.Tensor]:
    return {
        rank: torch.randn(FLAT.size, generator=torch.Generator().manual_seed(100 * number + rank))
        for rank in ranks
    }


def begin(ranks: tuple[int, ...] = RANKS) -> dict[int, PowerState]:
    return {rank: RULE.init(FLAT, torch.zeros(FLAT.size)) for rank in ranks}


def play(
    states: Mapping[int, PowerState],
    own: Mapping[int, torch.Tensor],
    number: int = 0,
    weights: tuple[float, ...] = (),
) -> dict[int, Answer]:
    ranks = tuple(sorted(own))
    return run_round(RULE, own, states, ExchangeRound(number, ranks, 1, weights), [ranks])


class Reference:
    """The paper's algorithm for one matrix, in float64, by QR with a positive diagonal."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rank = powersgd_rank(TensorMeta((rows, columns), "float32"), RATIO)
        self.q: Doubles = sketch(columns, self.rank, START_SEED).double().numpy()
        self.errors: dict[int, Doubles] = {rank: np.zeros((rows, columns)) for rank in RANKS}

    def step(self, gradients: dict[int, Doubles], weights: tuple[float, ...]) -> Doubles:
        share = np.array(weights) / sum(weights)
        m = {rank: gradient + self.errors[rank] for rank, gradient in gradients.items()}
        p = sum(w * (m[rank] @ self.q) for w, rank in zip(share, RANKS, strict=True))
        basis, upper = np.linalg.qr(p)
        basis = basis * np.sign(np.diag(upper))
        own = {rank: m[rank].T @ basis for rank in RANKS}
        self.q = np.sum([w * own[rank] for w, rank in zip(share, RANKS, strict=True)], axis=0)
        self.errors = {rank: m[rank] - basis @ own[rank].T for rank in RANKS}
        return basis @ self.q.T


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_rounds_follow_the_paper_in_numpy(weights: tuple[float, ...]) -> None:
    references = [Reference(40, 30), Reference(24, 20)]
    shares = weights or (1.0, 1.0, 1.0)
    states = begin()
    for number in range(4):
        own = gradients(number)
        answers = play(states, own, number, weights)
        states = {rank: answer.state for rank, answer in answers.items()}
        views = FLAT.views(answers[1].result)
        for at, reference in zip((0, 2), references, strict=True):
            rows = SHAPES[at][0]
            inputs = {r: FLAT.views(g)[at].reshape(rows, -1).double().numpy() for r, g in own.items()}
            wanted = reference.step(inputs, shares)
            assert np.allclose(views[at].reshape(rows, -1).numpy(), wanted, atol=1e-4)
        for at in (1, 3):
            stacked = torch.stack([w * FLAT.views(own[r])[at] for w, r in zip(shares, RANKS, strict=True)])
            assert torch.allclose(views[at], stacked.sum(0) / sum(shares), atol=1e-6)


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_results_and_factors_are_equal_and_no_mass_is_lost(weights: tuple[float, ...]) -> None:
    states, shares = begin(), weights or (1.0, 1.0, 1.0)
    given = torch.zeros(FLAT.size)
    moved = torch.zeros(FLAT.size)
    for number in range(5):
        own = gradients(number)
        answers = play(states, own, number, weights)
        assert all(torch.equal(answers[0].result, answers[rank].result) for rank in RANKS)
        for qs in zip(*(answer.state.qs for answer in answers.values()), strict=True):
            assert all(torch.equal(qs[0], q) for q in qs)
        given += sum(w * own[rank] for w, rank in zip(shares, RANKS, strict=True))
        moved += sum(shares) * answers[0].result
        states = {rank: answer.state for rank, answer in answers.items()}
    for weight, rank in zip(shares, RANKS, strict=True):
        moved += weight * answers[rank].state.residual
    assert torch.allclose(moved, given, atol=1e-3)


def test_two_collectives_carry_both_factors_and_the_vectors() -> None:
    answers = play(begin(), gradients(0))
    floats = sum(
        rank * (rows + columns) if rank else rows for rows, columns, rank in begin()[0].layout.tensors
    )
    sent = sum(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts)
    messages = 2 * 2 * len(RANKS) * (len(RANKS) - 1)
    payload = 2 * (len(RANKS) - 1) * 4 * floats
    assert payload < sent < payload + 80 * messages
    assert len(answers[0].receipts) == 2


def test_residuals_are_smaller_than_those_against_the_mean() -> None:
    states = begin()
    for number in range(4):
        own = gradients(number)
        answers = play(states, own, number)
        for rank, answer in answers.items():
            wanted = own[rank] + states[rank].residual
            assert float(answer.state.residual.norm()) < 0.99 * float((wanted - answer.result).norm())
        states = {rank: answer.state for rank, answer in answers.items()}


def test_a_dead_rank_makes_the_round_count_for_nobody_and_the_next_delivers_all() -> None:
    own, states = gradients(0), begin()
    at = ExchangeRound(0, RANKS, 1)
    answers = run_round(RULE, own, states, at, [RANKS], faults=Faults(dead=frozenset({2})))
    assert all(not answer.receipts[-1].complete for answer in answers.values())
    for rank in (0, 1):
        assert torch.equal(answers[rank].state.residual, own[rank])
        assert all(map(torch.equal, answers[rank].state.qs, begin()[rank].qs))
    silent = {rank: torch.zeros(FLAT.size) for rank in (0, 1)}
    after = play({rank: answers[rank].state for rank in (0, 1)}, silent, 1)
    held = 2 * after[0].result + after[0].state.residual + after[1].state.residual
    assert torch.allclose(held, own[0] + own[1], atol=1e-4)


def test_a_death_between_the_two_phases_leaves_the_state_as_well() -> None:
    own, states = gradients(0), begin()
    lost = Faults(alter=lambda message: None if message.phase == 1 and message.source == 1 else message)
    answers = run_round(RULE, own, states, ExchangeRound(0, RANKS, 1), [RANKS], faults=lost)
    assert [receipt.complete for receipt in answers[0].receipts] == [True, False]
    assert all(torch.equal(answers[rank].state.residual, own[rank]) for rank in RANKS)
    again = play(states, own)
    assert all(torch.equal(play(begin(), own)[rank].result, again[rank].result) for rank in RANKS)


def test_a_newcomer_takes_anothers_factors_and_no_residual() -> None:
    answers = play(begin(), gradients(0))
    state = RULE.adopted(FLAT, torch.zeros(FLAT.size), answers[0].state)
    assert isinstance(state, PowerState)
    assert float(state.residual.abs().max()) == 0.0
    ranks = (0, 1, 2, 7)
    states = {**{rank: answers[rank].state for rank in RANKS}, 7: state}
    joined = play(states, gradients(1, ranks), 1)
    assert all(torch.equal(joined[0].result, answer.result) for answer in joined.values())
    for qs in zip(*(answer.state.qs for answer in joined.values()), strict=True):
        assert all(torch.equal(qs[0], q) for q in qs)


def test_what_is_not_finite_reaches_everybody_and_no_state() -> None:
    states, own = begin(), gradients(0)
    own[1][5] = float("nan")
    answers = play(states, own)
    for rank, answer in answers.items():
        assert not bool(torch.isfinite(answer.result).all())
        assert answer.state is states[rank]


def test_a_zero_gradient_keeps_the_span_found_so_far() -> None:
    silent = {rank: torch.zeros(FLAT.size) for rank in RANKS}
    answers = play(begin(), silent)
    assert all(map(torch.equal, answers[0].state.qs, begin()[0].qs))
    assert float(answers[0].result.abs().max()) == 0.0


def test_vectors_alone_need_one_phase() -> None:
    flat = Flat(((5,), (7,)))
    states = {rank: RULE.init(flat, torch.zeros(flat.size)) for rank in (0, 1)}
    answers = play(states, {0: torch.ones(12), 1: 3 * torch.ones(12)})
    assert torch.equal(answers[0].result, 2 * torch.ones(12))
    assert len(answers[0].receipts) == 1


def test_a_codec_of_its_own_is_refused() -> None:
    with pytest.raises(PlanError, match="'powersgd' with codec 'fp16'"):
        make_rule(Exchange("powersgd", codec="fp16"))
