"""Sums by blocks: their order, what stays apart, and weight gradients that come late."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.block_sums import BlockSums, fold

BLOCKS = {0: range(2), 1: range(2, 4)}


def leaf() -> Tensor:
    return torch.zeros(1, requires_grad=True)


def give(leaf: Tensor, value: float) -> None:
    """Accumulate as torch does."""
    gradient = torch.tensor([value])
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def values(parts: object) -> dict[int, float | None]:
    assert isinstance(parts, dict)
    return {block: None if part is None else float(part) for block, part in parts.items()}


def test_a_fold_adds_in_order_and_leaves_the_first_as_it_is() -> None:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    assert fold([None, second, None], first) is second
    assert (float(first), float(second)) == (1.0, 3.0)
    assert fold([None, second, first]) is second
    assert float(second) == 4.0
    assert fold([None]) is None


@pytest.mark.parametrize(
    ("blocks", "expected"), [(BLOCKS, {0: 10.0}), ({1: range(2), 2: range(2, 4)}, {1: 3.0, 2: 7.0})]
)
def test_blocks_stay_apart_unless_they_begin_the_step(
    blocks: dict[int, range], expected: dict[int, float]
) -> None:
    weight = leaf()
    sums = BlockSums({"w": [(0, weight)]}, (), blocks, ())
    for micro in range(4):
        give(weight, micro + 1.0)
        sums.backward_done(micro, None)
    assert values(sums.parts("w")) == expected
    assert weight.grad is None
    sums.clear()
    assert sums.parts("w") == {}


def test_rounding_shows_the_order_of_blocks_uses_and_micro_batches() -> None:
    early, late = leaf(), leaf()
    sums = BlockSums({"w": [(5, late), (1, early)]}, (), BLOCKS, ())
    given = [(1.0, 1e8), (1.0, -1e8), (3.0, 1e8), (5.0, 1.0)]
    for micro, (a, b) in enumerate(given):
        give(early, a)
        give(late, b)
        sums.backward_done(micro, None)
    f = torch.tensor
    first = (f(1e8) + f(-1e8)) + (f(1.0) + f(1.0))
    second = (f(1e8) + f(1.0)) + (f(3.0) + f(5.0))
    assert float(sums.parts("w")[0]) == float(first + second)  # type: ignore[arg-type]


def test_weight_gradients_that_come_after_the_next_blocks_backward_count_for_their_own() -> None:
    norm, weight = leaf(), leaf()
    sums = BlockSums({"norm": [(1, norm)], "w": [(0, weight)]}, {0}, {1: range(2), 2: range(2, 4)}, ())
    owed = []
    for micro in range(4):
        give(norm, 10.0**micro)
        owed.append(micro)
        sums.backward_done(micro, owed[0])
    while owed:
        give(weight, 10.0 ** owed.pop(0))
        sums.weights_done(owed[0] if owed else None)
    assert values(sums.parts("norm")) == values(sums.parts("w")) == {1: 11.0, 2: 1100.0}


@pytest.mark.parametrize("blocks", [BLOCKS, {1: range(2), 2: range(2, 4)}])
def test_the_next_blocks_backward_may_come_before_the_weight_gradients_of_one_that_was_early(
    blocks: dict[int, range],
) -> None:
    class Noticed:
        def __init__(self) -> None:
            self.parts: list[tuple[str, int]] = []

        def part(self, name: str, label: int) -> None:
            self.parts.append((name, label))

    norm, weight, noticed = leaf(), leaf(), Noticed()
    sums = BlockSums({"norm": [(1, norm)], "w": [(0, weight)]}, {0}, blocks, ())
    sums.watch(noticed.part)
    for micro in range(4):
        sums.backward_begins(micro)
        (norm * 10.0**micro).sum().backward()  # type: ignore[no-untyped-call]
        sums.backward_done(micro, 0)
    assert noticed.parts == ([] if 0 in blocks else [("norm", 1)])  # the second block has to wait
    for micro in range(4):
        give(weight, 10.0**micro)
        sums.weights_done(micro + 1 if micro < 3 else None)
    assert values(sums.parts("norm")) == values(sums.parts("w"))
    assert values(sums.parts("w")) == ({0: 1111.0} if 0 in blocks else {1: 11.0, 2: 1100.0})


def test_a_tied_parameters_blocks_wait_for_the_later_stages_sums() -> None:
    early, late = leaf(), leaf()
    sums = BlockSums({"w": [(5, late), (1, early)], "v": []}, (), BLOCKS, {"w"})
    for micro in range(4):
        give(early, 1.0)
        if micro < 2:
            give(late, 10.0)
        sums.backward_done(micro, None)
    assert sums.parts("w") == {}
    for block, later in ((0, 100.0), (1, 200.0)):
        sums.add("w", block, sums.partial("w", block, torch.tensor([later])))
    assert values(sums.parts("w")) == {0: 122.0 + 202.0}
