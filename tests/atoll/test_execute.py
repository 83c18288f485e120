"""The interpreter on small hand-written DAGs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.effects import effects
from atoll.errors import UsageError
from atoll.execute import Executor, op_seed, torch_literal
from atoll.job import Keeping, Precision, Recompute
from atoll.opdag import (
    Arg,
    Autocast,
    Kind,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    StateMeta,
    TensorMeta,
    TorchLiteral,
)
from atoll.program import stage_programs

META = TensorMeta((4,), "float32")
X = LeafRef(Source.INPUT, "x")
W = LeafRef(Source.PARAMETER, "w")
B = LeafRef(Source.BUFFER, "b")
FLOAT = TorchLiteral("dtype", "float32")


def op(target: str, *args: Arg, grad: bool = True, random: bool = False, **kwargs: Arg) -> OpNode:
    return OpNode(
        target,
        Kind.NON_PARAMETRIC,
        target,
        args,
        tuple(kwargs.items()),
        (META,),
        requires_grad=grad,
        random=random,
    )


def dag_of(*ops: OpNode, constant_ops: set[int] | None = None) -> OpDag:
    return OpDag(
        ops=ops,
        inputs={"x": META},
        parameters={"w": StateMeta(META, True)},
        buffers={"b": StateMeta(META)},
        constants={},
        loss=len(ops) - 1,
        constant_ops=frozenset(constant_ops or ()),
    )


def executor_of(dag: OpDag, **options: object) -> Executor:
    executor = Executor(stage_programs(dag, [0])[0], **options)  # type: ignore[arg-type]
    executor.load({"w": torch.arange(1.0, 5.0), "b": torch.zeros(4)})
    return executor


def run(executor: Executor, x: Tensor, step: int = 0, micro: int = 0) -> Tensor:
    loss = executor.program.loss
    assert loss is not None
    return executor.forward(step, micro, {"x": x}, {})[loss]


def test_literals_lists_and_nested_references_reach_the_op():
    dag = dag_of(
        op("aten.mul.Tensor", X, 2.0),
        op("aten.cat.default", (OpRef(0), X, OpRef(0)), 0),
        op("aten.view.default", OpRef(1), (3, 4)),
        op("aten.sum.dim_IntList", OpRef(2), (0,), False, dtype=TorchLiteral("dtype", "float64")),
    )
    out = run(executor_of(dag), torch.ones(4))
    assert out.dtype is torch.float64
    assert out.tolist() == [5.0] * 4


def test_a_literal_outside_the_tables_is_refused():
    with pytest.raises(UsageError, match="load"):
        torch_literal(TorchLiteral("dtype", "load"), torch.device("cpu"))


def test_constant_ops_run_once_and_random_ones_with_every_micro_batch():
    ones = op("aten.ones.default", (4,), grad=False)
    noise = op("aten.rand.default", (4,), grad=False, random=True)
    dag = dag_of(ones, noise, op("aten.add.Tensor", OpRef(0), OpRef(1)), constant_ops={0, 1})
    executor = executor_of(dag)
    assert effects(executor.program).cached == {0}
    first, again, other = (run(executor, torch.zeros(4), micro=m) for m in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_constant_that_a_micro_batch_writes_into_is_made_anew_each_time():
    dag = dag_of(
        op("aten.zeros.default", (4,), grad=False),
        op("aten.slice.Tensor", OpRef(0), 0, 1, 3, grad=False),
        op("aten.add_.Tensor", OpRef(1), 5.0, grad=False),
        op("aten.copy_.default", OpRef(0), X, grad=False),
        op("aten.add.Tensor", OpRef(3), 1.0),
        constant_ops={0, 1, 2},
    )
    executor = executor_of(dag)
    assert effects(executor.program).cached == set()
    for value in (1.0, 2.0):
        assert run(executor, torch.full((4,), value)).tolist() == [value + 1.0] * 4


def test_an_input_written_in_place_is_left_alone():
    x = torch.ones(4)
    dag = dag_of(op("aten.mul_.Tensor", X, 3.0, grad=False), op("aten.mul.Tensor", OpRef(0), W))
    run(executor_of(dag), x)
    assert x.tolist() == [1.0] * 4


def test_buffers_that_batch_norm_or_an_in_place_op_writes_are_known():
    norm = dag_of(op("aten.batch_norm.default", X, W, W, B, B, True, 0.1, 1e-5, True))
    added = dag_of(op("aten.add_.Tensor", B, 1), op("aten.mul.Tensor", X, B))
    read = dag_of(op("aten.mul.Tensor", X, B))
    assert [executor_of(d).mutated_buffers for d in (norm, added, read)] == [("b",), ("b",), ()]


def test_each_use_of_a_parameter_has_its_own_accumulator_summed_last_use_first():
    dag = dag_of(
        op("aten.mul.Tensor", X, W), op("aten.mul.Tensor", OpRef(0), W), op("aten.sum.default", OpRef(1))
    )
    executor = executor_of(dag)
    w = torch.arange(1.0, 5.0, requires_grad=True)
    for micro, x in enumerate((torch.ones(4), torch.full((4,), 2.0))):
        run(executor, x, micro=micro)
        executor.backward(micro, {}, 2.0)
        ((x * w * w).sum() / 2.0).backward()
    assert [position for position, _ in executor.uses["w"]] == [1, 0]
    gradient = executor.gradient("w")
    assert gradient is not None
    assert torch.equal(gradient, w.grad)
    executor.zero_gradients()
    assert executor.gradient("w") is None


def test_parameters_are_shared_with_their_leaves_not_copied():
    weight = torch.ones(4)
    dag = dag_of(op("aten.mul.Tensor", X, W), op("aten.sum.default", OpRef(0)))
    executor = Executor(stage_programs(dag, [0])[0])
    executor.load({"w": weight})
    weight.fill_(3.0)
    assert float(run(executor, torch.ones(4))) == 12.0
    assert executor.uses["w"][0][1].data_ptr() == weight.data_ptr()


def test_the_gradient_mode_of_each_op_is_kept():
    frozen = OpNode("m", Kind.NON_PARAMETRIC, "aten.mul.Tensor", (X, W), (), (META,), grad_enabled=False)
    dag = dag_of(frozen, op("aten.mul.Tensor", OpRef(0), W), op("aten.sum.default", OpRef(1)))
    executor = executor_of(dag)
    run(executor, torch.ones(4))
    executor.backward(0, {})
    assert executor.gradient("w").tolist() == [1.0, 2.0, 3.0, 4.0]  # type: ignore[union-attr]


def test_precision_sets_autocast_and_an_op_may_override_it():
    def dtype_of(autocast: Autocast | None, precision: Precision) -> torch.dtype:
        outer = OpNode(
            "m",
            Kind.PARAMETRIC,
            "aten.outer.default",
            (X, W),
            (),
            (META,),
            requires_grad=True,
            autocast=autocast,
        )
        product = op("aten.matmul.default", OpRef(0), X)
        product = OpNode(**{**{f: getattr(product, f) for f in product.__slots__}, "autocast": autocast})
        return run(executor_of(dag_of(outer, product), precision=precision), torch.ones(4)).dtype

    assert dtype_of(None, Precision.FP32) is torch.float32
    assert dtype_of(None, Precision.BF16) is torch.bfloat16
    assert dtype_of(Autocast(False, "bfloat16"), Precision.BF16) is torch.float32
    assert dtype_of(Autocast(True, "bfloat16"), Precision.FP32) is torch.bfloat16


def test_seeds_depend_on_every_part_of_their_key():
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (2**64 - 1, 0, 0, 0)]
    seeds = [op_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= s < 2**63 for s in seeds)
    assert op_seed(1, 2, 3, 4) == op_seed(1, 2, 3, 4)


def test_dropout_is_the_same_whatever_ran_before():
    dag = dag_of(op("aten.dropout.default", X, 0.5, True, random=True))
    executor = executor_of(dag)
    first = run(executor, torch.ones(4), step=3, micro=1)
    torch.rand(100)
    run(executor, torch.ones(4), step=4)
    assert torch.equal(run(executor, torch.ones(4), step=3, micro=1), first)


def test_an_op_that_returns_its_argument_gets_a_node_of_its_own():
    dag = dag_of(
        op("aten.mul.Tensor", X, W), op("aten.contiguous.default", OpRef(0)), op("aten.sum.default", OpRef(1))
    )
    seen: dict[int, Tensor] = {}
    executor_of(dag).forward(0, 0, {"x": torch.ones(4)}, {}, seen.__setitem__)
    assert seen[1] is not seen[0]
    assert seen[1].data_ptr() == seen[0].data_ptr()


def test_recompute_keeps_no_graph_but_the_newest_and_gives_the_same_gradient():
    dag = dag_of(
        op("aten.dropout.default", X, 0.5, True, random=True, grad=False),
        op("aten.mul.Tensor", OpRef(0), W),
        op("aten.add_.Tensor", B, 1.0, grad=False),
        op("aten.mul.Tensor", OpRef(1), OpRef(2)),
        op("aten.sum.default", OpRef(3)),
    )
    results = []
    for recompute in (Recompute.OFF, Recompute.FULL):
        executor = executor_of(dag, keeping=Keeping(recompute))
        for micro in range(3):
            run(executor, torch.ones(4), micro=micro)
        if recompute is Recompute.FULL:
            for micro in range(3):
                executor.backward(micro, {})
            results.append((executor.gradient("w"), executor.buffers["b"].clone()))
        else:
            results.append(_by_hand(dag))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def _by_hand(dag: OpDag) -> tuple[Tensor, Tensor]:
    """One micro-batch at a time: a buffer that is read and written keeps no old version."""
    executor = executor_of(dag)
    for micro in range(3):
        run(executor, torch.ones(4), micro=micro)
        executor.backward(micro, {})
    gradient = executor.gradient("w")
    assert gradient is not None
    return gradient, executor.buffers["b"]


def test_values_are_freed_after_their_last_use():
    dag = dag_of(op("aten.mul.Tensor", X, 2.0, grad=False), op("aten.add.Tensor", OpRef(0), 1.0, grad=False))
    executor = executor_of(dag, differentiate=False)
    run(executor, torch.ones(4))
    assert not executor._live
    dead = [slot for segment in executor._segments for step in segment.steps for slot in step[3]]
    assert dead == [executor._op_slots[0]]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("recompute", [Recompute.OFF, Recompute.SELECTIVE, Recompute.FULL])
def test_a_backward_in_two_parts_gives_the_bits_of_a_whole_one(precision: Precision, recompute: Recompute):
    meta = TensorMeta((3, 4), "float32")
    square = TensorMeta((4, 4), "float32")
    dag = replace(
        dag_of(
            op("aten.mul.Tensor", X, W),  # waits for nobody
            op("aten.linear.default", OpRef(0), LeafRef(Source.PARAMETER, "m")),
            op("aten.relu_.default", OpRef(1)),  # written in place
            op("aten.einsum.default", "ij,jk->ik", (OpRef(2), LeafRef(Source.PARAMETER, "m"))),
            op("aten.linear.default", X, LeafRef(Source.PARAMETER, "m")),  # gives its weights' alone
            op("aten.add.Tensor", OpRef(3), OpRef(4)),
            op("aten.sum.default", OpRef(5)),
        ),
        inputs={"x": meta},
        parameters={"w": StateMeta(META, True), "m": StateMeta(square, True)},
    )
    found = []
    for defer in (False, True):
        torch.manual_seed(3)
        executor = Executor(
            stage_programs(dag, [0])[0], "cpu", precision, keeping=Keeping(recompute), defer=defer
        )
        executor.load({"w": torch.randn(4), "m": torch.randn(4, 4), "b": torch.zeros(4)})
        for micro in range(3):
            run(executor, torch.randn(3, 4), micro=micro)
        for micro in range(3):
            executor.backward(micro, {}, 3.0)
        if defer:
            assert executor.owed == 0
            assert executor.gradient("w") is not None
            assert executor.gradient("m") is None
            order = []
            while (micro_owed := executor.owed) is not None:
                order.append(micro_owed)
                executor.weight_gradients()
            assert order == [0] * 3 + [1] * 3 + [2] * 3
        assert executor.owed is None
        executor.weight_gradients()
        found.append((executor.gradient("w"), executor.gradient("m")))
    for whole, apart in zip(*found, strict=True):
        assert whole is not None
        assert apart is not None
        assert torch.equal(whole, apart)
        assert whole.stride() == apart.stride()


def test_what_is_owed_ends_with_the_step():
    dag = dag_of(
        op("aten.embedding.default", LeafRef(Source.PARAMETER, "t"), X), op("aten.sum.default", OpRef(0))
    )
    table = StateMeta(TensorMeta((5, 2), "float32"), True)
    dag = replace(dag, inputs={"x": TensorMeta((4,), "int64")}, parameters={"t": table})
    executor = Executor(stage_programs(dag, [0])[0], defer=True)
    executor.load({"t": torch.ones(5, 2)})
    run(executor, torch.tensor([0, 1, 1, 4]))
    executor.backward(0, {})
    assert executor.owed == 0
    executor.reset()
    assert executor.owed is None
    assert executor.gradient("t") is None


def test_a_zero_gradient_is_answered_with_its_mark():
    dag = dag_of(
        op("aten.mul.Tensor", X, W),
        op("aten.mul.Tensor", OpRef(0), 2.0),
        op("aten.detach.default", OpRef(1), grad=False),
        op("aten.sum.default", OpRef(2), grad=False),
    )
    second = Executor(stage_programs(dag, [0, 1])[1])
    second.load({})
    second.forward(0, 0, {}, {0: torch.ones(4)})
    assert second.backward(0, {}) == {0: None}


def test_missing_tensors_are_named():
    dag = dag_of(op("aten.mul.Tensor", X, W))
    with pytest.raises(UsageError, match=r"lacks 1 tensors: \['w'\]"):
        Executor(stage_programs(dag, [0])[0]).load({})
