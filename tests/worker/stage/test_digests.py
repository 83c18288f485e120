"""Eight bytes over a stage's gradients: the same for the same bits, others for any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.stage import digests
from worker.stage.digests import norms_and_digest

CPU = torch.device("cpu")


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    made = torch.Generator().manual_seed(7)
    return [torch.randn(5, 3, generator=made).to(dtype), None, torch.randn(4, generator=made).to(dtype)]


def digest(*found: Tensor | None) -> bytes:
    return norms_and_digest(found, CPU)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_same_gradients_have_the_same_digest(dtype: torch.dtype) -> None:
    assert digest(*gradients(dtype)) == digest(*gradients(dtype))
    assert len(digest(*gradients(dtype))) == 8


def test_norms_are_those_of_float64_and_none_has_none() -> None:
    norms, _ = norms_and_digest(gradients(), CPU)
    first = gradients()[0]
    assert first is not None
    assert norms[0] == float(torch.linalg.vector_norm(first, dtype=torch.float64))
    assert norms[1] == 0.0


def test_a_turned_sign_has_the_same_norm_and_another_digest() -> None:
    first, none, last = gradients()
    assert first is not None
    turned = [-first, none, last]
    assert norms_and_digest(turned, CPU)[0] == norms_and_digest(gradients(), CPU)[0]
    assert digest(*turned) != digest(*gradients())


def test_one_bit_of_one_element_shows() -> None:
    first, none, last = gradients()
    assert last is not None
    last.view(torch.int32)[2] ^= 1
    assert digest(first, none, last) != digest(*gradients())


def test_gradients_change_places_only_with_another_digest() -> None:
    first, none, last = gradients()
    assert digest(last, none, first) != digest(first, none, last)
    assert digest(none, first, last) != digest(first, none, last)


def test_a_stage_without_parameters_has_a_digest_too() -> None:
    assert norms_and_digest([], CPU) == ([], digest())


def test_a_view_with_other_strides_and_an_empty_one_are_taken() -> None:
    wide = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert digest(wide.t()) == digest(wide.t().contiguous())
    assert digest(torch.empty(0, 4)) == digest(torch.zeros(3))


@pytest.mark.parametrize("shape", [(60, 7), (7, 60), (420,), (2, 3, 70)])
def test_a_gradient_in_pieces_has_the_digest_of_its_bits_and_the_same_norm(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    norms, _ = norms_and_digest([gradient, None], CPU)
    monkeypatch.setattr(digests, "PIECE", 50)
    in_pieces, digest = norms_and_digest([gradient, None], CPU)
    assert in_pieces == pytest.approx(norms, rel=1e-12)
    assert digest == norms_and_digest([gradient.clone(), None], CPU)[1]
    assert digest != norms_and_digest([-gradient, None], CPU)[1]


def test_no_piece_is_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch copies to float64 is a piece."""
    monkeypatch.setattr(digests, "PIECE", 50)
    assert max(piece.numel() for piece in digests._pieces(torch.zeros(9, 40))) <= 50
