"""Three worker processes train every built-in model, whatever the cut, to the bits of one stage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from atoll import Job, Rows
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.oracle import BUILT_IN, DROPOUT, Case, Run, built_in, difference, random_starts, run_local
from benchmarks.real_workers import LoopbackFleet, cut_at
from coordinator.client.prepare import Prepared, prepare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TRAINING = TrainingSpec(
    steps=3, n_micro=4, seed=17, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(3) as started:
        yield started


@cache
def case(name: str) -> Case:
    return built_in(name, TRAINING, DROPOUT)


@cache
def one_stage(name: str) -> Run:
    return run_local(case(name), (0,))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", BUILT_IN)
def test_three_workers_end_in_the_bits_of_one_stage(name: str, seed: int, fleet: LoopbackFleet) -> None:
    starts = random_starts(case(name).dag, 3, random.Random(seed))
    found = fleet.run(case(name), starts)
    assert fleet.plan is not None
    assert tuple(stage.start for stage in fleet.plan.stages) == starts
    assert len({stage.worker for stage in fleet.plan.stages}) == 3
    # Losses and weights; norms and optimizer state stay with the workers.
    assert difference(found, one_stage(name), 1) == 0.0


def test_three_workers_under_muon_end_in_the_bits_of_one_stage(fleet: LoopbackFleet) -> None:
    muon = Optimizer(OptimizerName.MUON, lr=3e-3, weight_decay=0.01, clip_norm=0.5)
    given = replace(case("gpt2"), training=replace(TRAINING, optimizer=muon))
    whole = run_local(given, (0,))
    assert difference(fleet.run(given, random_starts(given.dag, 3, random.Random(3))), whole, 1) == 0.0
    assert difference(whole, one_stage("gpt2"), 1) > 0.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BUILT_IN)
def test_workers_of_several_pieces_end_in_the_bits_of_one_stage(
    name: str, seed: int, fleet: LoopbackFleet
) -> None:
    draw = random.Random(seed)
    starts = random_starts(case(name).dag, draw.randrange(3, 7), draw)
    owners = random_owners(len(starts), draw)
    found = fleet.run(case(name), starts, owners)
    assert fleet.plan is not None
    assert [one.stage for one in fleet.plan.only.pieces] == list(owners)
    assert difference(found, one_stage(name), 1) == 0.0


def random_owners(pieces: int, draw: random.Random) -> tuple[int, ...]:
    """Which of two or three workers has each piece: none has two in a row, one has several."""
    while True:
        found = [draw.randrange(3) for _ in range(pieces)]
        names = list(dict.fromkeys(found))
        several = len(names) < pieces and all(a != b for a, b in itertools.pairwise(found))
        if several:
            return tuple(names.index(one) for one in found)


def test_workers_of_several_pieces_evaluate_as_one_stage(fleet: LoopbackFleet) -> None:
    made = case("gpt2")
    rows = {
        name: torch.cat([batch[name] for batch in made.batches(0)]).numpy() for name in made.batches(0)[0]
    }
    training = replace(TRAINING, eval_batches=2, eval_every=1)
    job = Job(made.module, made.batches(0)[0], Rows(rows, seed=None, held_out=rows), training, "evaluated")
    starts = random_starts(made.dag, 4, random.Random(5))
    found = [
        held_out_losses(fleet, prepare(job, partitioner=cut))
        for cut in (cut_at((0,)), cut_at(starts, (0, 1, 2, 0)))
    ]
    assert len(found[0]) == TRAINING.steps
    assert found[0] == found[1]


def held_out_losses(fleet: LoopbackFleet, prepared: Prepared) -> dict[int, float]:
    """Train what was prepared; the held-out loss by step."""
    found: dict[int, float] = {}
    for update in fleet.client.watch(fleet.client.submit(prepared).job):
        found.update({p.step: p.value for p in update.metrics if p.name == "eval_loss"})
    return found
