"""Words of sums: exact both ways, never wrapped, and only what a support holds travels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from atoll.errors import BadUpdate
from atoll.opdag import TensorMeta
from strategies.fixed import Accumulator, FixedSums, Grid, real
from strategies.layout import Layout, Role
from strategies.secure.vector import Encoding, with_bits
from strategies.sums import Contribution, Term
from tests.strategies.secure.exchanges import Run, names

METAS = {"trained": {"w": TensorMeta((7, 11), "float32"), "b": TensorMeta((5,), "float32")}}
LAYOUT = Layout(METAS["trained"], dict.fromkeys(METAS["trained"], Role.TRAINED))


def _grid(samples: int, bits: int = 24) -> Grid:
    return with_bits(Grid({"trained": float(samples)}, {"samples": float(samples)}), bits)


def _sums(grid: Grid, weights: Mapping[str, int], scale: float = 1.0) -> dict[str, FixedSums]:
    found = {}
    for at, (who, weight) in enumerate(sorted(weights.items())):
        rng, held = np.random.default_rng(at), Accumulator(grid)
        arrays = {n: (scale * rng.normal(size=m.shape)).astype("f4") for n, m in METAS["trained"].items()}
        held.add(Contribution({"trained": Term(float(weight), arrays)}, {"samples": float(weight)}))
        found[who] = held.sums()
    return found


@pytest.mark.parametrize("bits", [8, 16, 24, 25, 34, 48])
@pytest.mark.parametrize("lost", [(), ("w004",)])
def test_masked_words_add_up_to_the_bits_of_plain_sums(bits: int, lost: tuple[str, ...]) -> None:
    weights = {who: 10 + 37 * at for at, who in enumerate(names(5))}
    grid = _grid(sum(weights.values()), bits)
    sums, encoding = _sums(grid, weights), Encoding(grid, METAS)
    run = Run({who: encoding.words(held) for who, held in sums.items()}, lost={"vectors": lost})
    found = encoding.sums(run.run(), len(run.survivors))
    whole = Accumulator(grid)
    for who in run.survivors:
        whole.add(sums[who])
    wanted = whole.sums()
    assert found.scalars == wanted.scalars
    for name in METAS["trained"]:
        assert np.array_equal(found.arrays["trained"][name], wanted.arrays["trained"][name])
    one, two = real(found, LAYOUT), real(wanted, LAYOUT)
    assert all(np.array_equal(one.arrays["trained"][n], two.arrays["trained"][n]) for n in METAS["trained"])
    assert encoding.dtype.itemsize == (4 if bits <= 24 else 8)


def test_the_largest_elements_of_all_clients_do_not_wrap() -> None:
    weights = dict.fromkeys(names(3), 2**20 // 3)
    grid = _grid(sum(weights.values()))
    encoding = Encoding(grid, METAS)
    held = {}
    for sign, who in zip((1.0, 1.0, 1.0), names(3), strict=True):
        arrays = {n: np.full(m.shape, sign * encoding.room, "f4") for n, m in METAS["trained"].items()}
        total = Accumulator(grid)
        total.add(Contribution({"trained": Term(float(weights[who]), arrays)}, {"samples": 1.0}))
        held[who] = encoding.words(total.sums())
    found = encoding.sums(Run(held).run(), 3)
    mean = real(found, LAYOUT).arrays["trained"]["w"] / sum(weights.values())
    assert np.allclose(mean, 64.0, rtol=1e-6)


def test_a_client_refuses_what_has_no_room() -> None:
    grid = _grid(30)
    encoding = Encoding(grid, METAS)
    with pytest.raises(BadUpdate, match="beyond 64"):
        encoding.words(_sums(grid, {"a": 10}, scale=100.0)["a"])
    wide = _grid(30, 32)
    assert len(Encoding(wide, METAS).words(_sums(wide, {"a": 10}, scale=100.0)["a"])[0]) == 82


def test_a_mask_that_is_left_on_is_noticed() -> None:
    weights = dict.fromkeys(names(4), 10)
    grid = _grid(40)
    encoding = Encoding(grid, METAS)
    run = Run({who: encoding.words(held) for who, held in _sums(grid, weights).items()})
    run.share()
    run.upload()
    with pytest.raises(BadUpdate, match=r"beyond|mask is left"):
        encoding.sums(run.masked["w000"], 1)


def test_a_support_alone_travels() -> None:
    weights = {who: 10 + at for at, who in enumerate(names(3))}
    grid, support = _grid(33), np.array([0, 5, 76])
    encoding = Encoding(grid, METAS, {("trained", "w"): support})
    assert encoding.sizes() == (3 + 5, 1)
    sums = _sums(grid, weights)
    found = encoding.sums(Run({who: encoding.words(held) for who, held in sums.items()}).run(), 3)
    whole = sum(held.arrays["trained"]["w"].reshape(-1) for held in sums.values())
    flat = found.arrays["trained"]["w"].reshape(-1)
    assert np.array_equal(flat[support], whole[support])
    assert not np.delete(flat, support).any()
