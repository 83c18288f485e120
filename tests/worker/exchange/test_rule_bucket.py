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
