"""What an op makes of values that are split: by target, the layouts it wants and gives. Pure.

A rule looks at the arguments as they lie and answers with a ``Choice``, or with None where the op needs whole
values. A rule need not know why a value is split: whatever it answers computes the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from atoll.mesh.layout import Kernel, Layout, Lent, Parts, Split
from atoll.opdag import DTYPE_BYTES, Arg, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.ops import GETITEM, GROUPED, POINTWISE

Path = tuple[int | str, ...]
MEAN, SUM = 1, 2  # torch's numbers of a loss's reduction
RINGS = (Kernel.RING, Kernel.RING_CAUSAL)


@dataclass(frozen=True)
class Choice:
    """How an op runs on each process: ``wants`` by the path of an argument (whole unless named), the layout
    of all results, other literals, and whether results are summed over the processes."""

    out: Layout
    wants: Mapping[Path, Split | Parts | Lent] = field(default_factory=dict)
    args: tuple[Arg, ...] | None = None
    sums: bool = False
    kernel: Kernel | None = None
    keeps: bool = False  # results do not depend on values: arguments stay as they lie


@dataclass(frozen=True)
class Seen:
    """A node with its arguments as they lie. ``column``: how the weights of a product are to be split;
    ``lends``: the op's result goes to experts alone; ``rounds``: keys and values go round where they can."""

    node: OpNode
    size: int
    metas: Callable[[OpRef | LeafRef], TensorMeta]
    layouts: Callable[[OpRef | LeafRef], Layout]
    column: Split | None = None
    lends: bool = False
    rounds: bool = False

    @property
    def out(self) -> tuple[int, ...]:
        return self.node.outputs[0].shape

    def arg(self, at: int, name: str = "", default: Arg = None) -> Arg:
        if at < len(self.node.args):
            return self.node.args[at]
        return dict(self.node.kwargs).get(name, default)

    def shape(self, at: int) -> tuple[int, ...]:
        arg = self.arg(at)
        return self.metas(arg).shape if isinstance(arg, OpRef | LeafRef) else ()

    def layout(self, at: int) -> Layout:
        arg = self.arg(at)
        return self.layouts(arg) if isinstance(arg, OpRef | LeafRef) else None

    def split(self, at: int) -> Split | None:
        found = self.layout(at)
        return found if isinstance(found, Split) else None

    def parameter(self, at: int) -> bool:
        arg = self.arg(at)
        return isinstance(arg, LeafRef) and arg.source is Source.PARAMETER

    def tensors(self) -> Iterator[tuple[Path, OpRef | LeafRef]]:
        """References with their paths."""
        yield from references(self.node)

    def integer(self, at: int, name: str = "", default: int = 0) -> int:
        found = self.arg(at, name, default)
        return found if isinstance(found, int) else default


def references(node: OpNode) -> Iterator[tuple[Path, OpRef | LeafRef]]:
    """Yield a node's references with their paths: positions of positional arguments, names of others."""

    def walk(path: Path, arg: Arg) -> Iterator[tuple[Path, OpRef | LeafRef]]:
        if isinstance(arg, tuple):
            for at, item in enumerate(arg):
                yield from walk((*path, at), item)
        elif isinstance(arg, OpRef | LeafRef):
            yield path, arg

    for at, arg in enumerate(node.args):
        yield from walk((at,), arg)
    for name, arg in node.kwargs:
        yield from walk((name,), arg)


def choose(seen: Seen) -> Choice | None:
    """Return how an op with split arguments, or weights to be split, runs; None: on whole values alone."""
    if seen.node.target == GROUPED:
        return _grouped(seen)
    layouts = [seen.layouts(ref) for _, ref in seen.tensors()]
    if seen.lends or any(isinstance(each, Parts | Lent) for each in layouts):
        if (found := parts_rule(seen)) is not None:
            return found
        if seen.column is None and not any(isinstance(each, Split) for each in layouts):
            return None
    rule = _RULES.get(seen.node.target)
    return None if rule is None else rule(seen)


def _pointwise(s: Seen) -> Choice | None:
    """Same place of every argument, broadcast: a split dimension stays where it is."""
    if s.node.random:
        return None
    rank = len(s.out)
    splits = [
        Split(split.dim + rank - len(shape), split.parts)
        for _, ref in s.tensors()
        if isinstance(split := s.layouts(ref), Split) and (shape := s.metas(ref).shape)
        if shape[split.dim] == s.out[split.dim + rank - len(shape)]
    ]
    if not splits:
        return None
    chosen = splits[0]
    wants: dict[Path, Split | Parts | Lent] = {}
    for path, ref in s.tensors():
        shape = s.metas(ref).shape
        at = chosen.dim - rank + len(shape)
        if at >= 0 and shape[at] == s.out[chosen.dim]:
            wants[path] = Split(at, chosen.parts)
    return Choice(chosen, wants)


def _dropout(s: Seen) -> Choice | None:
    split = s.split(0)
    if not s.node.random or split is None:
        return _pointwise(s)
    return Choice(split, {(0,): split}, kernel=Kernel.DROPOUT)


def _keeps(s: Seen) -> Choice | None:
    return Choice(None, keeps=True)


def _view(s: Seen) -> Choice | None:
    found = viewed(s.split(0), s.shape(0), s.out, s.size)
    if found is None:
        return None
    at = 2 if s.node.target == "aten.unflatten.int" else 1
    args: tuple[Arg, ...] | None = (s.node.args[0], found.local(s.out, s.size))
    if s.node.target == "aten.flatten.using_ints":
        args = None
    elif at == 2:
        dim, sizes = s.integer(1) % len(s.shape(0)), s.arg(2)
        count = len(sizes) if isinstance(sizes, tuple) else 1
        args = (*s.node.args[:2], found.local(s.out, s.size)[dim : dim + count])
    return Choice(found, {(0,): _split_of(s, 0)}, args)


def viewed(split: Layout, before: tuple[int, ...], after: tuple[int, ...], size: int) -> Layout:
    """Return where a view has the dimension that is split; None where blocks of it lie nowhere together."""
    if not isinstance(split, Split):
        return None
    pieces = prod(before[: split.dim]) * split.parts  # one behind the other, of each a block
    for dim in range(len(after)):
        ahead = prod(after[:dim])
        found = Split(dim, pieces // ahead)
        if pieces % ahead == 0 and found.fits(after, size):
            return found
    return None


def _split_of(s: Seen, at: int) -> Split:
    found = s.split(at)
    if found is None:
        raise ValueError(f"argument {at} of {s.node.target} is whole")
    return found


def _moved(s: Seen, order: list[int]) -> Choice | None:
    """Result dimension i is dimension order[i] of the argument."""
    split = s.split(0) or s.column
    if split is None:
        return None
    return Choice(Split(order.index(split.dim), split.parts), {(0,): split})


def _transpose(s: Seen) -> Choice | None:
    order = list(range(len(s.shape(0))))
    if s.node.target == "aten.t.default":
        order.reverse()
    else:
        a, b = s.integer(1), s.integer(2)
        order[a], order[b] = order[b], order[a]
    return _moved(s, order)


def _permute(s: Seen) -> Choice | None:
    dims = s.arg(1)
    if not isinstance(dims, tuple):
        return None
    return _moved(s, [d % len(s.shape(0)) for d in dims if isinstance(d, int)])


def _unsqueeze(s: Seen) -> Choice | None:
    at = s.integer(1) % (len(s.shape(0)) + 1)
    split = _split_of(s, 0)
    return Choice(Split(split.dim + (at <= split.dim), split.parts), {(0,): split})


def _squeeze(s: Seen) -> Choice | None:
    split, shape = _split_of(s, 0), s.shape(0)
    found = s.arg(1)
    dims = range(len(shape)) if found is None else found if isinstance(found, tuple) else (found,)
    gone = [d % len(shape) for d in dims if isinstance(d, int) and shape[d] == 1]
    return Choice(Split(split.dim - sum(d < split.dim for d in gone), split.parts), {(0,): split})


def _expand(s: Seen) -> Choice | None:
    split, shape = _split_of(s, 0), s.shape(0)
    dim = split.dim + len(s.out) - len(shape)
    found = Split(dim, split.parts)
    return Choice(found, {(0,): split}, (s.node.args[0], found.local(s.out, s.size), *s.node.args[2:]))


def _along(at: int, name: str, default: int) -> Callable[[Seen], Choice | None]:
    """Op along one dimension, its argument ``at``: any other may be split."""

    def rule(s: Seen) -> Choice | None:
        split = _split_of(s, 0)
        dim = s.integer(at, name, default) % max(1, len(s.shape(0)))
        return None if dim == split.dim else Choice(split, {(0,): split})

    return rule


def _select(s: Seen) -> Choice | None:
    split = _split_of(s, 0)
    dim = s.integer(1) % len(s.shape(0))
    if dim == split.dim:
        return None
    return Choice(Split(split.dim - (dim < split.dim), split.parts), {(0,): split})


def _pieces(s: Seen) -> Choice | None:
    """Split and chunk: along another dimension, or into the parts of which each process has a block."""
    split = _split_of(s, 0)
    dim = s.integer(2, "dim", 0) % len(s.shape(0))
    if dim != split.dim:
        return Choice(split, {(0,): split})
    lengths = {meta.shape[dim] for meta in s.node.outputs}
    if split.parts != len(s.node.outputs) or len(lengths) != 1:
        return None
    sizes = s.arg(1)
    args: tuple[Arg, ...] = s.node.args
    if s.node.target.startswith("aten.chunk"):
        pass
    elif isinstance(sizes, int):
        args = (args[0], sizes // s.size, *args[2:])
    elif isinstance(sizes, tuple):
        args = (args[0], tuple(n // s.size if isinstance(n, int) else n for n in sizes), *args[2:])
    return Choice(Split(dim), {(0,): split}, args)


def _getitem(s: Seen) -> Choice | None:
    split = _split_of(s, 0)
    return Choice(split, {(0,): split})


def _cat(s: Seen) -> Choice | None:
    dim = s.integer(1, "dim", 0) % max(1, len(s.out))
    splits = (split for _, ref in s.tensors() if isinstance(split := s.layouts(ref), Split))
    wanted = next(splits, None)
    if wanted is None or wanted.dim == dim:
        return None
    if any(len(s.metas(ref).shape) != len(s.out) for _, ref in s.tensors()):
        return None  # empty ones are passed over
    return Choice(wanted, {path: wanted for path, _ in s.tensors()})


def _linear(s: Seen) -> Choice | None:
    """x [.., K], w [N, K], bias [N]."""
    return _product(s, x=0, w=1, bias=2, rows=1, columns=0)


def _addmm(s: Seen) -> Choice | None:
    """bias [N], x [M, K], w [K, N]."""
    if s.node.kwargs or len(s.shape(0)) != 1:
        return None
    return _product(s, x=1, w=2, bias=0, rows=0, columns=1)


def _mm(s: Seen) -> Choice | None:
    if s.parameter(1):
        return _product(s, x=0, w=1, bias=None, rows=0, columns=1)
    return _matmul(s)


def _product(s: Seen, x: int, w: int, bias: int | None, rows: int, columns: int) -> Choice | None:
    """Product with weights; ``rows``: their dimension that is summed over, ``columns``: the other."""
    split, last = s.split(x), len(s.shape(x)) - 1
    has_bias = bias is not None and isinstance(s.arg(bias), OpRef | LeafRef)
    if split is None:
        if s.column is None:
            return None
        wants: dict[Path, Split | Parts | Lent] = {(w,): Split(columns, s.column.parts)}
        if has_bias and bias is not None:
            wants[(bias,)] = Split(0, s.column.parts)
        return Choice(Split(len(s.out) - 1, s.column.parts), wants)
    if split.dim < last:
        return Choice(split, {(x,): split})
    if split.parts > 1 or not s.parameter(w):
        return None
    return Choice(None, {(x,): split, (w,): Split(rows)}, sums=True, kernel=Kernel.ROW if has_bias else None)


def _matmul(s: Seen) -> Choice | None:
    a, b, left, right = s.split(0), s.split(1), s.shape(0), s.shape(1)
    if s.parameter(1) and len(right) == 2:
        return _product(s, x=0, w=1, bias=None, rows=0, columns=1)
    if len(left) != len(right) or len(left) < 2:
        return None
    rank = len(left)
    batch = next((split for split in (a, b) if split is not None and split.dim < rank - 2), None)
    if batch is not None:
        if left[batch.dim] != right[batch.dim]:
            return None
        return Choice(batch, {(0,): batch, (1,): batch})
    if a is not None and a.dim == rank - 2:
        return Choice(a, {(0,): a})
    if b is not None and b.dim == rank - 1 and a is None:
        return Choice(b, {(1,): b})
    return None


def _attention(s: Seen) -> Choice | None:
    """Queries, keys, values [batch, heads, tokens, features]: by batch, by heads, or by queries."""
    split = next((found for at in range(3) if (found := s.split(at))), None)
    if s.node.random or split is None or split.dim > 2 or split.parts > 1:
        return None
    if split.dim == 2:
        return _of_queries(s)
    if any(len(s.shape(at)) != 4 or not split.fits(s.shape(at), s.size) for at in range(3)):
        return None
    wants: dict[Path, Split | Parts | Lent] = {(at,): split for at in range(3)}
    for path, ref in s.tensors():
        if path in wants:
            continue
        shape = s.metas(ref).shape
        at = split.dim - 4 + len(shape)
        if at >= 0 and shape[at] > 1:
            wants[path] = Split(at)
    return Choice(split, wants)


def _of_queries(s: Seen) -> Choice | None:
    """Own queries with all keys and values: those up to the own tokens where attention is causal."""
    split, mask = Split(2), s.arg(3, "attn_mask")
    causal = bool(s.arg(5, "is_causal", False))
    if s.split(0) != split or len(s.shape(0)) != 4 or (causal and s.shape(0)[2] != s.shape(1)[2]):
        return None
    if s.rounds and goes_round(s.node) and _blocks_fit(s):
        kernel = Kernel.RING_CAUSAL if causal else Kernel.RING
        return Choice(split, {(at,): split for at in range(3)}, kernel=kernel)
    wants: dict[Path, Split | Parts | Lent] = {(0,): split}
    for path, ref in s.tensors():
        shape = s.metas(ref).shape
        if ref == mask and len(shape) > 1 and shape[-2] > 1:
            wants[path] = Split(len(shape) - 2)
    return Choice(split, wants, kernel=Kernel.CAUSAL if causal else None)


def goes_round(node: OpNode) -> bool:
    """Return whether an op is attention that can meet its keys a block at a time: it has no mask of its own
    and draws nothing."""
    named = dict(node.kwargs)
    mask = node.args[3] if len(node.args) > 3 else named.get("attn_mask")
    return node.target == "aten.scaled_dot_product_attention.default" and not node.random and mask is None


def _blocks_fit(s: Seen) -> bool:
    """Whether each process has its block of keys and values, of the features and heads of its queries."""
    query, key, value = (s.shape(at) for at in range(3))
    same = len(key) == 4 and key[:3] == value[:3] and query[3] == key[3] == value[3]
    return same and query[1] % key[1] == 0 and s.split(1) == s.split(2) == Split(2)


def _normalised(s: Seen) -> Choice | None:
    split, over = _split_of(s, 0), s.arg(1)
    count = len(over) if isinstance(over, tuple) else 1
    return Choice(split, {(0,): split}) if split.dim < len(s.shape(0)) - count else None


def _embedding(s: Seen) -> Choice | None:
    table, split = s.split(0), s.split(1)
    if split is not None:
        return Choice(split, {(1,): split})
    if (s.column is not None or table == Split(0)) and len(s.node.args) == 2 and not s.node.kwargs:
        return Choice(None, {(0,): Split(0)}, sums=True, kernel=Kernel.VOCABULARY)
    return None


def _reduced(s: Seen) -> Choice | None:
    """Sum or mean over dimensions, all of them where none are named."""
    split, shape = _split_of(s, 0), s.shape(0)
    mean = s.node.target.startswith("aten.mean")
    named, keep = s.arg(1, "dim"), s.arg(2, "keepdim", False)
    if s.node.target.endswith(".default"):
        named, keep = None, False
    dims = [d % len(shape) for d in named if isinstance(d, int)] if isinstance(named, tuple) else []
    dims = dims or list(range(len(shape)))
    if split.dim in dims:
        kernel = Kernel.ROWS_MEAN if mean else None
        return Choice(None, {(0,): split}, sums=True, kernel=kernel)
    out = split.dim if keep else split.dim - sum(d < split.dim for d in dims)
    return Choice(Split(out, split.parts), {(0,): split})


def _extreme(s: Seen) -> Choice | None:
    split, named = _split_of(s, 0), s.arg(1, "dim")
    found = named if isinstance(named, tuple) else (named,)
    dims = [d % len(s.shape(0)) for d in found if isinstance(d, int)]
    if not dims or split.dim in dims:
        return None
    out = split.dim if s.arg(2, "keepdim", False) else split.dim - sum(d < split.dim for d in dims)
    return Choice(Split(out, split.parts), {(0,): split})


def _cross_entropy(s: Seen) -> Choice | None:
    """Logits [N, C, ..], targets of classes [N, ..]; no weights, no smoothing."""
    split, reduction = s.split(0), s.integer(3, "reduction", MEAN)
    plain = s.arg(2, "weight") is None and not s.arg(5, "label_smoothing", 0.0)
    target = s.arg(1)
    classes = isinstance(target, OpRef | LeafRef) and not s.metas(target).dtype.startswith(("float", "bf"))
    if split is None or not (plain and classes) or len(s.shape(0)) < 2:
        return None
    if split.dim == 1:
        two = len(s.shape(0)) == 2 and reduction in (MEAN, SUM) and split.parts == 1
        return Choice(None, {(0,): split}, kernel=Kernel.VOCABULARY_LOSS) if two else None
    wants: dict[Path, Split | Parts | Lent] = {(0,): split, (1,): Split(0, split.parts)}
    if split.dim:
        return None
    if reduction == MEAN:
        return Choice(None, wants, kernel=Kernel.ROWS_LOSS)
    return Choice(None, wants, sums=True) if reduction == SUM else Choice(split, wants)


def _averaged(at: int) -> Callable[[Seen], Choice | None]:
    """Loss of equal elements, its reduction at ``at``."""

    def rule(s: Seen) -> Choice | None:
        split = next((found for i in range(2) if (found := s.split(i))), None)
        if split is None or s.shape(0) != s.shape(1) or sum(1 for _ in s.tensors()) != 2:
            return None
        wants: dict[Path, Split | Parts | Lent] = {(0,): split, (1,): split}
        reduction = s.integer(at, "reduction", MEAN)
        if reduction not in (MEAN, SUM):
            return Choice(split, wants)
        kernel = Kernel.ROWS_MEAN if reduction == MEAN else None
        return Choice(None, wants, sums=True, kernel=kernel)

    return rule


def _of_rows(s: Seen) -> Choice | None:
    """Convolutions and pools: each row of a micro-batch by itself."""
    split = s.split(0)
    if split is None or split.dim or len(s.shape(0)) != len(s.out) or s.shape(0)[0] != s.out[0]:
        return None
    return Choice(Split(0, split.parts), {(0,): split})


def _padded(s: Seen) -> Choice | None:
    split, pad = _split_of(s, 0), s.arg(1)
    count = len(pad) // 2 if isinstance(pad, tuple) else 0
    return Choice(split, {(0,): split}) if split.dim < len(s.shape(0)) - count else None


def _grouped(s: Seen) -> Choice | None:
    """Rows [S, K] in groups by matrices [E, K, N], ends of groups [E]: each process has its experts."""
    ends, weights = s.arg(2, "offs"), s.split(1) or s.column
    if weights != Split(0) or not isinstance(ends, OpRef) or s.layout(2) is not None:
        return None
    wants: dict[Path, Split | Parts | Lent] = {(1,): Split(0)}
    rows = s.layout(0)
    if rows == Parts(ends.op) or isinstance(rows, Lent):
        wants[(0,)] = rows
    return Choice(Parts(ends.op), wants, kernel=Kernel.EXPERTS)


def _triangle(s: Seen) -> Choice | None:
    split = _split_of(s, 0)
    return Choice(split, {(0,): split}) if split.dim < len(s.shape(0)) - 2 else None


def _repeated(s: Seen) -> Choice | None:
    """Every element several times in a row: blocks stay blocks."""
    split = _split_of(s, 0)
    if s.arg(2, "dim") is None or split.parts > 1 or "output_size" in dict(s.node.kwargs):
        return None
    return Choice(split, {(0,): split})


# ---------------------------------------------------------------- parts of a sum


def parts_rule(s: Seen) -> Choice | None:
    """Ops that may be computed on parts of a sum: those of each process add up to the whole's."""
    name = s.node.target
    of = s.layout(0)
    if s.lends and of is None:
        of = Lent()
    elif s.lends and isinstance(of, Split):
        return Choice(Lent(), {(0,): Lent()})
    if name in _SAME:
        if name in _CASTS and _narrows(s):
            return None
        return None if of is None or isinstance(of, Split) else Choice(of, {(0,): of})
    if isinstance(of, Lent):
        return Choice(of, {(0,): of}) if name == "aten.index.Tensor" and s.lends else None
    if name in _ZERO_AT_ZERO or name.startswith("aten.chunk"):
        rows = name.startswith("aten.chunk") and s.integer(2, "dim", 0) % len(s.shape(0)) == 0
        own = isinstance(of, Parts) and of.groups >= 0 and not rows
        return Choice(of, {(0,): of}) if own and isinstance(of, Parts) else None
    if name in ("aten.mul.Tensor", "aten.div.Tensor"):
        return _scaled_parts(s)
    if name in _LINEAR and isinstance(of, Parts):
        return Choice(Parts(), {(0,): of})
    return None


def _scaled_parts(s: Seen) -> Choice | None:
    """Parts by a whole value; or by parts of the same rows, where all others' are zero."""
    one, other = s.layout(0), s.layout(1)
    if isinstance(one, Parts) and other is None and s.shape(0) == s.out:
        return Choice(one, {(0,): one})
    if s.node.target == "aten.div.Tensor":
        return None
    if isinstance(other, Parts) and one is None and s.shape(1) == s.out:
        return Choice(other, {(1,): other})
    same = isinstance(one, Parts) and one == other and one.groups >= 0 and s.shape(0) == s.shape(1)
    return Choice(one, {(0,): one, (1,): one}) if same and isinstance(one, Parts) else None


def _narrows(s: Seen) -> bool:
    """Whether a cast of parts would round each of them."""
    before = s.arg(0)
    if not isinstance(before, OpRef | LeafRef):
        return True
    return DTYPE_BYTES[s.node.outputs[0].dtype] < DTYPE_BYTES[s.metas(before).dtype]


Rule = Callable[[Seen], Choice | None]
_OTHER_RANK = {"aten.view_as_complex.default", "aten.view_as_real.default"}


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    """The same rule of several targets: "add.Tensor relu" (a bare name is ".default")."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


_CASTS = _named(_keeps, "to.dtype to.device to.other to.dtype_layout _to_copy").keys()
_SAME = {*_CASTS, GETITEM, *_named(_keeps, "alias clone contiguous detach")}
_ZERO_AT_ZERO = _named(_keeps, "silu gelu relu tanh neg mish leaky_relu hardswish").keys()
_LINEAR = _named(_keeps, "view reshape _unsafe_view unsqueeze index.Tensor sum.dim_IntList").keys()


def _whole_without_split(rule: Rule) -> Rule:
    """The rule where its first argument is split."""

    def guarded(s: Seen) -> Choice | None:
        return None if s.split(0) is None else rule(s)

    return guarded


_RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE - _OTHER_RANK, _pointwise),
    **_named(
        _pointwise,
        "gelu relu silu mish sigmoid tanh softplus hardswish hardsigmoid hardtanh leaky_relu elu selu celu "
        "relu6 log_sigmoid softshrink hardshrink threshold clone contiguous alias detach lift_fresh to.dtype "
        "to.device to.other to.dtype_layout _to_copy type_as masked_fill.Scalar masked_fill.Tensor "
        "ones_like zeros_like full_like empty_like",
    ),
    **_named(_dropout, "dropout"),
    **_named(_transpose, "t transpose.int"),
    **_named(_permute, "permute"),
    **_named(_keeps, "new_ones new_zeros new_full new_empty"),
    **_named(_linear, "linear"),
    **_named(_addmm, "addmm"),
    **_named(_mm, "mm"),
    **_named(_matmul, "matmul bmm"),
    **_named(_attention, "scaled_dot_product_attention"),
    **_named(_embedding, "embedding"),
    **_named(_cat, "cat concat"),
    **_named(_cross_entropy, "cross_entropy_loss"),
    **_named(_averaged(2), "mse_loss l1_loss smooth_l1_loss huber_loss"),
    **_named(_averaged(4), "binary_cross_entropy_with_logits"),
    **_named(
        _of_rows,
        "conv1d conv2d conv3d conv1d.padding conv2d.padding max_pool2d avg_pool2d adaptive_avg_pool2d "
        "_adaptive_avg_pool2d max_pool1d avg_pool1d adaptive_avg_pool1d group_norm",
    ),
    **{
        target: _whole_without_split(rule)
        for target, rule in {
            **_named(_view, "view reshape _unsafe_view flatten.using_ints unflatten.int"),
            **_named(_unsqueeze, "unsqueeze"),
            **_named(_squeeze, "squeeze squeeze.dim squeeze.dims"),
            **_named(_expand, "expand"),
            **_named(_along(1, "dim", 0), "slice.Tensor narrow cumsum cumprod"),
            **_named(_along(2, "dim", -1), "topk"),
            **_named(_along(1, "dim", -1), "softmax.int log_softmax.int _softmax _log_softmax"),
            **_named(_select, "select.int"),
            **_named(_pieces, "split.Tensor split.sizes split_with_sizes chunk unsafe_split.Tensor"),
            **_named(_normalised, "layer_norm rms_norm native_layer_norm"),
            **_named(_reduced, "sum sum.dim_IntList mean mean.dim"),
            **_named(_extreme, "amax amin argmax argmin max.dim min.dim logsumexp"),
            **_named(_padded, "constant_pad_nd pad"),
            **_named(_triangle, "tril triu"),
            **_named(_repeated, "repeat_interleave.self_int"),
            GETITEM: _getitem,
        }.items()
    },
}


def with_args(node: OpNode, choice: Choice, size: int) -> OpNode:
    """Return the node as one process runs it."""
    from atoll.mesh.layout import local_meta

    outputs = tuple(local_meta(meta, choice.out, size) for meta in node.outputs)
    return replace(node, args=node.args if choice.args is None else choice.args, outputs=outputs)
