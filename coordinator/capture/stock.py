"""Torch's own layers that would be refused as they are written, in other ops of the same value.

``followable`` lends layers a forward that torch.export can follow; ``without_out``, ``densely`` and
``listed`` rewrite ops of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.ops import GROUPED

# Where the op's ``sparse`` stands: a sparse gradient is a dense one that is stored otherwise.
_SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.default": 5, "aten.embedding_bag.padding_idx": 5}
_OF_A_NEW_TENSOR = {"dtype", "layout", "device", "pin_memory"}


@contextmanager
def followable(module: nn.Module) -> Iterator[None]:
    """Batch norms with ``momentum=None`` read their count as a number; here they keep it a tensor."""
    lent: list[Any] = []
    part: Any
    try:
        for part in module.modules():
            # As torch wrote it, in the owner's sub-classes too; lazy and synchronised ones have their own.
            plain = type(part).forward == nn.BatchNorm1d.forward
            if plain and part.momentum is None and part.training and part.track_running_stats:
                part.forward = partial(_cumulative_batch_norm, part)
                lent.append(part)
        yield
    finally:
        for part in lent:
            del part.forward


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
    """The op of torch that a library's own computes: transformers' products of experts, where torch.export
    refuses theirs."""
    return GROUPED if target == "transformers.grouped_mm_fallback.default" else target


def _arguments(packet: Any, overload: str) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in getattr(packet, overload)._schema.arguments]
