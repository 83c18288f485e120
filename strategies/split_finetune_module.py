"""Split fine-tuning: a linear's factors as the narrow place of a pipeline, before capture. Needs torch.

Of one layer's FFN the first linear becomes three products through ``rank`` numbers a token:

    W1 x + b  ~  U (S (V x)) + b,    W1 = U diag(s) V from its SVD, cut off after ``rank`` values

with V [r, d], S [r, r] (diag(s) at first) and U [f, r], all trained. What is between S and U is all that
crosses a cut there, forwards and backwards: 4 r bytes a token in float32 instead of 4 d. For that the
residual link around this FFN is dropped; kept, d numbers a token cross beside the r.

Dims: d width, f inner width of the FFN, r rank. Source: SFT (arXiv 2211.16703); papers/decentralized.md 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from strategies.supcon_module import submodule

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Names of an FFN's modules inside its layer.

    ``first``: the linear that reads the FFN's input; of a gated FFN both that do. ``second``: the linear at
    its end. ``result``: the module whose last output in a forward is the FFN's, before the residual is added.
    ``read_by``: the module that reads the sum of both, as a norm behind it; "": the layer returns the sum.
    ``inside``: of a gated FFN the module that calls both of ``first`` with its own input.
    """

    first: tuple[str, ...]
    second: str
    result: str
    read_by: str = ""
    inside: str = ""


SHAPES = {
    "BERT": FeedForward(
        ("intermediate.dense",), "output.dense", "output.dropout", read_by="output.LayerNorm"
    ),
    "GPT-2": FeedForward(("mlp.c_fc",), "mlp.c_proj", "mlp"),
    "Gemma": FeedForward(
        ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "post_feedforward_layernorm", inside="mlp"
    ),
    "Llama": FeedForward(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp", inside="mlp"),
    "ViT": FeedForward(("mlp.fc1",), "mlp.fc2", "dropout"),
    "examples/gpt.py": FeedForward(("up",), "down", "down"),
}
"""Layers that need no function: those of transformers, and of our example."""


class Narrow(nn.Module):
    """``back(reduce(project(x)))``: d numbers a token, r, r, and what ``back`` makes of them."""

    def __init__(self, project: nn.Linear, reduce: nn.Linear, back: nn.Module) -> None:
        super().__init__()
        self.project, self.reduce, self.back = project, reduce, back

    def forward(self, x: Tensor) -> Any:
        return self.back(self.reduce(self.project(x)))


def split_finetune(
    module: M,
    layer: str,
    rank: int,
    *,
    residual: bool = False,
    feed_forward: Callable[[nn.Module], FeedForward] | None = None,
) -> M:
    """Make the FFN of ``module``'s ``layer`` narrow, in place, and return ``module``.

    ``layer`` is a name as in ``named_modules`` ("bert.encoder.layer.11"); ``feed_forward`` names the parts of
    a layer that is none of ``SHAPES``. ``rank``: 1 to min(d, f). UsageError: no such layer or parts, linears
    that do not fit each other, weights without numbers. With ``residual`` and full rank the module computes
    what it did.
    """
    inner = submodule(module, layer, "split_finetune")
    parts = feed_forward(inner) if feed_forward else _known(inner, layer)
    first = [_linear(inner, layer, name) for name in parts.first]
    second = _linear(inner, layer, parts.second)
    for name in (parts.result, *filter(None, (parts.read_by, parts.inside))):
        submodule(inner, name, f"split_finetune: {layer}")
    if not first or bool(parts.inside) != (len(first) > 1):
        raise UsageError(f"split_finetune: {layer}: one first linear, or several and the module around them")
    weights = [_weight(linear) for linear in first]
    d, f = weights[0].shape[1], _weight(second).shape[1]
    if any(weight.shape != (f, d) for weight in weights):
        shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
        raise UsageError(
            f"split_finetune: {layer}: first linears {shapes} do not fit {f} inputs of the second"
        )
    if not 1 <= rank <= min(d, f):
        raise UsageError(f"split_finetune: rank {rank} must be 1 to {min(d, f)} at {layer}")
    project, reduce, backs = _factors(weights, [linear.bias for linear in first], rank)
    if parts.inside:
        for name, back in zip(parts.first, backs, strict=True):
            inner.set_submodule(name, back)
        inner.set_submodule(parts.inside, Narrow(project, reduce, inner.get_submodule(parts.inside)))
    else:
        inner.set_submodule(parts.first[0], Narrow(project, reduce, backs[0]))
    inner.train(inner.training)
    if not residual:
        _drop_residual(inner, parts)
    return module


def _known(layer: nn.Module, name: str) -> FeedForward:
    have = dict(layer.named_modules())
    for parts in SHAPES.values():
        if all(part in have for part in (*parts.first, parts.second, parts.result, parts.read_by)):
            return parts
    raise UsageError(
        f"split_finetune: {name} is not a layer as of {', '.join(SHAPES)}; name its parts with feed_forward="
    )


def _linear(layer: nn.Module, where: str, name: str) -> Any:
    """Return a linear of torch, or a Conv1D as GPT-2's, which has its weight transposed."""
    found = submodule(layer, name, f"split_finetune: {where}")
    if type(found) is nn.Linear or type(found).__name__ == "Conv1D":
        return found
    raise UsageError(f"split_finetune: {where}.{name} is a {type(found).__name__}, not a plain linear")


def _weight(linear: Any) -> Tensor:
    """Return its weight as [outputs, inputs]."""
    weight: Tensor = linear.weight if isinstance(linear, nn.Linear) else linear.weight.T
    if weight.is_meta or not weight.is_floating_point():
        raise UsageError(f"split_finetune: a weight of {weight.dtype} on {weight.device} has no SVD; load it")
    return weight


def _factors(
    weights: list[Tensor], biases: list[Tensor | None], rank: int
) -> tuple[nn.Linear, nn.Linear, list[nn.Linear]]:
    """Return V and S, which all have in common, and U with its bias for each weight."""
    with torch.no_grad():
        u, s, v = torch.linalg.svd(torch.cat(weights).double(), full_matrices=False)
        parts = u[:, :rank].split([len(weight) for weight in weights])
    kind, learnt = weights[0], weights[0].requires_grad
    project, reduce = _linear_of(v[:rank], None, kind, learnt), _linear_of(s[:rank].diag(), None, kind, True)
    return project, reduce, [_linear_of(*both, kind, learnt) for both in zip(parts, biases, strict=True)]


def _linear_of(weight: Tensor, bias: Tensor | None, kind: Tensor, learnt: bool) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(kind.dtype).contiguous(), requires_grad=learnt)
    linear.bias = bias  # type: ignore[assignment]
    return linear


# ---------------------------------------------------------------- the residual


class _Result:
    """Hooks that put what one module returns in the place of a sum with it; copied with the modules."""

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def keep(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.found = out

    def as_output(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return (self._taken(), *out[1:]) if isinstance(out, tuple) else self._taken()

    def as_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._taken(), *args[1:])

    def _taken(self) -> Tensor:
        found, self.found = self.found, None  # else the module would keep a forward's graph
        if found is None:
            raise UsageError("split_finetune: the FFN's result was not computed before it was read")
        return found


def _drop_residual(layer: nn.Module, parts: FeedForward) -> None:
    result = _Result()
    layer.get_submodule(parts.result).register_forward_hook(result.keep)
    if parts.read_by:
        layer.get_submodule(parts.read_by).register_forward_pre_hook(result.as_input)
    else:
        layer.register_forward_hook(result.as_output)
