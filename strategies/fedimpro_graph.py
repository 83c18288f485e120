"""Check that a captured graph measures FedImpro's statistics, and nothing else.

The buffers of class means, deviations and counts go home with each update. So what is written into them
is compared, op by op, with what ``strategies.fedimpro_module`` is captured as. That is, of each class with at
least ``min_samples`` samples in the micro-batch, mean and deviation of the features, moved towards by a fixed
share, and how many samples those were. Dims: B batch, C classes, D elements of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.errors import UnsupportedOp
from atoll.flow.value import Kind
from atoll.flow.walk import described
from atoll.opdag import Arg, LeafRef, OpRef, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.flow.walk import Walked, Write


@dataclass(frozen=True)
class Op:
    """A call of ``target`` with arguments that match."""

    target: str
    args: tuple[object, ...]


@dataclass(frozen=True)
class Some:
    """Any reference, the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Number:
    """Any literal number; the largest and the least of a name are kept."""

    name: str


def op(target: str, *args: object) -> Op:
    """A pattern of an aten op."""
    return Op(f"aten.{target}", args)


CASTS = frozenset({"aten.to.dtype", "aten.detach.default", "aten.alias.default", "aten._to_copy.default"})
LABELS, FEATURES = Some("labels"), Some("features")
MEMBER = op("one_hot.default", LABELS, Number("classes"))
COUNTS = op("sum.dim_IntList", MEMBER, (0,))
ENOUGH = op("ge.Scalar", COUNTS, Number("min_samples"))
DIVISOR = op("unsqueeze.default", op("clamp.default", COUNTS, Number("at_least")), 1)
MEANS = op("div.Tensor", op("matmul.default", op("numpy_T.default", MEMBER), FEATURES), DIVISOR)
CENTRED = op("sub.Tensor", FEATURES, op("index.Tensor", MEANS, (LABELS,)))
SQUARES = op("matmul.default", op("numpy_T.default", MEMBER), op("square.default", CENTRED))
STDS = op("sqrt.default", op("div.Tensor", SQUARES, DIVISOR))


def _moved(buffer: LeafRef, towards: Op) -> Op:
    return op(
        "add.Tensor", op("mul.Tensor", buffer, Number("beta")), op("mul.Tensor", towards, Number("share"))
    )


def _learned(buffer: LeafRef, moved: Op) -> Op:
    return op("where.self", op("unsqueeze.default", ENOUGH, 1), moved, buffer)


def patterns(means: str, stds: str, counts: str) -> dict[str, Op]:
    """Return the ops that write each of the three buffers."""
    mean, std, count = (LeafRef(Source.BUFFER, name) for name in (means, stds, counts))
    spread = op("clamp.default", _moved(std, STDS), None, Number("max_std"))
    return {
        means: op("copy_.default", mean, _learned(mean, _moved(mean, MEANS))),
        stds: op("copy_.default", std, _learned(std, spread)),
        counts: op("add_.Tensor", count, op("mul.Tensor", COUNTS, ENOUGH)),
    }


@dataclass
class _Match:
    walked: Walked
    named: dict[str, Arg] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)  # positions of ops that matched

    def fits(self, pattern: object, arg: Arg) -> bool:
        if isinstance(pattern, Number):
            if isinstance(arg, bool) or not isinstance(arg, int | float):
                return False
            self.least[pattern.name] = min(self.least.get(pattern.name, arg), arg)
            return True
        if isinstance(pattern, tuple):
            return isinstance(arg, tuple) and len(arg) == len(pattern) and all(map(self.fits, pattern, arg))
        if isinstance(pattern, Some):
            return self.named.setdefault(pattern.name, arg) == arg and isinstance(arg, OpRef | LeafRef)
        if not isinstance(pattern, Op):
            return pattern == arg and type(pattern) is type(arg)
        if isinstance(arg, OpRef):
            arg = self.through(arg, pattern)
        return isinstance(arg, OpRef) and self.called(pattern, arg.op)

    def called(self, pattern: Op, position: int) -> bool:
        node = self.walked.nodes[position]
        self.passed.add(position)
        if node.target != pattern.target or node.kwargs or len(node.args) != len(pattern.args):
            return False
        return all(map(self.fits, pattern.args, node.args))

    def through(self, ref: OpRef, pattern: Op) -> Arg:
        """Return the source of ``ref``, looking through casts to another dtype."""
        while (node := self.walked.nodes[ref.op]).target in CASTS and node.target != pattern.target:
            self.passed.add(ref.op)
            (below, *_) = node.args
            if not isinstance(below, OpRef):
                return below
            ref = below
        return ref


def check_statistics(walked: Sequence[Walked], names: tuple[str, str, str], least: int) -> None:
    """Raise UnsupportedOp unless the first program writes the buffers ``names`` (means, stds, counts) as
    FedImpro does, each once, of classes of at least ``least`` samples, and no other program does."""
    match = _Match(walked[0])
    expected = patterns(*names)
    for name in names:
        writes = [w for each in walked for w in each.writes if w.leaf == LeafRef(Source.BUFFER, name)]
        if len(writes) != 1 or writes[0] not in walked[0].writes:
            raise _refusal(walked, name, writes, f"is written {len(writes)} times, not once in training")
        if not match.called(expected[name], writes[0].position):
            raise _refusal(walked, name, writes, "is not written as FedImpro's method does")
    found = match.least["min_samples"]
    if found < least:
        why = f"takes classes of {found:g} samples, {least} are demanded; set FedImpro(min_samples={least})"
        raise _refusal(walked, names[0], [], why)
    _check_operands(match, names)


def _check_operands(match: _Match, names: tuple[str, str, str]) -> None:
    """Labels and features are one a sample, and no op changes in place what was compared."""
    walked = match.walked
    for what in ("labels", "features"):
        ref = match.named[what]
        value = walked.single(ref)  # type: ignore[arg-type]
        one_each = value.kind is Kind.ROWS and value.dim == 0 and value.shape[0] == value.batch
        if not one_each or not value.strict:
            raise _refusal((walked,), names[0], [], f"is of {what} that are not one a sample {value.why}")
    own = {w.position for w in walked.writes if w.leaf.name in names}
    seen = {OpRef(at) for at in match.passed - own} | {match.named["labels"], match.named["features"]}
    if seen & walked.written:
        raise _refusal((walked,), names[0], [], "is computed from values that an op overwrites")


def _refusal(walked: Sequence[Walked], name: str, writes: Sequence[Write], why: str) -> UnsupportedOp:
    known = [w for w in writes if w in walked[0].writes]
    by = f" by {described(walked[0].nodes[known[0].position])}" if len(writes) == len(known) == 1 else ""
    return UnsupportedOp(
        f"buffer {name!r} {why}{by}; it may go home only as what FedImpro measures: wrap the net with this "
        "version's strategies.fedimpro_module.FedImpro and submit again; it is refused"
    )
