"""Hostile ops by a fixed seed; `make fuzz` and `python -m tests.fuzz` go on from there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from atoll.opdag import TorchLiteral
from tests.fuzz.case import Case, Tensorlike, case_of
from tests.fuzz.generate import TARGETS, case
from tests.fuzz.shrink import smaller
from tests.fuzz.supervisor import CHECKING, Supervisor, drawn, verdict

SEED = 4711


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """One pair of children: starting one costs more than hundreds of cases."""
    with Supervisor() as started:
        yield started


@pytest.mark.parametrize(
    "ops", [80, pytest.param(240, marks=pytest.mark.slow)]
)  # of a list four times as long
def test_no_op_kills_hangs_or_shows_memory_that_is_not_its_own(ops: int, supervisor: Supervisor) -> None:
    some = random.Random(SEED).sample(TARGETS, ops)
    report = supervisor.run(drawn(SEED, some, range(4)))
    assert report.findings == []
    assert report.cases == 4 * ops
    assert report.status["ran"] > report.cases // 3  # cases come to the kernels, not only to the checks


FOUND = (
    # Each killed a process, ran for ever or showed foreign memory before its guard was written.
    Case("aten._weight_norm.default", {"v": Tensorlike((4096, 4)), "g": Tensorlike((1,)), "dim": 0}, 1),
    Case(
        "aten.div.Tensor_mode",
        {
            "self": Tensorlike((32,), "int64", "extreme"),
            "other": Tensorlike((32,), "int64", "extreme"),
            "rounding_mode": "trunc",
        },
        2,
    ),
    Case(
        "aten.grid_sampler.default",
        {
            "input": Tensorlike((1, 1, 1, 1)),
            "grid": Tensorlike((1, 1, 3, 2), fill="extreme"),
            "interpolation_mode": 0,
            "padding_mode": 2,
            "align_corners": False,
        },
        866009244,
    ),
    Case(
        "aten.embedding_bag.default",
        {
            "weight": Tensorlike((4, 1)),
            "indices": Tensorlike((1,), "int64", "extreme", 8, False),
            "offsets": Tensorlike((1,), "int64", "zero", 2, False),
            "include_last_offset": True,
        },
        2036536012,
    ),
    Case(
        "aten.embedding_bag.default",
        {
            "weight": Tensorlike((3, 1), grad=False),
            "indices": Tensorlike((1,), "int64", "one", 3, False),
            "offsets": Tensorlike((0,), "int64", "one", 2, False),
            "mode": 2,
        },
        825547328,
    ),
    Case(
        "aten.reflection_pad3d.default",
        {"self": Tensorlike((1, 1, 4, 4, 4), fill="extreme"), "padding": (-7, 3, 2, 1, 3, 0)},
        1630423527,
    ),
    Case(
        "aten.scaled_dot_product_attention.default",
        {
            "query": Tensorlike((1, 1, 8, 4)),
            "key": Tensorlike((1, 1, 64, 4)),
            "value": Tensorlike((1, 1, 4, 4)),
        },
        3,
    ),
    Case(
        "aten.repeat_interleave.Tensor",
        {"repeats": Tensorlike((5,), "int64", "extreme", 2, False), "output_size": 5},
        1388779175,
    ),
    Case(
        "aten.conv2d.default",
        {
            "input": Tensorlike((1, 5, 13, 7), "bfloat16", "one", 2, False),
            "weight": Tensorlike((1, 5, 2, 3), "bfloat16", "one", 2, False),
            "stride": (2, 3),
            "padding": (1, 0),
            "dilation": (2, 2),
            "groups": 1,
        },
        1393787484,
        True,
    ),
    Case(
        "aten.convolution.default",
        {
            "input": Tensorlike((3, 4, 1), fill="one"),
            "weight": Tensorlike((1, 4, 1), fill="one", grad=False),
            "bias": None,
            "stride": (10**6,),
            "padding": (1,),
            "dilation": (1,),
            "transposed": False,
            "output_padding": (0,),
            "groups": 1,
        },
        744570683,
        True,
    ),
    Case(
        "aten.gru.data",
        {
            "data": Tensorlike((1, 5)),
            "batch_sizes": Tensorlike((0,), "int64", "one", 5, False),
            "hx": Tensorlike((1, 1, 2)),
            "params": (Tensorlike((6, 5)), Tensorlike((6, 2)), Tensorlike((6,)), Tensorlike((6,))),
            "has_biases": True,
            "num_layers": 1,
            "dropout": 0.0,
            "train": True,
            "bidirectional": False,
        },
        6,
    ),
    Case(
        "aten.conv2d.default",
        {
            "input": Tensorlike((1, 15, 12, 4), "bfloat16", "one", 2, False),
            "weight": Tensorlike((3, 5, 1, 4), "bfloat16", "one", 2, False),
            "stride": (2, 7),
            "padding": (0, 0),
            "dilation": (1, 1),
            "groups": 3,
        },
        57522059,
    ),
    Case(
        "aten.max_pool1d_with_indices.default",
        {"self": Tensorlike((1, 1, 6), "float64"), "kernel_size": (2,), "padding": (1,), "dilation": 7},
        1414392032,
    ),
    Case(
        "aten._upsample_nearest_exact1d.default",
        {"self": Tensorlike((1, 1, 1), "uint8", "one", 2, False), "output_size": (1,), "scales": 1e-300},
        384773377,
        True,
    ),
    Case("aten.mvlgamma.default", {"self": Tensorlike((1,), "bfloat16"), "p": 2**31 - 1}, 7),
    Case("aten.combinations.default", {"self": Tensorlike((1,)), "r": 10**6}, 4),
    Case("aten.max_pool1d.default", {"self": Tensorlike((1, 1, 8)), "kernel_size": (1 << 62,)}, 5),
)


def test_what_was_found_once_stays_harmless(supervisor: Supervisor) -> None:
    report = supervisor.run((found.target, found.text(), found) for found in FOUND)
    assert report.findings == []


def test_a_case_is_its_text_and_its_number() -> None:
    for number in range(50):
        one = case(SEED, TARGETS[number * 7], number)
        assert case_of(one.text()) == case_of(case(SEED, TARGETS[number * 7], number).text())
    typed = Case("aten.to.dtype", {"self": Tensorlike((2,)), "dtype": TorchLiteral("dtype", "bool")}, 1, True)
    assert case_of(typed.text()) == typed


def test_neighbours_of_a_case_are_smaller() -> None:
    one = Case("aten.sum.dim_IntList", {"self": Tensorlike((8, 3)), "dim": (0,), "keepdim": True}, 1)
    found = list(smaller(one))
    assert one.without("keepdim") in found
    assert any(c.given["self"].shape == (4, 3) for c in found)
    assert all(c != one for c in found)


def test_a_pair_that_differs_died_or_hung_is_told_from_one_that_agrees() -> None:
    ran = ("ran", "abc", True)
    assert verdict([ran, ran]) == ("", "")
    assert verdict([ran, ("ran", "abd", True)])[0] == "differs"
    assert verdict([("raised", "x", True), ("raised", "y", True)]) == ("", "")
    assert verdict([ran, ("died", "signal 11", True)])[0] == "died"
    assert verdict([("hung", "", True), ran])[0] == "hung"


@pytest.mark.skipif(not CHECKING, reason="no checking allocator on this system")
def test_the_children_see_a_kernel_that_reads_beyond_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, the first finding of this fuzz: its own check that it can find."""
    monkeypatch.setenv("ATOLL_FUZZ_UNGUARDED", "_weight_norm")
    # Each try to make it smaller would cost two processes, which import torch under the checking allocator.
    with Supervisor(shrink_tries=0) as supervisor:
        report = supervisor.run((found.target, found.text(), found) for found in FOUND[:1])
    assert [finding.kind for finding in report.findings] == ["died"]
