"""Graphs of transformers for the planner alone: an attention, an up- and a down-projection each layer.

No weights and no capture: FLOPs, bytes and shapes are those of the three matrix products and of attention.
The residual passes beside the wide activation, as in the model.
"""

from __future__ import annotations

from atoll.opdag import DTYPE_BYTES, Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta

UNITS = 3  # of a layer


def transformer(
    width: int, layers: int, tokens: int, *, context: int = 0, vocabulary: int = 0, dtype: str = "float32"
) -> OpDag:
    """Return the graph of a micro-batch of ``tokens`` tokens whose attention sees ``context`` (0: all), with
    an embedding and an untied head where there is a ``vocabulary``. Activations are of ``dtype``."""
    ops: list[OpNode] = []
    parameters: dict[str, StateMeta] = {}
    n_bytes = DTYPE_BYTES[dtype]

    def add(inputs: tuple[int, ...], shape: tuple[int, int], wide: int, more_flops: int, saved: int) -> int:
        """An op with a matrix of this shape, whose result has ``wide`` numbers a token."""
        name, out = f"unit{len(ops)}", TensorMeta((tokens, wide), dtype)
        parameters[name] = StateMeta(TensorMeta(shape, "float32"), requires_grad=True)
        leaf = LeafRef(Source.PARAMETER, name)
        reads = tuple(OpRef(i) for i in inputs) or (LeafRef(Source.INPUT, "tokens"),)
        flops = 2 * tokens * shape[0] * shape[1] + more_flops
        moved = 4 * shape[0] * shape[1] + out.nbytes
        ops.append(
            OpNode(
                name, Kind.PARAMETRIC, "aten.linear.default", (*reads, leaf), (), (out,), requires_grad=True,
                flops_forward=flops, flops_backward=2 * flops, bytes_moved=moved,
                bytes_saved=saved * tokens * n_bytes, module_path=f"layer{len(ops) // UNITS}",
            )
        )  # fmt: skip
        return len(ops) - 1

    inputs: tuple[int, ...] = ()
    if vocabulary:
        table = add((), (vocabulary, width), width, 0, 0)
        ops[table] = OpNode(
            "embedding", Kind.PARAMETRIC, "aten.embedding.default",
            (LeafRef(Source.PARAMETER, "unit0"), LeafRef(Source.INPUT, "tokens")), (),
            ops[table].outputs, requires_grad=True, bytes_moved=2 * ops[table].outputs[0].nbytes,
        )  # fmt: skip
        inputs = (table,)
    for _ in range(layers):
        # Queries, keys, values and the projection; then what attention itself computes and keeps.
        mixed = add(inputs, (width, 4 * width), width, 4 * tokens * (context or tokens) * width, 6 * width)
        wide = add((mixed,), (width, 4 * width), 4 * width, 0, 5 * width)
        inputs = (add((wide, mixed), (4 * width, width), width, 0, 4 * width),)
    if vocabulary:
        inputs = (add(inputs, (width, vocabulary), vocabulary, 0, 0),)
    loss = TensorMeta((), "float32")
    ops.append(
        OpNode("loss", Kind.LOSS, "aten.mean.default", (OpRef(inputs[0]),), (), (loss,), requires_grad=True)
    )
    return OpDag(
        ops=tuple(ops),
        inputs={"tokens": TensorMeta((tokens,), "int64")},
        parameters=parameters,
        buffers={},
        constants={},
        loss=len(ops) - 1,
    )
