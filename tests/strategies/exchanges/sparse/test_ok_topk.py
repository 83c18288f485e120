"""Ok-Topk: below 6k(P-1)/P received in every round, regions of equal share, old thresholds, nothing lost."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import Tensor

from atoll.collective import TOTAL, Segment
from atoll.exchange import Exchange, ExchangeRound
from compressors.sparse_sizes import vector_kept
from compressors.vector import dense
from strategies.exchanges import make_rule
from strategies.exchanges.base import Contribution, Exchanged, Flat, Piece, is_own
from strategies.exchanges.sparse.ok_topk import SUMS, OkState, OkTopK
from tests.strategies.exchanges.rounds import Rounds, gradients, same_bits

SIZE, RATIO = 20_000, 50.0
KEPT = vector_kept(SIZE, RATIO)
RULE = make_rule(Exchange("ok_topk", ratio=RATIO))
SCALE = torch.linspace(3.0, 0.1, SIZE)  # even regions would be far from equal shares


def uneven(ranks: int, seed: int) -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(SIZE, generator=draw)
    return {rank: SCALE * (common + torch.randn(SIZE, generator=draw)) for rank in range(ranks)}


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_no_rank_receives_6k_values_and_positions_in_any_round(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    bound = 6 * KEPT * (ranks - 1) / ranks
    received, ratios = [], []
    for number in range(96 // ranks):
        answers = rounds.play(uneven(ranks, number), number)
        assert same_bits(answers)
        received.append(2 * max(rounds.pairs_received().values()))
        assert received[-1] < bound
        regions = [0] * ranks
        for message in rounds.messages:
            if message.phase == SUMS and message.label != TOTAL:
                regions[message.target] += message.packet.wire_bytes
        ratios.append(max(regions) / mean(regions))
    assert mean(received) < 0.9 * bound
    assert mean(ratios) < 1.3


def test_equal_regions_would_be_far_from_equal_shares() -> None:
    rounds = Rounds(RULE, 8, SIZE)
    rounds.play(uneven(8, 0))
    borders = rounds.states[0].borders
    assert len(borders) == 7
    assert list(borders) == sorted(borders)
    assert borders[3] < 0.35 * SIZE  # half of what is kept lies below


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_updates_and_residuals_add_up_to_the_contributions(ranks: int) -> None:
    rounds = Rounds(RULE, ranks, SIZE)
    brought, applied = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(6):
        own = uneven(ranks, number)
        answers = rounds.play(own, number, pick=random.Random(number).randrange)
        assert same_bits(answers)
        assert all(receipt.complete for answer in answers.values() for receipt in answer.receipts)
        brought += sum(own.values())
        applied += ranks * answers[0].result
    left = sum(state.residual for state in rounds.states.values())
    assert float((applied + left - brought).abs().max()) <= 1e-5 * float(brought.abs().max())


def test_a_residual_is_zero_only_where_an_entry_was_kept_and_chosen() -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own)
    chosen = answers[0].result != 0
    for rank in range(4):
        kept = own[rank].abs() >= own[rank].abs().topk(KEPT).values[-1]
        taken = rounds.states[rank].residual == 0
        assert torch.equal(taken, chosen & kept)
        assert torch.equal(rounds.states[rank].residual[~taken], own[rank][~taken])


def test_thresholds_are_exact_at_first_and_then_re_used() -> None:
    rule = OkTopK(Exchange("ok_topk", ratio=RATIO), renew=4)
    rounds = Rounds(rule, 4, SIZE)
    own = gradients(4, SIZE)
    answers = rounds.play(own)
    sums = (4 * answers[0].result).abs()
    assert rounds.states[0].threshold == pytest.approx(float(sums.topk(KEPT).values[-1]), rel=1e-6)
    steady = OkState(torch.zeros(SIZE), rounds.states[0].local, 4.0, (5000, 10_000, 15_000))
    again = rule.contribute(own[0], steady, ExchangeRound(1, (0, 1, 2, 3)), 0)
    assert again.carry.local == steady.local  # own[0] has about k entries above it
    assert again.carry.threshold == 4.0
    renewed = rule.contribute(own[0], steady, ExchangeRound(8, (0, 1, 2, 3)), 0)
    assert renewed.carry.threshold is None


def test_regions_are_proposed_first_and_then_kept() -> None:
    rounds = Rounds(RULE, 4, SIZE)
    phases = []
    for number in range(66):
        # The same positions again and again: their shares do not move.
        own = {rank: SCALE * value for rank, value in gradients(4, SIZE).items()}
        rounds.states = {
            rank: OkState(torch.zeros(SIZE), s.local, s.threshold, s.borders, s.uneven)
            for rank, s in rounds.states.items()
        }
        phases.append(len(rounds.play(own, number)[0].receipts))
    assert [at for at, count in enumerate(phases) if count == 2] == [0, 64]


def test_an_owner_of_too_much_sends_its_largest_sums() -> None:
    own = {rank: torch.zeros(SIZE) for rank in range(4)}
    for value in own.values():
        value[:KEPT] = torch.arange(1.0, KEPT + 1)
    rounds = Rounds(RULE, 4, SIZE)
    rounds.states = {rank: OkState(torch.zeros(SIZE), None, 1.0, (5000, 10_000, 15_000)) for rank in range(4)}
    answers = rounds.play(own, 1)
    most = -(-3 * KEPT // 8)
    assert torch.equal(answers[0].result[KEPT - most : KEPT], own[0][KEPT - most : KEPT])
    assert int((answers[0].result != 0).sum()) == most
    assert rounds.states[0].uneven


@pytest.mark.parametrize("phase", [0, 1])
def test_a_round_with_a_lost_message_counts_for_nobody(phase: int) -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own, lose=lambda m: (m.phase, m.source, m.target) == (phase, 1, 3))
    assert not all(answer.receipts[-1].complete for answer in answers.values())
    assert all(torch.equal(rounds.states[rank].residual, own[rank]) for rank in range(4))
    assert all(rounds.states[rank].borders == () for rank in range(4))


def test_the_living_keep_all_when_a_rank_dies() -> None:
    own = gradients(4, SIZE)
    rounds = Rounds(RULE, 4, SIZE)
    answers = rounds.play(own, dead=frozenset({0}))
    assert sorted(answers) == [1, 2, 3]
    assert all(torch.equal(rounds.states[rank].residual, own[rank]) for rank in (1, 2, 3))


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_changes_no_state() -> None:
    rounds = Rounds(RULE, 3, SIZE)
    rounds.play(gradients(3, SIZE))
    before = dict(rounds.states)
    own = gradients(3, SIZE, seed=1)
    own[2][4711] = torch.nan
    answers = rounds.play(own, 1)
    assert all(bool(torch.isnan(answer.result).any()) for answer in answers.values())
    assert all(rounds.states[rank] is before[rank] for rank in before)


def test_what_is_stored_by_tensor_is_the_state_again_and_another_row_begins_anew() -> None:
    flat = Flat(((100, 50), (3,), (14_997,)))
    rounds = Rounds(RULE, 3, SIZE, flat.shapes)
    for number in range(3):
        rounds.play(uneven(3, number), number)
    state = rounds.states[1]
    assert state.borders
    kept = RULE.stored(state, flat)
    again = RULE.resumed(kept, flat)
    assert torch.equal(again.residual, state.residual)
    assert replace(again, residual=state.residual) == state
    swapped = Flat(((3,), (100, 50), (14_997,)))
    other = RULE.resumed([kept[1], kept[0], kept[2]], swapped)
    assert torch.equal(other.residual[:3], state.residual[5000:5003])
    assert (other.local, other.threshold, other.borders) == (None, None, ())
    part = RULE.resumed(kept[:2], Flat(flat.shapes[:2]))
    assert (part.residual.numel(), part.borders) == (5003, ())
    # Who begins beside others has what all know, and a threshold of its own to find.
    shared = [{key: value for key, value in one.items() if not is_own(key)} for one in kept]
    newcomer = RULE.resumed(shared, flat)
    assert (newcomer.borders, newcomer.threshold, newcomer.local) == (state.borders, state.threshold, None)
    assert not newcomer.residual.any()


@pytest.mark.parametrize("wrong", [(5.0, 3.0), (-1.0, 4.0), (3.0, float("nan")), (3.0, 1e9)])
def test_borders_that_cannot_be_are_found_anew(wrong: tuple[float, ...]) -> None:
    flat = Flat(((SIZE,),))
    row = torch.tensor([0.0, SIZE, 2.0, 0.0, *wrong], dtype=torch.float64)
    state = RULE.resumed([{"value": torch.zeros(SIZE), "regions": row}], flat)
    assert (state.borders, state.threshold) == ((), None)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
def test_whatever_is_proposed_regions_ascend_within_the_row(odd: float) -> None:
    at = ExchangeRound(0, (0, 1, 2, 3))
    state = RULE.init(Flat(((SIZE,),)), torch.zeros(SIZE))
    first = RULE.contribute(gradients(1, SIZE)[0], state, at, 0)
    everyone = frozenset(at.ranks)
    total = dense(torch.tensor([4 * 700.0, odd, 4 * 9000.0]))
    done = Exchanged(
        0, at, first, first.vector, (Piece(Segment(0, 3), total, everyone),), state, torch.zeros(1)
    )
    found = RULE.settle(done)
    assert isinstance(found, Contribution)
    edges = (0, *found.borders, SIZE)
    assert list(edges) == sorted(edges)
