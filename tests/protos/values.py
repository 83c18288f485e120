"""Values of any message's dataclass for Hypothesis, by its type hints and bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from atoll import bounded
from atoll.bounded import (
    At,
    Chars,
    Clean,
    Coded,
    Hex,
    Host,
    Identifier,
    Most,
    Once,
    Plain,
    Sha256,
    Within,
    ZeroIs,
)

WORDS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=6)
MOST_INT = 2**32 - 1  # of most fields
ENTRIES = 3


def values(kind: Any, own: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Values of a dataclass; ``own``: of irregular types, and of fields by the name in their ``Coded``."""
    if kind in own:
        return own[kind]
    hints = get_type_hints(kind, include_extras=True)
    fields = {}
    for field in dataclasses.fields(kind):
        hint, marks = _unwrapped(hints[field.name])
        if any(isinstance(mark, bounded.Unsent) for mark in marks):
            continue
        fields[field.name] = _of(hint, marks, own)
    return st.builds(kind, **fields)


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    marks: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        marks = (*marks, *more)
    return hint, marks


def _of(hint: Any, marks: tuple[Any, ...], own: Mapping[Any, Any]) -> st.SearchStrategy[Any]:
    for mark in marks:
        if isinstance(mark, Coded) and mark.name in own:
            return own[mark.name]  # type: ignore[no-any-return]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner, more = _unwrapped(next(option for option in arguments if option is not NoneType))
        return st.none() | _of(inner, (*marks, *more), own)
    most = min(ENTRIES, next((mark.entries for mark in marks if isinstance(mark, Most)), ENTRIES))
    if origin in (dict, Mapping):
        key, value = (_of(*_unwrapped(argument), own) for argument in arguments)
        return st.dictionaries(key, value, max_size=most)
    if origin is frozenset:
        return st.frozensets(_of(*_unwrapped(arguments[0]), own), max_size=most)
    if origin is tuple and arguments[-1] is Ellipsis:
        once = any(isinstance(mark, Once) for mark in marks)
        return st.lists(_of(*_unwrapped(arguments[0]), own), max_size=most, unique=once).map(tuple)
    if origin is tuple:
        return st.tuples(*(_of(*_unwrapped(argument), own) for argument in arguments))
    if dataclasses.is_dataclass(hint):
        return values(hint, own)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return _scalar(hint, marks)


def _scalar(hint: Any, marks: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    for mark in marks:
        match mark:
            case Within(low, high) if hint is int:
                return st.integers(int(low), MOST_INT if math.isinf(high) else min(int(high), MOST_INT))
            case Within(low, high):
                least = 0.25 if any(isinstance(each, ZeroIs) for each in marks) else low
                return st.sampled_from([x for x in (least, 0.25, 0.5, 1.0, 3.5, 1e6) if low <= x <= high])
            case Sha256(empty) | Hex(empty=empty) if empty:
                return st.just("") | _scalar(hint, (dataclasses.replace(mark, empty=False),))
            case Sha256():
                return st.binary(min_size=32, max_size=32).map(bytes.hex)
            case Hex(n_bytes):
                return st.binary(min_size=n_bytes, max_size=n_bytes).map(bytes.hex)
            case Host() | Plain() | Identifier() | Clean() | Chars():
                return WORDS
            case At() | _:
                continue
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(0, MOST_INT),
        float: st.floats(0, 1e6, width=32),
        bytes: st.binary(max_size=8),
        str: WORDS,
    }
    return simple[hint]
