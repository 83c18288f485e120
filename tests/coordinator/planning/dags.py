"""Synthetic OpDags for planner tests: chains with skips, blocks, tied and large parameters."""

from __future__ import annotations

import random

from atoll.opdag import Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta


def op(
    index: int,
    inputs: tuple[int, ...],
    *,
    parameter: str = "",
    elements: int = 1024,
    flops: int = 10_000_000,
    saved: int = 4096,
    path: str = "",
    kind: Kind | None = None,
    leaf: str = "",
) -> OpNode:
    """A node that reads ops ``inputs`` and gives ``elements`` fp32 values."""
    args: list[OpRef | LeafRef] = [OpRef(i) for i in inputs]
    if leaf:
        args.append(LeafRef(Source.INPUT, leaf))
    if parameter:
        args.append(LeafRef(Source.PARAMETER, parameter))
    return OpNode(
        name=f"op{index}",
        kind=kind or (Kind.PARAMETRIC if parameter else Kind.NON_PARAMETRIC),
        target="aten.linear.default" if parameter else "aten.add.Tensor",
        args=tuple(args),
        kwargs=(),
        outputs=(TensorMeta((elements,), "float32"),),
        requires_grad=True,
        flops_forward=flops,
        flops_backward=2 * flops,
        bytes_moved=8 * elements,
        bytes_saved=saved,
        module_path=path,
    )


def chain_dag(
    seed: int,
    n_ops: int,
    *,
    skips: float = 0.1,
    max_elements: int = 65536,
    max_flops: int = 100_000_000,
    parameter_elements: int = 4096,
    tied: bool = False,
) -> OpDag:
    """A chain of ``n_ops`` random ops; a share ``skips`` of them also reads an earlier op.

    With ``tied``, the first and the last parametric op share a parameter.
    """
    draw = random.Random(seed)
    parameters: dict[str, StateMeta] = {}
    ops = []
    for i in range(n_ops):
        inputs = [i - 1] if i else []
        if i > 2 and draw.random() < skips:
            inputs.append(draw.randrange(max(0, i - 12), i - 1))
        parameter = ""
        last = i == n_ops - 1
        if i == 0 or (not last and draw.random() < 0.4) or (tied and i == n_ops - 2):
            parameter = "p0" if tied and i == n_ops - 2 else f"p{i}"
            meta = TensorMeta((draw.randrange(1, parameter_elements),), "float32")
            parameters.setdefault(parameter, StateMeta(meta, requires_grad=True))
        ops.append(
            op(
                i,
                tuple(dict.fromkeys(inputs)),
                parameter=parameter,
                elements=1 if last else draw.randrange(64, max_elements),
                flops=draw.randrange(max_flops // 10, max_flops),
                saved=draw.randrange(256, 4 * max_elements),
                path=f"blocks.{i * 8 // n_ops}",
                kind=Kind.LOSS if last else None,
                leaf="tokens" if i == 0 else "",
            )
        )
    return OpDag(
        ops=tuple(ops),
        inputs={"tokens": TensorMeta((8,), "int64")},
        parameters=parameters,
        buffers={},
        constants={},
        loss=n_ops - 1,
    )


def gpt_like(layers: int = 4, d: int = 256, tokens: int = 512, vocab: int = 256, tied: bool = True) -> OpDag:
    """Embedding, ``layers`` blocks of attention and MLP with two residual skips each, head, loss.

    ``tokens`` is batch times sequence length of a micro-batch; sizes are those of a GPT.
    """
    ops: list[OpNode] = []
    parameters: dict[str, StateMeta] = {}

    def add(
        inputs: tuple[int, ...],
        weight: int = 0,
        name: str = "",
        width: int = d,
        path: str = "",
        leaf: str = "",
    ) -> int:
        i = len(ops)
        if weight:
            parameters.setdefault(name, StateMeta(TensorMeta((weight,), "float32"), requires_grad=True))
        ops.append(
            op(
                i,
                inputs,
                parameter=name,
                elements=tokens * width,
                flops=2 * tokens * weight if weight > 4 * d else tokens * width,
                saved=4 * tokens * width,
                path=path,
                leaf=leaf,
            )
        )
        return i

    x = add((), vocab * d, "wte", path="wte", leaf="tokens")
    for layer in range(layers):
        path = f"h.{layer}"
        normed = add((x,), 2 * d, f"{path}.ln1", path=path)
        qkv = add((normed,), 3 * d * d, f"{path}.qkv", 3 * d, path)
        q, k, v = (add((qkv,), path=path) for _ in range(3))
        mixed = add((q, k, v), path=path)
        x = add((x, add((mixed,), d * d, f"{path}.out", path=path)), path=path)
        normed = add((x,), 2 * d, f"{path}.ln2", path=path)
        wide = add((add((normed,), 4 * d * d, f"{path}.fc1", 4 * d, path),), width=4 * d, path=path)
        x = add((x, add((wide,), 4 * d * d, f"{path}.fc2", path=path)), path=path)
    x = add((x,), 2 * d, "lnf", path="lnf")
    logits = add((x,), vocab * d, "wte" if tied else "head", vocab, "head")
    last = len(ops)
    ops.append(
        op(last, (logits,), elements=1, flops=tokens * vocab, saved=4 * tokens * vocab, kind=Kind.LOSS)
    )
    return OpDag(
        ops=tuple(ops),
        inputs={"tokens": TensorMeta((tokens,), "int64")},
        parameters=parameters,
        buffers={},
        constants={},
        loss=last,
    )
