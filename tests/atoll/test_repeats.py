"""Selective recomputation: what is kept, what is computed again, and that the bits stay."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.effects import effects
from atoll.execute import Executor
from atoll.job import Keeping, Precision, Recompute, TrainingSpec
from atoll.program import stage_programs
from atoll.repeats import repeatable
from coordinator.capture.capture import Captured, capture
from tests.atoll.stepped import executor_of, gradients_of

X = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1))}
gradients = partial(gradients_of, x=X["x"])


class Gated(nn.Module):
    """A norm that three products read, a gate, and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate, self.up, self.side = (nn.Linear(16, 32) for _ in range(3))
        self.down, self.last = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.side(x)[:, :16])
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        both = self.last(hidden + nn.functional.gelu(self.side(x)))
        return (self.down(hidden) + both).square().mean()


class Written(nn.Module):
    """A GELU whose result is written in place, once ``in_place`` has changed the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.first(x)) + 1.0).square().mean()


def in_place(found: Captured) -> Captured:
    """Sums of what was captured, which has none in place, written into their first argument."""
    sums = {"aten.add.Tensor": "aten.add_.Tensor"}
    ops = [replace(node, target=sums.get(node.target, node.target)) for node in found.train.ops]
    return replace(found, train=replace(found.train, ops=tuple(ops)))


class Calls(TorchDispatchMode):
    """How often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def captured(module: nn.Module, precision: Precision = Precision.FP32) -> Captured:
    torch.manual_seed(2)
    return capture(module, X, TrainingSpec(steps=1, n_micro=1, precision=precision))


@pytest.mark.parametrize("module", [Gated, Written])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("defer", [False, True])
def test_gradients_are_the_same_bits(module: type[nn.Module], precision: Precision, defer: bool) -> None:
    found = captured(module(), precision)
    found = in_place(found) if module is Written else found
    kept = gradients(executor_of(found, Keeping(Recompute.OFF)))
    again = gradients(executor_of(found, Keeping(Recompute.SELECTIVE), defer=defer))
    assert kept.keys() == again.keys() == dict(module().named_parameters()).keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("defer", [False, True])
def test_cheap_results_are_not_kept_and_all_else_is(defer: bool) -> None:
    found = captured(Gated())
    cheap = repeatable(stage_programs(found.train, [0])[0], ())
    assert {found.train.ops[op].target for op in cheap} == {
        "aten.layer_norm.default", "aten.silu.default", "aten.mul.Tensor", "aten.gelu.default",
    }  # fmt: skip
    alive: dict[Recompute, set[int]] = {}
    for recompute in (Recompute.OFF, Recompute.SELECTIVE):
        executor = executor_of(found, Keeping(recompute), defer=defer)
        seen: dict[int, StorageWeakRef] = {}

        def observe(position: int, value: object, seen: dict[int, StorageWeakRef] = seen) -> None:
            if isinstance(value, Tensor):
                seen[position] = StorageWeakRef(value.untyped_storage())

        executor.forward(0, 0, X, {}, observe)
        alive[recompute] = {position for position, storage in seen.items() if not storage.expired()}
    added = next(
        op for op, node in enumerate(found.train.ops) if node.target == "aten.add.Tensor"
    )  # read by a product
    gelu = next(op for op in cheap if found.train.ops[op].target == "aten.gelu.default")
    assert alive[Recompute.OFF] - alive[Recompute.SELECTIVE] == cheap.keys() - {gelu}
    assert added in alive[Recompute.SELECTIVE], "a sum's backward does not keep what would give it again"


def test_products_in_a_row_compute_their_norm_again_once() -> None:
    executor = executor_of(captured(Gated()), Keeping(Recompute.SELECTIVE))
    executor.forward(0, 0, X, {})
    with Calls() as calls:
        executor.backward(0, {})
    assert calls.seen["native_layer_norm"] <= 2, "gate and up in a row, perhaps the other once more"
    assert calls.seen["native_layer_norm_backward"] == 1


def test_what_is_written_in_place_is_kept() -> None:
    found = in_place(captured(Written()))
    (program,) = stage_programs(found.train, [0])
    gelu = next(op for op, node in program.ops if node.target == "aten.gelu.default")
    assert gelu not in repeatable(program, effects(program).values)
    assert gelu in repeatable(program, ())


def test_saved_bytes_tell_what_can_be_computed_again() -> None:
    dag = captured(Gated()).train
    cheap = repeatable(stage_programs(dag, [0])[0], ())
    # The GELU's result is summed only, which keeps neither.
    held = sum(dag.ops[op].outputs[0].nbytes for op in cheap if dag.ops[op].target != "aten.gelu.default")
    assert sum(node.bytes_repeatable for node in dag.ops) == held
    assert all(0 <= node.bytes_repeatable <= node.bytes_saved for node in dag.ops)


@pytest.mark.parametrize("defer", [False, True])
def test_a_cut_between_an_op_and_its_reader_changes_nothing(defer: bool) -> None:
    found = captured(Gated())
    whole = gradients(executor_of(found, Keeping(Recompute.OFF)))
    silu = next(op for op, node in enumerate(found.train.ops) if node.target == "aten.silu.default")
    allowed = [p for p in found.train.cuttable() if p > silu]
    for start in allowed[:2]:
        first, last = (
            Executor(program, "cpu", keeping=Keeping(Recompute.SELECTIVE), defer=defer)
            for program in stage_programs(found.train, [0, start])
        )
        for executor in (first, last):
            executor.load({name: tensor.clone() for name, tensor in found.state.items()})
        for micro in range(2):
            sent = first.forward(0, micro, {"x": X["x"] + micro}, {})
            last.forward(0, micro, {"x": X["x"] + micro}, sent)
        for micro in range(2):
            first.backward(micro, last.backward(micro, {}, 2.0))
        for executor in (first, last):
            while executor.owed is not None:
                executor.weight_gradients()
        for name, gradient in whole.items():
            assert torch.equal(first.gradient(name, last.gradient(name)), gradient), f"{name}, cut at {start}"


def test_nothing_is_repeated_where_nothing_is_trained() -> None:
    found = captured(Gated())
    parameters = {n: replace(p, requires_grad=False) for n, p in found.train.parameters.items()}
    frozen = replace(found.train, parameters=parameters)
    executor = Executor(stage_programs(frozen, [0])[0], "cpu", keeping=Keeping(Recompute.SELECTIVE))
    executor.load(dict(found.state), frozen=tuple(found.state))
    executor.forward(0, 0, X, {})
    with Calls() as calls:
        assert executor.backward(0, {}) == {}
    assert calls.seen == {}


class Chain(nn.Module):
    """Each product reads the two before it; computed again without bound, their calls would double."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (1.0 + 0.01 * torch.tanh(linear(x)) for linear in (self.first, self.second))
        for _ in range(12):
            a, b = b, a * b
        return (a + b).mean()


def test_results_are_computed_again_from_what_is_kept_or_almost() -> None:
    found = captured(Chain())
    products = [op for op, node in enumerate(found.train.ops) if node.target == "aten.mul.Tensor"]
    assert 0 < len(repeatable(stage_programs(found.train, [0])[0], ())) < len(products)
    kept = gradients(executor_of(found, Keeping(Recompute.OFF)))
    executor = executor_of(found, Keeping(Recompute.SELECTIVE))
    again = gradients(executor)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    executor.forward(0, 5, X, {})
    with Calls() as calls:
        executor.backward(5, {})
    with Calls() as plain:
        other = executor_of(found, Keeping(Recompute.OFF))
        other.forward(0, 5, X, {})
        plain.seen.clear()
        other.backward(5, {})
    assert calls.seen["mul"] - plain.seen["mul"] <= 2 * len(products), "534 calls without a bound, 11 with"


class Saved(nn.Module):
    """Ops whose backward reads their own result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(self.linear(x)), -1).square().mean()


@pytest.mark.parametrize("defer", [False, True])
def test_what_is_given_up_is_gone_at_once(defer: bool) -> None:
    executor = executor_of(captured(Saved()), Keeping(Recompute.SELECTIVE), defer=defer)
    seen: dict[int, StorageWeakRef] = {}

    def observe(position: int, value: object) -> None:
        if isinstance(value, Tensor):
            seen[position] = StorageWeakRef(value.untyped_storage())

    gc.disable()
    try:
        executor.forward(0, 0, X, {}, observe)
        executor.reset()
        assert all(storage.expired() for storage in seen.values())
        gone = ref(executor)
        del executor
        assert gone() is None, "no ring with the weights"
    finally:
        gc.enable()
