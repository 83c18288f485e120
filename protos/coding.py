"""One reader and one writer for every message, by the type hints of the dataclass that it stands for.

A field is read as its hint says and held against what is annotated (``atoll.bounded``): BadFrame names the
class, the field and the number. Lengths are looked at before anything is built. Checks over several fields
are functions (``CHECKS``). What a class's fields need is found out once: reading calls a function for each
field that has bounds.

Correspondence of types: a dataclass or a tuple is a message, a collection a repeated field, a mapping a map
or a repeated message whose first field is the key, ``X | None`` a field with presence, an enum its text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache, partial
from hashlib import sha256
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from atoll import bounded
from atoll.errors import BadFrame, UsageError
from atoll.federated import checked_name
from protos import bounds
from protos.text_limits import clean

if TYPE_CHECKING:
    from google.protobuf.message import Message

T = TypeVar("T")
Read = Callable[[Any], Any]
Write = Callable[[Any], Any]
Check = Callable[[Any], None]


class Form(NamedTuple):
    """How a class is read from its message, and written as arguments of the message's class."""

    read: Read
    write: Callable[[Any], dict[str, Any]]


class Code(NamedTuple):
    """How a field's value is read and written; None where it is the message's own."""

    read: Read | None
    write: Write | None


CHECKS: dict[type, Check] = {}
"""Checks of what was read; they raise BadFrame."""
CODES: dict[str, Form] = {}
"""Fields that are irregular, by the name in their ``Coded``: read from their whole message, written as its
fields. Of a mapping's values the message is the entry."""


def read(kind: type[T], message: Message) -> T:
    """Return the value that a peer's message stands for. Raises BadFrame, or what the class itself raises."""
    hint: Any = kind
    found: T = form(hint, message.DESCRIPTOR).read(message)
    return found


def fields_of(value: Any, descriptor: Any) -> dict[str, Any]:
    """Return a value as arguments of its message's class."""
    hint: Any = type(value)
    return form(hint, descriptor).write(value)


def write(value: Any, kind: type[Any]) -> Any:
    """Return the message of this class for a value. Raises UsageError for what it cannot carry."""
    try:
        return kind(**fields_of(value, kind.DESCRIPTOR))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{type(value).__name__}: {error}; a number has at most 64 bits") from None


def plain(message: Message, scalar: Read = lambda value: value) -> dict[str, Any]:
    """Return a message as values under its own field names; an unset optional is None. ``scalar``: what is to
    stand for a value that is no message."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        shown = scalar if field.message_type is None else partial(plain, scalar=scalar)
        if field.is_repeated:
            found[field.name] = [shown(each) for each in value]
        else:
            absent = field.has_presence and not message.HasField(field.name)
            found[field.name] = None if absent else shown(value)
    return found


def alike(value: Any, kind: type[Any], **others: Any) -> Any:
    """Return the message of this class whose fields are a value's of the same names, but for ``others``.
    AttributeError for a field that the value lacks."""
    names = (field.name for field in kind.DESCRIPTOR.fields if field.name not in others)
    return kind(**{name: getattr(value, name) for name in names}, **others)


def stable_bytes(message: Message) -> bytes:
    """Return a message's bytes, equal for equal messages."""
    return message.SerializeToString(deterministic=True)


def digest_of(*parts: Message | bytes) -> str:
    """Return the SHA-256 of the parts' own, so that no part's end can pass for another's beginning."""
    held = (part if isinstance(part, bytes) else stable_bytes(part) for part in parts)
    return sha256(b"".join(sha256(each).digest() for each in held)).hexdigest()


@cache
def form(kind: Any, descriptor: Any) -> Form:
    """Return how a class is read and written. TypeError for a field that its message lacks."""
    hints = get_type_hints(kind, include_extras=True)
    reads, plain, coded, spread, inner = [], [], [], [], []
    for field in dataclasses.fields(kind):
        hint, marks = _unwrapped(hints[field.name])
        if any(isinstance(mark, bounded.Unsent) for mark in marks):
            continue
        what = f"{kind.__name__}.{field.name}"
        own = next((CODES[mark.name] for mark in marks if isinstance(mark, bounded.Coded)), None)
        at = next((mark.names for mark in marks if isinstance(mark, bounded.At)), (field.name,))
        if any(isinstance(mark, bounded.Inline) for mark in marks):
            own = form(hint, descriptor)
        if own is not None or len(at) > 1:
            own = own or _flat(hint, [_field(descriptor, name) for name in at], what)
            reads.append((field.name, own.read))
            spread.append((field.name, own.write))
            continue
        (name,) = at
        held = _field(descriptor, name)
        code = _code(hint, marks, held, what)
        reads.append((field.name, attrgetter(name) if code.read is None else _got(name, code.read)))
        if get_origin(hint) in (Union, UnionType) or (held.message_type is not None and _unset(marks)):
            reads[-1] = (field.name, _present(name, reads[-1][1], _unset(marks)))
        if "." in name:
            outer, _, last = name.partition(".")
            inner.append((field.name, outer, last, code.write or _same))
        elif code.write is None:
            plain.append((field.name, name))
        else:
            coded.append((field.name, name, code.write))
    check = CHECKS.get(kind)
    names, getters = [name for name, _ in reads], [get for _, get in reads]
    in_order = names == [field.name for field in dataclasses.fields(kind)][: len(names)]

    def read_fields(message: Any) -> Any:
        values = [get(message) for get in getters]
        found = kind(*values) if in_order else kind(**dict(zip(names, values, strict=True)))
        if check is not None:
            check(found)
        return found

    def write_fields(value: Any) -> dict[str, Any]:
        found = {name: getattr(value, held) for held, name in plain}
        for held, name, encode in coded:
            part = getattr(value, held)
            if part is not None:
                found[name] = encode(part)
        for held, encode in spread:
            found.update(encode(getattr(value, held)))
        for held, outer, name, encode in inner:
            part = getattr(value, held)
            if part:  # a message whose fields are all unset is left out
                found.setdefault(outer, {})[name] = encode(part)
        return found

    return Form(read_fields, write_fields)


def _field(descriptor: Any, name: str) -> Any:
    outer, _, inner = name.partition(".")
    found = descriptor.fields_by_name.get(outer)
    if found is None:
        raise TypeError(f"{descriptor.name} has no field {name}")
    return _field(found.message_type, inner) if inner else found


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type of a hint, and its annotations; those within an optional one are its own."""
    marks: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        marks = (*marks, *more)
    if get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            marks = (*marks, *_unwrapped(option)[1])
    return hint, marks


def _same(value: Any) -> Any:
    return value


def _got(name: str, decode: Read) -> Read:
    get = attrgetter(name)
    return lambda message: decode(get(message))


def _present(name: str, get: Read, otherwise: Any) -> Read:
    outer, _, last = name.rpartition(".")
    if outer:
        holder = attrgetter(outer)
        return lambda message: get(message) if holder(message).HasField(last) else otherwise
    return lambda message: get(message) if message.HasField(name) else otherwise


def _code(hint: Any, marks: tuple[Any, ...], field: Any, what: str) -> Code:
    """How the value of a field is read and written, whatever it holds."""
    for mark in marks:
        if isinstance(mark, bounded.Coded):
            return Code(*CODES[mark.name])
    if get_origin(hint) in (Union, UnionType):
        hint, more = _unwrapped(next(option for option in get_args(hint) if option is not NoneType))
        marks = (*marks, *more)
    origin = get_origin(hint)
    if origin in (dict, Mapping):
        return _mapping(hint, marks, field, what)
    if field.is_repeated:
        return _sequence(hint, marks, field, what)
    return _single(hint, marks, field, what)


def _single(hint: Any, marks: tuple[Any, ...], field: Any, what: str) -> Code:
    own = field.message_type
    if own is not None and own == field.containing_type:  # found out when there is one
        return Code(lambda message: form(hint, own).read(message), lambda value: form(hint, own).write(value))
    if own is not None:
        return Code(*_message(hint, marks, own, what))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Code(_enum(hint, _unset(marks), what), None)
    return _scalar(hint, marks, what)


def _message(hint: Any, marks: tuple[Any, ...], descriptor: Any, what: str, key: str = "") -> Form:
    """A message; of an entry of a mapping what there is beside its ``key``."""
    for mark in marks:
        if isinstance(mark, bounded.Coded):
            return CODES[mark.name]
    fields = [f for f in sorted(descriptor.fields, key=lambda f: f.number) if f.name != key]
    is_class: bool = dataclasses.is_dataclass(hint)
    if is_class and (not key or {f.name for f in dataclasses.fields(hint)} <= {f.name for f in fields}):
        return form(hint, descriptor)
    if get_origin(hint) is tuple:
        return _flat(hint, fields[: len(get_args(hint))], what)
    (value,) = fields[:1]
    code = _single(hint, marks, value, what)
    decode = attrgetter(value.name) if code.read is None else _got(value.name, code.read)
    encode = code.write
    return Form(decode, lambda held: {value.name: held if encode is None else encode(held)})


def _flat(hint: Any, fields: list[Any], what: str) -> Form:
    """A tuple whose entries are fields of a message."""
    codes = [
        (field.name, *_code(*_unwrapped(part), field, f"{what}.{field.name}"))
        for part, field in zip(get_args(hint), fields, strict=True)
    ]
    getters = [attrgetter(name) if get is None else _got(name, get) for name, get, _ in codes]
    return Form(
        lambda message: tuple([get(message) for get in getters]),
        lambda value: {
            name: held if encode is None else encode(held)
            for (name, _, encode), held in zip(codes, value, strict=True)
        },
    )


def _sequence(hint: Any, marks: tuple[Any, ...], field: Any, what: str) -> Code:
    kind, most = get_origin(hint), _most(marks)
    get, encode = _single(*_unwrapped(get_args(hint)[0]), field, what)
    once = any(isinstance(mark, bounded.Once) for mark in marks)

    def read_all(values: Any) -> Any:
        bounds.count(what, values, most)
        found = kind(values if get is None else [get(value) for value in values])
        if once and len(set(found)) < len(values):
            raise BadFrame(f"{what} names something twice")
        return found

    if kind is frozenset or any(isinstance(mark, bounded.Sorted) for mark in marks):
        return Code(read_all, sorted)
    return Code(read_all, None if encode is None else lambda values: [encode(value) for value in values])


def _mapping(hint: Any, marks: tuple[Any, ...], field: Any, what: str) -> Code:
    """A map, or a repeated message whose first field is the key."""
    key_hint, value_hint = get_args(hint)
    most, entry = _most(marks), field.message_type
    first = min(entry.fields, key=lambda f: f.number)
    check_key = _scalar(*_unwrapped(key_hint), f"name in {what}").read
    in_order = any(isinstance(mark, bounded.Sorted) for mark in marks)
    if entry.GetOptions().map_entry:
        check = _single(*_unwrapped(value_hint), entry.fields_by_name["value"], what).read

        def read_map(values: Any) -> Any:
            bounds.count(what, values, most)
            keys = sorted(values if check_key is None else map(check_key, values))
            return {key: values[key] if check is None else check(values[key]) for key in keys}

        return Code(read_map, None)
    code = _message(*_unwrapped(value_hint), entry, what, first.name)

    def read_entries(entries: Any) -> Any:
        bounds.count(what, entries, most)
        found = {}
        for each in entries:
            key = getattr(each, first.name)
            if check_key is not None:
                key = check_key(key)
            if key in found:
                raise BadFrame(f"{what}: {str(key)[:64]!r} is given twice")
            found[key] = code.read(each)
        return found

    def write_entries(values: Any) -> Any:
        keys = sorted(values) if in_order else values
        return [{first.name: key, **code.write(values[key])} for key in keys]

    return Code(read_entries, write_entries)


def _most(marks: tuple[Any, ...]) -> int:
    return next((mark.entries for mark in marks if isinstance(mark, bounded.Most)), bounded.MAX_ITEMS)


def _unset(marks: tuple[Any, ...]) -> Any:
    return next((mark.value for mark in marks if isinstance(mark, bounded.Unset)), None)


def _enum(kind: type[StrEnum], unset: Any, what: str) -> Read:
    return lambda value: bounds.one_of(what, value or unset or "", kind)


def _scalar(hint: Any, marks: tuple[Any, ...], what: str) -> Code:
    """A number, a text or bytes, with its bounds."""
    get, encode = _bound(hint, marks, what)
    unset, inner = _unset(marks), get
    zero = next((mark.value for mark in marks if isinstance(mark, bounded.ZeroIs)), None)
    if zero is not None and inner is not None:
        return Code(lambda value: inner(value) or zero, lambda value: 0 if value == zero else value)
    if unset is not None:
        if inner is None:
            return Code(lambda value: value or unset, encode)
        return Code(lambda value: inner(value or unset), encode)
    return Code(get, encode)


def _bound(hint: Any, marks: tuple[Any, ...], what: str) -> Code:
    found = [code for code in (_marked(hint, mark, what) for mark in marks) if code is not None]
    if found:
        return found[0]
    if hint is str:
        return Code(lambda value: bounds.text(what, value, bounded.MAX_TEXT_CHARS), None)
    return Code(None, None)


def _marked(hint: Any, mark: Any, what: str) -> Code | None:
    match mark:
        case bounded.Within(low, high) if hint is int:
            least, greatest = int(low), 2**64 - 1 if math.isinf(high) else int(high)
            return Code(lambda value: bounds.within(what, value, least, greatest), None)
        case bounded.Within(low, high):
            return Code(lambda value: bounds.number(what, value, low, high), None)
        case bounded.Chars(most):
            return Code(lambda value: bounds.text(what, value, most), None)
        case bounded.Plain(most, True):
            return Code(lambda value: value and bounds.name(what, value, most), None)
        case bounded.Plain(most):
            return Code(lambda value: bounds.name(what, value, most), None)
        case bounded.Clean(most):
            return Code(lambda value: clean(value, most), lambda value: value[:most])
        case bounded.Sha256(True):
            return Code(lambda value: value and bounds.blob_hash(what, value), None)
        case bounded.Sha256():
            return Code(lambda value: bounds.blob_hash(what, value), None)
        case bounded.Host(empty):
            return Code(lambda value: value if empty and not value else bounds.host(what, value), None)
        case bounded.Identifier():
            return Code(lambda value: checked_name(what, value), None)
        case bounded.Hex(n_bytes, empty):
            return Code(lambda value: bounds.digits(what, value, n_bytes, empty=empty), bytes.fromhex)
    return None
