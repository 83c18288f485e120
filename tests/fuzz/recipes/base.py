"""Random choices, and the register of recipes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.case import Tensorlike

SIZES = (1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17)
FLOATS = ("float32", "float32", "float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Draw:
    """Random choices of one case."""

    rng: random.Random

    def size(self, low: int = 1, high: int = 17) -> int:
        return min(max(self.rng.choice(SIZES), low), high)

    def sizes(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.rng.randint(low, high)))

    def one(self, items: Sequence[Any]) -> Any:
        return self.rng.choice(items)

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def dtype(self) -> str:
        return self.rng.choice(FLOATS)

    def dim(self, shape: Sequence[int]) -> int:
        return self.rng.randrange(-len(shape), len(shape)) if shape else 0


Recipe = Callable[[Draw], dict[str, Any]]
RECIPES: dict[str, Recipe] = {}


def t(*shape: int, dtype: str = "float32", fill: str = "normal", bound: int = 2) -> Tensorlike:
    """A floating tensor."""
    return Tensorlike(tuple(shape), dtype, fill, bound)


def ids(bound: int, *shape: int, dtype: str = "int64") -> Tensorlike:
    """Indices below ``bound``."""
    return Tensorlike(tuple(shape), dtype, "index", bound)


def recipe(names: str) -> Callable[[Recipe], Recipe]:
    """Register one for ops by name, in place or not; "NAME:OVERLOAD" goes before "NAME"."""

    def register(found: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(names.split(), found))
        return found

    return register
