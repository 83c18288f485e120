"""Updates that began with an older model than the one that they change (``Federated(buffer=...)``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strategies.layout import Arrays
    from strategies.values import ClientUpdate


def aged(
    update: ClientUpdate, weight: float, base: Arrays | None = None, now: Arrays | None = None
) -> ClientUpdate:
    """An update whose change counts ``weight`` times, in the dtypes that it has.

    ``base`` and ``now``: broadcast that it began with and the newest one, for strategies that average models.
    Their clients' models count, seen from the newest, else what the clients have changed.
    """
    delta = update.delta
    if base is not None and now is not None:
        delta = {name: base[name] + change - now[name] for name, change in delta.items()}
    if weight != 1.0:
        delta = {name: change * np.asarray(weight, change.dtype) for name, change in delta.items()}
    return replace(update, delta=delta)
