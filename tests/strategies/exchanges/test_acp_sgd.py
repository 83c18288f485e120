"""ACP-SGD among ranks: one factor a round, half of PowerSGD's bytes, and nothing lost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from atoll.errors import PlanError
from atoll.exchange import Exchange, ExchangeRound
from atoll.opdag import TensorMeta
from compressors.contrib.acp_sgd import START_SEED
from compressors.contrib.factors import sketch
from compressors.contrib.ranks import acp_rank, powersgd_rank
from strategies.exchanges import make_rule
from strategies.exchanges.acp_sgd import AcpState
from strategies.exchanges.base import ExchangeRule, Flat
from tests.inprocess.exchange import Answer, Faults, run_round

RATIO = 8.0
SHAPES = ((40, 30), (30,), (24, 5, 4), (3,))
FLAT = Flat(SHAPES)
RANKS = (0, 1, 2)
RULE = make_rule(Exchange("acp_sgd", ratio=RATIO))

Doubles = npt.NDArray[np.float64]


def gradients(number: int, ranks: tuple[int, ...] = RANKS, size: int = FLAT.size) -> dict[int, torch.Tensor]:
    return {
        rank: torch.randn(size, generator=torch.Generator().manual_seed(100 * number + rank))
        for rank in ranks
    }


def begin() -> dict[int, AcpState]:
    return {rank: RULE.init(FLAT, torch.zeros(FLAT.size)) for rank in RANKS}


def play(
    states: Mapping[int, object],
    own: Mapping[int, torch.Tensor],
    number: int = 0,
    weights: tuple[float, ...] = (),
    rule: ExchangeRule = RULE,
) -> dict[int, Answer]:
    ranks = tuple(sorted(own))
    return run_round(rule, own, states, ExchangeRound(number, ranks, 1, weights), [ranks])


def positive_qr(matrix: Doubles) -> Doubles:
    basis, upper = np.linalg.qr(matrix)
    found: Doubles = basis * np.sign(np.diag(upper))
    return found


class Reference:
    """The paper's algorithm for one matrix, in float64, by QR with a positive diagonal."""

    def __init__(self, rows: int, columns: int) -> None:
        rank = acp_rank(TensorMeta((rows, columns), "float32"), RATIO)
        self.p: Doubles = np.zeros((rows, rank))
        self.q: Doubles = sketch(columns, rank, START_SEED).double().numpy()
        self.errors: dict[int, Doubles] = {rank: np.zeros((rows, columns)) for rank in RANKS}

    def step(self, number: int, gradients: dict[int, Doubles], weights: tuple[float, ...]) -> Doubles:
        share = np.array(weights) / sum(weights)
        m = {rank: gradient + self.errors[rank] for rank, gradient in gradients.items()}
        if number % 2 == 0:
            self.q = positive_qr(self.q)
            own = {rank: m[rank] @ self.q for rank in RANKS}
            self.errors = {rank: m[rank] - own[rank] @ self.q.T for rank in RANKS}
            self.p = np.sum([w * own[rank] for w, rank in zip(share, RANKS, strict=True)], axis=0)
        else:
            self.p = positive_qr(self.p)
            own = {rank: m[rank].T @ self.p for rank in RANKS}
            self.errors = {rank: m[rank] - self.p @ own[rank].T for rank in RANKS}
            self.q = np.sum([w * own[rank] for w, rank in zip(share, RANKS, strict=True)], axis=0)
        return self.p @ self.q.T


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_rounds_follow_the_paper_in_numpy(weights: tuple[float, ...]) -> None:
    references = [Reference(40, 30), Reference(24, 20)]
    shares = weights or (1.0, 1.0, 1.0)
    states = begin()
    for number in range(5):
        own = gradients(number)
        answers = play(states, own, number, weights)
        states = {rank: answer.state for rank, answer in answers.items()}
        views = FLAT.views(answers[1].result)
        for at, reference in zip((0, 2), references, strict=True):
            rows = SHAPES[at][0]
            inputs = {r: FLAT.views(g)[at].reshape(rows, -1).double().numpy() for r, g in own.items()}
            wanted = reference.step(number, inputs, shares)
            assert np.allclose(views[at].reshape(rows, -1).numpy(), wanted, atol=1e-4)
        for at in (1, 3):
            stacked = torch.stack([w * FLAT.views(own[r])[at] for w, r in zip(shares, RANKS, strict=True)])
            assert torch.allclose(views[at], stacked.sum(0) / sum(shares), atol=1e-6)


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_results_and_bases_are_equal_and_no_mass_is_lost(weights: tuple[float, ...]) -> None:
    states, shares = begin(), weights or (1.0, 1.0, 1.0)
    given = torch.zeros(FLAT.size)
    moved = torch.zeros(FLAT.size)
    for number in range(5):
        own = gradients(number)
        answers = play(states, own, number, weights)
        assert all(torch.equal(answers[0].result, answers[rank].result) for rank in RANKS)
        for bases in zip(*(answer.state.bases for answer in answers.values()), strict=True):
            assert all(torch.equal(bases[0], basis) for basis in bases)
        for weight, rank in zip(shares, RANKS, strict=True):
            given += weight * own[rank]
        moved += sum(shares) * answers[0].result
        states = {rank: answer.state for rank, answer in answers.items()}
    for weight, rank in zip(shares, RANKS, strict=True):
        moved += weight * answers[rank].state.residual
    assert torch.allclose(moved, given, atol=1e-3)


def sent_of(rule: ExchangeRule, flat: Flat, rounds: int) -> int:
    """Bytes that all ranks sent, counted from packets."""
    states: dict[int, object] = {rank: rule.init(flat, torch.zeros(flat.size)) for rank in RANKS}
    sent = 0
    for number in range(rounds):
        answers = play(states, gradients(number, size=flat.size), number, rule=rule)
        states = {rank: answer.state for rank, answer in answers.items()}
        sent += sum(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts)
    return sent


def test_bytes_are_half_of_powersgds_on_matrices() -> None:
    flat = Flat(((1200, 900), (512, 1400)))
    rank = powersgd_rank(TensorMeta(flat.shapes[0], "float32"), 32.0)
    assert rank == acp_rank(TensorMeta(flat.shapes[0], "float32"), 64.0) > 1
    power = sent_of(make_rule(Exchange("powersgd", ratio=32.0)), flat, 2)
    alternating = sent_of(make_rule(Exchange("acp_sgd", ratio=64.0)), flat, 2)
    assert alternating == pytest.approx(power / 2, rel=0.01)
    layout = make_rule(Exchange("acp_sgd", ratio=64.0)).init(flat, torch.zeros(flat.size)).layout
    floats = sum(rank * (rows + columns) / 2 for rows, columns, rank in layout.factored)
    assert alternating / 2 == pytest.approx(2 * (len(RANKS) - 1) * 4 * floats, rel=0.01)


def test_a_round_that_counts_for_nobody_leaves_side_and_basis_and_loses_nothing() -> None:
    own, states = gradients(0), begin()
    at = ExchangeRound(0, RANKS, 1)
    answers = run_round(RULE, own, states, at, [RANKS], faults=Faults(dead=frozenset({2})))
    for rank in (0, 1):
        state = answers[rank].state
        assert not all(receipt.complete for receipt in answers[rank].receipts)
        assert state.step == 0
        assert torch.equal(state.residual, own[rank])
    silent = {rank: torch.zeros(FLAT.size) for rank in (0, 1)}
    after = play({rank: answers[rank].state for rank in (0, 1)}, silent, 1)
    held = 2 * after[0].result + after[0].state.residual + after[1].state.residual
    assert torch.allclose(held, own[0] + own[1], atol=1e-4)
    assert after[0].state.step == 1


def test_a_newcomer_takes_anothers_step_and_basis_and_no_residual() -> None:
    answers = play(begin(), gradients(0))
    state = RULE.adopted(FLAT, torch.zeros(FLAT.size), answers[0].state)
    assert isinstance(state, AcpState)
    assert float(state.residual.abs().max()) == 0.0
    states = {**{rank: answers[rank].state for rank in RANKS}, 7: state}
    joined = play(states, gradients(1, (*RANKS, 7)), 1)
    assert all(torch.equal(joined[0].result, answer.result) for answer in joined.values())
    assert all(map(torch.equal, joined[0].state.bases, joined[7].state.bases))


def test_what_is_not_finite_reaches_everybody_and_no_state() -> None:
    states, own = begin(), gradients(0)
    own[1][5] = float("nan")
    answers = play(states, own)
    for rank, answer in answers.items():
        assert not bool(torch.isfinite(answer.result).all())
        assert answer.state is states[rank]


def test_a_codec_of_its_own_is_refused() -> None:
    with pytest.raises(PlanError, match="'acp_sgd' with codec 'int8_block'"):
        make_rule(Exchange("acp_sgd", codec="int8_block"))
