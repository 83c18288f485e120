"""Names of a module that a strategy has wrapped before capture: the owner's net, and the strategy's own
tensors.

The wrapper holds the owner's module as ``net``, so its tensors are "net.NAME" while the job trains and
NAME again in what is exported. The wrapper's own tensors are named after the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Array = TypeVar("Array")

NET = "net."


def owners(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The tensors of the owner's module alone, under their own names."""
    return {name.removeprefix(NET): array for name, array in arrays.items() if name.startswith(NET)}
