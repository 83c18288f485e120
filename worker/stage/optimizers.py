"""The declared optimizer over named parameters, by torch's fused functions.

Not ``torch.optim.Optimizer``: the first of these in a process imports the compiler, 68 MiB and 2.2 s, of
which nothing is used. The fused functions are what it calls; they make no temporaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from atoll.job import OptimizerName, stepwise_groups

if TYPE_CHECKING:
    from atoll.job import Optimizer

State = dict[str, Tensor]


class _Group(NamedTuple):
    """Parameters of one learning-rate scale and weight decay."""

    lr_scale: float
    weight_decay: float
    names: list[str]


class FusedOptimizer:
    """State of the optimizer, and its steps on the parameters that have a gradient.

    ``state[name]``: of AdamW "exp_avg", "exp_avg_sq" and "step", of SGD with momentum "momentum_buffer";
    a parameter has one from its first step on. It may be set before, and cleared.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: Optimizer) -> None:
        self._parameters, self._spec = dict(parameters), spec
        self.state: dict[str, State] = {}
        chosen = stepwise_groups(tuple(parameters), spec)
        groups: dict[tuple[float, float], _Group] = {}
        for name in parameters:
            decay = chosen[name].weight_decay
            key = (chosen[name].lr_scale, spec.weight_decay if decay is None else decay)
            groups.setdefault(key, _Group(*key, [])).names.append(name)
        self._groups = tuple(groups.values())
        self._reserved: list[Tensor] = []

    @torch.no_grad()
    def reserve(self) -> None:
        """Hold the memory of the states to come from now on: the first step then takes as much as any later
        one, and where there is too little that shows before a step is committed."""
        adamw = self._spec.name is OptimizerName.ADAMW
        states = 2 if adamw else int(self._spec.momentum > 0.0)
        coming = [parameter for name, parameter in self._parameters.items() if name not in self.state]
        self._reserved = [torch.ones_like(parameter) for parameter in coming * states]  # pages are written

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take a step with the base learning rate ``rate``."""
        self._reserved.clear()
        for group in self._groups:
            names = [name for name in group.names if self._parameters[name].grad is not None]
            if not names:
                continue
            if self._spec.name is OptimizerName.ADAMW:
                self._adamw(names, rate * group.lr_scale, group.weight_decay)
            else:
                # The function fills the buffers of all or of none.
                for some in (self._with_state(names, False), self._with_state(names, True)):
                    self._sgd(some, rate * group.lr_scale, group.weight_decay)

    def _with_state(self, names: Iterable[str], there: bool) -> list[str]:
        return [name for name in names if (name in self.state) is there]

    def _adamw(self, names: list[str], rate: float, decay: float) -> None:
        parameters, gradients = self._of(names)
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self.state:
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[name] = {**zeros, "step": step}
        states = [self.state[name] for name in names]
        beta1, beta2 = self._spec.betas
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def _sgd(self, names: list[str], rate: float, decay: float) -> None:
        parameters, gradients = self._of(names)
        momentum = self._spec.momentum
        buffers = [self.state.get(name, {}).get("momentum_buffer") for name in names] if momentum else []
        sgd(
            parameters,
            gradients,
            buffers,
            fused=True,
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=self._spec.nesterov,
            maximize=False,
        )
        for name, buffer in zip(names, buffers, strict=False):
            if buffer is not None:
                self.state[name] = {"momentum_buffer": buffer}

    def _of(self, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and their gradients."""
        found: list[Tensor] = [self._parameters[name] for name in names]
        return found, [parameter.grad for parameter in found if parameter.grad is not None]


def make_optimizer(parameters: Mapping[str, torch.nn.Parameter], spec: Optimizer) -> FusedOptimizer | None:
    """The optimizer of ``spec``; None without parameters."""
    return FusedOptimizer(parameters, spec) if parameters else None
