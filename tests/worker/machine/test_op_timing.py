"""Single-op timings: what is timed, what is left out, and that counts follow the clock."""

from __future__ import annotations

import itertools

import pytest
import torch

from atoll.job import Precision
from atoll.messages.to_worker import OpProbe
from atoll.opdag import Arg, Kind, LeafRef, OpNode, OpRef, Source, TensorMeta, leaf_refs
from worker.machine.op_timing import OpTiming, time_ops

ROWS = TensorMeta((8, 16), "float32")
WEIGHT = TensorMeta((16, 16), "float32")
IDS = TensorMeta((8,), "int64")
W = LeafRef(Source.PARAMETER, "w")


def probe(
    target: str,
    args: tuple[Arg, ...],
    inputs: tuple[TensorMeta, ...],
    leaves: tuple[TensorMeta, ...] = (),
    output: TensorMeta = ROWS,
    grad: bool = True,
) -> OpProbe:
    node = OpNode(target, Kind.PARAMETRIC, target, args, (), (output,), requires_grad=grad)
    return OpProbe(target, node, inputs, {r.name: m for r, m in zip(leaf_refs(node), leaves, strict=True)})


def timed(*probes: OpProbe, **options: object) -> dict[str, OpTiming]:
    return time_ops(probes, sustained_s=1e-4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", list(Precision))
def test_forward_and_backward_of_common_ops_are_timed(precision: Precision):
    product = "bfloat16" if precision is Precision.BF16 else "float32"
    probes = [
        probe("aten.linear.default", (OpRef(3), W), (ROWS,), (WEIGHT,), TensorMeta(ROWS.shape, product)),
        probe("aten.embedding.default", (W, LeafRef(Source.INPUT, "ids")), (), (WEIGHT, IDS)),
        probe(
            "aten.cross_entropy_loss.default",
            (OpRef(0), OpRef(1)),
            (ROWS, IDS),
            (),
            TensorMeta((), "float32"),
        ),
        probe("aten.add.Tensor", (OpRef(0), OpRef(1)), (ROWS, ROWS)),
        probe("aten.relu_.default", (OpRef(0),), (ROWS,)),
        probe("aten.cat.default", ((OpRef(0), OpRef(1)),), (ROWS, ROWS), (), TensorMeta((16, 16), "float32")),
    ]
    found = timed(*probes, precision=precision)
    assert found.keys() == {p.signature for p in probes}
    assert all(t.forward_s > 0.0 and t.backward_s >= 0.0 for t in found.values())


def test_an_op_without_gradient_has_no_backward():
    found = timed(
        probe("aten.gt.Scalar", (OpRef(0), 0.0), (ROWS,), output=TensorMeta(ROWS.shape, "bool"), grad=False)
    )
    assert found["aten.gt.Scalar"].backward_s == 0.0


def test_ops_that_fail_or_are_not_allowed_or_too_large_are_left_out():
    fine = probe("aten.tanh.default", (OpRef(0),), (ROWS,))
    assert timed(
        probe("aten.matmul.default", (OpRef(0), OpRef(1)), (ROWS, ROWS)),
        probe("aten.from_file.default", ("/etc/hosts",), ()),
        fine,
        probe("aten.neg.default", (OpRef(0),), (TensorMeta((1 << 20, 64), "float32"),)),
        max_bytes=1 << 20,
    ).keys() == {"aten.tanh.default"}


def test_the_budget_ends_the_work():
    assert timed(*[probe("aten.tanh.default", (OpRef(0),), (ROWS,))] * 3, budget_s=-1.0) == {}


def test_seconds_are_the_clock_s_mean_over_the_window():
    ticks = itertools.count()
    found = time_ops(
        [probe("aten.tanh.default", (OpRef(0),), (ROWS,), grad=False)],
        sustained_s=0.5,
        clock=lambda: float(next(ticks)),
    )
    # One tick passes between the window's two readings; it held 8 runs, one for each input set.
    assert found["aten.tanh.default"] == OpTiming(1.0 / 8, 0.0)


def test_other_work_on_the_machine_while_one_round_runs_does_not_show():
    reads = itertools.count()
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 10.0 if next(reads) < 6 else 1.0  # the first round's window is among the first 6
        return now_s

    found = time_ops(
        [probe("aten.tanh.default", (OpRef(0),), (ROWS,), grad=False)],
        sustained_s=0.5,
        clock=clock,
    )
    assert found["aten.tanh.default"] == OpTiming(1.0 / 8, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ops_are_timed_on_cuda():
    found = timed(probe("aten.linear.default", (OpRef(3), W), (ROWS,), (WEIGHT,)), device="cuda")
    assert found["aten.linear.default"].backward_s > 0.0
