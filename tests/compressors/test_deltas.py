"""Deltas between files of tensors: exact, the shortest form, and nothing but that from whoever sent them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from atoll.errors import BadFrame
from compressors.deltas import (
    Form,
    decode,
    decode_piece,
    encode,
    encode_piece,
    fitting,
    head_of,
    masked,
    name_of,
)

Bytes = NDArray[np.uint8]


def file_of(**tensors: Tensor) -> Bytes:
    return np.frombuffer(save(tensors), np.uint8)


def delta_of(base: Bytes, new: Bytes) -> Bytes:
    assert fitting(base, new)
    return np.frombuffer(b"".join(encode(base, new, (name_of(base), name_of(new)))), np.uint8)


def again(base: Bytes, delta: Bytes) -> bytes:
    return b"".join(decode(base, delta))


SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-45, 3.4e38])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_a_thousand_pairs_come_back_to_the_bit(dtype: torch.dtype) -> None:
    random_ = random.Random(7)
    draw = torch.Generator().manual_seed(7)
    for number in range(200):
        n = random_.choice([0, 1, 7, 8, 63, 500])
        before = (torch.randn(n, generator=draw) * 10).to(dtype)
        after = before.clone()
        share = random_.choice([0.0, 0.01, 0.1, 0.5, 1.0])
        moved = torch.rand(n, generator=draw) < share
        noise = torch.randn(n, generator=draw) * random_.choice([1e-4, 1.0])
        after[moved] = (before[moved].double() + noise[moved]).to(dtype)
        if n and dtype.is_floating_point and number % 3 == 0:
            places = torch.randint(n, (8,), generator=draw)
            after[places] = SPECIAL.to(dtype)
        base, new = (file_of(value=value, count=torch.tensor(number)) for value in (before, after))
        delta = delta_of(base, new)
        assert again(base, delta) == new.tobytes(), (number, n, share)
        assert delta.size <= new.size + 200
        assert head_of(delta.tobytes()).new == name_of(new)


@pytest.mark.parametrize("changed", [0.05, 0.15, 0.4, 0.7])
def test_of_16_bit_words_a_mask_makes_16_over_1_and_16_c(changed: float) -> None:
    """papers/decentralized.md 7; new words without a pattern, so that nothing but the mask helps."""
    draw = np.random.default_rng(3)
    base = draw.integers(0, 1 << 16, 400_000, dtype=np.uint16)
    new = base.copy()
    places = draw.random(len(base)) < changed
    new[places] ^= draw.integers(1, 1 << 16, int(places.sum()), dtype=np.uint16)
    mask = masked(base != new, new[base != new])
    share = float((base != new).mean())
    assert share == pytest.approx(changed, rel=0.02)
    assert new.nbytes / len(mask) == pytest.approx(16 / (1 + 16 * share), rel=0.02)
    piece = encode_piece(base.view(np.uint8), new.view(np.uint8), 2)
    assert len(piece) <= len(mask) + 10
    assert (
        decode_piece(piece[0], 2, base.view(np.uint8), np.frombuffer(piece[10:], np.uint8)) == new.tobytes()
    )


@pytest.mark.parametrize(
    ("changed", "form"), [(0.0, Form.SAME), (0.001, Form.POSITIONS), (0.3, Form.MASK), (1.0, Form.WHOLE)]
)
def test_a_piece_takes_its_shortest_form(changed: float, form: Form) -> None:
    draw = np.random.default_rng(5)
    base = draw.integers(0, 1 << 16, 100_000, dtype=np.uint16)
    new = np.where(draw.random(len(base)) < changed, draw.integers(0, 1 << 16, len(base)), base)
    piece = encode_piece(base.view(np.uint8), new.astype(np.uint16).view(np.uint8), 2)
    # zstd shortens the mask of what has no pattern by a little.
    assert piece[0] in ((form, Form.CODED) if form in (Form.MASK, Form.POSITIONS) else (form,))


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 2.0), (torch.float32, 1.3)])
def test_small_steps_are_coded_as_differences(dtype: torch.dtype, least: float) -> None:
    draw = torch.Generator().manual_seed(1)
    before = torch.randn(200_000, generator=draw) * 0.02
    after = before + torch.randn(200_000, generator=draw) * 1e-5
    base, new = file_of(value=before.to(dtype)), file_of(value=after.to(dtype))
    delta = delta_of(base, new)
    assert new.size / delta.size >= least
    assert again(base, delta) == new.tobytes()


def test_larger_files_are_coded_piece_by_piece() -> None:
    before = torch.arange(700_000, dtype=torch.float32)
    after = before.clone()
    after[600_000] = -1.0
    base, new = file_of(value=before), file_of(value=after)
    delta = delta_of(base, new)
    assert delta.size < 250
    assert [len(piece) for piece in decode(base, delta)][1:] == [1 << 20, 1 << 20, 2_800_000 - (2 << 20)]
    assert again(base, delta) == new.tobytes()


def test_files_of_other_layouts_do_not_fit() -> None:
    one, other = file_of(value=torch.zeros(4)), file_of(value=torch.zeros(4), m=torch.zeros(4))
    assert fitting(one, one)
    assert not fitting(one, other)
    assert not fitting(file_of(value=torch.zeros(2, 2)), one)
    assert not fitting(np.zeros(4, np.uint8), np.zeros(4, np.uint8))


def test_a_wrong_base_is_refused_by_its_size_or_found_by_the_hash() -> None:
    base, new = file_of(value=torch.zeros(64)), file_of(value=torch.ones(64))
    delta = delta_of(base, new)
    with pytest.raises(BadFrame, match="the base has"):
        again(base[:-4], delta)
    other = file_of(value=torch.full((64,), 2.0))
    assert name_of(np.frombuffer(again(other, delta), np.uint8)) != head_of(delta.tobytes()).new


def _mutated(delta: Bytes, random_: random.Random) -> Bytes:
    data = bytearray(delta.tobytes())
    for _ in range(random_.choice([1, 1, 2, 8])):
        match random_.randrange(4):
            case 0:
                data[random_.randrange(len(data))] = random_.randrange(256)
            case 1:
                del data[random_.randrange(len(data)) :]
            case 2:
                at = random_.randrange(len(data) + 1)
                data[at:at] = random_.randbytes(random_.choice([1, 4, 40]))
            case 3:
                at = random_.randrange(len(data))
                data[at : at + 4] = (0xFFFFFFFF).to_bytes(4, "little")
        if not data:
            data = bytearray(b"x")
    return np.frombuffer(bytes(data), np.uint8)


def test_ten_thousand_mutated_deltas_are_refused_or_show_by_their_hash() -> None:
    draw = torch.Generator().manual_seed(2)
    random_ = random.Random(11)
    before = torch.randn(600, generator=draw).bfloat16()
    pairs: list[tuple[Bytes, Bytes, bytes]] = []
    for share, noise in ((0.002, 1.0), (0.3, 5.0), (0.5, 1e-3), (1.0, 1e-3), (1.0, 9.0)):
        after = before.clone()
        moved = torch.rand(600, generator=draw) < share
        after[moved] += torch.randn(600, generator=draw)[moved].bfloat16() * noise
        base, new = file_of(value=before, m=before.float()), file_of(value=after, m=after.float())
        pairs.append((base, delta_of(base, new), new.tobytes()))
    refused = 0
    for _ in range(10_000):
        base, delta, new = pairs[random_.randrange(len(pairs))]
        try:
            found = again(base, _mutated(delta, random_))
        except BadFrame:
            refused += 1
            continue
        assert len(found) == len(new)
    assert refused > 5_000


def test_no_form_makes_more_than_its_piece() -> None:
    """A frame that says that it holds a terabyte is refused before it is opened."""
    import zstandard

    base = file_of(value=torch.zeros(64))
    delta: Any = bytearray(delta_of(base, file_of(value=torch.randn(64))).tobytes())
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 22))
    piece = bytes([Form.DIFFERENCES, 4]) + (64).to_bytes(4, "little") + len(bomb).to_bytes(4, "little")
    head = delta[:76]
    with pytest.raises(BadFrame):
        again(base, np.frombuffer(bytes(head) + piece + bomb, np.uint8))
