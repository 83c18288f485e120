"""PowerSGD and ACP-SGD among ranks: the algorithms as their papers have them, and nothing lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from atoll.errors import PlanError
from atoll.exchange import Exchange, ExchangeRound
from atoll.opdag import TensorMeta
from compressors.contrib.low_rank import acp_sgd, powersgd
from compressors.contrib.low_rank.factors import sketch
from compressors.contrib.low_rank.ranks import acp_rank, powersgd_rank
from strategies.exchanges import make_rule
from strategies.exchanges.base import ExchangeRule
from tests.inprocess.exchange import Faults, run_round
from tests.strategies.exchanges.low_rank.factored import (
    FLAT,
    RANKS,
    RATIO,
    SHAPES,
    begin,
    gradients,
    play,
    views,
)

Doubles = npt.NDArray[np.float64]
WEIGHTS = [(), (1.0, 2.0, 5.0)]


@pytest.fixture(params=["powersgd", "acp_sgd"])
def rule(request: pytest.FixtureRequest) -> ExchangeRule:
    return make_rule(Exchange(request.param, ratio=RATIO))


def factors(state: Any) -> tuple[torch.Tensor, ...]:
    """The state's part that is equal at all ranks."""
    found: tuple[torch.Tensor, ...] = state.bases if hasattr(state, "bases") else state.qs
    return found


def positive_qr(matrix: Doubles) -> Doubles:
    basis, upper = np.linalg.qr(matrix)
    found: Doubles = basis * np.sign(np.diag(upper))
    return found


class PowerReference:
    """The paper's algorithm for one matrix, in float64, by QR with a positive diagonal."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rank = powersgd_rank(TensorMeta((rows, columns), "float32"), RATIO)
        self.q: Doubles = sketch(columns, self.rank, powersgd.START_SEED).double().numpy()
        self.errors: dict[int, Doubles] = {rank: np.zeros((rows, columns)) for rank in RANKS}

    def step(self, number: int, gradients: dict[int, Doubles], weights: tuple[float, ...]) -> Doubles:
        share = np.array(weights) / sum(weights)
        m = {rank: gradient + self.errors[rank] for rank, gradient in gradients.items()}
        p = sum(w * (m[rank] @ self.q) for w, rank in zip(share, RANKS, strict=True))
        basis = positive_qr(p)
        own = {rank: m[rank].T @ basis for rank in RANKS}
        self.q = np.sum([w * own[rank] for w, rank in zip(share, RANKS, strict=True)], axis=0)
        self.errors = {rank: m[rank] - basis @ own[rank].T for rank in RANKS}
        return basis @ self.q.T


class AcpReference:
    """The paper's algorithm for one matrix, in float64, by QR with a positive diagonal."""

    def __init__(self, rows: int, columns: int) -> None:
        rank = acp_rank(TensorMeta((rows, columns), "float32"), RATIO)
        self.p: Doubles = np.zeros((rows, rank))
        self.q: Doubles = sketch(columns, rank, acp_sgd.START_SEED).double().numpy()
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


@pytest.mark.parametrize("weights", WEIGHTS)
def test_rounds_follow_the_paper_in_numpy(rule: ExchangeRule, weights: tuple[float, ...]) -> None:
    reference_of = PowerReference if rule.exchange.rule == "powersgd" else AcpReference
    references = [reference_of(40, 30), reference_of(24, 20)]
    shares = weights or (1.0, 1.0, 1.0)
    states = begin(rule)
    for number in range(5):
        own = gradients(number)
        answers = play(rule, states, own, number, weights)
        states = {rank: answer.state for rank, answer in answers.items()}
        found = views(answers[1].result)
        for at, reference in zip((0, 2), references, strict=True):
            rows = SHAPES[at][0]
            inputs = {r: views(g)[at].reshape(rows, -1).double().numpy() for r, g in own.items()}
            wanted = reference.step(number, inputs, shares)
            assert np.allclose(found[at].reshape(rows, -1).numpy(), wanted, atol=1e-4)
        for at in (1, 3):
            stacked = torch.stack([w * views(own[r])[at] for w, r in zip(shares, RANKS, strict=True)])
            assert torch.allclose(found[at], stacked.sum(0) / sum(shares), atol=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_results_and_factors_are_equal_and_no_mass_is_lost(
    rule: ExchangeRule, weights: tuple[float, ...]
) -> None:
    states, shares = begin(rule), weights or (1.0, 1.0, 1.0)
    given = torch.zeros(FLAT.size)
    moved = torch.zeros(FLAT.size)
    for number in range(5):
        own = gradients(number)
        answers = play(rule, states, own, number, weights)
        assert all(torch.equal(answers[0].result, answers[rank].result) for rank in RANKS)
        for found in zip(*(factors(answer.state) for answer in answers.values()), strict=True):
            assert all(torch.equal(found[0], factor) for factor in found)
        given += sum(w * own[rank] for w, rank in zip(shares, RANKS, strict=True))
        moved += sum(shares) * answers[0].result
        states = {rank: answer.state for rank, answer in answers.items()}
    for weight, rank in zip(shares, RANKS, strict=True):
        moved += weight * answers[rank].state.residual
    assert torch.allclose(moved, given, atol=1e-3)


def test_a_dead_rank_makes_the_round_count_for_nobody_and_the_next_delivers_all(rule: ExchangeRule) -> None:
    own, states = gradients(0), begin(rule)
    at = ExchangeRound(0, RANKS, 1)
    answers = run_round(rule, own, states, at, [RANKS], faults=Faults(dead=frozenset({2})))
    assert all(not answer.receipts[-1].complete for answer in answers.values())
    for rank in (0, 1):
        assert torch.equal(answers[rank].state.residual, own[rank])
        assert all(map(torch.equal, factors(answers[rank].state), factors(states[rank])))
        assert getattr(answers[rank].state, "step", 0) == 0
    silent = {rank: torch.zeros(FLAT.size) for rank in (0, 1)}
    after = play(rule, {rank: answers[rank].state for rank in (0, 1)}, silent, 1)
    held = 2 * after[0].result + after[0].state.residual + after[1].state.residual
    assert torch.allclose(held, own[0] + own[1], atol=1e-4)
    assert getattr(after[0].state, "step", 1) == 1


def test_what_is_not_finite_reaches_everybody_and_no_state(rule: ExchangeRule) -> None:
    states, own = begin(rule), gradients(0)
    own[1][5] = float("nan")
    for rank, answer in play(rule, states, own).items():
        assert not bool(torch.isfinite(answer.result).all())
        assert answer.state is states[rank]


@pytest.mark.parametrize(("name", "codec"), [("powersgd", "fp16"), ("acp_sgd", "int8_block")])
def test_a_codec_of_its_own_is_refused(name: str, codec: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}' with codec '{codec}'"):
        make_rule(Exchange(name, codec=codec))
