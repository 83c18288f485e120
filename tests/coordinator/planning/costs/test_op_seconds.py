from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.job import Keeping, Optimizer, OptimizerName, Recompute
from atoll.opdag import StateMeta, TensorMeta
from coordinator.planning.costs.fleet import Device
from coordinator.planning.costs.op_seconds import (
    SCALE_RANGE,
    OpTable,
    apply_seconds,
    apply_work,
    op_class,
    probe_ops,
    refresh_scale,
    signature,
    signatures,
)
from tests.coordinator.planning.dags import gpt_like

DEVICE = Device("w", 2**30, gflops={"": 10.0, "matmul": 40.0}, memory_gbps=5.0, op_overhead_s=0.0)


def test_repeated_blocks_share_their_signatures():
    shallow, deep = probe_ops(gpt_like(2)), probe_ops(gpt_like(24))
    assert len(shallow) == len(deep) < 15
    assert {p.signature for p in shallow} == {p.signature for p in deep}


def test_a_signature_depends_on_shapes_literals_and_gradients_but_not_on_names():
    dag = gpt_like(2)
    one = next(i for i, node in enumerate(dag.ops) if node.module_path == "h.0" and "fc1" in str(node.args))
    two = next(i for i, node in enumerate(dag.ops) if node.module_path == "h.1" and "fc1" in str(node.args))
    assert signature(dag, one) == signature(dag, two)
    for change in ({"target": "aten.mm.default"}, {"kwargs": (("alpha", 2),)}, {"requires_grad": False}):
        ops = list(dag.ops)
        ops[one] = replace(ops[one], **change)
        assert signature(replace(dag, ops=tuple(ops)), one) != signature(dag, one)


def test_a_probe_names_every_input_and_leaf_of_its_op():
    dag = gpt_like(1)
    for probe in probe_ops(dag):
        assert probe.node in dag.ops
        assert all(leaf in dag.parameters or leaf in dag.inputs for leaf in probe.leaves)
        assert len(probe.op_inputs) + len(probe.leaves) == len(probe.node.args)


def test_measured_timings_win_over_the_fallback():
    dag = gpt_like(1)
    sigs = signatures(dag)
    table = OpTable(dag)
    guessed = table.costs(DEVICE)
    assert guessed.measured_share == 0.0
    timed = table.costs(replace(DEVICE, timings={sigs[1]: (0.5, 0.7)}))
    assert timed.forward_s[1] == 0.5
    assert timed.backward_s[1] == 0.7
    assert 0.5 < timed.measured_share < 1.0


def test_the_fallback_is_a_roofline_with_the_rate_of_the_ops_class():
    dag = gpt_like(1)
    at = next(i for i, node in enumerate(dag.ops) if "fc1" in str(node.args))
    node = dag.ops[at]
    costs = OpTable(dag).costs(DEVICE)
    assert costs.forward_s[at] == pytest.approx(max(node.flops_forward / 40e9, node.bytes_moved / 5e9))
    assert costs.backward_s[at] == pytest.approx(max(node.flops_backward / 40e9, 2 * node.bytes_moved / 5e9))


def test_ops_without_gradient_take_no_time_backwards_and_constants_none_at_all():
    dag = gpt_like(1)
    ops = (replace(dag.ops[0], requires_grad=False), *dag.ops[1:])
    costs = OpTable(replace(dag, ops=ops, constant_ops=frozenset({3}))).costs(DEVICE)
    assert costs.backward_s[0] == 0.0 < costs.forward_s[0]
    assert costs.forward_s[3] == costs.backward_s[3] == 0.0


def test_recomputation_runs_the_forward_again_and_a_slow_worker_is_scaled():
    table = OpTable(gpt_like(1))
    plain, again = table.costs(DEVICE), table.costs(DEVICE, Keeping(Recompute.FULL))
    np.testing.assert_allclose(again.backward_s, plain.backward_s + plain.forward_s)
    np.testing.assert_allclose(table.costs(replace(DEVICE, scale=2.0)).forward_s, 2 * plain.forward_s)


@given(
    scale=st.floats(0.1, 10),
    unit=st.floats(allow_nan=True, allow_infinity=True),
    measured=st.floats(allow_nan=True, allow_infinity=True),
    samples=st.integers(0, 100),
)
def test_the_scale_stays_in_its_range_whatever_a_worker_reports(scale, unit, measured, samples):
    assert SCALE_RANGE[0] <= refresh_scale(scale, unit, measured, samples) <= SCALE_RANGE[1]


def test_the_scale_is_the_first_measurements_mean_and_follows_later_ones_slowly():
    scale = 1.0
    for samples, measured_s in enumerate((6.0, 9.0, 6.0)):
        scale = refresh_scale(scale, 3.0, measured_s, samples)
    assert scale == pytest.approx(7.0 / 3.0)
    assert refresh_scale(2.0, 3.0, 12.0, samples=1000) == pytest.approx(2.2)


def test_adamw_moves_more_memory_than_sgd():
    state = StateMeta(TensorMeta((250, 1_000_000), "float32"), requires_grad=True)
    each = (OptimizerName.ADAMW, OptimizerName.SGD)
    (adamw, _), (sgd, _) = (apply_work("w", state, Optimizer(name)) for name in each)
    assert apply_seconds(adamw, 0, 0.0, DEVICE) == pytest.approx(7 * 1e9 / 5e9)
    assert apply_seconds(sgd, 0, 0.0, DEVICE) == pytest.approx(3 * 1e9 / 5e9)


def test_muon_multiplies_hidden_matrices_five_times_and_nothing_else():
    meta = TensorMeta((512, 128), "float32")
    hidden, head = (StateMeta(meta, requires_grad=True, hidden_matrix=h) for h in (True, False))
    muon = Optimizer(OptimizerName.MUON)
    moved, flops = apply_work("w", hidden, muon)
    assert flops == 5 * 2 * (2 * 128 * 128 * 512 + 128**3)
    assert apply_work("w", head, muon) == apply_work("w", head, Optimizer())
    alone = apply_seconds(moved, 0, 0.0, DEVICE)
    assert apply_seconds(moved, 0, flops, DEVICE) - alone == pytest.approx(flops / 40e9)


def test_classes_of_common_ops():
    assert op_class("aten.linear.default") == op_class("aten.addmm.default") == "matmul"
    assert op_class("aten.convolution.default") == "conv"
    assert op_class("aten.scaled_dot_product_attention.default") == "attention"
    assert op_class("aten.gelu.default") == "elementwise"
