"""The allow-list: every entry resolves, nothing dangerous is on it, forged nodes are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UnsupportedOp
from atoll.kernels import resolve
from atoll.opdag import Arg, Kind, LeafRef, OpNode, OpRef, Source, TensorMeta, TorchLiteral
from atoll.ops import ALLOWED, GETITEM, MAX_DEPTH, MAX_LITERALS, MAX_TEXT, check_node

LIMIT_BYTES = 1 << 20
LEFT_OUT = """
    set_ resize_ resize_as_ from_file as_strided as_strided_ _resize_output_ record_stream nonzero
    masked_select unique_dim item _local_scalar_dense _foreach_add requires_grad_ data pin_memory
"""


def node(target: str, *args: Arg, shape: tuple[int, ...] = (2, 2), **kwargs: Arg) -> OpNode:
    meta = TensorMeta(shape, "float32")
    return OpNode(
        "n", Kind.NON_PARAMETRIC, target, args, tuple(kwargs.items()), (meta,), module_path="block.0"
    )


def test_every_entry_is_an_op_of_this_torch_without_out_arguments() -> None:
    for target in ALLOWED - {GETITEM}:
        _, name, overload = target.split(".")
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        assert not any(argument.is_out for argument in schema.arguments), target
        kinds = {str(argument.type) for argument in schema.arguments}
        assert not kinds & {"Storage", "Stream", "Any"}, target
        assert {str(r.type) for r in schema.returns} <= {"Tensor", "List[Tensor]"}, target
        assert callable(resolve(target))


@pytest.mark.parametrize("name", LEFT_OUT.split())
def test_ops_on_storages_files_and_data_dependent_sizes_are_left_out(name: str) -> None:
    assert not {target for target in ALLOWED if target.split(".")[1] == name}


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtin.eval",
        "builtin.getattr",
        "aten.set_.default",
        "aten",
        "",
        "aten.add.Tensor.x",
        "prim.x.y",
    ],
)
def test_a_target_off_the_list_is_refused(target: str) -> None:
    with pytest.raises(UnsupportedOp, match="not on the allow-list"):
        resolve(target)
    with pytest.raises(UnsupportedOp, match=r"in block\.0"):
        check_node(node(target), LIMIT_BYTES)


@given(st.text(max_size=40))
def test_no_name_reaches_anything_but_the_list(target: str) -> None:
    if target not in ALLOWED:
        with pytest.raises(UnsupportedOp):
            resolve(target)


def test_uninitialised_memory_is_handed_out_as_zeros() -> None:
    torch.full((1000,), 7.0)
    for target, args in (
        ("aten.empty.memory_format", ([1000],)),
        ("aten.empty_like.default", (torch.ones(1000),)),
        ("aten.new_empty.default", (torch.ones(2), [1000])),
    ):
        assert not resolve(target)(*args).any()


def test_an_honest_node_passes() -> None:
    weight = LeafRef(Source.PARAMETER, "w")
    check_node(node("aten.linear.default", OpRef(0), weight, None), LIMIT_BYTES)
    check_node(node("aten.full.default", (2, 2), 1.5, dtype=TorchLiteral("dtype", "float32")), LIMIT_BYTES)
    check_node(node("aten.randint.low", 0, 5, (2, 2)), LIMIT_BYTES)
    check_node(node("aten.zeros.default", size=(2, 2)), LIMIT_BYTES)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (node("aten.relu.default", OpRef(0), shape=(1 << 20, 4)), "exceeds the limit of 1048576"),
        (node("aten.full.default", (1 << 40, 1 << 20), 1.0), "asks for 1152921504606846976 elements"),
        (node("aten.new_zeros.default", OpRef(0), (1 << 40,)), "asks for 1099511627776 elements"),
        (node("aten.zeros.default", size=(1 << 40,)), "asks for"),
        (node("aten.relu.default", OpRef(0), shape=(1,) * 17), "declares the shape"),
        (node("aten.relu.default", OpRef(0), shape=(-1,)), "declares the shape"),
        (node("aten.add.Tensor", OpRef(0), 1 << 63), "does not fit 64 bits"),
        (node("aten.einsum.default", "a" * (MAX_TEXT + 1), (OpRef(0),)), "string argument has 257"),
        (node("aten.permute.default", OpRef(0), (0,) * MAX_LITERALS), "exceed 4096 items"),
        (node("aten.add.Tensor", OpRef(0), b"x"), "an argument is a bytes"),  # type: ignore[arg-type]
        (
            replace(node("aten.split.Tensor", OpRef(0), 1), outputs=(TensorMeta((1,), "bool"),) * 1025),
            "1025 outputs",
        ),
    ],
)
def test_a_forged_node_is_refused_with_its_numbers(forged: OpNode, why: str) -> None:
    with pytest.raises(UnsupportedOp, match=why):
        check_node(forged, LIMIT_BYTES)


def test_arguments_nested_too_deep_are_refused() -> None:
    arg: Arg = 1
    for _ in range(MAX_DEPTH + 1):
        arg = (arg,)
    with pytest.raises(UnsupportedOp, match="depth"):
        check_node(node("aten.permute.default", OpRef(0), arg), LIMIT_BYTES)
