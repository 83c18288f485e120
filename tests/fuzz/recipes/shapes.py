"""Views, joins, splits."""

from __future__ import annotations

from typing import Any

from tests.fuzz.recipes.base import Draw, recipe, t


@recipe("view reshape _unsafe_view")
def view(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    total = 1
    for size in shape:
        total *= size
    made = d.one([(total,), (-1,), (1, total), shape[::-1]])
    return {"self": t(*shape, dtype=d.dtype()), "size": made, "shape": made}


@recipe("view:dtype")
def view_dtype(d: Draw) -> dict[str, Any]:
    return {"self": t(d.size(), 8, dtype=d.dtype())}


@recipe("view_as reshape_as expand_as type_as copy copy_")
def as_other(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"self": t(*shape), "other": t(*shape), "src": t(*shape)}


@recipe("expand broadcast_to sum_to_size")
def expand(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n, 1), "size": (n, m)}


@recipe("sum_to_size")
def sum_to_size(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n, m), "size": d.one([(n, 1), (1, m), (m,), (n, m)])}


@recipe("permute")
def permute(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 4)
    order = list(range(len(shape)))
    d.rng.shuffle(order)
    return {"self": t(*shape), "dims": tuple(order)}


@recipe("""
    cat concat concatenate stack hstack vstack dstack column_stack row_stack atleast_1d
    atleast_2d atleast_3d
""")
def joined(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"tensors": tuple(t(*shape) for _ in range(d.rng.randint(1, 4))), "dim": 0, "self": t(*shape)}


@recipe("atleast_1d atleast_2d atleast_3d")
def atleast(d: Draw) -> dict[str, Any]:
    return {"self": t(*d.sizes(0, 2))}


@recipe("meshgrid meshgrid:indexing cartesian_prod block_diag broadcast_tensors")
def vectors_listed(d: Draw) -> dict[str, Any]:
    return {"tensors": tuple(t(d.size(1, 5)) for _ in range(d.rng.randint(1, 3)))}


@recipe("broadcast_tensors")
def broadcast(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"tensors": (t(n, 1), t(1, m), t(1))}


@recipe("split:default")
def split_by_sizes(d: Draw) -> dict[str, Any]:
    return split_sizes(d)


@recipe("""
    linspace:Tensor_Tensor linspace:Tensor_Scalar linspace:Scalar_Tensor
    logspace:Tensor_Tensor logspace:Tensor_Scalar logspace:Scalar_Tensor
""")
def spaced(d: Draw) -> dict[str, Any]:
    return {"start": t(), "end": t(), "steps": d.one([0, 1, 2, 7]), "dtype": None}


@recipe("unflatten")
def unflatten(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n * m, d.size()), "dim": 0, "sizes": (n, m)}


@recipe("unfold")
def unfold(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(4, 9), d.size()),
        "dimension": 0,
        "size": d.one([1, 2, 3]),
        "step": d.one([1, 2]),
    }


@recipe("narrow")
def narrow(d: Draw) -> dict[str, Any]:
    n = d.size(2, 9)
    return {"self": t(n, d.size()), "dim": 0, "start": d.one([0, 1]), "length": d.one([0, 1])}


@recipe("split:sizes split_with_sizes unsafe_split_with_sizes")
def split_sizes(d: Draw) -> dict[str, Any]:
    sizes = d.sizes(1, 3)
    return {"self": t(sum(sizes), d.size()), "split_size": sizes, "split_sizes": sizes, "dim": 0}


@recipe("split unsafe_split chunk unsafe_chunk unbind tensor_split:sections tensor_split:indices")
def split(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(2, 9), d.size()),
        "split_size": d.one([1, 2, 3]),
        "chunks": d.one([1, 2, 3]),
        "sections": d.one([1, 2, 3]),
        "indices": (1, 2),
        "dim": d.one([0, -1]),
    }


@recipe("hsplit vsplit dsplit hsplit:array vsplit:array dsplit:array hsplit:int vsplit:int dsplit:int")
def split_named(d: Draw) -> dict[str, Any]:
    return {"self": t(4, 4, 4), "sections": d.one([1, 2, 4]), "indices": (1, 2)}


@recipe("movedim moveaxis movedim:int moveaxis:int")
def movedim(d: Draw) -> dict[str, Any]:
    return {"self": t(2, 3, d.size()), "source": (0, 1), "destination": (1, 0)}


@recipe("movedim:int moveaxis:int swapaxes swapdims transpose")
def swap(d: Draw) -> dict[str, Any]:
    shape = d.sizes(2, 4)
    a, b = d.dim(shape), d.dim(shape)
    return {"self": t(*shape), "source": a, "destination": b, "dim0": a, "dim1": b, "axis0": a, "axis1": b}


@recipe("""
    t mT mH matrix_H adjoint linalg_diagonal diagonal tril triu fill_diagonal_ rot90 fliplr
    flipud
""")
def two_dims(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(2, 9), d.size(2, 9)),
        "A": t(d.size(), d.size()),
        "dims": (0, 1),
        "k": d.one([0, 1, 2, 3]),
        "dim1": 0,
        "dim2": 1,
        "offset": d.one([0, 1, -1]),
        "fweights": None,
        "aweights": None,
    }


@recipe("linalg_diagonal")
def linalg_diagonal(d: Draw) -> dict[str, Any]:
    return {"A": t(d.size(), d.size(), d.size()), "offset": 0, "dim1": -2, "dim2": -1}


@recipe("diag diagflat diag_embed vander combinations")
def vector(d: Draw) -> dict[str, Any]:
    return {
        "self": t(d.size(1, 7)),
        "x": t(d.size(1, 7)),
        "dim1": -2,
        "dim2": -1,
        "offset": d.one([0, 1, -1]),
        "N": d.one([None, 3]),
        "r": 2,
    }


@recipe("roll flip")
def roll(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    return {"self": t(*shape), "shifts": (d.one([0, 1, -1, 5]),), "dims": (d.dim(shape),)}


@recipe("repeat tile")
def repeat(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 2)
    times = tuple(d.one([0, 1, 2, 3]) for _ in range(len(shape) + d.one([0, 1])))
    return {"self": t(*shape), "repeats": times, "dims": times}


@recipe("squeeze squeeze:dim squeeze:dims unsqueeze")
def squeeze(d: Draw) -> dict[str, Any]:
    return {"self": t(1, d.size(), 1), "dim": d.one([0, 1, 2])}


@recipe("squeeze:dims")
def squeeze_dims(d: Draw) -> dict[str, Any]:
    return {"self": t(1, d.size(), 1), "dim": d.one([(0,), (0, 2), (1,)])}
