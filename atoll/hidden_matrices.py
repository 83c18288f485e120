"""Matrices of a graph that lie between its embeddings and its heads: what Muon steps. Pure.

A hidden matrix is a parameter of two dims that products alone read: linear, addmm, mm and matmul, of it or
its transpose. Behind at least one of them another layer stands on the way to the loss. So an embedding is
none, tied to a head or not, nor a head, which no layer follows, nor a kernel of a convolution, which has
more dims, nor the weights of a recurrent op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.opdag import LeafRef, OpDag, OpRef, Source, arguments, leaf_refs, op_refs

if TYPE_CHECKING:
    from atoll.opdag import Arg, OpNode

_WEIGHT_AT = {
    "aten.linear.default": (1,),
    "aten.addmm.default": (1, 2),
    "aten.mm.default": (0, 1),
    "aten.matmul.default": (0, 1),
}
"""Arguments of a product that are its matrices; of a linear the first is the layer's input."""
_SAME_MATRIX = frozenset(
    f"aten.{name}"
    for name in (
        *("t.default", "numpy_T.default", "mT.default", "transpose.int", "permute.default", "to.dtype"),
        *("alias.default", "detach.default", "contiguous.default", "clone.default", "_to_copy.default"),
    )
)  # fmt: skip
_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "conv_tbc",
)  # fmt: skip
_RECURRENT = (
    "lstm",
    "gru",
    "rnn_relu",
    "rnn_tanh",
    "lstm_cell",
    "gru_cell",
    "rnn_relu_cell",
    "rnn_tanh_cell",
)
_OTHER_LAYERS = frozenset({*_CONVOLUTIONS, *_RECURRENT, "bilinear", "einsum", "bmm", "baddbmm"})


def hidden_matrices(dag: OpDag) -> frozenset[str]:
    """Return the names of the hidden matrices of a training graph."""
    matrices = {name for name, state in dag.parameters.items() if len(state.meta.shape) == 2}
    stands_for: dict[int, str] = {}  # op -> the parameter that its value is, transposed or converted
    products: dict[str, list[int]] = {}
    layers = [_is_other_layer(node) for node in dag.ops]
    for op, node in enumerate(dag.ops):
        for at, arg in enumerate(node.args):
            name = _parameter(arg, stands_for)
            if not name:
                continue
            if node.target in _SAME_MATRIX and at == 0:
                stands_for[op] = name
            elif at in _WEIGHT_AT.get(node.target, ()):
                products.setdefault(name, []).append(op)
                layers[op] = True
        matrices -= _read_otherwise(node, stands_for)
    followed = _followed(dag, layers)
    return frozenset(n for n, ops in products.items() if n in matrices and any(followed[op] for op in ops))


def _parameter(arg: Arg, stands_for: dict[int, str]) -> str:
    """Return the name of the parameter that an argument is, "" where it is none."""
    if isinstance(arg, LeafRef):
        return arg.name if arg.source is Source.PARAMETER else ""
    return stands_for.get(arg.op, "") if isinstance(arg, OpRef) else ""


def _read_otherwise(node: OpNode, stands_for: dict[int, str]) -> set[str]:
    """Return the parameters that an op reads as something else than a product's matrix."""
    places = (0,) if node.target in _SAME_MATRIX else _WEIGHT_AT.get(node.target, ())
    taken = [name for at in places if at < len(node.args) and (name := _parameter(node.args[at], stands_for))]
    read = [name for arg in arguments(node) if (name := _parameter(arg, stands_for))]
    return {name for name in read if read.count(name) > taken.count(name)}


def _is_other_layer(node: OpNode) -> bool:
    """Return whether an op is a layer with weights of another kind than a matrix."""
    _, name, *_ = (*node.target.split("."), "", "")
    return name in _OTHER_LAYERS and any(leaf.source is Source.PARAMETER for leaf in leaf_refs(node))


def _followed(dag: OpDag, layers: list[bool]) -> list[bool]:
    """[ops] whether a layer reads what an op gives, or what comes of it."""
    found = [False] * len(dag.ops)
    for op in reversed(range(len(dag.ops))):
        if layers[op] or found[op]:
            for ref in op_refs(dag.ops[op]):
                found[ref] = True
    return found
