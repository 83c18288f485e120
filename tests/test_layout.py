"""Tensors keep values, shape and memory order on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from worker.layout import from_wire, memory_order, to_wire


@given(st.lists(st.integers(0, 4), max_size=5), st.randoms(use_true_random=False))
def test_any_permuted_tensor_arrives_with_its_strides(shape: list[int], random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).permute(order)
    data, sent = to_wire(tensor)
    arrived = from_wire(data, sent)
    assert data.is_contiguous()
    assert torch.equal(arrived, tensor)
    big = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    if tensor.numel():
        assert [arrived.stride(d) for d in big] == [tensor.stride(d) for d in big]


@given(st.sampled_from(["expanded", "sliced", "channels_last", "scalar"]))
def test_tensors_with_gaps_or_overlaps_arrive_contiguous(kind: str) -> None:
    tensor = {
        "expanded": torch.ones(3, 1).expand(3, 4),
        "sliced": torch.arange(24.0).view(4, 6)[:, ::2],
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
    }[kind]
    arrived = from_wire(*to_wire(tensor))
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous() == (kind != "channels_last")


def test_a_contiguous_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.rand(3, 4)
    assert to_wire(tensor)[0].data_ptr() == tensor.data_ptr()
    assert to_wire(tensor.t())[0].data_ptr() == tensor.data_ptr()
    assert memory_order(tensor.t()) == (1, 0)


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (1, 2)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(BadFrame, match="does not permute"):
        from_wire(torch.rand(2, 3), order)
