"""Packages that an app declares: exact versions and the hashes of wheels, with no room for anything else.

    [tool.atoll.packages]
    tinymath = { version = "1.0", sha256 = ["9f2c..."] }

A table and no requirements file: options, addresses, paths, extras and markers have no place here.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from atoll.errors import UsageError

MAX_PACKAGES = 64
MAX_HASHES = 64  # of one package: a wheel for each platform and Python
EXAMPLE = 'write NAME = { version = "1.0", sha256 = ["64 hexadecimal digits of a wheel"] }'
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
_VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([._][a-z0-9]+)*)?", re.ASCII
)
_HASH = re.compile(r"[0-9a-f]{64}")
_VERSION_CHARS = 64


@dataclass(frozen=True, slots=True, order=True)
class Pinned:
    """One package; ``name`` is normalised, ``hashes`` are SHA-256 of the wheels that may be it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def normal(name: str) -> str:
    """Return a project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(table: Mapping[str, Any], where: str) -> tuple[Pinned, ...]:
    """The packages of a ``[tool.atoll.packages]`` table, by name. UsageError names ``where``."""
    if len(table) > MAX_PACKAGES:
        raise UsageError(f"{where}: {len(table)} packages; at most {MAX_PACKAGES} are possible")
    found = sorted(_package(name, facts, where) for name, facts in table.items())
    names = [package.name for package in found]
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise UsageError(f"{where}: package {twice[0]} is listed twice")
    return tuple(found)


def _package(name: str, facts: Any, where: str) -> Pinned:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name[:80]!r} is not a package name; {EXAMPLE}")
    if not isinstance(facts, dict) or facts.keys() != {"version", "sha256"}:
        raise UsageError(f"{where}: package {name}: {EXAMPLE}, and nothing else")
    number, hashes = facts["version"], facts["sha256"]
    if not isinstance(number, str) or len(number) > _VERSION_CHARS or not _VERSION.fullmatch(number):
        raise UsageError(f"{where}: package {name}: {str(number)[:80]!r} is not an exact version; {EXAMPLE}")
    if not isinstance(hashes, list) or not 1 <= len(hashes) <= MAX_HASHES:
        raise UsageError(f"{where}: package {name}: 1 to {MAX_HASHES} hashes of wheels; {EXAMPLE}")
    for digest in hashes:
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise UsageError(f"{where}: package {name}: {str(digest)[:80]!r} is not a SHA-256; {EXAMPLE}")
    return Pinned(normal(name), number, tuple(sorted(set(hashes))))


def lacking(packages: Iterable[Pinned]) -> list[Pinned]:
    """Return those that this installation does not have. UsageError where it has another version of one.

    What is installed is never replaced: of two versions an app would get one, and Atoll may need the other.
    """
    found = []
    for package in packages:
        try:
            here = version(package.name)
        except PackageNotFoundError:
            found.append(package)
            continue
        if here != package.version and here.split("+")[0] != package.version:
            raise UsageError(
                f"the app pins {package}, and {here} is installed there, which is never replaced; pin "
                f"{here}, or leave it out of [tool.atoll.packages]"
            )
    return found


def requirements(packages: Sequence[Pinned]) -> str:
    """Return the lines that pip reads, each of an exact version and its hashes."""
    return "".join(
        f"{package.name}=={package.version} "
        + " ".join(f"--hash=sha256:{digest}" for digest in package.hashes)
        + "\n"
        for package in packages
    )


def key(packages: Sequence[Pinned]) -> str:
    """Return the hash of a list of packages on this Python and platform, 64 hexadecimal digits."""
    place = [sys.implementation.name, list(sys.version_info[:2]), sysconfig.get_platform()]
    listed = [[package.name, package.version, list(package.hashes)] for package in sorted(packages)]
    return hashlib.sha256(json.dumps([place, listed]).encode()).hexdigest()
