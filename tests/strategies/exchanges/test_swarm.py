"""SwarmSGD: mean with a published copy plus the own burst; the lattice shrinks with the distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.errors import BadFrame
from atoll.exchange import Exchange, ExchangeRound
from compressors.base import Packet
from compressors.vector import unpack
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from strategies.exchanges.swarm import TAIL, Published, copy_of, lattice
from tests.inprocess.exchange import Faults, later, run_round

SIZE = 3000
RULE = make_rule(Exchange("swarm"))
RANKS = (0, 1, 2, 3)
AT = ExchangeRound(0, RANKS, seed=1)
CYCLE = [(0, 1), (1, 2), (2, 3), (3, 0)]


def copies(scale: float, distance: float) -> dict[int, Published]:
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(SIZE, generator=generator)
    return {
        rank: Published(common + scale * (2 * torch.rand(SIZE, generator=generator) - 1), distance)
        for rank in RANKS
    }


def cycle(number: int) -> list[tuple[int, int]]:
    order = torch.randperm(len(RANKS), generator=torch.Generator().manual_seed(number)).tolist()
    return list(zip(order, [*order[1:], order[0]], strict=True))


def test_a_reader_averages_its_copy_with_the_sources_and_adds_its_burst() -> None:
    states = copies(0.05, 0.1)
    bursts = {rank: torch.full((SIZE,), 0.01 * (rank + 1)) for rank in RANKS}
    own = {rank: states[rank].model + bursts[rank] for rank in RANKS}
    answers = run_round(RULE, own, states, AT, CYCLE)
    step = 2.0 ** lattice(states[0].model.numpy(), 2 * 0.1)  # type: ignore[operator]
    assert step < 0.004
    for reader, source in CYCLE:
        mean = (states[reader].model + states[source].model) / 2 + bursts[reader]
        assert float((answers[reader].result - mean).abs().max()) <= step / 4 * 1.001
        assert torch.equal(answers[reader].state.model, answers[reader].result)
        assert answers[reader].receipts[0].sent_bytes < SIZE + TAIL + 100


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_the_error_is_a_share_of_the_distance_and_not_of_the_model(scale: float) -> None:
    states = copies(scale, 2 * scale)
    row = RULE.contribute(states[1].model, states[1], AT, 1).vector.values
    found = copy_of(row, states[0].model)
    assert found is not None
    rounding = 2.0**-24 * float(states[1].model.abs().max())
    assert float((found - states[1].model).abs().max()) <= 2 * scale * 2.0 / 127 + rounding


def test_bursts_without_gradients_come_together_with_eight_bits() -> None:
    states: dict[int, object] = dict(copies(0.5, 1.0))
    own = {rank: state.model for rank, state in copies(0.5, 1.0).items()}
    mean = torch.stack(list(own.values())).mean(0)
    for number in range(60):
        answers = run_round(RULE, own, states, ExchangeRound(number, RANKS), cycle(number))
        own = {rank: answer.result for rank, answer in answers.items()}
        states = {rank: answer.state for rank, answer in answers.items()}
    spread = max(float((model - own[0]).abs().max()) for model in own.values())
    assert spread < 1e-5  # of 0.5: no floor at a level of eight bits
    assert float((own[0] - mean).abs().max()) < 2.0 / 127  # a level of the first rounds


def test_a_reader_too_far_away_keeps_its_own_and_is_found_again() -> None:
    states: dict[int, object] = dict(copies(0.001, 0.002))
    far = copies(0.001, 0.002)[2].model + 5.0
    states[2] = Published(far, 0.002)
    own = {rank: state.model for rank, state in states.items()}  # type: ignore[attr-defined]
    answers = run_round(RULE, own, states, AT, CYCLE)
    assert torch.equal(answers[2].result, far)
    assert answers[2].state.whole  # its next copy goes dense
    assert torch.equal(answers[1].result, own[1])  # nor could its reader decode the far one's
    for number in range(40):
        own = {rank: answer.result for rank, answer in answers.items()}
        states = {rank: answer.state for rank, answer in answers.items()}
        answers = run_round(RULE, own, states, ExchangeRound(number, RANKS), cycle(number))
    assert max(float((answer.result - answers[0].result).abs().max()) for answer in answers.values()) < 0.01
    assert not any(answer.state.whole for answer in answers.values())


def test_dense_copies_and_lost_ones() -> None:
    states = copies(0.05, 0.1)
    states[1] = replace(states[1], whole=True)
    own = {rank: states[rank].model for rank in RANKS}
    answers = run_round(RULE, own, states, AT, CYCLE, faults=Faults(dead=frozenset({3})))
    assert torch.allclose(answers[0].result, (own[0] + own[1]) / 2, atol=1e-7)
    assert answers[1].receipts[0].sent_bytes > 4 * SIZE
    assert torch.equal(answers[2].result, own[2])  # its source is dead
    assert not answers[2].receipts[0].complete


def test_first_round_finds_equal_copies() -> None:
    common = torch.randn(SIZE, generator=torch.Generator().manual_seed(4))
    states = {rank: RULE.init(Flat(((SIZE,),)), common) for rank in RANKS}
    own = {rank: common + 0.1 * rank for rank in RANKS}
    answers = run_round(RULE, own, states, AT, CYCLE)
    assert all(torch.allclose(answers[r].result, own[r], atol=1e-6) for r in RANKS)


def test_what_has_no_place_on_a_lattice_goes_dense() -> None:
    values = np.zeros(3, np.float32)
    assert lattice(values, 0.0) is not None
    assert lattice(values, float("inf")) is None
    assert lattice(np.array([np.nan], np.float32), 1.0) is None
    assert lattice(values, 1e37) is None


def test_a_reader_far_beyond_the_lattice_does_not_decode() -> None:
    states = copies(0.05, 0.1)
    tiny = Published(1e-30 * states[1].model, 0.0)
    row = RULE.contribute(tiny.model, tiny, AT, 1).vector.values
    assert copy_of(row, tiny.model) is not None
    for reference in (states[0].model, states[0].model * float("inf")):
        assert copy_of(row, reference) is None


def test_a_result_used_later_keeps_the_whole_burst() -> None:
    states = copies(0.05, 0.1)
    own = {rank: states[rank].model + 0.1 for rank in RANKS}
    answer = run_round(RULE, own, states, AT, CYCLE)[0]
    moved = later(RULE, answer, own[0] + 0.2)
    assert torch.allclose(moved.result, answer.result + 0.2, atol=1e-6)
    assert torch.equal(moved.state.model, moved.result)


def test_a_copy_of_another_length_is_refused() -> None:
    contribution = RULE.contribute(torch.zeros(4), Published(torch.zeros(4)), AT, 0)
    packet, _ = contribution.codec.compress(contribution.vector.values)
    size = contribution.vector.size
    for payload in (packet.payload[:-1], bytes(size), bytes(4 * size + 1), b"\1" * 4 * size):
        with pytest.raises(BadFrame):
            unpack(Packet("swarm", packet.meta, payload), size, contribution.codec)
