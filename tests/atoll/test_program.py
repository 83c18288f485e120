"""Programs derived from small hand-written DAGs: who receives, produces, folds and recomputes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.opdag import (
    Kind,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    StateMeta,
    TensorMeta,
    arguments,
    leaf_refs,
    op_refs,
)
from atoll.program import Received, stage_programs

META = TensorMeta((2, 3), "float32")
X = LeafRef(Source.INPUT, "x")


def parameter(name: str) -> LeafRef:
    return LeafRef(Source.PARAMETER, name)


def node(*args: OpRef | LeafRef, path: str = "", grad: bool = True) -> OpNode:
    target = "aten.stack.default"
    return OpNode("n", Kind.PARAMETRIC, target, args, (), (META,), requires_grad=grad, module_path=path)


def dag_of(*ops: OpNode, constant_ops: set[int] | None = None, mutated: tuple[str, ...] = ()) -> OpDag:
    names = {a.name: a.source for op in ops for a in op.args if isinstance(a, LeafRef)}
    return OpDag(
        ops=ops,
        inputs={"x": META},
        parameters={n: StateMeta(META, True) for n, s in names.items() if s is Source.PARAMETER},
        buffers={n: StateMeta(META, False, n in mutated) for n, s in names.items() if s is Source.BUFFER},
        constants={},
        loss=len(ops) - 1,
        constant_ops=frozenset(constant_ops or ()),
    )


def test_an_op_reads_what_lies_in_tuples_and_keywords_too_in_order_and_once():
    op = replace(
        node(OpRef(3)),
        args=((OpRef(3), (parameter("w"), 2.0)), OpRef(1)),
        kwargs=(("out", (OpRef(3), OpRef(0))),),
    )
    assert arguments(op) == [OpRef(3), parameter("w"), 2.0, OpRef(1), OpRef(3), OpRef(0)]
    assert (op_refs(op), leaf_refs(op)) == ((3, 1, 0), (parameter("w"),))


def test_a_skipping_value_goes_straight_to_each_user_and_its_gradient_down_their_chain():
    dag = dag_of(node(X), node(OpRef(0)), node(OpRef(1), OpRef(0)), node(OpRef(2), OpRef(0)))
    first, second, third, last = stage_programs(dag, [0, 1, 2, 3])
    assert [(p.op, p.targets, p.grad_from) for p in first.produced] == [(0, (1, 2, 3), 1)]
    assert second.received == (Received(0, 0, True, grad_from=2, grad_to=0, meta=META),)
    assert third.received[0] == Received(0, 0, True, grad_from=3, grad_to=1, meta=META)
    assert last.received[0] == Received(0, 0, True, grad_from=None, grad_to=2, meta=META)
    assert last.loss == 3
    assert first.loss is None


def test_constants_are_recomputed_where_used_and_never_sent():
    dag = dag_of(node(grad=False), node(X), node(OpRef(1), OpRef(0)), constant_ops={0})
    first, second = stage_programs(dag, [0, 2])
    assert [op for op, _ in second.ops] == [0, 2]
    assert second.constant_ops == {0}
    assert [r.op for r in second.received] == [1]
    assert [op for op, _ in first.ops] == [1]


def test_a_tied_parameter_names_its_holders_in_order():
    dag = dag_of(node(X, parameter("w")), node(OpRef(0), parameter("v")), node(OpRef(1), parameter("w")))
    programs = stage_programs(dag, [0, 1, 2])
    assert [[t.holders for t in p.tied] for p in programs] == [[(0, 2)], [], [(0, 2)]]
    assert programs[0].tied[0].index == programs[2].tied[0].index


@given(st.data())
def test_every_value_received_was_produced_for_that_stage(data: st.DataObject):
    n = data.draw(st.integers(2, 12))
    ops = [node(X)]
    for at in range(1, n):
        reads = data.draw(st.lists(st.integers(0, at - 1), min_size=1, max_size=3, unique=True))
        ops.append(node(*(OpRef(r) for r in reads)))
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))]
    programs = stage_programs(dag_of(*ops), starts)
    sent = {(p.op, s.stage, t) for s in programs for p in s.produced for t in p.targets}
    taken = {(r.op, r.source, s.stage) for s in programs for r in s.received}
    assert sent == taken
    for s in programs:
        for r in s.received:
            giver = next(
                p for p in programs[r.grad_to].produced + programs[r.grad_to].received if p.op == r.op
            )
            assert giver.grad_from == s.stage
    assert sorted(op for s in programs for op, _ in s.ops) == list(range(n))
