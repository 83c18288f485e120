"""Layout: which tensors of a flat gradient travel as factors of low rank, and which dense.

Vectors, and matrices that would not shrink, follow the factors in the same row of elements, so that a phase
stays one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.opdag import TensorMeta
from compressors.contrib.low_rank.factors import Matrix
from compressors.contrib.low_rank.ranks import gradient_matrix
from strategies.exchanges.base import OWN, Flat, Kept

BASIS = "basis"
"""Key of a tensor's basis, equal at all ranks."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows, columns and rank of every tensor in turn; rank 0: it travels dense."""

    tensors: tuple[tuple[int, int, int], ...]

    @property
    def factored(self) -> tuple[tuple[int, int, int], ...]:
        """Those that travel as factors."""
        return tuple(tensor for tensor in self.tensors if tensor[2])

    def split(self, flat: Tensor) -> tuple[list[Matrix], Tensor]:
        """The matrices of ``flat`` [n] that are factored, sharing its memory, and all other elements."""
        parts = torch.split(flat, [rows * columns for rows, columns, _ in self.tensors])
        matrices, rest = [], [flat[:0]]
        for part, (rows, columns, rank) in zip(parts, self.tensors, strict=True):
            if rank:
                matrices.append(part.view(rows, columns))
            else:
                rest.append(part)
        return matrices, torch.cat(rest)

    def joined(self, matrices: Sequence[Matrix], rest: Tensor) -> Tensor:
        """The flat tensor [n] that ``split`` takes apart."""
        waiting, at, parts = iter(matrices), 0, []
        for rows, columns, rank in self.tensors:
            if rank:
                parts.append(next(waiting).reshape(-1))
            else:
                parts.append(rest[at : at + rows * columns])
                at += rows * columns
        return torch.cat(parts)

    def factors(self, row: Tensor, *, left: bool) -> tuple[list[Matrix], Tensor]:
        """Factors [rows, rank] (``left``) or [columns, rank] at the head of a row, and what follows them."""
        shapes = [(rows if left else columns, rank) for rows, columns, rank in self.factored]
        sizes = [length * rank for length, rank in shapes]
        *parts, rest = torch.split(row, [*sizes, row.numel() - sum(sizes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], rest

    def row_size(self, *, left: bool) -> int:
        """Elements of a row of factors, left or right ones, without what travels dense."""
        return sum((rows if left else columns) * rank for rows, columns, rank in self.factored)

    @property
    def rest(self) -> int:
        """Elements that travel dense."""
        return sum(rows * columns for rows, columns, rank in self.tensors if not rank)

    def stored(self, flat: Flat, residual: Tensor, bases: Sequence[Matrix]) -> list[dict[str, Tensor]]:
        """What is kept of each tensor: its residual and basis where it travels as factors, else nothing."""
        waiting = iter(bases)
        return [
            {OWN: part, BASIS: next(waiting)} if rank else {}
            for part, (_, _, rank) in zip(flat.tensors(residual), self.tensors, strict=True)
        ]

    def bases(self, kept: Sequence[Kept]) -> list[Matrix] | None:
        """The bases of what is kept, None where one is missing."""
        found = [one.get(BASIS) for one, (_, _, rank) in zip(kept, self.tensors, strict=True) if rank]
        bases = [basis for basis in found if basis is not None]
        return bases if len(bases) == len(found) else None


def layout_of(flat: Flat, rank_of: Callable[[TensorMeta], int]) -> Layout:
    """Layout of float32 tensors of these shapes, with the ranks that ``rank_of`` allows them."""
    tensors = []
    for shape in flat.shapes:
        meta = TensorMeta(shape, "float32")
        matrix = gradient_matrix(meta)
        tensors.append((*matrix, rank_of(meta)) if matrix else (meta.elements, 1, 0))
    return Layout(tuple(tensors))


def row_of(factors: Sequence[Matrix], rest: Tensor) -> Tensor:
    """Elements of the factors one after another, then ``rest``."""
    return torch.cat([*(factor.reshape(-1) for factor in factors), rest])
