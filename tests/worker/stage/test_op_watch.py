"""An op that runs far beyond its rehearsed cost is named, once, and honest slowness is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from atoll.execute import BACKWARD, Executor
from atoll.job import Precision
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, TensorMeta
from atoll.program import stage_programs
from atoll.rehearse import OpCost, rehearse
from worker.stage.op_watch import FLOOR_S, OpWatch

META = TensorMeta((64, 64), "float32")
X = LeafRef(Source.INPUT, "x")
NODES = (
    OpNode("product", Kind.NON_PARAMETRIC, "aten.mm.default", (X, X), (), (META,)),
    OpNode("loss", Kind.LOSS, "aten.sum.default", (OpRef(0),), (), (TensorMeta((), "float32"),)),
)
(PROGRAM,) = stage_programs(OpDag(NODES, {"x": META}, {}, {}, {}, 1), [0])


@dataclass
class Clockwork:
    """An executor as a watch sees it."""

    at: int | None = None
    begun: int = 0


def watch(running: Clockwork, cost: OpCost | None = None) -> OpWatch:
    return OpWatch(PROGRAM, {0: cost or OpCost(), 1: OpCost()}, running)


def test_an_op_beyond_its_allowance_is_named_once() -> None:
    running = Clockwork(at=0, begun=5)
    looking = watch(running)
    assert looking.overdue(0.0) is None
    assert looking.overdue(FLOOR_S) is None
    assert "'aten.mm.default' (product) has run for 61 s" in str(looking.overdue(FLOOR_S + 1))
    assert looking.overdue(FLOOR_S + 2) is None


def test_ops_that_follow_each_other_and_rest_between_steps_are_fine() -> None:
    running = Clockwork()
    looking = watch(running)
    for second in range(500):
        running.at, running.begun = second % 2, second
        assert looking.overdue(float(second)) is None
    running.at = None
    assert looking.overdue(10_000.0) is None


def test_what_the_rehearsal_found_expensive_may_take_long() -> None:
    running = Clockwork(at=0)
    looking = watch(running, OpCost(bytes=10**10, flops=10**11))
    assert looking.overdue(0.0) is None
    assert looking.overdue(1000.0) is None
    assert looking.overdue(2000.0) is not None
    running.at, running.begun = BACKWARD, 1
    assert looking.overdue(2000.0) is None
    assert looking.overdue(4000.0) is None
    assert "a backward of stage 0" in str(looking.overdue(6000.0))


def test_a_rehearsal_gives_each_op_its_bytes_and_products() -> None:
    costs = rehearse(PROGRAM, {}, {"x": META}, Precision.FP32)
    assert costs == {0: OpCost(META.nbytes, 2 * 64**3), 1: OpCost(4, 0)}


def test_an_executor_shows_what_it_runs_and_where_it_failed() -> None:
    executor = Executor(PROGRAM)
    executor.load({})
    seen: list[int | None] = []
    executor.forward(0, 0, {"x": torch.ones(64, 64)}, {}, lambda _, __: seen.append(executor.at))
    assert seen == [0, 1]
    assert executor.at is None
    begun = executor.begun
    with pytest.raises(RuntimeError):
        executor.forward(0, 1, {"x": torch.ones(64, 63)}, {})
    assert (executor.failed_at, executor.at) == (0, None)
    assert executor.begun > begun
