"""Each op that begins is shown on the status page with what its rehearsal allows it."""

from __future__ import annotations

import pytest
import torch

from atoll.execute import BACKWARD, Executor
from atoll.job import Precision
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, TensorMeta
from atoll.program import stage_programs
from atoll.rehearse import OpCost, rehearse
from worker.manners.duty import DutyCycle
from worker.pipe.arena import HEAD_BYTES
from worker.pipe.status import ComputeStatus, Mark
from worker.stage.op_marks import BACKWARD_SHARE, FLOOR_S, OpMarks

META = TensorMeta((64, 64), "float32")
X = LeafRef(Source.INPUT, "x")
NODES = (
    OpNode("product", Kind.NON_PARAMETRIC, "aten.mm.default", (X, X), (), (META,)),
    OpNode("loss", Kind.LOSS, "aten.sum.default", (OpRef(0),), (), (TensorMeta((), "float32"),)),
)
(PROGRAM,) = stage_programs(OpDag(NODES, {"x": META}, {}, {}, {}, 1), [0])
PRODUCT, LOSS = "op 'aten.mm.default' (product)", "op 'aten.sum.default' (loss)"


@pytest.fixture
def status() -> ComputeStatus:
    return ComputeStatus(memoryview(bytearray(HEAD_BYTES)))


def mark(status: ComputeStatus) -> Mark:
    found = status.running().mark
    assert found is not None
    return found


def test_an_op_without_a_cost_may_take_the_floor(status: ComputeStatus) -> None:
    OpMarks(status, PROGRAM, {})(0)
    assert mark(status) == Mark(PRODUCT, FLOOR_S)


def test_what_the_rehearsal_found_expensive_may_take_long(status: ComputeStatus) -> None:
    marks = OpMarks(status, PROGRAM, {0: OpCost(bytes=10**10, flops=10**11), 1: OpCost()})
    marks(0)
    assert mark(status) == Mark(PRODUCT, FLOOR_S + 100 + 1000)
    marks(1)
    assert mark(status) == Mark(LOSS, FLOOR_S)
    marks(BACKWARD)
    assert mark(status) == Mark("a backward of stage 0", FLOOR_S + BACKWARD_SHARE * 1100)


def test_between_ops_nothing_is_shown_and_every_change_is_counted(status: ComputeStatus) -> None:
    marks = OpMarks(status, PROGRAM, {})
    counts = []
    for at in (0, None, 0, 1):
        marks(at)
        counts.append(status.running().begun)
        assert (status.running().mark is None) == (at is None)
    assert counts == sorted(set(counts))


def test_a_rehearsal_gives_each_op_its_bytes_and_products() -> None:
    costs = rehearse(PROGRAM, {}, {"x": META}, Precision.FP32)
    assert costs == {0: OpCost(META.nbytes, 2 * 64**3), 1: OpCost(4, 0)}


def test_an_executor_shows_what_it_runs_and_where_it_failed(status: ComputeStatus) -> None:
    executor = Executor(PROGRAM)
    executor.load({})
    executor.watch = OpMarks(status, PROGRAM, {})
    seen: list[str] = []
    executor.forward(0, 0, {"x": torch.ones(64, 64)}, {}, lambda _, __: seen.append(mark(status).name))
    assert seen == [PRODUCT, LOSS]
    assert status.running().mark is None
    with pytest.raises(RuntimeError):
        executor.forward(0, 1, {"x": torch.ones(64, 63)}, {})
    assert executor.failed_at == 0
    assert status.running().mark is None


def test_a_rest_before_an_op_shows_none_and_is_no_part_of_it(status: ComputeStatus) -> None:
    now, used, shown = [0.0], [0.0], []

    def sleep(seconds: float) -> None:
        shown.append(status.running().mark)
        now[0] += seconds

    duty = DutyCycle(lambda: used[0], clock=lambda: now[0], sleep=sleep)
    marks = OpMarks(status, PROGRAM, {}, duty)
    marks(0)
    duty.limit(0.5)
    used[0] += 1.0
    now[0] += 1.0
    marks(1)
    assert now[0] == pytest.approx(2.0, abs=0.11)
    assert set(shown) == {None}
    assert mark(status).name == LOSS
