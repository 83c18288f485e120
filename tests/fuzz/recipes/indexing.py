"""Ops that look values up by others."""

from __future__ import annotations

from typing import Any

from tests.fuzz.case import Tensorlike
from tests.fuzz.recipes.base import Draw, ids, recipe, t


@recipe("embedding")
def embedding(d: Draw) -> dict[str, Any]:
    rows = d.size()
    return {
        "weight": t(rows, d.size()),
        "indices": ids(rows, *d.sizes(1, 2), dtype=d.one(["int64", "int32"])),
        "padding_idx": d.one([-1, 0]),
        "sparse": False,
    }


@recipe("embedding_bag embedding_bag:padding_idx")
def embedding_bag(d: Draw) -> dict[str, Any]:
    rows, n = d.size(), d.size()
    return {
        "weight": t(rows, d.size()),
        "indices": ids(rows, n),
        "offsets": Tensorlike((d.one([1, 1, 2]),), "int64", "zero"),
        "sparse": False,
        "mode": d.one([0, 1, 2]),
        "per_sample_weights": None,
        "include_last_offset": False,
        "padding_idx": None,
        "scale_grad_by_freq": d.maybe(),
    }


@recipe("gather scatter scatter_add scatter_reduce scatter:value scatter:value_reduce")
def gather(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    dim = d.dim(shape)
    index = tuple(d.rng.randint(1, s) for s in shape)
    return {
        "self": t(*shape),
        "dim": dim,
        "index": ids(shape[dim], *index),
        "src": t(*index),
        "sparse_grad": False,
        "reduce": d.one(["sum", "prod", "mean", "amax", "amin"]),
        "value": 2.0,
    }


@recipe("scatter:reduce scatter:value_reduce")
def scatter_reduced(d: Draw) -> dict[str, Any]:
    return {**gather(d), "reduce": d.one(["add", "multiply"])}


@recipe("index_select index_add index_copy index_reduce index_fill")
def index_along(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    dim, n = d.dim(shape), d.size()
    source = list(shape)
    source[dim] = n
    return {
        "self": t(*shape),
        "dim": dim,
        "index": ids(shape[dim], n, dtype=d.one(["int64", "int32"])),
        "source": t(*source),
        "reduce": d.one(["prod", "mean", "amax", "amin"]),
        "value": 1.0,
        "alpha": 1,
    }


@recipe("index_fill:int_Tensor")
def index_fill(d: Draw) -> dict[str, Any]:
    return {**index_along(d), "value": t()}


@recipe("index index_put")
def index(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    n = d.size()
    listed = tuple(ids(size, n) for size in shape[: d.rng.randint(1, len(shape))])
    return {"self": t(*shape), "indices": listed, "values": t(*d.one([(), (n, *shape[len(listed) :])]))}


@recipe("take")
def take(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 2)
    return {"self": t(*shape), "index": ids(shape[0], *d.sizes(1, 2))}


@recipe("take_along_dim")
def take_along(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 2)
    return {"self": t(*shape), "indices": ids(shape[0], d.size(), *shape[1:]), "dim": 0}


@recipe("one_hot")
def one_hot(d: Draw) -> dict[str, Any]:
    c = d.size(1, 9)
    return {"self": ids(c, *d.sizes(1, 2)), "num_classes": c}


@recipe("""
    masked_fill masked_fill:Tensor masked_scatter where where:self where:Scalar
    where:ScalarOther where:ScalarSelf
""")
def masked(d: Draw) -> dict[str, Any]:
    shape = d.sizes(1, 3)
    mask = Tensorlike(shape, "bool")
    return {
        "self": t(*shape),
        "mask": mask,
        "condition": mask,
        "other": t(*shape),
        "source": t(*shape),
        "value": 1.0,
    }


@recipe("where:Scalar where:ScalarSelf")
def where_scalar(d: Draw) -> dict[str, Any]:
    return {**masked(d), "self": 1.0}


@recipe("where:ScalarOther")
def where_other(d: Draw) -> dict[str, Any]:
    return {**masked(d), "other": 1.0}


@recipe("masked_fill:Tensor")
def masked_tensor(d: Draw) -> dict[str, Any]:
    return {**masked(d), "value": t()}


@recipe("select_scatter diagonal_scatter slice_scatter")
def select_scatter(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n, m), "src": t(m), "dim": 0, "index": 0}


@recipe("slice_scatter")
def slice_scatter(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {"self": t(n, m), "src": t(n, m), "dim": 0, "start": None, "end": None, "step": 1}


@recipe("diagonal_scatter")
def diagonal_scatter(d: Draw) -> dict[str, Any]:
    n = d.size()
    return {"self": t(n, n), "src": t(n), "offset": 0, "dim1": 0, "dim2": 1}


@recipe("searchsorted bucketize searchsorted:Scalar bucketize:Scalar")
def searchsorted(d: Draw) -> dict[str, Any]:
    n = d.size()
    return {
        "sorted_sequence": t(n),
        "boundaries": t(n),
        "self": t(*d.sizes(1, 2)),
        "sorter": d.one([None, None, ids(n, n)]),
        "side": None,
        "right": d.maybe(),
    }


@recipe("searchsorted:Scalar bucketize:Scalar")
def search_one(d: Draw) -> dict[str, Any]:
    return {**searchsorted(d), "self": 0.5}


@recipe("repeat_interleave repeat_interleave:self_Tensor")
def repeat_interleave(d: Draw) -> dict[str, Any]:
    n = d.size(1, 5)
    return {"self": t(n), "repeats": Tensorlike((n,), "int64", "one"), "dim": 0, "output_size": n}


@recipe("repeat_interleave:self_int")
def repeat_interleave_int(d: Draw) -> dict[str, Any]:
    return {
        "self": t(*d.sizes(1, 2)),
        "repeats": d.one([1, 2, 3]),
        "dim": d.one([None, 0]),
        "output_size": None,
    }


@recipe("multinomial")
def multinomial(d: Draw) -> dict[str, Any]:
    n, m = d.size(), d.size()
    return {
        "self": t(n, m, fill=d.one(["unit", "extreme"])),
        "num_samples": d.rng.randint(1, m),
        "replacement": d.maybe(),
    }


@recipe("isin isin:Tensor_Scalar isin:Scalar_Tensor")
def isin(d: Draw) -> dict[str, Any]:
    return {"elements": t(*d.sizes(1, 2)), "test_elements": t(d.size()), "test_element": 1.0, "element": 1.0}
