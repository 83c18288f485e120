"""DiLoCo: the outer step as in the paper, its bytes, and whose work is when in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from atoll.errors import PlanError, UsageError
from atoll.exchange import Exchange, ExchangeRound
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in
from strategies.exchanges import diloco, make_rule
from strategies.exchanges.base import ExchangeRule, Flat
from strategies.exchanges.diloco import DiLoCo, OuterState
from tests.inprocess.exchange import Answer, Faults, run_round
from tests.inprocess.peers import LocalPeers, WholeModel
from worker.exchange.flat import flat_values

FLAT = Flat(((30, 20), (40,)))
SIZE = FLAT.size
RANKS = (0, 1, 2)
RULE = make_rule(Exchange("diloco", every=10))
LR, BETA = 0.7, 0.9


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


START = noise(99)


def begin(rule: ExchangeRule = RULE, ranks: tuple[int, ...] = RANKS) -> dict[int, OuterState]:
    return {rank: rule.init(FLAT, START) for rank in ranks}


def trained(models: Mapping[int, torch.Tensor], number: int) -> dict[int, torch.Tensor]:
    """Models after some local steps."""
    return {rank: model - 0.1 * noise(100 * number + rank) for rank, model in models.items()}


def play(
    states: Mapping[int, OuterState],
    own: Mapping[int, torch.Tensor],
    number: int = 0,
    weights: tuple[float, ...] = (),
    rule: ExchangeRule = RULE,
    faults: Faults | None = None,
) -> dict[int, Answer]:
    ranks = tuple(sorted(own))
    return run_round(rule, own, states, ExchangeRound(number, ranks, 1, weights), [ranks], faults=faults)


def states_of(answers: Mapping[int, Answer]) -> dict[int, OuterState]:
    return {rank: answer.state for rank, answer in answers.items()}


def without(rank: int) -> Faults:
    """A rank whose parts come too late for everybody else, but which hears the totals."""
    return Faults(alter=lambda message: None if message.source == rank and message.label == rank else message)


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_the_outer_step_is_nesterovs_in_numpy(weights: tuple[float, ...]) -> None:
    shares = np.array(weights or (1.0, 1.0, 1.0))
    outer, v = START.double().numpy(), np.zeros(SIZE)
    states, models = begin(), dict.fromkeys(RANKS, START)
    for number in range(4):
        own = trained(models, number)
        answers = play(states, own, number, weights)
        deltas = np.stack([outer - own[rank].double().numpy() for rank in RANKS])
        delta = (shares[:, None] * deltas).sum(0) / shares.sum()
        v = BETA * v + delta
        outer = outer - LR * (delta + BETA * v)
        states, models = states_of(answers), {rank: answers[rank].result for rank in RANKS}
        for rank in RANKS:
            assert np.allclose(models[rank].numpy(), outer, atol=1e-5)
            assert torch.equal(models[rank], models[0])
            assert torch.equal(states[rank].momentum, states[0].momentum)
            assert states[rank].residual is None


def test_a_rank_alone_still_takes_the_outer_step() -> None:
    own = trained({0: START}, 0)
    answers = play(begin(ranks=(0,)), own)
    delta = START - own[0]
    assert torch.allclose(answers[0].result, START - LR * (1 + BETA) * delta, atol=1e-6)
    assert answers[0].receipts[0].complete
    assert answers[0].receipts[0].sent_bytes == 0


@pytest.mark.parametrize("codec", ["fp16", "int8_block", "int4_block"])
def test_a_lossy_codec_leaves_equal_bits_and_its_error_in_the_residual(codec: str) -> None:
    rule = make_rule(Exchange("diloco", every=10, codec=codec))
    states, own = begin(rule), trained(dict.fromkeys(RANKS, START), 0)
    answers = play(states, own, rule=rule)
    exact = play(begin(), own)
    assert all(torch.equal(answers[0].result, answers[rank].result) for rank in RANKS)
    assert all(torch.equal(states_of(answers)[0].momentum, answers[r].state.momentum) for r in RANKS)
    error = float((answers[0].result - exact[0].result).norm() / (exact[0].result - START).norm())
    assert 0.0 < error < {"fp16": 1e-3, "int8_block": 0.02, "int4_block": 0.2}[codec]
    sent = answers[0].receipts[0].sent_bytes
    share = {"fp16": 0.5, "int8_block": 0.266, "int4_block": 0.141}[codec]
    assert share <= sent / exact[0].receipts[0].sent_bytes < share + 0.15
    for rank, state in states_of(answers).items():
        assert state.residual is not None
        assert 0.0 < float(state.residual.norm()) < 0.2 * float((START - own[rank]).norm())


def test_a_late_rank_takes_the_others_step_and_its_own_work_arrives_a_round_later() -> None:
    own = trained(dict.fromkeys(RANKS, START), 0)
    answers = play(begin(), own, faults=without(2))
    owned = answers[2].exchanged
    assert owned is not None
    (mine,) = [p.segment for p in owned.pieces if 2 in p.included]
    elsewhere = torch.ones(SIZE, dtype=torch.bool)
    elsewhere[mine.start : mine.stop] = False
    mean = (2 * START - own[0] - own[1]) / 2
    step = START - LR * (1 + BETA) * mean
    for rank in RANKS:
        assert torch.equal(answers[rank].result, answers[0].result)
        assert torch.allclose(answers[rank].result[elsewhere], step[elsewhere], atol=1e-6)
    late = answers[2].state.residual
    assert torch.equal(late[elsewhere], (START - own[2])[elsewhere])
    assert float(late[mine.start : mine.stop].abs().max()) == 0.0
    # Nobody trains on: what arrives in the next round is the late work and the momentum.
    after = play(states_of(answers), {rank: answers[rank].result for rank in RANKS}, 1)
    v = BETA * mean + late / 3
    wanted = answers[0].result - LR * (late / 3 + BETA * v)
    assert torch.allclose(after[0].result[elsewhere], wanted[elsewhere], atol=1e-6)
    assert after[2].state.residual is None


def test_a_segment_whose_owner_died_waits_in_the_residuals_at_all_alike() -> None:
    own = trained(dict.fromkeys(RANKS, START), 0)
    answers = play(begin(), own, faults=Faults(dead=frozenset({1})))
    assert torch.equal(answers[0].result, answers[2].result)
    assert torch.equal(answers[0].state.momentum, answers[2].state.momentum)
    missing = answers[0].result == START
    assert SIZE / 4 < int(missing.sum()) < SIZE / 2
    for rank in (0, 2):
        assert torch.equal(answers[rank].state.residual[missing], (START - own[rank])[missing])
        assert not answers[rank].receipts[0].complete


def test_a_round_given_up_changes_nothing_and_its_steps_count_in_the_next() -> None:
    states, own = begin(), trained(dict.fromkeys(RANKS, START), 0)
    at = ExchangeRound(0, RANKS, 1)
    given_up = {
        rank: RULE.undelivered(RULE.contribute(own[rank], states[rank], at, rank), states[rank])
        for rank in RANKS
    }
    assert given_up == states
    more = trained(own, 1)
    assert torch.equal(play(given_up, more, 1)[0].result, play(begin(), more, 1)[0].result)


def test_settings_of_the_other_form_and_sparse_codecs_are_refused() -> None:
    for exchange in (Exchange("diloco", fragments=4), Exchange("diloco", every=4, delay=1)):
        with pytest.raises(PlanError, match="'streaming_diloco' has both"):
            make_rule(exchange)
    for codec in ("topk", "powersgd"):
        with pytest.raises(PlanError, match="dense codecs without state"):
            make_rule(Exchange("streaming_diloco", codec=codec))
    with pytest.raises(UsageError, match="zip"):
        make_rule(Exchange("diloco", codec="zip"))


# ---------------------------------------------------------------- training

TRAINING = TrainingSpec(
    steps=20, n_micro=1, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1, momentum=0.9)
)


@cache
def mlp() -> Case:
    """Captured once: peers copy what they are given."""
    return built_in("mlp", TRAINING, 0.0)


def peers(exchange: Exchange, ranks: int = 3) -> tuple[Case, LocalPeers]:
    torch.set_num_threads(1)
    case = mlp()
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, TRAINING, case.tensors, states=case.states)
    return case, LocalPeers(model, exchange, ranks)


def sent_by_step(exchange: Exchange) -> list[int]:
    """Bytes of all ranks in each step, counted from packets."""
    case, several = peers(exchange)
    return [
        sum(several.step(step, lambda rank, at: case.batches(at)).sent_bytes)
        for step in range(TRAINING.steps)
    ]


@pytest.mark.parametrize("codec", ["none", "int8_block", "int4_block"])
def test_bytes_are_exactly_one_in_h_of_those_at_every_step(codec: str) -> None:
    every_step = sent_by_step(Exchange("diloco", codec=codec))
    assert len(set(every_step)) == 1
    for every in (4, 10):
        sent = sent_by_step(Exchange("diloco", every=every, codec=codec))
        assert every * sum(sent) == sum(every_step)


def test_one_local_step_and_no_outer_momentum_is_the_mean_of_models() -> None:
    case, several = peers(Exchange("diloco"))
    several.rule = replace(DiLoCo(Exchange("diloco")), lr=1.0, momentum=0.0)
    _, mean = peers(Exchange("mean"))
    for step in range(3):
        for one in (several, mean):
            one.step(step, lambda rank, at: case.batches(at + 7 * rank))
    # Inner momentum is local, but linear: the mean of models is the model of mean gradients.
    models = [flat_values(stage.trained) for stage in several.stages]
    assert all(torch.equal(models[0], model) for model in models)
    assert torch.allclose(several.average(), mean.average(), atol=1e-5)


def test_an_outer_step_in_blocks_has_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = make_rule(Exchange("diloco", every=10, codec="int8_block"))

    def outcome() -> list[torch.Tensor]:
        states, models = begin(rule), dict.fromkeys(RANKS, START)
        for number in range(3):
            answers = play(states, trained(models, number), number, rule=rule)
            states, models = states_of(answers), {rank: answer.result for rank, answer in answers.items()}
        return [
            part for s in states.values() for part in (s.outer, s.momentum, s.residual) if part is not None
        ]

    whole = outcome()
    assert len(whole) == 3 * len(RANKS)
    monkeypatch.setattr(diloco, "BLOCK", 7)
    for one, other in zip(whole, outcome(), strict=True):
        assert torch.equal(one, other)
