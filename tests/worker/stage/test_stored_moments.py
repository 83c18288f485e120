"""Moments in 8 bits: who is restored and who trains on have the same bits, however the model is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.program import stage_programs
from coordinator.capture.capture import Captured, capture
from coordinator.planning.costs.memory import MemoryModel
from coordinator.planning.costs.traffic import Traffic
from tests.inprocess.pipeline import LocalPipeline
from tests.models import branches

EVERY, STEPS = 3, 7
EXACTLY = TrainingSpec(steps=STEPS, n_micro=2, optimizer=Optimizer(lr=1e-2), checkpoint_every=EVERY)
TRAINING = replace(EXACTLY, int8_moments=True)
EXAMPLE = branches()

pytestmark = pytest.mark.usefixtures("one_thread")
State = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def found() -> Captured:
    return capture(EXAMPLE.module, EXAMPLE.example_inputs)


def pipeline(found: Captured, starts: Sequence[int], training: TrainingSpec, state: State) -> LocalPipeline:
    dag = found.train
    states = {**dag.parameters, **dag.buffers}
    return LocalPipeline(stage_programs(dag, starts), training, state, states=states)


def begun(found: Captured) -> State:
    return {name: {"value": tensor} for name, tensor in found.state.items()}


def trained(made: LocalPipeline, first: int, last: int) -> list[float]:
    return [
        made.step(step, [EXAMPLE.make_batch(2 * step + micro) for micro in range(2)]).loss
        for step in range(first, last)
    ]


@pytest.mark.parametrize("cuts", [(), (5,), (4, 9)])
def test_a_restored_job_ends_in_the_bits_of_one_that_was_not_disturbed(
    found: Captured, cuts: tuple[int, ...]
) -> None:
    places = found.train.cuttable()
    starts = [0, *(places[at] for at in cuts)]
    undisturbed = pipeline(found, [0], TRAINING, begun(found))
    losses = trained(undisturbed, 0, STEPS)
    first = pipeline(found, starts, TRAINING, begun(found))
    assert trained(first, 0, EVERY) == losses[:EVERY]
    stored = first.snapshot()
    moments = [parts for parts in stored.values() if "exp_avg" in parts]
    assert moments
    for parts in moments:
        assert parts["exp_avg"].dtype is torch.int8
        assert parts["exp_avg_sq"].dtype is torch.uint8
    state = {**begun(found), **stored}
    again = pipeline(found, starts, TRAINING, state)
    assert trained(again, EVERY, STEPS) == losses[EVERY:]
    ends, expected = again.snapshot(), undisturbed.snapshot()
    for name, parts in expected.items():
        assert all(torch.equal(ends[name][key], value) for key, value in parts.items()), name
    assert trained(pipeline(found, [0], EXACTLY, begun(found)), 0, STEPS) != losses


def test_a_state_between_two_roundings_is_stored_exactly(found: Captured) -> None:
    made = pipeline(found, [0], TRAINING, begun(found))
    trained(made, 0, EVERY + 1)
    stored = [parts for parts in made.snapshot().values() if "exp_avg" in parts]
    assert stored
    assert all(parts["exp_avg"].dtype is torch.float32 for parts in stored)


def test_a_plan_counts_the_codes(found: Captured) -> None:
    def state_bytes(training: TrainingSpec) -> float:
        traffic = Traffic(found.train, training.optimizer)
        return MemoryModel(found.train, training, traffic).state_bytes(0, len(found.train.ops))

    parameters = sum(4 * s.meta.elements for s in found.train.parameters.values() if s.requires_grad)
    more = state_bytes(TRAINING) - state_bytes(EXACTLY)
    assert 0.51 * parameters <= more + 1e-6 < 0.7 * parameters  # a tied one counts for each use


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"checkpoint_every": 0}, "without checkpoint_every"),
        ({"optimizer": Optimizer(OptimizerName.MUON)}, "for adamw and exact gradients"),
        ({"exchange": "diloco", "local_steps": 2}, "for adamw and exact gradients"),
    ],
)
def test_what_has_no_moments_to_round_is_refused(changed: dict[str, object], words: str) -> None:
    whole: dict[str, Any] = {"steps": 4, "n_micro": 2, "checkpoint_every": 2, "int8_moments": True}
    with pytest.raises(UsageError, match=words):
        TrainingSpec(**{**whole, **changed})
