"""Every honest graph of the tests and the examples passes a worker's checks, and no cut changes its bits."""

from __future__ import annotations

import random

import pytest
import torch

from atoll.calls import Shapes
from atoll.guards import check_call
from atoll.job import Optimizer, OptimizerName, Precision, TrainingSpec
from atoll.ops import check_node
from atoll.program import stage_programs
from atoll.rehearse import rehearse
from benchmarks.oracle import difference, random_starts, run_local
from tests.coordinator.capture.captured import GRAPHS, NAMES, captured_dags, honest
from tests.models import MODELS
from tests.parameters import sampled

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUT_BYTES = 1 << 30


@pytest.mark.parametrize("name", NAMES)
def test_every_node_of_an_honest_graph_is_accepted(name: str) -> None:
    found = honest(name).captured
    for dag in (found.train, found.evaluation):
        assert dag.ops
        for node in dag.ops:
            check_node(node, OUTPUT_BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_an_honest_graph_passes(name: str) -> None:
    found = honest(name).captured
    for dag in (found.train, found.evaluation):
        leaves = {n: s.meta for n, s in {**dag.parameters, **dag.buffers}.items()} | dag.constants
        (whole,) = stage_programs(dag, [0])
        shapes = Shapes(whole, leaves, dag.inputs)
        for op in dag.ops:
            check_call(op, shapes)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", sampled(2, MODELS))
def test_every_stage_of_an_honest_model_passes(name: str, precision: Precision) -> None:
    found = honest(f"{name}:{precision.value}").captured
    generator = torch.random.get_rng_state()
    for dag in (found.train, found.evaluation):
        state = {**dag.parameters, **dag.buffers}
        leaves = {n: s.meta for n, s in state.items()} | dag.constants
        cuts = dag.cuttable()
        for stage in stage_programs(dag, [0, cuts[len(cuts) // 3], cuts[-2]]):
            rehearse(stage, leaves, dag.inputs, precision)
    assert torch.equal(generator, torch.random.get_rng_state())


@pytest.mark.slow
def test_all_graphs_come_in_both_modes_under_names_of_their_own() -> None:
    found = dict(captured_dags())
    assert len(found) == 2 * len(GRAPHS)
    assert all(dag.training is name.endswith("training") for name, dag in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", list(GRAPHS))
def test_random_cuts_of_an_honest_graph_are_bit_equal_to_one_stage(name: str, stages: int) -> None:
    found = honest(name)
    training = TrainingSpec(
        steps=2,
        n_micro=2,
        seed=5,
        precision=found.captured.precision,
        optimizer=Optimizer(OptimizerName.SGD, lr=0.01),
    )
    case = found.case(training)
    whole = run_local(case, (0,))
    source = random.Random(stages)
    for _ in range(3):
        starts = random_starts(case.dag, stages, source)
        assert difference(run_local(case, starts), whole) == 0.0, starts
