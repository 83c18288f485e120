"""Forged calls that would read, write or run beyond their own are refused, by name, before they run.

That honest ones are not is shown beside their captures, by ``test_captured``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.calls import Shapes
from atoll.errors import BadFrame, UnsupportedOp
from atoll.execute import Executor
from atoll.indices import Range, index_ranges
from atoll.job import Precision, TrainingSpec
from atoll.kernels import resolve
from atoll.messages.to_worker import OpProbe
from atoll.opdag import Arg, Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta, TorchLiteral
from atoll.ops import ALLOWED, GETITEM
from atoll.program import PiecePrograms, StageProgram, stage_programs
from atoll.rehearse import RehearsalLimits, rehearse
from atoll.signatures import ENUMERATIONS, TEXTS, parameters
from atoll.value_guards import index_guarded, sound_bools
from worker.machine.op_timing import time_ops
from worker.stage.stage import Stage

FLOAT = "float32"
USUAL = RehearsalLimits()
SHAPES = {
    "x": (8, 6),
    "v": (4096, 4),
    "experts": (3, 6, 5),
    "offs": (2,),
    "g": (1,),
    "ids": (8,),
    "n": (4,),
    "image": (1, 1, 4, 4),
    "grid": (1, 3, 3, 2),
    "sequence": (5, 7, 3),
    "state": (1, 1, 5),
    "w_ih": (20, 3),
    "w_hh": (20, 5),
    "q": (1, 2, 6, 4),
    "k": (1, 2, 6, 4),
    "short": (1, 2, 3, 4),
    "volume": (1, 1, 4, 4, 4),
}
INTEGERS = {"ids": "int64", "n": "int64", "offs": "int32"}
METAS = {name: TensorMeta(shape, INTEGERS.get(name, FLOAT)) for name, shape in SHAPES.items()}


def leaf(name: str) -> LeafRef:
    return LeafRef(Source.INPUT, name)


def node(target: str, *args: Arg, out: tuple[int, ...] = (1,), dtype: str = FLOAT, **kwargs: Arg) -> OpNode:
    declared = (TensorMeta(out, dtype),)
    return OpNode("forged", Kind.NON_PARAMETRIC, target, args, tuple(kwargs.items()), declared)


def program(*nodes: OpNode) -> StageProgram:
    return stage_programs(OpDag(nodes, METAS, {}, {}, {}, len(nodes) - 1), [0])[0]


def refusal(*nodes: OpNode, limits: RehearsalLimits = USUAL) -> str:
    found = program(*nodes)
    with pytest.raises(UnsupportedOp) as caught:
        rehearse(found, {}, {name: METAS[name] for name in found.inputs}, Precision.FP32, limits=limits)
    return str(caught.value)


HUGE = 1 << 62
FORGED = {
    "short_g": (
        node("aten._weight_norm.default", leaf("v"), leaf("g"), 0, out=(4096, 4)),
        "'g' is float32 of shape (1,)",
    ),
    "hidden_state_of_another_batch": (
        node(
            "aten.lstm.input",
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
        "a hidden state is float32 of shape (1, 1, 5); float32 of (1, 7, 5) is due",
    ),
    "recurrent_weights_missing": (
        node(
            "aten.gru.input",
            leaf("sequence"),
            leaf("state"),
            (leaf("w_ih"),),
            False,
            1,
            0.0,
            True,
            False,
            False,
        ),
        "no matrix of whole gates",
    ),
    "dtype_999": (
        replace(node("aten.sum.default", leaf("x"), out=()), kwargs=(("dtype", 999),)),
        "'dtype' is int 999",
    ),
    "memory_format_as_int": (
        replace(node("aten.clone.default", leaf("x"), out=(8, 6)), kwargs=(("memory_format", -1),)),
        "'memory_format'",
    ),
    "device_as_text": (
        replace(node("aten.zeros.default", (1,)), kwargs=(("device", "cuda:1"),)),
        "'device' is str cuda:1",
    ),
    "device_by_name": (
        replace(node("aten.zeros.default", (1,)), kwargs=(("device", TorchLiteral("device", "cuda:1")),)),
        "'device'",
    ),
    "mode_99": (
        node("aten.grid_sampler_2d.default", leaf("image"), leaf("grid"), 99, 0, False),
        "interpolation_mode",
    ),
    "reduction_7": (node("aten.mse_loss.default", leaf("x"), leaf("x"), 7), "'reduction' is 7"),
    "kernel_of_2_to_the_62": (node("aten.max_pool1d.default", leaf("sequence"), (HUGE,)), "'kernel_size'"),
    "unbind_of_many": (node("aten.unbind.int", leaf("v")), "4096 tensors"),
    "groups_of_another_count": (
        node("aten._grouped_mm.default", leaf("x"), leaf("experts"), leaf("offs"), out=(8, 5)),
        "rows of shape (8, 6) by (3, 6, 5) in groups of (2,)",
    ),
    "chunks": (node("aten.chunk.default", leaf("v"), 1 << 40), "tensors"),
    "group_norm_of_another_size": (
        node("aten.native_group_norm.default", leaf("image"), None, None, 1, 64, 64, 1, 1e-5),
        "N, C, HxW",
    ),
    "scale_beside_the_size": (
        node("aten.upsample_nearest2d.default", leaf("image"), (8, 8), 1e-30, 1e-30, out=(1, 1, 8, 8)),
        "a scale of 1e-30",
    ),
    "fewer_values_than_keys": (
        node(
            "aten.scaled_dot_product_attention.default", leaf("q"), leaf("k"), leaf("short"), out=(1, 2, 6, 4)
        ),
        "queries of shape",
    ),
    "negative_reflection": (
        node("aten.reflection_pad3d.default", leaf("volume"), (-3, 1, 1, 1, 1, 1)),
        "a padding of -3",
    ),
    "bits_as_bools": (
        node("aten.view.dtype", leaf("x"), TorchLiteral("dtype", "bool"), out=(8, 24), dtype="bool"),
        "bools",
    ),
    "combinations": (node("aten.combinations.default", leaf("n"), 10**6), "combinations of 1000000"),
    "power": (node("aten.matrix_power.default", leaf("image"), HUGE), "the power"),
    "no_such_argument": (
        replace(node("aten.relu.default", leaf("x"), out=(8, 6)), kwargs=(("inplace", True),)),
        "no argument 'inplace'",
    ),
    "given_twice": (
        replace(node("aten.relu.default", leaf("x"), out=(8, 6)), kwargs=(("self", leaf("x")),)),
        "twice",
    ),
    "missing": (node("aten.linear.default", leaf("x")), "'weight' is missing"),
    "too_many": (node("aten.relu.default", leaf("x"), 1, out=(8, 6)), "at most 1"),
    "a_tuple_for_a_tensor": (node("aten.relu.default", (leaf("x"),), out=(8, 6)), "'self'"),
    "an_unknown_rounding": (
        replace(
            node("aten.div.Tensor_mode", leaf("x"), leaf("x"), out=(8, 6)), kwargs=(("rounding_mode", "up"),)
        ),
        "'rounding_mode' is 'up'",
    ),
    "getitem_of_a_name": (node(GETITEM, leaf("x"), 0), "getitem takes"),
    "sparse_gradients": (
        node("aten.embedding.default", leaf("x"), leaf("ids"), -1, False, True, out=(8, 6)),
        "sparse",
    ),
}


@pytest.mark.parametrize("name", list(FORGED))
def test_a_forged_call_is_refused_by_name(name: str) -> None:
    forged, words = FORGED[name]
    text = refusal(forged)
    assert forged.target in text
    assert words in text


def test_a_probe_is_rehearsed_like_a_stage() -> None:
    small = TensorMeta((1,), FLOAT)
    bomb = replace(node("aten.repeat.default", OpRef(0), (1 << 26,)), outputs=(small,))
    short = node("aten._weight_norm.default", OpRef(0), OpRef(1), 0, out=(4096, 4))
    probes = [OpProbe("bomb", bomb, (small,), {}), OpProbe("short", short, (METAS["v"], METAS["g"]), {})]
    assert time_ops(probes, max_bytes=1 << 20) == {}


def test_memory_inside_an_op_counts() -> None:
    left, right = TensorMeta((4096, 1, 64), FLOAT), TensorMeta((1, 4096, 64), FLOAT)
    wide = replace(
        node("aten.cosine_similarity.default", leaf("a"), leaf("b"), -1),
        outputs=(TensorMeta((4096, 4096), FLOAT),),
    )
    dag = OpDag((wide,), {"a": left, "b": right}, {}, {}, {}, 0)
    with pytest.raises(UnsupportedOp, match=r"cosine_similarity.*makes 4294967296 bytes on the way"):
        rehearse(
            stage_programs(dag, [0])[0],
            {},
            dag.inputs,
            Precision.FP32,
            limits=RehearsalLimits(output_bytes=1 << 30),
        )


def test_more_ops_or_kernels_than_accepted_are_refused() -> None:
    relu = node("aten.relu.default", leaf("x"), out=(8, 6))
    assert "has 3 ops, at most 2" in refusal(relu, relu, relu, limits=RehearsalLimits(ops=2))
    power = node("aten.matrix_power.default", leaf("square"), 1000, out=(4, 4))
    dag = OpDag((power,), {"square": TensorMeta((4, 4), FLOAT)}, {}, {}, {}, 0)
    with pytest.raises(UnsupportedOp, match="more than 5 kernels"):
        rehearse(
            stage_programs(dag, [0])[0], {}, dag.inputs, Precision.FP32, limits=RehearsalLimits(kernels=5)
        )


def test_every_schema_of_the_list_is_understood() -> None:
    for target in ALLOWED - {GETITEM}:
        for parameter in parameters(target):
            if parameter.kind == "str":
                assert parameter.name in TEXTS or parameter.name == "equation", target
            named = parameter.kind == "int" and ("mode" in parameter.name or parameter.name == "reduction")
            assert not named or parameter.name in ENUMERATIONS, target


# ---------------------------------------------------------------- values


LOWEST = torch.iinfo(torch.int64).min


@pytest.mark.parametrize(
    ("target", "args", "why"),
    [
        ("aten.div.Tensor_mode", (torch.tensor([LOWEST]), torch.tensor([-1])), "divided by -1"),
        ("aten.floor_divide.default", (torch.tensor([LOWEST]), -1), "divided by -1"),
        ("aten.remainder.Scalar", (torch.tensor([1, LOWEST]), -1), "divided by -1"),
        ("aten.fmod_.Tensor", (torch.tensor([LOWEST]), torch.tensor([-1])), "divided by -1"),
        ("aten.special_zeta.default", (torch.tensor([2.0]), torch.tensor([-1e15])), "sums up from"),
        ("aten.polygamma.default", (2, torch.tensor([-1e12])), "sums up from"),
        ("aten.poisson.default", (torch.tensor([float("inf")]),), "a rate is not"),
        (
            "aten.grid_sampler.default",
            (torch.ones(1, 1, 2, 2), torch.full((1, 1, 1, 2), float("nan")), 0, 2, False),
            "a place",
        ),
        (
            "aten.embedding_bag.default",
            (torch.ones(4, 2), torch.tensor([0, 1]), torch.tensor([0, -(2**30), 2])),
            "offsets",
        ),
        (
            "aten.embedding_bag.default",
            (torch.ones(4, 2), torch.tensor([0, 9]), torch.tensor([0])),
            "an index is not",
        ),
        ("aten.repeat_interleave.Tensor", (torch.tensor([1, 5]),), "a repeat is not between 0 and 2"),
        (
            "aten._grouped_mm.default",
            (torch.ones(6, 2), torch.ones(3, 2, 4), torch.tensor([2, 1, 6], dtype=torch.int32)),
            "its offsets do not ascend from 0 to at most 6",
        ),
        ("aten.ctc_loss.IntList", (torch.zeros(5, 1, 4), torch.tensor([[100]]), [5], [1]), "a target is not"),
    ],
)
def test_a_value_that_a_kernel_would_trust_is_refused(
    target: str, args: tuple[object, ...], why: str
) -> None:
    keywords = {"rounding_mode": "trunc"} if "mode" in target else {}
    keywords |= {"output_size": 2} if "repeat" in target else {}
    with pytest.raises(UnsupportedOp, match=why):
        resolve(target)(*args, **keywords)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_a_convolution_in_half_precision_is_what_float32_gives_rounded(under_autocast: bool) -> None:
    """oneDNN's own kernel leaves parts of this result as memory was, on processors with AMX."""
    image, kernel = torch.randn(1, 5, 13, 7).bfloat16(), torch.randn(1, 5, 2, 3).bfloat16()
    window = ([2, 3], [1, 0], [2, 2], 1)
    given = (image.float(), kernel.float()) if under_autocast else (image, kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        out = resolve("aten.conv2d.default")(*given, None, *window)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, torch.conv2d(image.float(), kernel.float(), None, *window).bfloat16())


def test_products_of_groups_are_those_of_each_group_alone() -> None:
    """Torch's own kernel leaves the rows behind the last group as memory was."""
    rows, matrices = torch.randn(7, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    due = torch.cat((rows[:2] @ matrices[0], rows[2:6] @ matrices[2], torch.zeros(1, 5)))
    out = resolve("aten._grouped_mm.default")(rows, matrices, ends)
    assert torch.equal(out, due)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (rows, matrices)) for each in (out, due))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_honest_values_pass() -> None:
    assert resolve("aten.floor_divide.default")(torch.tensor([7, -7]), -1).tolist() == [-7, 7]
    assert resolve("aten.div.Tensor_mode")(
        torch.tensor([7]), torch.tensor([2]), rounding_mode="trunc"
    ).tolist() == [3]
    assert resolve("aten.remainder.Scalar")(torch.tensor([LOWEST]), 3).item() == LOWEST % 3


def test_a_write_through_an_unsafe_view_is_seen_by_autograd() -> None:
    """A max-pool's backward reads offsets from its indices: a write behind its back would choose them."""
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    out, indices = resolve("aten.max_pool2d_with_indices.default")(x, [2, 2])
    resolve("aten.fill_.Scalar")(resolve("aten._unsafe_view.default")(indices, [4]), 1 << 40)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bools_of_other_bytes_become_one() -> None:
    forged = torch.frombuffer(bytearray([0, 1, 2, 255]), dtype=torch.bool)
    assert sound_bools(forged).view(torch.uint8).tolist() == [0, 1, 1, 1]


# ---------------------------------------------------------------- indices


TABLE = TensorMeta((10, 4), FLOAT)


def looked_up() -> OpDag:
    """Two look-ups: by an input, and by an input that the graph computes with."""
    ids = TensorMeta((3,), "int64")
    weight = LeafRef(Source.PARAMETER, "w")
    ops = (
        OpNode("a", Kind.NON_PARAMETRIC, "aten.view.default", (leaf("ids"), (3,)), (), (ids,)),
        OpNode(
            "b",
            Kind.PARAMETRIC,
            "aten.embedding.default",
            (weight, OpRef(0)),
            (),
            (TensorMeta((3, 4), FLOAT),),
        ),
        OpNode("c", Kind.NON_PARAMETRIC, "aten.add.Tensor", (OpRef(0), 1), (), (ids,)),
        OpNode(
            "d",
            Kind.PARAMETRIC,
            "aten.index_select.default",
            (weight, 0, OpRef(2)),
            (),
            (TensorMeta((3, 4), FLOAT),),
        ),
    )
    return OpDag(ops, {"ids": ids}, {"w": StateMeta(TABLE, True)}, {}, {}, 3)


def test_indices_are_bounded_where_they_enter_and_where_they_are_computed() -> None:
    dag = looked_up()
    (whole,) = stage_programs(dag, [0])
    found = index_ranges(whole, Shapes(whole, {"w": TABLE}, dag.inputs))
    assert found.inputs == {"ids": Range(0, 10)}
    assert found.computed == {3: (("index", Range(0, 10)),)}
    _, second = stage_programs(dag, [0, 1])
    assert index_ranges(second, Shapes(second, {"w": TABLE}, {})).received == {0: Range(0, 10)}


def test_a_computed_index_out_of_range_is_refused_before_the_op() -> None:
    dag = looked_up()
    call = index_guarded(dag.ops[3], lambda *args: "ran", (("index", Range(0, 10)),))
    table = torch.ones(10, 4)
    good = torch.tensor([0, 9])
    assert call(table, 0, good) == "ran"
    good.fill_(10)  # the same tensor, written since
    with pytest.raises(UnsupportedOp, match=r"index_select.*'index' holds the index 10"):
        call(table, 0, good)


def test_a_stage_refuses_another_stage_s_index_out_of_range() -> None:
    dag = looked_up()
    _, second = stage_programs(dag, [0, 1])
    states = {"w": StateMeta(TABLE, True)}
    stage = Stage(
        [PiecePrograms(second, None)], TrainingSpec(1, 1), {"w": {"value": torch.ones(10, 4)}}, states=states
    )
    stage.begin_step(0)
    with pytest.raises(BadFrame, match="the value of op 0, from another stage, holds the index 77"):
        stage.forward(0, {}, {0: torch.tensor([0, 77, 1])})


def test_an_executor_names_a_forged_op_in_its_program() -> None:
    executor = Executor(program(node("aten.floor_divide.default", leaf("n"), -1, out=(4,), dtype="int64")))
    executor.load({})
    with pytest.raises(UnsupportedOp, match=r"aten\.floor_divide\.default"):
        executor.forward(0, 0, {"n": torch.full((4,), LOWEST)}, {})
