"""How a value lies on the processes of a mesh, and what moves it from one way to another. Pure.

A value is whole on each process (``None``), or each has an equal ``Split`` of one dimension. Gradients lie as
their values do; whole ones are complete, never parts of a sum. Around experts there are two layouts more:
``Parts`` of a sum, and whole values whose gradients are parts of one (``Lent``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.opdag import TensorMeta


class Inside(StrEnum):
    """Ways in which the processes of a member divide a stage: its inside plan."""

    SHARDS = "shards"  # each has its rows of a micro-batch and its part of every matrix, gathered at use
    TENSOR = "tensor"  # each has its heads, hidden units and rows of the vocabulary, for all rows
    SEQUENCE = "sequence"  # each has its tokens of every row; matrices as in shards
    RING = "ring"  # as sequence, but in attention keys and values go round, a block at a time
    EXPERTS = "experts"  # as shards, and each has its experts whole, for the tokens of all
    DATA = "data"  # each has its rows of a micro-batch and the whole model; gradients are summed once a step


@dataclass(frozen=True, slots=True)
class Split:
    """An equal block of dimension ``dim`` for each process; of ``parts`` equal pieces of it, one behind the
    other, a block of each (queries, keys and values in one product)."""

    dim: int
    parts: int = 1

    def fits(self, shape: tuple[int, ...], size: int) -> bool:
        """Return whether a tensor of this shape can be split so among ``size`` processes."""
        return (
            0 <= self.dim < len(shape) and shape[self.dim] > 0 and shape[self.dim] % (size * self.parts) == 0
        )

    def local(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape that each process has of ``shape``."""
        return tuple(n // size if at == self.dim else n for at, n in enumerate(shape))


@dataclass(frozen=True, slots=True)
class Parts:
    """The whole shape, a part of a sum; gradients are whole. ``groups``: position of the op with the ends of
    groups of rows, of which each process has its own, and zeros elsewhere; -1 where parts may overlap."""

    groups: int = -1

    def fits(self, shape: tuple[int, ...], size: int) -> bool:
        return True

    def local(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return shape


@dataclass(frozen=True, slots=True)
class Lent:
    """Whole on each process, for work that is divided: gradients are parts of a sum."""

    def fits(self, shape: tuple[int, ...], size: int) -> bool:
        return True

    def local(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return shape


Layout = Split | Parts | Lent | None


class Way(StrEnum):
    """Moves of a value on its way into an op, with what each does to the gradient on its way back."""

    ENTER = "enter"  # whole, into work that is split: gradients are summed
    GATHER = "gather"  # of a split value the whole; of its gradient the own part
    TAKE = "take"  # of a whole value the own part; gradients are gathered
    LEND = "lend"  # of a split value the whole, into work that is split: gradients are summed and split
    SUM = "sum"  # of parts the sum; gradients stay
    SCATTER = "scatter"  # of parts the own part of the sum; gradients are gathered
    FETCH = "fetch"  # of a stored shard the whole; gradients are summed, each keeps its shard of the sum
    COPY = "copy"  # the same into work that every process does: of the gradient the own shard
    ROUND = "round"  # the own part stays, a copy goes round all processes; so do sums of gradients


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to one argument; ``split``: how it lies before (GATHER, LEND) or afterwards (TAKE,
    SCATTER). ``shape``: of the whole. ``of``: position of the op that made it, -1 of a named tensor."""

    way: Way
    shape: tuple[int, ...]
    nbytes: int  # of the whole
    split: Split | None = None
    of: int = -1
    last: bool = True  # the last ENTER of this value in the program
    differentiable: bool = False


class Kernel(StrEnum):
    """What a process runs in place of an op, where splitting changes more than shapes."""

    ROW = "row"  # a product over a split dimension: sums, then the bias
    ROWS_MEAN = "rows_mean"  # a mean over split rows
    ROWS_LOSS = "rows_loss"  # a mean loss over the counted rows of a split micro-batch
    VOCABULARY = "vocabulary"  # an embedding in a table split by rows
    VOCABULARY_LOSS = "vocabulary_loss"  # a cross-entropy over split classes
    EXPERTS = "experts"  # products of groups of rows, those of the own experts
    CAUSAL = "causal"  # attention of own queries to keys up to their own
    RING = "ring"  # attention of own queries to each process's keys in turn
    RING_CAUSAL = "ring_causal"  # the same, to keys up to their own
    DROPOUT = "dropout"  # as drawn for the whole value


def local_meta(meta: TensorMeta, layout: Layout, size: int) -> TensorMeta:
    """Return what one process has of a tensor."""
    from atoll.opdag import TensorMeta as Meta

    return meta if layout is None else Meta(layout.local(meta.shape, size), meta.dtype)


def shard_rows(rows: int, size: int) -> int:
    """Return the rows of a stored shard: as many on each process, the last one's filled up with zeros."""
    return -(-rows // size)
