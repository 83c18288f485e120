"""A data owner's clipping and noise: the bound holds, nothing else changes, noise is the owner's alone."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.opdag import TensorMeta
from strategies import STRATEGIES, make_strategy
from strategies.clipping import UNCLIPPED, Clipping, unclippable
from strategies.layout import Layout, Role

SECRET, OTHER = b"a" * 32, b"b" * 32
DRAW = np.random.default_rng(3)
ARRAYS = {
    "weights/w": DRAW.normal(size=(40, 50)).astype(np.float32),
    "weights/b": DRAW.normal(size=7).astype(np.float64),
    "weights/scale": np.array(3.0, np.float32),
}
LAYOUT = Layout(
    {"w": TensorMeta((40, 50), "float32"), "bn": TensorMeta((7,), "float32")},
    {"w": Role.TRAINED, "bn": Role.AVERAGED},
)


def norm(arrays: dict[str, np.ndarray]) -> float:  # type: ignore[type-arg]
    return float(np.sqrt(sum(np.sum(a.astype(np.float64) ** 2) for a in arrays.values())))


def test_without_a_bound_an_update_is_as_it_was() -> None:
    found = UNCLIPPED.applied(ARRAYS, SECRET)
    assert all(found[name] is array for name, array in ARRAYS.items())


def test_a_large_update_is_scaled_to_the_norm_and_a_small_one_left() -> None:
    found = Clipping(1.5).applied(ARRAYS, SECRET)
    assert norm(found) == pytest.approx(1.5, rel=1e-6)
    ratio = 1.5 / norm(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(found[name], array * ratio, rtol=1e-6)
    kept = Clipping(1e6).applied(ARRAYS, SECRET)
    assert all(np.array_equal(kept[name], array) for name, array in ARRAYS.items())


def test_an_update_of_zeros_stays_one() -> None:
    assert norm(Clipping(1.0).applied({"w": np.zeros(5, np.float32)}, SECRET)) == 0.0


def test_noise_has_the_stated_deviation_and_is_drawn_by_the_secret_alone() -> None:
    clip = Clipping(2.0, 0.5)
    found, again, other = (clip.applied(ARRAYS, secret) for secret in (SECRET, SECRET, OTHER))
    bare = Clipping(2.0).applied(ARRAYS, SECRET)
    assert all(np.array_equal(found[name], again[name]) for name in ARRAYS)
    noise = (found["weights/w"] - bare["weights/w"]).ravel()
    assert noise.std() == pytest.approx(1.0, rel=0.06)
    assert abs(noise.mean()) < 0.08
    assert not np.any(found["weights/w"] == other["weights/w"])


PLAIN = {
    "coordinate_median", "fedadagrad", "fedadam", "fedasync", "fedavg", "fedavgm", "fednova", "fedprox",
    "fedsvd", "fedyogi", "flora", "krum", "opwa", "trimmed_mean", "vhl",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"fedimpro"}))
def test_only_strategies_that_send_and_keep_nothing_but_a_difference_are_clipped(name: str) -> None:
    assert (unclippable(make_strategy(name), LAYOUT) == "") == (name in PLAIN)


def test_a_base_that_keeps_something_cannot_be_clipped_within_its_wrapper_either() -> None:
    assert "vhl sends or keeps more" in unclippable(make_strategy("vhl", {"base": "scaffold"}), LAYOUT)
