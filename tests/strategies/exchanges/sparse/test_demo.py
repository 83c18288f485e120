"""DeMo: coefficients averaged over their senders, signs as the result, and the rest of the momentum kept."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from atoll.collective import cut, even_shares
from atoll.exchange import Exchange, ExchangeRound
from atoll.opdag import TensorMeta
from compressors.contrib.sparse.dct_topk import dct_of, inverse_dct
from compressors.contrib.sparse.sizes import dct_blocks, dct_kept
from compressors.sparse_sizes import vector_bytes
from compressors.vector import Vector
from strategies.exchanges import make_rule
from strategies.exchanges.base import Flat
from tests.strategies.exchanges.rounds import Rounds, gradients, same_bits

SHAPES = ((128, 64), (64,), (40, 30), (7,), ())
SIZE = 128 * 64 + 64 + 40 * 30 + 7 + 1
RATIO = 20.0
RULE = make_rule(Exchange("demo", ratio=RATIO))


def rounds_of(ranks: int) -> Rounds:
    return Rounds(RULE, ranks, SIZE, SHAPES)


def spectrum(flat: Tensor) -> Tensor:
    """Cosine coefficients of all tensors in a row."""
    parts = torch.split(flat, [TensorMeta(shape, "float32").elements for shape in SHAPES])
    blocks = [dct_blocks(TensorMeta(shape, "float32")) for shape in SHAPES]
    return torch.cat([dct_of(part, block).reshape(-1) for part, block in zip(parts, blocks, strict=True)])


def test_what_was_sent_is_taken_out_of_the_momentum_and_nothing_else() -> None:
    rounds = rounds_of(3)
    own = gradients(3, SIZE)
    rounds.play(own)
    for rank in range(3):
        part = RULE.contribute(own[rank], rounds_of(3).states[rank], ExchangeRound(0, (0, 1, 2)), rank)
        sent = part.vector.dense()
        left = spectrum(rounds.states[rank].momentum)
        assert torch.allclose(left + sent, spectrum(own[rank]), atol=1e-4)
        assert float(left[sent != 0].abs().max()) < 1e-4


def test_of_every_block_the_largest_coefficients_travel() -> None:
    own = gradients(1, SIZE)[0]
    part = RULE.contribute(own, rounds_of(1).states[0], ExchangeRound(0, (0,)), 0)
    kept = dct_kept(TensorMeta((128, 64), "float32"), RATIO)
    for block in range(2):
        here = part.vector.part(4096 * block, 4096 * (block + 1))
        best = spectrum(own)[4096 * block : 4096 * (block + 1)].abs().topk(kept).indices.sort().values
        assert torch.equal(here.positions, best)


def test_the_momentum_decays_and_gathers() -> None:
    rounds = rounds_of(2)
    own = gradients(2, SIZE)
    rounds.play(own)
    again = RULE.contribute(own[1], rounds.states[1], ExchangeRound(1, (0, 1)), 1)
    assert torch.equal(again.carry.momentum, 0.999 * rounds.states[1].momentum + own[1])


def test_gradients_of_rounds_given_up_join_with_the_next_undecayed() -> None:
    state = rounds_of(1).states[0]
    own = gradients(1, SIZE)[0]
    after = RULE.undelivered(RULE.contribute(own, state, ExchangeRound(0, (0, 1)), 0), state)
    assert torch.equal(after.late, own)
    again = RULE.contribute(own, after, ExchangeRound(1, (0, 1)), 0)
    assert torch.equal(again.carry.momentum, 2 * own)


def test_a_coefficient_is_averaged_over_those_that_sent_it() -> None:
    parts = [
        Vector(6, torch.tensor([4.0, 2.0]), torch.tensor([0, 3])),
        Vector(6, torch.tensor([8.0, 1.0]), torch.tensor([0, 5])),
    ]
    own = RULE.contribute(torch.zeros(SIZE), rounds_of(1).states[0], ExchangeRound(0, (0,)), 0)
    merged = RULE.merge(parts, own)
    assert merged.kept_back is None
    assert torch.equal(merged.total.dense(), torch.tensor([6.0, 0.0, 0.0, 2.0, 0.0, 1.0]))


def test_the_result_is_the_sign_of_the_mean_of_the_coefficients() -> None:
    rounds = rounds_of(4)
    own = gradients(4, SIZE)
    answers = rounds.play(own)
    sent = [
        RULE.contribute(own[rank], rounds_of(4).states[rank], ExchangeRound(0, (0, 1, 2, 3)), rank)
        for rank in range(4)
    ]
    dense = torch.stack([part.vector.dense() for part in sent])
    means = dense.sum(0) / (dense != 0).sum(0).clamp(min=1)
    first = inverse_dct(means[: 128 * 64], dct_blocks(TensorMeta((128, 64), "float32"))).reshape(-1)
    clear = first.abs() > 1e-4
    assert torch.equal(answers[0].result[: 128 * 64][clear], first.sign()[clear])
    assert set(answers[0].result.unique().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_hold_the_same_bits_whatever_the_order_of_arrival(ranks: int) -> None:
    results = []
    for seed in range(3):
        rounds = rounds_of(ranks)
        for number in range(3):
            answers = rounds.play(gradients(ranks, SIZE, number), number, pick=random.Random(seed).randrange)
            assert same_bits(answers)
        results.append(answers[0].result)
    assert all(torch.equal(results[0], other) for other in results)


def test_a_contribution_takes_the_bytes_that_the_ratio_allows() -> None:
    rounds = rounds_of(4)
    rounds.play(gradients(4, SIZE))
    sent = sum(len(m.packet.payload) for m in rounds.messages if m.source == 1 and m.label == 1)
    metas = [TensorMeta(shape, "float32") for shape in SHAPES]
    kept = sum(dct_blocks(m).coefficients.shape[0] * dct_kept(m, RATIO) for m in metas)
    total = sum(dct_blocks(m).coefficients.elements for m in metas)
    assert sent == pytest.approx(vector_bytes(kept, total) * 3 / 4, rel=0.15)
    assert sent < 4 * SIZE / RATIO * 1.1


def test_a_lost_part_stays_in_its_rank_s_momentum() -> None:
    rounds = rounds_of(4)
    own = gradients(4, SIZE)
    answers = rounds.play(own, lose=lambda m: (m.source, m.target, m.label) == (1, 2, 1))
    assert same_bits(answers)
    assert not answers[1].receipts[0].complete
    part = RULE.contribute(own[1], rounds_of(4).states[1], ExchangeRound(0, (0, 1, 2, 3)), 1)
    lost = cut(part.vector.size, even_shares(4))[2]
    sent = part.vector.dense()
    sent[lost.start : lost.stop] = 0.0
    assert torch.allclose(spectrum(rounds.states[1].momentum), spectrum(own[1]) - sent, atol=1e-4)


def test_with_a_dead_owner_the_living_keep_its_coefficients() -> None:
    rounds = rounds_of(3)
    own = gradients(3, SIZE)
    answers = rounds.play(own, dead=frozenset({0}))
    assert same_bits(answers)
    part = RULE.contribute(own[1], rounds_of(3).states[1], ExchangeRound(0, (0, 1, 2)), 1)
    sent = part.vector.dense()
    sent[: cut(part.vector.size, even_shares(3))[0].stop] = 0.0
    assert torch.allclose(spectrum(rounds.states[1].momentum), spectrum(own[1]) - sent, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_changes_no_state(bad: float) -> None:
    rounds = rounds_of(3)
    rounds.play(gradients(3, SIZE))
    before = dict(rounds.states)
    own = gradients(3, SIZE, seed=1)
    own[2][4711] = bad
    answers = rounds.play(own, 1)
    assert all(bool(torch.isnan(answer.result).any()) for answer in answers.values())
    assert all(rounds.states[rank] is before[rank] for rank in before)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_stored_by_tensor_is_the_state_again(late: bool) -> None:
    rounds, flat = rounds_of(2), Flat(SHAPES)
    own = gradients(2, SIZE)
    rounds.play(own)
    state = rounds.states[1]
    if late:
        state = RULE.undelivered(RULE.contribute(own[1], state, ExchangeRound(1, (0, 1)), 1), state)
    again = RULE.resumed(RULE.stored(state, flat), flat)
    assert torch.equal(again.momentum, state.momentum)
    assert again.tensors == state.tensors
    assert (again.late is None) is not late
    assert not late or torch.equal(again.late, state.late)
