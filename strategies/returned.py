"""Check of the data that a federated graph may return: nothing that holds a single sample by its position.

Beside the update of the weights a job's model owner hears of buffers, metrics and losses. Of those that
depend on the data there may be: batch norm's running statistics, single numbers in which every sample of a
micro-batch counts alike, and what a strategy's own method measures (``Strategy.statistics``). Owner and
clients both ask; a client believes neither owner nor coordinator. What no look at a graph can tell:
gradients of few samples hold them, and a graph may pick a sample by its values (docs/federated.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import UnsupportedOp, UsageError
from atoll.flow.value import Kind
from atoll.flow.walk import described, walk
from atoll.opdag import OpRef, Source

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from atoll.federated import Floors
    from atoll.flow.value import Value
    from atoll.flow.walk import Walked, Write
    from atoll.opdag import TensorMeta
    from atoll.program import StageProgram
    from strategies.base import Strategy

REFUSED = "it is refused (docs/federated.md, what a federated graph may return)"


def check_returned(
    programs: Sequence[StageProgram],
    inputs: Mapping[str, TensorMeta],
    metas: Mapping[str, TensorMeta],
    rule: Strategy,
    floors: Floors,
) -> None:
    """Raise UnsupportedOp naming what of a job's ``programs``, training first, would take samples home.

    ``inputs``: samples along the first dim; ``metas``: of every other leaf. UsageError for a micro-batch of
    fewer samples than ``floors`` demands.
    """
    for name, meta in inputs.items():
        if not meta.shape or meta.shape[0] < floors.batch:
            raise UsageError(
                f"input {name!r} of shape {meta.shape}: data owners demand micro-batches of {floors.batch} "
                "samples; make the job's larger, or have them lower --min-batch"
            )
    walked = walk(programs, inputs, metas, floors.batch)
    own = rule.statistics
    if own:
        rule.check_statistics(walked, floors.batch)
    for at, each in enumerate(walked):
        _check(each, own if at == 0 else ())


def check_rows(
    evaluation: StageProgram,
    inputs: Mapping[str, TensorMeta],
    metas: Mapping[str, TensorMeta],
    floors: Floors,
) -> None:
    """The same of an evaluation alone, with another number of rows than the job's micro-batch."""
    (walked,) = walk([evaluation], inputs, metas, floors.batch)
    _check(walked, ())


def _check(walked: Walked, own: Collection[str]) -> None:
    for write in walked.writes:
        _check_write(walked, write, own)
    _check_outputs(walked)


def _check_write(walked: Walked, write: Write, own: Collection[str]) -> None:
    leaf, value = write.leaf, write.value
    op = described(walked.nodes[write.position])
    if leaf.source in (Source.PARAMETER, Source.CONSTANT):
        raise UnsupportedOp(f"{leaf.source} {leaf.name!r} is written in place by {op}; {REFUSED}")
    if leaf.source is Source.INPUT or value.kind is Kind.CLEAN or write.statistic or leaf.name in own:
        return
    if value.kind is Kind.MEAN and value.strict and value.shape in ((), (1,)):
        return
    raise UnsupportedOp(
        f"buffer {leaf.name!r} would take data home: {op} writes {_held(value)} into it; of what depends on "
        "the data a buffer may hold batch norm's running statistics, or one number that is a sum or mean "
        f"over the micro-batch; {REFUSED}"
    )


def _check_outputs(walked: Walked) -> None:
    loss = walked.program.loss
    if loss is None:
        raise UsageError("a program without its loss")
    for what, position in (("the loss", loss), *((f"metric {n!r}", op) for n, op in walked.program.metrics)):
        if position not in walked.nodes:
            raise UnsupportedOp(f"{what} is computed by no op; {REFUSED}")
        value = walked.single(OpRef(position))
        single = value.shape in ((), (1,))
        if single and value.plain and (value.strict or position == loss):
            continue
        op = described(walked.nodes[position])
        raise UnsupportedOp(
            f"{what} would take data home: {op} gives {_held(value)}; it must be one number that is a sum or "
            f"mean over the micro-batch, or follows from such; {REFUSED}"
        )


def _held(value: Value) -> str:
    """Return what a value holds of the samples, for people."""
    why = f" ({value.why})" if value.why else ""
    match value.kind:
        case Kind.ROWS:
            return f"what each sample gives{why}"
        case Kind.PAIRS:
            return f"what each pair of samples gives{why}"
        case Kind.RAW:
            return f"what is not a sum or mean over samples{why}"
        case _:
            return f"{'x'.join(map(str, value.shape)) or 'one'} means of the data{why}"
