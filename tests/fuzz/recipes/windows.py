"""Convolutions, pooling, resampling, padding."""

from __future__ import annotations

from typing import Any

from tests.fuzz.recipes.base import RECIPES, Draw, recipe, t


def windows(d: Draw, n: int) -> dict[str, Any]:
    kernel = tuple(d.size(1, 4) for _ in range(n))
    return {
        "kernel_size": kernel,
        "stride": tuple(d.size(1, 3) for _ in range(n)),
        "dilation": (1,) * n if d.maybe(0.7) else (2,) * n,
    }


def _conv(n: int, d: Draw) -> dict[str, Any]:
    window = windows(d, n)
    groups, each_in, each_out = d.size(1, 3), d.size(1, 5), d.size(1, 5)
    space = tuple(d.size(1, 5) + 2 * k for k in window["kernel_size"])
    dtype = d.one(["float32", "float32", "float64", "bfloat16"])
    return {
        "input": t(d.size(1, 4), groups * each_in, *space, dtype=dtype),
        "weight": t(groups * each_out, each_in, *window["kernel_size"], dtype=dtype),
        "bias": d.one([None, t(groups * each_out, dtype=dtype)]),
        "stride": window["stride"],
        "dilation": window["dilation"],
        "groups": groups,
        "padding": tuple(d.one([0, 0, 1, 2]) for _ in range(n)),
        "transposed": False,
        "output_padding": (0,) * n,
    }


def _conv_same(n: int, d: Draw) -> dict[str, Any]:
    found = _conv(n, d)
    return {**found, "padding": d.one(["same", "valid"]), "stride": (1,) * n}


def _conv_transposed(n: int, d: Draw) -> dict[str, Any]:
    found = _conv(n, d)
    groups = found["groups"]
    channels, each_out = found["input"].shape[1], d.size(1, 5)
    kernel = found["weight"].shape[2:]
    dtype = found["input"].dtype
    return {
        **found,
        "weight": t(channels, each_out, *kernel, dtype=dtype),
        "bias": d.one([None, t(groups * each_out, dtype=dtype)]),
        "padding": (0,) * n,
        "output_padding": (0,) * n,
        "transposed": True,
    }


for _n in (1, 2, 3):
    RECIPES[f"conv{_n}d"] = lambda d, n=_n: _conv(n, d)
    RECIPES[f"conv{_n}d:padding"] = lambda d, n=_n: _conv_same(n, d)
    RECIPES[f"conv_transpose{_n}d"] = lambda d, n=_n: _conv_transposed(n, d)
RECIPES["convolution"] = lambda d: (_conv_transposed if d.maybe(0.3) else _conv)(d.one([1, 2, 3]), d)


@recipe("conv_tbc")
def conv_tbc(d: Draw) -> dict[str, Any]:
    k, cin, cout = d.size(1, 4), d.size(), d.size()
    return {
        "self": t(k + d.size(), d.size(), cin),
        "weight": t(k, cin, cout),
        "bias": t(cout),
        "pad": d.one([0, 1]),
    }


@recipe("im2col")
def im2col(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(1, 4), d.size(1, 4), 8, 9), **windows(d, 2), "padding": (d.one([0, 1]),) * 2}


@recipe("col2im")
def col2im(d: Draw) -> dict[str, Any]:
    kernel, c = (d.size(1, 3), d.size(1, 3)), d.size(1, 4)
    high, wide = d.size(4, 8), d.size(4, 8)
    blocks = (high - kernel[0] + 1) * (wide - kernel[1] + 1)
    return {
        "self": t(d.size(1, 3), c * kernel[0] * kernel[1], blocks),
        "output_size": (high, wide),
        "kernel_size": kernel,
        "dilation": (1, 1),
        "padding": (0, 0),
        "stride": (1, 1),
    }


def _pool(n: int, d: Draw) -> dict[str, Any]:
    window = windows(d, n)
    space = tuple(d.size(1, 6) + 2 * k for k in window["kernel_size"])
    dtype = d.one(["float32", "float64", "bfloat16"])
    padding = tuple(d.rng.randint(0, k // 2) for k in window["kernel_size"])
    return {
        "self": t(d.size(1, 4), d.size(1, 4), *space, dtype=dtype),
        **window,
        "padding": padding,
        "ceil_mode": d.maybe(),
        "divisor_override": d.one([None, None, 3]),
    }


for _n in (1, 2, 3):
    for _name in ("avg_pool", "max_pool"):
        RECIPES[f"{_name}{_n}d"] = lambda d, n=_n: _pool(n, d)
    RECIPES[f"max_pool{_n}d_with_indices"] = lambda d, n=_n: _pool(n, d)


def _adaptive(n: int, d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(1, 4), d.size(1, 4), *(d.size(1, 9) for _ in range(n))),
        "output_size": tuple(d.size(1, 9) for _ in range(n)),
    }


for _n in (1, 2, 3):
    for _name in ("adaptive_avg_pool", "adaptive_max_pool"):
        RECIPES[f"{_name}{_n}d"] = lambda d, n=_n: _adaptive(n, d)
RECIPES["_adaptive_avg_pool2d"] = lambda d: _adaptive(2, d)
RECIPES["_adaptive_avg_pool3d"] = lambda d: _adaptive(3, d)


def _upsample(n: int, d: Draw, listed: bool) -> dict[str, Any]:
    space = tuple(d.size(1, 8) for _ in range(n))
    times = d.one([1, 2, 3])
    source = t(d.size(1, 3), d.size(1, 4), *space, dtype=d.one(["float32", "float64", "bfloat16", "uint8"]))
    made = tuple(size * times for size in space)
    if listed:
        by_scale = d.maybe()
        return {
            "input": source,
            "output_size": None if by_scale else made,
            "scale_factors": (float(times),) * n if by_scale else None,
            "align_corners": d.maybe(),
        }
    scale = d.one([None, float(times)])
    return {
        "self": source,
        "output_size": made,
        "scales": scale,
        "scales_d": scale,
        "scales_h": scale,
        "scales_w": scale,
        "align_corners": d.maybe(),
    }


for _name, _n in (
    ("upsample_nearest1d", 1),
    ("upsample_nearest2d", 2),
    ("upsample_nearest3d", 3),
    ("_upsample_nearest_exact1d", 1),
    ("_upsample_nearest_exact2d", 2),
    ("_upsample_nearest_exact3d", 3),
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_trilinear3d", 3),
    ("upsample_bicubic2d", 2),
    ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2),
):
    RECIPES[_name] = lambda d, n=_n: _upsample(n, d, False)
    RECIPES[f"{_name}:vec"] = lambda d, n=_n: _upsample(n, d, True)


@recipe("grid_sampler grid_sampler_2d")
def grid_sampler(d: Draw) -> dict[str, Any]:
    b = d.size(1, 3)
    fill = d.one(["normal", "normal", "extreme"])
    return {
        "input": t(b, d.size(1, 4), d.size(), d.size()),
        "grid": t(b, d.size(), d.size(), 2, fill=fill),
        "interpolation_mode": d.one([0, 1, 2]),
        "padding_mode": d.one([0, 1, 2]),
        "align_corners": d.maybe(),
    }


@recipe("grid_sampler_3d")
def grid_sampler_3d(d: Draw) -> dict[str, Any]:
    b = d.size(1, 3)
    return {
        "input": t(b, 2, d.size(1, 5), d.size(1, 5), d.size(1, 5)),
        "grid": t(b, 3, 2, 3, 3, fill=d.one(["normal", "extreme"])),
        "interpolation_mode": d.one([0, 1]),
        "padding_mode": d.one([0, 1, 2]),
        "align_corners": d.maybe(),
    }


@recipe("affine_grid_generator")
def affine_grid(d: Draw) -> dict[str, Any]:
    b = d.size(1, 3)
    return {"theta": t(b, 2, 3), "size": (b, 1, d.size(), d.size()), "align_corners": d.maybe()}


@recipe("pixel_shuffle")
def pixel_shuffle(d: Draw) -> dict[str, Any]:
    r = d.one([1, 2, 3])
    return {"self": t(d.size(1, 3), r * r * d.size(1, 3), d.size(), d.size()), "upscale_factor": r}


@recipe("pixel_unshuffle")
def pixel_unshuffle(d: Draw) -> dict[str, Any]:
    r = d.one([1, 2, 3])
    return {"self": t(d.size(1, 3), 2, r * d.size(1, 4), r * d.size(1, 4)), "downscale_factor": r}


@recipe("channel_shuffle")
def channel_shuffle(d: Draw) -> dict[str, Any]:
    groups = d.one([1, 2, 3])
    return {"self": t(d.size(1, 3), groups * d.size(1, 3), d.size(), d.size()), "groups": groups}


def _pad(n: int, d: Draw) -> dict[str, Any]:
    space = tuple(d.size(4, 9) for _ in range(n))
    return {"self": t(2, d.size(1, 3), *space), "padding": tuple(d.one([0, 1, 2, 3]) for _ in range(2 * n))}


for _n in (1, 2, 3):
    for _name in ("reflection_pad", "replication_pad"):
        RECIPES[f"{_name}{_n}d"] = lambda d, n=_n: _pad(n, d)


@recipe("pad")
def pad(d: Draw) -> dict[str, Any]:
    mode = d.one(["constant", "reflect", "replicate", "circular"])
    return {
        **_pad(2, d),
        "pad": tuple(d.one([0, 1, 2]) for _ in range(4)),
        "mode": mode,
        "value": d.one([None, 1.5]) if mode == "constant" else None,
    }


@recipe("constant_pad_nd")
def constant_pad(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(2, 3)), "pad": (d.one([0, 1, 2]), d.one([0, 1, -1]))}
