"""Checks on what a peer sent: every count, length, number and name has a bound.

Each check returns the value it was given or raises BadFrame with the numbers; the caller closes
the connection or refuses the call, and the run goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sized
from enum import StrEnum
from ipaddress import ip_address
from typing import TypeVar

from atoll.bounded import MAX_NAME_CHARS
from atoll.errors import BadFrame
from protos.text_limits import plain

_HASH = re.compile(r"[0-9a-f]{64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_HOST_CHARS = 255
_S = TypeVar("_S", bound=Sized)
_E = TypeVar("_E", bound=StrEnum)


def text(what: str, value: str, limit: int) -> str:
    """``value`` when it has at most ``limit`` characters."""
    if len(value) > limit:
        raise BadFrame(f"{what} has {len(value)} characters; at most {limit} are accepted")
    return value


def name(what: str, value: str, most: int = MAX_NAME_CHARS) -> str:
    """A non-empty name of bounded length that may be shown as it is."""
    if not value:
        raise BadFrame(f"{what} is empty")
    text(what, value, most)
    if not plain(value):
        raise BadFrame(f"{what} {value[:80]!r} holds control characters")
    return value


def host(what: str, value: str) -> str:
    """An IP address or a DNS name, and nothing else that gRPC would dial, such as unix:/path."""
    text(what, value, MAX_HOST_CHARS)
    if _HOST_NAME.fullmatch(value):
        return value
    try:
        ip_address(value)
    except ValueError:
        raise BadFrame(f"{what} {value[:80]!r} is neither an address nor a name") from None
    return value


def count(what: str, items: _S, limit: int) -> _S:
    """``items`` when there are at most ``limit`` of them."""
    if len(items) > limit:
        raise BadFrame(f"{what}: {len(items)} entries; at most {limit} are accepted")
    return items


def within(what: str, value: int, low: int, high: int) -> int:
    """``value`` when low <= value <= high."""
    if not low <= value <= high:
        raise BadFrame(f"{what} = {value}; {low} to {high} are accepted")
    return value


def number(what: str, value: float, low: float = 0.0, high: float = math.inf) -> float:
    """A finite number with low <= value <= high."""
    if not math.isfinite(value) or not low <= value <= high:
        raise BadFrame(f"{what} = {value}; a finite number from {low} to {high} is accepted")
    return value


def one_of(what: str, value: str, kind: type[_E]) -> _E:
    """The member of ``kind`` called ``value``."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise BadFrame(f"{what} {value[:64]!r} is unknown; known are {known}") from None


def blob_hash(what: str, value: str) -> str:
    """A sha256 in 64 lower-case hexadecimal digits."""
    if _HASH.fullmatch(value) is None:
        raise BadFrame(f"{what} {value[:80]!r} is not a sha256 in 64 hexadecimal digits")
    return value


def digits(what: str, value: bytes, n_bytes: int, *, empty: bool = False) -> str:
    """``n_bytes`` bytes, or with ``empty`` none, in hexadecimal digits."""
    if len(value) != n_bytes and not (empty and not value):
        raise BadFrame(f"{what} of {len(value)} bytes, not {n_bytes}")
    return value.hex()
