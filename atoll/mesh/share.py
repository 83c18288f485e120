"""A program as each process of a mesh runs it: what it has of every value, and what moves. Pure.

Positions, targets and results are those of the program; shapes, and literals that say shapes, are a process's
own. Rules go from op to op, so whatever is split computes what the whole would. What differs between the
kinds of inside plan is where splitting begins:

``shards``  inputs and received values are split by rows where these can be shared equally; matrices are
            stored in shards of their rows, and fetched whole for each use;
``tensor``  products are split by their results (columns) where all that follows from them stays split until
            another product, or a loss, sums over it. Where it does not, they are whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import UnsupportedOp
from atoll.job import OptimizerName
from atoll.mesh.layout import Inside, Kernel, Layout, Move, Split, Way, local_meta, shard_rows
from atoll.mesh.rules import Choice, Path, Seen, choose, references, with_args
from atoll.opdag import FLOATING, LeafRef, OpNode, OpRef, Source, TensorMeta
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
    split: Split | None = None  # of the result


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
    if terms.kind is Inside.TENSOR:
        return _by_tensor(program, terms)
    try:
        return _Walk(program, terms, rows=True).shared()
    except UnsupportedOp:  # an op writes into what would have to be moved
        return _Walk(program, terms, rows=False).shared()


def _by_tensor(program: StageProgram, terms: Terms) -> Shared:
    columns = _columns(program, terms)
    while True:
        walk = _Walk(program, terms, columns=columns)
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
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_READ_AGAIN = ("linear", "addmm", "mm", "matmul", "bmm", "prelu", "mul", "div")


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


class _Walk:
    """One pass over a program. ``unfit``: ops of ``columns`` whose results would have to be gathered."""

    def __init__(
        self,
        program: StageProgram,
        terms: Terms,
        *,
        columns: Mapping[int, Split] | None = None,
        rows: bool = False,
    ) -> None:
        self._program, self._terms, self._columns = program, terms, columns or {}
        self._size = terms.size
        self.unfit: set[int] = set()
        self._origins: dict[int, frozenset[int]] = {}  # of a split value: the columns that it follows from
        self._nodes = dict(program.ops)
        self._metas = {r.op: r.meta for r in program.received}
        self._metas |= {op: node.outputs[0] for op, node in program.ops}
        self._grads = {r.op: r.requires_grad for r in program.received}
        self._grads |= {op: node.requires_grad for op, node in program.ops}
        self._layouts: dict[int, Layout] = {}
        self._inputs: dict[str, Split] = {}
        if rows:
            for name in program.inputs:
                if (split := self._by_rows(terms.metas[name])) is not None:
                    self._inputs[name] = split
            self._layouts = {r.op: self._by_rows(r.meta) for r in program.received}
        self._shards = _shards(program, terms) if terms.kind is Inside.SHARDS else {}
        self._wanted: dict[str, dict[int, Layout]] = {}  # tensor kind: parameter -> op -> how it wants it
        self._moves: dict[int, dict[Path, Move]] = {}
        self._choices: dict[int, Choice | None] = {}

    def shared(self) -> Shared:
        """Return the program that comes of it. UnsupportedOp where an op writes into what would be moved."""
        for op, node in self._program.ops:
            self._visit(op, node)
        if self._terms.kind is Inside.TENSOR:
            self._settle()
        self._mark_last()
        turns, ops = {}, []
        for op, node in self._program.ops:
            choice = self._choices[op]
            split = _divides(choice)
            moves = self._moves[op]
            again = any(m.way in (Way.FETCH, Way.COPY) for m in moves.values()) and self._reads_again(node)
            kernel = choice.kernel if choice else None
            rows = self._rows(node) if kernel is Kernel.VOCABULARY_LOSS else 0
            turn = Turn(moves, bool(choice and choice.sums), kernel, again, rows, self._layouts[op])
            if moves or turn.sums or turn.kernel is not None:
                turns[op] = turn
            own = node if choice is None else with_args(node, choice, self._size)
            ops.append((op, _scaled(own, node, self._size, self._saves_whole(node)) if split else own))
        received = tuple(
            replace(r, meta=local_meta(r.meta, self._layouts.get(r.op), self._size))
            for r in self._program.received
        )
        program = replace(self._program, ops=tuple(ops), received=received)
        stored: dict[str, Stored] = dict(self._shards)
        for name, wanted in self._wanted.items():
            layout = next(iter(wanted.values()))
            if layout is not None:
                stored[name] = layout
        divided = frozenset(op for op, choice in self._choices.items() if _divides(choice))
        return Shared(program, turns, self._layouts, self._inputs, stored, divided)

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
        seen = Seen(node, self._size, self._meta, self._layout, column)
        choice = choose(seen) if splits or column is not None else None
        if choice is not None and not self._suits(refs, choice):
            choice = None
        self._choices[op] = choice
        self._layouts[op] = None if choice is None else choice.out
        origins = frozenset[int]().union(
            *(self._origins.get(ref.op, frozenset()) for _, ref in refs if isinstance(ref, OpRef))
        )
        if column is not None and choice is not None and _divides(choice):
            origins |= {op}
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
            if want is not None and have not in (None, want):
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
            if self._terms.kind is Inside.TENSOR:
                self._wanted.setdefault(ref.name, {})[op] = want
                if want is not None:
                    return None
        if want == have:
            inside = have is None and _divides(choice) and grad and meta.dtype in FLOATING
            after = choice is not None and choice.kernel is Kernel.ROW and path == _bias_path(node)
            if not inside or after:
                return None
            return Move(Way.ENTER, meta.shape, meta.nbytes, None, of, True, True)
        if _writes(node):
            raise UnsupportedOp(f"op {node.name} writes into a value that would have to be moved")
        if have is not None:
            self.unfit |= origins
            return Move(Way.GATHER, meta.shape, meta.nbytes, have, of, True, grad)
        if grad:
            self.unfit |= origins
        return Move(Way.TAKE, meta.shape, meta.nbytes, want, of, True, grad)

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
        """Values that several ops enter with, or gather, are moved once."""
        if any(_writes(node) for node in self._nodes.values()):
            return
        later: set[tuple[int, Way, Split | None]] = set()
        for op in reversed(self._moves):
            for path, move in self._moves[op].items():
                key = (move.of, move.way, move.split)
                if move.of >= 0 and move.way in (Way.ENTER, Way.GATHER):
                    if key in later:
                        self._moves[op][path] = replace(move, last=False)
                    later.add(key)

    def _reads_again(self, node: OpNode) -> bool:
        refs = [ref.op for _, ref in references(node) if isinstance(ref, OpRef)]
        name = node.target.split(".")[1]
        return name.startswith("conv") or (name in _READ_AGAIN and any(self._grads[ref] for ref in refs))

    def _saves_whole(self, node: OpNode) -> bool:
        """Whether the op's backward may keep a whole value."""
        refs = [ref for _, ref in references(node) if isinstance(ref, OpRef)]
        return any(self._layouts.get(ref.op) is None and self._meta(ref).dtype in FLOATING for ref in refs)


def _divides(choice: Choice | None) -> bool:
    """Whether each process does a part of the op."""
    return choice is not None and not choice.keeps and (bool(choice.wants) or choice.out is not None)


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
    )


def _shards(program: StageProgram, terms: Terms) -> dict[str, Shard]:
    """Parameters that are stored in shards: floating, of two dimensions or more."""
    held = terms.whole
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
