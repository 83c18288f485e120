"""Every honest graph of the tests and the examples passes a worker's checks, and no cut changes its bits."""

from __future__ import annotations

import random

import pytest

from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.ops import check_node
from benchmarks.oracle import difference, random_starts, run_local
from tests.coordinator.capture.captured import GRAPHS, NAMES, captured_dags, honest

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUT_BYTES = 1 << 30


@pytest.mark.parametrize("name", NAMES)
def test_every_node_of_an_honest_graph_is_accepted(name: str) -> None:
    found = honest(name).captured
    for dag in (found.train, found.evaluation):
        assert dag.ops
        for node in dag.ops:
            check_node(node, OUTPUT_BYTES)


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
