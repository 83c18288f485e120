"""Normalisation, attention, recurrence, losses."""

from __future__ import annotations

from typing import Any

from tests.fuzz.case import Tensorlike
from tests.fuzz.recipes.base import RECIPES, Draw, ids, recipe, t


def _normed(d: Draw) -> tuple[tuple[int, ...], int, str]:
    channels = d.size()
    return (d.size(1, 5), channels, *d.sizes(0, 2)), channels, d.one(["float32", "float64", "bfloat16"])


@recipe("batch_norm instance_norm")
def batch_norm(d: Draw) -> dict[str, Any]:
    shape, channels, dtype = _normed(d)

    def statistic() -> Any:
        return t(channels, dtype=dtype, fill="unit")

    training = d.maybe()
    kept = (statistic(), statistic()) if not training or d.maybe() else (None, None)
    return {
        "input": t(*shape, *([3] if len(shape) == 2 else []), dtype=dtype),
        "weight": d.one([None, statistic()]),
        "bias": d.one([None, statistic()]),
        "running_mean": kept[0],
        "running_var": kept[1],
        "training": training,
        "use_input_stats": training,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }


@recipe("group_norm native_group_norm")
def group_norm(d: Draw) -> dict[str, Any]:
    groups = d.one([1, 2, 3])
    shape = (d.size(1, 4), groups * d.size(1, 3), *d.sizes(1, 2))
    dtype = d.one(["float32", "float64", "bfloat16"])
    area = 1
    for size in shape[2:]:
        area *= size
    scale = d.one([None, t(shape[1], dtype=dtype)])
    return {
        "input": t(*shape, dtype=dtype),
        "num_groups": groups,
        "group": groups,
        "weight": scale,
        "bias": d.one([None, t(shape[1], dtype=dtype)]),
        "N": shape[0],
        "C": shape[1],
        "HxW": area,
        "eps": 1e-5,
    }


@recipe("layer_norm native_layer_norm rms_norm")
def layer_norm(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    last = shape[-d.rng.randint(1, len(shape)) :]
    dtype = d.one(["float32", "float64", "bfloat16"])
    return {
        "input": t(*shape, dtype=dtype),
        "normalized_shape": last,
        "weight": d.one([None, t(*last, dtype=dtype)]),
        "bias": d.one([None, t(*last, dtype=dtype)]),
        "eps": 1e-5,
    }


@recipe("scaled_dot_product_attention")
def attention(d: Draw) -> dict[str, Any]:
    b, h, n, m, e = d.size(1, 3), d.size(1, 4), d.size(), d.size(), d.size()
    dtype = d.one(["float32", "float32", "float64", "bfloat16"])
    mask = d.one([None, None, t(n, m, dtype=dtype), t(b, 1, n, m, dtype=dtype), Tensorlike((n, m), "bool")])
    return {
        "query": t(b, h, n, e, dtype=dtype),
        "key": t(b, h, m, e, dtype=dtype),
        "value": t(b, h, m, e, dtype=dtype),
        "attn_mask": mask,
        "dropout_p": d.one([0.0, 0.0, 0.3]),
        "is_causal": mask is None and d.maybe(),
        "enable_gqa": False,
        "scale": d.one([None, 0.5]),
    }


def _recurrent(d: Draw, gates: int, states: int, packed: bool) -> dict[str, Any]:
    layers, ways, hidden, features, steps, batch = (
        d.one([1, 2]),
        d.one([1, 2]),
        d.size(1, 5),
        d.size(1, 5),
        d.size(1, 5),
        d.size(1, 4),
    )
    bias, first = d.maybe(), not packed and d.maybe()
    weights: list[Tensorlike] = []
    for layer in range(layers):
        entering = features if not layer else hidden * ways
        for _ in range(ways):
            weights += [t(gates * hidden, entering), t(gates * hidden, hidden)]
            weights += [t(gates * hidden), t(gates * hidden)] if bias else []
    state = t(layers * ways, batch, hidden)
    shape = (batch, steps, features) if first else (steps, batch, features)
    found: dict[str, Any] = {
        "hx": (state, state) if states == 2 else state,
        "params": tuple(weights),
        "has_biases": bias,
        "num_layers": layers,
        "dropout": d.one([0.0, 0.2]),
        "train": d.maybe(),
        "bidirectional": ways == 2,
    }
    if packed:
        return {
            **found,
            "data": t(steps * batch, features),
            "batch_sizes": ids(1, steps, dtype="int64")
            if batch == 1
            else Tensorlike((steps,), "int64", "index", batch + 1),
        }
    return {**found, "input": t(*shape), "batch_first": first}


for _name, _gates, _states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_relu", 1, 1), ("rnn_tanh", 1, 1)):
    RECIPES[f"{_name}:input"] = lambda d, g=_gates, s=_states: _recurrent(d, g, s, False)
    RECIPES[f"{_name}:data"] = lambda d, g=_gates, s=_states: _recurrent(d, g, s, True)


def _cell(d: Draw, gates: int, states: int) -> dict[str, Any]:
    batch, hidden, features = d.size(), d.size(), d.size()
    state = t(batch, hidden)
    return {
        "input": t(batch, features),
        "hx": (state, state) if states == 2 else state,
        "w_ih": t(gates * hidden, features),
        "w_hh": t(gates * hidden, hidden),
        "b_ih": d.one([None, t(gates * hidden)]),
        "b_hh": d.one([None, t(gates * hidden)]),
    }


for _name, _gates, _states in (
    ("lstm_cell", 4, 2),
    ("gru_cell", 3, 1),
    ("rnn_relu_cell", 1, 1),
    ("rnn_tanh_cell", 1, 1),
):
    RECIPES[_name] = lambda d, g=_gates, s=_states: _cell(d, g, s)


@recipe("cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss")
def classes(d: Draw) -> dict[str, Any]:
    n, c = d.size(), d.size(2, 9)
    return {
        "self": t(n, c),
        "target": ids(c, n),
        "weight": d.one([None, t(c, fill="unit")]),
        "ignore_index": d.one([-100, 0, 1]),
        "p": d.one([1, 2]),
        "margin": 1.0,
        "label_smoothing": d.one([0.0, 0.1]),
    }


@recipe("nll_loss2d")
def nll_loss2d(d: Draw) -> dict[str, Any]:
    n, c, h, w = d.size(1, 4), d.size(2, 5), d.size(), d.size()
    return {
        "self": t(n, c, h, w),
        "target": ids(c, n, h, w),
        "weight": d.one([None, t(c, fill="unit")]),
        "ignore_index": -100,
    }


@recipe("binary_cross_entropy")
def binary(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {
        "self": t(*shape, fill="unit"),
        "target": t(*shape, fill="unit"),
        "weight": d.one([None, t(*shape)]),
    }


@recipe("cosine_embedding_loss")
def cosine_loss(d: Draw) -> dict[str, Any]:
    n, k = d.size(), d.size()
    return {"input1": t(n, k), "input2": t(n, k), "target": t(n, fill="one")}


@recipe("triplet_margin_loss")
def triplet(d: Draw) -> dict[str, Any]:
    shape = (d.size(), d.size())
    return {"anchor": t(*shape), "positive": t(*shape), "negative": t(*shape)}


@recipe("ctc_loss")
def ctc(d: Draw) -> dict[str, Any]:
    steps, batch, c, length = d.size(4, 9), d.size(1, 3), d.size(2, 6), d.size(1, 3)
    return {
        "log_probs": t(steps, batch, c),
        "targets": ids(c, batch, length),
        "input_lengths": (steps,) * batch,
        "target_lengths": (length,) * batch,
        "blank": 0,
    }


@recipe("ctc_loss:Tensor")
def ctc_tensor(d: Draw) -> dict[str, Any]:
    found = ctc(d)
    batch = len(found["input_lengths"])
    return {**found, "input_lengths": ids(5, batch), "target_lengths": ids(2, batch)}
