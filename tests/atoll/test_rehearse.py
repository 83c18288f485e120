"""A stage is rehearsed on shapes alone: understated programs are refused.

That honest ones pass is shown beside their captures, by ``test_captured``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import UnsupportedOp
from atoll.job import Precision
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, TensorMeta
from atoll.program import StageProgram, stage_programs
from atoll.rehearse import rehearse

SMALL = TensorMeta((2, 2), "float32")


def node(name: str, target: str, *args: object, meta: TensorMeta = SMALL) -> OpNode:
    return OpNode(name, Kind.NON_PARAMETRIC, target, args, (), (meta,))  # type: ignore[arg-type]


def program(*nodes: OpNode) -> StageProgram:
    dag = OpDag(nodes, {"x": SMALL}, {}, {}, {}, len(nodes) - 1)
    return stage_programs(dag, [0])[0]


def test_memory_asked_for_behind_a_small_declaration_is_refused_without_allocating() -> None:
    x = LeafRef(Source.INPUT, "x")
    bomb = program(
        node("wide", "aten.repeat.default", x, (1 << 20, 1 << 20), meta=SMALL),
        node("sum", "aten.add.Scalar", OpRef(0), 1),
    )
    with pytest.raises(UnsupportedOp, match=r"aten\.repeat\.default.*makes 17592186044416 bytes on the way"):
        rehearse(bomb, {}, {"x": SMALL}, Precision.FP32)


def test_arguments_that_torch_refuses_are_refused() -> None:
    broken = program(node("bad", "aten.view.default", LeafRef(Source.INPUT, "x"), (3, 3)))
    with pytest.raises(UnsupportedOp, match="does not run on its own shapes"):
        rehearse(broken, {}, {"x": SMALL}, Precision.FP32)


def test_a_wrong_dtype_is_refused() -> None:
    lying = program(
        replace(
            node("r", "aten.relu.default", LeafRef(Source.INPUT, "x")), outputs=(TensorMeta((2, 2), "bool"),)
        )
    )
    with pytest.raises(UnsupportedOp, match="declares"):
        rehearse(lying, {}, {"x": SMALL}, Precision.FP32)
