"""Schema of a data set as its owner writes it, a line for each field: its source and its transforms.

    FIELD[:TYPE] = SOURCE [| TRANSFORM]...

    image:float32[1,28,28] = train-images-idx3-ubyte | scale:1/255
    label:int64 = train-labels-idx1-ubyte
    x:float32[4] = age,height..weight | normalise:50,20
    y:int64 = outcome | classes:well,ill
    tokens:int64[128] = windows:128

TYPE is what the field must be in the end: a dtype, and the shape of one sample in brackets. Values are
converted to it and refused where they do not fit. What SOURCE means depends on the file's format
(``sources``); transforms are those of ``transforms``. Nothing here is code of the owner's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.federated import MAX_FIELDS
from worker.data.transforms import DTYPES, Transform, parse_shape, parse_transform

MAX_LINE_CHARS = 16_384
MAX_TRANSFORMS = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TYPE = re.compile(r"([a-z]+[0-9]*)\s*(?:\[([0-9,\s]*)\])?")
_FORM = "write FIELD:TYPE=SOURCE|TRANSFORM, for example 'x:float32[784]=pixels|scale:1/255'"


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """A field. ``dtype`` "" and ``shape`` None: as source and transforms leave it."""

    name: str
    source: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    transforms: tuple[Transform, ...] = ()
    text: str = ""  # the line as given


def parse_schema(lines: Iterable[str]) -> tuple[FieldSchema, ...]:
    """Return the fields of all lines, in order; empty lines and comments after # are skipped.

    UsageError names the field or line that cannot be used, and what would do.
    """
    fields = [parse_field(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(fields) <= MAX_FIELDS:
        raise UsageError(f"a schema of {len(fields)} fields; give 1 to {MAX_FIELDS}: {_FORM}")
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"field {twice[0]!r} is declared {names.count(twice[0])} times; name each once")
    return tuple(fields)


def parse_field(line: str) -> FieldSchema:
    """Parse a line of a schema; UsageError where it is none."""
    text = line.strip()
    if len(text) > MAX_LINE_CHARS:
        raise UsageError(f"a schema line of {len(text)} characters; at most {MAX_LINE_CHARS}")
    left, equals, right = text.partition("=")
    name, colon, kind = (part.strip() for part in left.partition(":"))
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(f"schema line {text[:80]!r}; {_FORM}")
    source, *steps = (part.strip() for part in right.split("|"))
    if not source:
        raise UsageError(f"field {name!r} names no source after '='; {_FORM}")
    if len(steps) > MAX_TRANSFORMS:
        raise UsageError(f"field {name!r} has {len(steps)} transforms; at most {MAX_TRANSFORMS}")
    dtype, shape = _parse_type(name, kind) if colon else ("", None)
    return FieldSchema(name, source, dtype, shape, tuple(parse_transform(name, s) for s in steps), text)


def _parse_type(name: str, text: str) -> tuple[str, tuple[int, ...] | None]:
    match = _TYPE.fullmatch(text)
    if match is None or match[1] not in DTYPES:
        raise UsageError(
            f"field {name!r} has type {text[:40]!r}; write one of {', '.join(DTYPES)}, "
            "with the sample's shape in brackets: float32[1,28,28]"
        )
    if match[2] is None:
        return match[1], None
    return match[1], parse_shape(name, match[2])


def sources_of(fields: Sequence[FieldSchema]) -> tuple[str, ...]:
    """Every source once, in order."""
    return tuple(dict.fromkeys(field.source for field in fields))
