"""Wheels taken apart by ourselves: names and sizes are looked at before a byte is written, and nothing runs.

Scripts, headers and data files are left out, and so are ``.pth`` files and compiled caches: a folder that a
program appends to its path needs none of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from atoll.errors import BadFrame, UsageError
from hostos.files.frozen_folder import CACHE, digest
from hostos.packages.pinned import Pinned, lacking, normal, parse

MAX_FILES = 50_000  # of all wheels of an app together
MAX_PATH_CHARS = 400
_CHUNK_BYTES = 1 << 20
_PLACED = ("purelib", "platlib")  # what of NAME.data belongs beside the modules
_CODE = re.compile(r"\.(py|pyc|pyd|so)$|\.(cpython|abi3|cp\d)[^/]*\.(so|pyd)$")


def chosen(folder: Path, packages: Sequence[Pinned]) -> list[Path]:
    """Return the wheels in ``folder``, one a package, in the packages' order; each has one of its hashes.

    Raises BadFrame for a file that is none of them, or a package without one; OSError.
    """
    by_name = {package.name: package for package in packages}
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = normal(path.name.split("-")[0])
        package = by_name.get(name)
        if package is None or path.suffix != ".whl" or path.is_symlink() or name in found:
            raise BadFrame(f"{path.name[:80]!r} is not a wheel of the app's packages")
        if digest(path) not in package.hashes:
            raise BadFrame(f"{path.name[:80]!r} has none of the hashes that the app gives for {package}")
        found[name] = path
    if absent := [str(package) for package in packages if package.name not in found]:
        raise BadFrame(f"no wheel of {absent[0]}")
    return [found[package.name] for package in packages]


def unpack(wheels: Sequence[Path], most_bytes: int, into: Path | None = None) -> dict[str, tuple[int, str]]:
    """Write the wheels' modules below ``into``; returns path -> size in bytes and SHA-256. None: only those.

    Raises BadFrame for a name that leads outside, a link, a file that two wheels hold, or more than
    ``most_bytes`` or MAX_FILES in all; OSError.
    """
    files: dict[str, tuple[int, str]] = {}
    lower: set[str] = set()
    left = most_bytes
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                entries = dict(_placed(archive, wheel.name))
                left -= sum(entry.file_size for entry in entries.values())
                if left < 0 or len(files) + len(entries) > MAX_FILES:
                    raise BadFrame(
                        f"{wheel.name[:80]}: the app's packages take more than {most_bytes} bytes or "
                        f"{MAX_FILES} files unpacked"
                    )
                for name, entry in entries.items():
                    fact = _write(
                        archive, entry, into / name if into is not None and name not in files else None
                    )
                    if files.get(name, fact) != fact or (name not in files and name.lower() in lower):
                        raise BadFrame(f"{wheel.name[:80]}: {name[:80]!r} is another wheel's already")
                    files[name] = fact
                    lower.add(name.lower())
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            ValueError,
            RuntimeError,
        ) as error:
            raise BadFrame(f"{wheel.name[:80]} is not a readable wheel: {str(error)[:200]}") from None
    return files


def _placed(archive: zipfile.ZipFile, wheel: str) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """What of a wheel is unpacked, by where it goes."""
    for entry in archive.infolist():
        name = entry.filename
        path = PurePosixPath(name)
        mode = entry.external_attr >> 16
        odd = (
            len(name) > MAX_PATH_CHARS
            or not name.isprintable()
            or path.is_absolute()
            or path.as_posix() != name.removesuffix("/")
            or any(part in ("..", ".") or "\\" in part or ":" in part for part in path.parts)
        )
        packed = entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if odd or packed or stat.S_ISLNK(mode) or entry.flag_bits & 1:
            raise BadFrame(f"{wheel[:80]} holds {name[:80]!r}, which is not a plain file inside it")
        if entry.is_dir() or CACHE in path.parts or path.suffix == ".pth":
            continue
        if path.parts[0].endswith(".data"):
            if len(path.parts) < 3 or path.parts[1] not in _PLACED:
                continue
            path = PurePosixPath(*path.parts[2:])
        yield path.as_posix(), entry


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path | None) -> tuple[int, str]:
    found, size = hashlib.sha256(), 0
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with archive.open(entry) as source:
        target = path.open("xb") if path is not None else None
        try:
            while piece := source.read(_CHUNK_BYTES):
                size += len(piece)
                found.update(piece)
                if target is not None:
                    target.write(piece)
        finally:
            if target is not None:
                target.close()
    return size, found.hexdigest()


def table_of(folder: Path) -> str:
    """Return the wheels of a folder as ``[tool.atoll.packages]``, without what is installed in that version.

    UsageError where there is none, or two versions of one.
    """
    hashes: dict[tuple[str, str], list[str]] = {}
    try:
        for path in sorted(folder.glob("*.whl")):
            name, version = path.name.split("-")[:2]
            hashes.setdefault((normal(name), version), []).append(digest(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from None
    if not hashes:
        raise UsageError(
            f"{folder} holds no wheel; `pip download --only-binary :all: -d {folder} NAME` gets some"
        )
    table = {name: {"version": version, "sha256": found} for (name, version), found in hashes.items()}
    if len(table) < len(hashes):
        raise UsageError(f"{folder} holds two versions of a package; leave one")
    lines = [
        f'{package.name} = {{ version = "{package.version}", sha256 = {json.dumps(list(package.hashes))} }}\n'
        for package in lacking(parse(table, str(folder)))
    ]
    return "[tool.atoll.packages]\n" + "".join(lines)


def shadowing(files: Mapping[str, object]) -> str:
    """Return a module at the wheels' root that this installation or Python has too, "" where there is none.

    A namespace package of this installation may grow, as long as no wheel makes a plain package of it.
    """
    for name in sorted({path.split("/")[0].split(".")[0] for path in files if _is_code(path)}):
        if name in sys.stdlib_module_names:
            return name
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None:
            continue
        namespace = spec.origin is None and spec.submodule_search_locations is not None
        own = any(path.startswith((f"{name}/__init__.", f"{name}.")) for path in files)
        if not namespace or own:
            return name
    return ""


def _is_code(path: str) -> bool:
    folder = path.split("/")[0]
    return not folder.endswith((".dist-info", ".data", ".libs")) and bool(_CODE.search(path))
