"""A model's trained tensors in one row: what an exchange takes and gives back.

Order: the last used first, as gradients become final in a backward, so that the head of the row can leave
while the rest is still computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strategies.exchanges.base import Flat

if TYPE_CHECKING:
    from torch.nn import Parameter

Parameters = Mapping[str, "Parameter"]


def row_of(parameters: Parameters) -> Flat:
    """Shapes and names in the row's order."""
    names = _order(parameters)
    return Flat(tuple(tuple(parameters[name].shape) for name in names), tuple(names))


def flat_values(parameters: Parameters) -> Tensor:
    """Copy of the values, float32 on the CPU, [n]."""
    return _row([parameters[name].detach() for name in _order(parameters)])


def set_values(parameters: Parameters, flat: Tensor) -> None:
    """Write ``flat`` [n] into the parameters."""
    with torch.no_grad():
        for name, part in _parts(parameters, flat):
            parameters[name].copy_(part)


def by_name(parameters: Parameters, flat: Tensor) -> dict[str, Tensor]:
    """Return the parts of ``flat`` [n], in the shapes of the parameters whose place they have."""
    return dict(_parts(parameters, flat))


def flat_of(parameters: Parameters, parts: Mapping[str, Tensor]) -> Tensor:
    """Return copies of tensors, one for each parameter, in one row [n]."""
    return _row([parts[name] for name in _order(parameters)])


def _order(parameters: Parameters) -> list[str]:
    return list(parameters)[::-1]


def _row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).to("cpu", torch.float32) for tensor in tensors])


def _parts(parameters: Parameters, flat: Tensor) -> list[tuple[str, Tensor]]:
    names = _order(parameters)
    parts = torch.split(flat, [parameters[name].numel() for name in names])
    return [(name, part.view(parameters[name].shape)) for name, part in zip(names, parts, strict=True)]
