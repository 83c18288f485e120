"""Roles of a model's tensors under a strategy, by state-dict name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError
from atoll.opdag import DTYPE_BYTES, TensorMeta
from strategies.wrapped import NET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from atoll.opdag import StateMeta

    Array = NDArray[Any]
    Arrays = Mapping[str, Array]
    Slots = Mapping[str, Arrays]  # named sets of arrays: "control" -> arrays by tensor name
    SlotMetas = Mapping[str, Mapping[str, TensorMeta]]


class Role(StrEnum):
    """Role of a tensor of the state dict under a strategy."""

    TRAINED = "trained"  # has gradients; down and up every round
    AVERAGED = "averaged"  # floating buffer that training writes; down and up, always a plain mean
    TOLD = "told"  # the server's word, down only
    LOCAL = "local"  # each client keeps its own from round to round
    STILL = "still"  # with the job, once: integer counters, constants, frozen parameters


PIECE_ELEMENTS = 1 << 20
NUMPY_DTYPES = frozenset(DTYPE_BYTES) - {"bfloat16"}
SHARED = (Role.TRAINED, Role.AVERAGED)


@dataclass(frozen=True)
class Layout:
    """Shape, dtype and role of every tensor, in the state dict's order."""

    metas: Mapping[str, TensorMeta]
    roles: Mapping[str, Role]

    @classmethod
    def of(cls, arrays: Arrays, trained: Collection[str], written: Collection[str] = ()) -> Layout:
        """Roles of a model: ``trained`` have gradients, ``written`` are buffers that training writes.

        Integer buffers (BatchNorm's ``num_batches_tracked``) are never averaged: public code that
        does ends with a float counter, or a truncated one. UsageError for an unknown name or a
        trained tensor that is not floating.
        """
        unknown = sorted({*trained, *written} - set(arrays))
        if unknown:
            raise UsageError(f"{len(unknown)} names are not in the state dict, such as {unknown[0]!r}")
        roles = {}
        for name, array in arrays.items():
            floating = np.issubdtype(array.dtype, np.floating)
            if name in trained and not floating:
                raise UsageError(f"{name!r} is {array.dtype}; only floating tensors can be trained")
            known = Role.TRAINED if name in trained else Role.AVERAGED if name in written else Role.STILL
            roles[name] = known if floating else Role.STILL
        return cls({name: meta_of(array) for name, array in arrays.items()}, roles)

    @classmethod
    def of_state(cls, states: Mapping[str, StateMeta], frozen: Collection[str] = ()) -> Layout:
        """The roles of a captured model's parameters and buffers, as ``of`` gives them; ``frozen``: by
        the optimizer's groups. Coordinator and clients derive the same layout from the same metas.
        UsageError for a dtype that numpy does not have."""
        roles = {}
        for name, state in states.items():
            if state.meta.dtype not in NUMPY_DTYPES:
                raise UsageError(
                    f"{name!r} is {state.meta.dtype}, which strategies cannot average; keep the model in "
                    "float32 and set precision=BF16 for the computation"
                )
            trained = state.requires_grad and name not in frozen
            known = Role.TRAINED if trained else Role.AVERAGED if state.mutated else Role.STILL
            roles[name] = known if state.meta.dtype.startswith("float") else Role.STILL
        return cls({name: state.meta for name, state in states.items()}, roles)

    def names(self, *roles: Role) -> tuple[str, ...]:
        """The names that have one of ``roles``, in order."""
        return tuple(name for name in self.metas if self.roles[name] in roles)

    def metas_of(self, *roles: Role) -> dict[str, TensorMeta]:
        return {name: self.metas[name] for name in self.names(*roles)}

    def with_roles(self, role: Role, names: Iterable[str]) -> Layout:
        """The same tensors, ``names`` in another role."""
        return Layout(self.metas, {**self.roles, **dict.fromkeys(names, role)})


def own_parts(layout: Layout, patterns: Collection[str]) -> Layout:
    """The same tensors, those that match ``patterns`` local. UsageError for a pattern that matches no tensor
    that training changes: it would keep nothing at home."""
    changed = layout.names(*SHARED)
    for pattern in patterns:
        names = [n for n in changed if fnmatchcase(n, pattern) or fnmatchcase(n.removeprefix(NET), pattern)]
        if not names:
            raise UsageError(
                f"local: no tensor that training changes matches {pattern!r}; such are "
                f"{', '.join(changed[:6])}"
            )
        layout = layout.with_roles(Role.LOCAL, names)
    return layout


def meta_of(array: Array) -> TensorMeta:
    """Shape and dtype of a numpy array."""
    return TensorMeta(tuple(array.shape), str(array.dtype))


def pieces(size: int) -> Iterator[slice]:
    """Return slices of a flat array of ``size`` elements, so that computing on one needs no tensor's memory
    again."""
    return (slice(at, at + PIECE_ELEMENTS) for at in range(0, size, PIECE_ELEMENTS))


def parts(array: Array) -> Iterator[Array]:
    """The elements of an array in pieces, views where it is contiguous."""
    flat = array.reshape(-1)
    return (flat[piece] for piece in pieces(flat.size))


def zeros(layout: Layout, *roles: Role) -> dict[str, Array]:
    """A zero array for every name of ``roles``."""
    return {n: np.zeros(m.shape, m.dtype) for n, m in layout.metas_of(*roles).items()}
