"""Members of the archives that registries hand out: npm's and Python's packages, Debian's.

An archive is one whose hash was checked before; nothing in it is run.
"""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from stat import S_ISLNK
from typing import IO

from atoll.errors import UsageError

_AR, _AR_HEADER, _AR_END = b"!<arch>\n", 60, b"`\n"
UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, EOFError, LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Member:
    """Something in an archive; ``size`` -1: no plain file."""

    name: str
    size: int
    open: Callable[[], IO[bytes] | None]


def members(path: Path) -> Iterator[Member]:
    """Yield what a .tgz, .whl or .deb holds, in the archive's order.

    UsageError, or one of ``UNREADABLE``, for what is no such archive.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield from _zipped(archive)
    elif path.suffix == ".deb":
        with tarfile.open(fileobj=BytesIO(_data_of(path)), mode="r:*") as tar:
            yield from _packed(tar)
    else:
        with tarfile.open(path, "r:gz") as tar:
            yield from _packed(tar)


def _packed(archive: tarfile.TarFile) -> Iterator[Member]:
    for entry in archive:
        size = entry.size if entry.isreg() else -1
        yield Member(entry.name.removeprefix("./"), size, partial(archive.extractfile, entry))


def _zipped(archive: zipfile.ZipFile) -> Iterator[Member]:
    for entry in archive.infolist():
        plain = not entry.is_dir() and not S_ISLNK(entry.external_attr >> 16)
        size = entry.file_size if plain else -1
        yield Member(entry.filename, size, partial(archive.open, entry))


def _data_of(path: Path) -> bytes:
    """The member of a Debian package that holds its files."""
    data = path.read_bytes()
    if not data.startswith(_AR):
        raise UsageError(f"{path.name} is not a Debian package")
    at = len(_AR)
    while at + _AR_HEADER <= len(data):
        name, size = (
            data[at : at + 16].decode("ascii", "replace").strip(" /"),
            data[at + 48 : at + 58].strip(),
        )
        if data[at + 58 : at + 60] != _AR_END or not size.isdigit():
            break
        begin = at + _AR_HEADER
        if name.startswith("data.tar"):
            return data[begin : begin + int(size)]
        at = begin + int(size) + int(size) % 2
    raise UsageError(f"{path.name} is a damaged Debian package")
