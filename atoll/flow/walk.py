"""A whole program op by op, with its writes in place: what every value, buffer and output says of samples.

Views share memory: what is written through one is written in all. A buffer outlives a micro-batch, so a walk
begins with what the one before left, until nothing changes any more; the programs of a job share buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.errors import UnsupportedOp
from atoll.flow.call import Result, called
from atoll.flow.families import transferred
from atoll.flow.shapes import reshaped, wrapped, written_at
from atoll.flow.value import Kind, Value, Vary, blend, first_why, plain, pointwise, raw, samples_of
from atoll.opdag import Arg, LeafRef, OpNode, OpRef, Source, TensorMeta, arguments
from atoll.ops import GETITEM
from atoll.program import StageProgram
from atoll.schemas import HIDDEN_VIEWS, Ref, aliased_refs, named_arguments, written_refs

MAX_PASSES = 16
MAX_REVIEWS = 200_000  # tensors written, and views read again after that, of one walk
BUFFERS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""Ops with running statistics, and the argument that has them written."""
STATISTICS = ("running_mean", "running_var")
FORGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that arguments which no capture makes lead to, of whatever kind."""
_ALIASES = frozenset({"alias", "detach", "lift_fresh"})
_MAY_COPY = frozenset({"to", "contiguous", "reshape", "flatten", "reshape_as", "ravel", "unflatten"})
_SAME_ORDER = _MAY_COPY | {"view", "view_as", "_unsafe_view", "squeeze", "unsqueeze"}


@dataclass(frozen=True, slots=True)
class Write:
    """``value``: what ``leaf`` holds after the op at ``position`` wrote it. ``statistic``: batch norm's own
    running mean or variance over all samples of a micro-batch."""

    leaf: LeafRef
    position: int
    value: Value
    statistic: bool = False


@dataclass(frozen=True)
class Walked:
    """Result of a walk through a program. ``values`` of tuple ops are tuples."""

    program: StageProgram
    nodes: Mapping[int, OpNode]
    values: Mapping[Ref, Result]
    writes: tuple[Write, ...]
    written: frozenset[Ref]  # all whose memory an op wrote after it was made

    def single(self, ref: Ref) -> Value:
        """The value of a ref that is no tuple."""
        found = self.values[ref]
        return raw((), "it is several tensors") if isinstance(found, tuple) else found


@dataclass
class _Walk:
    program: StageProgram
    batch: int
    least: int
    values: dict[Ref, Result]
    writes: list[Write] = field(default_factory=list)
    below: dict[Ref, list[int]] = field(default_factory=dict)  # ref -> ops whose results share its memory
    above: dict[int, tuple[Ref, ...]] = field(default_factory=dict)
    written: set[Ref] = field(default_factory=set)
    reviews: int = 0

    def __post_init__(self) -> None:
        self.nodes = dict(self.program.ops)

    def run(self) -> Walked:
        last = -1
        for position, node in self.program.ops:
            if position <= last:
                raise _refusal(node, "ops do not stand in order")
            last = position
            try:
                self.step(position, node)
            except FORGED as error:
                raise _refusal(node, f"its arguments are not those of an honest call ({error})") from None
        return Walked(self.program, self.nodes, self.values, tuple(self.writes), frozenset(self.written))

    def step(self, position: int, node: OpNode) -> None:
        name = node.target.split(".")[1]
        self.values[OpRef(position)] = (
            self.normalised(position, node, name) if name in BUFFERS else self.result(node)
        )
        written = [] if name in BUFFERS else written_refs(node)
        for ref in written:
            value = self.single(OpRef(position))
            if self.overlaps(ref, node):
                value = self.values[OpRef(position)] = _whole_of([self.single(ref)], value)
            self.write(ref, value, position)
        shared = tuple(dict.fromkeys(aliased_refs(node)))
        if shared:
            self.above[position] = shared
            for ref in shared:
                self.below.setdefault(ref, []).append(position)

    def result(self, node: OpNode) -> Result:
        if node.target == GETITEM:
            of, at = node.args
            several = self.read(of)
            if not isinstance(several, tuple) or type(at) is not int:
                raise TypeError("an item of what is no tuple")
            item: Value = several[at]
            return item
        call = called(node, self.read, self.batch, self.least)
        return _named(transferred(call), node, call.values)

    def read(self, arg: Arg) -> object:
        """A literal as it is, the value of a reference; KeyError for what is not computed yet."""
        if isinstance(arg, tuple):
            return tuple(self.read(item) for item in arg)
        return self.values[arg] if isinstance(arg, OpRef | LeafRef) else arg

    def single(self, ref: Ref) -> Value:
        found = self.values[ref]
        if isinstance(found, tuple):
            raise TypeError("a tuple is written")
        return found

    # ---------------------------------------------------------------- writes

    def overlaps(self, into: Ref, node: OpNode) -> bool:
        """Return whether the op reads, while it writes ``into``, the same memory under another name."""
        others = {ref for ref in arguments(node) if isinstance(ref, OpRef | LeafRef) and ref != into}
        return any(self.roots(into) & self.roots(ref) for ref in others)

    def roots(self, ref: Ref) -> set[Ref]:
        """The tensors whose memory ``ref`` may share, views of none."""
        seen, stack = {ref}, [ref]
        while stack:
            ref = stack.pop()
            bases = self.above.get(ref.op, ()) if isinstance(ref, OpRef) else ()
            stack.extend(base for base in bases if base not in seen)
            seen.update(bases)
        return {ref for ref in seen if isinstance(ref, LeafRef) or ref.op not in self.above}

    def write(self, ref: Ref, value: Value, position: int, statistic: bool = False) -> None:
        """``ref`` holds ``value`` now, and so does what it is a view of."""
        bases = self.above.get(ref.op, ()) if isinstance(ref, OpRef) else ()
        self.written.add(ref)
        self.count(1)
        before = self.values[ref]
        self.values[ref] = _all_of(before, value) if isinstance(before, tuple) else value
        for base in bases:
            self.write(base, self.merged(ref, base, value), position, statistic)
        if isinstance(ref, LeafRef):
            self.writes.append(Write(ref, position, value, statistic))
        elif not bases and ref.op in self.program.constant_ops and value.kind is not Kind.CLEAN:
            raise _refusal(
                self.nodes[ref.op], "it is declared constant and yet written with what inputs give"
            )
        if not bases:
            self.review(ref)

    def count(self, more: int) -> None:
        self.reviews += more
        if self.reviews > MAX_REVIEWS:
            raise UnsupportedOp("the graph writes into views too often to be looked through; it is refused")

    def merged(self, ref: Ref, base: Ref, value: Value) -> Value:
        """Return the value of ``base`` after ``value`` was written into ``ref``, a view of it."""
        before = self.values[base]
        if not isinstance(ref, OpRef):
            raise TypeError("a leaf is no view")
        node = self.nodes[ref.op]
        if isinstance(before, tuple):
            return _whole_of(before, value)
        name = node.target.split(".")[1]
        if name in _ALIASES or written_refs(node):
            return value
        if name in ("slice", "select"):
            dim = wrapped(int(named_arguments(node).get("dim", 0)), len(before.shape))  # type: ignore[arg-type]
            return written_at(before, value, dim, removed=name == "select")
        if name in _SAME_ORDER and value.plain is before.plain:
            return pointwise([before, reshaped(value, before.shape)], before.shape)
        return _whole_of((before,), value, before.shape)

    def review(self, root: Ref) -> None:
        """Read all views of ``root`` again, in order."""
        found: set[int] = set()
        stack = [root]
        while stack:
            for position in self.below.get(stack.pop(), ()):
                if position not in found:
                    found.add(position)
                    stack.append(OpRef(position))
        self.count(len(found))
        self.written |= {OpRef(position) for position in found}
        for position in sorted(found):
            self.values[OpRef(position)] = self.viewed(position)

    def viewed(self, position: int) -> Result:
        node, before = self.nodes[position], self.values[OpRef(position)]
        written = [] if node.target == GETITEM else written_refs(node)
        now: Result = self.single(written[0]) if written else self.result(node)
        if isinstance(before, tuple) or isinstance(now, tuple):
            return now
        if node.target not in HIDDEN_VIEWS and node.target.split(".")[1] not in _MAY_COPY:
            return now
        return pointwise([before, now], now.shape)

    # ---------------------------------------------------------------- batch norm

    def normalised(self, position: int, node: OpNode, name: str) -> Value:
        """Normalise each channel over the samples, and move the running statistics."""
        call = called(node, self.read, self.batch, self.least)
        value, training = call.value("input"), call.given.get(BUFFERS[name])
        if type(training) is not bool:
            raise ValueError(f"{BUFFERS[name]} is {training!r}")
        result = _named(_normalised(call.values, value, call.shape), node, call.values)
        given = {
            key: arg for key, arg in named_arguments(node).items() if key in STATISTICS and arg is not None
        }
        if training:
            for key, arg in given.items():
                self.statistic(position, node, arg, key, value, call.given.get("momentum"))
        return result if isinstance(result, Value) else raw(call.shape, "")

    def statistic(
        self, position: int, node: OpNode, arg: Arg, key: str, value: Value, momentum: object
    ) -> None:
        channels = value.shape[1:2]
        if not isinstance(arg, LeafRef) or self.single(arg).shape != channels:
            raise _refusal(node, f"its {key} is not a buffer of {channels} elements")
        real = isinstance(momentum, int | float) and 0.0 < momentum <= 1.0
        over_all = value.kind is Kind.ROWS and value.dim == 0 and value.strict
        if value.kind is Kind.CLEAN:
            found = pointwise([self.single(arg), plain(channels, Kind.CLEAN)], channels)
        elif real and over_all:
            found = plain(channels, Kind.MEAN)
        else:
            found = raw(channels, _why_no_statistic(value, momentum))
        self.write(arg, found, position, statistic=found.kind is Kind.MEAN)


def _whole_of(parts: Sequence[Value], value: Value, shape: tuple[int, ...] | None = None) -> Value:
    """Return the value of a tensor of which one view, at an unknown position, became ``value``."""
    shape, kind = value.shape if shape is None else shape, max(v.kind for v in (*parts, value))
    if kind <= Kind.MEAN:
        return plain(shape, kind, Vary.PLACED, first_why([*parts, value]))
    return raw(shape, "it writes samples through a view")


def _all_of(parts: Sequence[Value], value: Value) -> tuple[Value, ...]:
    return tuple(_whole_of(parts, value, part.shape) for part in parts)


def _why_no_statistic(value: Value, momentum: object) -> str:
    if value.why:
        return value.why
    if value.kind is Kind.ROWS and value.dim == 0:
        return f"its momentum {momentum!r} is not within (0, 1]"
    return "its statistics are not over the samples of a micro-batch"


def _normalised(values: Sequence[Value], value: Value, shape: tuple[int, ...]) -> Value:
    others = [v for v in values if v is not value]
    if (found := next((v for v in values if v.kind is Kind.RAW), None)) is not None:
        return replace(found, shape=shape)
    if value.kind is Kind.ROWS and value.dim == 0 and all(v.plain for v in others):
        return replace(value, why=value.why or next((v.why for v in others if v.why), ""))
    return blend(values, shape) or raw(shape, "it normalises over another dim than the samples'")


def _named(found: Result, node: OpNode, given: Sequence[Value]) -> Result:
    """New reasons with the op that gave them."""
    known = {v.why for v in given}

    def named(value: Value) -> Value:
        return (
            value
            if value.why in known or not value.why
            else replace(value, why=f"{described(node)}: {value.why}")
        )

    return tuple(map(named, found)) if isinstance(found, tuple) else named(found)


def described(node: OpNode) -> str:
    """An op for people: target, name, where it stands in the owner's code."""
    where = f" in {node.module_path[:200]}" if node.module_path else ""
    line = f" at {node.source_line[:200]}" if node.source_line else ""
    return f"op {node.target[:120]} ({node.name[:80]}){where}{line}"


def _refusal(node: OpNode, why: str) -> UnsupportedOp:
    return UnsupportedOp(f"{described(node)}: {why}; it is refused")


def walk(
    programs: Sequence[StageProgram],
    inputs: Mapping[str, TensorMeta],
    metas: Mapping[str, TensorMeta],
    least: int = 2,
) -> tuple[Walked, ...]:
    """Walk programs that share buffers; ``inputs`` have the samples along their first dim.

    ``metas``: of every other leaf. ``least``: samples that dropout must leave on average for a sum to count
    as one over all. UnsupportedOp for a program that no honest capture makes.
    """
    held: dict[str, Value] = {}
    for _ in range(MAX_PASSES):
        found = tuple(_walked(program, inputs, metas, least, held) for program in programs)
        after = dict(held)
        for each in found:
            for write in (w for w in each.writes if w.leaf.source is not Source.INPUT):
                name = write.leaf.name
                # Every state on the way counts: the next program may begin with any.
                before = after.get(name) or plain(metas[name].shape, Kind.CLEAN)
                after[name] = _kept_reason(before, pointwise([before, write.value], before.shape))
        if after == held:
            return found
        held = after
    raise UnsupportedOp("what the graph's buffers hold does not settle; it is refused")


def _kept_reason(before: Value, after: Value) -> Value:
    return before if before.kind is Kind.RAW and after.kind is Kind.RAW else after


def _walked(
    program: StageProgram,
    inputs: Mapping[str, TensorMeta],
    metas: Mapping[str, TensorMeta],
    least: int,
    held: Mapping[str, Value],
) -> Walked:
    values: dict[Ref, Result] = {
        LeafRef(Source.INPUT, name): samples_of(inputs[name].shape) for name in program.inputs
    }
    batch = next((meta.shape[0] for meta in inputs.values()), 0)
    for source, names in (
        (Source.PARAMETER, program.parameters),
        (Source.BUFFER, program.buffers),
        (Source.CONSTANT, program.constants),
    ):
        for name in names:
            values[LeafRef(source, name)] = held.get(name) or plain(metas[name].shape, Kind.CLEAN)
    return _Walk(program, batch, least, values).run()


__all__ = ["Walked", "Write", "described", "walk"]
