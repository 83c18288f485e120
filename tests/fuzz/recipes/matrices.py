"""Products, decompositions, norms."""

from __future__ import annotations

from typing import Any

from atoll.opdag import TorchLiteral
from tests.fuzz.case import Tensorlike
from tests.fuzz.recipes.base import Draw, ids, recipe, t


def products(d: Draw) -> tuple[int, int, int, int]:
    """Batch, rows, inner size, columns."""
    return d.size(), d.size(), d.size(), d.size()


@recipe("addmm")
def addmm(d: Draw) -> dict[str, Any]:
    _, n, k, m = products(d)
    dtype = d.dtype()
    return {
        "self": t(*d.one([(n, m), (m,), (1,), ()]), dtype=dtype),
        "mat1": t(n, k, dtype=dtype),
        "mat2": t(k, m, dtype=dtype),
    }


@recipe("addmv")
def addmv(d: Draw) -> dict[str, Any]:
    _, n, k, _ = products(d)
    return {"self": t(n), "mat": t(n, k), "vec": t(k)}


@recipe("addr")
def addr(d: Draw) -> dict[str, Any]:
    _, n, k, _ = products(d)
    return {"self": t(n, k), "vec1": t(n), "vec2": t(k)}


@recipe("addbmm baddbmm")
def baddbmm(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    return {"self": t(n, m), "batch1": t(b, n, k), "batch2": t(b, k, m)}


@recipe("baddbmm_")
def baddbmm_(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    return {"self": t(b, n, m), "batch1": t(b, n, k), "batch2": t(b, k, m)}


@recipe("addmm_")
def addmm_(d: Draw) -> dict[str, Any]:
    _, n, k, m = products(d)
    return {"self": t(n, m), "mat1": t(n, k), "mat2": t(k, m)}


@recipe("addmm:dtype baddbmm:dtype bmm:dtype mm:dtype")
def with_dtype(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    half = {"dtype": "bfloat16"}
    found: dict[str, Any] = {"out_dtype": TorchLiteral("dtype", d.one(["float32", "bfloat16"]))}
    found |= {"mat1": t(n, k, **half), "batch1": t(b, n, k, **half), "batch2": t(b, k, m, **half)}
    return {**found, "self": t(n, k, **half), "mat2": t(k, m, **half), "beta": 1, "alpha": 1}


@recipe("bmm:dtype")
def bmm_dtype(d: Draw) -> dict[str, Any]:
    found = with_dtype(d)
    return {**found, "self": found["batch1"], "mat2": found["batch2"]}


@recipe("addmm:dtype")
def addmm_dtype(d: Draw) -> dict[str, Any]:
    found = with_dtype(d)
    return {**found, "self": t(found["mat2"].shape[1])}


@recipe("bilinear")
def bilinear(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    return {"input1": t(b, n), "input2": t(b, k), "weight": t(m, n, k), "bias": d.one([None, t(m)])}


@recipe("_grouped_mm")
def grouped_mm(d: Draw) -> dict[str, Any]:
    groups, n, k, m = products(d)
    dtype = d.dtype()
    offs = d.one([Tensorlike((groups,), "int32", "zero"), ids(n + 1, groups, dtype="int32")])
    return {"self": t(n, k, dtype=dtype), "mat2": t(groups, k, m, dtype=dtype), "offs": offs}


@recipe("histc")
def histc(d: Draw) -> dict[str, Any]:
    low = d.one([0, 0.0, -1.5, 3])
    return {"self": t(*d.sizes(0, 3), dtype=d.dtype()), "bins": d.size(), "min": low, "max": d.one([low, 3])}


@recipe("bmm")
def bmm(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    dtype = d.dtype()
    return {"self": t(b, n, k, dtype=dtype), "mat2": t(b, k, m, dtype=dtype)}


@recipe("mm")
def mm(d: Draw) -> dict[str, Any]:
    _, n, k, m = products(d)
    dtype = d.dtype()
    return {"self": t(n, k, dtype=dtype), "mat2": t(k, m, dtype=dtype)}


@recipe("mv")
def mv(d: Draw) -> dict[str, Any]:
    _, n, k, _ = products(d)
    return {"self": t(n, k), "vec": t(k)}


@recipe("matmul linalg_matmul")
def matmul(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    dtype = d.dtype()
    left, right = d.one(
        [((n, k), (k, m)), ((b, n, k), (k, m)), ((k,), (k,)), ((b, n, k), (b, k, m)), ((n, k), (k,))]
    )
    return {"self": t(*left, dtype=dtype), "other": t(*right, dtype=dtype)}


@recipe("linear")
def linear(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    dtype = d.dtype()
    return {
        "input": t(*d.one([(n, k), (b, n, k), (k,)]), dtype=dtype),
        "weight": t(m, k, dtype=dtype),
        "bias": d.one([None, t(m, dtype=dtype)]),
    }


@recipe("dot vdot inner linalg_vecdot ger outer")
def vectors(d: Draw) -> dict[str, Any]:
    n = d.size()
    return {"self": t(n), "tensor": t(n), "other": t(n), "vec2": t(n), "x": t(n), "y": t(n)}


@recipe("cross linalg_cross")
def cross(d: Draw) -> dict[str, Any]:
    shape = (d.size(), 3)
    return {"self": t(*shape), "other": t(*shape), "dim": -1}


@recipe("cdist")
def cdist(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    return {"x1": t(b, n, k), "x2": t(b, m, k), "p": d.one([0.0, 1.0, 2.0, 3.0, 0.5, float("inf")])}


@recipe("einsum")
def einsum(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    equation, shapes = d.one(
        [
            ("ij,jk->ik", ((n, k), (k, m))),
            ("bij,bjk->bik", ((b, n, k), (b, k, m))),
            ("ii->i", ((n, n),)),
            ("ij->ji", ((n, k),)),
            ("i,j->ij", ((n,), (m,))),
            ("...i,...i->...", ((b, n), (b, n))),
            ("ij,ij->", ((n, k), (n, k))),
        ]
    )
    return {"equation": equation, "tensors": tuple(t(*shape) for shape in shapes), "path": None}


@recipe("chain_matmul linalg_multi_dot")
def chain(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    listed = (t(b, n), t(n, k), t(k, m))
    return {"matrices": listed, "tensors": listed}


@recipe("tensordot")
def tensordot(d: Draw) -> dict[str, Any]:
    b, n, k, m = products(d)
    return {"self": t(b, n, k), "other": t(k, n, m), "dims_self": (1, 2), "dims_other": (1, 0)}


@recipe("kron")
def kron(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(1, 2)), "other": t(*d.sizes(1, 2))}


@recipe("""
    linalg_inv linalg_inv_ex inverse linalg_det det slogdet linalg_slogdet logdet
    linalg_matrix_power matrix_exp linalg_matrix_exp matrix_power linalg_eigh linalg_eigvalsh trace
    cholesky_inverse
""")
def square(d: Draw) -> dict[str, Any]:
    n = d.size()
    shape = (n, n) if d.maybe() else (d.size(), n, n)
    return {"self": t(*shape), "A": t(*shape), "n": d.one([0, 1, 2, 3, 5, -1])}


@recipe("trace")
def trace(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(), d.size())}


@recipe("cov corrcoef")
def observations(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(), d.size(2, 9)),
        "fweights": None,
        "aweights": None,
        "correction": d.one([0, 1]),
    }


@recipe("cholesky linalg_cholesky")
def cholesky(d: Draw) -> dict[str, Any]:
    n = d.size()
    return {"self": t(n, 1, 1, fill="unit")} if d.maybe(0.7) else {"self": t(1, 1, fill="one")}


@recipe("linalg_solve linalg_solve_triangular")
def solve(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"A": t(n, n), "self": t(n, n), "B": t(n, m), "left": True}


@recipe("cholesky_solve")
def cholesky_solve(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n, m), "input2": t(n, n), "upper": d.maybe()}


@recipe("renorm")
def renorm(d: Draw) -> dict[str, Any]:
    shape = d.sizes(2, 3)
    return {"self": t(*shape), "p": d.one([1, 2, 3.5]), "dim": d.dim(shape), "maxnorm": d.one([0.5, 1, 4])}


@recipe("linalg_qr linalg_svd linalg_svdvals linalg_pinv linalg_matrix_norm")
def matrix(d: Draw) -> dict[str, Any]:
    shape = (d.size(), d.size())
    return {
        "self": t(*shape),
        "A": t(*shape),
        "driver": None,
        "atol": None,
        "rtol": None,
        "hermitian": False,
        "dim": (-2, -1),
        "ord": d.one([1, -1, 2, float("inf")]),
        "dtype": None,
    }


@recipe("linalg_norm:ord_str linalg_matrix_norm:str_ord")
def named_norm(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(), d.size()),
        "A": t(d.size(), d.size()),
        "ord": d.one(["fro", "nuc"]),
        "dim": (-2, -1),
        "dtype": None,
    }


@recipe("_weight_norm norm_except_dim")
def weight_norm(d: Draw) -> dict[str, Any]:
    shape = d.sizes(2, 3)
    dim = d.one([0, len(shape) - 1])
    return {
        "v": t(*shape),
        "g": t(*(s if at == dim else 1 for at, s in enumerate(shape))),
        "dim": dim,
        "pow": d.one([1, 2]),
    }
