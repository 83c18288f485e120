"""Buckets of gradients over a shuffled network: the bits of a fold over all blocks in order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from atoll.block_sums import fold
from atoll.exchange import Exchange
from atoll.gradient_exchange import Arriving, Bucket, joining
from worker.exchange.bucket import BucketRun

NAMES = ("head", "empty", "bias", "odd")
SIZES = (37, 5, 1, 12)


def bucket(
    replica: int, labels: dict[int, tuple[int, ...]], rates: list[float], sites: tuple[int, ...] = ()
) -> Bucket:
    exchange = Exchange(rates=tuple(rates), sites=sites, inner=Exchange() if sites else None)
    collective = joining(exchange, range(len(labels)), labels, sum(SIZES) + len(SIZES))
    arriving = tuple(Arriving(*key, source) for key, source in collective.sources(replica).items())
    return Bucket(9, NAMES, SIZES, replica, tuple(range(len(labels))), collective, arriving, labels[replica])


@pytest.mark.parametrize("joined_sites", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_totals_have_the_bits_of_one_fold_over_the_blocks_in_order(seed: int, joined_sites: bool) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = draw.randint(2, 6)
    sites = tuple(sorted(draw.choices(range(3), k=count))) if joined_sites else ()
    blocks, labels = iter(range(1, 20)), {0: (0,)}
    for replica in range(1, count):
        labels[replica] = tuple(next(blocks) for _ in range(draw.randint(1, 3)))
    rates = [draw.uniform(1, 9) for _ in range(count)]

    def part(name: str, size: int) -> Tensor | None:
        nothing = name == "empty" or (name == "odd" and draw.random() < 0.5)
        return None if nothing else torch.randn(size, generator=generator)

    parts = {
        label: {name: part(name, size) for name, size in zip(NAMES, SIZES, strict=True)}
        for held in labels.values()
        for label in held
    }
    runs = {replica: BucketRun(bucket(replica, labels, rates, sites)) for replica in labels}
    due = [(replica, label) for replica, held in labels.items() for label in held]
    draw.shuffle(due)
    waiting = []
    while due or waiting:
        if due and (not waiting or draw.random() < 0.5):
            replica, label = due.pop()
            waiting += [(replica, m) for m in runs[replica].contribute(label, parts[label])]
        else:
            source, message = waiting.pop(draw.randrange(len(waiting)))
            bits = message.value.clone()
            waiting += [
                (message.to, m) for m in runs[message.to].receive(message.segment, message.label, bits)
            ]
            assert source != message.to
    for run in runs.values():
        assert run.finished
        totals = run.totals()
        for name, size in zip(NAMES, SIZES, strict=True):
            wanted = fold(None if (p := parts[label][name]) is None else p.clone() for label in sorted(parts))
            total = totals[name]
            assert (total is None) == (wanted is None)
            if total is not None and wanted is not None:
                assert total.shape == (size,)
                assert torch.equal(total, wanted)


def test_a_part_travels_only_once_it_is_contributed() -> None:
    run = BucketRun(bucket(1, {0: (0,), 1: (1, 2)}, [1.0, 1.0]))
    parts = dict(zip(NAMES, (torch.ones(size) for size in SIZES), strict=True))
    assert [(m.to, m.label) for m in run.contribute(2, parts)] == []  # of one segment they leave in order
    assert [(m.to, m.label) for m in run.contribute(1, parts)] == [(0, 1), (0, 2)]
    assert not run.finished
