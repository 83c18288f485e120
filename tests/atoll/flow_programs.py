"""Random programs over a micro-batch, built op by op while they run, and what permuting its samples does."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from atoll.execute import Executor
from atoll.flow.value import Kind, Value, Vary
from atoll.flow.walk import Walked
from atoll.kernels import resolve
from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.opdag import Kind as OpKind
from atoll.ops import GETITEM
from atoll.program import StageProgram

BATCH = 4
Inputs = Mapping[str, Tensor]


def meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass
class Builder:
    """A program in the making: every op is run as it is added, so that shapes are real."""

    inputs: dict[str, Tensor]
    leaves: dict[LeafRef, Tensor]
    ops: list[OpNode] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def tensor(self, ref: OpRef | LeafRef) -> Tensor:
        if isinstance(ref, OpRef):
            found: Tensor = self.values[ref.op]
            return found
        return self.inputs[ref.name] if ref.source is Source.INPUT else self.leaves[ref]

    def add(self, target: str, *args: Arg, **kwargs: Arg) -> OpRef:
        """Run an op and note it; raises what torch raises."""
        value = resolve(target)(*map(self._real, args), **{k: self._real(v) for k, v in kwargs.items()})
        several = isinstance(value, tuple | list)
        outputs = tuple(meta_of(v) for v in (value if several else (value,)))
        name = f"n{len(self.ops)}"
        node = OpNode(name, OpKind.NON_PARAMETRIC, target, args, tuple(kwargs.items()), outputs, several)
        self.ops.append(node)
        self.values.append(value)
        return OpRef(len(self.ops) - 1)

    def item(self, of: OpRef, at: int) -> OpRef:
        return self.add(GETITEM, of, at)

    def program(self) -> StageProgram:
        def names(source: Source) -> tuple[str, ...]:
            return tuple(leaf.name for leaf in self.leaves if leaf.source is source)

        return StageProgram(
            0, 1, tuple(enumerate(self.ops)), frozenset(), (), (), tuple(self.inputs),
            names(Source.PARAMETER), names(Source.BUFFER), names(Source.CONSTANT), (), len(self.ops) - 1,
        )  # fmt: skip

    def _real(self, arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return [self._real(item) for item in arg]
        return self.tensor(arg) if isinstance(arg, OpRef | LeafRef) else arg


def started(seed: int) -> Builder:
    """Two inputs, floats [4, 3, 4] and classes [4], and leaves of likely shapes."""
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    inputs = {"x": made(BATCH, 3, 4), "y": torch.randint(0, 3, (BATCH,), generator=draw)}
    shapes: dict[str, tuple[int, ...]] = {
        "w44": (4, 4), "w4": (4,), "w34": (3, 4), "w134": (1, 3, 4), "w434": (4, 3, 4), "s": (),
        "w14": (1, 4), "w41": (4, 1), "k332": (3, 3, 2),
    }  # fmt: skip
    leaves = {LeafRef(Source.PARAMETER, name): made(*shape) for name, shape in shapes.items()}
    leaves[LeafRef(Source.BUFFER, "b4")] = made(4)
    leaves[LeafRef(Source.BUFFER, "b434")] = made(4, 3, 4)
    leaves[LeafRef(Source.CONSTANT, "i4")] = torch.tensor([2, 0, 1, 0])
    return Builder(inputs, leaves)


def grown(seed: int, steps: int) -> Builder:
    """A program of about ``steps`` ops drawn at random, what torch refuses left out."""
    builder, draw = started(seed), random.Random(seed)
    refs: list[OpRef | LeafRef] = list(builder.leaves)
    refs += [LeafRef(Source.INPUT, name) for name in builder.inputs] * 4
    for _ in range(steps):
        make = draw.choice(MENU)
        before = len(builder.ops)
        try:
            found = make(builder, draw, refs)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            del builder.ops[before:], builder.values[before:]
            continue
        if builder.values[found.op].numel() <= 4096:
            refs += [found] * 2  # rather what was just made
    return builder


# ---------------------------------------------------------------- the menu

Make = Callable[[Builder, random.Random, list[Any]], OpRef]


def _dim(draw: random.Random, tensor: Tensor) -> int:
    return draw.randrange(-tensor.ndim, tensor.ndim) if tensor.ndim else 0


def _some(draw: random.Random, builder: Builder, refs: list[Any], *, whole: bool = False) -> Any:
    """A reference to floats, or with ``whole`` to integers."""
    for _ in range(40):
        ref = draw.choice(refs[-8:] if draw.random() < 0.75 else refs)
        if builder.tensor(ref).is_floating_point() != whole and builder.tensor(ref).dtype != torch.bool:
            return ref
    raise ValueError("none found")


def _one(*targets: str) -> Make:
    def make(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
        return builder.add(draw.choice(targets), _some(draw, builder, refs))

    return make


def _two(*targets: str) -> Make:
    def make(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
        return builder.add(draw.choice(targets), _some(draw, builder, refs), _some(draw, builder, refs))

    return make


def _along(*targets: str) -> Make:
    def make(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
        ref = _some(draw, builder, refs)
        made = builder.add(draw.choice(targets), ref, _dim(draw, builder.tensor(ref)))
        if isinstance(builder.values[made.op], Tensor):
            return made
        pieces = len(builder.values[made.op])
        # Of sorted values not where they were: rounding decides among equal ones.
        return builder.item(made, 0 if pieces == 2 else draw.randrange(pieces))

    return make


def _reduce(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    ndim = builder.tensor(ref).ndim
    dims = tuple(draw.sample(range(ndim), draw.randint(1, ndim))) if ndim else ()
    target = draw.choice(
        ["sum.dim_IntList", "mean.dim", "amax.default", "logsumexp.default", "var.correction"]
    )
    keep = draw.random() < 0.5
    if target.startswith("var"):
        return builder.add(f"aten.{target}", ref, dims, correction=0, keepdim=keep)
    return builder.add(f"aten.{target}", ref, dims, keep)


def _reshape(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    left = builder.tensor(ref).numel()
    shape: list[int] = []
    while left > 1 and len(shape) < 3:
        shape.append(draw.choice([d for d in range(1, left + 1) if left % d == 0]))
        left //= shape[-1]
    return builder.add(draw.choice(["aten.reshape.default", "aten.view.default"]), ref, (*shape, left))


def _flatten(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    return builder.add("aten.flatten.using_ints", ref, draw.choice([0, 1]), draw.choice([1, 2, -1]))


def _permute(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    order = list(range(builder.tensor(ref).ndim))
    draw.shuffle(order)
    return builder.add("aten.permute.default", ref, tuple(order))


def _slice(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    dim = _dim(draw, builder.tensor(ref))
    size = builder.tensor(ref).shape[dim]
    at = draw.choice([0, 0, 1, draw.randrange(size), BATCH])
    return builder.add(
        "aten.slice.Tensor", ref, dim, at, draw.choice([size, at + 1, BATCH]), draw.choice([1, 1, 2])
    )


def _select(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    return builder.add("aten.select.int", ref, _dim(draw, builder.tensor(ref)), 0)


def _cat(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    first, second = _some(draw, builder, refs), _some(draw, builder, refs)
    target = draw.choice(["aten.cat.default", "aten.stack.default"])
    return builder.add(target, (first, second), _dim(draw, builder.tensor(first)))


def _expand(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    shape = [n if n > 1 else draw.choice([1, 4]) for n in builder.tensor(ref).shape]
    return builder.add("aten.expand.default", ref, (*([draw.choice([1, 4])] * draw.randint(0, 1)), *shape))


def _repeat(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    times = [draw.choice([1, 1, 2]) for _ in range(builder.tensor(ref).ndim + draw.randint(0, 1))]
    return builder.add("aten.repeat.default", ref, tuple(times))


def _chunk(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    made = builder.add(
        draw.choice(["aten.chunk.default", "aten.split.Tensor"]), ref, 2, _dim(draw, builder.tensor(ref))
    )
    return builder.item(made, draw.randrange(len(builder.values[made.op])))


def _norm(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    size = draw.randint(1, builder.tensor(ref).ndim)
    return builder.add("aten.layer_norm.default", ref, tuple(builder.tensor(ref).shape[-size:]))


def _group_norm(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    return builder.add("aten.group_norm.default", _some(draw, builder, refs), 1)


def _batch_norm(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    return builder.add(
        "aten.batch_norm.default", _some(draw, builder, refs), None, None, None, None, True, 0.1, 1e-5, False
    )


def _conv(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    weight = LeafRef(Source.PARAMETER, "k332")
    return builder.add("aten.conv1d.default", _some(draw, builder, refs), weight)


def _pool(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    return builder.add("aten.max_pool1d.default", _some(draw, builder, refs), (2,))


def _linear(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    bias = (_some(draw, builder, refs),) if draw.random() < 0.3 else ()
    return builder.add("aten.linear.default", _some(draw, builder, refs), _some(draw, builder, refs), *bias)


def _product(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    one, other = _some(draw, builder, refs), _some(draw, builder, refs)
    target = draw.choice(["aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default"])
    return builder.add(target, one, other)


def _with_itself(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    one = _some(draw, builder, refs)
    return builder.add("aten.matmul.default", one, builder.add("aten.t.default", one))


def _einsum(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    equation = draw.choice(
        ["ab,ac->bc", "ab,cb->ac", "abc,abd->acd", "abc,ac->ab", "ab,ab->b", "abc,dbc->ad"]
    )
    return builder.add(
        "aten.einsum.default", equation, (_some(draw, builder, refs), _some(draw, builder, refs))
    )


def _compared(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    column = builder.add("aten.unsqueeze.default", ref, 1)
    return builder.add("aten.sub.Tensor", column, builder.add("aten.unsqueeze.default", ref, 0))


def _masked(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    eye = builder.add("aten.eye.default", builder.tensor(ref).shape[0], dtype=torch.bool)  # type: ignore[arg-type]
    if draw.random() < 0.5:
        eye = builder.add("aten.bitwise_not.default", eye)
    return builder.add("aten.masked_fill.Scalar", ref, eye, -2.0)


def _triangle(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    return builder.add(draw.choice(["aten.tril.default", "aten.triu.default"]), _some(draw, builder, refs))


def _lookup(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    index = _some(draw, builder, refs, whole=True)
    ref, kind = _some(draw, builder, refs), draw.randrange(4)
    dim = draw.randrange(max(builder.tensor(ref).ndim, 1))
    if kind == 0:
        return builder.add("aten.index.Tensor", ref, (*([None] * dim), index))
    if kind == 1:
        return builder.add("aten.index_select.default", ref, dim, index)
    if kind == 2:
        return builder.add("aten.embedding.default", ref, index)
    counting = builder.add("aten.arange.default", builder.tensor(ref).shape[0])
    return builder.add("aten.index.Tensor", ref, (counting, index))


def _gather(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref, index = _some(draw, builder, refs), _some(draw, builder, refs, whole=True)
    while builder.tensor(index).ndim < builder.tensor(ref).ndim:
        index = builder.add("aten.unsqueeze.default", index, draw.choice([0, -1]))
    if draw.random() < 0.5:
        index = builder.add("aten.expand.default", index, tuple(builder.tensor(ref).shape))
    dim = _dim(draw, builder.tensor(ref))
    if draw.random() < 0.5:
        return builder.add("aten.gather.default", ref, dim, index)
    into = _some(draw, builder, refs)
    target = draw.choice(["aten.scatter_add.default", "aten.scatter.src"])
    return builder.add(target, into, dim, index, ref)


def _index_add(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    into, ref = _some(draw, builder, refs), _some(draw, builder, refs)
    return builder.add(
        "aten.index_add.default", into, draw.choice([0, 1]), _some(draw, builder, refs, whole=True), ref
    )


def _classes(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    kind = draw.randrange(3)
    if kind == 0:
        return builder.add("aten.one_hot.default", _some(draw, builder, refs, whole=True), 4)
    if kind == 1:
        return builder.add("aten.arange.default", 4)
    ref = _some(draw, builder, refs, whole=True)
    return builder.add("aten.to.dtype", ref, torch.float64)  # type: ignore[arg-type]


def _created(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    target = draw.choice(["aten.zeros_like.default", "aten.ones_like.default"])
    return builder.add(target, ref)


def _written(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    """A write in place into something of this program's own, perhaps through a view."""
    own = [ref for ref in refs if isinstance(ref, OpRef)]
    into = draw.choice(own)
    target = draw.choice(["aten.add_.Tensor", "aten.copy_.default", "aten.mul_.Tensor"])
    return builder.add(target, into, _some(draw, builder, refs))


def _slice_scatter(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    dim = _dim(draw, builder.tensor(ref))
    if draw.random() < 0.5:
        return builder.add("aten.select_scatter.default", ref, _some(draw, builder, refs), dim, 0)
    return builder.add("aten.slice_scatter.default", ref, _some(draw, builder, refs), dim, 0, 1)


def _loss(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    how = draw.choice([0, 1, 2])
    if draw.random() < 0.5:
        target = _some(draw, builder, refs, whole=True)
        return builder.add("aten.cross_entropy_loss.default", _some(draw, builder, refs), target, None, how)
    return builder.add("aten.mse_loss.default", _some(draw, builder, refs), _some(draw, builder, refs), how)


def _attention(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    ref = _some(draw, builder, refs)
    other = ref if draw.random() < 0.5 else _some(draw, builder, refs)
    return builder.add("aten.scaled_dot_product_attention.default", ref, ref, other)


def _pad(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    pad = draw.choice([(1, 0), (0, 0, 1, 1), (0, 0, 0, 0, 1, 0)])
    return builder.add("aten.constant_pad_nd.default", _some(draw, builder, refs), pad)


def _alike(builder: Builder, draw: random.Random, refs: list[Any]) -> OpRef:
    one, other = _some(draw, builder, refs), LeafRef(Source.PARAMETER, "w134")
    return builder.add("aten.cosine_similarity.default", one, other, draw.choice([0, 1, -1]))


MENU: tuple[Make, ...] = (
    _one("aten.relu.default", "aten.tanh.default", "aten.detach.default", "aten.clone.default"),
    _one("aten.t.default", "aten.squeeze.default", "aten.mean.default", "aten.sum.default"),
    _two("aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor", "aten.maximum.default"),
    _two("aten.add.Tensor", "aten.mul.Tensor"),
    _along("aten.softmax.int", "aten.cumsum.default", "aten.sort.default", "aten.unsqueeze.default"),
    _along("aten.unsqueeze.default", "aten.unbind.int", "aten.max.dim", "aten.squeeze.dim"),
    _along("aten.prod.dim_int"),
    *(_reduce, _reduce, _reshape, _reshape, _reshape, _flatten, _permute, _permute, _slice, _slice, _select),
    *(_cat, _cat, _expand, _repeat, _chunk, _norm, _group_norm, _batch_norm, _conv, _pool, _linear),
    *(_product, _product, _with_itself, _einsum, _compared, _masked, _triangle, _lookup, _lookup, _gather),
    *(_gather, _index_add, _classes, _classes, _created, _written, _written, _slice_scatter, _loss),
    *(_attention, _pad, _alike),
)


# ---------------------------------------------------------------- what permuting samples does


def run(builder: Builder, inputs: Inputs) -> list[Any]:
    """The final value of every op."""
    executor = Executor(builder.program(), "cpu", seed=None, differentiate=False)
    executor.load({leaf.name: tensor.clone() for leaf, tensor in builder.leaves.items()})
    found: list[Any] = []
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    executor.forward(0, 0, given, {}, lambda position, value: found.append(value))
    return found


def permuted_rows(value: Value, order: list[int]) -> list[int]:
    """Where each entry of the samples' dim comes from once the samples stand in ``order``."""
    found: list[int] = []
    ends = accumulate((n for n, _ in value.parts), initial=0)
    for (length, real), begin in zip(value.parts, ends, strict=False):
        for at in range(length):
            if not real:
                found.append(begin + at)
                continue
            per = length // (value.before * BATCH)
            over, rest = divmod(at, BATCH * per)
            sample, within = divmod(rest, per)
            found.append(begin + (over * BATCH + order[sample]) * per + within)
    return found


def violations(builder: Builder, walked: Walked, order: list[int], seed: int) -> list[str]:
    """Where a value is not what the walk says of it."""
    same = run(builder, builder.inputs)
    mixed = run(builder, {name: tensor[order] for name, tensor in builder.inputs.items()})
    other = run(builder, started(seed + 1_000_000).inputs)
    found = []
    for position, node in enumerate(builder.ops):
        said = walked.values[OpRef(position)]
        if isinstance(said, tuple):
            continue
        one, two, three = (values[position] for values in (same, mixed, other))
        wrong = _wrong(said, one, two, three, order)
        if wrong:
            found.append(f"op {position} {node.target}: {wrong}; {said}")
    return found


def _wrong(said: Value, one: Tensor, two: Tensor, three: Tensor, order: list[int]) -> str:
    if said.shape != tuple(one.shape):
        return f"shape {tuple(one.shape)}"
    if said.kind is Kind.CLEAN and not _equal(one, three):
        return "depends on the inputs"
    if said.plain and not _equal(one, two):
        return "depends on the order of samples"
    for dim, vary in enumerate(said.varies):
        if (
            vary is Vary.SAME
            and said.shape[dim] > 1
            and not _equal(one, one.narrow(dim, 0, 1).expand_as(one))
        ):
            return f"varies along dim {dim}"
    if said.kind is Kind.ROWS and not _equal(
        one.index_select(said.dim, torch.tensor(permuted_rows(said, order))), two
    ):
        return "rows do not follow their samples"
    if said.kind is Kind.PAIRS:
        at = torch.tensor(permuted_rows(said, order))
        if not _equal(one[at][:, at], two):
            return "pairs do not follow their samples"
    return ""


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-6, atol=1e-6, equal_nan=True)
