"""Facts and what they fold to as JSON: for the journal's records and its snapshots. Pure.

A value's form follows from its type alone: jobs and plans in the wire's schema as base64, other dataclasses
as objects by field, tuples and sets as lists, what JSON knows as it is. Fields that were added since have
defaults.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from atoll.job import JobSpec
from atoll.plan import Plan
from protos.convert import decode, encode

T = TypeVar("T")
Reader = Callable[[Any], Any]


def to_json(value: Any) -> Any:
    """Return the JSON-able form of a value."""
    match value:
        case JobSpec() | Plan():
            return base64.b64encode(encode(value)).decode()
        case StrEnum():
            return value.value
        case str() | int() | float() | None:
            return value
        case Mapping():
            return {key: to_json(held) for key, held in value.items()}
        case set() | frozenset():
            return sorted(value)
        case tuple() | list():
            return [to_json(held) for held in value]
    return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}


def from_json(kind: type[T], value: Any) -> T:
    """Return the ``kind`` that has this form; ValueError, TypeError, KeyError or BadFrame for others."""
    hint: Any = kind
    read = reader(hint)
    found: T = value if read is None else read(value)
    return found


@cache
def reader(hint: Any) -> Reader | None:
    """Return what reads values of a type, None where their form is the value: types are looked at once."""
    if hint is JobSpec or hint is Plan:
        return lambda value: decode(hint, base64.b64decode(value, validate=True))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _optional(reader(next(argument for argument in arguments if argument is not NoneType)))
    if origin in (tuple, list):
        return _sequence(reader(arguments[0]), origin)
    if origin in (dict, Mapping):
        return _mapping(reader(arguments[1]))
    if origin is set:
        return set
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    return _fields(hint) if dataclasses.is_dataclass(hint) else None


def _optional(read: Reader | None) -> Reader | None:
    return None if read is None else lambda value: None if value is None else read(value)


def _sequence(read: Reader | None, kind: Callable[[Any], Any]) -> Reader:
    return kind if read is None else lambda value: kind(map(read, value))


def _mapping(read: Reader | None) -> Reader | None:
    return None if read is None else lambda value: {key: read(held) for key, held in value.items()}


def _fields(kind: Any) -> Reader:
    @cache
    def readers() -> list[tuple[str, Reader]]:
        """By field; found at the first value, as a type may have fields of its own type."""
        hints = get_type_hints(kind)
        known = {field.name: reader(hints[field.name]) for field in dataclasses.fields(kind)}
        return [(name, read) for name, read in known.items() if read is not None]

    def read_all(value: Mapping[str, Any]) -> Any:
        values = dict(value)
        for name, read in readers():
            if name in values:
                values[name] = read(values[name])
        return kind(**values)

    return read_all
