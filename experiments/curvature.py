"""K-FAC and Eva over a stage's executor: gradients of linear layers times an inverse of their curvature.

For y = a W^T, N rows, g the gradient of their mean loss by y and D that by W:

    K-FAC   A = mean of a a^T, G = mean of N^2 g g^T (averages over steps);
            P = (G + s / p I)^-1 D (A + s p I)^-1,  s = sqrt(damping), p = sqrt((tr A / m) / (tr G / n))
    Eva     a = mean of a, g = sum of g (averages over steps);
            P = (D - (g^T D a) / (damping + |a|^2 |g|^2) g a^T) / damping

The Fisher information is the empirical one, of the labels. ``Scale.KL``: a step is at most as long as gives
rate^2 sum P D = KL_CLIP, as published. ``Scale.RMS``: its elements have a root mean square of 0.2, as Muon's
and AdamW's, so that rates compare. All else is AdamW's.

A stage holds whole matrices and sees all rows of a step, so it needs nothing of others: a cut changes no
factor. Sources: Martens and Grosse 2015 (arXiv 1503.05671, section 6), Zhang and others 2023 (Eva). Both from
memory; no policy chooses them, and no job option names them (docs/decisions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.opdag import LeafRef, OpRef, Source

if TYPE_CHECKING:
    from atoll.program import StageProgram

LINEAR = "aten.linear.default"
KL_CLIP = 1e-3
RMS = 0.2


class Kind(StrEnum):
    """Which curvature."""

    KFAC = "kfac"
    EVA = "eva"


class Scale(StrEnum):
    """How long a step is."""

    KL = "kl"
    RMS = "rms"


@dataclass(frozen=True, slots=True)
class Settings:
    """``decay``: of the averages; ``every``: steps between two inverses of K-FAC."""

    kind: Kind
    scale: Scale = Scale.RMS
    damping: float = 0.03
    decay: float = 0.95
    momentum: float = 0.9
    every: int = 10


@dataclass(slots=True)
class _Layer:
    """One matrix: sums of this step over its rows, averages over steps, inverses."""

    weight: str
    rows: int = 0
    sums: tuple[Tensor, Tensor] | None = None
    averages: tuple[Tensor, Tensor] | None = None
    inverses: tuple[Tensor, Tensor] | None = None
    momentum: Tensor | None = None


@dataclass
class Curvature:
    """Curvature of the linear layers of one program whose weights are hidden matrices, and their steps.

    Give ``observe`` to the executor's forwards. Left out are a weight that several ops read, as a tied one,
    and a layer that reads an input of the model itself.
    """

    program: StageProgram
    hidden: frozenset[str]
    settings: Settings
    steps: int = 0
    layers: dict[int, _Layer] = field(init=False)  # by op

    def __post_init__(self) -> None:
        readers: dict[str, int] = {}
        found: dict[int, tuple[int, str]] = {}
        for at, node in self.program.ops:
            for arg in node.args:
                if isinstance(arg, LeafRef) and arg.source is Source.PARAMETER:
                    readers[arg.name] = readers.get(arg.name, 0) + 1
            if (
                node.target == LINEAR
                and isinstance(node.args[0], OpRef)
                and isinstance(node.args[1], LeafRef)
            ):
                found[at] = node.args[0].op, node.args[1].name
        kept = {at: one for at, one in found.items() if one[1] in self.hidden and readers[one[1]] == 1}
        self.layers = {at: _Layer(weight) for at, (_, weight) in kept.items()}
        self._inputs = {at: source for at, (source, _) in kept.items()}
        self._values: dict[int, Tensor] = {}
        self._wanted = set(self._inputs.values())

    @property
    def weights(self) -> frozenset[str]:
        """Names of the matrices that ``step`` steps."""
        return frozenset(layer.weight for layer in self.layers.values())

    def receive(self, values: Mapping[int, Tensor]) -> None:
        """Take in what a forward that follows receives of other stages."""
        self._values |= {at: value.detach() for at, value in values.items() if at in self._wanted}

    def observe(self, at: int, value: object) -> None:
        """Take in an op's value; of a layer its rows now, and their gradients when they come."""
        if not isinstance(value, Tensor):
            return
        if at in self._wanted:
            self._values[at] = value.detach()
        if at in self.layers and value.requires_grad:
            rows = self._values[self._inputs[at]].flatten(0, -2)
            layer = self.layers[at]
            value.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._take(layer, rows, grad.flatten(0, -2))
            )

    def _take(self, layer: _Layer, a_NM: Tensor, g_NK: Tensor) -> None:
        if self.settings.kind is Kind.KFAC:
            new = a_NM.T @ a_NM, g_NK.T @ g_NK
        else:
            new = a_NM.sum(0), g_NK.sum(0)
        layer.rows += len(a_NM)
        layer.sums = new if layer.sums is None else (layer.sums[0] + new[0], layer.sums[1] + new[1])

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], rate: float, weight_decay: float = 0.0) -> None:
        """Step the matrices by their gradients; forget this step's rows."""
        scaled: dict[str, Tensor] = {}
        for layer in self.layers.values():
            gradient = parameters[layer.weight].grad
            if gradient is None or layer.sums is None:
                continue
            layer.averages = self._averages(layer, *layer.sums)
            scaled[layer.weight] = self._preconditioned(layer, layer.averages, gradient)
        clip = self._clip(parameters, scaled, rate)
        for layer in self.layers.values():
            layer.rows, layer.sums = 0, None
            update = scaled.get(layer.weight)
            if update is None:
                continue
            before = layer.momentum
            moved = update * clip if before is None else before * self.settings.momentum + update * clip
            layer.momentum = moved
            if self.settings.scale is Scale.RMS:
                moved = moved * (RMS / moved.square().mean().sqrt().clamp(min=1e-12))
            parameters[layer.weight].mul_(1.0 - rate * weight_decay).sub_(moved, alpha=rate)
        self._values.clear()
        self.steps += 1

    def _averages(self, layer: _Layer, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        # Gradients are of a mean over rows: N g is a row's own.
        new = first / layer.rows, second * layer.rows if self.settings.kind is Kind.KFAC else second
        if layer.averages is None:
            return new
        share, old = 1.0 - self.settings.decay, layer.averages
        return old[0].lerp(new[0], share), old[1].lerp(new[1], share)

    def _preconditioned(self, layer: _Layer, averages: tuple[Tensor, Tensor], gradient_KM: Tensor) -> Tensor:
        first, second = averages
        if self.settings.kind is Kind.EVA:
            damping = self.settings.damping
            along = torch.dot(second, gradient_KM @ first)
            size = damping + torch.dot(first, first) * torch.dot(second, second)
            return (gradient_KM - torch.outer(second, first) * (along / size)) / damping
        if layer.inverses is None or self.steps % self.settings.every == 0:
            layer.inverses = _inverses(first, second, self.settings.damping)
        return layer.inverses[1] @ gradient_KM @ layer.inverses[0]

    def _clip(self, parameters: Mapping[str, Tensor], scaled: Mapping[str, Tensor], rate: float) -> float:
        if self.settings.scale is not Scale.KL or not scaled:
            return 1.0
        inner = 0.0
        for name, update in scaled.items():
            if (gradient := parameters[name].grad) is not None:
                inner += float((update * gradient).sum())
        return min(1.0, math.sqrt(KL_CLIP / max(rate * rate * abs(inner), 1e-30)))

    @property
    def state_bytes(self) -> int:
        """Bytes kept between steps: averages, inverses and momentum."""
        kept = [
            tensor
            for layer in self.layers.values()
            for tensor in (*(layer.averages or ()), *(layer.inverses or ()), layer.momentum)
            if tensor is not None
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _inverses(a_MM: Tensor, g_KK: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the inverses of both factors, each with its share of the damping."""
    ratio = ((a_MM.trace() / len(a_MM)) / (g_KK.trace() / len(g_KK)).clamp(min=1e-30)).sqrt().clamp(1e-6, 1e6)
    root = damping**0.5
    return _inverse(a_MM, root * ratio), _inverse(g_KK, root / ratio)


def _inverse(matrix: Tensor, damping: Tensor) -> Tensor:
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
