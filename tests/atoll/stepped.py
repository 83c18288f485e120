"""A captured module as one executor, and the gradients of two micro-batches through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.execute import Executor
from atoll.job import Keeping
from atoll.program import stage_programs
from coordinator.capture.capture import Captured

if TYPE_CHECKING:
    from torch import Tensor


def executor_of(found: Captured, keeping: Keeping, *, defer: bool = False) -> Executor:
    (program,) = stage_programs(found.train, [0])
    executor = Executor(program, "cpu", found.precision, keeping=keeping, defer=defer)
    executor.load({name: tensor.clone() for name, tensor in found.state.items()})
    return executor


def gradients_of(executor: Executor, x: Tensor) -> dict[str, Tensor]:
    for micro in range(2):
        executor.forward(0, micro, {"x": x + micro}, {})
    for micro in range(2):
        executor.backward(micro, {}, 2.0)
    while executor.owed is not None:
        executor.weight_gradients()
    found = {name: executor.gradient(name) for name in executor.uses}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
