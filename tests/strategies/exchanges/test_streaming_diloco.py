"""Streaming DiLoCo: fragments in turn, used later, mixed with what the rank did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.errors import PlanError
from atoll.exchange import Exchange, ExchangeRound, check_exchange
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from strategies.exchanges.diloco import OuterState
from strategies.exchanges.streaming_diloco import StreamingDiLoCo
from tests.inprocess.exchange import Answer, later, run_round
from tests.strategies.exchanges.test_diloco import peers

FLAT = Flat(((50, 20), (40,)))
SIZE = FLAT.size
RANKS = (0, 1, 2)
FRAGMENTS = 4
EXCHANGE = Exchange("streaming_diloco", every=5, fragments=FRAGMENTS, delay=2)
RULE = StreamingDiLoCo(EXCHANGE)
LR, BETA, ALPHA = 0.4, 0.9, 0.5


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def mask_of(number: int, rule: StreamingDiLoCo = RULE) -> torch.Tensor:
    mask = torch.zeros(SIZE, dtype=torch.bool)
    for segment in rule.segments(FLAT.sizes, ExchangeRound(number, RANKS)):
        mask[segment.start : segment.stop] = True
    return mask


def play(
    states: Mapping[int, object], own: Mapping[int, torch.Tensor], number: int, rule: StreamingDiLoCo = RULE
) -> dict[int, Answer]:
    return run_round(rule, own, states, ExchangeRound(number, RANKS, 1), [RANKS])


def test_fragments_are_strided_equal_and_together_the_model() -> None:
    masks = [mask_of(number) for number in range(FRAGMENTS)]
    assert torch.equal(sum(masks[1:], masks[0].int()), torch.ones(SIZE, dtype=torch.int32))
    sizes = [[int(part.sum()) for part in mask.split(FLAT.sizes)] for mask in masks]
    for of_tensor in zip(*sizes, strict=True):
        assert max(of_tensor) - min(of_tensor) <= RULE.runs
    assert torch.equal(mask_of(FRAGMENTS + 1), masks[1])
    assert len(RULE.segments(FLAT.sizes, ExchangeRound(1, RANKS))) == RULE.runs * len(FLAT.sizes)
    for mask in masks:  # in every third of each tensor
        for tensor in mask.split(FLAT.sizes):
            assert all(bool(third.any()) for third in tensor.chunk(RULE.runs))


def test_rounds_with_a_delay_follow_the_paper_in_numpy() -> None:
    start = noise(99)
    states: dict[int, object] = {rank: RULE.init(FLAT, start) for rank in RANKS}
    outer, v = start.double().numpy(), np.zeros(SIZE)
    models = dict.fromkeys(RANKS, start)
    for number in range(6):
        own = {rank: models[rank] - 0.1 * noise(100 * number + rank) for rank in RANKS}
        answers = play(states, own, number)
        now = {rank: own[rank] - 0.1 * noise(5000 + 100 * number + rank) for rank in RANKS}
        used = {rank: later(RULE, answers[rank], now[rank]) for rank in RANKS}
        f = mask_of(number).numpy()
        delta = np.mean([outer - own[rank].double().numpy() for rank in RANKS], axis=0)
        v = np.where(f, BETA * v + delta, v)
        outer = np.where(f, outer - LR * (delta + BETA * v), outer)
        for rank in RANKS:
            local = now[rank].double().numpy()
            wanted = np.where(f, ALPHA * local + (1 - ALPHA) * outer, local)
            assert np.allclose(used[rank].result.numpy(), wanted, atol=1e-5)
            assert torch.equal(used[rank].result[~mask_of(number)], now[rank][~mask_of(number)])
            assert torch.equal(used[rank].state.outer, used[0].state.outer)
            assert torch.equal(used[rank].state.momentum, used[0].state.momentum)
        states = {rank: used[rank].state for rank in RANKS}
        models = {rank: used[rank].result for rank in RANKS}
    assert np.allclose(states[0].outer.numpy(), outer, atol=1e-5)  # type: ignore[attr-defined]


def test_one_fragment_without_delay_and_mixing_is_diloco() -> None:
    start = noise(99)
    whole = StreamingDiLoCo(Exchange("streaming_diloco"), lr=0.7, alpha=0.0)
    plain = make_rule(Exchange("diloco"))
    own = {rank: start - 0.1 * noise(rank) for rank in RANKS}
    at = ExchangeRound(0, RANKS, 1)
    wanted = run_round(plain, own, {rank: plain.init(FLAT, start) for rank in RANKS}, at, [RANKS])
    answers = play({rank: whole.init(FLAT, start) for rank in RANKS}, own, 0, whole)
    assert torch.equal(answers[1].result, wanted[1].result)


def sent_by_round(exchange: Exchange, rounds: int) -> list[int]:
    """Bytes of all ranks in each round of a larger model, counted from packets."""
    rule, size = make_rule(exchange), 300_000
    start = torch.randn(size, generator=torch.Generator().manual_seed(1))
    states = {rank: rule.init(Flat(((size,),)), start) for rank in RANKS}
    own, sent = {rank: start + rank for rank in RANKS}, []
    for number in range(rounds):
        answers = run_round(rule, own, states, ExchangeRound(number, RANKS, 1), [RANKS])
        sent.append(sum(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts))
    return sent


@pytest.mark.parametrize("codec", ["none", "int4_block"])
def test_four_fragments_quarter_the_peak_and_keep_the_total(codec: str) -> None:
    at_once = sent_by_round(Exchange("diloco", every=20, codec=codec), 2)
    streamed = sent_by_round(replace(EXCHANGE, codec=codec), 2 * FRAGMENTS)
    assert max(streamed) <= 0.27 * max(at_once)
    assert sum(streamed) == pytest.approx(sum(at_once), rel=0.02)


def test_a_model_that_is_not_finite_when_the_result_is_used_is_repaired() -> None:
    start = noise(99)
    own = {rank: start - 0.1 * noise(rank) for rank in RANKS}
    answers = play({rank: RULE.init(FLAT, start) for rank in RANKS}, own, 0)
    bad, now = int(mask_of(0).nonzero()[3]), own[2].clone()
    now[bad] = float("inf")
    used = later(RULE, answers[2], now)
    assert bool(torch.isfinite(used.result).all())
    assert float(used.result[bad]) == float(used.state.outer[bad])
    assert torch.equal(used.state.outer, answers[0].state.outer)


def test_a_residual_waits_for_its_fragments_turn() -> None:
    start = noise(99)
    rule = StreamingDiLoCo(Exchange("streaming_diloco", every=5, fragments=FRAGMENTS, codec="int4_block"))
    states: dict[int, object] = {rank: rule.init(FLAT, start) for rank in RANKS}
    own = {rank: start - 0.1 * noise(rank) for rank in RANKS}
    first = play(states, own, 0, rule)
    kept: OuterState = first[0].state
    assert kept.residual is not None
    assert not kept.residual[~mask_of(0)].any()
    second = play({r: first[r].state for r in RANKS}, {r: first[r].result for r in RANKS}, 1, rule)[
        0
    ].state.residual
    assert torch.equal(second[mask_of(0)], kept.residual[mask_of(0)])
    assert second[mask_of(1)].any()


def test_more_fragments_than_elements_leave_empty_rounds() -> None:
    flat = Flat(((2,),))
    start = torch.ones(2)
    states: dict[int, object] = {rank: RULE.init(flat, start) for rank in RANKS}
    for number in range(FRAGMENTS):
        answers = play(states, dict.fromkeys(RANKS, start), number)
        assert all(torch.equal(answer.result, start) for answer in answers.values())


def test_a_delay_that_would_let_rounds_overlap_is_refused() -> None:
    check_exchange(Exchange("streaming_diloco", every=5, fragments=4, delay=4))
    with pytest.raises(PlanError, match="overlap"):
        check_exchange(Exchange("streaming_diloco", every=5, fragments=4, delay=5))


def test_a_delayed_result_is_used_in_its_step_and_no_sooner() -> None:
    case, several = peers(Exchange("streaming_diloco", every=4, fragments=2, delay=2))
    outers = []
    for step in range(8):
        several.step(step, lambda rank, at: case.batches(at + 7 * rank))
        outers.append(several.rule_states[0].outer.clone())
    used = [step for step in range(1, 8) if not torch.equal(outers[step - 1], outers[step])]
    assert used == [5]  # begun at step 3; that of step 7 is still under way
