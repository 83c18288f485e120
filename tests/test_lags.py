import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.lags import MAX_RATIO, Exchange, Layer, layer_ratios

LAYERS = st.lists(st.builds(Layer, st.integers(0, 10**8), st.floats(0, 5)), min_size=1, max_size=12)
WAYS = st.builds(Exchange, st.integers(2, 64), st.floats(0, 0.1), st.floats(1e6, 1e10), st.floats(1e7, 1e11))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers=LAYERS, way=WAYS)
def test_every_layer_is_hidden_or_compressed_as_far_as_allowed(layers, way):
    ratios = layer_ratios(layers, way)
    below_s = 0.0
    for layer, ratio in zip(layers, ratios, strict=True):
        assert 1.0 <= ratio <= MAX_RATIO
        dense = way.dense_s(layer.n_bytes) <= below_s or layer.n_bytes == 0
        took_s = way.sparse_s(layer.n_bytes, ratio) + layer.n_bytes / way.select_bytes_per_s
        assert dense or ratio == MAX_RATIO or took_s <= below_s * (1 + 1e-9)
        below_s += layer.backward_s


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layers=LAYERS, way=WAYS, factor=st.floats(1, 20))
def test_a_faster_line_never_asks_for_a_higher_ratio(layers, way, factor):
    faster = Exchange(way.workers, way.latency_s, way.bandwidth_bps * factor, way.select_bytes_per_s)
    assert all(b <= a for a, b in zip(layer_ratios(layers, way), layer_ratios(layers, faster), strict=True))


def test_the_ratio_is_the_smallest_that_hides_the_layer():
    way = Exchange(workers=2, latency_s=0.0, bandwidth_bps=8e6)
    # 1 MB takes 1 s there; the layers below leave 0.25 s.
    ratios = layer_ratios([Layer(0, 0.25), Layer(1_000_000, 0.5)], way)
    assert ratios == (1.0, pytest.approx(4.0))


def test_the_last_gradient_has_nothing_to_hide_behind():
    way = Exchange(workers=4, latency_s=0.01, bandwidth_bps=1e8)
    assert layer_ratios([Layer(4096, 1.0), Layer(4096, 1.0)], way) == (MAX_RATIO, 1.0)


def test_one_worker_exchanges_nothing():
    assert layer_ratios([Layer(10**9, 0.0)], Exchange(1, 0.0, 1e6)) == (1.0,)


def test_impossible_figures_are_refused():
    with pytest.raises(ValueError, match="rate > 0"):
        layer_ratios([Layer(1, 1.0)], Exchange(2, 0.0, 0.0))
