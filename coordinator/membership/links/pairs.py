"""A dict keyed by ordered pairs of workers that can forget a worker without a look at everybody else's."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, MutableMapping
from typing import TypeVar, overload

from coordinator.planning.costs.fleet import Pair

V = TypeVar("V")
D = TypeVar("D")


class PairMap(MutableMapping[Pair, V]):
    """Values by (source, target), in the order in which the pairs came."""

    __slots__ = ("_of", "_values")

    def __init__(self) -> None:
        self._values: dict[Pair, V] = {}
        self._of: dict[str, dict[Pair, None]] = {}

    def of(self, worker: str) -> tuple[Pair, ...]:
        """Return the pairs that have this worker as an end."""
        return tuple(self._of.get(worker, ()))

    def forget(self, worker: str) -> None:
        """Remove every pair of a worker."""
        for pair in self.of(worker):
            del self[pair]

    def __getitem__(self, pair: Pair) -> V:
        return self._values[pair]

    def __setitem__(self, pair: Pair, value: V) -> None:
        if pair not in self._values:
            for worker in pair:
                self._of.setdefault(worker, {})[pair] = None
        self._values[pair] = value

    def __delitem__(self, pair: Pair) -> None:
        del self._values[pair]
        for worker in set(pair):
            del self._of[worker][pair]
            if not self._of[worker]:
                del self._of[worker]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, pair: object) -> bool:
        return pair in self._values

    @overload
    def get(self, pair: Pair, /) -> V | None: ...
    @overload
    def get(self, pair: Pair, default: V | D, /) -> V | D: ...
    def get(self, pair: Pair, default: D | None = None, /) -> V | D | None:
        """Return a pair's value, ``default`` without one."""
        return self._values.get(pair, default)

    def items(self) -> ItemsView[Pair, V]:
        """Return the pairs with their values."""
        return self._values.items()
