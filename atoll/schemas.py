"""Arguments of an op, the memory that it shares and writes, and its random draws, read from torch's op
schemas.

From short lists where the schemas are silent; errs towards "shares" and "writes".
"""

from __future__ import annotations

from atoll.opdag import Arg, LeafRef, OpNode, OpRef
from atoll.ops import ALLOWED, GETITEM, overload, schema

Ref = OpRef | LeafRef

# Ops that may return an argument, or a view of it, although their schema does not say so.
HIDDEN_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "alpha_dropout.default",
        "atleast_1d.default",
        "atleast_1d.Sequence",
        "atleast_2d.default",
        "atleast_2d.Sequence",
        "atleast_3d.default",
        "atleast_3d.Sequence",
        "broadcast_tensors.default",
        "cartesian_prod.default",
        "chain_matmul.default",
        "conj_physical.default",
        "dropout.default",
        "einsum.default",
        "feature_alpha_dropout.default",
        "feature_dropout.default",
        "meshgrid.default",
        "meshgrid.indexing",
        "sum_to_size.default",
        "type_as.default",
    )
)
_DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def is_random(node: OpNode) -> bool:
    """Return whether the op draws from the generator; for ops with a hidden dropout its rate decides."""
    if node.target == GETITEM or node.target not in ALLOWED:
        return False
    given = named_arguments(node)
    name = node.target.split(".")[1].rstrip("_")
    if name in _DROPOUTS:
        return bool(given.get("train")) and given.get("p") != 0
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p"))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(given.get("train")) and bool(given.get("dropout"))
    if name == "rrelu":
        return bool(given.get("training"))
    if name == "native_dropout":
        return given.get("train") is not False and given.get("p") != 0
    import torch

    return torch.Tag.nondeterministic_seeded in overload(node.target).tags


def aliased_refs(node: OpNode) -> list[Ref]:
    """References whose memory the result may share."""
    if node.target == GETITEM:
        return references(node.args[:1])
    if node.target not in ALLOWED:
        return []
    given = named_arguments(node)
    if node.target in HIDDEN_VIEWS:
        drawn = node.target.split(".")[1] in _DROPOUTS and is_random(node)
        if node.target == "aten.type_as.default":
            return references((given.get("self"),))
        return [] if drawn else references(tuple(given.values()))
    declared = schema(node.target)
    if all(r.alias_info is None for r in declared.returns):
        return []
    return references(
        tuple(given[a.name] for a in declared.arguments if a.alias_info is not None and a.name in given)
    )


def written_refs(node: OpNode) -> list[Ref]:
    """References that the op writes in place, those that its schema hides included."""
    if node.target == GETITEM or node.target not in ALLOWED:
        return []
    given = named_arguments(node)
    name = node.target.split(".")[1]
    if name in ("batch_norm", "instance_norm"):
        training = given.get("training" if name == "batch_norm" else "use_input_stats")
        return references((given.get("running_mean"), given.get("running_var"))) if training else []
    declared = schema(node.target)
    if not declared.is_mutable:
        return []
    return references(
        tuple(
            given[a.name]
            for a in declared.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        )
    )


def named_arguments(node: OpNode) -> dict[str, Arg]:
    """Argument name -> value, as far as they are given."""
    names = [argument.name for argument in schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}


def references(args: tuple[Arg, ...]) -> list[Ref]:
    """All references within ``args``, nested ones included, in order."""
    found: list[Ref] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += references(arg)
        elif isinstance(arg, OpRef | LeafRef):
            found.append(arg)
    return found
