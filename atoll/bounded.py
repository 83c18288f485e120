"""Annotations of fields that travel: what is accepted of a field, and where in its message it stands.

    step: Annotated[int, Within(0, MAX_STEP)]

A frozen dataclass whose fields have the names of its message's needs no more than these: ``protos.coding``
reads and writes it by its type hints. What is not annotated is bounded as well: a text has at most
``MAX_TEXT_CHARS``, a collection at most ``MAX_ITEMS`` entries, a number what its type in the message holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

MAX_NAME_CHARS = 1024
MAX_TEXT_CHARS = 16_384
MAX_ITEMS = 100_000  # entries of any collection that has no bound of its own
MAX_OPS = 200_000
MAX_ARGS = 4096  # of one op, and of one nested tuple
MAX_STAGES = 4096
MAX_DIMS = 16  # of a tensor
MAX_TENSOR_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Within:
    """A number from ``low`` to ``high``; a float is finite as well."""

    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Most:
    """A collection of at most so many entries."""

    entries: int


@dataclass(frozen=True, slots=True)
class Chars:
    """A text of at most so many characters."""

    most: int


@dataclass(frozen=True, slots=True)
class Plain:
    """A text of at most so many characters that may be shown as it is; not empty unless ``empty``."""

    most: int = MAX_NAME_CHARS
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Clean:
    """A text for people: cut at so many characters at both ends, control characters become spaces."""

    most: int


@dataclass(frozen=True, slots=True)
class Sha256:
    """64 lower-case hexadecimal digits, or with ``empty`` none."""

    empty: bool = False


@dataclass(frozen=True, slots=True)
class Hex:
    """So many bytes that are kept as a text of digits; with ``empty`` perhaps none."""

    n_bytes: int
    empty: bool = False


@dataclass(frozen=True, slots=True)
class At:
    """Name of the field in its message, where that has another; of a tuple a name for each of its entries."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, slots=True)
class Inline:
    """A dataclass whose fields are fields of the same message."""


@dataclass(frozen=True, slots=True)
class Unset:
    """What an unset field stands for."""

    value: Any


@dataclass(frozen=True, slots=True)
class ZeroIs:
    """What a 0 stands for that was accepted; it is written as 0."""

    value: Any


@dataclass(frozen=True, slots=True)
class Host:
    """An address or a DNS name, or with ``empty`` none."""

    empty: bool = False


@dataclass(frozen=True, slots=True)
class Identifier:
    """1 to 64 letters, digits, ``_ . -`` that begin with a letter or ``_``."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """A collection that is written in order, a mapping by its keys: equal values have equal bytes."""


@dataclass(frozen=True, slots=True)
class Once:
    """A collection that names nothing twice."""


@dataclass(frozen=True, slots=True)
class Coded:
    """A field that has a reader and a writer of its own, by this name in ``protos.coding``."""

    name: str


@dataclass(frozen=True, slots=True)
class Unsent:
    """A field that stays here."""


Name = Annotated[str, Plain()]
OptionalName = Annotated[str, Plain(empty=True)]
Blob = Annotated[str, Sha256()]
OptionalBlob = Annotated[str, Sha256(empty=True)]
Version = Annotated[int, At("plan_version")]
OptionalHost = Annotated[str, Host(empty=True)]
Port = Annotated[int, Within(1, 65_535)]
ClientName = Annotated[str, Identifier()]
Amount = Annotated[float, Within()]
Share = Annotated[float, Within(0.0, 1.0)]
