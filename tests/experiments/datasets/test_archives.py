"""Packages of three registries are archives of three kinds, and what is not a plain file is refused."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from atoll.errors import UsageError
from experiments.datasets.archives import UNREADABLE, members

DATA = b"ratings"


def packed(mode: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as tar:  # type: ignore[call-overload]
        entry = tarfile.TarInfo("./usr/lib/data")
        entry.size = len(DATA)
        tar.addfile(entry, io.BytesIO(DATA))
        link = tarfile.TarInfo("./usr/lib/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return made.getvalue()


def ar(*parts: tuple[str, bytes]) -> bytes:
    found = b"!<arch>\n"
    for name, data in parts:
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
        found += data + b"\n" * (len(data) % 2)
    return found


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("usr/lib/data", DATA)
        link = zipfile.ZipInfo("usr/lib/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return made.getvalue()


ARCHIVES = {
    "a.tgz": packed("w:gz"),
    "a.whl": zipped(),
    "a.deb": ar(("debian-binary", b"2.0\n1"), ("control.tar.xz", b"odd"), ("data.tar.xz", packed("w:xz"))),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_plain_files_are_read_and_links_are_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(ARCHIVES[name])
    found = {}
    for member in members(path):
        source = member.open() if member.size >= 0 else None
        found[member.name] = (member.size, source.read() if source is not None else None)
    assert found == {"usr/lib/data": (len(DATA), DATA), "usr/lib/link": (-1, None)}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("keep", [0, 4, 40, 100])
def test_a_cut_archive_is_an_error_that_is_expected(name: str, keep: int, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(ARCHIVES[name][:keep])

    def read() -> None:
        for member in members(path):
            source = member.open()
            if source is not None:
                source.read()

    with pytest.raises((UsageError, *UNREADABLE)):
        read()
