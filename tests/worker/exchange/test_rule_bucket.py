"""Buckets by a rule over a shuffled network: who awaits what, and rows that are too short for all owners."""

from __future__ import annotations

import random

import pytest
import torch

from atoll.exchange import Exchange, ExchangeRound
from atoll.gradient_exchange import Arriving, Bucket, joining
from strategies.exchanges import make_rule
from worker.exchange.kept import KeptState
from worker.exchange.rule_bucket import RuleBucket, arrivals

RANKS = (0, 1, 2)


def bucket(exchange: Exchange, shape: tuple[int, ...], replica: int) -> Bucket:
    elements = torch.Size(shape).numel()
    labels = {number: (number,) for number in RANKS}
    collective = joining(exchange, RANKS, labels, elements)
    return Bucket(7, ("w",), (elements,), replica, RANKS, collective, (), (replica,))


@pytest.mark.parametrize("shape", [(2, 40), (40, 2), (1,), (2,), (5, 5)])
@pytest.mark.parametrize(
    "exchange",
    [
        Exchange("mean", codec="int8_block"),
        Exchange("powersgd", ratio=2.0),
        Exchange("acp_sgd", ratio=2.0),
        Exchange("random_k", ratio=3.0),
        Exchange("gtopk", ratio=3.0),
        Exchange("ok_topk", ratio=3.0),
        Exchange("demo", ratio=3.0),
    ],
)
def test_nobody_awaits_what_nobody_sends(exchange: Exchange, shape: tuple[int, ...]) -> None:
    """Of a matrix of two rows one of ACP-SGD's factors has two elements, and three owners share it."""
    kept, rule = [KeptState() for _ in RANKS], make_rule(exchange)
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    for step in range(3):
        at = ExchangeRound(step, RANKS, 5, (1.0, 1.0, 2.0))
        runs = [RuleBucket(bucket(exchange, shape, n), rule, at, [shape], kept[n]) for n in RANKS]
        awaited = [dict(arrivals(run.bucket, rule, [shape])) for run in runs]
        waiting = []
        for n in RANKS:
            parts = {"w": torch.randn(shape, generator=generator)}
            waiting += [(n, message) for message in runs[n].contribute(n, parts)]
        while waiting:
            source, message = waiting.pop(draw.randrange(len(waiting)))
            arriving = Arriving(message.segment, message.label, source, message.phase)
            most = awaited[message.to].pop(arriving)
            assert len(message.value) <= most
            waiting += [(message.to, answer) for answer in runs[message.to].take(arriving, message.value)]
        assert not any(run.awaits(one) for run, left in zip(runs, awaited, strict=True) for one in left)
        assert all(run.finished for run in runs)
        first, *others = (run.totals()["w"] for run in runs)
        assert first is not None
        assert all(other is not None and torch.equal(first, other) for other in others)
        for held in kept:
            held.commit()


def test_a_round_whose_regions_stand_has_one_phase_and_awaits_no_other() -> None:
    """Ok-Topk proposes borders where the last ones were uneven; else its sums are a round's only messages."""
    rule, shape = make_rule(Exchange("ok_topk", ratio=5.0)), (60, 60)
    kept, phases = [KeptState() for _ in RANKS], []
    own = {n: torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in RANKS}
    for step in range(4):
        at = ExchangeRound(step, RANKS, 5, (1.0, 1.0, 2.0))
        runs = [RuleBucket(bucket(rule.exchange, shape, n), rule, at, [shape], kept[n]) for n in RANKS]
        waiting = [(n, message) for n in RANKS for message in runs[n].contribute(n, {"w": own[n]})]
        seen = set()
        while waiting:
            source, message = waiting.pop(0)
            seen.add(message.phase)
            arriving = Arriving(message.segment, message.label, source, message.phase)
            answers = runs[message.to].take(arriving, message.value)
            waiting += [(message.to, answer) for answer in answers]
        phases.append(seen)
        for run in runs:
            assert run.finished
            assert not any(run.awaits(one) for one, _ in arrivals(run.bucket, rule, [shape]))
        for held in kept:
            held.commit()
    assert phases[0] == {0, 1}
    assert {1} in phases
