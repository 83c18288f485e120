"""Callables that run ops, with the checks of values that their kernels need."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from atoll.detours import detoured
from atoll.ops import GETITEM, overload
from atoll.value_guards import guarded

_UNINITIALISED = frozenset({"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"})


@lru_cache(maxsize=4096)
def resolve(target: str) -> Callable[..., Any]:
    """The callable that runs ``target``, with the checks of values that its kernel needs; UnsupportedOp when
    it is not on the list."""
    if target == GETITEM:
        return operator.getitem
    found: Callable[..., Any] = overload(target)
    if target in _UNINITIALISED:
        return lambda *args, **kwargs: found(*args, **kwargs).zero_()
    return guarded(target, detoured(target, found))
