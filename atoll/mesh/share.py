"""A program as each process of a mesh runs it: what it has of every value, and what moves. Pure.

Positions, targets and results are those of the program; shapes, and literals that say shapes, are a process's
own. Rules go from op to op, so whatever is split computes what the whole would. What differs between the
kinds of inside plan is where splitting begins:

``shards``    Inputs and received values are split by rows where these can be shared equally. Matrices are
              stored in shards of their rows, and fetched whole for each use.
``tensor``    Products are split by their results (columns) where all that follows from them stays split until
              another product, or a loss, sums over it. Where it does not, they are whole.
``sequence``  Inputs and received values are split by tokens. Keys and values are gathered for attention, and
              again for its backward. Matrices are stored in shards.
``ring``      As ``sequence``, but keys and values go round where attention has no mask and draws nothing.
``experts``   As ``shards``, but matrices of experts are split by expert, and never move.
``data``      As ``shards``, but every process has the whole of all parameters. Where all ops that use one are
              split, its gradient is a part of a sum until the step's end (``Shared.summed``).

Experts are split in ``tensor``, too: matrices of products of groups of rows (``Kernel.EXPERTS``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import UnsupportedOp
from atoll.job import OptimizerName
from atoll.mesh.layout import (
    Inside,
    Kernel,
    Layout,
    Lent,
    Move,
    Parts,
    Split,
    Way,
    local_meta,
    shard_rows,
)
from atoll.mesh.rules import RINGS, Choice, Path, Seen, choose, references, with_args
from atoll.opdag import DTYPE_BYTES, FLOATING, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.ops import GROUPED, POINTWISE
from atoll.optimizers import optimizers_of
from atoll.program import StageProgram

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta


@dataclass(frozen=True, slots=True)
class Shard:
    """A stored matrix: each process has ``shard_rows`` of its rows, with ``inner`` the shape of a row."""

    rows: int
    inner: tuple[int, ...]

    def local(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape that each process stores of ``shape``."""
        return (shard_rows(self.rows, size), *self.inner)


Stored = Split | Shard


@dataclass(frozen=True, slots=True)
class Turn:
    """What a process does beside an op's own kernel: moves by the path of an argument, a sum of the results,
    another kernel. ``again``: the backward reads what was fetched, and fetches it again."""

    moves: Mapping[Path, Move] = field(default_factory=dict)
    sums: bool = False
    kernel: Kernel | None = None
    again: bool = False
    rows: int = 0  # of the logits of a VOCABULARY_LOSS
    split: Layout = None  # of the result


@dataclass(frozen=True)
class Shared:
    """``program`` as a process runs it. ``layouts``: of received values and results, ``inputs`` and
    ``stored`` of named ones; what is not there is whole."""

    program: StageProgram
    turns: Mapping[int, Turn]
    layouts: Mapping[int, Layout]
    inputs: Mapping[str, Split]
    stored: Mapping[str, Stored]
    divided: frozenset[int] = frozenset()  # ops of which each process does a part
    follows: Mapping[int, frozenset[int]] = field(default_factory=dict)  # of these: products that are split
    # Bytes of the gradients of a step that are parts of a sum, by parameter.
    summed: Mapping[str, int] = field(default_factory=dict)


class Terms(NamedTuple):
    """What a program is shared by: the shapes of its named tensors, those parameters that get gradients, and
    those that every process has to hold whole."""

    kind: Inside
    size: int
    metas: Mapping[str, TensorMeta]
    trained: Collection[str]
    whole: Collection[str] = ()


def share(program: StageProgram, terms: Terms) -> Shared:
    """Return the program as each of ``terms.size`` processes runs it.

    What other stages use, too, is whole: its gradients are sums of theirs.
    """
    terms = terms._replace(whole={*terms.whole, *(tied.name for tied in program.tied)})
    divided = terms.kind in (Inside.TENSOR, Inside.EXPERTS)
    experts = experts_of(program, terms) if divided else Experts()
    if terms.kind is Inside.TENSOR:
        return _by_tensor(program, terms, experts)
    try:
        return _Walk(program, terms, experts=experts, rows=True).shared()
    except UnsupportedOp:  # an op writes into what would have to be moved
        return _Walk(program, terms, experts=experts, rows=False).shared()


def _by_tensor(program: StageProgram, terms: Terms, experts: Experts) -> Shared:
    columns = _columns(program, terms)
    while True:
        walk = _Walk(program, terms, columns=columns, experts=experts)
        try:
            shared = walk.shared()
        except UnsupportedOp:
            if not columns:
                raise
            columns = {}
            continue
        if not walk.unfit & columns.keys():
            return shared
        columns = {op: split for op, split in columns.items() if op not in walk.unfit}


_PRODUCTS = {"aten.linear.default": (1, 0), "aten.addmm.default": (2, 1)} | dict.fromkeys(
    ("aten.mm.default", "aten.matmul.default"), (1, 1)
)
"""Argument that holds the weights, and their dimension that is the result's last one."""
_WHOLE_STEPS = frozenset({OptimizerName.MUON, OptimizerName.ADAFACTOR})
_KEYS_AND_VALUES: tuple[Path, Path] = ((1,), (2,))
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_FRESH = POINTWISE | {GROUPED} | {
    f"aten.{name}"
    for name in (
        "addmm.default", "bmm.default", "cat.default", "embedding.default", "gelu.default", "index.Tensor",
        "layer_norm.default", "linear.default", "matmul.default", "mean.dim", "mm.default", "relu.default",
        "rms_norm.default", "scaled_dot_product_attention.default", "silu.default", "softmax.int",
        "sum.dim_IntList", "topk.default",
    )
}  # fmt: skip
_READ_AGAIN = (
    "linear", "addmm", "mm", "matmul", "bmm", "prelu", "mul", "div", "scaled_dot_product_attention",
    "_grouped_mm",
)  # fmt: skip


def _columns(program: StageProgram, terms: Terms) -> dict[int, Split]:
    """Ops whose weights may be split by their results: products, and tables of embeddings."""
    found: dict[int, Split] = {}
    users: dict[int, list[int]] = {}
    nodes = dict(program.ops)
    for op, node in program.ops:
        for _, ref in references(node):
            if isinstance(ref, OpRef):
                users.setdefault(ref.op, []).append(op)
    uses = Counter(
        ref.name for node in nodes.values() for _, ref in references(node) if isinstance(ref, LeafRef)
    )
    for op, node in program.ops:
        if node.target in _PRODUCTS:
            at, dim = _PRODUCTS[node.target]
            parts = _parts(op, nodes, users)
            split = Split(dim, parts)
        elif node.target == "aten.embedding.default":
            at, split = 0, Split(0)
        else:
            continue
        weights = node.args[at] if at < len(node.args) else None
        if not isinstance(weights, LeafRef) or weights.source is not Source.PARAMETER:
            continue
        meta = terms.metas[weights.name]
        small = (
            "embedding" in node.target and uses[weights.name] < 2 and meta.elements < node.outputs[0].elements
        )
        if len(meta.shape) == 2 and split.fits(meta.shape, terms.size) and not small:
            found[op] = split
    return found


def _parts(op: int, nodes: Mapping[int, OpNode], users: Mapping[int, list[int]]) -> int:
    """Return into how many equal parts a product's result is divided at once: queries, keys and values."""
    width = nodes[op].outputs[0].shape[-1]
    while len(following := users.get(op, [])) == 1:
        node = nodes[following[0]]
        if node.target.split(".")[1] in ("split", "chunk", "split_with_sizes", "unsafe_split"):
            lengths = {meta.shape[-1] for meta in node.outputs}
            equal = len(lengths) == 1 and lengths.pop() * len(node.outputs) == width
            return len(node.outputs) if equal else 1
        if node.target not in _VIEWS or node.outputs[0].shape[-1:] != (width,):
            return 1
        op = following[0]
    return 1


def tokens_of(meta: TensorMeta, rows: int) -> int:
    """Return the tokens of each row of a value; 0 where it does not look like rows of tokens."""
    shape = meta.shape
    return shape[1] if rows > 0 and len(shape) in (2, 3) and shape[0] == rows else 0


class Experts(NamedTuple):
    """Matrices of experts that are divided: their names, the ops that read them, and those that pick the
    tokens for them."""

    names: frozenset[str] = frozenset()
    readers: frozenset[int] = frozenset()
    lends: frozenset[int] = frozenset()


def experts_of(program: StageProgram, terms: Terms) -> Experts:
    """Return the matrices that products of groups alone read, straight or transposed."""
    nodes = dict(program.ops)
    users = Counter(ref for node in nodes.values() for _, ref in references(node))
    kept = {produced.op for produced in program.produced} | {program.loss}
    names, readers, lends = set[str](), set[int](), set[int]()
    for op, node in program.ops:
        if node.target != GROUPED:
            continue
        weights, reader = node.args[1], op
        if isinstance(weights, OpRef) and weights.op in nodes and weights.op not in kept:
            single = users[weights] == 1 and nodes[weights.op].target == "aten.transpose.int"
            reader = weights.op if single else op
            weights = nodes[weights.op].args[0] if single else None
        if not isinstance(weights, LeafRef) or weights.source is not Source.PARAMETER:
            continue
        fits = Split(0).fits(terms.metas[weights.name].shape, terms.size)
        if users[weights] > 1 or weights.name in terms.whole or not fits:
            continue
        names.add(weights.name)
        readers.add(reader)
        lends |= _picks(nodes, node.args[0], users, kept)
    return Experts(frozenset(names), frozenset(readers), frozenset(lends))


def _picks(
    nodes: Mapping[int, OpNode],
    rows: object,
    users: Mapping[OpRef | LeafRef, int],
    kept: Collection[int | None],
) -> set[int]:
    """The op that picks rows for experts, where nothing else reads them, with casts behind it."""
    found = set[int]()
    while isinstance(rows, OpRef) and rows.op in nodes and users[rows] == 1 and rows.op not in kept:
        node = nodes[rows.op]
        found.add(rows.op)
        if node.target == "aten.index.Tensor":
            return found
        if node.target != "aten.to.dtype":
            break
        rows = node.args[0]
    return set()


class _Walk:
    """One pass over a program. ``unfit``: ops of ``columns`` whose results would have to be gathered."""

    def __init__(
        self,
        program: StageProgram,
        terms: Terms,
        *,
        columns: Mapping[int, Split] | None = None,
        experts: Experts,
        rows: bool = False,
    ) -> None:
        self._program, self._terms, self._experts = program, terms, experts
        self._columns = {**(columns or {}), **dict.fromkeys(experts.readers, Split(0))}
        self._size = terms.size
        self.unfit: set[int] = set()
        self._origins: dict[int, frozenset[int]] = {}  # of a split value: the columns that it follows from
        self._follows: dict[int, frozenset[int]] = {}  # the same of every op
        self._nodes = dict(program.ops)
        self._metas = {r.op: r.meta for r in program.received}
        self._metas |= {op: node.outputs[0] for op, node in program.ops}
        self._grads = {r.op: r.requires_grad for r in program.received}
        self._grads |= {op: node.requires_grad for op, node in program.ops}
        self._layouts: dict[int, Layout] = {}
        self._inputs: dict[str, Split] = {}
        if rows:
            metas = {name: terms.metas[name] for name in program.inputs}
            given = [*metas.values(), *(r.meta for r in program.received)]
            length = next((tokens for meta in given if (tokens := tokens_of(meta, program.rows))), 0)
            tokens = terms.kind in (Inside.SEQUENCE, Inside.RING)
            by = partial(self._by_tokens, length) if tokens else self._by_rows
            self._inputs = {name: split for name, meta in metas.items() if (split := by(meta)) is not None}
            self._layouts = {r.op: by(r.meta) for r in program.received}
        whole = terms.kind in (Inside.TENSOR, Inside.DATA)
        self._shards = {} if whole else _shards(program, terms, experts.names)
        self._wanted: dict[str, dict[int, Layout]] = {}  # no shards: parameter -> op -> how it wants it
        self._moves: dict[int, dict[Path, Move]] = {}
        # Matrices that products of groups read transposed.
        products = (node for node in self._nodes.values() if node.target == GROUPED)
        self._turned = frozenset(node.args[1].op for node in products if isinstance(node.args[1], OpRef))
        self._choices: dict[int, Choice | None] = {}

    def shared(self) -> Shared:
        """Return the program that comes of it. UnsupportedOp where an op writes into what would be moved."""
        for op, node in self._program.ops:
            self._visit(op, node)
        if self._terms.kind is Inside.TENSOR:
            self._settle()
        summed = self._summed() if self._terms.kind is Inside.DATA else {}
        self._mark_last()
        turns, ops = {}, []
        for op, node in self._program.ops:
            choice = self._choices[op]
            split = _divides(choice)
            moves = self._moves[op]
            gathered = any(m.way in (Way.FETCH, Way.COPY, Way.LEND) for m in moves.values())
            again = gathered and self._reads_again(op, node)
            kernel = choice.kernel if choice else None
            rows = self._rows(node) if kernel is Kernel.VOCABULARY_LOSS else 0
            turn = Turn(moves, bool(choice and choice.sums), kernel, again, rows, self._layouts[op])
            if moves or turn.sums or turn.kernel is not None:
                turns[op] = turn
            own = node if choice is None else with_args(node, choice, self._size)
            less = split and _computes_less(choice)
            ops.append((op, _scaled(own, node, self._size, self._saves_whole(node)) if less else own))
        received = tuple(
            replace(r, meta=local_meta(r.meta, self._layouts.get(r.op), self._size))
            for r in self._program.received
        )
        program = replace(self._program, ops=tuple(ops), received=received)
        stored: dict[str, Stored] = dict(self._shards)
        for name, wanted in self._wanted.items():
            layout = next(iter(wanted.values()))
            if isinstance(layout, Split):
                stored[name] = layout
        divided = frozenset(
            op for op, choice in self._choices.items() if _divides(choice) and _computes_less(choice)
        )
        follows = {op: self._follows[op] for op in sorted(divided) if self._follows[op]}
        return Shared(program, turns, self._layouts, self._inputs, stored, divided, follows, summed)

    def _by_tokens(self, length: int, meta: TensorMeta) -> Split | None:
        same = length > 0 and tokens_of(meta, self._program.rows) == length
        return Split(1) if same and Split(1).fits(meta.shape, self._size) else None

    def _by_rows(self, meta: TensorMeta) -> Split | None:
        rows, split = self._program.rows, Split(0)
        mine = rows > 0 and meta.shape and meta.shape[0] % rows == 0 and rows % self._size == 0
        return split if mine and split.fits(meta.shape, self._size) else None

    def _meta(self, ref: OpRef | LeafRef) -> TensorMeta:
        return self._metas[ref.op] if isinstance(ref, OpRef) else self._terms.metas[ref.name]

    def _layout(self, ref: OpRef | LeafRef) -> Layout:
        if isinstance(ref, OpRef):
            return self._layouts.get(ref.op)
        return self._inputs.get(ref.name) if ref.source is Source.INPUT else None

    def _visit(self, op: int, node: OpNode) -> None:
        refs = list(references(node))
        column = self._columns.get(op)
        splits = any(self._layout(ref) is not None for _, ref in refs)
        lends = op in self._experts.lends
        rounds = self._terms.kind is Inside.RING
        seen = Seen(node, self._size, self._meta, self._layout, column, lends, rounds)
        choice = choose(seen) if splits or lends or column is not None else None
        if choice is not None and not self._suits(refs, choice):
            choice = None
        self._choices[op] = choice
        self._layouts[op] = None if choice is None else choice.out
        origins = frozenset[int]().union(
            *(self._origins.get(ref.op, frozenset()) for _, ref in refs if isinstance(ref, OpRef))
        )
        if column is not None and choice is not None and _divides(choice):
            origins |= {op}
        self._follows[op] = origins
        if self._layouts[op] is not None:
            self._origins[op] = origins
        self._moves[op] = {}
        for path, ref in refs:
            move = self._move(op, node, path, ref, choice, origins)
            if move is not None:
                self._moves[op][path] = move

    def _rows(self, node: OpNode) -> int:
        _, logits = next(iter(references(node)))
        return self._meta(logits).shape[0]

    def _suits(self, refs: Iterable[tuple[Path, OpRef | LeafRef]], choice: Choice) -> bool:
        """Whether every argument can lie as the op wants it, and none lies in another split."""
        for path, ref in refs:
            want, have = choice.wants.get(path), self._layout(ref)
            if want is not None and have not in (None, want) and not _moves(have, want):
                return False
            if want is not None and not want.fits(self._meta(ref).shape, self._size):
                return False
        return True

    def _move(
        self,
        op: int,
        node: OpNode,
        path: Path,
        ref: OpRef | LeafRef,
        choice: Choice | None,
        origins: frozenset[int],
    ) -> Move | None:
        have, meta = self._layout(ref), self._meta(ref)
        if choice is not None and choice.keeps:
            return None
        want = None if choice is None else choice.wants.get(path)
        grad = self._grads[ref.op] if isinstance(ref, OpRef) else ref.name in self._terms.trained
        of = ref.op if isinstance(ref, OpRef) else -1
        if isinstance(ref, LeafRef) and ref.source is Source.PARAMETER:
            if (shard := self._shards.get(ref.name)) is not None:
                way = Way.FETCH if _divides(choice) else Way.COPY
                n = shard_rows(shard.rows, self._size) * self._size
                nbytes = meta.nbytes // max(1, shard.rows) * n
                return Move(way, meta.shape, nbytes, None, of, True, grad)
            if self._terms.kind is Inside.TENSOR or ref.name in self._experts.names:
                self._wanted.setdefault(ref.name, {})[op] = want
                if want is not None:
                    return None
        if path in _KEYS_AND_VALUES and choice is not None and choice.kernel in RINGS:
            nbytes = meta.elements * DTYPE_BYTES[node.outputs[0].dtype]  # as autocast casts them
            split = want if isinstance(want, Split) else None
            return Move(Way.ROUND, meta.shape, nbytes, split, of, True, grad)
        if want == have:
            inside = have is None and _divides(choice) and grad and meta.dtype in FLOATING
            after = choice is not None and choice.kernel is Kernel.ROW and path == _bias_path(node)
            if not inside or after:
                return None
            return Move(Way.ENTER, meta.shape, meta.nbytes, None, of, True, True)
        if _writes(node):
            raise UnsupportedOp(f"op {node.name} writes into a value that would have to be moved")
        if isinstance(have, Split):
            way = Way.GATHER
            if grad and (isinstance(want, Lent) or _divides(choice)):
                way = Way.LEND
            self.unfit |= origins
            return Move(way, meta.shape, meta.nbytes, have, of, True, grad)
        if have is not None:
            split = want if isinstance(want, Split) else None
            way = Way.SUM if split is None else Way.SCATTER
            return Move(way, meta.shape, meta.nbytes, split, of, True, grad)
        if isinstance(want, Lent):
            return Move(Way.ENTER, meta.shape, meta.nbytes, None, of, True, True) if grad else None
        if grad:
            self.unfit |= origins
        split = want if isinstance(want, Split) else None
        return Move(Way.TAKE, meta.shape, meta.nbytes, split, of, True, grad)

    def _summed(self) -> dict[str, int]:
        """Return the parameters that split work alone uses, with the bytes of their gradients: they enter it
        without a sum of these."""
        places: dict[str, list[tuple[int, Path]]] = {}
        for op, node in self._nodes.items():
            for path, ref in references(node):
                if isinstance(ref, LeafRef) and ref.source is Source.PARAMETER:
                    places.setdefault(ref.name, []).append((op, path))
        found = dict[str, int]()
        for name, uses in sorted(places.items()):
            moves = [self._moves[op].get(path) for op, path in uses]
            if name not in self._terms.whole and all(m is not None and m.way is Way.ENTER for m in moves):
                found[name] = self._terms.metas[name].nbytes
                for op, path in uses:
                    del self._moves[op][path]
        return found

    def _settle(self) -> None:
        """Find parameters that cannot be stored as each of their uses wants them."""
        for name, wanted in self._wanted.items():
            layouts = set(wanted.values())
            held_whole = name in self._terms.whole and layouts != {None}
            if len(layouts) > 1 or held_whole:
                for op, layout in wanted.items():
                    if layout is not None:
                        self.unfit |= self._behind(op)

    def _behind(self, op: int) -> frozenset[int]:
        refs = [ref.op for _, ref in references(self._nodes[op]) if isinstance(ref, OpRef)]
        return frozenset({op}).union(*(self._origins.get(ref, frozenset()) for ref in refs))

    def _mark_last(self) -> None:
        """Values that several ops enter with, or gather, are moved once, unless an op writes into them."""
        written = self._written()
        later: set[tuple[int, Way, Split | None]] = set()
        for op in reversed(self._moves):
            for path, move in self._moves[op].items():
                key = (move.of, move.way, move.split)
                if move.of >= 0 and move.of not in written and move.way in (Way.ENTER, Way.GATHER):
                    if key in later:
                        self._moves[op][path] = replace(move, last=False)
                    later.add(key)

    def _written(self) -> frozenset[int]:
        """Ops into whose memory another op may write: all that do not surely make their own may share it."""
        root: dict[int, int] = {}
        written = set[int]()

        def find(op: int) -> int:
            while root.setdefault(op, op) != op:
                op = root[op]
            return op

        for op, node in self._nodes.items():
            read = [ref.op for _, ref in references(node) if isinstance(ref, OpRef)]
            if _writes(node):
                written.update(read)
            if _writes(node) or node.target not in _FRESH:
                for other in read:
                    root[find(other)] = find(op)
        roots = {find(op) for op in written}
        return frozenset(op for op in tuple(root) if find(op) in roots)

    def _reads_again(self, op: int, node: OpNode) -> bool:
        if op in self._turned:
            return True
        refs = [ref.op for _, ref in references(node) if isinstance(ref, OpRef)]
        name = node.target.split(".")[1]
        return name.startswith("conv") or (name in _READ_AGAIN and any(self._grads[ref] for ref in refs))

    def _saves_whole(self, node: OpNode) -> bool:
        """Whether the op's backward may keep a whole value."""
        refs = [ref for _, ref in references(node) if isinstance(ref, OpRef)]
        whole = [ref for ref in refs if not isinstance(self._layouts.get(ref.op), Split)]
        return any(self._meta(ref).dtype in FLOATING for ref in whole)


def _divides(choice: Choice | None) -> bool:
    """Whether each process does a part of the op."""
    return choice is not None and not choice.keeps and (bool(choice.wants) or choice.out is not None)


def _computes_less(choice: Choice | None) -> bool:
    """Whether a process's part of the op costs less than the whole of it."""
    return choice is not None and (
        choice.kernel is Kernel.EXPERTS or not isinstance(choice.out, Parts | Lent)
    )


def _moves(have: Layout, want: Layout) -> bool:
    """Whether a value that is not whole can be had in another layout by one collective."""
    return isinstance(want, Split) if isinstance(have, Parts) else isinstance(want, Lent)


def _bias_path(node: OpNode) -> Path:
    return (0,) if node.target == "aten.addmm.default" else (2,)


def _writes(node: OpNode) -> bool:
    name = node.target.split(".")[1]
    return name.endswith("_") and not name.startswith("__")


def _scaled(own: OpNode, node: OpNode, size: int, saves_whole: bool) -> OpNode:
    """The op's costs for one process."""
    return replace(
        own,
        flops_forward=node.flops_forward // size,
        flops_backward=node.flops_backward // size,
        bytes_moved=node.bytes_moved // size,
        bytes_saved=node.bytes_saved if saves_whole else -(-node.bytes_saved // size),
        bytes_repeatable=node.bytes_repeatable if saves_whole else -(-node.bytes_repeatable // size),
        bytes_few=node.bytes_few if saves_whole else node.bytes_few // size,
        elements_few=node.elements_few if saves_whole else node.elements_few // size,
    )


def _shards(program: StageProgram, terms: Terms, experts: Collection[str]) -> dict[str, Shard]:
    """Parameters that are stored in shards: floating, of two dimensions or more."""
    held = {*terms.whole, *experts}
    found = {}
    for name in program.parameters:
        meta = terms.metas[name]
        matrix = len(meta.shape) >= 2 and meta.shape[0] >= terms.size
        if matrix and name not in held and meta.dtype in FLOATING:
            found[name] = Shard(meta.shape[0], meta.shape[1:])
    return found


def held_whole(parameters: Mapping[str, StateMeta], training: TrainingSpec) -> frozenset[str]:
    """Return parameters of whose step every process needs all: sums over a matrix, blocks of moments."""
    if training.int8_moments:
        return frozenset(parameters)
    found = optimizers_of(parameters, training.optimizer)
    return frozenset(name for name, own in found.items() if own in _WHOLE_STEPS)


def trained_names(parameters: Mapping[str, StateMeta], training: TrainingSpec) -> frozenset[str]:
    """Return the parameters that get gradients."""
    groups = {name: training.optimizer.group_of(name) for name in parameters}
    return frozenset(
        name
        for name, state in parameters.items()
        if state.requires_grad and not ((group := groups[name]) is not None and group.frozen)
    )


def local_metas(shared: Shared, metas: Mapping[str, TensorMeta], size: int) -> dict[str, TensorMeta]:
    """Return what a process has of named tensors."""
    found = dict(metas)
    for name, split in shared.inputs.items():
        found[name] = local_meta(metas[name], split, size)
    for name, stored in shared.stored.items():
        if name in metas:
            found[name] = TensorMeta(stored.local(metas[name].shape, size), metas[name].dtype)
    return found


def share_all(programs: Iterable[StageProgram], terms: Callable[[StageProgram], Terms]) -> tuple[Shared, ...]:
    """Return several programs of one stage as a process runs them, which holds what two of them read once."""
    every, whole = tuple(programs), set[str]()
    while True:
        given = [terms(program) for program in every]
        shares = tuple(
            share(program, each._replace(whole={*each.whole, *whole}))
            for program, each in zip(every, given, strict=True)
        )
        ways: dict[str, set[Stored | None]] = {}
        for program, shared in zip(every, shares, strict=True):
            for name in program.parameters:
                ways.setdefault(name, set()).add(shared.stored.get(name))
        disputed = {name for name, found in ways.items() if len(found) > 1}
        if not disputed:
            return shares
        whole |= disputed
