"""The membership attack of the privacy benchmark: right half of the time where nothing leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.privacy import halves, interval, likelihood_ratio

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODELS, CLIENTS, WORLDS = 12, 64, 100


def worlds(leak: float) -> NDArray[np.float64]:
    """What the attack finds in models that are surer of each client by ``leak`` where it trained, [worlds,
    clients]; clients and models differ, too."""
    found = []
    for seed in range(WORLDS):
        draw = np.random.default_rng([seed, 1])
        members = halves(MODELS, CLIENTS, seed)
        noise = draw.normal(size=members.shape) + draw.normal(size=(MODELS, 1)) + draw.normal(size=CLIENTS)
        found.append(likelihood_ratio(noise + leak * members, members))
    return np.array(found)


def test_each_client_is_in_half_of_the_models_and_each_model_has_half_of_them() -> None:
    members = halves(MODELS, CLIENTS, 3)
    assert set(members.sum(axis=0)) == {MODELS // 2}
    assert set(members.sum(axis=1)) == {CLIENTS // 2}


def test_the_attack_finds_one_half_where_nothing_leaks_and_more_where_something_does() -> None:
    nothing, some = worlds(0.0), worlds(1.5)
    assert abs(nothing.mean() - 0.5) < 0.01
    assert some.mean() > 0.6
    held = [low <= 0.5 <= high for low, high in map(interval, nothing)]
    assert 0.85 <= np.mean(held) <= 1.0  # 95 % of the intervals hold what is true, by the clients' spread
