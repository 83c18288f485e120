"""What is left: orders, complex numbers, bits, spectra, gammas."""

from __future__ import annotations

from typing import Any

from tests.fuzz.case import Tensorlike
from tests.fuzz.recipes.base import Draw, recipe, t


@recipe("quantile nanquantile")
def quantile(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(1, 2)), "q": t(d.size(1, 4), fill="unit"), "dim": d.one([None, 0])}


@recipe("quantile:scalar nanquantile:scalar")
def quantile_one(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(1, 2)), "q": d.one([0.0, 0.3, 1.0]), "dim": d.one([None, 0])}


@recipe("kthvalue topk")
def kth(d: Draw) -> dict[str, Any]:
    n = d.size()
    return {"self": t(d.size(), n), "k": d.rng.randint(1, n), "dim": -1}


@recipe("diff")
def diff(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(3, 9), d.size()),
        "n": d.one([0, 1, 2]),
        "dim": 0,
        "prepend": None,
        "append": None,
    }


@recipe("cosine_similarity pairwise_distance dist")
def pairs(d: Draw) -> dict[str, Any]:
    shape = d.sizes(2, 2)
    return {name: t(*shape) for name in ("x1", "x2", "self", "other")} | {"dim": 1}


@recipe("view_as_complex")
def view_as_complex(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(), 2)}


@recipe("view_as_real resolve_conj conj_physical angle imag real")
def complexes(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(1, 3), dtype="complex64")}


@recipe("complex polar")
def complex_made(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {name: t(*shape) for name in ("real", "imag", "abs", "angle")}


@recipe("""
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift bitwise_not
    __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__
    bitwise_and:Scalar_Tensor bitwise_or:Scalar_Tensor bitwise_xor:Scalar_Tensor
    bitwise_left_shift:Scalar_Tensor bitwise_right_shift:Scalar_Tensor
""")
def bits(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    dtype = d.one(["int64", "int32", "uint8", "int16"])

    def one() -> Tensorlike:
        return Tensorlike(shape, dtype, d.one(["small", "extreme"]))

    return {"self": one(), "other": one()}


@recipe("div divide floor_divide remainder fmod")
def division(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    dtype = d.one(["int64", "int32", "float32", "int8"])
    return {
        "self": Tensorlike(shape, dtype, d.one(["small", "extreme"])),
        "other": Tensorlike(shape, dtype, d.one(["one", "extreme", "small"])),
        "rounding_mode": d.one(["trunc", "floor", None]),
    }


@recipe("stft stft:center")
def stft(d: Draw) -> dict[str, Any]:
    n = d.one([4, 8, 16])
    return {
        "self": t(d.size(1, 3), 64),
        "n_fft": n,
        "hop_length": d.one([None, 2, 4]),
        "win_length": None,
        "window": d.one([None, t(n)]),
        "return_complex": True,
        "onesided": True,
        "normalized": d.maybe(),
        "center": True,
        "pad_mode": "reflect",
        "align_to_window": None,
    }


@recipe("istft")
def istft(d: Draw) -> dict[str, Any]:
    return {
        "self": t(1, 5, 9, dtype="complex64"),
        "n_fft": 8,
        "hop_length": None,
        "win_length": None,
        "window": None,
        "center": True,
        "onesided": True,
        "length": None,
        "return_complex": False,
        "normalized": False,
    }


@recipe("fft_fft fft_ifft fft_irfft fft_rfft fft_hfft fft_ihfft")
def fft(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"self": t(*shape), "n": d.one([None, 4, 7]), "dim": d.dim(shape)}


@recipe("""
    fft_fft2 fft_ifft2 fft_irfft2 fft_rfft2 fft_fftn fft_ifftn fft_irfftn fft_rfftn fft_fftshift
    fft_ifftshift
""")
def fft2(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(), d.size(), d.size()), "s": d.one([None, (4, 6)]), "dim": (-2, -1)}


@recipe("polygamma mvlgamma special_zeta poisson")
def gammas(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    fill = d.one(["unit", "unit", "extreme", "normal"])
    return {
        "self": Tensorlike(shape, "float32", fill, grad=False),
        "other": Tensorlike(shape, "float32", fill, grad=False),
        "n": d.one([0, 1, 2, 3]),
        "p": d.one([1, 2]),
    }


@recipe("prelu")
def prelu(d: Draw) -> dict[str, Any]:
    c = d.size()
    return {"self": t(d.size(), c, d.size()), "weight": t(*d.one([(1,), (c,)]))}


@recipe("glu")
def glu(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(), 2 * d.size()), "dim": -1}


@recipe("heaviside logical_and logical_or logical_xor special_gammainc special_gammaincc")
def alike(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"self": t(*shape), "values": t(*shape), "other": t(*shape)}


@recipe("lerp:Tensor addcdiv addcmul")
def three(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {name: t(*shape) for name in ("self", "end", "weight", "tensor1", "tensor2")}


@recipe("lerp:Scalar lerp_:Scalar")
def lerp_scalar(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"self": t(*shape), "end": t(*shape), "weight": d.one([0, 0.5])}
