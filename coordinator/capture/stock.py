"""Torch's own layers that would be refused as they are written, in other ops of the same value.

``followable`` lends layers a forward that torch.export can follow, and keeps distributions from looking at
their arguments; ``without_out``, ``densely`` and ``listed`` rewrite ops of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution
from torch.nn import functional as F

from atoll.ops import GROUPED

# Where the op's ``sparse`` stands: a sparse gradient is a dense one that is stored otherwise.
_SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.default": 5, "aten.embedding_bag.padding_idx": 5}
# Hints of torch's transformers, None: whether a mask is causal is read from its values.
_CAUSAL: dict[Any, tuple[str, ...]] = {
    nn.Transformer: ("src_is_causal", "tgt_is_causal"),
    nn.TransformerEncoder: ("is_causal",),
    nn.TransformerDecoder: ("tgt_is_causal",),
}
_LISTED = {
    "transformers.grouped_mm_fallback.default": GROUPED,  # products of experts: torch.export refuses theirs
    "aten._conj.default": "aten.conj_physical.default",  # the same numbers, conjugated at once
    # These change how a tensor is seen, not what it holds, and later ops name their result.
    **{
        f"aten.{name}_.{overload}": f"aten.{name}.{overload}"
        for name, overloads in {
            "squeeze": ("default", "dim", "dims"),
            "unsqueeze": ("default",),
            "t": ("default",),
            "swapaxes": ("default",),
            "swapdims": ("default",),
        }.items()
        for overload in overloads
    },
    "aten.transpose_.default": "aten.transpose.int",
}
_OF_A_NEW_TENSOR = {"dtype", "layout", "device", "pin_memory"}


@contextmanager
def followable(module: nn.Module) -> Iterator[None]:
    """Layers and distributions that read numbers out of tensors keep them tensors here.

    Batch norms with ``momentum=None`` read their count, transformers compare a mask with the causal one
    to pick a faster kernel, and distributions look whether their arguments are valid.
    """
    lent: list[Any] = []
    part: Any
    validates = _validates()
    try:
        Distribution.set_default_validate_args(False)
        for part in module.modules():
            # As torch wrote it, in the owner's sub-classes too; lazy and synchronised ones have their own.
            plain = type(part).forward
            hints = next((names for kind, names in _CAUSAL.items() if plain is kind.forward), ())
            if hints and "forward" not in vars(part):
                part.forward = partial(_without_hints, part, hints)
            elif plain == nn.BatchNorm1d.forward and _is_cumulative(part):
                part.forward = partial(_cumulative_batch_norm, part)
            else:
                continue
            lent.append(part)
        yield
    finally:
        Distribution.set_default_validate_args(validates)
        for part in lent:
            del part.forward


def _validates() -> bool:
    """Return whether distributions check their arguments, as their owner has set it."""
    try:
        Bernoulli(2.0)
    except ValueError:
        return True
    return False


def _without_hints(layer: Any, hints: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """A transformer's forward by its masks alone, where their owner gives no hint."""
    given = signature(type(layer).forward).bind(layer, *args, **kwargs)
    given.apply_defaults()
    for name in hints:
        if given.arguments[name] is None:
            given.arguments[name] = False
    return type(layer).forward(*given.args, **given.kwargs)


def _is_cumulative(layer: Any) -> bool:
    return layer.momentum is None and layer.training and layer.track_running_stats


def _cumulative_batch_norm(layer: Any, x: Tensor) -> Tensor:
    """nn.BatchNorm's forward in training mode, its running statistics the mean over all batches so far."""
    mean, variance = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)
    normalised = F.batch_norm(x, mean, variance, layer.weight, layer.bias, True, 1.0, layer.eps)
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        share = 1.0 / layer.num_batches_tracked
        layer.running_mean.mul_(1.0 - share).add_(mean * share)
        layer.running_var.mul_(1.0 - share).add_(variance * share)
    return normalised


@lru_cache(maxsize=1024)
def without_out(target: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the op that returns what ``target`` writes to its argument ``out``, None where there is none,
    and which of ``dtype`` and ``device`` it takes in place of ``out``'s own, as ``torch.eye`` does."""
    library, name, overload = target.split(".")
    if library != "aten" or not overload.endswith("out"):
        return None
    packet = getattr(torch.ops.aten, name)
    wanted = [argument for argument in _arguments(packet, overload) if argument[0] != "out"]
    for other in packet.overloads():
        taken = _arguments(packet, other)
        more = {argument for argument, _ in taken[len(wanted) :]}
        mutable = getattr(packet, other)._schema.is_mutable
        if not mutable and taken[: len(wanted)] == wanted and more <= _OF_A_NEW_TENSOR:
            return f"aten.{name}.{other}", tuple(sorted(more & {"dtype", "device"}))
    return None


def densely(target: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op whose gradient is asked for in sparse form, without that."""
    at = _SPARSE.get(target)
    if at is None or at >= len(args):
        return args
    return (*args[:at], False, *args[at + 1 :])


def listed(target: str) -> str:
    """The op on the allow-list that computes what ``target`` does."""
    return _LISTED.get(target, target)


def _arguments(packet: Any, overload: str) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in getattr(packet, overload)._schema.arguments]
