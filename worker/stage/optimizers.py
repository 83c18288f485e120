"""The declared optimizers over named parameters, by torch's functions.

Not ``torch.optim.Optimizer``: the first of these in a process imports the compiler, 74 MiB and 1.4 to 2.2 s,
of which nothing is used. The fused functions are what it calls; they make no temporaries. Torch's functions
of Muon are private, so its step is here, with torch's bits where torch's type is taken (decision 072).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from atoll.errors import UsageError
from atoll.job import OptimizerName, stepwise_groups
from atoll.optimizers import MUON_STEPS, optimizer_of, state_shapes, uniform

if TYPE_CHECKING:
    from atoll.job import Optimizer
    from atoll.opdag import StateMeta
    from worker.elsewhere.states import StatesElsewhere

State = dict[str, Tensor]

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of a x + b x^3 + c x^5, whose slope at 0 is steep: small singular values come near 1, too."""
MUON_EPS = 1e-7
MUON_RMS = 0.2  # of an update's elements, that of AdamW's: so one learning rate suits both


ADAFACTOR_DECAY, ADAFACTOR_FLOOR = -0.8, 1e-3
"""Power of the step by which averages of squares follow; least root mean square of weights for their step."""


class _Group(NamedTuple):
    """Parameters of one optimizer, learning-rate scale and weight decay."""

    optimizer: OptimizerName
    lr_scale: float
    weight_decay: float
    names: list[str]


class StageOptimizer:
    """State of the optimizers, and their steps on the parameters that have a gradient.

    ``state[name]`` has the tensors of ``atoll.optimizers.state_shapes``; a parameter has one from its first
    step on. It may be set before, and cleared. ``states``: what the graph says of the parameters; UsageError
    where the optimizer depends on it and there is none. ``elsewhere``: holds states, if not the device.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        spec: Optimizer,
        states: Mapping[str, StateMeta] | None = None,
        elsewhere: StatesElsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        self._parameters, self._spec = dict(parameters), spec
        self.state: dict[str, State] = {}
        self._optimizers = _optimizers(parameters, spec, states or {})
        chosen = stepwise_groups(tuple(parameters), spec)
        groups: dict[tuple[OptimizerName, float, float], _Group] = {}
        for name in parameters:
            decay = chosen[name].weight_decay
            own_decay = spec.weight_decay if decay is None else decay
            key = (self._optimizers[name], chosen[name].lr_scale, own_decay)
            groups.setdefault(key, _Group(*key, [])).names.append(name)
        self._groups = tuple(groups.values())
        # One parameter after another: what a step makes is that of the largest.
        self._one_by_one = {
            OptimizerName.MUON: self._muon,
            OptimizerName.ADAFACTOR: adafactor_step,
            OptimizerName.LION: self._lion,
        }
        self._reserved: list[Tensor] = []

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a parameter's state."""
        shape = tuple(self._parameters[name].shape)
        return state_shapes(self._optimizers[name], shape, self._spec.momentum)

    @torch.no_grad()
    def reserve(self) -> None:
        """Hold the memory of the states to come from now on: the first step then takes as much as any later
        one, and where there is too little that shows before a step is committed."""
        if self._elsewhere is not None:
            for name, parameter in self._parameters.items():
                self._elsewhere.reserve(name, self.shapes(name), parameter.dtype)
            return
        self._reserved = [
            torch.ones(shape, dtype=parameter.dtype, device=parameter.device)  # pages are written
            for name, parameter in self._parameters.items()
            if name not in self.state
            for shape in self.shapes(name).values()
            if shape
        ]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take a step with the base learning rate ``rate``."""
        self._reserved.clear()
        for group in self._groups:
            names = [name for name in group.names if self._parameters[name].grad is not None]
            if self._elsewhere is None:
                self._take(group, names, rate * group.lr_scale)
                continue
            for name in names:
                if name in self.state:
                    self.state[name] = self._elsewhere.take(self.state[name])
                self._take(group, [name], rate * group.lr_scale)
                self.put_away(name)

    def put_away(self, name: str) -> None:
        """Move a parameter's state to where states are kept, if that is not the device."""
        if self._elsewhere is not None and name in self.state:
            self.state[name] = self._elsewhere.put(name, self.state[name])

    def _take(self, group: _Group, names: list[str], rate: float) -> None:
        """Take the step of these parameters of a group."""
        if not names:
            return
        if group.optimizer is OptimizerName.ADAMW:
            self._adamw(names, rate, group.weight_decay)
        elif group.optimizer in (own := self._one_by_one):
            self._begin(names)
            for name, parameter, gradient in zip(names, *self._of(names), strict=True):
                own[group.optimizer](parameter, gradient, self.state[name], rate, group.weight_decay)
        else:
            # The function fills the buffers of all or of none.
            kinds: dict[tuple[bool, bool], list[str]] = {}
            for name in names:
                kinds.setdefault((name in self.state, _fused_sgd(self._parameters[name])), []).append(name)
            for (_, fused), some in kinds.items():
                self._sgd(some, rate, group.weight_decay, fused)

    def _begin(self, names: Iterable[str]) -> None:
        """Make the states that there are not yet, all zeros."""
        for name in names:
            if name in self.state:
                continue
            parameter = self._parameters[name]
            self.state[name] = {
                key: torch.zeros(shape, dtype=state_dtype(key, parameter), device=parameter.device)
                for key, shape in self.shapes(name).items()
            }

    def _adamw(self, names: list[str], rate: float, decay: float) -> None:
        parameters, gradients = self._of(names)
        self._begin(names)
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

    def _sgd(self, names: list[str], rate: float, decay: float, fused: bool) -> None:
        parameters, gradients = self._of(names)
        momentum = self._spec.momentum
        buffers = [self.state.get(name, {}).get("momentum_buffer") for name in names] if momentum else []
        sgd(
            parameters,
            gradients,
            buffers,
            foreach=False,
            fused=fused,
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

    def _muon(self, matrix: Tensor, gradient: Tensor, state: State, rate: float, decay: float) -> None:
        """B <- u B + (1 - u) G; W <- (1 - rate decay) W - rate 0.2 sqrt(max(m, n)) NS(u B + (1 - u) G)."""
        momentum = self._spec.muon_momentum
        average = state["momentum_buffer"].lerp_(gradient, 1.0 - momentum)
        update = orthogonalised(gradient.lerp(average, momentum), iterations_dtype(matrix.device))
        matrix.mul_(1.0 - rate * decay)
        matrix.add_(update, alpha=-(rate * (MUON_RMS * math.sqrt(max(matrix.shape)))))

    def _lion(self, weights: Tensor, gradient: Tensor, state: State, rate: float, decay: float) -> None:
        """W <- (1 - rate decay) W - rate sign(beta1 M + (1 - beta1) G), then M <- beta2 M + (1 - beta2) G.

        Source: Lion (Chen 2023), algorithm 2.
        """
        beta1, beta2 = self._spec.lion_betas
        average = state["exp_avg"]
        update = average.lerp(gradient, 1.0 - beta1).sign_()
        weights.mul_(1.0 - rate * decay).add_(update, alpha=-rate)
        average.lerp_(gradient, 1.0 - beta2)

    def _of(self, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and their gradients."""
        found: list[Tensor] = [self._parameters[name] for name in names]
        return found, [parameter.grad for parameter in found if parameter.grad is not None]


def state_dtype(key: str, parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's state, as in torch: its own, but for the count of steps."""
    return torch.float32 if key == "step" else parameter.dtype


def _fused_sgd(parameter: Tensor) -> bool:
    """Return whether torch's fused SGD steps such a parameter. On a CPU it never writes whole vectors of
    bfloat16 or float16 back: with torch 2.13 only the last elements, fewer than 16, of a parameter move."""
    return parameter.device.type != "cpu" or parameter.dtype not in (torch.bfloat16, torch.float16)


def _optimizers(
    parameters: Iterable[str], spec: Optimizer, states: Mapping[str, StateMeta]
) -> dict[str, OptimizerName]:
    if uniform(spec):
        return dict.fromkeys(parameters, spec.name)
    unknown = [name for name in parameters if name not in states]
    if unknown:
        raise UsageError(f"{spec.name} needs to know what {unknown[0]} is in the model; give its state")
    return {name: optimizer_of(name, states[name], spec) for name in parameters}


def iterations_dtype(device: torch.device) -> torch.dtype:
    """Return the type of Muon's iterations: bfloat16, as torch has it, where a GPU multiplies in it.

    On a CPU always float32: one without such products takes 18 times as long in bfloat16, and the class of a
    machine, within which bits are equal, does not tell them apart.
    """
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U S V^T of ``matrix`` [m, n] = U T V^T, with S near 1, in ``dtype``; may overwrite ``matrix``.

    Newton-Schulz: X <- a X + (b X X^T + c (X X^T)^2) X, from X / |X|, on the smaller side, in two buffers of
    each size: ``atoll.optimizers.workspace_elements``.
    Source: torch.optim.Muon (K. Jordan's coefficients), bit for bit in bfloat16.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    held = matrix.to(dtype).contiguous()
    x = held.T if tall else held
    x.div_(x.norm().clamp(min=MUON_EPS))
    spare, free = torch.empty(x.shape, dtype=dtype, device=x.device), held.view(x.shape)
    gram, powers = (x.new_empty(x.size(0), x.size(0)) for _ in range(2))
    for _ in range(MUON_STEPS):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=powers)
        torch.addmm(x, powers, x, beta=a, out=spare)
        x, spare, free = spare, free, spare
    return x.T if tall else x


def adafactor_step(weights: Tensor, gradient: Tensor, state: State, rate: float, decay: float) -> None:
    """Take a step of ``weights`` relative to their root mean square, by factored averages of squares.

    Source: torch.optim.Adafactor with its defaults (Shazeer 2018), bit for bit.
    """
    if not weights.numel():
        return
    state["step"].add_(1.0)
    step = state["step"].item()
    share, smallest = step**ADAFACTOR_DECAY, torch.finfo(weights.dtype).eps
    size = max(ADAFACTOR_FLOOR, torch.linalg.vector_norm(weights).item() / weights.numel() ** 0.5)
    relative = min(rate, 1.0 / step**0.5)
    if decay != 0.0:
        weights.mul_(1.0 - rate * decay)
    if "variance" in state:
        squares = state["variance"].lerp_(gradient * gradient, share).clone()
    else:
        for key, dim in (("row_var", -1), ("col_var", -2)):
            mean = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_()
            state[key].lerp_(mean.div_(gradient.size(dim)), share)
        squares = state["row_var"] @ state["col_var"]
        squares.div_(state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=smallest))
    update = squares.clamp_(min=smallest * smallest).rsqrt_().mul_(gradient)
    longest = max(1.0, torch.linalg.vector_norm(update).item() / update.numel() ** 0.5)
    weights.add_(update, alpha=-(size * relative) / longest)


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    spec: Optimizer,
    states: Mapping[str, StateMeta] | None = None,
    elsewhere: StatesElsewhere | None = None,
) -> StageOptimizer | None:
    """The optimizers of ``spec``; None without parameters."""
    return StageOptimizer(parameters, spec, states, elsewhere) if parameters else None
