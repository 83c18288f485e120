"""Names of a checkpoint's tensors where peers have states of their own. Data only.

The tensors of the first peer that is there have the names of the model's: whoever needs the model, or begins
without a state of its own, takes them. Those of every other peer are named ``NAME@RANK``.
"""

from __future__ import annotations

from collections.abc import Mapping

OF = "@"

Tensors = Mapping[str, str]
"""Name -> blob."""


def merged(before: Tensors, parts: Mapping[int, Tensors]) -> dict[str, str]:
    """Return a checkpoint of what each rank has stored; ``before``: whatever no step changes, from the
    checkpoint before."""
    first, *others = sorted(parts)
    found = {**model(before), **parts[first]}
    for rank in others:
        found.update({f"{name}{OF}{rank}": blob for name, blob in parts[rank].items()})
    return found


def own(tensors: Tensors, rank: int) -> dict[str, str]:
    """Return a rank's tensors by the model's names: its own where it has stored any."""
    mine = f"{OF}{rank}"
    its_own = {name.removesuffix(mine): blob for name, blob in tensors.items() if name.endswith(mine)}
    return model(tensors) | its_own


def model(tensors: Tensors) -> dict[str, str]:
    """Return what has the model's names."""
    return {name: blob for name, blob in tensors.items() if OF not in name}
