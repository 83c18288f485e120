"""Arguments that fit together, for ops whose tensors depend on each other's shapes.

A recipe takes a ``Draw`` and returns the op's arguments by name; what it leaves out is drawn by the schema
(``tests.fuzz.generate``). Ops without a recipe get tensors of one shape, which suits all that is pointwise.
"""

from tests.fuzz.recipes import indexing, layers, matrices, others, shapes, windows  # they register themselves
from tests.fuzz.recipes.base import RECIPES, SIZES, Draw

__all__ = ["RECIPES", "SIZES", "Draw", "indexing", "layers", "matrices", "others", "shapes", "windows"]
