"""Forged plans for real workers: each is told what is wrong, and every worker lives and trains on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.job import Optimizer, TrainingSpec
from atoll.opdag import Arg, Kind, LeafRef, OpDag, OpNode, OpRef, Source, TensorMeta
from benchmarks.oracle import built_in, difference, run_local
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.prepare import Graphs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TRAINING = TrainingSpec(steps=2, n_micro=2, seed=3, optimizer=Optimizer(lr=3e-3))
METAS = {
    "v": TensorMeta((4096, 4), "float32"),
    "g": TensorMeta((1,), "float32"),
    "sequence": TensorMeta((5, 7, 3), "float32"),
    "state": TensorMeta((1, 1, 5), "float32"),
    "w_ih": TensorMeta((20, 3), "float32"),
    "w_hh": TensorMeta((20, 5), "float32"),
}


def leaf(name: str) -> LeafRef:
    return LeafRef(Source.INPUT, name)


def forged(target: str, args: tuple[Arg, ...], *outputs: tuple[int, ...]) -> OpDag:
    """The op, and the sum of its (first) result for a loss."""
    metas = tuple(TensorMeta(shape, "float32") for shape in outputs)
    several = len(metas) > 1
    ops = [
        OpNode("forged", Kind.NON_PARAMETRIC, target, args, (), metas, is_tuple=several, requires_grad=True)
    ]
    if several:
        ops.append(OpNode("item", Kind.NON_PARAMETRIC, "builtin.getitem", (OpRef(0), 0), (), metas[:1]))
    loss = (TensorMeta((), "float32"),)
    ops.append(OpNode("loss", Kind.LOSS, "aten.sum.default", (OpRef(len(ops) - 1),), (), loss))
    return OpDag(tuple(ops), METAS, {}, {}, {}, len(ops) - 1, ((0, 2),) if several else ())


FORGED = {
    "_weight_norm with a short g": forged("aten._weight_norm.default", (leaf("v"), leaf("g"), 0), (4096, 4)),
    "lstm with a state of another batch": forged(
        "aten.lstm.input",
        (
            leaf("sequence"),
            (leaf("state"), leaf("state")),
            (leaf("w_ih"), leaf("w_hh")),
            False,
            1,
            0.0,
            True,
            False,
            False,
        ),
        (5, 7, 5),
        (1, 7, 5),
        (1, 7, 5),
    ),
    "a repeat that declares one element": forged("aten.repeat.default", (leaf("g"), (1 << 26,)), (1,)),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


@pytest.mark.parametrize("name", list(FORGED))
def test_a_forged_plan_ends_no_worker(fleet: LoopbackFleet, name: str) -> None:
    """Workers are asked to time the graph's ops: the forged one is left out, and estimated."""
    plan = fleet.client.plan(graphs(FORGED[name]), TRAINING)
    assert plan.plan.stages
    states = [worker.state for worker in fleet.client.status().workers]
    assert states == ["pool", "pool"]
    assert all(process.poll() is None for process in fleet._processes)


def test_the_fleet_trains_on_as_if_nothing_had_been(fleet: LoopbackFleet) -> None:
    for dag in FORGED.values():
        fleet.client.plan(graphs(dag), TRAINING)
    case = built_in("gpt2", TRAINING, 0.1)
    cuts = case.dag.cuttable()
    found = fleet.run(case, (0, cuts[len(cuts) // 2]))
    assert difference(found, run_local(case, (0,)), 1) == 0.0


def graphs(dag: OpDag) -> Graphs:
    captured: Any = SimpleNamespace(train=dag, evaluation=dag)
    return Graphs.of(captured)
