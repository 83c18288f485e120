"""Tensors keep values, shape, strides and alignment on the wire."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import BadFrame
from compressors import make_compressor
from compressors.layout import ALIGNMENT, Layout, from_wire, to_wire

FLOAT = 4  # bytes


def arrived(tensor: Tensor) -> Tensor:
    data, layout = to_wire(tensor)
    assert data.is_contiguous()
    assert data.numel() == tensor.numel()
    return from_wire(data.clone(), tensor.shape, layout)


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 2**32))
def test_any_view_arrives_with_its_strides_and_alignment(shape: list[int], seed: int):
    source = random.Random(seed)
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    for _ in range(3):
        if tensor.dim() == 0:
            break
        dim = source.randrange(tensor.dim())
        move = source.choice(["transpose", "slice", "expand", "permute"])
        if move == "transpose":
            tensor = tensor.transpose(dim, source.randrange(tensor.dim()))
        elif move == "slice":
            tensor = tensor.narrow(dim, tensor.shape[dim] // 2, tensor.shape[dim] - tensor.shape[dim] // 2)
        elif move == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
        else:
            tensor = tensor.permute(source.sample(range(tensor.dim()), tensor.dim()))
    back = arrived(tensor)
    assert torch.equal(back, tensor)
    if tensor.numel():
        assert back.stride() == tensor.stride()
        assert back.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


def test_part_of_a_split_keeps_its_gaps():
    part = torch.rand(2, 12, 96).split(32, 2)[1]
    back = arrived(part)
    assert back.stride() == (1152, 96, 1)
    assert torch.equal(back, part)


def test_a_dense_tensor_is_sent_and_taken_without_a_copy():
    for tensor in (torch.rand(16, 16), torch.rand(16, 16).t(), torch.rand(2, 3, 4, 8).permute(0, 3, 1, 2)):
        data, layout = to_wire(tensor)
        assert data.data_ptr() == tensor.data_ptr()
        assert from_wire(data, tensor.shape, layout).data_ptr() == tensor.data_ptr()


def test_a_tensor_in_foreign_memory_is_moved_to_aligned_memory():
    payload = bytearray(4 * 100 + 64)
    skewed = torch.frombuffer(payload, dtype=torch.float32, count=100, offset=4)
    back = from_wire(skewed, (10, 10), Layout((10, 1)))
    assert back.data_ptr() % ALIGNMENT == 0


def test_layouts_spread_too_far_or_overlapping_are_sent_contiguous():
    far = torch.rand(2, 10_000)[:, :1]
    overlapping = torch.rand(8).as_strided((3, 4), (1, 1))
    for tensor in (far, overlapping):
        back = arrived(tensor)
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout((3,)), "one non-negative stride"),
        (Layout((3, -1)), "one non-negative stride"),
        (Layout((1, 1)), "overlaps"),
        (Layout((2, 1)), "overlaps"),
        (Layout((1000, 1)), "spans more"),
        (Layout((3, 1), lead=ALIGNMENT // FLOAT), "leads by more"),
        (Layout((3, 1), lead=-1), "leads by more"),
    ],
)
def test_a_layout_that_no_honest_sender_makes_is_refused(layout: Layout, why: str):
    with pytest.raises(BadFrame, match=why):
        from_wire(torch.rand(6), (2, 3), layout)


def test_a_wrong_number_of_elements_is_refused():
    with pytest.raises(BadFrame, match="5 elements"):
        from_wire(torch.rand(5), (2, 3), Layout((3, 1)))


@given(st.lists(st.integers(0, 4), max_size=5))
def test_the_contiguous_layout_is_torch_s(shape: list[int]):
    assert Layout.contiguous(tuple(shape)).strides == torch.empty(shape).stride()


def test_the_uncompressed_codec_keeps_the_layout():
    codec = make_compressor("none")
    for tensor in (torch.rand(3, 4), torch.rand(3, 4).t(), torch.rand(2, 12, 96).split(32, 2)[1]):
        packet, _ = codec.compress(tensor, seed=0)
        back = codec.decompress(packet)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert bool(packet.params) != tensor.is_contiguous()


@given(st.integers(0, 15), st.lists(st.integers(0, 2**40), max_size=16))
def test_a_layout_survives_its_bytes(lead: int, strides: list[int]):
    layout = Layout(tuple(strides), lead)
    assert Layout.from_bytes(layout.to_bytes(), len(strides)) == layout
    with pytest.raises(BadFrame, match="dimensions"):
        Layout.from_bytes(layout.to_bytes() + b"x", len(strides))
