"""How evenly a model serves its clients: figures over one number a client, all clients alike.

    mean          of the clients
    worst_decile  mean of the tenth that is served worst, at least of one
    jain          (sum a)^2 / (n sum a^2), in [1/n, 1]: 1 where all are served alike

Source: Li 2020 (q-FedAvg) reports the worst tenth; Jain 1984 for the index.
"""

from __future__ import annotations

from collections.abc import Collection
from math import fsum

FIGURES = ("mean", "worst_decile", "jain")


def fairness(values: Collection[float]) -> dict[str, float]:
    """Figures of accuracies or the like, larger being better; ValueError for none."""
    if not values:
        raise ValueError("no client reported a figure")
    ascending = sorted(values)
    worst = ascending[: max(1, len(ascending) // 10)]
    squares = fsum(value * value for value in ascending)
    total = fsum(ascending)
    return {
        "mean": total / len(ascending),
        "worst_decile": fsum(worst) / len(worst),
        "jain": total * total / (len(ascending) * squares) if squares > 0.0 else 1.0,
    }
