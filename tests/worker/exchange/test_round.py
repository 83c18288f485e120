"""A round: any order of arrival gives the same bits, and what fails is in the receipt, never a result."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from atoll.collective import TOTAL, owner_shares
from atoll.errors import BadFrame, UsageError
from atoll.exchange import Exchange, ExchangeRound, Pattern
from compressors.vector import UNCOMPRESSED, chosen, dense, pack
from strategies.exchanges import make_rule
from strategies.exchanges.base import Contribution, Flat
from strategies.exchanges.swarm import TAIL
from tests.inprocess.exchange import Faults, carry, damaged, run_round
from worker.exchange.round import CollectiveRun, Message, digest_of
from worker.exchange.schedule import collective_of

SIZE = 1000
EVERYONE = (0, 1, 2, 3)
AT = ExchangeRound(7, EVERYONE, seed=3)


def contents(ranks: tuple[int, ...] = EVERYONE) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {rank: torch.randn(SIZE, generator=generator) for rank in ranks}


def none_of(ranks: tuple[int, ...] = EVERYONE) -> dict[int, None]:
    return dict.fromkeys(ranks)


@pytest.mark.parametrize("pattern", [Pattern.OWNERS, Pattern.TREE, Pattern.GATHERED])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_changes_no_bit(pattern: Pattern, seed: int) -> None:
    rule = make_rule(Exchange("sum"))
    own = contents()
    expected = own[0].clone()
    for rank in EVERYONE[1:]:
        expected += own[rank]
    parts = {rank: Contribution(dense(own[rank])) for rank in EVERYONE}
    collective = collective_of(pattern, [EVERYONE], parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    carry(runs, Faults(pick=random.Random(seed).randrange))
    digests = {run.receipt().digest for run in runs.values()}
    assert len(digests) == 1
    for run in runs.values():
        receipt = run.receipt()
        assert receipt.complete
        assert receipt.expected == EVERYONE
        result = rule.settle(run.exchanged(None, own[0])).result  # type: ignore[union-attr]
        if pattern is not Pattern.TREE:  # a tree adds neighbours first
            assert torch.equal(result, expected)


def test_receipts_show_whose_total_is_another_at_one_rank() -> None:
    rule = make_rule(Exchange("mean"))
    parts = {rank: Contribution(dense(value)) for rank, value in contents().items()}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    waiting = [message for run in runs.values() for message in run.start()]
    while waiting:
        message = waiting.pop()
        if message.label == TOTAL and (message.source, message.target) == (1, 3):
            packet = pack(dense(torch.zeros(collective.segments[message.segment].size)), UNCOMPRESSED)
            message = replace(message, packet=packet, digest=digest_of(packet, message.included))
        waiting += runs[message.target].receive(message)
    totals = {rank: run.receipt().totals for rank, run in runs.items()}
    assert totals[0] == totals[1] == totals[2]
    assert set(totals[0]) == set(EVERYONE)
    assert [owner for owner in EVERYONE if totals[3][owner] != totals[0][owner]] == [1]
    assert runs[3].receipt().digest != runs[0].receipt().digest


def test_blocks_of_several_ranks_are_added_in_their_order() -> None:
    rule = make_rule(Exchange("sum"))
    blocks = contents((0, 1, 2, 3, 4))
    expected = blocks[0].clone()
    for block in (1, 2, 3, 4):
        expected += blocks[block]
    labels = {0: (1, 4), 1: (0,), 2: (2, 3)}
    parts = {rank: {b: Contribution(dense(blocks[b])) for b in held} for rank, held in labels.items()}
    collective = collective_of(Pattern.OWNERS, [(0, 1, 2)], parts[1][0], labels=labels)
    runs = {rank: CollectiveRun(rule, collective, rank, AT, parts[rank]) for rank in labels}
    carry(runs)
    for run in runs.values():
        assert torch.equal(rule.settle(run.exchanged(None, blocks[0])).result, expected)  # type: ignore[union-attr]
        assert run.receipt().included == (0, 1, 2, 3, 4)


def test_a_dead_rank_is_named_and_its_segment_is_nobodys() -> None:
    answers = run_round(
        make_rule(Exchange("mean")), contents(), none_of(), AT, [EVERYONE], faults=Faults(dead=frozenset({2}))
    )
    for rank in (0, 1, 3):
        receipt = answers[rank].receipts[0]
        assert not receipt.complete
        assert receipt.share == 0.0
        assert receipt.included == ()
        assert [peer for peer, _ in receipt.faults] == [2]
        assert torch.equal(answers[rank].state[500:750], contents()[rank][500:750])
        assert torch.count_nonzero(answers[rank].state) == 250


def test_a_lost_part_is_left_out_at_one_owner_and_stays_with_its_rank() -> None:
    def lose(message: Message) -> Message | None:
        return None if (message.source, message.target, message.label) == (1, 3, 1) else message

    answers = run_round(
        make_rule(Exchange("mean")), contents(), none_of(), AT, [EVERYONE], faults=Faults(alter=lose)
    )
    receipts = {rank: answer.receipts[0] for rank, answer in answers.items()}
    assert {receipt.included for receipt in receipts.values()} == {(0, 2, 3)}
    assert {receipt.share for receipt in receipts.values()} == {0.75}
    assert len({receipt.digest for receipt in receipts.values()}) == 1
    assert torch.equal(answers[1].state[750:], contents()[1][750:])
    assert not answers[0].state.any()
    others = (contents()[0] + contents()[2] + contents()[3]) / 3
    assert torch.allclose(answers[0].result[750:], others[750:])


def test_an_exact_sum_is_for_all_or_for_none() -> None:
    def lose(message: Message) -> Message | None:
        return None if (message.source, message.target, message.label) == (1, 3, 1) else message

    own = contents()
    answers = run_round(make_rule(Exchange("sum")), own, none_of(), AT, [EVERYONE], faults=Faults(alter=lose))
    assert all(torch.equal(answers[rank].result, own[rank]) for rank in EVERYONE)
    assert not any(answer.receipts[0].complete for answer in answers.values())


@pytest.mark.parametrize("pattern", list(Pattern))
@pytest.mark.parametrize("fault", ["lost", "damaged", "other size"])
def test_one_fault_of_each_kind_in_each_collective_is_a_status(pattern: Pattern, fault: str) -> None:
    rule = make_rule(Exchange("mean"))
    parts = {rank: Contribution(dense(value)) for rank, value in contents().items()}
    groups = [(0, 1), (2, 3)] if pattern in (Pattern.PAIRWISE, Pattern.PUBLISHED) else [EVERYONE]
    collective = collective_of(pattern, groups, parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    spoiled = iter(range(10_000))

    def alter(message: Message) -> Message | None:
        if next(spoiled):
            return message
        if fault == "lost":
            return None
        if fault == "damaged":
            return damaged(message)
        packet = parts[0].codec.compress(torch.zeros(3))[0]
        return replace(message, packet=packet)

    carry(runs, Faults(alter=alter))
    receipts = [run.receipt() for run in runs.values()]
    assert any(not receipt.complete for receipt in receipts)
    assert any(receipt.faults for receipt in receipts)


def test_forged_messages_are_refused() -> None:
    rule = make_rule(Exchange("mean"))
    parts = {rank: Contribution(dense(value)) for rank, value in contents().items()}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    message = next(m for m in runs[1].start() if m.target == 0)
    for bad, words in (
        (replace(message, round=6), "round 6"),
        (replace(message, phase=1), r"round 7\.1"),
        (replace(message, source=2), "has no part"),
        (replace(message, target=2), "has no part"),
        (replace(message, label=TOTAL), "has no part"),
        (replace(message, segment=99), "has no part"),
        (replace(message, included=(1, 2)), "digest"),
        (damaged(message), "digest"),
    ):
        with pytest.raises(BadFrame, match=words):
            runs[0].receive(bad)
    runs[0].receive(message)
    assert runs[0].receive(message) == []  # a repetition has no effect


def test_a_claim_to_hold_more_than_is_possible_is_refused() -> None:
    rule = make_rule(Exchange("mean"))
    parts = {rank: Contribution(dense(value)) for rank, value in contents().items()}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    run = CollectiveRun(rule, collective, 0, AT, {0: parts[0]})
    peer = CollectiveRun(rule, collective, 1, AT, {1: parts[1]})
    message = next(m for m in peer.start() if m.target == 0)
    for included in ((1, 2), ()):
        forged = replace(message, included=included, digest=digest_of(message.packet, included))
        with pytest.raises(BadFrame, match="claims"):
            run.receive(forged)


def test_labels_that_repeat_are_refused() -> None:
    """They would pass for a larger share of the sum than a part is, whose owner then has an infinite one."""
    rule, own = make_rule(Exchange("wagma")), contents()
    own[1][:250] = 3e38  # the segment of rank 0
    parts = {rank: Contribution(dense(own[rank])) for rank in EVERYONE}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    run = CollectiveRun(rule, collective, 0, AT, {0: parts[0]})
    peer = CollectiveRun(rule, collective, 1, AT, {1: parts[1]})
    message = next(m for m in peer.start() if m.target == 0)
    repeated = (1, 1, 1, 1)
    forged = replace(message, included=repeated, digest=digest_of(message.packet, repeated))
    with pytest.raises(BadFrame, match="labels that do not ascend"):
        run.receive(forged)


def test_a_copy_that_has_not_been_through_its_codec_is_refused_as_it_comes() -> None:
    """With positions it might have a lattice's exponent that no byte has, and is read after the commit."""
    rule, ranks = make_rule(Exchange("swarm")), (0, 1)
    flat = Flat(((SIZE,),))
    parts = {r: rule.contribute(own, rule.init(flat, own), AT, r) for r, own in contents(ranks).items()}
    collective = collective_of(Pattern.PUBLISHED, [ranks, ranks[::-1]], parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in ranks}
    message = next(m for m in runs[1].start() if m.target == 0)
    hostile = parts[1].vector.values.clone()
    hostile[-TAIL] = 2000.0
    packet = pack(chosen(dense(hostile), torch.arange(len(hostile))), UNCOMPRESSED)
    forged = replace(message, packet=packet, digest=digest_of(packet, message.included))
    with pytest.raises(BadFrame, match="comes with positions"):
        runs[0].receive(forged)
    runs[0].start()
    runs[0].receive(message)
    assert runs[0].finished


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_a_model_that_is_not_finite_or_makes_its_sum_so_is_refused_and_joined_with_none(bad: float) -> None:
    own = contents()
    own[1][600] = bad  # in the segment of rank 2
    rule = make_rule(Exchange("wagma"))
    parts = {rank: Contribution(dense(own[rank])) for rank in EVERYONE}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    to = {message.target: message for message in runs[1].start()}
    with pytest.raises(BadFrame, match="part 1 of segment 2 holds what is not finite"):
        runs[2].receive(to[2])
    runs[3].receive(to[3])  # whose elements are
    answers = run_round(rule, own, none_of(), AT, [EVERYONE])
    assert all(bool(torch.isfinite(answers[rank].result).all()) for rank in (0, 2, 3))


@pytest.mark.parametrize("codec", ["none", "fp16", "int8_block", "int4_block"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_change_that_is_not_finite_is_refused_in_every_codec(codec: str, bad: float) -> None:
    rule, flat = make_rule(Exchange("diloco", codec=codec)), Flat(((SIZE,),))
    own = contents()
    parts = {r: rule.contribute(own[r], rule.init(flat, torch.zeros(SIZE)), AT, r) for r in EVERYONE}
    hostile = replace(parts[1], vector=dense(torch.full((SIZE,), bad)))
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    runs = {r: CollectiveRun(rule, collective, r, AT, {r: parts[r] if r != 1 else hostile}) for r in EVERYONE}
    waiting = [message for run in runs.values() for message in run.start()]
    with pytest.raises(BadFrame, match="part 1 of segment 0 holds what is not finite"):
        runs[0].receive(next(m for m in waiting if (m.source, m.target) == (1, 0)))
    for message in waiting:
        if message.target == 1:
            waiting += runs[1].receive(message)
    total = next(m for m in waiting if (m.source, m.target, m.label) == (1, 0, TOTAL))
    with pytest.raises(BadFrame, match=f"part {TOTAL} of segment 1 holds what is not finite"):
        runs[0].receive(total)


@pytest.mark.parametrize("codec", ["int8_block", "int4_block"])
def test_a_scale_that_is_not_finite_is_refused_though_all_it_scales_is_zero(codec: str) -> None:
    rule, flat = make_rule(Exchange("diloco", codec=codec)), Flat(((SIZE,),))
    parts = {r: rule.contribute(own, rule.init(flat, own), AT, r) for r, own in contents().items()}
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0])
    run = CollectiveRun(rule, collective, 0, AT, {0: parts[0]})
    message = next(m for m in CollectiveRun(rule, collective, 1, AT, {1: parts[1]}).start() if m.target == 0)
    packet = pack(dense(torch.cat([torch.full((1,), torch.inf), torch.zeros(249)])), parts[0].codec)
    forged = replace(message, packet=packet, digest=digest_of(packet, message.included))
    with pytest.raises(BadFrame, match="holds what is not finite"):
        run.receive(forged)


def test_parts_within_the_bound_have_a_finite_sum_in_any_codec() -> None:
    """The owner of the sum is not caught with what rounding makes of the largest parts that it must take."""
    largest = torch.finfo(torch.float32).max / 8.5  # of the eighth, which codecs round
    for codec in ("none", "fp16", "int8_block", "int4_block"):
        rule = make_rule(Exchange("diloco", codec=codec))
        settings = rule.contribute(torch.zeros(SIZE), rule.init(Flat(((SIZE,),)), torch.zeros(SIZE)), AT, 0)
        part = replace(settings, vector=dense(torch.full((SIZE,), largest)))
        collective = collective_of(Pattern.OWNERS, [EVERYONE], part)
        runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: part}) for rank in EVERYONE}
        carry(runs)
        assert all(run.receipt().complete for run in runs.values()), codec


def test_groups_that_do_not_fit_the_pattern_are_refused() -> None:
    part = Contribution(dense(torch.zeros(10)), borders=(5,))
    with pytest.raises(UsageError, match="takes pairs"):
        collective_of(Pattern.PAIRWISE, [EVERYONE], part)
    with pytest.raises(UsageError, match="2 segments for 4"):
        collective_of(Pattern.OWNERS, [EVERYONE], part)


@pytest.mark.parametrize("rates", [(1.0,) * 4, (1.0, 1.0, 2.0, 4.0), (0.0, 3.0, 1.0, 1.0)])
def test_a_dense_exchange_sends_what_the_shares_say_within_2_percent(rates: tuple[float, ...]) -> None:
    size = 400_000
    rule = make_rule(Exchange("sum"))
    parts = {rank: Contribution(dense(torch.zeros(size))) for rank in EVERYONE}
    shares = dict(zip(EVERYONE, owner_shares(rates), strict=True))
    collective = collective_of(Pattern.OWNERS, [EVERYONE], parts[0], shares=shares)
    runs = {rank: CollectiveRun(rule, collective, rank, AT, {rank: parts[rank]}) for rank in EVERYONE}
    carry(runs)
    for rank, run in runs.items():
        expected = 4 * size * (1 + (len(EVERYONE) - 2) * shares[rank])  # 2 (R - 1) / R at even shares
        assert run.receipt().sent_bytes == pytest.approx(expected, rel=0.02)
        assert run.receipt().received_bytes == pytest.approx(expected, rel=0.02)
