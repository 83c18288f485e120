"""Replicas train the model that one machine with as many blocks trains, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from atoll.errors import PlanError
from atoll.exchange import Exchange
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from benchmarks.oracle import (
    DROPOUT,
    MAX_MICRO,
    REPLICATED,
    Case,
    built_in,
    difference,
    measure_replicas,
    random_replicas,
    random_starts,
    run_local,
    run_replicas,
)
from tests.inprocess.replicas import LocalReplicas

SGD = Optimizer(OptimizerName.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
TRAINING = TrainingSpec(steps=2, n_micro=MAX_MICRO, seed=11, optimizer=Optimizer(lr=3e-3, clip_norm=0.5))

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def case(name: str) -> Case:
    return built_in(name, TRAINING, DROPOUT)


def halves(given: Case, **changes: object) -> tuple[Case, Plan]:
    """Two replicas of one stage, each with half of the step."""
    training = replace(given.training, **changes)  # type: ignore[arg-type]
    half, ops = training.n_micro // 2, len(given.dag.ops)
    replicas = tuple(
        Replica(micros, (StageSpec(0, ops, 0, 0, f"w{at}", 0),))
        for at, micros in enumerate([(0, half), (half, training.n_micro)])
    )
    plan = Plan(
        "j", 1, "", "", "", ScheduleName.ONE_F_ONE_B, training.n_micro, replicas,
        blocks=training.blocks, exchange=Exchange(),
    )  # fmt: skip
    return replace(given, training=training), plan


@pytest.mark.parametrize("seed", range(4))
def test_random_replicas_are_bit_equal_to_one_machine_of_as_many_blocks(seed: int) -> None:
    found, plan = random_replicas(case("gpt2"), random.Random(seed))
    assert difference(run_replicas(found, plan), run_local(found, (0,))) == 0.0, plan


@pytest.mark.parametrize("seed", [5, 6])
def test_random_replicas_are_bit_equal_to_one_machine_under_muon(seed: int) -> None:
    muon = Optimizer(OptimizerName.MUON, lr=3e-3, weight_decay=0.01, clip_norm=0.5)
    given = replace(case("gpt2"), training=replace(TRAINING, optimizer=muon))
    found, plan = random_replicas(given, random.Random(seed))
    whole = run_local(found, (0,))
    assert difference(run_replicas(found, plan), whole) == 0.0, plan
    assert any("momentum_buffer" in kept for kept in whole.state.values())


@pytest.mark.slow
def test_200_random_plans_are_bit_equal_to_one_machine_of_as_many_blocks() -> None:
    row = measure_replicas(REPLICATED, 200, 2, 4711)
    assert row["max_abs_diff"] == 0.0, row
    assert int(str(row["other_bits"])) > 0, "blocks change no bit here: the comparison shows nothing"


@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_any_cut_sums_blocks_as_one_machine_does_and_not_as_one_block(blocks: int) -> None:
    found = replace(case("gpt2"), training=replace(TRAINING, blocks=blocks, optimizer=SGD))
    starts = random_starts(found.dag, 3, random.Random(blocks))
    whole = run_local(found, (0,))
    for schedule in ScheduleName:
        assert difference(run_local(found, starts, schedule=schedule), whole) == 0.0, (starts, schedule)
    one = replace(found, training=replace(found.training, blocks=1))
    assert 0.0 < difference(run_local(one, (0,)), whole) < 1e-3


def test_two_replicas_of_one_block_each_need_as_many_blocks() -> None:
    with pytest.raises(PlanError, match="inside a block"):
        run_replicas(*halves(case("gpt2"), blocks=1))


def test_an_exchange_of_changes_is_refused() -> None:
    found, plan = halves(case("gpt2"), blocks=2)
    with pytest.raises(PlanError, match="gradients here, at every step, not by diloco every 1"):
        run_replicas(found, replace(plan, exchange=Exchange("diloco")))


def test_running_statistics_are_averaged_where_the_owner_allows_it() -> None:
    found, plan = halves(case("branches"), blocks=2)
    with pytest.raises(PlanError, match="buffers"):
        run_replicas(found, plan)
    found, plan = halves(case("branches"), blocks=4, average_buffers=True)
    first, second = plan.replicas
    plan = replace(plan, replicas=(replace(first, micros=(0, 2)), replace(second, micros=(2, 8))))

    def made() -> tuple[LocalReplicas, list[dict[str, Tensor]]]:
        replicas = LocalReplicas(plan, found.dag, found.training, found.tensors, states=found.states)
        return replicas, [replica.stages[0].written_buffers for replica in replicas.replicas]

    replicas, averaged = made()
    replicas.step(0, found.batches(0))
    apart, own = made()
    for replica in apart.replicas:
        replica.accumulate(0, found.batches(0))
    for name, value in averaged[0].items():
        assert torch.equal(value, averaged[1][name])
        if "num_batches" in name:
            assert int(value) == MAX_MICRO
        else:
            assert not torch.equal(own[0][name], own[1][name])
            assert torch.allclose(value, own[0][name] / 4 + 3 * own[1][name] / 4)


def test_a_step_that_is_not_finite_is_reported_and_is_no_difference() -> None:
    found, plan = halves(case("gpt2"), blocks=2)
    tensors = {name: {"value": t["value"] * float("nan")} for name, t in found.tensors.items()}
    replicas = LocalReplicas(plan, found.dag, found.training, tensors, states=found.states)
    assert not replicas.step(0, found.batches(0)).finite


def test_replicas_whose_gradients_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = halves(case("gpt2"), blocks=2)
    replicas = LocalReplicas(plan, found.dag, found.training, found.tensors, states=found.states)
    second = replicas.replicas[1].stages[0]
    take = second.set_total
    monkeypatch.setattr(
        second, "set_total", lambda name, total: take(name, None if total is None else 2 * total)
    )
    with pytest.raises(RuntimeError, match="different gradients at step 0"):
        replicas.step(0, found.batches(0))
