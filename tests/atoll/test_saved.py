"""Graphs whose saved activations are in few bits: what they hold, and that nothing else changes the bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from atoll.execute import Executor
from atoll.few_bits import pack, unpack
from atoll.job import Activations, Keeping, Precision, Recompute, TrainingSpec, packed_bytes
from atoll.program import stage_programs
from atoll.saved import Saved
from coordinator.capture.capture import Captured, capture
from tests.atoll.stepped import executor_of, gradients_of

X = {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(1))}
gradients = partial(gradients_of, x=X["x"])
INT8, INT4 = Keeping(activations=Activations.INT8), Keeping(activations=Activations.INT4)


class Attending(nn.Module):
    """Three products that read one norm, attention, a GELU and a bend at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).view(4, 16, 2, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(64, 32)
        return self.down(nn.functional.gelu(self.up(x))).square().mean()


def captured(precision: Precision = Precision.FP32) -> Captured:
    torch.manual_seed(2)
    return capture(Attending(), X, TrainingSpec(steps=1, n_micro=1, precision=precision))


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("keeping", [INT8, INT4])
def test_neither_recomputation_nor_deferral_changes_a_bit(precision: Precision, keeping: Keeping) -> None:
    found = captured(precision)
    first = gradients(executor_of(found, keeping))
    assert first.keys() == dict(Attending().named_parameters()).keys()
    for recompute in Recompute:
        for defer in (False, True):
            other = gradients(executor_of(found, replace(keeping, recompute=recompute), defer=defer))
            assert all(torch.equal(first[name], other[name]) for name in first), (recompute, defer)


@pytest.mark.parametrize(("keeping", "near"), [(INT8, 0.02), (INT4, 0.3)])
def test_gradients_are_near_the_exact_ones(keeping: Keeping, near: float) -> None:
    found = captured()
    exact, few = gradients(executor_of(found, Keeping())), gradients(executor_of(found, keeping))
    whole = torch.cat([exact[name].flatten() for name in exact])
    off = torch.cat([(few[name] - exact[name]).flatten() for name in exact])
    assert 0.0 < float(off.norm() / whole.norm()) < near


@pytest.mark.parametrize("keeping", [INT8, INT4])
def test_a_forward_holds_the_bytes_that_capture_says(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, packed, exact = captured(), [], []
    original = Saved.pack

    def counted(saved: Saved, tensor: Tensor) -> object:
        kept = original(saved, tensor)
        if isinstance(kept, Tensor) and kept.untyped_storage()._cdata not in saved.op.storages:
            exact.append(kept)
        return kept

    def packing(tensor: Tensor, bits: int) -> object:
        packed.append(tensor.numel())
        return pack(tensor, bits)

    monkeypatch.setattr(Saved, "pack", counted)
    monkeypatch.setattr("atoll.saved.pack", packing)
    executor = executor_of(found, keeping)
    executor.forward(0, 0, X, {})
    nodes = found.train.ops
    assert sum(node.elements_few for node in nodes) == sum(packed)
    assert sum(node.bytes_few for node in nodes) == 4 * sum(packed)
    assert packed_bytes(sum(packed), keeping.bits) < 0.3 * sum(node.bytes_few for node in nodes)
    left = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in exact}
    rest = sum(n.bytes_saved - n.bytes_few for n in nodes)
    assert sum(left.values()) <= rest <= sum(left.values()) + 4096  # what the loss saves is small


def test_a_tensor_that_two_ops_save_is_packed_once_and_made_whole_once() -> None:
    saved = Saved(torch.device("cpu"), 8)
    value = torch.randn(64, 32)
    first, second = saved.pack(value), saved.pack(value.view(32, 64))
    back, again = saved.unpack(first), saved.unpack(second)
    assert back.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    assert torch.equal(back, unpack(pack(value, 8), value.dtype).view(64, 32))
    assert again.shape == (32, 64)
    value.add_(1.0)
    assert not torch.equal(saved.unpack(saved.pack(value)), back)


def test_nothing_is_packed_where_nothing_is_differentiated() -> None:
    found = captured()
    (program,) = stage_programs(found.train, [0])
    plain = Executor(program, differentiate=False)
    few = Executor(program, keeping=INT4, differentiate=False)
    for executor in (plain, few):
        executor.load(dict(found.state))
    loss = found.train.loss
    assert torch.equal(plain.forward(0, 0, X, {})[loss], few.forward(0, 0, X, {})[loss])


class ListShelf:
    """Shelf that counts what is asked for."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.asked: list[int] = []

    def put(self, data: Tensor) -> int:
        self.held.append(data.clone())
        return len(self.held) - 1

    def get(self, number: int) -> Tensor:
        self.asked.append(number)
        return self.held[number].clone()


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("keeping", [Keeping(), Keeping(Recompute.SELECTIVE), INT8])
@pytest.mark.parametrize("defer", [False, True])
def test_activations_that_lie_elsewhere_change_no_bit(
    precision: Precision, keeping: Keeping, defer: bool
) -> None:
    found, made = captured(precision), []

    def shelf() -> ListShelf:
        made.append(ListShelf())
        return made[-1]

    (program,) = stage_programs(found.train, [0])
    executor = Executor(program, "cpu", found.precision, keeping=keeping, defer=defer, shelves=shelf)
    executor.load({name: tensor.clone() for name, tensor in found.state.items()})
    away, here = gradients(executor), gradients(executor_of(found, keeping))
    assert all(torch.equal(here[name], away[name]) for name in here)
    assert len(made) == 2
    for one in made:
        assert len(one.held) >= 5
        steps = zip(one.asked, one.asked[1:], strict=False)
        assert defer or sum(later > earlier for earlier, later in steps) <= len(one.held) // 2


def test_all_of_some_size_lies_elsewhere_each_memory_once() -> None:
    found, shelf = captured(), ListShelf()
    (program,) = stage_programs(found.train, [0])
    executor = Executor(program, "cpu", shelves=lambda: shelf)
    executor.load({name: tensor.clone() for name, tensor in found.state.items()})
    executor.forward(0, 0, X, {})
    n_bytes = sum(data.nbytes for data in shelf.held)
    saved = sum(node.bytes_saved for node in found.train.ops)
    assert saved - 4096 <= n_bytes <= saved + X["x"].nbytes  # the input is the feed's, and put there too
